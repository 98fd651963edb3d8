//! One layer of a decoder.

use candle_core::Tensor;
use powerinfer_core::{KvCache, Result, Sparsity, Step};
use powerinfer_ops::residual_add;
use powerinfer_predictor::FfnInputs;

use crate::layers::{Attention, RmsNorm, RotaryTable, SparseFfn};

/// Norm, attention, residual; norm, feed-forward network, residual.
#[derive(Debug, Clone)]
pub struct Block {
    /// Before the attention.
    pub attention_norm: RmsNorm,
    /// The attention.
    pub attention: Attention,
    /// Before the feed-forward network.
    pub ffn_norm: RmsNorm,
    /// The feed-forward network.
    pub ffn: SparseFfn,
}

/// What a block needs to know of the pass it is part of.
#[derive(Debug, Clone, Copy)]
pub struct Pass<'a> {
    /// Which layer this is.
    pub layer: usize,
    /// How feed-forward networks are computed.
    pub sparsity: Sparsity,
    /// Cosines and sines of the positions of the pass.
    pub rotary: &'a RotaryTable,
}

impl Block {
    /// The residual stream after this block; `x` and the result `[n_tokens, d_model]`.
    ///
    /// # Errors
    /// [`Error`](powerinfer_core::Error) of the cache, the predictor or an operator.
    pub fn forward(
        &self,
        x: &Tensor,
        pass: Pass<'_>,
        cache: &mut KvCache,
        step: &mut Step,
    ) -> Result<Tensor> {
        let normed = self.attention_norm.forward(x)?;
        let attended = self.attention.forward(&normed, pass.rotary, pass.layer, cache)?;
        let x = residual_add(x, &attended)?;
        let normed = self.ffn_norm.forward(&x)?;
        let inputs = FfnInputs { residual: &x, normed: &normed };
        let y = self.ffn.forward(&inputs, pass.sparsity, pass.layer, step)?;
        Ok(residual_add(&x, &y)?)
    }

    /// Bytes that a pass reads whatever fires: all but the feed-forward network.
    #[must_use]
    pub fn dense_bytes(&self) -> usize {
        self.attention.size_bytes() + self.attention_norm.size_bytes() + self.ffn_norm.size_bytes()
    }
}
