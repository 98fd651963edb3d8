//! Stopping work from another thread.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::error::{Error, Result};

/// Stops a load or a request from anywhere: clones share one flag, which is looked at before each
/// layer of a forward pass and before each tensor of a load.
///
/// Once cancelled it stays so; the next request takes a new one. The default one is not shared with
/// anybody and so never cancels.
///
/// # Examples
/// ```
/// use powerinfer_core::{CancelToken, Error};
///
/// let token = CancelToken::default();
/// let elsewhere = token.clone();
/// assert!(token.check().is_ok());
/// std::thread::spawn(move || elsewhere.cancel()).join().expect("the thread does not panic");
/// assert!(token.is_cancelled());
/// assert!(matches!(token.check(), Err(Error::Cancelled)));
/// ```
#[derive(Debug, Clone, Default)]
pub struct CancelToken(Arc<Flag>);

#[derive(Debug, Default)]
struct Flag {
    is_set: AtomicBool,
    parent: Option<CancelToken>,
}

impl CancelToken {
    /// A token that nobody has cancelled.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// A token that this one cancels, too, and that can be cancelled on its own: for one of several
    /// requests that are stopped together.
    #[must_use]
    pub fn child(&self) -> Self {
        Self(Arc::new(Flag { is_set: AtomicBool::new(false), parent: Some(self.clone()) }))
    }

    /// Stops whatever works under this token, now or later.
    pub fn cancel(&self) {
        self.0.is_set.store(true, Ordering::Relaxed);
    }

    /// Whether somebody has cancelled.
    #[must_use]
    pub fn is_cancelled(&self) -> bool {
        let parent = self.0.parent.as_ref();
        self.0.is_set.load(Ordering::Relaxed) || parent.is_some_and(Self::is_cancelled)
    }

    /// For work of one's own: an error as soon as somebody has cancelled.
    ///
    /// # Errors
    /// [`Error::Cancelled`].
    pub fn check(&self) -> Result<()> {
        if self.is_cancelled() { Err(Error::Cancelled) } else { Ok(()) }
    }
}

/// Tokens are equal if they share their flag.
impl PartialEq for CancelToken {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for CancelToken {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_is_cancelled_by_its_parent_and_not_the_other_way() {
        let parent = CancelToken::new();
        let (one, other) = (parent.child(), parent.child());
        one.cancel();
        assert_eq!([&parent, &one, &other].map(CancelToken::is_cancelled), [false, true, false]);
        parent.cancel();
        assert!(other.is_cancelled());
        assert!(parent != one && one == one.clone());
    }
}
