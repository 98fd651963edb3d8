//! Work that was queued on a device.

use std::sync::Arc;

use super::backend::Backend;
use super::exchange::Exchange;
use super::held::HeldRows;
use super::network::Group;
use crate::check::check_shape;
use crate::{FfnCounts, HeldRun, OpError, PendingFfn};

/// Work under way. The rows stay until it has been waited for or given up, and their memory is freed
/// behind it.
#[derive(Debug)]
pub(crate) struct GpuPending<B: Backend> {
    rows: Arc<HeldRows<B>>,
    /// There until this is dropped.
    exchange: Option<Exchange<B>>,
    groups: Vec<Group>,
    len: usize,
}

impl<B: Backend> GpuPending<B> {
    pub(crate) fn new(
        rows: Arc<HeldRows<B>>,
        exchange: Exchange<B>,
        groups: Vec<Group>,
        len: usize,
    ) -> Self {
        Self { rows, exchange: Some(exchange), groups, len }
    }

    /// What was done. Waits for it.
    pub(crate) fn run(&mut self) -> Result<HeldRun, OpError> {
        let mut counts = FfnCounts::default();
        let Some(exchange) = &mut self.exchange else { return Ok(HeldRun::default()) };
        let shared = &self.rows.shared;
        let lists = exchange.groups(self.groups.len()).map_err(|error| shared.failed(error))?;
        for (lists, group) in lists.into_iter().zip(&self.groups) {
            self.rows.count(lists, *group, &mut counts);
        }
        Ok(HeldRun::new(counts, exchange.busy_ns(&shared.backend)))
    }
}

impl<B: Backend> PendingFfn for GpuPending<B> {
    fn wait(mut self: Box<Self>, y: &mut [f32]) -> Result<HeldRun, OpError> {
        check_shape("PendingFfn::wait", "y", &[self.len], &[y.len()])?;
        let run = self.run()?;
        if let Some(exchange) = &mut self.exchange {
            exchange.add_to(y).map_err(|error| self.rows.shared.failed(error))?;
        }
        Ok(run)
    }
}

impl<B: Backend> Drop for GpuPending<B> {
    fn drop(&mut self) {
        if let Some(exchange) = self.exchange.take() {
            self.rows.shared.return_exchange(exchange);
        }
    }
}
