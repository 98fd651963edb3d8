//! Which copy of the gate pays, layer by layer.
//!
//! More bits cost more to read and list fewer neurons in vain; a wider margin misses less and lists
//! more. Which is cheapest differs from layer to layer, and where the gate itself is held in few bits
//! none may be cheaper than the gate. So when a model is loaded every number of bits and every margin
//! is tried on what some neurons of each layer see of a few tokens, and the cheapest that lists enough
//! of the activation mass is made.

use candle_core::Tensor;
use powerinfer_core::Result;
use powerinfer_ops::{
    FfnWeights, GateEstimate, LowBitFormat, NeuronIds, OpError, ffn_activations, with_f32,
};

/// Neurons of a layer that copies are tried on.
const TRIED_NEURONS: usize = 512;
/// The share of the activation mass that a copy has to list, unless told otherwise. On the models that
/// it was chosen on it keeps perplexity within about 0.2 %.
pub(super) const AIM: f64 = 0.99;
/// Margins that are tried, in standard deviations of a copy's error.
const MARGINS: [f32; 5] = [0.25, 0.5, 0.75, 1.0, 1.25];
/// How much longer a byte of a scattered row takes than one of a stream, as measured.
const SCATTERED: f64 = 1.6;
/// How much longer a byte of a copy takes, which is bound by unpacking, as measured.
const UNPACKED: f64 = 1.5;

/// A copy that lists enough.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Choice {
    pub(super) bits: LowBitFormat,
    pub(super) margin: f32,
    /// What a neuron costs, in bytes of a stream.
    cost: f64,
}

/// The cheapest copy that lists the share `aim` of the mass, if it is cheaper than the gate.
pub(super) fn cheapest(weights: &FfnWeights, input: &Tensor, aim: f64) -> Result<Option<Choice>> {
    let n_neurons = weights.n_neurons();
    let stride = n_neurons.div_ceil(TRIED_NEURONS).max(1);
    // a layer has fewer than 2³² neurons, or its ids would not fit
    let ids = (0..n_neurons).step_by(stride).map(|id| id as u32).collect();
    let some = weights.pick(&NeuronIds::from_sorted(ids)?)?;
    let mut activations = Vec::new();
    ffn_activations(&some, input, &mut activations)?;
    let gate_bytes = some.gate.row_bytes() as f64;
    let mut best: Option<Choice> = None;
    for bits in LowBitFormat::ALL {
        let estimate =
            GateEstimate::new(bits, &some.gate, some.gate_bias.as_deref(), some.activation)?;
        let copy_bytes = estimate.size_bytes() as f64 / some.n_neurons().max(1) as f64;
        for margin in MARGINS {
            let (mass, picked) = quality(&estimate, margin, input, &activations)?;
            if mass < aim {
                continue;
            }
            let cost = UNPACKED * copy_bytes + SCATTERED * picked * gate_bytes;
            if cost < best.map_or(gate_bytes, |best| best.cost) {
                best = Some(Choice { bits, margin, cost });
            }
            // a wider one lists more
            break;
        }
    }
    Ok(best)
}

/// The share of the mass that a copy lists, and of the neurons.
fn quality(
    estimate: &GateEstimate,
    margin: f32,
    input: &Tensor,
    activations: &[f32],
) -> Result<(f64, f64)> {
    let mut picks = Vec::new();
    with_f32(input, |values| {
        estimate.pick(values, margin, &mut picks);
        Ok::<(), OpError>(())
    })?;
    let n_neurons = estimate.rows().n_rows().max(1);
    let (mut listed, mut mass, mut n_listed) = (0.0, 0.0, 0);
    for (picks, activations) in picks.iter().zip(activations.chunks_exact(n_neurons)) {
        n_listed += picks.len();
        mass += activations.iter().map(|&h| f64::from(h.abs())).sum::<f64>();
        let of = |&id: &u32| f64::from(activations[id as usize].abs());
        listed += picks.as_slice().iter().map(of).sum::<f64>();
    }
    let share = if mass > 0.0 { listed / mass } else { 1.0 };
    Ok((share, n_listed as f64 / activations.len().max(1) as f64))
}

/// The choices in words, layers of one kind together.
pub(super) fn notes(choices: &[(usize, Option<Choice>)]) -> Vec<String> {
    let kind = |choice: &Option<Choice>| choice.map(|choice| (choice.bits, choice.margin));
    let mut kinds = Vec::new();
    let mut layers_of: Vec<Vec<usize>> = Vec::new();
    for (layer, choice) in choices {
        match kinds.iter().position(|of| *of == kind(choice)) {
            Some(at) => layers_of[at].push(*layer),
            None => {
                kinds.push(kind(choice));
                layers_of.push(vec![*layer]);
            }
        }
    }
    let note = |(kind, layers): (Option<(LowBitFormat, f32)>, Vec<usize>)| match kind {
        Some((bits, margin)) => {
            format!("layers {layers:?} predict from {bits} bits, margin {margin}")
        }
        None => format!(
            "layers {layers:?} run exactly: no copy of the gate that lists enough would be read \
             faster than the gate"
        ),
    };
    kinds.into_iter().zip(layers_of).map(note).collect()
}
