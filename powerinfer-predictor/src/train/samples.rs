//! What a network saw and what its neurons gave, for a bounded number of tokens.

use powerinfer_ops::OpError;

use crate::error::{Error, Result};

/// Inputs of a layer and the neurons that fired for them, kept as they come: all neurons of a token
/// would be ten times as many.
///
/// # Examples
/// ```
/// use powerinfer_predictor::FfnSamples;
/// let mut samples = FfnSamples::new(2, 3, 100);
/// samples.push(&[0.5, 1.0], &[0.0, 2.0, 0.0])?;
/// assert_eq!((samples.n_tokens(), samples.fired(0)), (1, (&[1][..], &[2.0][..])));
/// assert!(samples.push(&[f32::NAN, 1.0], &[0.0; 3]).is_err());
/// # Ok::<(), powerinfer_predictor::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct FfnSamples {
    d_model: usize,
    d_ff: usize,
    capacity: usize,
    inputs: Vec<f32>,
    /// Where the neurons of each token end.
    ends: Vec<usize>,
    ids: Vec<u32>,
    magnitudes: Vec<f32>,
}

impl FfnSamples {
    /// Room for `capacity` tokens of a layer; memory comes as they do.
    #[must_use]
    pub fn new(d_model: usize, d_ff: usize, capacity: usize) -> Self {
        Self {
            d_model,
            d_ff,
            capacity,
            inputs: Vec::new(),
            ends: Vec::new(),
            ids: Vec::new(),
            magnitudes: Vec::new(),
        }
    }

    /// Adds tokens until there is no more room, returns how many: `inputs` `[n_tokens, d_model]`,
    /// `activations` `[n_tokens, d_ff]`.
    ///
    /// # Errors
    /// [`Error::Op`] if they disagree on the number of tokens; [`Error::NotFinite`] for a value that
    /// is no number, of whose token and those after it nothing is added.
    pub fn push(&mut self, inputs: &[f32], activations: &[f32]) -> Result<usize> {
        let n_tokens = inputs.len() / self.d_model.max(1);
        for (what, len, width) in
            [("inputs", inputs.len(), self.d_model), ("activations", activations.len(), self.d_ff)]
        {
            if len != n_tokens * width {
                let (expected, found) = (vec![n_tokens, width], vec![len]);
                return Err(OpError::Shape { op: "FfnSamples", what, expected, found }.into());
            }
        }
        let room = n_tokens.min(self.capacity - self.n_tokens());
        let inputs = inputs.chunks_exact(self.d_model.max(1));
        let activations = activations.chunks_exact(self.d_ff.max(1));
        for (row, (inputs, activations)) in inputs.zip(activations).take(room).enumerate() {
            let finite = |values: &[f32]| values.iter().all(|value| value.is_finite());
            for (what, values) in [("input", inputs), ("activation", activations)] {
                if !finite(values) {
                    return Err(Error::NotFinite { what, row });
                }
            }
            self.inputs.extend_from_slice(inputs);
            for (id, &activation) in activations.iter().enumerate() {
                if activation != 0.0 {
                    // neurons are numbered in u32
                    self.ids.push(id as u32);
                    self.magnitudes.push(activation.abs());
                }
            }
            self.ends.push(self.ids.len());
        }
        Ok(room)
    }

    /// Forgets all tokens and keeps the memory.
    pub fn clear(&mut self) {
        self.inputs.clear();
        self.ends.clear();
        self.ids.clear();
        self.magnitudes.clear();
    }

    /// Tokens that there are.
    #[must_use]
    pub fn n_tokens(&self) -> usize {
        self.ends.len()
    }

    /// Whether there is no room for another token.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.n_tokens() == self.capacity
    }

    /// Width of the inputs.
    #[must_use]
    pub fn d_model(&self) -> usize {
        self.d_model
    }

    /// Neurons of the layer.
    #[must_use]
    pub fn d_ff(&self) -> usize {
        self.d_ff
    }

    /// What the layer saw, `[n_tokens, d_model]`.
    #[must_use]
    pub fn inputs(&self) -> &[f32] {
        &self.inputs
    }

    /// Neurons that fired for a token, ascending, and the magnitudes of their activations.
    ///
    /// # Panics
    /// If there is no such token.
    #[must_use]
    pub fn fired(&self, token: usize) -> (&[u32], &[f32]) {
        let begin = token.checked_sub(1).map_or(0, |before| self.ends[before]);
        let range = begin..self.ends[token];
        (&self.ids[range.clone()], &self.magnitudes[range])
    }

    /// Share of the neurons that fired.
    #[must_use]
    pub fn density(&self) -> f64 {
        self.ids.len() as f64 / (self.n_tokens() * self.d_ff).max(1) as f64
    }

    /// The mean magnitude of an activation that is not zero; 0 if all are.
    #[must_use]
    pub fn mean_magnitude(&self) -> f32 {
        let sum: f64 = self.magnitudes.iter().map(|&x| f64::from(x)).sum();
        (sum / self.magnitudes.len().max(1) as f64) as f32
    }

    /// Bytes that it takes.
    #[must_use]
    pub fn size_bytes(&self) -> usize {
        size_of::<f32>() * (self.inputs.capacity() + self.magnitudes.capacity())
            + size_of::<u32>() * self.ids.capacity()
            + size_of::<usize>() * self.ends.capacity()
    }
}
