//! Work that was queued on a GPU.

use std::sync::Arc;

use super::exchange::Exchange;
use super::held::{Group, HeldRows};
use crate::error::OpError;
use crate::fast_device::{HeldRun, PendingFfn};
use crate::ffn::FfnCounts;

/// Work under way. The rows stay until it has been waited for or given up, and on the stream their
/// memory is freed behind it.
#[derive(Debug)]
pub(super) struct CudaPending {
    rows: Arc<HeldRows>,
    /// There until this is dropped.
    exchange: Option<Exchange>,
    groups: Vec<Group>,
    len: usize,
}

impl CudaPending {
    pub(super) fn new(
        rows: Arc<HeldRows>,
        exchange: Exchange,
        groups: Vec<Group>,
        len: usize,
    ) -> Self {
        Self { rows, exchange: Some(exchange), groups, len }
    }
}

impl PendingFfn for CudaPending {
    fn wait(self: Box<Self>, y: &mut [f32]) -> Result<HeldRun, OpError> {
        OpError::check_shape("PendingFfn::wait", "y", &[self.len], &[y.len()])?;
        let mut counts = FfnCounts::default();
        let Some(exchange) = &self.exchange else { return Ok(HeldRun::default()) };
        let failed = |error| self.rows.shared.failed(error);
        let lists = exchange.groups(self.groups.len()).map_err(failed)?;
        for (lists, group) in lists.into_iter().zip(&self.groups) {
            counts.add(self.rows.counts(lists, *group));
        }
        exchange.add_to(y).map_err(failed)?;
        Ok(HeldRun::new(counts, exchange.busy_ns()))
    }
}

impl Drop for CudaPending {
    fn drop(&mut self) {
        if let Some(exchange) = self.exchange.take() {
            self.rows.shared.return_exchange(exchange);
        }
    }
}
