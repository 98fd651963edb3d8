//! Telling somebody how far a load has come.

use std::fmt;
use std::sync::Arc;

type Tell = dyn Fn(u64, u64) + Send + Sync;

/// Is told how far a load has come, tensor by tensor, by the thread that loads.
///
/// # Examples
/// ```
/// use std::sync::atomic::{AtomicU64, Ordering};
/// use powerinfer_core::LoadProgress;
///
/// static PERCENT: AtomicU64 = AtomicU64::new(0);
/// let progress = LoadProgress::new(|done_bytes, total_bytes| {
///     PERCENT.store(100 * done_bytes / total_bytes.max(1), Ordering::Relaxed);
/// });
/// progress.tell(30, 40);
/// assert_eq!(PERCENT.load(Ordering::Relaxed), 75);
/// ```
#[derive(Clone)]
pub struct LoadProgress(Arc<Tell>);

impl LoadProgress {
    /// Has `tell` called with the bytes that were read so far and those of all tensors that are
    /// wanted, as the files hold them.
    pub fn new(tell: impl Fn(u64, u64) + Send + Sync + 'static) -> Self {
        Self(Arc::new(tell))
    }

    /// Says that `done_bytes` of `total_bytes` have been read.
    pub fn tell(&self, done_bytes: u64, total_bytes: u64) {
        (self.0)(done_bytes, total_bytes);
    }
}

impl fmt::Debug for LoadProgress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("LoadProgress")
    }
}
