//! What lies on the fast device: what the caller or a plan names, or what a plan made here does.

use std::path::{Path, PathBuf};

use powerinfer_core::{
    ActivationProfile, Error, Hardware, ModelConfig, ModelInfo, ModelSizes, Offload, Placement,
    Plan, PlanRequest, Result, WeightStore, plan,
};
use powerinfer_ops::attention::KvLayout;
use powerinfer_ops::{FastDevice, LowBitMatrix, OpError, SequenceShape, StandIn};

use crate::load::LoadOptions;
use crate::predictor::PredictorOptions;
use crate::sizes;

/// The file beside a model that has its profile: of this name in a folder, after the name and a dot
/// for a file.
const PROFILE_FILE: &str = "activation_counts.safetensors";
/// Tokens whose keys and values a budget leaves room for, unless told otherwise.
const CONTEXT: usize = 2048;
/// Tokens of the longest pass that a budget leaves room for: no chunk of a prompt is longer, and neither
/// are the windows of a perplexity unless somebody asks for it.
const PASS_TOKENS: usize = 512;

/// What lies where, and what is known of it.
#[derive(Debug)]
pub(crate) struct Placed {
    pub(crate) placement: Placement,
    /// Share of the hot neurons of each layer that fires for a token; empty if nothing is known.
    pub(crate) hot_densities: Vec<f64>,
    /// What is worth knowing about it.
    pub(crate) notes: Vec<String>,
    /// What is to be left of the device's budget for a context.
    pub(crate) context_bytes: u64,
}

impl Placed {
    /// The placement for a model that is about to be loaded; `None` if nobody asked for one.
    pub(crate) fn find(
        config: &ModelConfig,
        store: &WeightStore,
        options: &LoadOptions,
        predictor: Option<&PredictorOptions>,
    ) -> Result<Option<Self>> {
        if let Some(placement) = &options.placement {
            placement.check(config.n_layers, config.d_ff)?;
        } else if options.plan.is_none() && options.fast_device.is_none() {
            return Ok(None);
        }
        if let Some(found) = options.device_context
            && !(1..=config.max_context).contains(&found)
        {
            return Err(Error::DeviceContextRange { max_context: config.max_context, found });
        }
        let sizes = sizes::of_store(config, store, options)?;
        let task = Task { sizes: &sizes, options, predictor };
        let Some(device) = options.fast_device.as_deref() else {
            return task.given(None)?.map(Self::on_the_host).transpose();
        };
        let memory = device.memory();
        let budget_bytes = memory.budget_bytes.saturating_sub(memory.held_bytes);
        let (mut placed, why_nothing) = match task.given(Some((device, budget_bytes)))? {
            Some(given) if options.placement.is_some() => {
                (given, "the placement puts nothing there")
            }
            Some(given) => (given, "the plan puts nothing there"),
            None => (task.planned(device, budget_bytes)?, "nothing fits that may go there"),
        };
        if placed.has_dense_parts() && !device.runs_dense_parts() {
            return Err(OpError::NoDenseParts { device: device.name().to_owned() }.into());
        }
        placed.context_bytes = task.sequence_bytes(device, &placed.placement);
        let sentence = placed.describe(device.name()).unwrap_or_else(|| {
            let name = device.name();
            format!(
                "{name} has nothing of its {budget_bytes} bytes, scratch memory included: \
                 {why_nothing}; all runs on the CPU"
            )
        });
        placed.notes.insert(0, sentence);
        if options.device_context.is_some() && placed.context_bytes == 0 {
            let name = device.name();
            placed
                .notes
                .push(format!("device_context changes nothing: no keys and values lie on {name}"));
        }
        Ok(Some(placed))
    }

    fn new(placement: Placement) -> Self {
        Self { placement, hot_densities: Vec::new(), notes: Vec::new(), context_bytes: 0 }
    }

    fn of(plan: &Plan, sizes: &ModelSizes, note: Option<String>) -> Result<Self> {
        Ok(Self {
            hot_densities: plan.layers.iter().map(|layer| layer.hot_density).collect(),
            notes: note.into_iter().collect(),
            ..Self::new(plan.placement(&sizes.model)?)
        })
    }

    fn has_dense_parts(&self) -> bool {
        self.placement.n_fast_attention() > 0 || self.placement.fast_head()
    }

    /// Both sides of the partition for the CPU, where everything else is, too.
    fn on_the_host(mut self) -> Result<Self> {
        let none = vec![false; self.placement.n_layers()];
        self.placement = self.placement.with_fast_attention(none)?.with_fast_head(false);
        Ok(self)
    }

    /// What lies where, in a sentence; `None` if nothing lies on the device.
    fn describe(&self, device: &str) -> Option<String> {
        let Self { placement, .. } = self;
        let n_layers = placement.n_layers();
        let hot: usize = (0..n_layers).map(|layer| placement.hot(layer).len()).sum();
        if hot == 0 && !self.has_dense_parts() {
            return None;
        }
        let mut parts = Vec::new();
        let all = n_layers * placement.d_ff();
        match hot {
            0 => {}
            hot if hot == all => parts.push("all neurons".to_owned()),
            hot => parts.push(format!("{:.1} % of the neurons", 100.0 * hot as f64 / all as f64)),
        }
        match placement.n_fast_attention() {
            0 => {}
            n if n == n_layers => parts.push("all attention".to_owned()),
            n => parts.push(format!("the attention of {n} of {n_layers} layers")),
        }
        if placement.fast_head() {
            parts.push("the head".to_owned());
        }
        let rest = if hot == all && placement.n_fast_attention() == n_layers {
            ""
        } else {
            " and the rest"
        };
        let last = parts.pop().unwrap_or_default();
        let list = match parts.is_empty() {
            true => last,
            false => format!("{} and {last}", parts.join(", ")),
        };
        Some(format!("{device} has {list}, the CPU the embeddings{rest}"))
    }
}

/// A model that is about to be loaded.
struct Task<'a> {
    sizes: &'a ModelSizes,
    options: &'a LoadOptions,
    predictor: Option<&'a PredictorOptions>,
}

impl Task<'_> {
    /// What the options name; a plan has to fit what a device has left of its budget.
    fn given(&self, device: Option<(&dyn FastDevice, u64)>) -> Result<Option<Placed>> {
        let Self { sizes, options, .. } = *self;
        if let Some(placement) = &options.placement {
            return Ok(Some(Placed::new(placement.clone())));
        }
        let Some(plan) = &options.plan else { return Ok(None) };
        let note = plan.check(sizes, device.map_or(u64::MAX, |(_, budget_bytes)| budget_bytes))?;
        let placed = Placed::of(plan, sizes, note)?;
        if let Some((device, budget_bytes)) = device {
            self.check_scratch(plan, &placed.placement, device, budget_bytes)?;
        }
        Ok(Some(placed))
    }

    /// Fails if a plan leaves no room for what the device takes beside rows, parts and cache: the device
    /// would refuse some layer in the middle.
    fn check_scratch(
        &self,
        plan: &Plan,
        placement: &Placement,
        device: &dyn FastDevice,
        budget_bytes: u64,
    ) -> Result<()> {
        let planned = plan.fast_bytes(self.sizes);
        if planned == 0 {
            return Ok(());
        }
        let n_hot = (0..placement.n_layers()).map(|layer| placement.hot(layer).len()).max();
        let network = match n_hot.unwrap_or(0) {
            0 => 0,
            n_hot => device.workspace_bytes(n_hot, self.sizes.model.d_model, 0),
        };
        let counted = self.sizes.layer_kv_bytes(plan.context);
        let counted = counted.saturating_mul(placement.n_fast_attention() as u64);
        let sequence = self.sequence_bytes(device, placement).saturating_sub(counted);
        let scratch = network.saturating_add(sequence);
        let needed_bytes = planned.saturating_add(scratch.saturating_sub(plan.workspace_bytes));
        if needed_bytes <= budget_bytes {
            return Ok(());
        }
        let device = "the fast device, scratch memory included";
        Err(Error::PlanOverBudget { device, needed_bytes, budget_bytes })
    }

    /// What a plan made here says.
    fn planned(&self, device: &dyn FastDevice, budget_bytes: u64) -> Result<Placed> {
        let Self { sizes, options, .. } = *self;
        let Some(profile) = &options.profile else {
            let plan = self.plan(&even_profile(sizes)?, device, budget_bytes)?;
            let note = "no profile beside the model: all neurons count as equally hot".to_owned();
            let placed = Placed::of(&plan, sizes, Some(note))?;
            return Ok(Placed { hot_densities: Vec::new(), ..placed });
        };
        Placed::of(&self.plan(profile, device, budget_bytes)?, sizes, None)
    }

    /// As the options say how to offload. Whether a layer's hot neurons pay for the synchronisation is not
    /// asked: the speed of the device is not known here, as it is to a plan that names its hardware.
    fn plan(
        &self,
        profile: &ActivationProfile,
        device: &dyn FastDevice,
        budget_bytes: u64,
    ) -> Result<Plan> {
        let sizes = self.sizes;
        let mut hardware = Hardware::preset(Hardware::PRESETS[0])?;
        device.name().clone_into(&mut hardware.name);
        (hardware.fast.capacity_bytes, hardware.host.capacity_bytes) = (u64::MAX, u64::MAX);
        let (d_ff, d_model) = (sizes.model.d_ff, sizes.model.d_model);
        let offload = self.options.offload.unwrap_or_else(|| default_offload(device));
        let mut workspace_bytes = device.workspace_bytes(d_ff, d_model, 0);
        if offload.has_dense_parts() {
            if !device.runs_dense_parts() {
                return Err(OpError::NoDenseParts { device: device.name().to_owned() }.into());
            }
            workspace_bytes = workspace_bytes.saturating_add(self.beside_the_cache(device));
        }
        let mut request = PlanRequest::new(sizes, profile, &hardware, budget_bytes)
            .with_offload(offload)
            .with_context(self.context())
            .with_workspace_bytes(workspace_bytes)
            .with_whole_predictors(false)
            .with_sync_rule(false);
        // the rows of trained predictors are as long as their file says: they take what is left
        let made = self.predictor.and_then(|predictor| predictor.bits_of_copy(row_bits(sizes)));
        if let Some(bits) = made {
            request = request.with_hot_predictor(LowBitMatrix::row_bytes(bits, d_model) as u64);
        }
        plan(&request)
    }

    /// Tokens that the device is to have room for.
    fn context(&self) -> usize {
        let LoadOptions { device_context, max_context, plan, .. } = self.options;
        let planned = plan.as_ref().map(|plan| plan.context).filter(|&context| context > 0);
        let wanted = device_context.or(planned).or(*max_context).unwrap_or(CONTEXT);
        wanted.min(self.sizes.kv.max_context)
    }

    /// Bytes on the device of a sequence with so many layers there.
    fn bytes_of_layers(&self, device: &dyn FastDevice, n_layers: usize) -> u64 {
        let kv = &self.sizes.kv;
        let shape = SequenceShape {
            d_model: self.sizes.model.d_model,
            n_layers,
            kv: KvLayout { n_kv_heads: kv.n_kv_heads, d_head: kv.d_head, dtype: kv.dtype },
        };
        let context = self.context();
        device.sequence_bytes(shape, context, context.min(PASS_TOKENS))
    }

    /// What a sequence takes beside the keys and values that a plan counts: at most that of none or of all
    /// layers, since it grows evenly with them.
    fn beside_the_cache(&self, device: &dyn FastDevice) -> u64 {
        let n_layers = self.sizes.layers.len();
        let counted = self.sizes.layer_kv_bytes(self.context()).saturating_mul(n_layers as u64);
        let beside_all = self.bytes_of_layers(device, n_layers).saturating_sub(counted);
        self.bytes_of_layers(device, 0).max(beside_all)
    }

    /// What a sequence takes on the device.
    fn sequence_bytes(&self, device: &dyn FastDevice, placement: &Placement) -> u64 {
        match placement.n_fast_attention() {
            0 if !placement.fast_head() => 0,
            n_layers => self.bytes_of_layers(device, n_layers),
        }
    }
}

/// How to offload unless told: everything that fits, what is read for every token first, where the device runs
/// it. A stand-in computes with the CPU's own cores: while it works on attention nothing else does, so it
/// gets neurons only, which both sides work on at once.
pub(crate) fn default_offload(device: &dyn FastDevice) -> Offload {
    match device.runs_dense_parts() && device.name() != StandIn::NAME {
        true => Offload::Everything,
        false => Offload::Neurons,
    }
}

/// Where the profile of a model is looked for: `activation_counts.safetensors` in its folder, or
/// `NAME.activation_counts.safetensors` beside `NAME.gguf`.
#[must_use]
pub fn profile_path(model: &Path) -> PathBuf {
    match model.is_file() {
        true => model.with_extension(PROFILE_FILE),
        false => model.join(PROFILE_FILE),
    }
}

/// The profile that lies beside a model, if there is one.
pub(crate) fn profile_beside(model: &Path) -> Result<Option<ActivationProfile>> {
    let path = profile_path(model);
    path.is_file().then(|| ActivationProfile::load(&path)).transpose()
}

/// Bits a weight of the first layer's gate.
fn row_bits(sizes: &ModelSizes) -> f64 {
    let gate = sizes.layers.first().and_then(|layer| layer.neuron_rows.first());
    8.0 * gate.copied().unwrap_or(0) as f64 / sizes.model.d_model.max(1) as f64
}

/// A profile that says of all neurons the same.
fn even_profile(sizes: &ModelSizes) -> Result<ActivationProfile> {
    let mut info = ModelInfo::default();
    (info.n_layers, info.d_ff) = (sizes.model.n_layers, sizes.model.d_ff);
    let mut profile = ActivationProfile::new(&info, false)?;
    let ones = vec![1.0; info.d_ff];
    for layer in 0..info.n_layers {
        profile.record(layer, &ones, &ones)?;
    }
    profile.add_tokens(1);
    Ok(profile)
}

#[cfg(test)]
mod tests;
