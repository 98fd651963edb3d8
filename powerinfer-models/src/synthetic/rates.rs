//! How often each neuron of a synthetic model fires, as what its products are compared with.

use std::collections::BTreeMap;
use std::fmt;

use powerinfer_core::ActivationProfile;

/// The numbers that standard normal ones exceed as often as the neurons of a profile fire.
pub(super) struct Rates {
    /// `[n_layers][d_ff]`
    thresholds: Vec<Vec<f32>>,
}

impl fmt::Debug for Rates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rates").field("n_layers", &self.thresholds.len()).finish_non_exhaustive()
    }
}

impl Rates {
    pub(super) fn of(profile: &ActivationProfile) -> Self {
        let n_tokens = profile.n_tokens().max(1) as f64;
        // of a few thousand counts, the same in every layer
        let mut of_count = BTreeMap::new();
        let mut threshold = |&count: &u64| {
            *of_count.entry(count).or_insert_with(|| {
                let share = (count as f64 / n_tokens).clamp(LEAST, 1.0 - LEAST);
                normal_quantile(1.0 - share) as f32
            })
        };
        let layers = 0..profile.model().n_layers;
        let thresholds = layers
            .map(|layer| profile.counts(layer).iter().map(&mut threshold).collect())
            .collect();
        Self { thresholds }
    }

    /// Those of a layer, `[d_ff]`.
    pub(super) fn thresholds(&self, layer: usize) -> &[f32] {
        &self.thresholds[layer]
    }
}

/// The least share of the tokens for which a neuron fires, and for which it does not.
const LEAST: f64 = 1e-6;

/// The number that a standard normal one stays below with probability `p`, by bisection.
pub(crate) fn normal_quantile(p: f64) -> f64 {
    let (mut low, mut high) = (-6.0, 6.0);
    for _ in 0..60 {
        let middle = (low + high) / 2.0;
        if normal_probability(middle) < p { low = middle } else { high = middle }
    }
    (low + high) / 2.0
}

/// Probability that a standard normal number stays below `x`, by the series of the error function.
fn normal_probability(x: f64) -> f64 {
    let (mut term, mut sum) = (x, x);
    for n in 1..200 {
        term *= x * x / (2 * n + 1) as f64;
        sum += term;
    }
    0.5 + sum * (-x * x / 2.0).exp() / std::f64::consts::TAU.sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_those_of_the_normal_distribution() {
        for (p, x) in [(0.5, 0.0), (0.9, 1.281_551_6), (0.975, 1.959_964), (0.001, -3.090_232)] {
            assert!((normal_quantile(p) - x).abs() < 1e-5, "{p}");
        }
    }
}
