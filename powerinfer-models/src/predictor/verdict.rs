//! Which layers get a predictor: those where one is any good.

use std::sync::Arc;

use powerinfer_core::{
    CancelToken, KvShape, ModelConfig, PredictionCounts, Result as CoreResult, WeightStore,
};
use powerinfer_ops::{FfnWeights, ffn_activations};
use powerinfer_predictor::{ActivationPredictor, FfnInputs, QuantizedGate};

use super::choice::{self, Choice};
use super::maker::Maker;
use super::trial::{Seen, Trial};
use super::{PredictorOptions, PredictorSource, model_error};
use crate::error::{Error, Result};
use crate::layers::{Block, Embedding, Position, compare};

/// A predictor that lists more than this share saves nothing that running the whole gate would not.
const MOST_LISTED: f64 = 0.9;

/// Gives each layer its predictor while the model is loaded, where one is any good.
///
/// A few tokens run along with the loading, through each layer while it is whole and the host's, and what
/// its network sees of them decides. So predictors depend on the weights, as they are held, and on nothing
/// else: the same ones come out wherever neurons, attention and head are to lie afterwards.
#[derive(Debug)]
pub(crate) struct Predictors<'a> {
    options: &'a PredictorOptions,
    maker: Maker<'a>,
    trial: Trial,
    n_layers: usize,
    /// Layers with what was chosen for them.
    chosen: Vec<(usize, Option<Choice>)>,
    /// Layers with how well predictors that were not chosen did.
    tried: Vec<(usize, PredictionCounts)>,
}

/// What is worth knowing about the predictors of a model.
#[derive(Debug)]
pub(crate) struct PredictorNotes {
    /// Of the file that they came from.
    pub(crate) of_file: Vec<String>,
    /// Of what the tokens showed.
    pub(crate) of_trial: Vec<String>,
    /// Whether it was to be found out which ones pay.
    pub(crate) were_chosen: bool,
}

impl<'a> Predictors<'a> {
    /// Predictors for a model with keys and values of this shape.
    ///
    /// # Errors
    /// [`Error::PredictorOptions`]; [`Error::Core`] naming the file of predictors that cannot be read or is
    /// another model's.
    pub(crate) fn open(
        options: &'a PredictorOptions,
        config: &ModelConfig,
        kv: KvShape,
        cancel: &CancelToken,
    ) -> Result<Self> {
        options.check()?;
        let maker = Maker::open(options, config.n_layers)?;
        maker.check_model(config)?;
        let trial = Trial::new(config, kv, cancel);
        let n_layers = config.n_layers;
        Ok(Self { options, maker, trial, n_layers, chosen: Vec::new(), tried: Vec::new() })
    }

    /// The predictor of a layer with this block, whose neurons are all in one place; `None` if it is to run
    /// all neurons that fire. Layers come in their order.
    pub(crate) fn choose(
        &mut self,
        layer: usize,
        block: &mut Block,
        before: (&Embedding, &Position),
        store: &mut WeightStore,
    ) -> CoreResult<Option<Arc<dyn ActivationPredictor>>> {
        let seen = self.trial.pass(layer, block, before)?;
        let (Some(weights), Some(seen)) = (block.ffn.predictable(), seen) else { return Ok(None) };
        if self.are_chosen() {
            return self.cheapest(layer, weights, &seen);
        }
        let made = self.maker.made_for(layer, weights, store)?;
        let counts = try_out(made.as_ref(), weights, &seen)?;
        let pays = self.reaches(&counts) && counts.picked_density() <= MOST_LISTED;
        self.tried.push((layer, counts));
        Ok(pays.then_some(made))
    }

    /// The copy of the layer's gate that pays, if one does.
    fn cheapest(
        &mut self,
        layer: usize,
        weights: &FfnWeights,
        seen: &Seen,
    ) -> CoreResult<Option<Arc<dyn ActivationPredictor>>> {
        let aim = self.options.floor.unwrap_or(choice::AIM);
        let choice = choice::cheapest(weights, &seen.normed, aim)?;
        self.chosen.push((layer, choice));
        let Some(Choice { bits, margin, .. }) = choice else { return Ok(None) };
        let made = QuantizedGate::new(weights, bits).map_err(model_error)?;
        Ok(Some(Arc::new(made.with_margin(margin + self.options.shift))))
    }

    /// Whether bits and margin are chosen layer by layer.
    fn are_chosen(&self) -> bool {
        self.options.source == PredictorSource::Quantized(None)
    }

    fn reaches(&self, counts: &PredictionCounts) -> bool {
        counts.recall_mass() >= self.options.floor()
    }

    /// What there is to say when all layers are loaded.
    ///
    /// # Errors
    /// [`Error::PredictorOfAnotherModel`] if a trained predictor misses too much in every layer.
    pub(crate) fn finish(self) -> Result<PredictorNotes> {
        let were_chosen = self.are_chosen();
        let of_trial = match were_chosen {
            true => choice::notes(&self.chosen),
            false => self.notes_of_tried()?,
        };
        Ok(PredictorNotes { of_file: self.maker.notes(), of_trial, were_chosen })
    }

    fn notes_of_tried(&self) -> Result<Vec<String>> {
        let floor = self.options.floor();
        let (mut missing, mut listing_all) = (Vec::new(), Vec::new());
        for (layer, counts) in &self.tried {
            if !self.reaches(counts) {
                missing.push(*layer);
            } else if counts.picked_density() > MOST_LISTED {
                listing_all.push(*layer);
            }
        }
        let is_trained = !matches!(
            self.options.source,
            PredictorSource::Quantized(_) | PredictorSource::Random { .. }
        );
        if is_trained && missing.len() == self.n_layers {
            return Err(Error::PredictorOfAnotherModel { floor });
        }
        let mut notes = Vec::new();
        if !missing.is_empty() {
            let worst = self.tried.iter().map(|(_, counts)| counts.recall_mass());
            let worst = worst.fold(f64::INFINITY, f64::min);
            notes.push(format!(
                "layers {missing:?} run exactly: their predictors list less than {:.0} % of the \
                 activation mass ({:.0} % in the worst)",
                100.0 * floor,
                100.0 * worst
            ));
        }
        if !listing_all.is_empty() {
            notes.push(format!(
                "layers {listing_all:?} run exactly: their predictors list nearly all neurons"
            ));
        }
        Ok(notes)
    }
}

/// How what a predictor lists compares with what fires.
fn try_out(
    predictor: &dyn ActivationPredictor,
    weights: &FfnWeights,
    Seen { residual, normed }: &Seen,
) -> CoreResult<PredictionCounts> {
    let (mut picks, mut activations) = (Vec::new(), Vec::new());
    ffn_activations(weights, normed, &mut activations)?;
    predictor.predict(&FfnInputs { residual, normed }, &mut picks).map_err(model_error)?;
    Ok(compare(&picks, &activations, weights.n_neurons()))
}
