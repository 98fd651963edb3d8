//! Token embeddings.

use candle_core::Tensor;
use powerinfer_core::{Error, Result};
use powerinfer_ops::{NeuronMatrix, embed};

/// A row of the table for each token.
#[derive(Debug, Clone)]
pub struct Embedding {
    table: NeuronMatrix,
}

impl Embedding {
    /// Embeddings from `table` `[vocab_size, d_model]`.
    #[must_use]
    pub fn new(table: NeuronMatrix) -> Self {
        Self { table }
    }

    /// The table, which a tied head shares.
    #[must_use]
    pub fn table(&self) -> &NeuronMatrix {
        &self.table
    }

    /// The rows of `tokens`, `[n_tokens, d_model]`.
    ///
    /// # Errors
    /// [`Error::TokenOutOfRange`] for a token beyond the table.
    pub fn forward(&self, tokens: &[u32]) -> Result<Tensor> {
        let vocab_size = self.table.n_neurons();
        match tokens.iter().find(|&&token| token as usize >= vocab_size) {
            Some(&token) => Err(Error::TokenOutOfRange { token, vocab_size }),
            None => Ok(embed(&self.table, tokens)?),
        }
    }
}
