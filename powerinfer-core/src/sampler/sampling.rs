//! The settings of a sampler.

use crate::error::{Error, Result};

/// How a token is chosen from logits; [`Sampler`](crate::Sampler) says in what order.
///
/// The default is greedy: the likeliest token, always.
///
/// # Examples
/// ```
/// use powerinfer_core::Sampling;
///
/// let sampling = Sampling::default().with_temperature(0.7).with_top_p(0.9).with_seed(42);
/// assert!(sampling.validate().is_ok());
///
/// let error = sampling.with_top_p(90.0).validate().unwrap_err();
/// assert_eq!(error.to_string(), "sampling: top_p: expected 0 to 1, found 90");
/// ```
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Sampling {
    /// Divides the logits: below 1 makes likely tokens likelier. 0 is greedy. Default 0.
    pub temperature: f32,
    /// Only the k likeliest tokens can be chosen; `None` for all. Default `None`.
    pub top_k: Option<usize>,
    /// Only the fewest tokens that together have this probability can be chosen, always at least
    /// one. 0 to 1; default 1, which is all.
    pub top_p: f32,
    /// Only tokens of at least this share of the likeliest one's probability can be chosen.
    /// 0 to 1; default 0, which is all.
    pub min_p: f32,
    /// Above 1 makes tokens that occurred lately less likely. Default 1, which does nothing.
    pub repetition_penalty: f32,
    /// How many of the latest tokens, prompt included, count as lately; 0 for none. Default 64.
    pub repetition_window: usize,
    /// Added to the logits of these tokens, in logits; −∞ forbids one. Default empty.
    pub logit_bias: Vec<(u32, f32)>,
    /// Seed of the draws; the same seed gives the same tokens. Default 0.
    pub seed: u64,
}

impl Default for Sampling {
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_k: None,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            repetition_window: 64,
            logit_bias: Vec::new(),
            seed: 0,
        }
    }
}

impl Sampling {
    /// With another [`temperature`](Self::temperature).
    #[must_use]
    pub fn with_temperature(self, temperature: f32) -> Self {
        Self { temperature, ..self }
    }

    /// With another [`top_k`](Self::top_k).
    #[must_use]
    pub fn with_top_k(self, top_k: Option<usize>) -> Self {
        Self { top_k, ..self }
    }

    /// With another [`top_p`](Self::top_p).
    #[must_use]
    pub fn with_top_p(self, top_p: f32) -> Self {
        Self { top_p, ..self }
    }

    /// With another [`min_p`](Self::min_p).
    #[must_use]
    pub fn with_min_p(self, min_p: f32) -> Self {
        Self { min_p, ..self }
    }

    /// With another [`repetition_penalty`](Self::repetition_penalty).
    #[must_use]
    pub fn with_repetition_penalty(self, repetition_penalty: f32) -> Self {
        Self { repetition_penalty, ..self }
    }

    /// With another [`repetition_window`](Self::repetition_window).
    #[must_use]
    pub fn with_repetition_window(self, repetition_window: usize) -> Self {
        Self { repetition_window, ..self }
    }

    /// With another [`logit_bias`](Self::logit_bias).
    #[must_use]
    pub fn with_logit_bias(self, logit_bias: Vec<(u32, f32)>) -> Self {
        Self { logit_bias, ..self }
    }

    /// With another [`seed`](Self::seed).
    #[must_use]
    pub fn with_seed(self, seed: u64) -> Self {
        Self { seed, ..self }
    }

    /// Checks every setting against its range.
    ///
    /// # Errors
    /// [`Error::InvalidSampling`] naming the first that is outside it.
    pub fn validate(&self) -> Result<()> {
        let not_negative = self.temperature.is_finite() && self.temperature >= 0.0;
        check(not_negative, "temperature", "a finite number, 0 or above", self.temperature)?;
        let top_k = self.top_k.unwrap_or(1);
        check(top_k > 0, "top_k", "at least 1, or none to keep all tokens", top_k)?;
        check((0.0..=1.0).contains(&self.top_p), "top_p", "0 to 1", self.top_p)?;
        check((0.0..=1.0).contains(&self.min_p), "min_p", "0 to 1", self.min_p)?;
        let penalty = self.repetition_penalty;
        let positive = penalty.is_finite() && penalty > 0.0;
        check(positive, "repetition_penalty", "a finite number above 0", penalty)?;
        for &(_, bias) in &self.logit_bias {
            check(bias < f32::INFINITY, "logit_bias", "finite numbers or −∞", bias)?;
        }
        Ok(())
    }
}

fn check(
    holds: bool,
    field: &'static str,
    expected: &'static str,
    found: impl ToString,
) -> Result<()> {
    let error = || Error::InvalidSampling { field, expected, found: found.to_string() };
    if holds { Ok(()) } else { Err(error()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_setting_has_its_range() {
        let base = Sampling::default;
        let wrong = [
            ("temperature", base().with_temperature(-0.1)),
            ("temperature", base().with_temperature(f32::NAN)),
            ("temperature", base().with_temperature(f32::INFINITY)),
            ("top_k", base().with_top_k(Some(0))),
            ("top_p", base().with_top_p(-0.1)),
            ("top_p", base().with_top_p(1.1)),
            ("top_p", base().with_top_p(f32::NAN)),
            ("min_p", base().with_min_p(-0.1)),
            ("min_p", base().with_min_p(1.1)),
            ("min_p", base().with_min_p(f32::NAN)),
            ("repetition_penalty", base().with_repetition_penalty(0.0)),
            ("repetition_penalty", base().with_repetition_penalty(f32::NAN)),
            ("repetition_penalty", base().with_repetition_penalty(f32::INFINITY)),
            ("logit_bias", base().with_logit_bias(vec![(0, 1.0), (1, f32::NAN)])),
            ("logit_bias", base().with_logit_bias(vec![(0, f32::INFINITY)])),
        ];
        for (name, sampling) in wrong {
            assert!(
                matches!(sampling.validate(), Err(Error::InvalidSampling { field, .. }) if field == name),
                "{sampling:?}"
            );
        }
    }

    #[test]
    fn the_ends_of_the_ranges_are_in_them() {
        let base = Sampling::default;
        for sampling in [
            base(),
            base().with_temperature(f32::MAX).with_top_k(Some(usize::MAX)),
            base().with_top_p(0.0).with_min_p(1.0),
            base().with_repetition_penalty(f32::MIN_POSITIVE).with_repetition_window(usize::MAX),
            base().with_logit_bias(vec![(u32::MAX, f32::NEG_INFINITY), (0, f32::MAX)]),
        ] {
            assert!(sampling.validate().is_ok(), "{sampling:?}");
        }
    }
}
