//! The caller's own say in which token comes next.

use std::fmt;
use std::sync::Arc;

type Change = dyn Fn(&[u32], &mut [f32]) + Send + Sync;

/// A function that changes logits before a token is chosen from them.
///
/// It gets the tokens so far, prompt included, and the logits `[vocab_size]` that follow them. Raise
/// or lower what it likes, forbid a token with −∞; a sampler of one's own leaves a single token above
/// −∞. What it makes must be something that a token can be chosen from:
/// [`Error::NonFiniteLogits`](crate::Error::NonFiniteLogits) otherwise. Bias, penalty and temperature
/// of [`Sampling`](crate::Sampling) apply to what it leaves.
///
/// # Examples
/// ```
/// use powerinfer_core::LogitsHook;
///
/// let never_twice = LogitsHook::new(|so_far, logits| {
///     if let Some(&last) = so_far.last() {
///         logits[last as usize] = f32::NEG_INFINITY;
///     }
/// });
/// let mut logits = [1.0, 2.0];
/// never_twice.apply(&[0, 1], &mut logits);
/// assert_eq!(logits, [1.0, f32::NEG_INFINITY]);
/// ```
#[derive(Clone)]
pub struct LogitsHook(Arc<Change>);

impl LogitsHook {
    /// A hook that calls `change`. It runs on a thread of the engine's pool.
    pub fn new(change: impl Fn(&[u32], &mut [f32]) + Send + Sync + 'static) -> Self {
        Self(Arc::new(change))
    }

    /// Changes `logits` `[vocab_size]`, which follow the tokens `so_far`.
    pub fn apply(&self, so_far: &[u32], logits: &mut [f32]) {
        (self.0)(so_far, logits);
    }
}

/// Hooks are equal if they are clones of one.
impl PartialEq for LogitsHook {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl fmt::Debug for LogitsHook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("LogitsHook")
    }
}
