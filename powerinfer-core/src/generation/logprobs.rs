//! How likely a token was, and which others were.

use std::cmp::Ordering;

/// Natural logarithms of the probabilities that the model itself gives: those of its logits as they
/// are, before a hook, a bias, a penalty or a temperature.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct TokenLogprobs {
    /// The token that was chosen.
    pub id: u32,
    /// Its logarithm of probability, 0 or below.
    pub logprob: f32,
    /// The likeliest tokens and theirs, the likeliest first, of equal ones the lower id first.
    pub top: Vec<(u32, f32)>,
}

impl TokenLogprobs {
    /// Of finite `logits` `[vocab_size]`, or such that some are −∞, of which `id` was chosen.
    ///
    /// # Cost
    /// Two passes over the logits, in f64.
    #[must_use]
    pub fn of(logits: &[f32], id: u32, n_top: usize) -> Self {
        let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let largest = f64::from(largest);
        let sum: f64 = logits.iter().map(|&logit| (f64::from(logit) - largest).exp()).sum();
        let logprob = |logit: f32| (f64::from(logit) - largest - sum.ln()) as f32;
        let chosen = logits.get(id as usize).copied().unwrap_or(f32::NEG_INFINITY);
        let top = likeliest(logits, n_top).into_iter().map(|(id, logit)| (id, logprob(logit)));
        Self { id, logprob: logprob(chosen), top: top.collect() }
    }
}

fn likeliest(logits: &[f32], n: usize) -> Vec<(u32, f32)> {
    let rank = |a: &(u32, f32), b: &(u32, f32)| {
        let by_logit = b.1.partial_cmp(&a.1).unwrap_or(Ordering::Equal);
        by_logit.then(a.0.cmp(&b.0))
    };
    let n = n.min(logits.len());
    if n == 0 {
        return Vec::new();
    }
    let mut ranked: Vec<(u32, f32)> = (0..).zip(logits.iter().copied()).collect();
    ranked.select_nth_unstable_by(n - 1, rank);
    ranked.truncate(n);
    ranked.sort_unstable_by(rank);
    ranked
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probabilities_add_up_to_one_and_the_likeliest_come_first() {
        let logits = [0.5, 2.0, f32::NEG_INFINITY, 2.0, -1.0];
        let found = TokenLogprobs::of(&logits, 0, 10);
        let ids: Vec<u32> = found.top.iter().map(|&(id, _)| id).collect();
        assert_eq!(ids, [1, 3, 0, 4, 2]);
        let total: f64 = found.top.iter().map(|&(_, logprob)| f64::from(logprob).exp()).sum();
        assert!((total - 1.0).abs() < 1e-6, "{total}");
        assert_eq!(found.logprob, found.top[2].1);
        assert_eq!(found.top[4].1, f32::NEG_INFINITY);
        assert_eq!(TokenLogprobs::of(&logits, 0, 2).top, found.top[..2]);
        assert!(TokenLogprobs::of(&logits, 0, 0).top.is_empty());
    }

    #[test]
    fn equal_logits_have_equal_shares_however_large() {
        for logit in [0.0, 3e38, -3e38] {
            let found = TokenLogprobs::of(&[logit; 4], 2, 0);
            assert!((found.logprob - 0.25f32.ln()).abs() < 1e-6, "{logit}: {}", found.logprob);
        }
    }
}
