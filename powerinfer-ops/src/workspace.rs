//! Scratch memory of the operators.

use crate::ffn::one_token::StepScratch;

/// Scratch memory that grows to what a step needs and is then reused for ever: one a session.
///
/// # Examples
/// ```
/// let workspace = powerinfer_ops::Workspace::default();
/// assert_eq!(workspace.size_bytes(), 0);
/// ```
#[derive(Debug, Default)]
pub struct Workspace {
    /// Gate values, then activations, of many tokens, `[n_tokens, n_neurons]`.
    pub(crate) h: Vec<f32>,
    /// Up values of many tokens, `[n_tokens, n_neurons]`.
    pub(crate) up: Vec<f32>,
    /// Neurons of one token that fire.
    pub(crate) fired: Vec<u32>,
    /// Of one token.
    pub(crate) step: StepScratch,
}

impl Workspace {
    /// Bytes held at present.
    #[must_use]
    pub fn size_bytes(&self) -> usize {
        let values = self.h.capacity() + self.up.capacity();
        let ids = self.fired.capacity() * size_of::<u32>();
        values * size_of::<f32>() + ids + self.step.size_bytes()
    }
}
