//! How fast this machine reads memory: the yardstick of every speed figure.

use std::time::Instant;

use rayon::prelude::*;

use crate::bytes::AlignedBytes;
use crate::cpu::RowKernels;
use crate::error::OpError;
use crate::threads::ThreadPool;

/// What a measurement of the read bandwidth found.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct ReadBandwidth {
    /// Bytes read per second in the best pass.
    pub bytes_per_second: f64,
    /// The kind of memory pages, the same as weights of that size get.
    pub page_kind: &'static str,
}

/// Reads `bytes` of freshly written memory `passes` times with the widest loads, each thread of
/// `pool` its own part, and returns the best pass.
///
/// # Errors
/// [`OpError::Allocation`] if the memory is not to be had.
///
/// # Examples
/// ```
/// use powerinfer_ops::{ThreadPool, read_bandwidth};
/// let found = read_bandwidth(&ThreadPool::new(None)?, 1 << 20, 2)?;
/// assert!(found.bytes_per_second > 0.0);
/// # Ok::<(), powerinfer_ops::OpError>(())
/// ```
pub fn read_bandwidth(
    pool: &ThreadPool,
    bytes: usize,
    passes: usize,
) -> Result<ReadBandwidth, OpError> {
    let mut memory = AlignedBytes::zeroed(bytes)?;
    let fold = RowKernels::best().table().fold;
    pool.install(|| {
        let part = bytes.div_ceil(pool.n_threads()).next_multiple_of(1 << 12).max(1 << 12);
        // Every page is written: pages that were only asked for are all one zero page.
        memory.as_mut_slice().par_chunks_mut(part).for_each(|part| part.fill(0x5A));
        let mut best = f64::INFINITY;
        for _ in 0..passes.max(1) {
            let start = Instant::now();
            let folds = memory.as_slice().par_chunks(part).map(fold).reduce(|| 0, |a, b| a ^ b);
            std::hint::black_box(folds);
            best = best.min(start.elapsed().as_secs_f64());
        }
        let page_kind = memory.page_kind();
        Ok(ReadBandwidth { bytes_per_second: bytes as f64 / best, page_kind })
    })
}
