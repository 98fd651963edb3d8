//! A feed-forward network that computes the neurons that fire.

use std::sync::Arc;
use std::time::Instant;

use candle_core::Tensor;
use powerinfer_core::{Error, Result, Sparsity, Step};
use powerinfer_ops::{NeuronIds, add_bias, residual_add};
use powerinfer_predictor::{ActivationPredictor, FfnInputs};

use crate::layers::FfnShard;
use crate::layers::ffn_shard::LayerNeurons;

/// Inputs → which neurons → hot shard and cold shard → sum.
#[derive(Debug, Clone)]
pub struct SparseFfn {
    shards: Vec<FfnShard>,
    down_bias: Option<Vec<f32>>,
    predictor: Option<Arc<dyn ActivationPredictor>>,
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
        Ok(Self { shards, down_bias, predictor: None })
    }

    /// Runs, of the neurons that the predictor lists, those that fire.
    #[must_use]
    pub fn with_predictor(mut self, predictor: Arc<dyn ActivationPredictor>) -> Self {
        self.predictor = Some(predictor);
        self
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
        let mut picks: Vec<NeuronIds> = Vec::new();
        let neurons = match (sparsity, &self.predictor) {
            (Sparsity::Dense, _) => LayerNeurons::All,
            (_, None) => LayerNeurons::Firing,
            (_, Some(predictor)) => {
                let start = Instant::now();
                predictor
                    .predict(inputs, &mut picks)
                    .map_err(|error| Error::Model(Box::new(error)))?;
                step.stats.predictor_ns += u64::try_from(start.elapsed().as_nanos()).unwrap_or(0);
                LayerNeurons::FiringOf(&picks)
            }
        };
        let mut sum: Option<Tensor> = None;
        for shard in &self.shards {
            let (part, counts) = shard.forward(inputs.normed, neurons, &mut step.workspace)?;
            sum = Some(match sum {
                Some(sum) => residual_add(&sum, &part)?,
                None => part,
            });
            let held = (shard.n_neurons() * inputs.normed.dim(0)?) as u64;
            step.stats.record_ffn(layer, counts.fired, counts.ran, held);
            step.stats.weight_bytes += counts.bytes;
        }
        let sum = sum.ok_or(Error::PlacementShape { what: "shards", expected: 1, found: 0 })?;
        match &self.down_bias {
            Some(bias) => Ok(add_bias(&sum, bias)?),
            None => Ok(sum),
        }
    }
}
