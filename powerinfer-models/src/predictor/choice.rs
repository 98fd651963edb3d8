//! Which copy of the gate pays, layer by layer.
//!
//! More bits cost more to read and list fewer neurons in vain; a wider margin misses less and lists
//! more. Which is cheapest differs from layer to layer, and where the gate itself is held in few bits
//! none may be cheaper than the gate. So when a model is loaded a few tokens run exactly, every number
//! of bits and every margin is tried on what some neurons of each layer saw, and the cheapest that
//! lists enough of the activation mass is made.

use std::sync::{Arc, Mutex, PoisonError};

use candle_core::Tensor;
use powerinfer_core::{CausalLm, Sparsity, Step, WantedLogits};
use powerinfer_ops::{
    FfnWeights, GateEstimate, LowBitFormat, NeuronIds, OpError, ffn_activations, with_f32,
};
use powerinfer_predictor::{
    ActivationPredictor, All, FfnInputs, PredictorKind, QuantizedGate, Result as PredictorResult,
};

use super::{PredictorOptions, model_error, trial_tokens};
use crate::error::Result;
use crate::layers::Decoder;

/// Neurons of a layer that copies are tried on.
const TRIED_NEURONS: usize = 512;
/// The share of the activation mass that a copy has to list, unless told otherwise. On the models that
/// it was chosen on it keeps perplexity within about 0.2 %.
const AIM: f64 = 0.99;
/// Margins that are tried, in standard deviations of a copy's error.
const MARGINS: [f32; 5] = [0.25, 0.5, 0.75, 1.0, 1.25];
/// How much longer a byte of a scattered row takes than one of a stream, as measured.
const SCATTERED: f64 = 1.6;
/// How much longer a byte of a copy takes, which is bound by unpacking, as measured.
const UNPACKED: f64 = 1.5;

/// A copy that lists enough.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Choice {
    bits: LowBitFormat,
    margin: f32,
    /// What a neuron costs, in bytes of a stream.
    cost: f64,
}

/// Gives each layer the copy of its gate that pays, where one does; returns what was done, in words.
pub(super) fn choose(model: &mut Decoder, options: &PredictorOptions) -> Result<Vec<String>> {
    let n_layers = model.info().n_layers;
    let seen = inputs(model)?;
    let mut choices = Vec::new();
    for (layer, input) in seen.into_iter().enumerate() {
        let (Some(weights), Some(input)) = (model.whole_ffn(layer), input) else { continue };
        let choice = cheapest(weights, &input, options.floor.unwrap_or(AIM))?;
        if let Some(Choice { bits, margin, .. }) = choice {
            let made = QuantizedGate::new(weights, bits).map_err(model_error)?;
            let margin = margin + options.shift;
            model.set_predictor(layer, Arc::new(made.with_margin(margin)));
        }
        choices.push((layer, choice));
    }
    for layer in 0..n_layers {
        if !choices.iter().any(|(of, choice)| *of == layer && choice.is_some()) {
            model.drop_predictor(layer);
        }
    }
    model.run_exactly_without_predictors();
    Ok(notes(&choices))
}

/// What the networks of some tokens see, one a layer, where it can be tried.
fn inputs(model: &mut Decoder) -> Result<Vec<Option<Tensor>>> {
    let info = model.info();
    let (tokens, n_layers) = (trial_tokens(info), info.n_layers);
    let mut watchers = Vec::new();
    for layer in 0..n_layers {
        let n_neurons = model.whole_ffn(layer).map(FfnWeights::n_neurons);
        let watcher = n_neurons.map(|n| Arc::new(Watcher::new(n)));
        if let Some(watcher) = &watcher {
            model.set_predictor(layer, Arc::clone(watcher) as _);
        }
        watchers.push(watcher);
    }
    if watchers.iter().any(Option::is_some) {
        let sparsity = Some(Sparsity::Predicted);
        let mut step = Step { wanted: WantedLogits::None, sparsity, ..Step::default() };
        model.forward(&tokens, &mut model.new_cache(), &mut step)?;
    }
    let take = |watcher: Option<Arc<Watcher>>| {
        watcher?.seen.lock().unwrap_or_else(PoisonError::into_inner).take()
    };
    Ok(watchers.into_iter().map(take).collect())
}

/// Lists all neurons and keeps what their network saw.
#[derive(Debug)]
struct Watcher {
    all: All,
    seen: Mutex<Option<Tensor>>,
}

impl Watcher {
    fn new(n_neurons: usize) -> Self {
        Self { all: All::new(n_neurons), seen: Mutex::new(None) }
    }
}

impl ActivationPredictor for Watcher {
    fn predict(&self, inputs: &FfnInputs<'_>, picks: &mut Vec<NeuronIds>) -> PredictorResult<()> {
        *self.seen.lock().unwrap_or_else(PoisonError::into_inner) = Some(inputs.normed.clone());
        self.all.predict(inputs, picks)
    }

    fn kind(&self) -> PredictorKind {
        PredictorKind::All
    }
}

/// The cheapest copy that lists the share `aim` of the mass, if it is cheaper than the gate.
fn cheapest(weights: &FfnWeights, input: &Tensor, aim: f64) -> Result<Option<Choice>> {
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
fn notes(choices: &[(usize, Option<Choice>)]) -> Vec<String> {
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
