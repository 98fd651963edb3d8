//! What every device checks before it queues work on rows that it holds.

use crate::check::{check_below, check_shape};
use crate::{Activation, HeldNeurons, OpError};

/// The rows that a device holds.
#[derive(Debug)]
pub(crate) struct HeldShape<'a> {
    /// Name of the device.
    pub(crate) device: &'a str,
    /// What is applied to the gate products.
    pub(crate) activation: Activation,
    /// Neurons that are held.
    pub(crate) n_neurons: usize,
    /// Values of a token.
    pub(crate) d_model: usize,
    /// Hidden values of a token that the held predictor reads; `None` without a predictor.
    pub(crate) rank: Option<usize>,
}

impl HeldShape<'_> {
    /// Fails unless the work can be done on the tokens `x`; returns how many there are.
    pub(crate) fn check(&self, neurons: HeldNeurons<'_>, x: &[f32]) -> Result<usize, OpError> {
        let n_tokens = x.len() / self.d_model.max(1);
        check_shape("HeldFfn::start", "x", &[n_tokens * self.d_model], &[x.len()])?;
        self.check_neurons("HeldFfn::start", neurons, n_tokens)?;
        Ok(n_tokens)
    }

    /// Fails unless these neurons can be computed for so many tokens.
    pub(crate) fn check_neurons(
        &self,
        op: &'static str,
        neurons: HeldNeurons<'_>,
        n_tokens: usize,
    ) -> Result<(), OpError> {
        if !matches!(neurons, HeldNeurons::All) && !self.activation.is_sparse() {
            return Err(OpError::NotSparse { activation: self.activation.name() });
        }
        match (neurons, self.rank) {
            (HeldNeurons::All | HeldNeurons::Firing, _) => Ok(()),
            (HeldNeurons::FiringOf(picks), _) => {
                check_shape(op, "lists of ids", &[n_tokens], &[picks.len()])?;
                picks.iter().try_for_each(|ids| check_below(op, ids, self.n_neurons))
            }
            (HeldNeurons::Predicted(hidden), Some(rank)) => {
                check_shape(op, "hidden values", &[n_tokens * rank], &[hidden.len()])
            }
            (HeldNeurons::Predicted(_), None) => {
                Err(OpError::NoHeldPredictor { device: self.device.to_owned() })
            }
        }
    }
}
