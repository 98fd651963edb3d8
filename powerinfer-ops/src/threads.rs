//! The worker threads of one engine.

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::thread::available_parallelism;

use crate::error::OpError;

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
    /// [`OpError::ThreadPool`] if the system refuses the threads.
    pub fn new(n_threads: Option<NonZeroUsize>) -> Result<Self, OpError> {
        let n_threads = n_threads.or_else(|| available_parallelism().ok()).map_or(1, usize::from);
        rayon::ThreadPoolBuilder::new()
            .num_threads(n_threads)
            .thread_name(|index| format!("powerinfer-{index}"))
            .build()
            .map(|pool| Self(Arc::new(pool)))
            .map_err(|source| OpError::ThreadPool { n_threads, source })
    }

    /// How many workers there are.
    #[must_use]
    pub fn n_threads(&self) -> usize {
        self.0.current_num_threads()
    }

    /// Runs `work` on the pool and waits for it.
    ///
    /// # Panics
    /// If `work` panics, with its panic.
    pub fn install<R: Send>(&self, work: impl FnOnce() -> R + Send) -> R {
        self.0.install(work)
    }
}
