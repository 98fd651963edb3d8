//! Norms.

use candle_core::{Device, Tensor};
use powerinfer_core::Result;

/// `y = x / √(mean(x²) + ε) · scale`, token by token.
#[derive(Debug, Clone)]
pub struct RmsNorm {
    scale: Tensor,
    eps: f32,
}

impl RmsNorm {
    /// A norm with `scale` `[d_model]`.
    ///
    /// # Errors
    /// [`Error::Candle`](powerinfer_core::Error::Candle) if candle cannot hold the scales.
    pub fn new(scale: Vec<f32>, eps: f64) -> Result<Self> {
        let len = scale.len();
        Ok(Self { scale: Tensor::from_vec(scale, len, &Device::Cpu)?, eps: eps as f32 })
    }

    /// Normalises each token of `x` `[n_tokens, d_model]`.
    ///
    /// # Errors
    /// [`Error::Candle`](powerinfer_core::Error::Candle) if `x` has another width.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        Ok(candle_nn::ops::rms_norm(x, &self.scale, self.eps)?)
    }

    /// Bytes that a pass reads.
    #[must_use]
    pub fn size_bytes(&self) -> usize {
        self.scale.elem_count() * size_of::<f32>()
    }
}
