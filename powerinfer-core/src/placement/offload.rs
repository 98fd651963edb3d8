//! What may go to the fast device, and the parts of it that are not neurons.

use std::fmt;
use std::str::FromStr;

use super::plan::{Plan, PlannedDevice, part_bytes};
use super::sizes::{GROUP_NEURONS, ModelSizes};
use crate::error::{Error, Result};

/// What may go to the fast device, and what comes first where not all fits.
///
/// The paper's own way is [`Everything`](Self::Everything); the others are what it is compared with.
/// Attention goes with its norms, keys and values. The embeddings never go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Offload {
    /// The neurons that fire most; everything else stays on the host.
    #[default]
    Neurons,
    /// What is read for every token first: attention, layer by layer, predictors and the head. Then the
    /// neurons that fire most.
    Everything,
    /// What is read for every token, and no neuron.
    DenseParts,
    /// Whole layers, the last ones, as many as fit with all of their neurons; then the head, if it fits. So does
    /// llama.cpp's option `--n-gpu-layers`.
    Layers,
    /// All of it. A budget that is too small for that is an error.
    Whole,
}

impl Offload {
    /// All there are.
    pub const ALL: [Self; 5] =
        [Self::Neurons, Self::Everything, Self::DenseParts, Self::Layers, Self::Whole];

    /// The name on command lines.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Neurons => "neurons",
            Self::Everything => "everything",
            Self::DenseParts => "dense",
            Self::Layers => "layers",
            Self::Whole => "whole",
        }
    }

    /// Whether parts may go that are not neurons, which not every device runs.
    #[must_use]
    pub fn has_dense_parts(self) -> bool {
        self != Self::Neurons
    }
}

impl fmt::Display for Offload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Offload {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        Self::ALL.into_iter().find(|offload| offload.name() == name).ok_or_else(|| {
            Error::UnknownOffload {
                found: name.to_owned(),
                supported: "neurons, everything, dense, layers, whole",
            }
        })
    }
}

/// Puts what is read for every token on the fast device, as far as it fits; gives the bytes that are left.
pub(super) fn place_parts(
    plan: &mut Plan,
    sizes: &ModelSizes,
    predictors: bool,
    mut left: u64,
) -> u64 {
    let alignment = plan.alignment_bytes;
    let mut place = |device: &mut PlannedDevice, parts: [u64; 2]| {
        let bytes = sum(parts.map(|bytes| part_bytes(bytes, alignment)));
        if let Some(rest) = left.checked_sub(bytes).filter(|_| bytes > 0) {
            left = rest;
            *device = PlannedDevice::Fast;
        }
    };
    // keys and values are of use where the attention is
    let kv_bytes = sizes.layer_kv_bytes(plan.context);
    for (planned, layer) in plan.layers.iter_mut().zip(&sizes.layers) {
        place(&mut planned.attention, [layer.attention_bytes, kv_bytes]);
    }
    if predictors {
        for (planned, layer) in plan.layers.iter_mut().zip(&sizes.layers) {
            place(&mut planned.predictor, [layer.predictor_bytes, 0]);
        }
    }
    place(&mut plan.head, [sizes.head_bytes, 0]);
    left
}

/// Puts the last layers on the fast device, as many as fit with all neurons, and the head if it still does;
/// gives the groups of neurons of each layer that are there.
pub(super) fn place_layers(plan: &mut Plan, sizes: &ModelSizes, mut left: u64) -> Vec<usize> {
    let alignment = plan.alignment_bytes;
    let kv_bytes = sizes.layer_kv_bytes(plan.context);
    let n_groups = n_groups(sizes);
    let mut groups = vec![0; sizes.layers.len()];
    for (index, layer) in sizes.layers.iter().enumerate().rev() {
        let neurons = layer.group_bytes(alignment, plan.predictor_row_bytes);
        let parts = [layer.attention_bytes, kv_bytes].map(|bytes| part_bytes(bytes, alignment));
        let bytes = sum(parts).saturating_add(neurons.saturating_mul(n_groups as u64));
        let Some(rest) = left.checked_sub(bytes) else { break };
        left = rest;
        plan.layers[index].attention = PlannedDevice::Fast;
        groups[index] = n_groups;
    }
    if part_bytes(sizes.head_bytes, alignment) <= left {
        plan.head = PlannedDevice::Fast;
    }
    groups
}

/// Puts all of it on the fast device, whether it fits or not; gives the groups of neurons of each layer.
pub(super) fn place_whole(plan: &mut Plan, sizes: &ModelSizes, predictors: bool) -> Vec<usize> {
    for (planned, layer) in plan.layers.iter_mut().zip(&sizes.layers) {
        planned.attention = PlannedDevice::Fast;
        if predictors && layer.predictor_bytes > 0 {
            planned.predictor = PlannedDevice::Fast;
        }
    }
    plan.head = PlannedDevice::Fast;
    vec![n_groups(sizes); sizes.layers.len()]
}

/// Groups of neurons of a layer.
fn n_groups(sizes: &ModelSizes) -> usize {
    sizes.model.d_ff.div_ceil(GROUP_NEURONS)
}

fn sum(parts: [u64; 2]) -> u64 {
    parts[0].saturating_add(parts[1])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_go_both_ways() {
        for offload in Offload::ALL {
            assert_eq!(offload.name().parse::<Offload>().unwrap(), offload);
        }
        let error = "all".parse::<Offload>().unwrap_err();
        assert!(matches!(error, Error::UnknownOffload { .. }));
        assert!(Offload::ALL.iter().all(|offload| error.to_string().contains(offload.name())));
    }
}
