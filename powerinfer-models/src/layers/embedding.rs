//! Token embeddings.

use candle_core::Tensor;
use powerinfer_core::{Error, Result};
use powerinfer_ops::{NeuronMatrix, embed};

use crate::layers::Linear;

/// A row of the table for each token, projected to the width of the model where the table is
/// narrower.
#[derive(Debug, Clone)]
pub struct Embedding {
    table: NeuronMatrix,
    projection: Option<Linear>,
}

impl Embedding {
    /// Embeddings from `table` `[vocab_size, d_embedding]`.
    #[must_use]
    pub fn new(table: NeuronMatrix) -> Self {
        Self { table, projection: None }
    }

    /// Projects each row by `projection` `[d_model, d_embedding]`.
    #[must_use]
    pub fn with_projection(mut self, projection: Option<Linear>) -> Self {
        self.projection = projection;
        self
    }

    /// The table, which a tied head shares.
    #[must_use]
    pub fn table(&self) -> &NeuronMatrix {
        &self.table
    }

    /// The vectors of `tokens`, `[n_tokens, d_model]`.
    ///
    /// # Errors
    /// [`Error::TokenOutOfRange`] for a token beyond the table.
    pub fn forward(&self, tokens: &[u32]) -> Result<Tensor> {
        let vocab_size = self.table.n_neurons();
        if let Some(&token) = tokens.iter().find(|&&token| token as usize >= vocab_size) {
            return Err(Error::TokenOutOfRange { token, vocab_size });
        }
        let rows = embed(&self.table, tokens)?;
        match &self.projection {
            Some(projection) => projection.forward(&rows),
            None => Ok(rows),
        }
    }

    /// Bytes that a pass over `n_tokens` reads.
    #[must_use]
    pub fn pass_bytes(&self, n_tokens: usize) -> usize {
        let projection = self.projection.as_ref().map_or(0, Linear::size_bytes);
        n_tokens * self.table.row_bytes() + projection
    }
}
