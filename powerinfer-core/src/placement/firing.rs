//! How often neurons fire, as shares of the tokens, and what that makes them read.

use super::sizes::NeuronReads;
use crate::model::Sparsity;
use crate::profile::ActivationProfile;

/// The shares of the tokens for which neurons fire, of any layer of a profile.
pub(crate) struct Firing<'a> {
    profile: &'a ActivationProfile,
    n_tokens: f64,
}

impl<'a> Firing<'a> {
    /// A profile that does not say its number of tokens is taken for one of the fewest that it can
    /// have.
    pub(crate) fn new(profile: &'a ActivationProfile) -> Self {
        let layers = 0..profile.model().n_layers;
        let most = || layers.flat_map(|layer| profile.counts(layer)).max().copied().unwrap_or(0);
        let n_tokens = match profile.n_tokens() {
            0 => most(),
            n_tokens => n_tokens,
        };
        Self { profile, n_tokens: n_tokens.max(1) as f64 }
    }

    /// The share of the tokens for which a neuron fires that was counted `count` times.
    pub(crate) fn share(&self, count: u64) -> f64 {
        count as f64 / self.n_tokens
    }

    /// The shares of a layer, `[d_ff]`.
    pub(crate) fn shares(&self, layer: usize) -> impl Iterator<Item = f64> {
        self.profile.counts(layer).iter().map(|&count| self.share(count))
    }
}

impl NeuronReads {
    /// What a mode makes a layer read.
    pub(crate) fn of(sparsity: Sparsity) -> Self {
        match sparsity {
            Sparsity::Dense => Self::All,
            Sparsity::Predicted => Self::Firing,
            // what `auto` is on a model whose neurons do not always fire
            Sparsity::Exact | Sparsity::Auto => Self::GateOfAll,
        }
    }
}
