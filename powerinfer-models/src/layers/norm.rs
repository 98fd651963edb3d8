//! Norms.

use candle_core::{Device, Tensor};
use powerinfer_core::Result;
use powerinfer_ops::{NormPart, OpError};

/// Either kind of norm.
#[derive(Debug, Clone)]
pub enum Norm {
    /// By the root of the mean square.
    Rms(RmsNorm),
    /// By mean and standard deviation.
    Layer(LayerNorm),
}

impl Norm {
    /// Normalises each token of `x` `[n_tokens, d_model]`.
    ///
    /// # Errors
    /// [`Error::Candle`](powerinfer_core::Error::Candle) if `x` has another width.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        match self {
            Self::Rms(norm) => norm.forward(x),
            Self::Layer(norm) => norm.forward(x),
        }
    }

    /// Lends it as a device takes it.
    pub(crate) fn with_part<R>(&self, hold: impl FnOnce(NormPart<'_>) -> Result<R>) -> Result<R> {
        match self {
            Self::Rms(RmsNorm { scale, eps }) => powerinfer_ops::with_f32(scale, |scale| {
                hold(NormPart { scale, shift: None, eps: *eps, centred: false })
            }),
            Self::Layer(LayerNorm { scale, shift, eps }) => {
                powerinfer_ops::with_f32(scale, |scale| {
                    powerinfer_ops::with_f32(shift, |shift| {
                        hold(NormPart { scale, shift: Some(shift), eps: *eps, centred: true })
                    })
                })
            }
        }
    }

    /// Bytes that a pass reads.
    #[must_use]
    pub fn size_bytes(&self) -> usize {
        match self {
            Self::Rms(norm) => norm.size_bytes(),
            Self::Layer(norm) => norm.size_bytes(),
        }
    }
}

impl From<RmsNorm> for Norm {
    fn from(norm: RmsNorm) -> Self {
        Self::Rms(norm)
    }
}

impl From<LayerNorm> for Norm {
    fn from(norm: LayerNorm) -> Self {
        Self::Layer(norm)
    }
}

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

/// `y = (x − mean(x)) / √(var(x) + ε) · scale + shift`, token by token.
#[derive(Debug, Clone)]
pub struct LayerNorm {
    scale: Tensor,
    shift: Tensor,
    eps: f32,
}

impl LayerNorm {
    /// A norm with `scale` and `shift` `[d_model]`.
    ///
    /// # Errors
    /// [`OpError::Shape`] if the two have different lengths,
    /// [`Error::Candle`](powerinfer_core::Error::Candle) if candle cannot hold them.
    pub fn new(scale: Vec<f32>, shift: Vec<f32>, eps: f64) -> Result<Self> {
        let len = scale.len();
        if shift.len() != len {
            let (expected, found) = (vec![len], vec![shift.len()]);
            return Err(OpError::Shape { op: "LayerNorm", what: "shift", expected, found }.into());
        }
        let tensor = |values| Tensor::from_vec(values, len, &Device::Cpu);
        Ok(Self { scale: tensor(scale)?, shift: tensor(shift)?, eps: eps as f32 })
    }

    /// A norm without weights: scales of 1 and shifts of 0 change no bit.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn plain(d_model: usize, eps: f64) -> Result<Self> {
        Self::new(vec![1.0; d_model], vec![0.0; d_model], eps)
    }

    /// Normalises each token of `x` `[n_tokens, d_model]`.
    ///
    /// # Errors
    /// [`Error::Candle`](powerinfer_core::Error::Candle) if `x` has another width.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        Ok(candle_nn::ops::layer_norm(x, &self.scale, &self.shift, self.eps)?)
    }

    /// Bytes that a pass reads.
    #[must_use]
    pub fn size_bytes(&self) -> usize {
        (self.scale.elem_count() + self.shift.elem_count()) * size_of::<f32>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layer_norm_is_its_definition() {
        let norm = LayerNorm::new(vec![1.0, 2.0, 1.0], vec![0.0, 1.0, -1.0], 0.5).unwrap();
        let x = Tensor::new(&[[1f32, 2.0, 6.0]], &Device::Cpu).unwrap();
        let y = norm.forward(&x).unwrap().to_vec2::<f32>().unwrap();
        // mean 3, variance 14 / 3
        let root = (14.0f32 / 3.0 + 0.5).sqrt();
        let expected = [-2.0 / root, -2.0 / root + 1.0, 3.0 / root - 1.0];
        for (found, expected) in y[0].iter().zip(expected) {
            assert!((found - expected).abs() < 1e-6, "{found} {expected}");
        }
        assert!(LayerNorm::new(vec![1.0; 3], vec![0.0; 2], 0.5).is_err());
    }
}
