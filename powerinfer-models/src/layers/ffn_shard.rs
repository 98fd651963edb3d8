//! The neurons of one placement side.

use candle_core::Tensor;
use powerinfer_core::Result;
use powerinfer_ops::{FfnCounts, FfnWeights, NeuronIds, Neurons, Workspace, ffn};

/// Gate, up and down rows of some of a layer's neurons on one device; hot and cold are two values
/// of it.
#[derive(Debug, Clone)]
pub struct FfnShard {
    weights: FfnWeights,
    /// The layer's ids of the rows; `None` if all are here.
    ids: Option<NeuronIds>,
}

/// Which neurons of the layer run.
#[derive(Debug, Clone, Copy)]
pub(crate) enum LayerNeurons<'a> {
    All,
    Firing,
    /// Ids of the layer, one list a token.
    FiringOf(&'a [NeuronIds]),
}

impl FfnShard {
    /// All neurons of a layer.
    #[must_use]
    pub fn whole(weights: FfnWeights) -> Self {
        Self { weights, ids: None }
    }

    /// Some neurons of a layer, copied.
    ///
    /// # Errors
    /// [`OpError`](powerinfer_ops::OpError) if an id is out of range or memory is short.
    pub fn pick(weights: &FfnWeights, ids: NeuronIds) -> Result<Self> {
        Ok(Self { weights: weights.pick(&ids)?, ids: Some(ids) })
    }

    /// What this side adds to the output, `[n_tokens, d_model]`.
    pub(crate) fn forward(
        &self,
        normed: &Tensor,
        neurons: LayerNeurons<'_>,
        workspace: &mut Workspace,
    ) -> Result<(Tensor, FfnCounts)> {
        let local: Vec<NeuronIds>;
        let neurons = match (neurons, &self.ids) {
            (LayerNeurons::All, _) => Neurons::All,
            (LayerNeurons::Firing, _) => Neurons::Firing,
            (LayerNeurons::FiringOf(picks), None) => Neurons::FiringOf(picks),
            (LayerNeurons::FiringOf(picks), Some(ids)) => {
                local = picks.iter().map(|picks| picks.restrict(ids)).collect();
                Neurons::FiringOf(&local)
            }
        };
        self.run(normed, neurons, workspace)
    }

    /// [`forward`](Self::forward) for neurons in the shard's own ids.
    pub(crate) fn run(
        &self,
        normed: &Tensor,
        neurons: Neurons<'_>,
        workspace: &mut Workspace,
    ) -> Result<(Tensor, FfnCounts)> {
        Ok(ffn(&self.weights, neurons, normed, workspace)?)
    }

    /// The layer's ids of the rows; `None` if all are here.
    #[must_use]
    pub fn ids(&self) -> Option<&NeuronIds> {
        self.ids.as_ref()
    }

    /// The rows held here.
    #[must_use]
    pub fn weights(&self) -> &FfnWeights {
        &self.weights
    }

    pub(crate) fn into_weights(self) -> FfnWeights {
        self.weights
    }

    /// Neurons held here.
    #[must_use]
    pub fn n_neurons(&self) -> usize {
        self.weights.n_neurons()
    }
}

/// Writes values of some neurons to their places among those of the layer.
pub(crate) fn scatter(ids: Option<&NeuronIds>, values: &[f32], all: &mut [f32]) {
    match ids {
        None => all.copy_from_slice(values),
        Some(ids) => {
            for (&id, &value) in ids.as_slice().iter().zip(values) {
                all[id as usize] = value;
            }
        }
    }
}
