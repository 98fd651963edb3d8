//! Scratch memory of the operators.

use crate::attention::AttentionScratch;
use crate::cpu::activations::Activations;
use crate::cpu::product::InputScratch;
use crate::ffn::down_by_output::OutputScratch;
use crate::ffn::one_token::StepScratch;
use crate::ffn::predictor::PredictorScratch;

/// Scratch memory that grows to what a step needs and is then reused for ever: one a session.
///
/// # Examples
/// ```
/// let workspace = powerinfer_ops::Workspace::default();
/// assert_eq!(workspace.size_bytes(), 0);
/// ```
#[derive(Debug, Default)]
pub struct Workspace {
    pub(crate) inputs: InputScratch,
    /// Of many tokens.
    pub(crate) activations: Activations,
    /// Of one token.
    pub(crate) step: StepScratch,
    /// Of a predictor.
    pub(crate) predictor: PredictorScratch,
    /// Of networks whose down projection is stored by output.
    pub(crate) by_output: OutputScratch,
    pub(crate) attention: AttentionScratch,
}

impl Workspace {
    /// An upper bound of what networks of `n_neurons` and a predictor of a rank grow a workspace to,
    /// if they are given at most `n_tokens` tokens at once and down is stored by neuron.
    pub(crate) fn ffn_bytes_at_most(
        [n_neurons, d_model, rank]: [usize; 3],
        n_tokens: usize,
    ) -> u64 {
        let bytes = InputScratch::bytes_at_most(d_model, n_tokens)
            + Activations::bytes_at_most(n_neurons, n_tokens)
            + StepScratch::bytes_at_most(n_neurons, d_model)
            + PredictorScratch::bytes_at_most([n_neurons, d_model, rank], n_tokens);
        // a vector that grows may double
        2 * bytes as u64
    }

    /// Bytes held at present.
    #[must_use]
    pub fn size_bytes(&self) -> usize {
        self.inputs.size_bytes()
            + self.activations.size_bytes()
            + self.step.size_bytes()
            + self.predictor.size_bytes()
            + self.by_output.size_bytes()
            + self.attention.size_bytes()
    }
}
