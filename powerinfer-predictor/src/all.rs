//! Every neuron: dense inference along the path of predicted inference.

use powerinfer_ops::NeuronIds;

use crate::{ActivationPredictor, FfnInputs, PredictorKind, Result, clear_picks};

/// Lists every neuron for every token.
#[derive(Debug, Clone)]
pub struct All {
    ids: NeuronIds,
}

impl All {
    /// A predictor for a network of `n_neurons` neurons.
    #[must_use]
    pub fn new(n_neurons: usize) -> Self {
        Self { ids: NeuronIds::all(n_neurons) }
    }
}

impl ActivationPredictor for All {
    fn predict(&self, inputs: &FfnInputs<'_>, picks: &mut Vec<NeuronIds>) -> Result<()> {
        clear_picks(picks, inputs.normed.dim(0)?);
        picks.iter_mut().for_each(|ids| ids.clone_from(&self.ids));
        Ok(())
    }

    fn kind(&self) -> PredictorKind {
        PredictorKind::All
    }
}
