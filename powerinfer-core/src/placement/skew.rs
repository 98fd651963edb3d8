//! Profiles of models that nobody has counted: as dense and as skewed as somebody says.

use crate::error::Result;
use crate::profile::ActivationProfile;

use super::sizes::PlannedModel;

/// Tokens that a modelled profile claims to have counted: enough for rare neurons to be told apart.
const N_TOKENS: u64 = 1 << 20;

/// How often the neurons of a layer fire: the hottest most, the others ever less, as an exponential
/// falls.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Skew {
    /// Share of the neurons that fires for a token.
    pub density: f64,
    /// Share of the neurons that makes 80 % of the activations: near 0.8 they all fire alike. What
    /// cannot be at this density, because no neuron fires more often than always, is as near to it as can be.
    pub hot_share_80: f64,
}

impl Skew {
    /// A profile in which every layer is like this, its hot neurons scattered.
    ///
    /// # Errors
    /// [`Error::Allocation`](crate::Error::Allocation).
    ///
    /// # Examples
    /// ```
    /// use powerinfer_core::{PlannedModel, Skew};
    /// let model = PlannedModel { n_layers: 2, d_ff: 10_000, d_model: 8, ..Default::default() };
    /// let profile = Skew { density: 0.1, hot_share_80: 0.26 }.profile(&model)?;
    /// assert!((profile.density(1) - 0.1).abs() < 0.001);
    /// assert!((profile.hot_share(1, 0.8) - 0.26).abs() < 0.005);
    /// # Ok::<(), powerinfer_core::Error>(())
    /// ```
    pub fn profile(&self, model: &PlannedModel) -> Result<ActivationProfile> {
        let shares = self.shares(model.d_ff);
        let counts: Vec<u64> =
            shares.iter().map(|s| (s * N_TOKENS as f64).round() as u64).collect();
        let mut profile = ActivationProfile::new(&model.info(), false)?;
        for layer in 0..model.n_layers {
            profile.set_counts(layer, |neuron| counts[scattered(neuron, layer, model.d_ff)]);
        }
        profile.add_tokens(N_TOKENS);
        Ok(profile)
    }

    /// Shares of the tokens for which the neurons fire, falling: `min(1, c · exp(-k · rank))`.
    fn shares(&self, d_ff: usize) -> Vec<f64> {
        let density = self.density.clamp(0.0, 1.0);
        let hot_share = self.hot_share_80.clamp(0.001, 0.8);
        // the steepness at which the hottest make their part
        let made = |k: f64| {
            let shares = falling(d_ff, density, k);
            let n_hot = (hot_share * d_ff as f64).round() as usize;
            shares[..n_hot.min(d_ff)].iter().sum::<f64>() / shares.iter().sum::<f64>().max(1e-300)
        };
        let k = bisect(0.0, 2000.0, |k| made(k) < 0.8);
        falling(d_ff, density, k)
    }
}

/// Shares of a mean of `density` that fall with steepness `k`.
fn falling(d_ff: usize, density: f64, k: f64) -> Vec<f64> {
    let shape: Vec<f64> = (0..d_ff).map(|i| (-k * (i as f64 + 0.5) / d_ff as f64).exp()).collect();
    let sum = |log_scale: f64| -> f64 {
        let scale = log_scale.exp();
        shape.iter().map(|share| (scale * share).min(1.0)).sum()
    };
    let wanted = density * d_ff as f64;
    let log_scale = bisect(-60.0, 60.0, |x| sum(x) < wanted);
    shape.iter().map(|share| (log_scale.exp() * share).min(1.0)).collect()
}

/// The number between `low` and `high` up to which `below` holds.
fn bisect(mut low: f64, mut high: f64, below: impl Fn(f64) -> bool) -> f64 {
    for _ in 0..50 {
        let middle = (low + high) / 2.0;
        if below(middle) { low = middle } else { high = middle }
    }
    (low + high) / 2.0
}

/// The rank of a neuron: a permutation of `0..d_ff`, another in each layer.
fn scattered(neuron: usize, layer: usize, d_ff: usize) -> usize {
    // a step that shares no factor with the width visits every rank once
    let mut step = (d_ff as f64 * 0.618_034) as usize + 1;
    while gcd(step, d_ff) != 1 {
        step += 1;
    }
    // multiples of the golden section are spread evenly: the hot sets of two layers differ
    let first = layer % d_ff * (d_ff as f64 * 0.381_966) as usize;
    (neuron % d_ff * step + first) % d_ff
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modelled_profiles_are_as_dense_and_as_skewed_as_asked() {
        let model =
            PlannedModel { n_layers: 2, d_ff: 11008, d_model: 8, ..PlannedModel::default() };
        for (density, hot_share_80) in [(0.03, 0.26), (0.3, 0.43), (0.22, 0.43), (0.5, 0.8)] {
            let profile = Skew { density, hot_share_80 }.profile(&model).unwrap();
            for layer in 0..2 {
                let found = profile.density(layer);
                assert!((found / density - 1.0).abs() < 0.01, "{density}: {found}");
                let found = profile.hot_share(layer, 0.8);
                assert!((found - hot_share_80).abs() < 0.01, "{hot_share_80}: {found}");
            }
        }
    }

    #[test]
    fn each_neuron_has_a_rank_of_its_own() {
        for d_ff in [1, 2, 6, 64, 1000, 11008] {
            let mut ranks: Vec<usize> = (0..d_ff).map(|n| scattered(n, 3, d_ff)).collect();
            ranks.sort_unstable();
            assert!(ranks.into_iter().eq(0..d_ff), "{d_ff}");
        }
    }
}
