//! Weighted sums of the picked rows of a down projection that is stored transposed.

use candle_core::{CpuStorage, CustomOp1, Layout, Shape, Tensor};

use crate::cpu::{RowKernels, rows};
#[cfg(feature = "cuda")]
use crate::cuda;
use crate::error::OpError;
use crate::mask::ActivationMask;
use crate::matrix::NeuronMatrix;
use crate::sparse_matvec::{check_mask, custom_op_rows};
use crate::tensor;

/// Sums the rows of `down` picked by `mask`, each scaled by its activation.
///
/// `y[t] = Σ_i mask[t, i] · h[t, i] · down[i]`   (PowerInfer, "Neuron-aware Operator")
///
/// # Shapes
/// `down` `[n_neurons, d_model]` any [`WeightFormat`](crate::WeightFormat) · `mask`
/// `[n_tokens, n_neurons]` · `h` `[n_tokens, n_neurons]` f32 · result `[n_tokens, d_model]` f32.
/// # Accuracy
/// Sums are in f32, in order of `i`. On a CPU activations meet rows of Q8_0 and Q4_0 rounded to 13
/// significant bits: an error of at most `2⁻¹³ · Σ_i |h[t, i] · down[i]|`.
/// # Cost
/// Reads the picked rows of `down`, once for each token that picks them.
/// # Errors
/// [`OpError::Shape`], [`OpError::Dtype`], [`OpError::NotContiguous`] or [`OpError::Device`] naming
/// the operand.
/// # Examples
/// ```
/// use candle_core::{Device, Tensor};
/// use powerinfer_ops::{ActivationMask, NeuronMatrix, WeightFormat, sparse_axpy};
/// let down = NeuronMatrix::from_f32(WeightFormat::F32, 3, 2, &[1., 2., 10., 20., 100., 200.])?;
/// let mut mask = ActivationMask::new(1, 3);
/// mask.set(0, 0);
/// mask.set(0, 2);
/// let h = Tensor::new(&[[1f32, 9., 2.]], &Device::Cpu)?;
/// assert_eq!(sparse_axpy(&down, &mask, &h)?.to_vec2::<f32>()?, [[201., 402.]]);
/// # Ok::<(), powerinfer_ops::OpError>(())
/// ```
pub fn sparse_axpy(
    down: &NeuronMatrix,
    mask: &ActivationMask,
    h: &Tensor,
) -> Result<Tensor, OpError> {
    let op = SparseAxpy { weights: down.clone(), mask: mask.clone() };
    let n_tokens = tensor::check_operand(SparseAxpy::NAME, "h", h, down.n_neurons())?;
    op.check(n_tokens)?;
    Ok(h.apply_op1_no_bwd(&op)?)
}

/// [`sparse_axpy`] as a candle operator over `h`.
#[derive(Debug, Clone)]
pub struct SparseAxpy {
    /// The matrix `[n_neurons, d_model]`: a down projection, transposed.
    pub weights: NeuronMatrix,
    /// The rows to add up, `[n_tokens, n_neurons]`.
    pub mask: ActivationMask,
}

impl SparseAxpy {
    const NAME: &'static str = "sparse_axpy";

    fn check(&self, n_tokens: usize) -> Result<(), OpError> {
        check_mask(Self::NAME, &self.mask, n_tokens, self.weights.n_neurons())
    }
}

impl CustomOp1 for SparseAxpy {
    fn name(&self) -> &'static str {
        Self::NAME
    }

    fn cpu_fwd(
        &self,
        storage: &CpuStorage,
        layout: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        let w = &self.weights;
        let (n_tokens, h) = custom_op_rows(Self::NAME, "h", storage, layout, w.n_neurons())?;
        self.check(n_tokens).map_err(candle_core::Error::wrap)?;
        let mut y = vec![0.0; n_tokens * w.d_model()];
        let mut scales = Vec::new();
        for t in 0..n_tokens {
            let ids = self.mask.ids(t);
            scales.clear();
            scales.extend(ids.as_slice().iter().map(|&id| h[t * w.n_neurons() + id as usize]));
            let y = &mut y[t * w.d_model()..][..w.d_model()];
            rows::axpy_picked(RowKernels::best(), w, (ids.as_slice(), &scales), y);
        }
        Ok((CpuStorage::F32(y), Shape::from((n_tokens, w.d_model()))))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        storage: &candle_core::CudaStorage,
        layout: &Layout,
    ) -> candle_core::Result<(candle_core::CudaStorage, Shape)> {
        let x = cuda::CudaRows::of(Self::NAME, "h", storage, layout, self.weights.n_neurons())?;
        self.check(x.n_tokens()).map_err(candle_core::Error::wrap)?;
        cuda::sparse_axpy(&self.weights, &self.mask, &x)
    }
}
