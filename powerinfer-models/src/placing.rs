//! Which neurons lie on the fast device: those that the caller or a plan names, or those that a plan
//! made here does.

use std::path::{Path, PathBuf};

use powerinfer_core::{
    ActivationProfile, Hardware, ModelConfig, ModelInfo, ModelSizes, Placement, Plan, PlanRequest,
    Result, WeightStore, plan,
};
use powerinfer_ops::{FastDevice, LowBitMatrix};

use crate::load::LoadOptions;
use crate::predictor::PredictorOptions;
use crate::sizes;

/// The file beside a model that has its profile: of this name in a folder, after the name and a dot
/// for a file.
const PROFILE_FILE: &str = "activation_counts.safetensors";

/// Hot and cold, and what is known of them.
#[derive(Debug)]
pub(crate) struct Placed {
    pub(crate) placement: Placement,
    /// Share of the hot neurons of each layer that fires for a token; empty if nothing is known.
    pub(crate) hot_densities: Vec<f64>,
    /// What is worth knowing about it.
    pub(crate) note: Option<String>,
}

impl Placed {
    /// The partition for a model that is about to be loaded; `None` if nobody asked for one.
    pub(crate) fn find(
        config: &ModelConfig,
        store: &WeightStore,
        options: &LoadOptions,
        predictor: Option<&PredictorOptions>,
    ) -> Result<Option<Self>> {
        let device = options.fast_device.as_deref();
        if let Some(placement) = &options.placement {
            placement.check(config.n_layers, config.d_ff)?;
            let placement = placement.clone();
            return Ok(Some(Self { placement, hot_densities: Vec::new(), note: None }));
        }
        if options.plan.is_none() && device.is_none() {
            return Ok(None);
        }
        let sizes = sizes::of_store(config, store, options)?;
        let budget_bytes = device.map_or(u64::MAX, |device| {
            let memory = device.memory();
            memory.budget_bytes.saturating_sub(memory.held_bytes)
        });
        if let Some(plan) = &options.plan {
            let note = plan.check(&sizes, budget_bytes)?;
            return Self::of(plan, &sizes, note).map(Some);
        }
        let Some(device) = device else { return Ok(None) };
        let Some(profile) = &options.profile else {
            let profile = even_profile(&sizes)?;
            let plan = make(&sizes, &profile, device, budget_bytes, predictor)?;
            let note = "no profile beside the model: all neurons count as equally hot".to_owned();
            let placed = Self::of(&plan, &sizes, Some(note))?.noting_an_idle_device(budget_bytes);
            return Ok(Some(Self { hot_densities: Vec::new(), ..placed }));
        };
        let plan = make(&sizes, profile, device, budget_bytes, predictor)?;
        Ok(Some(Self::of(&plan, &sizes, None)?.noting_an_idle_device(budget_bytes)))
    }

    /// Says so if the budget is too small for any neuron.
    fn noting_an_idle_device(mut self, budget_bytes: u64) -> Self {
        let idle = (0..self.placement.n_layers()).all(|l| self.placement.hot(l).is_empty());
        if idle {
            self.note = Some(format!(
                "no neurons fit the fast device's {budget_bytes} bytes, which scratch memory is \
                 part of: all run on the CPU"
            ));
        }
        self
    }

    fn of(plan: &Plan, sizes: &ModelSizes, note: Option<String>) -> Result<Self> {
        let hot_densities = plan.layers.iter().map(|layer| layer.hot_density).collect();
        Ok(Self { placement: plan.placement(&sizes.model)?, hot_densities, note })
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

/// The neurons that fire most, as many as fit. Whether a layer's pay for the synchronisation is
/// not asked: the speed of the device is not known here, as it is to a plan that names its hardware.
fn make(
    sizes: &ModelSizes,
    profile: &ActivationProfile,
    device: &dyn FastDevice,
    budget_bytes: u64,
    predictor: Option<&PredictorOptions>,
) -> Result<Plan> {
    let mut hardware = Hardware::preset(Hardware::PRESETS[0])?;
    device.name().clone_into(&mut hardware.name);
    (hardware.fast.capacity_bytes, hardware.host.capacity_bytes) = (u64::MAX, u64::MAX);
    let (d_ff, d_model) = (sizes.model.d_ff, sizes.model.d_model);
    let mut request = PlanRequest::new(sizes, profile, &hardware, budget_bytes)
        .with_workspace_bytes(device.workspace_bytes(d_ff, d_model, 0))
        .with_sync_rule(false);
    // the rows of trained predictors are as long as their file says: they take what is left
    let made = predictor.and_then(|predictor| predictor.bits_of_copy(row_bits(sizes)));
    if let Some(bits) = made {
        request = request.with_hot_predictor(LowBitMatrix::row_bytes(bits, d_model) as u64);
    }
    plan(&request)
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
