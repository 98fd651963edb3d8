//! Scratch memory of the operators.

/// Scratch memory that grows to what a step needs and is then reused for ever: one a session.
///
/// # Examples
/// ```
/// let workspace = powerinfer_ops::Workspace::default();
/// assert_eq!(workspace.size_bytes(), 0);
/// ```
#[derive(Debug, Default)]
pub struct Workspace {
    /// Gate values, then activations, `[n_tokens, n_neurons]`.
    pub(crate) h: Vec<f32>,
    /// Up values, `[n_tokens, n_neurons]`, or those of the picked rows of one token.
    pub(crate) up: Vec<f32>,
    /// The neurons that fire, token after token.
    pub(crate) fired: Vec<u32>,
    /// Their activations.
    pub(crate) scales: Vec<f32>,
    /// Sums of chunks of rows, `[n_chunks, d_model]`.
    pub(crate) sums: Vec<f32>,
    /// Where each token's part of `fired` ends.
    pub(crate) ends: Vec<usize>,
}

impl Workspace {
    /// Bytes held at present.
    #[must_use]
    pub fn size_bytes(&self) -> usize {
        let values =
            self.h.capacity() + self.up.capacity() + self.scales.capacity() + self.sums.capacity();
        values * size_of::<f32>()
            + self.fired.capacity() * size_of::<u32>()
            + self.ends.capacity() * size_of::<usize>()
    }
}
