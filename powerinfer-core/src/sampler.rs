//! Logits to a token.

mod exponential;
mod random;
mod sampling;

use std::cmp::Ordering;

use crate::error::{Error, Result};
use exponential::exp_nonpositive;
use random::Random;
pub use sampling::Sampling;

/// Chooses tokens, with a generator of its own.
///
/// # Order
/// 1. A NaN or +∞ among the logits, or none above −∞, is an error. Single logits of −∞ are fine:
///    those tokens are never chosen.
/// 2. Each [`logit_bias`](Sampling::logit_bias) is added.
/// 3. [`repetition_penalty`](Sampling::repetition_penalty): each token among the last
///    [`repetition_window`](Sampling::repetition_window) of the history has its logit divided by
///    the penalty if it is positive and multiplied if it is negative, once however often it
///    occurred (Keskar et al., "CTRL", section "Penalized sampling").
/// 4. [`temperature`](Sampling::temperature) 0: the largest logit wins, of equal ones the lowest
///    id, and nothing below applies. Otherwise logits are divided by the temperature.
/// 5. [`top_k`](Sampling::top_k): the k largest stay, of equal ones the lower ids.
/// 6. [`top_p`](Sampling::top_p): of these, the fewest that together have at least that
///    probability stay, the likeliest first.
/// 7. [`min_p`](Sampling::min_p): those stay that have at least that share of the largest
///    probability.
/// 8. One is drawn from what is left, by its probability.
///
/// # Reproducibility
/// The generator is xoshiro256++ (Blackman and Vigna) seeded through SplitMix64; a draw takes the
/// upper 53 bits of one output and walks the remaining tokens by ascending id. The exponential is
/// made of basic operations only. So the same settings, logits and history give the same tokens
/// on every platform, and a release that changes that is a breaking one.
///
/// # Examples
/// ```
/// use powerinfer_core::{Sampler, Sampling};
///
/// let mut greedy = Sampler::new(Sampling::default())?;
/// assert_eq!(greedy.sample(&mut [0.5, 2.0, 2.0], &[])?, 1);
///
/// let sampling = Sampling::default().with_temperature(0.8).with_top_k(Some(2)).with_seed(7);
/// let (mut one, mut other) = (Sampler::new(sampling.clone())?, Sampler::new(sampling)?);
/// for _ in 0..10 {
///     let id = one.sample(&mut [0.5, 2.0, 1.5], &[])?;
///     assert!(id == 1 || id == 2);
///     assert_eq!(id, other.sample(&mut [0.5, 2.0, 1.5], &[])?);
/// }
/// # Ok::<(), powerinfer_core::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Sampler {
    sampling: Sampling,
    random: Random,
    /// What can still be chosen, by ascending id. Kept for its memory, as the next two.
    candidates: Vec<Candidate>,
    ranked: Vec<Candidate>,
    recent: Vec<u32>,
}

#[derive(Debug, Clone, Copy)]
struct Candidate {
    id: u32,
    logit: f32,
    /// Probability relative to the likeliest candidate.
    weight: f64,
}

impl Candidate {
    /// Likelier candidates come first, of equal ones the lower id.
    fn rank(&self, other: &Self) -> Ordering {
        // no logit is NaN
        let logits = other.logit.partial_cmp(&self.logit).unwrap_or(Ordering::Equal);
        logits.then(self.id.cmp(&other.id))
    }
}

impl Sampler {
    /// A sampler at the start of its random sequence.
    ///
    /// # Errors
    /// [`Error::InvalidSampling`] as [`Sampling::validate`].
    pub fn new(sampling: Sampling) -> Result<Self> {
        sampling.validate()?;
        let random = Random::new(sampling.seed);
        Ok(Self { sampling, random, candidates: vec![], ranked: vec![], recent: vec![] })
    }

    /// The settings.
    #[must_use]
    pub fn sampling(&self) -> &Sampling {
        &self.sampling
    }

    /// Chooses a token after `history`, the tokens that the logits follow. `logits`, `[vocab_size]`,
    /// are changed by bias and penalty.
    ///
    /// # Cost
    /// A few passes over the logits; after the first call no allocation in proportion to them.
    ///
    /// # Errors
    /// [`Error::NonFiniteLogits`], which also stands for a bias that leaves no token;
    /// [`Error::TokenOutOfRange`] for a bias or a token of the history beyond the vocabulary.
    pub fn sample(&mut self, logits: &mut [f32], history: &[u32]) -> Result<u32> {
        let position = history.len().saturating_sub(1);
        let not_finite = Error::NonFiniteLogits { position, layer: None };
        if logits.iter().any(|logit| logit.is_nan() || *logit == f32::INFINITY) {
            return Err(not_finite);
        }
        self.add_bias(logits)?;
        self.penalize(logits, history)?;
        let Some(best) = argmax(logits) else {
            return Err(not_finite);
        };
        if self.sampling.temperature == 0.0 {
            return Ok(best.id);
        }
        self.gather(logits, best);
        self.keep_top_p();
        let min_p = f64::from(self.sampling.min_p);
        self.candidates.retain(|candidate| candidate.weight >= min_p);
        Ok(self.draw().unwrap_or(best.id))
    }

    fn add_bias(&self, logits: &mut [f32]) -> Result<()> {
        for &(token, bias) in &self.sampling.logit_bias {
            let logit = logit_of(logits, token)?;
            *logit = within_range(*logit, *logit + bias, bias);
        }
        Ok(())
    }

    fn penalize(&mut self, logits: &mut [f32], history: &[u32]) -> Result<()> {
        let penalty = self.sampling.repetition_penalty;
        if penalty == 1.0 {
            return Ok(());
        }
        let start = history.len().saturating_sub(self.sampling.repetition_window);
        self.recent.clear();
        self.recent.extend_from_slice(&history[start..]);
        self.recent.sort_unstable();
        self.recent.dedup();
        for &token in &self.recent {
            let logit = logit_of(logits, token)?;
            let penalized = if *logit > 0.0 { *logit / penalty } else { *logit * penalty };
            *logit = within_range(*logit, penalized, penalty);
        }
        Ok(())
    }

    /// Fills `candidates` with the tokens that can be chosen, `top_k` of them at most.
    fn gather(&mut self, logits: &[f32], best: Candidate) {
        let temperature = f64::from(self.sampling.temperature);
        self.candidates.clear();
        self.candidates.extend((0..).zip(logits).filter_map(|(id, &logit)| {
            (logit > f32::NEG_INFINITY).then_some(Candidate { id, logit, weight: 0.0 })
        }));
        if let Some(k) = self.sampling.top_k.filter(|k| *k < self.candidates.len()) {
            self.ranked.clone_from(&self.candidates);
            let (_, last, _) = self.ranked.select_nth_unstable_by(k - 1, Candidate::rank);
            keep_down_to(&mut self.candidates, *last);
        }
        for candidate in &mut self.candidates {
            let below = f64::from(candidate.logit) - f64::from(best.logit);
            candidate.weight = exp_nonpositive(below / temperature);
        }
    }

    fn keep_top_p(&mut self) {
        let top_p = f64::from(self.sampling.top_p);
        if top_p >= 1.0 {
            return;
        }
        let total: f64 = self.candidates.iter().map(|candidate| candidate.weight).sum();
        // A candidate below this is never needed: with all that rank after it, it could not make
        // up the probability that is missing before it. That leaves few to sort.
        let least = (1.0 - top_p) * total / self.candidates.len() as f64;
        self.ranked.clear();
        self.ranked.extend(self.candidates.iter().filter(|candidate| candidate.weight >= least));
        self.ranked.sort_unstable_by(Candidate::rank);
        let mut sum = 0.0;
        let last = self.ranked.iter().find(|candidate| {
            sum += candidate.weight;
            sum >= top_p * total
        });
        if let Some(last) = last.or(self.ranked.last()) {
            keep_down_to(&mut self.candidates, *last);
        }
    }

    /// Draws by weight; never a candidate of weight zero.
    fn draw(&mut self) -> Option<u32> {
        let total: f64 = self.candidates.iter().map(|candidate| candidate.weight).sum();
        let target = self.random.unit() * total;
        let mut sum = 0.0;
        let drawn = self.candidates.iter().find(|candidate| {
            sum += candidate.weight;
            target < sum
        });
        // the product can round up to the total itself
        let last = || self.candidates.iter().rfind(|candidate| candidate.weight > 0.0);
        drawn.or_else(last).map(|candidate| candidate.id)
    }
}

/// The largest logit above −∞, of equal ones that with the lowest id.
fn argmax(logits: &[f32]) -> Option<Candidate> {
    let mut best = Candidate { id: 0, logit: f32::NEG_INFINITY, weight: 1.0 };
    for (id, &logit) in (0..).zip(logits) {
        if logit > best.logit {
            best = Candidate { id, logit, weight: 1.0 };
        }
    }
    (best.logit > f32::NEG_INFINITY).then_some(best)
}

/// Keeps the candidates that rank at least as high as `last`, in their order.
fn keep_down_to(candidates: &mut Vec<Candidate>, last: Candidate) {
    candidates.retain(|candidate| candidate.rank(&last) != Ordering::Greater);
}

fn logit_of(logits: &mut [f32], token: u32) -> Result<&mut f32> {
    let vocab_size = logits.len();
    logits.get_mut(token as usize).ok_or(Error::TokenOutOfRange { token, vocab_size })
}

/// `after`, kept from overflowing where a finite `change` was applied to a finite `before`.
fn within_range(before: f32, after: f32, change: f32) -> f32 {
    if before.is_finite() && change.is_finite() { after.clamp(f32::MIN, f32::MAX) } else { after }
}

#[cfg(test)]
mod tests;
