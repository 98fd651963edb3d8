//! The head of a language model: hidden states to logits.

use candle_core::Tensor;
use powerinfer_core::Result;
use powerinfer_ops::{HeadPart, NeuronMatrix, NormPart, linear_into};

use crate::layers::{Embedding, Linear};
use crate::loader::Loader;

/// Logits of every token of the vocabulary, from hidden states that are projected to the width of
/// the embeddings where these are narrower.
#[derive(Debug, Clone)]
pub struct Head {
    weights: NeuronMatrix,
    projection: Option<Linear>,
}

impl Head {
    /// A head with `weights` `[vocab_size, d_embedding]`.
    #[must_use]
    pub fn new(weights: NeuronMatrix) -> Self {
        Self { weights, projection: None }
    }

    /// Projects hidden states by `projection` `[d_embedding, d_model]` first.
    #[must_use]
    pub fn with_projection(mut self, projection: Option<Linear>) -> Self {
        self.projection = projection;
        self
    }

    /// Takes the head named `name`, or the embeddings where the configuration ties the two. A
    /// stored head that differs from the embeddings it should be tied to is used and noted.
    ///
    /// # Errors
    /// [`Error::MissingTensor`](powerinfer_core::Error::MissingTensor) if there is no head and
    /// none is tied, and as [`Loader::matrix`].
    pub fn load(
        name: &str,
        embedding: &Embedding,
        tied: bool,
        loader: &mut Loader<'_>,
    ) -> Result<Self> {
        let table = embedding.table();
        if tied && !loader.contains(name) {
            return Ok(Self::new(table.clone()));
        }
        let stored = loader.matrix(name, table.n_neurons(), table.d_model())?;
        if !tied {
            return Ok(Self::new(stored));
        }
        if same(&stored, table) {
            loader.uncount(&stored);
            return Ok(Self::new(table.clone()));
        }
        loader.note(format!(
            "the configuration ties head and embeddings, but `{name}` is stored and differs from \
             the embeddings: the stored head is used"
        ));
        Ok(Self::new(stored))
    }

    /// Writes the logits of `x` `[n_tokens, d_model]` to `logits`, `[n_tokens, vocab_size]`.
    ///
    /// # Errors
    /// [`OpError`](powerinfer_ops::OpError) naming what is wrong with `x`.
    pub fn forward(&self, x: &Tensor, logits: &mut Vec<f32>) -> Result<()> {
        match &self.projection {
            Some(projection) => Ok(linear_into(&self.weights, &projection.forward(x)?, logits)?),
            None => Ok(linear_into(&self.weights, x, logits)?),
        }
    }

    /// As a device takes it.
    pub(crate) fn part<'a>(&'a self, norm: Option<NormPart<'a>>) -> HeadPart<'a> {
        let projection = self.projection.as_ref().map(Linear::part);
        HeadPart { norm, projection, weights: &self.weights }
    }

    /// Tokens of the vocabulary.
    #[must_use]
    pub fn vocab_size(&self) -> usize {
        self.weights.n_neurons()
    }

    /// Bytes that a pass reads.
    #[must_use]
    pub fn size_bytes(&self) -> usize {
        self.weights.size_bytes() + self.projection.as_ref().map_or(0, Linear::size_bytes)
    }
}

fn same(a: &NeuronMatrix, b: &NeuronMatrix) -> bool {
    a.format() == b.format() && (0..a.n_neurons()).all(|row| a.row(row) == b.row(row))
}
