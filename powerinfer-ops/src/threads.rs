//! The worker threads of one engine.

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::thread::available_parallelism;

use crate::error::OpError;

/// More threads than any machine these operators help has cores. Starting tens of thousands takes
/// minutes, which looks like a hang.
const MAX_THREADS: usize = 1024;

/// A pool of worker threads; cloning shares it.
///
/// Whatever runs inside [`install`](Self::install) uses these threads and no others. Operators
/// called outside of any pool use rayon's global one.
///
/// # Examples
/// ```
/// use std::num::NonZeroUsize;
/// use powerinfer_ops::ThreadPool;
/// let pool = ThreadPool::new(NonZeroUsize::new(2))?;
/// assert_eq!(pool.n_threads(), 2);
/// assert_eq!(pool.install(|| 6 * 7), 42);
/// # Ok::<(), powerinfer_ops::OpError>(())
/// ```
#[derive(Debug, Clone)]
pub struct ThreadPool(Arc<rayon::ThreadPool>);

impl ThreadPool {
    /// Starts `n_threads` workers, or as many as the system says it can run at once.
    ///
    /// # Errors
    /// [`OpError::ThreadCount`] for more than 1024, [`OpError::ThreadPool`] if the system refuses the
    /// threads.
    pub fn new(n_threads: Option<NonZeroUsize>) -> Result<Self, OpError> {
        Self::named("powerinfer", n_threads)
    }

    /// [`new`](Self::new) with threads of another name.
    pub(crate) fn named(
        name: &'static str,
        n_threads: Option<NonZeroUsize>,
    ) -> Result<Self, OpError> {
        if let Some(found) = n_threads.map(usize::from).filter(|&found| found > MAX_THREADS) {
            return Err(OpError::ThreadCount { found, max: MAX_THREADS });
        }
        let available = || available_parallelism().ok();
        let n_threads = n_threads.or_else(available).map_or(1, usize::from).min(MAX_THREADS);
        rayon::ThreadPoolBuilder::new()
            .num_threads(n_threads)
            .thread_name(move |index| format!("{name}-{index}"))
            .build()
            .map(|pool| Self(Arc::new(pool)))
            .map_err(|source| OpError::ThreadPool { n_threads, source })
    }

    /// How many workers there are.
    #[must_use]
    pub fn n_threads(&self) -> usize {
        self.0.current_num_threads()
    }

    /// Gives `work` to the pool.
    pub(crate) fn spawn(&self, work: impl FnOnce() + Send + 'static) {
        self.0.spawn(work);
    }

    /// Runs `work` on the pool and waits for it.
    ///
    /// # Panics
    /// If `work` panics, with its panic.
    pub fn install<R: Send>(&self, work: impl FnOnce() -> R + Send) -> R {
        self.0.install(work)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn absurd_numbers_of_threads_are_refused_at_once() {
        for found in [MAX_THREADS + 1, usize::MAX] {
            let pool = ThreadPool::new(NonZeroUsize::new(found));
            assert!(matches!(pool, Err(OpError::ThreadCount { max: MAX_THREADS, .. })));
        }
    }
}
