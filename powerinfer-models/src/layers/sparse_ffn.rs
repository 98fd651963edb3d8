//! A feed-forward network that computes the neurons that fire.

mod hybrid;
mod in_sequence;

use std::sync::{Arc, OnceLock};
use std::time::Instant;

use candle_core::Tensor;
use powerinfer_core::{Error, FfnSeen, PredictionCounts, Result, Sparsity, Step};
use powerinfer_ops::{FfnCounts, FfnWeights, NeuronIds, add_bias, ffn_activations, residual_add};
use powerinfer_predictor::{ActivationPredictor, FfnInputs};

use crate::layers::ffn_shard::{LayerNeurons, scatter};
use crate::layers::{FfnShard, HotShard, SplitPredictor};
use crate::predictor::model_error;
pub(crate) use in_sequence::{SlotInputs, StartedFfn};

/// What a network is made of whose neurons are all in one place.
pub(crate) type Whole = (FfnWeights, Option<Vec<f32>>, Option<Arc<dyn ActivationPredictor>>);

/// Inputs → which neurons → hot shard and cold shard → sum.
#[derive(Debug, Clone)]
pub struct SparseFfn {
    shards: Vec<FfnShard>,
    /// What runs on a fast device while the only shard runs here.
    hot: Option<HotShard>,
    down_bias: Option<Vec<f32>>,
    /// Whether the fast device adds it where the tokens lie there.
    bias_on_device: bool,
    predictor: Option<Arc<dyn ActivationPredictor>>,
    /// The same predictor, where each side of a split runs its own part of it.
    split_predictor: Option<Arc<SplitPredictor>>,
    /// Whether no predictor is ever made for it.
    never_predicted: bool,
    /// Norms of the rows of down, for those who watch.
    down_norms: OnceLock<Vec<f32>>,
}

impl SparseFfn {
    /// A network whose neurons lie in `shards`, with `down_bias` `[d_model]`.
    ///
    /// # Errors
    /// [`Error::PlacementShape`] if there is no shard.
    pub fn new(shards: Vec<FfnShard>, down_bias: Option<Vec<f32>>) -> Result<Self> {
        if shards.is_empty() {
            return Err(Error::PlacementShape { what: "shards", expected: 1, found: 0 });
        }
        Ok(Self {
            shards,
            hot: None,
            down_bias,
            bias_on_device: false,
            predictor: None,
            split_predictor: None,
            never_predicted: false,
            down_norms: OnceLock::new(),
        })
    }

    /// In [`Sparsity::Predicted`] runs, of the neurons that the predictor lists, those that fire.
    #[must_use]
    pub fn with_predictor(mut self, predictor: Arc<dyn ActivationPredictor>) -> Self {
        self.predictor = Some(predictor);
        self
    }

    /// The predictor, if there is one.
    #[must_use]
    pub fn predictor(&self) -> Option<&dyn ActivationPredictor> {
        self.predictor.as_deref()
    }

    /// Gives the network a predictor, or none; returns the one that it had.
    pub(crate) fn replace_predictor(
        &mut self,
        predictor: Option<Arc<dyn ActivationPredictor>>,
    ) -> Option<Arc<dyn ActivationPredictor>> {
        std::mem::replace(&mut self.predictor, predictor)
    }

    /// Says that no predictor is to be made for the network, wherever its neurons are to lie: unsplit no
    /// neuron's part of down could be read alone.
    pub(crate) fn never_predicted(mut self) -> Self {
        self.never_predicted = true;
        self
    }

    /// The weights that a predictor may be made for, if all neurons are in one shard.
    pub(crate) fn predictable(&self) -> Option<&FfnWeights> {
        self.whole().filter(|_| !self.never_predicted)
    }

    /// The weights, if all neurons are in one shard.
    fn whole(&self) -> Option<&FfnWeights> {
        match (self.shards.as_slice(), &self.hot) {
            ([shard], None) => Some(shard.weights()),
            _ => None,
        }
    }

    /// Weights, bias and predictor, if all neurons are in one shard; else the network as it is.
    pub(crate) fn into_whole(mut self) -> std::result::Result<Whole, Box<Self>> {
        match (self.shards.pop(), self.shards.is_empty(), &self.hot) {
            (Some(shard), true, None) => Ok((shard.into_weights(), self.down_bias, self.predictor)),
            (shard, ..) => {
                self.shards.extend(shard);
                Err(Box::new(self))
            }
        }
    }

    /// What the network adds to the residual stream, `[n_tokens, d_model]`. Counts go to
    /// `step.stats`, under `layer`.
    ///
    /// # Errors
    /// [`OpError::NotSparse`](powerinfer_ops::OpError::NotSparse) if neurons are to be skipped under
    /// an activation that is never zero, and any error of the predictor or an operator.
    pub fn forward(
        &self,
        inputs: &FfnInputs<'_>,
        sparsity: Sparsity,
        layer: usize,
        step: &mut Step,
    ) -> Result<Tensor> {
        if step.measure_prediction || step.observer.is_some() {
            self.watch(inputs, layer, step)?;
        }
        let split = self.hot.as_ref().zip(self.split_predictor.as_deref());
        let sum = match (sparsity, &self.predictor, split) {
            (Sparsity::Dense, ..) => self.sum(inputs.normed, LayerNeurons::All, layer, step)?,
            (Sparsity::Predicted, _, Some((hot, split))) => {
                self.predicted_on_both_sides((hot, split), inputs, layer, step)?
            }
            (Sparsity::Predicted, Some(predictor), None) => {
                self.predicted(predictor.as_ref(), inputs, layer, step)?
            }
            _ => self.sum(inputs.normed, LayerNeurons::Firing, layer, step)?,
        };
        match &self.down_bias {
            Some(bias) => Ok(add_bias(&sum, bias)?),
            None => Ok(sum),
        }
    }

    /// The sum over the shards.
    fn sum(
        &self,
        normed: &Tensor,
        neurons: LayerNeurons<'_>,
        layer: usize,
        step: &mut Step,
    ) -> Result<Tensor> {
        if let Some(hot) = &self.hot {
            return self.sum_of_both_sides(hot, normed, neurons, layer, step);
        }
        let mut sum: Option<Tensor> = None;
        for shard in &self.shards {
            let (part, counts) = shard.forward(normed, neurons, &mut step.workspace)?;
            sum = Some(match sum {
                Some(sum) => residual_add(&sum, &part)?,
                None => part,
            });
            record(step, layer, counts, shard.n_neurons() * normed.dim(0)?);
        }
        sum.ok_or(Error::PlacementShape { what: "shards", expected: 1, found: 0 })
    }

    /// The sum over the neurons that the predictor lists: by the network's own tasks where all
    /// neurons are in one shard, else from lists that each shard takes its part of.
    fn predicted(
        &self,
        predictor: &dyn ActivationPredictor,
        inputs: &FfnInputs<'_>,
        layer: usize,
        step: &mut Step,
    ) -> Result<Tensor> {
        let began = Instant::now();
        let mut hidden = std::mem::take(&mut step.hidden);
        let fused = match self.shards.len() {
            1 if self.hot.is_none() => predictor.fused(inputs, &mut hidden).map_err(model_error)?,
            _ => None,
        };
        if let Some(neurons) = fused {
            step.stats.predictor_ns += nanoseconds(began);
            step.stats.weight_bytes += predictor.bytes_before() as u64;
            let shard = &self.shards[0];
            let (sum, counts) = shard.run(inputs.normed, neurons, &mut step.workspace)?;
            record(step, layer, counts, shard.n_neurons() * inputs.normed.dim(0)?);
            step.hidden = hidden;
            return Ok(sum);
        }
        let mut picks = std::mem::take(&mut step.picks);
        predictor.predict(inputs, &mut picks).map_err(model_error)?;
        step.stats.predictor_ns += nanoseconds(began);
        step.stats.weight_bytes += predictor.size_bytes() as u64;
        let sum = self.sum(inputs.normed, LayerNeurons::FiringOf(&picks), layer, step);
        (step.hidden, step.picks) = (hidden, picks);
        sum
    }

    /// Computes what every neuron gives, shows it to the observer and holds the predictor to it.
    fn watch(&self, inputs: &FfnInputs<'_>, layer: usize, step: &mut Step) -> Result<()> {
        let activations = self.activations(inputs.normed)?;
        if let Some(predictor) = self.predictor.as_ref().filter(|_| step.measure_prediction) {
            predictor.predict(inputs, &mut step.picks).map_err(model_error)?;
            let d_ff = activations.len() / inputs.normed.dim(0)?.max(1);
            step.stats.record_prediction(layer, compare(&step.picks, &activations, d_ff));
        }
        let Some(observer) = &step.observer else { return Ok(()) };
        let norms = match self.down_norms.get() {
            Some(norms) => norms,
            None => {
                let norms = self.row_norms()?;
                self.down_norms.get_or_init(|| norms)
            }
        };
        let residual_and_normed = [inputs.residual, inputs.normed];
        let seen = FfnSeen::new(layer, residual_and_normed, &activations, norms)
            .with_weights(self.whole());
        // an observer that panicked left nothing behind that matters to the pass
        observer.lock().unwrap_or_else(std::sync::PoisonError::into_inner).observe(&seen)
    }

    /// Activations of all neurons of the layer, `[n_tokens, d_ff]`.
    fn activations(&self, normed: &Tensor) -> Result<Vec<f32>> {
        let d_ff = self.d_ff();
        let mut all = vec![0.0; normed.dim(0)? * d_ff];
        let mut part = Vec::new();
        for (weights, ids) in self.all_rows()? {
            ffn_activations(&weights, normed, &mut part)?;
            let tokens = all.chunks_exact_mut(d_ff.max(1));
            for (all, part) in tokens.zip(part.chunks_exact(weights.n_neurons().max(1))) {
                scatter(ids, part, all);
            }
        }
        Ok(all)
    }

    fn row_norms(&self) -> Result<Vec<f32>> {
        let mut all = vec![0.0; self.d_ff()];
        for (weights, ids) in self.all_rows()? {
            scatter(ids, &row_norms(&weights), &mut all);
        }
        Ok(all)
    }

    fn d_ff(&self) -> usize {
        let hot = self.hot.as_ref().map_or(0, HotShard::n_neurons);
        self.shards.iter().map(FfnShard::n_neurons).sum::<usize>() + hot
    }

    /// The rows of every side, those of the fast device read back, with their ids in the layer.
    fn all_rows(&self) -> Result<Vec<(FfnWeights, Option<&NeuronIds>)>> {
        let shards = self.shards.iter().map(|shard| (shard.weights().clone(), shard.ids()));
        let mut all: Vec<_> = shards.collect();
        if let Some(hot) = &self.hot {
            all.push((hot.held().read_back()?, Some(hot.ids())));
        }
        Ok(all)
    }
}

/// Norms of the rows of down.
fn row_norms(weights: &FfnWeights) -> Vec<f32> {
    if let Some(down) = &weights.down_by_output {
        let mut row = vec![0.0; down.d_model()];
        let mut squares = vec![0.0; down.d_model()];
        for output in 0..down.n_neurons() {
            down.row_to_f32(output, &mut row);
            squares.iter_mut().zip(&row).for_each(|(sum, value)| *sum += value * value);
        }
        return squares.iter().map(|sum: &f32| sum.sqrt()).collect();
    }
    let down = &weights.down;
    let mut row = vec![0.0; down.d_model()];
    let norm = |index: usize| {
        down.row_to_f32(index, &mut row);
        row.iter().map(|value| value * value).sum::<f32>().sqrt()
    };
    (0..down.n_neurons()).map(norm).collect()
}

fn record(step: &mut Step, layer: usize, counts: FfnCounts, neurons: usize) {
    let stats = &mut step.stats;
    stats.record_ffn(layer, counts.fired, counts.ran, neurons as u64);
    stats.record_picked(layer, counts.picked);
    stats.weight_bytes += counts.bytes;
    stats.predictor_ns += counts.predictor_ns;
}

/// How the listed neurons compare with those whose activation is not zero.
pub(crate) fn compare(picks: &[NeuronIds], activations: &[f32], d_ff: usize) -> PredictionCounts {
    let mut counts = PredictionCounts::default();
    for (picks, activations) in picks.iter().zip(activations.chunks_exact(d_ff.max(1))) {
        counts.neurons += activations.len() as u64;
        counts.picked += picks.len() as u64;
        for activation in activations {
            counts.fired += u64::from(*activation != 0.0);
            counts.mass += f64::from(activation.abs());
        }
        for &id in picks.as_slice() {
            let activation = activations.get(id as usize).copied().unwrap_or_default();
            counts.hits += u64::from(activation != 0.0);
            counts.mass_hits += f64::from(activation.abs());
        }
    }
    counts
}

fn nanoseconds(began: Instant) -> u64 {
    u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX)
}
