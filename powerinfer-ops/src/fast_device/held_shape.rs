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
    /// Whether the held predictor reads the residual stream; `None` without a predictor.
    pub(crate) reads_residual: Option<bool>,
}

impl HeldShape<'_> {
    /// Fails unless the work can be done on the tokens `x`; returns how many there are.
    pub(crate) fn check(&self, neurons: HeldNeurons<'_>, x: &[f32]) -> Result<usize, OpError> {
        let n_tokens = x.len() / self.d_model.max(1);
        check_shape("HeldFfn::start", "x", &[n_tokens * self.d_model], &[x.len()])?;
        self.check_neurons("HeldFfn::start", neurons, n_tokens)?;
        if let (HeldNeurons::Predicted([]), Some(true)) = (neurons, self.reads_residual) {
            check_residual("HeldFfn::start", x.len(), 0)?;
        }
        Ok(n_tokens)
    }

    /// Fails unless these neurons can be computed for so many tokens. A residual stream may be missing,
    /// as where the device has it.
    pub(crate) fn check_neurons(
        &self,
        op: &'static str,
        neurons: HeldNeurons<'_>,
        n_tokens: usize,
    ) -> Result<(), OpError> {
        if !matches!(neurons, HeldNeurons::All) && !self.activation.is_sparse() {
            return Err(OpError::NotSparse { activation: self.activation.name() });
        }
        match (neurons, self.reads_residual) {
            (HeldNeurons::All | HeldNeurons::Firing, _) => Ok(()),
            (HeldNeurons::FiringOf(picks), _) => {
                check_shape(op, "lists of ids", &[n_tokens], &[picks.len()])?;
                picks.iter().try_for_each(|ids| check_below(op, ids, self.n_neurons))
            }
            (HeldNeurons::Predicted([]), Some(_)) => Ok(()),
            (HeldNeurons::Predicted(residual), Some(reads_residual)) => {
                let expected = n_tokens * self.d_model * usize::from(reads_residual);
                check_residual(op, expected, residual.len())
            }
            (HeldNeurons::Predicted(_), None) => {
                Err(OpError::NoHeldPredictor { device: self.device.to_owned() })
            }
        }
    }
}

fn check_residual(op: &'static str, expected: usize, found: usize) -> Result<(), OpError> {
    check_shape(op, "the residual stream", &[expected], &[found])
}
