//! The running softmax of a query: what a part of its positions comes to, and the sum of two parts.

/// Of some positions: the largest score `m` and `Σ_p e^(score[p] − m)`. The sums that belong to it
/// are `Σ_p e^(score[p] − m) · value[p]`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Softmax {
    pub(super) max: f32,
    pub(super) total: f32,
}

impl Softmax {
    /// Of no position.
    pub(super) const EMPTY: Self = Self { max: f32::NEG_INFINITY, total: 0.0 };

    /// Whether no position counts: there is none, or each has the score −∞.
    pub(super) fn is_empty(self) -> bool {
        self.max == f32::NEG_INFINITY && self.total == 0.0
    }

    /// Makes `max` the largest score, if it is larger; returns what the sums are to be multiplied
    /// with, if they change.
    pub(super) fn raise(&mut self, max: f32) -> Option<f32> {
        if max <= self.max {
            return None;
        }
        let shrink = (self.max - max).exp();
        self.total *= shrink;
        self.max = max;
        Some(shrink)
    }

    /// Adds the positions of `other`, which come after one's own, with their sums.
    pub(super) fn merge(&mut self, sums: &mut [f32], other: Self, other_sums: &[f32]) {
        if other.is_empty() {
            return;
        }
        if self.is_empty() {
            *self = other;
            sums.copy_from_slice(other_sums);
            return;
        }
        if let Some(shrink) = self.raise(other.max) {
            sums.iter_mut().for_each(|sum| *sum *= shrink);
        }
        let share = (other.max - self.max).exp();
        self.total += other.total * share;
        for (sum, other) in sums.iter_mut().zip(other_sums) {
            *sum += other * share;
        }
    }

    /// The weighted mean that sums come to; zeros of no position.
    pub(super) fn mean(self, sums: &[f32], out: &mut [f32]) {
        if self.is_empty() {
            out.fill(0.0);
            return;
        }
        for (out, sum) in out.iter_mut().zip(sums) {
            *out = sum / self.total;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(scores: &[(f32, f32)]) -> (Softmax, [f32; 1]) {
        let (mut all, mut sums) = (Softmax::EMPTY, [0.0]);
        for &(score, value) in scores {
            all.merge(&mut sums, Softmax { max: score, total: 1.0 }, &[value]);
        }
        (all, sums)
    }

    #[test]
    fn a_merge_is_the_softmax_of_both() {
        let scores = [(1.0, 3.0), (-2.0, 5.0), (4.0, -1.0), (3.5, 2.0)];
        let (softmax, sums) = of(&scores);
        let weights = scores.map(|(score, _)| f64::from(score).exp());
        let products = weights.iter().zip(scores).map(|(weight, (_, v))| weight * f64::from(v));
        let expected = products.sum::<f64>() / weights.iter().sum::<f64>();
        let mut mean = [9.0];
        softmax.mean(&sums, &mut mean);
        assert!((f64::from(mean[0]) - expected).abs() < 1e-6);
    }

    #[test]
    fn nothing_changes_nothing_and_comes_to_zeros() {
        let (mut some, mut sums) = of(&[(1.0, 3.0), (2.0, 4.0)]);
        let before = (some, sums);
        some.merge(&mut sums, Softmax::EMPTY, &[7.0]);
        assert_eq!((some, sums), before);
        let mut mean = [9.0];
        Softmax::EMPTY.mean(&[0.0], &mut mean);
        assert_eq!(mean, [0.0]);
    }

    #[test]
    fn a_nan_stays_one() {
        let (mut all, mut sums) = of(&[(1.0, 3.0)]);
        all.merge(&mut sums, Softmax { max: f32::NEG_INFINITY, total: f32::NAN }, &[f32::NAN]);
        all.merge(&mut sums, Softmax { max: 5.0, total: 1.0 }, &[1.0]);
        let mut mean = [0.0];
        all.mean(&sums, &mut mean);
        assert!(mean[0].is_nan());
    }
}
