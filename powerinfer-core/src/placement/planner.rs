//! From a profile, sizes, a machine and a budget to a plan.
//!
//! The objective and the rules are those of the paper's section "Neuron Placement Policy": the sum of the
//! impact of hot neurons, how often they fire, is as large as it can be; a layer has none, or at least as
//! many as make up for the synchronisation; neurons go in groups of 64. Where everything can go to the
//! fast device, attention comes first, with its keys and values, then predictors and head, which are read for every
//! token while a neuron is read when it fires; what is left is for neurons, and a part that does not fit
//! leaves its room to them.

use super::exact::{LayerChoice, solve};
use super::firing::Firing;
use super::hardware::Hardware;
use super::hot_set::HotSet;
use super::offload::{Offload, place_layers, place_parts, place_whole};
use super::plan::{Plan, PlannedDevice, PlannedLayer};
use super::simulate::{Arrangement, Workload, simulate};
use super::sizes::{GROUP_NEURONS, LayerSizes, ModelSizes, NeuronReads};
use crate::error::{Error, Result};
use crate::model::Sparsity;
use crate::profile::ActivationProfile;

/// What a plan is made from.
#[derive(Debug, Clone)]
pub struct PlanRequest<'a> {
    sizes: &'a ModelSizes,
    profile: &'a ActivationProfile,
    hardware: &'a Hardware,
    budget_bytes: u64,
    offload: Offload,
    workload: Workload,
    workspace_bytes: u64,
    predictor_row_bytes: u64,
    whole_predictors: bool,
    sync_rule: bool,
}

impl<'a> PlanRequest<'a> {
    /// A plan of hot neurons within `budget_bytes` of the fast device, for the exact mode and a context
    /// of 512 tokens.
    #[must_use]
    pub fn new(
        sizes: &'a ModelSizes,
        profile: &'a ActivationProfile,
        hardware: &'a Hardware,
        budget_bytes: u64,
    ) -> Self {
        Self {
            sizes,
            profile,
            hardware,
            budget_bytes,
            offload: Offload::default(),
            workload: Workload::default(),
            workspace_bytes: 0,
            predictor_row_bytes: 0,
            whole_predictors: true,
            sync_rule: true,
        }
    }

    /// Says what may go to the fast device.
    #[must_use]
    pub fn with_offload(mut self, offload: Offload) -> Self {
        self.offload = offload;
        self
    }

    /// Says for how many tokens there is to be room in the cache.
    #[must_use]
    pub fn with_context(mut self, n_tokens: usize) -> Self {
        self.workload.context = n_tokens;
        self
    }

    /// Says in which mode the model is to run.
    #[must_use]
    pub fn with_sparsity(mut self, sparsity: Sparsity) -> Self {
        self.workload.sparsity = sparsity;
        self
    }

    /// Says what the fast device needs beside weights and cache.
    #[must_use]
    pub fn with_workspace_bytes(mut self, bytes: u64) -> Self {
        self.workspace_bytes = bytes;
        self
    }

    /// Says how long the row of a hot neuron is that the fast device holds of a predictor.
    #[must_use]
    pub fn with_hot_predictor(mut self, row_bytes: u64) -> Self {
        self.predictor_row_bytes = row_bytes;
        self
    }

    /// Says whether a layer's predictor may go to the fast device as a whole, whatever neurons are hot. Without
    /// being told it may, which is what the paper does; the engine itself runs there no more of it than the
    /// rows of hot neurons.
    #[must_use]
    pub fn with_whole_predictors(mut self, whole: bool) -> Self {
        self.whole_predictors = whole;
        self
    }

    /// Says whether a layer's hot neurons have to pay for the synchronisation: on a fast device that is no
    /// faster than the host they never do.
    #[must_use]
    pub fn with_sync_rule(mut self, rule: bool) -> Self {
        self.sync_rule = rule;
        self
    }
}

/// Makes a plan: which neurons are hot, and where everything else goes. The same request gives the same plan.
///
/// # Errors
/// [`Error::ProfileMismatch`] if the profile is that of another model; [`Error::PlanOverBudget`] if the
/// budget is more than the fast device has, if what is left is more than the host has, or if the budget is
/// not enough for [`Offload::Whole`].
pub fn plan(request: &PlanRequest<'_>) -> Result<Plan> {
    let PlanRequest { sizes, profile, hardware, budget_bytes, .. } = *request;
    sizes.check()?;
    profile.check_model(&sizes.model.info())?;
    within("the fast device", budget_bytes, hardware.fast.capacity_bytes)?;
    let mut plan = Plan {
        model: sizes.model.clone(),
        profile_digest: profile.digest(),
        hardware: hardware.name.clone(),
        budget_bytes,
        context: request.workload.context,
        alignment_bytes: hardware.alignment_bytes.max(1),
        workspace_bytes: request.workspace_bytes,
        predictor_row_bytes: request.predictor_row_bytes,
        layers: vec![all_cold(sizes.model.d_ff); sizes.layers.len()],
        head: PlannedDevice::Host,
        bytes_fast: 0,
        bytes_host: 0,
        hit_rate: 0.0,
        predicted_tokens_per_second: 0.0,
    };
    let hottest: Vec<Vec<u32>> =
        (0..sizes.layers.len()).map(|layer| hottest(profile, layer)).collect();
    let n_groups = place(&mut plan, request, &hottest);
    set_hot(&mut plan, profile, &hottest, &n_groups);
    plan.bytes_fast = plan.fast_bytes(sizes);
    plan.bytes_host = plan.host_bytes(sizes);
    within("the fast device", plan.bytes_fast, budget_bytes)?;
    within("the host", plan.bytes_host, hardware.host.capacity_bytes)?;
    let times = simulate(sizes, profile, hardware, request.workload, Arrangement::HotCold(&plan));
    plan.predicted_tokens_per_second = rounded(times.tokens_per_second());
    Ok(plan)
}

/// To six digits after the point, which a file holds as they are.
fn rounded(number: f64) -> f64 {
    (number * 1e6).round() / 1e6
}

fn within(device: &'static str, needed_bytes: u64, budget_bytes: u64) -> Result<()> {
    if needed_bytes <= budget_bytes {
        return Ok(());
    }
    Err(Error::PlanOverBudget { device, needed_bytes, budget_bytes })
}

fn all_cold(d_ff: usize) -> PlannedLayer {
    PlannedLayer {
        attention: PlannedDevice::Host,
        predictor: PlannedDevice::Host,
        hot_density: 0.0,
        hot: HotSet::from_ids(&[], d_ff),
    }
}

/// Puts parts that are no neurons where they go; gives the groups of hot neurons of each layer.
fn place(plan: &mut Plan, request: &PlanRequest<'_>, hottest: &[Vec<u32>]) -> Vec<usize> {
    let PlanRequest { sizes, whole_predictors: predictors, .. } = *request;
    if request.offload == Offload::Whole {
        return place_whole(plan, sizes, predictors);
    }
    let none = vec![0; sizes.layers.len()];
    let Some(left) = request.budget_bytes.checked_sub(request.workspace_bytes) else { return none };
    match request.offload {
        Offload::Neurons => choose_neurons(plan, request, hottest, left),
        Offload::Layers => place_layers(plan, sizes, left),
        Offload::DenseParts => {
            place_parts(plan, sizes, predictors, left);
            none
        }
        _ => {
            let left = place_parts(plan, sizes, predictors, left);
            choose_neurons(plan, request, hottest, left)
        }
    }
}

/// Chooses how many groups of each layer's neurons are hot, those that fire most first.
fn choose_neurons(
    plan: &Plan,
    request: &PlanRequest<'_>,
    hottest: &[Vec<u32>],
    left: u64,
) -> Vec<usize> {
    let PlanRequest { sizes, profile, .. } = *request;
    let firing = Firing::new(profile);
    let scale = Scale::of(profile);
    let choices: Vec<LayerChoice> = sizes
        .layers
        .iter()
        .zip(hottest)
        .enumerate()
        .map(|(layer, (of_layer, hottest))| {
            let counts = profile.counts(layer);
            let count = |&id: &u32| counts[id as usize];
            let groups = hottest.chunks(GROUP_NEURONS);
            let values = groups.map(|group| group.iter().map(|id| scale.value(count(id))).sum());
            let shares = hottest.iter().map(|id| firing.share(count(id)));
            LayerChoice {
                values: values.collect(),
                group_bytes: of_layer.group_bytes(plan.alignment_bytes, plan.predictor_row_bytes),
                min_groups: min_groups(request, of_layer, shares),
            }
        })
        .collect();
    let mut n_groups = solve(&choices, left);
    fill(&choices, &mut n_groups, left);
    n_groups
}

/// Makes so many groups of each layer hot, and says what that makes of the activations.
fn set_hot(plan: &mut Plan, profile: &ActivationProfile, hottest: &[Vec<u32>], n_groups: &[usize]) {
    let firing = Firing::new(profile);
    let d_ff = plan.model.d_ff;
    let (mut hits, mut all) = (0.0, 0.0);
    for (layer, (hottest, n_groups)) in hottest.iter().zip(n_groups).enumerate() {
        let hot = &hottest[..hottest.len().min(n_groups * GROUP_NEURONS)];
        let counts = profile.counts(layer);
        let made: f64 = hot.iter().map(|&id| counts[id as usize] as f64).sum();
        hits += made;
        all += counts.iter().map(|&count| count as f64).sum::<f64>();
        let shares: f64 = hot.iter().map(|&id| firing.share(counts[id as usize])).sum();
        plan.layers[layer].hot_density =
            if hot.is_empty() { 0.0 } else { rounded(shares / hot.len() as f64) };
        plan.layers[layer].hot = HotSet::from_ids(hot, d_ff);
    }
    plan.hit_rate = if all > 0.0 { rounded(hits / all) } else { 0.0 };
}

/// The neurons of a layer, those that fire most first; of equals the first.
fn hottest(profile: &ActivationProfile, layer: usize) -> Vec<u32> {
    let counts = profile.counts(layer);
    let mut ids: Vec<u32> = (0..counts.len()).map(|id| id as u32).collect();
    ids.sort_by_key(|&id| std::cmp::Reverse(counts[id as usize]));
    ids
}

/// The least number of groups, the hottest first, that pay for a synchronisation: what they read takes so
/// much longer on the host. More than there are if they cannot.
fn min_groups(
    request: &PlanRequest<'_>,
    layer: &LayerSizes,
    shares: impl Iterator<Item = f64>,
) -> usize {
    if !request.sync_rule {
        return 1;
    }
    let Hardware { host, fast, sync_seconds, .. } = request.hardware;
    let gain_per_byte = 1.0 / host.rate() - 1.0 / fast.rate();
    let reads = NeuronReads::of(request.workload.sparsity);
    let (mut gain, mut n) = (0.0, 0usize);
    for share in shares {
        n += 1;
        gain += layer.read_bytes(share, reads) * gain_per_byte;
        if gain >= *sync_seconds && gain > 0.0 {
            return n.div_ceil(GROUP_NEURONS);
        }
    }
    n.div_ceil(GROUP_NEURONS) + 1
}

/// Gives the rest of the budget to groups that fired for no token, in layers that have hot neurons
/// already: they may yet.
fn fill(choices: &[LayerChoice], n_groups: &mut [usize], capacity: u64) {
    let taken: u64 =
        choices.iter().zip(&*n_groups).map(|(choice, &n)| choice.group_bytes * n as u64).sum();
    let mut left = capacity.saturating_sub(taken);
    for (choice, n) in choices.iter().zip(n_groups).filter(|(_, n)| **n > 0) {
        let fit = usize::try_from(left / choice.group_bytes.max(1)).unwrap_or(usize::MAX);
        let more = fit.min(choice.values.len() - *n);
        left -= choice.group_bytes * more as u64;
        *n += more;
    }
}

/// Counts as values whose sum fits 64 bits; of counts in a profile that was counted, the counts.
struct Scale {
    shift: u32,
}

impl Scale {
    fn of(profile: &ActivationProfile) -> Self {
        let layers = 0..profile.model().n_layers;
        let counts = layers.flat_map(|layer| profile.counts(layer));
        let sum: u128 = counts.map(|&count| u128::from(count)).sum();
        Self { shift: (u128::BITS - sum.leading_zeros()).saturating_sub(62) }
    }

    fn value(&self, count: u64) -> u64 {
        count.checked_shr(self.shift).unwrap_or(0)
    }
}
