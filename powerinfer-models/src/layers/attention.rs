//! Self-attention with grouped queries over the key-value cache.

use candle_core::Tensor;
use powerinfer_core::{KvCache, Result};
use powerinfer_ops::attention::{AttentionShape, alibi_slopes, causal_attention};
use powerinfer_ops::{AttentionPart, Workspace};

use crate::layers::{Linear, RotaryTable};

/// Heads of an attention layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct AttentionHeads {
    /// Query heads.
    pub n_heads: usize,
    /// Key and value heads, each shared by `n_heads / n_kv_heads` query heads.
    pub n_kv_heads: usize,
    /// Values of a head.
    pub d_head: usize,
}

impl AttentionHeads {
    /// Heads of the given numbers and width.
    #[must_use]
    pub fn new(n_heads: usize, n_kv_heads: usize, d_head: usize) -> Self {
        Self { n_heads, n_kv_heads, d_head }
    }

    /// Width of all query heads.
    #[must_use]
    pub fn query_width(&self) -> usize {
        self.n_heads * self.d_head
    }

    /// Width of all key heads.
    #[must_use]
    pub fn kv_width(&self) -> usize {
        self.n_kv_heads * self.d_head
    }
}

/// Causal self-attention.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Attention {
    /// `[n_heads · d_head, d_model]`
    pub query: Linear,
    /// `[n_kv_heads · d_head, d_model]`
    pub key: Linear,
    /// `[n_kv_heads · d_head, d_model]`
    pub value: Linear,
    /// `[d_model, n_heads · d_head]`
    pub output: Linear,
    /// How the widths divide into heads.
    pub heads: AttentionHeads,
    /// How many positions a token sees, its own included; `None` for all before it.
    pub window: Option<usize>,
    /// `[n_heads]` slopes of ALiBi.
    pub alibi_slopes: Option<Vec<f32>>,
}

/// The four projections of an attention layer.
#[derive(Debug, Clone)]
pub struct Projections {
    /// `[n_heads · d_head, d_model]`
    pub query: Linear,
    /// `[n_kv_heads · d_head, d_model]`
    pub key: Linear,
    /// `[n_kv_heads · d_head, d_model]`
    pub value: Linear,
    /// `[d_model, n_heads · d_head]`
    pub output: Linear,
}

impl Attention {
    /// Attention to all positions before a token, without ALiBi.
    #[must_use]
    pub fn new(projections: Projections, heads: AttentionHeads) -> Self {
        let Projections { query, key, value, output } = projections;
        Self { query, key, value, output, heads, window: None, alibi_slopes: None }
    }

    /// Limits how many positions a token sees, its own included.
    #[must_use]
    pub fn with_window(mut self, window: Option<usize>) -> Self {
        self.window = window;
        self
    }

    /// Lowers scores with the distance of the key, if `alibi`.
    #[must_use]
    pub fn with_alibi(mut self, alibi: bool) -> Self {
        self.alibi_slopes = alibi.then(|| alibi_slopes(self.heads.n_heads));
        self
    }

    /// Attends from each token of `x` `[n_tokens, d_model]`, which follow those in the cache, to
    /// itself and all before it. The cache has room reserved for them.
    ///
    /// # Errors
    /// [`Error`](powerinfer_core::Error) of the cache or an operator.
    pub fn forward(
        &self,
        x: &Tensor,
        rotary: Option<&RotaryTable>,
        layer: usize,
        cache: &mut KvCache,
        workspace: &mut Workspace,
    ) -> Result<Tensor> {
        let turned = |x: Tensor| match rotary {
            Some(rotary) => rotary.apply(&x),
            None => Ok(x),
        };
        let projections = [&self.query, &self.key, &self.value];
        let [queries, keys, values] = Linear::forward_all(projections, x, workspace)?;
        let (queries, keys) = (turned(queries)?, turned(keys)?);
        powerinfer_ops::with_f32(&keys, |keys| {
            powerinfer_ops::with_f32(&values, |values| cache.write(layer, keys, values))
        })?;
        let AttentionHeads { n_heads, n_kv_heads, d_head } = self.heads;
        let shape = AttentionShape {
            n_heads,
            n_kv_heads,
            d_head,
            scale: 1.0 / (d_head as f32).sqrt(),
            first_position: cache.len(),
            window: self.window,
            alibi_slopes: self.alibi_slopes.as_deref(),
        };
        let attended = causal_attention(&queries, &cache.layer(layer), shape, workspace)?;
        self.output.forward(&attended)
    }

    /// As a device takes it; `rotary` says whether positions turn queries and keys.
    pub(crate) fn part(&self, rotary: bool) -> AttentionPart<'_> {
        let AttentionHeads { n_heads, n_kv_heads, d_head } = self.heads;
        AttentionPart {
            query: self.query.part(),
            key: self.key.part(),
            value: self.value.part(),
            output: self.output.part(),
            n_heads,
            n_kv_heads,
            d_head,
            scale: 1.0 / (d_head as f32).sqrt(),
            window: self.window,
            alibi_slopes: self.alibi_slopes.as_deref(),
            rotary,
        }
    }

    /// Bytes that a pass reads.
    #[must_use]
    pub fn size_bytes(&self) -> usize {
        [&self.query, &self.key, &self.value, &self.output].map(Linear::size_bytes).iter().sum()
    }
}
