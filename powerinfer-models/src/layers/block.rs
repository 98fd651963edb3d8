//! One layer of a decoder.

use candle_core::Tensor;
use powerinfer_core::{KvCache, Result, Sparsity, Step};
use powerinfer_ops::residual_add;
use powerinfer_predictor::FfnInputs;

use crate::layers::{Attention, Norm, RotaryTable, SparseFfn};

/// Attention and a feed-forward network on the residual stream.
#[derive(Debug, Clone)]
pub struct Block {
    /// Where norms stand, and with them the order of the two.
    pub norms: BlockNorms,
    /// The attention.
    pub attention: Attention,
    /// The feed-forward network.
    pub ffn: SparseFfn,
}

/// Where the norms of a block stand.
#[derive(Debug, Clone)]
pub enum BlockNorms<N = Norm> {
    /// Norm, attention, add; norm, feed-forward network, add.
    Before {
        /// Before the attention.
        attention: N,
        /// Before the feed-forward network.
        ffn: N,
    },
    /// Attention, add, norm; feed-forward network, add, norm.
    After {
        /// After the attention.
        attention: N,
        /// After the feed-forward network.
        ffn: N,
    },
    /// Attention and feed-forward network side by side, both reading the block's input.
    Parallel {
        /// Before the attention.
        attention: N,
        /// Before the feed-forward network; `None` if it reads what the attention reads.
        ffn: Option<N>,
    },
}

impl<N> BlockNorms<N> {
    /// The same order of other norms.
    pub(crate) fn try_map<M>(&self, mut f: impl FnMut(&N) -> Result<M>) -> Result<BlockNorms<M>> {
        Ok(match self {
            Self::Before { attention, ffn } => {
                BlockNorms::Before { attention: f(attention)?, ffn: f(ffn)? }
            }
            Self::After { attention, ffn } => {
                BlockNorms::After { attention: f(attention)?, ffn: f(ffn)? }
            }
            Self::Parallel { attention, ffn } => BlockNorms::Parallel {
                attention: f(attention)?,
                ffn: ffn.as_ref().map(f).transpose()?,
            },
        })
    }
}

impl BlockNorms {
    /// Bytes that a pass reads.
    #[must_use]
    pub fn size_bytes(&self) -> usize {
        match self {
            Self::Before { attention, ffn } | Self::After { attention, ffn } => {
                attention.size_bytes() + ffn.size_bytes()
            }
            Self::Parallel { attention, ffn } => {
                attention.size_bytes() + ffn.as_ref().map_or(0, Norm::size_bytes)
            }
        }
    }
}

/// What a block needs to know of the pass it is part of.
#[derive(Debug, Clone, Copy)]
pub struct Pass<'a> {
    /// Which layer this is.
    pub layer: usize,
    /// How feed-forward networks are computed.
    pub sparsity: Sparsity,
    /// Cosines and sines of the positions of the pass, where positions turn queries and keys.
    pub rotary: Option<&'a RotaryTable>,
}

impl Block {
    /// The residual stream after this block; `x` and the result `[n_tokens, d_model]`.
    ///
    /// # Errors
    /// [`Error`](powerinfer_core::Error) of the cache, the predictor or an operator, and
    /// [`Cancelled`](powerinfer_core::Error::Cancelled), for which it looks before the attention and
    /// before the feed-forward network.
    pub fn forward(
        &self,
        x: &Tensor,
        pass: Pass<'_>,
        cache: &mut KvCache,
        step: &mut Step,
    ) -> Result<Tensor> {
        let attend = |x: &Tensor, cache: &mut KvCache, step: &mut Step| {
            step.cancel.check()?;
            self.attention.forward(x, pass.rotary, pass.layer, cache, &mut step.workspace)
        };
        let ffn = |residual: &Tensor, normed: &Tensor, step: &mut Step| {
            step.cancel.check()?;
            let inputs = FfnInputs { residual, normed };
            self.ffn.forward(&inputs, pass.sparsity, pass.layer, step)
        };
        match &self.norms {
            BlockNorms::Before { attention, ffn: ffn_norm } => {
                let x = residual_add(x, &attend(&attention.forward(x)?, cache, step)?)?;
                let y = ffn(&x, &ffn_norm.forward(&x)?, step)?;
                Ok(residual_add(&x, &y)?)
            }
            BlockNorms::After { attention, ffn: ffn_norm } => {
                let x = attention.forward(&residual_add(x, &attend(x, cache, step)?)?)?;
                let y = ffn(&x, &x, step)?;
                ffn_norm.forward(&residual_add(&x, &y)?)
            }
            BlockNorms::Parallel { attention, ffn: ffn_norm } => {
                let normed = attention.forward(x)?;
                let attended = residual_add(x, &attend(&normed, cache, step)?)?;
                let y = match ffn_norm {
                    Some(ffn_norm) => ffn(x, &ffn_norm.forward(x)?, step)?,
                    None => ffn(x, &normed, step)?,
                };
                Ok(residual_add(&attended, &y)?)
            }
        }
    }

    /// Bytes that a pass reads whatever fires: all but the feed-forward network.
    #[must_use]
    pub fn dense_bytes(&self) -> usize {
        self.attention.size_bytes() + self.norms.size_bytes()
    }
}
