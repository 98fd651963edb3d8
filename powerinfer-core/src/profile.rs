//! How often each neuron fires: what a placement of hot and cold neurons is made from.

mod file;
mod original;

use powerinfer_ops::NeuronIds;

use crate::allocation::try_zeroed;
use crate::digest::Digest;
use crate::error::{Error, Result};
use crate::model::{FfnObserver, FfnSeen, ModelInfo};

/// Counts of the tokens for which each neuron fired (PowerInfer, "Offline Component"), and on
/// request how much each of them mattered.
///
/// # Examples
/// ```
/// use powerinfer_core::{ActivationProfile, ModelInfo};
/// let mut info = ModelInfo::default();
/// (info.n_layers, info.d_ff) = (1, 4);
/// let mut profile = ActivationProfile::new(&info, false)?;
/// profile.record(0, &[0.0, 3.0, 0.0, 0.5, 0.0, 2.0, 0.0, 0.0], &[1.0; 4])?;
/// profile.add_tokens(2);
/// assert_eq!(profile.counts(0), [0, 2, 0, 1]);
/// assert_eq!(profile.density(0), 3.0 / 8.0);
/// assert_eq!(profile.hottest(0, 1).as_slice(), &[1]);
/// // one neuron of four makes two thirds of the activations, two make them all
/// assert_eq!((profile.hot_share(0, 0.6), profile.hot_share(0, 0.8)), (0.25, 0.5));
/// # Ok::<(), powerinfer_core::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct ActivationProfile {
    model: ProfiledModel,
    /// `[n_layers, d_ff]`
    counts: Vec<u64>,
    n_tokens: u64,
    /// `[n_layers, d_ff]`: Σ |activation| · ‖down row‖ over the tokens.
    impact: Option<Vec<f32>>,
}

/// What a profile says about the model that it belongs to; empty texts where the file is silent.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ProfiledModel {
    /// Layers.
    pub n_layers: usize,
    /// Neurons of a layer.
    pub d_ff: usize,
    /// Width of the residual stream; 0 if the file does not say.
    pub d_model: usize,
    /// Its `model_type`, which says what its tensors are called.
    pub architecture: String,
    /// Its activation function.
    pub activation: String,
}

impl ActivationProfile {
    /// A profile of no tokens yet.
    ///
    /// # Errors
    /// [`Error::Allocation`].
    pub fn new(info: &ModelInfo, with_impact: bool) -> Result<Self> {
        let model = ProfiledModel {
            n_layers: info.n_layers,
            d_ff: info.d_ff,
            d_model: info.d_model,
            architecture: info.architecture.clone(),
            activation: info.activation.clone(),
        };
        let n = model.n_layers.saturating_mul(model.d_ff);
        let counts = try_zeroed("a profile", n)?;
        let impact = with_impact.then(|| try_zeroed("a profile", n)).transpose()?;
        Ok(Self { model, counts, n_tokens: 0, impact })
    }

    /// Counts the neurons of a layer that fire: `activations` is `[n_tokens, d_ff]`, `down_norms`
    /// `[d_ff]`. The tokens themselves are counted once for all layers by
    /// [`add_tokens`](Self::add_tokens).
    ///
    /// # Errors
    /// [`Error::ProfileMismatch`] if there is no such layer or it has not so many neurons.
    pub fn record(&mut self, layer: usize, activations: &[f32], down_norms: &[f32]) -> Result<()> {
        let ProfiledModel { n_layers, d_ff, .. } = self.model;
        self.check("layers", n_layers, layer + 1, layer < n_layers)?;
        self.check("neurons of a layer", d_ff, down_norms.len(), down_norms.len() == d_ff)?;
        let whole = activations.len().is_multiple_of(d_ff.max(1));
        self.check("neurons of a layer", d_ff, activations.len(), whole)?;
        let neurons = layer * d_ff..(layer + 1) * d_ff;
        let counts = &mut self.counts[neurons.clone()];
        for activations in activations.chunks_exact(d_ff.max(1)) {
            for (count, activation) in counts.iter_mut().zip(activations) {
                *count += u64::from(*activation != 0.0);
            }
        }
        if let Some(impact) = &mut self.impact {
            let impact = &mut impact[neurons];
            for activations in activations.chunks_exact(d_ff.max(1)) {
                for ((impact, activation), norm) in
                    impact.iter_mut().zip(activations).zip(down_norms)
                {
                    *impact += activation.abs() * norm;
                }
            }
        }
        Ok(())
    }

    /// Counts tokens that went through all layers.
    pub fn add_tokens(&mut self, n_tokens: u64) {
        self.n_tokens += n_tokens;
    }

    /// Adds the counts of another profile of the same model.
    ///
    /// # Errors
    /// [`Error::ProfileMismatch`] naming what differs.
    pub fn merge(&mut self, other: &Self) -> Result<()> {
        self.model.check(&other.model)?;
        let (mine, theirs) = (self.impact.is_some(), other.impact.is_some());
        if mine != theirs {
            let said =
                |there: bool| if there { "with impact" } else { "without impact" }.to_owned();
            let (expected, found) = (said(mine), said(theirs));
            return Err(Error::ProfileMismatch { what: "counts", expected, found });
        }
        self.counts.iter_mut().zip(&other.counts).for_each(|(to, from)| *to += from);
        if let (Some(to), Some(from)) = (&mut self.impact, &other.impact) {
            to.iter_mut().zip(from).for_each(|(to, from)| *to += from);
        }
        self.n_tokens += other.n_tokens;
        Ok(())
    }

    /// Fails unless this is a profile of that model, in whatever format its weights are held.
    ///
    /// # Errors
    /// [`Error::ProfileMismatch`] naming what differs.
    pub fn check_model(&self, info: &ModelInfo) -> Result<()> {
        Self::new(info, false)?.model.check(&self.model)
    }

    /// What the profile says about its model.
    #[must_use]
    pub fn model(&self) -> &ProfiledModel {
        &self.model
    }

    /// Tokens that were counted; 0 if the file does not say.
    #[must_use]
    pub fn n_tokens(&self) -> u64 {
        self.n_tokens
    }

    /// For how many tokens each neuron of a layer fired, `[d_ff]`.
    ///
    /// # Panics
    /// If there is no such layer.
    #[must_use]
    pub fn counts(&self, layer: usize) -> &[u64] {
        &self.counts[layer * self.model.d_ff..][..self.model.d_ff]
    }

    /// A short name for the counts, which a plan made from them holds.
    #[must_use]
    pub fn digest(&self) -> String {
        let mut digest = Digest::default();
        for number in [self.model.n_layers as u64, self.model.d_ff as u64, self.n_tokens] {
            digest.update(&number.to_le_bytes());
        }
        self.counts.iter().for_each(|count| digest.update(&count.to_le_bytes()));
        digest.name()
    }

    /// Replaces the counts of a layer.
    pub(crate) fn set_counts(&mut self, layer: usize, count: impl Fn(usize) -> u64) {
        let d_ff = self.model.d_ff;
        for (neuron, to) in self.counts[layer * d_ff..][..d_ff].iter_mut().enumerate() {
            *to = count(neuron);
        }
    }

    /// How much each neuron of a layer mattered to a token on average: its |activation| times the
    /// norm of its down row, `[d_ff]`. `None` if that was not counted.
    ///
    /// # Panics
    /// If there is no such layer.
    #[must_use]
    pub fn impact(&self, layer: usize) -> Option<Vec<f32>> {
        let sums = &self.impact.as_ref()?[layer * self.model.d_ff..][..self.model.d_ff];
        Some(sums.iter().map(|sum| sum / self.n_tokens.max(1) as f32).collect())
    }

    /// Share of a layer's neurons that fire for a token; 0 without tokens.
    ///
    /// # Panics
    /// If there is no such layer.
    #[must_use]
    pub fn density(&self, layer: usize) -> f64 {
        let possible = self.n_tokens as f64 * self.model.d_ff as f64;
        let fired: u64 = self.counts(layer).iter().sum();
        if possible == 0.0 { 0.0 } else { fired as f64 / possible }
    }

    /// The `n` neurons of a layer that fire most often; of equals the first.
    ///
    /// # Panics
    /// If there is no such layer.
    #[must_use]
    pub fn hottest(&self, layer: usize, n: usize) -> NeuronIds {
        let counts = self.counts(layer);
        let mut ids: Vec<u32> = NeuronIds::all(counts.len()).as_slice().to_vec();
        ids.sort_by_key(|&id| std::cmp::Reverse(counts[id as usize]));
        ids.truncate(n);
        ids.sort_unstable();
        NeuronIds::from_sorted(ids).expect("each id was there once")
    }

    /// Share of a layer's neurons, the hottest first, that makes `share` of its activations.
    ///
    /// # Panics
    /// If there is no such layer.
    #[must_use]
    pub fn hot_share(&self, layer: usize, share: f64) -> f64 {
        hot_share(self.counts(layer).to_vec(), share)
    }

    /// The same over the neurons of all layers.
    #[must_use]
    pub fn hot_share_of_model(&self, share: f64) -> f64 {
        hot_share(self.counts.clone(), share)
    }

    /// Share of a layer's activations that its hottest neurons make: of the first `i / n_points` of
    /// them, for each `i` to `n_points`.
    ///
    /// # Panics
    /// If there is no such layer or `n_points` is 0.
    #[must_use]
    pub fn hot_curve(&self, layer: usize, n_points: usize) -> Vec<f64> {
        let mut counts = self.counts(layer).to_vec();
        counts.sort_unstable_by(|a, b| b.cmp(a));
        let total = counts.iter().sum::<u64>().max(1) as f64;
        let sums: Vec<u64> = counts
            .iter()
            .scan(0, |sum, count| {
                *sum += count;
                Some(*sum)
            })
            .collect();
        let at = |n: usize| if n == 0 { 0.0 } else { sums[n - 1] as f64 / total };
        (0..=n_points).map(|i| at(i * counts.len() / n_points)).collect()
    }

    fn check(&self, what: &'static str, expected: usize, found: usize, fits: bool) -> Result<()> {
        if fits {
            return Ok(());
        }
        let (expected, found) = (expected.to_string(), found.to_string());
        Err(Error::ProfileMismatch { what, expected, found })
    }
}

impl ProfiledModel {
    /// Fails unless `other` is the same, as far as both say.
    fn check(&self, other: &Self) -> Result<()> {
        let number = |n: usize| if n == 0 { String::new() } else { n.to_string() };
        for (what, expected, found) in [
            ("layers", number(self.n_layers), number(other.n_layers)),
            ("neurons of a layer", number(self.d_ff), number(other.d_ff)),
            ("width", number(self.d_model), number(other.d_model)),
            ("architecture", self.architecture.clone(), other.architecture.clone()),
            ("activation", self.activation.clone(), other.activation.clone()),
        ] {
            if expected != found && !expected.is_empty() && !found.is_empty() {
                return Err(Error::ProfileMismatch { what, expected, found });
            }
        }
        Ok(())
    }
}

impl FfnObserver for ActivationProfile {
    fn observe(&mut self, seen: &FfnSeen<'_>) -> Result<()> {
        self.record(seen.layer, seen.activations, seen.down_norms)?;
        if seen.layer == 0 {
            self.add_tokens((seen.activations.len() / self.model.d_ff.max(1)) as u64);
        }
        Ok(())
    }
}

fn hot_share(mut counts: Vec<u64>, share: f64) -> f64 {
    counts.sort_unstable_by(|a, b| b.cmp(a));
    let wanted = share * counts.iter().sum::<u64>() as f64;
    let mut sum = 0;
    let enough = |count: &u64| {
        let before = sum as f64;
        sum += count;
        before >= wanted
    };
    let n = counts.iter().position(enough).unwrap_or(counts.len());
    n as f64 / counts.len().max(1) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info(n_layers: usize, d_ff: usize) -> ModelInfo {
        let mut info = ModelInfo::default();
        (info.n_layers, info.d_ff, info.d_model) = (n_layers, d_ff, 8);
        info.architecture = "llama".to_owned();
        info.activation = "relu".to_owned();
        info
    }

    #[test]
    fn counts_and_impact_add_up_over_calls_and_profiles() {
        let mut one = ActivationProfile::new(&info(2, 3), true).unwrap();
        one.record(1, &[1.0, 0.0, -2.0], &[1.0, 5.0, 0.5]).unwrap();
        one.add_tokens(1);
        let mut other = ActivationProfile::new(&info(2, 3), true).unwrap();
        other.record(1, &[3.0, 0.0, 0.0, 0.0, 0.0, 2.0], &[1.0, 5.0, 0.5]).unwrap();
        other.record(0, &[0.0, 1.0, 0.0, 0.0, 1.0, 0.0], &[1.0; 3]).unwrap();
        other.add_tokens(2);
        one.merge(&other).unwrap();
        assert_eq!((one.counts(0), one.counts(1)), (&[0, 2, 0][..], &[2, 0, 2][..]));
        assert_eq!(one.n_tokens(), 3);
        assert_eq!(one.impact(1).unwrap(), [4.0 / 3.0, 0.0, 2.0 / 3.0]);
        assert_eq!(one.density(1), 4.0 / 9.0);
    }

    #[test]
    fn a_profile_of_another_model_is_refused_and_says_what_differs() {
        let profile = ActivationProfile::new(&info(2, 3), false).unwrap();
        profile.check_model(&info(2, 3)).unwrap();
        let mut opt = info(2, 3);
        opt.architecture = "opt".to_owned();
        for (other, expected) in
            [(info(3, 3), "layers"), (info(2, 4), "neurons of a layer"), (opt, "architecture")]
        {
            let error = profile.check_model(&other).unwrap_err();
            assert!(matches!(error, Error::ProfileMismatch { what, .. } if what == expected));
        }
        let mut with_impact = ActivationProfile::new(&info(2, 3), true).unwrap();
        assert!(with_impact.merge(&profile).is_err());
        let mut profile = profile;
        assert!(profile.record(2, &[0.0; 3], &[0.0; 3]).is_err());
        assert!(profile.record(0, &[0.0; 4], &[0.0; 3]).is_err());
        assert!(profile.record(0, &[0.0; 3], &[0.0; 2]).is_err());
    }

    #[test]
    fn the_hottest_come_first_and_the_curve_ends_at_one() {
        let mut profile = ActivationProfile::new(&info(1, 4), false).unwrap();
        profile.counts = vec![1, 6, 2, 1];
        assert_eq!(profile.hottest(0, 3).as_slice(), &[0, 1, 2]);
        assert_eq!(profile.hot_curve(0, 4), [0.0, 0.6, 0.8, 0.9, 1.0]);
        assert_eq!(profile.hot_share(0, 0.8), 0.5);
        assert_eq!(profile.hot_share(0, 0.81), 0.75);
        assert_eq!(profile.hot_share_of_model(0.0), 0.0);
        assert_eq!(profile.hot_share_of_model(1.0), 1.0);
    }
}
