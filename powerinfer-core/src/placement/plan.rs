//! A plan: where each part of a model goes, for how many bytes.

use powerinfer_ops::NeuronIds;

use super::Placement;
use super::hot_set::HotSet;
use super::sizes::{GROUP_NEURONS, ModelSizes, PlannedModel};
use crate::error::{Error, Result};
use crate::profile::ActivationProfile;

/// Tensors of a part, at most: each may be rounded up on its own.
const PART_TENSORS: u64 = 16;

/// The device that a part of a model lies on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PlannedDevice {
    /// The CPU.
    #[default]
    Host,
    /// The fast device.
    Fast,
}

/// Where the parts of a layer go.
#[derive(Debug, Clone, PartialEq)]
pub struct PlannedLayer {
    /// Attention and norms, with keys and values: one part, which is never split.
    pub attention: PlannedDevice,
    /// The predictor.
    pub predictor: PlannedDevice,
    /// Share of the hot neurons that fires for a token.
    pub hot_density: f64,
    pub(super) hot: HotSet,
}

impl PlannedLayer {
    /// Hot neurons.
    #[must_use]
    pub fn n_hot(&self) -> usize {
        self.hot.len()
    }

    /// Whether a neuron is hot.
    #[must_use]
    pub fn is_hot(&self, neuron: usize) -> bool {
        self.hot.contains(neuron)
    }
}

/// Which neurons are hot, and where everything else goes, under a budget.
///
/// [`plan`](crate::plan) makes one out of a profile. A plan names its model, and is refused by
/// another.
///
/// # Examples
/// ```
/// use powerinfer_core::{
///     ActivationProfile, Hardware, LayerSizes, ModelInfo, ModelSizes, PlanRequest, plan,
/// };
///
/// let mut sizes = ModelSizes::default();
/// (sizes.model.n_layers, sizes.model.d_ff, sizes.model.d_model) = (1, 256, 32);
/// sizes.layers = vec![LayerSizes { neuron_rows: vec![64, 64, 64], ..LayerSizes::default() }];
/// let mut info = ModelInfo::default();
/// (info.n_layers, info.d_ff, info.d_model) = (1, 256, 32);
/// let mut profile = ActivationProfile::new(&info, false)?;
/// // the last 100 neurons always fire, the others never
/// let fired: Vec<f32> = (0..256).map(|id| f32::from(u8::from(id >= 156))).collect();
/// profile.record(0, &fired, &[1.0; 256])?;
/// profile.add_tokens(1);
///
/// let machine = Hardware::preset("rtx-4090")?;
/// let request = PlanRequest::new(&sizes, &profile, &machine, 20_000).with_sync_rule(false);
/// let plan = plan(&request)?;
/// // one group of 64 fits, of the neurons that fire most
/// assert_eq!(plan.hot_neurons_per_layer(), [64]);
/// assert_eq!(plan.placement(&sizes.model)?.hot(0).as_slice()[0], 156);
/// assert_eq!(plan.hit_rate, 0.64);
/// assert!(plan.bytes_fast <= 20_000);
/// # Ok::<(), powerinfer_core::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Plan {
    /// The model it is for.
    pub model: PlannedModel,
    /// Digest of the profile it was made from.
    pub profile_digest: String,
    /// Name of the hardware it was made for.
    pub hardware: String,
    /// The budget it was made for.
    pub budget_bytes: u64,
    /// Tokens of the context whose keys and values are counted.
    pub context: usize,
    /// What allocations on the fast device are rounded up to.
    pub alignment_bytes: u64,
    /// What the fast device needs beside weights and cache.
    pub workspace_bytes: u64,
    /// Bytes of each hot neuron's row of the predictor on the fast device.
    pub predictor_row_bytes: u64,
    /// Where the parts of each layer go.
    pub layers: Vec<PlannedLayer>,
    /// Where the head goes.
    pub head: PlannedDevice,
    /// Bytes on the fast device.
    pub bytes_fast: u64,
    /// Bytes on the host.
    pub bytes_host: u64,
    /// Share of the activations that hot neurons make.
    pub hit_rate: f64,
    /// What [`simulate`](crate::simulate) says.
    pub predicted_tokens_per_second: f64,
}

impl Plan {
    /// Hot neurons of each layer.
    #[must_use]
    pub fn hot_neurons_per_layer(&self) -> Vec<usize> {
        self.layers.iter().map(PlannedLayer::n_hot).collect()
    }

    /// What lies where, with the hot neurons of each layer as lists, for that model.
    ///
    /// # Errors
    /// [`Error::PlanMismatch`] if the plan is that of another.
    pub fn placement(&self, model: &PlannedModel) -> Result<Placement> {
        model.check(&self.model)?;
        let hot: Vec<NeuronIds> = self.layers.iter().map(|layer| layer.hot.ids()).collect();
        let fast = |device| device == PlannedDevice::Fast;
        let fast_attention = self.layers.iter().map(|layer| fast(layer.attention)).collect();
        let placement =
            Placement::new(hot, self.model.d_ff)?.with_fast_attention(fast_attention)?;
        Ok(placement.with_fast_head(fast(self.head)))
    }

    /// Fails unless the plan is one of that model, in whatever format its weights are held, and fits the
    /// budget in that format. What is only worth a warning is returned in words.
    ///
    /// # Errors
    /// [`Error::PlanMismatch`], [`Error::PlanOverBudget`].
    pub fn check(&self, sizes: &ModelSizes, budget_bytes: u64) -> Result<Option<String>> {
        sizes.check()?;
        let warning = sizes.model.check(&self.model)?;
        let needed_bytes = self.fast_bytes(sizes);
        if needed_bytes > budget_bytes {
            let device = "the fast device";
            return Err(Error::PlanOverBudget { device, needed_bytes, budget_bytes });
        }
        Ok(warning)
    }

    /// Fails unless the plan was made from that profile.
    ///
    /// # Errors
    /// [`Error::PlanStale`].
    pub fn check_profile(&self, profile: &ActivationProfile) -> Result<()> {
        let (expected, found) = (profile.digest(), self.profile_digest.clone());
        if expected == found { Ok(()) } else { Err(Error::PlanStale { expected, found }) }
    }

    /// Bytes that the plan takes on the fast device if the model's parts have these sizes.
    #[must_use]
    pub fn fast_bytes(&self, sizes: &ModelSizes) -> u64 {
        let part = |device: PlannedDevice, bytes: u64| match device {
            PlannedDevice::Host => 0,
            PlannedDevice::Fast => part_bytes(bytes, self.alignment_bytes),
        };
        let kv_bytes = sizes.layer_kv_bytes(self.context);
        let mut sum = part(self.head, sizes.head_bytes);
        for (planned, layer) in self.layers.iter().zip(&sizes.layers) {
            let group = layer.group_bytes(self.alignment_bytes, self.predictor_row_bytes);
            let n_groups = planned.n_hot().div_ceil(GROUP_NEURONS) as u64;
            for bytes in [
                part(planned.attention, layer.attention_bytes),
                part(planned.attention, kv_bytes),
                part(planned.predictor, layer.predictor_bytes),
                group.saturating_mul(n_groups),
            ] {
                sum = sum.saturating_add(bytes);
            }
        }
        // a device that holds nothing needs nothing
        if sum == 0 { 0 } else { sum.saturating_add(self.workspace_bytes) }
    }

    /// Bytes that stay on the host.
    pub(super) fn host_bytes(&self, sizes: &ModelSizes) -> u64 {
        let part = |device: PlannedDevice, bytes: u64| match device {
            PlannedDevice::Host => bytes,
            PlannedDevice::Fast => 0,
        };
        let kv_bytes = sizes.layer_kv_bytes(self.context);
        // a tied head is counted as the table, which stays
        let head = if sizes.tied_head { 0 } else { part(self.head, sizes.head_bytes) };
        let mut sum = sizes.embedding_bytes.saturating_add(head);
        for (planned, layer) in self.layers.iter().zip(&sizes.layers) {
            let cold = sizes.model.d_ff.saturating_sub(planned.n_hot()) as u64;
            for bytes in [
                part(planned.attention, layer.attention_bytes),
                part(planned.attention, kv_bytes),
                part(planned.predictor, layer.predictor_bytes),
                cold.saturating_mul(layer.neuron_bytes()),
            ] {
                sum = sum.saturating_add(bytes);
            }
        }
        sum
    }
}

/// Bytes of a part on a device that rounds each of its tensors up.
pub(super) fn part_bytes(bytes: u64, alignment_bytes: u64) -> u64 {
    match bytes {
        0 => 0,
        bytes => bytes.saturating_add(PART_TENSORS * (alignment_bytes - 1)),
    }
}
