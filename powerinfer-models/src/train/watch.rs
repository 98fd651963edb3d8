//! Who watches a model for the makers of predictors.

use powerinfer_core::{FfnObserver, FfnSeen, Result as CoreResult};
use powerinfer_ops::FfnWeights;
use powerinfer_predictor::{FfnSamples, MlpInput, SecondMoment, gate_digest};

use crate::error::{Error, Result};
use crate::predictor::model_error;

/// What is known of a layer before its predictor is made.
#[derive(Debug)]
pub(super) struct SurveyLayer {
    /// Shares the model's bytes.
    pub(super) weights: FfnWeights,
    pub(super) digest: u64,
    pub(super) moment: SecondMoment,
    pub(super) held_out: FfnSamples,
}

/// Adds up the second moments of what gates see; then keeps what is held out.
#[derive(Debug)]
pub(super) struct Surveyor {
    input: MlpInput,
    n_held_out: usize,
    holding_out: bool,
    layers: Vec<Option<SurveyLayer>>,
}

impl Surveyor {
    pub(super) fn new(input: MlpInput, n_held_out: usize) -> Self {
        Self { input, n_held_out, holding_out: false, layers: Vec::new() }
    }

    /// From now on.
    pub(super) fn hold_out(mut self) -> Self {
        self.holding_out = true;
        self
    }

    pub(super) fn finish(self, n_layers: usize) -> Result<Vec<SurveyLayer>> {
        let layers: Vec<SurveyLayer> = self.layers.into_iter().flatten().collect();
        if layers.len() == n_layers {
            return Ok(layers);
        }
        Err(Error::Training {
            expected: "layers whose neurons lie together".to_owned(),
            found: "neurons split into hot and cold".to_owned(),
        })
    }
}

impl FfnObserver for Surveyor {
    fn observe(&mut self, seen: &FfnSeen<'_>) -> CoreResult<()> {
        let Some(weights) = seen.weights else { return Ok(()) };
        let (d_model, d_ff) = (weights.d_model(), weights.n_neurons());
        if self.layers.len() <= seen.layer {
            self.layers.resize_with(seen.layer + 1, || None);
        }
        let n_held_out = self.n_held_out;
        let layer = self.layers[seen.layer].get_or_insert_with(|| SurveyLayer {
            weights: weights.clone(),
            digest: gate_digest(weights),
            moment: SecondMoment::new(d_model),
            held_out: FfnSamples::new(d_model, d_ff, n_held_out),
        });
        if self.holding_out {
            let values = input(self.input, seen)?;
            layer.held_out.push(&values, seen.activations).map_err(model_error)?;
        } else {
            let values = input(MlpInput::Normed, seen)?;
            layer.moment.add(&values).map_err(model_error)?;
        }
        Ok(())
    }
}

/// Keeps what each layer saw and gave over a piece of text.
#[derive(Debug)]
pub(super) struct Collector {
    input: MlpInput,
    capacity: usize,
    layers: Vec<Option<FfnSamples>>,
}

impl Collector {
    pub(super) fn new(input: MlpInput, n_layers: usize, capacity: usize) -> Self {
        Self { input, capacity, layers: (0..n_layers).map(|_| None).collect() }
    }

    pub(super) fn finish(self) -> Result<Vec<FfnSamples>> {
        self.layers
            .into_iter()
            .collect::<Option<_>>()
            .ok_or_else(|| Error::from(powerinfer_predictor::Error::NoSamples))
    }
}

impl FfnObserver for Collector {
    fn observe(&mut self, seen: &FfnSeen<'_>) -> CoreResult<()> {
        let values = input(self.input, seen)?;
        let (d_model, d_ff) = (seen.normed.dim(1)?, seen.down_norms.len());
        let capacity = self.capacity;
        let Some(layer) = self.layers.get_mut(seen.layer) else { return Ok(()) };
        let samples = layer.get_or_insert_with(|| FfnSamples::new(d_model, d_ff, capacity));
        samples.push(&values, seen.activations).map_err(model_error)?;
        Ok(())
    }
}

/// What a predictor of that form reads, `[n_tokens, d_model]`.
fn input(input: MlpInput, seen: &FfnSeen<'_>) -> CoreResult<Vec<f32>> {
    let tensor = match input {
        MlpInput::Residual => seen.residual,
        MlpInput::Normed => seen.normed,
    };
    Ok(tensor.flatten_all()?.to_vec1()?)
}
