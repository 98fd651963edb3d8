//! Running a model over a text for those who watch its feed-forward networks.

use std::ops::ControlFlow;
use std::sync::{Arc, Mutex, PoisonError};

use powerinfer_core::{CausalLm, Error as CoreError, FfnObserver, Sparsity, Step, WantedLogits};

use crate::error::Result;

/// Runs `tokens` through the model in windows of `context` tokens and shows `observer` what every
/// feed-forward network saw and what each of its neurons gave, layer after layer; returns it.
///
/// After each window `progress` is given the observer and how many tokens are done, and may break
/// off. Whoever saves the observer there can go on later: with the rest of the tokens, and the
/// result is that of one run. The last window may be shorter.
///
/// Neurons run as if there were no predictor. Runs on the current thread pool.
///
/// # Errors
/// [`CoreError::ContextExceeded`] if `context` is longer than the model's or 0, and whatever the
/// model or the observer fails with.
///
/// # Examples
/// ```
/// use std::ops::ControlFlow;
/// use powerinfer_core::ActivationProfile;
/// use powerinfer_models::synthetic::{Synthetic, SyntheticShape};
/// use powerinfer_models::{LoadOptions, calibrate};
///
/// let model = Synthetic::new(SyntheticShape::Tiny, 0.1, 7)?.load(&LoadOptions::default())?;
/// let profile = ActivationProfile::new(model.info(), false)?;
/// let tokens: Vec<u32> = (0..100).collect();
/// let go_on = |_: &ActivationProfile, _| ControlFlow::Continue(());
/// let profile = calibrate(&*model, &tokens, 64, profile, go_on)?;
/// assert_eq!(profile.n_tokens(), 100);
/// assert!((profile.density(3) - 0.1).abs() < 0.02);
/// # Ok::<(), powerinfer_models::Error>(())
/// ```
pub fn calibrate<O: FfnObserver + 'static>(
    model: &dyn CausalLm,
    tokens: &[u32],
    context: usize,
    observer: O,
    mut progress: impl FnMut(&O, usize) -> ControlFlow<()>,
) -> Result<O> {
    let info = model.info();
    if context == 0 || context > info.max_context {
        let (requested, max) = (context, info.max_context);
        return Err(CoreError::ContextExceeded { have: 0, requested, max }.into());
    }
    let observer = Arc::new(Mutex::new(observer));
    let sparsity = match info.sparsity {
        Sparsity::Dense => Sparsity::Dense,
        _ => Sparsity::Exact,
    };
    let mut step = Step {
        wanted: WantedLogits::None,
        sparsity: Some(sparsity),
        observer: Some(observer.clone()),
        ..Step::default()
    };
    let mut cache = model.new_cache();
    let mut done = 0;
    for window in tokens.chunks(context) {
        cache.clear();
        model.forward(window, &mut cache, &mut step)?;
        done += window.len();
        let observer = observer.lock().unwrap_or_else(PoisonError::into_inner);
        if progress(&observer, done).is_break() {
            break;
        }
    }
    drop(step);
    // the step held the only other one
    let observer = Arc::into_inner(observer).expect("nobody else holds the observer");
    Ok(observer.into_inner().unwrap_or_else(PoisonError::into_inner))
}
