//! Dot products of rows: the picked ones for gate and up, all of them for every other projection.

use candle_core::{CpuStorage, CustomOp1, Layout, Shape, Tensor};

use crate::cpu::product::{InputScratch, Inputs};
use crate::cpu::{RowKernels, rows};
#[cfg(feature = "cuda")]
use crate::cuda;
use crate::error::OpError;
use crate::mask::ActivationMask;
use crate::matrix::NeuronMatrix;
use crate::residual::add_to_rows;
use crate::tensor;

/// The products of the picked rows, zero for the others.
///
/// `y[t, i] = mask[t, i] · (w[i] · x[t])`   (PowerInfer, "Neuron-aware Operator")
///
/// # Shapes
/// `w` `[n_neurons, d_model]` any [`WeightFormat`](crate::WeightFormat) · `mask`
/// `[n_tokens, n_neurons]` · `x` `[n_tokens, d_model]` f32 · result `[n_tokens, n_neurons]` f32.
/// # Cost
/// Reads the picked rows of `w`, once for each token that picks them.
/// # Errors
/// [`OpError::Shape`], [`OpError::Dtype`], [`OpError::NotContiguous`] or [`OpError::Device`] naming
/// the operand.
/// # Examples
/// ```
/// use candle_core::{Device, Tensor};
/// use powerinfer_ops::{ActivationMask, NeuronMatrix, WeightFormat, sparse_matvec};
/// let w = NeuronMatrix::from_f32(WeightFormat::F32, 3, 2, &[1., 0., 0., 1., 1., 1.])?;
/// let mut mask = ActivationMask::new(1, 3);
/// mask.set(0, 2);
/// let x = Tensor::new(&[[5f32, 7.]], &Device::Cpu)?;
/// assert_eq!(sparse_matvec(&w, &mask, &x)?.to_vec2::<f32>()?, [[0., 0., 12.]]);
/// # Ok::<(), powerinfer_ops::OpError>(())
/// ```
pub fn sparse_matvec(
    w: &NeuronMatrix,
    mask: &ActivationMask,
    x: &Tensor,
) -> Result<Tensor, OpError> {
    let op = SparseMatvec { weights: w.clone(), mask: mask.clone() };
    let n_tokens = tensor::check_operand(SparseMatvec::NAME, "x", x, w.d_model())?;
    op.check(n_tokens)?;
    Ok(x.apply_op1_no_bwd(&op)?)
}

/// [`sparse_matvec`] as a candle operator over `x`.
#[derive(Debug, Clone)]
pub struct SparseMatvec {
    /// The matrix `[n_neurons, d_model]`.
    pub weights: NeuronMatrix,
    /// The rows to compute, `[n_tokens, n_neurons]`.
    pub mask: ActivationMask,
}

impl SparseMatvec {
    const NAME: &'static str = "sparse_matvec";

    fn check(&self, n_tokens: usize) -> Result<(), OpError> {
        check_mask(Self::NAME, &self.mask, n_tokens, self.weights.n_neurons())
    }
}

impl CustomOp1 for SparseMatvec {
    fn name(&self) -> &'static str {
        Self::NAME
    }

    fn cpu_fwd(
        &self,
        storage: &CpuStorage,
        layout: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        let w = &self.weights;
        let (n_tokens, x) = custom_op_rows(Self::NAME, "x", storage, layout, w.d_model())?;
        self.check(n_tokens).map_err(candle_core::Error::wrap)?;
        let mut y = vec![0.0; n_tokens * w.n_neurons()];
        let (mut picked, mut scratch) = (Vec::new(), InputScratch::default());
        let kernels = RowKernels::best();
        let x = Inputs::new(kernels, &[w.format()], w.d_model(), x, &mut scratch);
        for t in 0..n_tokens {
            let ids = self.mask.ids(t);
            picked.clear();
            picked.resize(ids.len(), 0.0);
            rows::matvec_picked(kernels, w, ids.as_slice(), x.token(t), &mut picked);
            for (&id, &value) in ids.as_slice().iter().zip(&picked) {
                y[t * w.n_neurons() + id as usize] = value;
            }
        }
        Ok((CpuStorage::F32(y), Shape::from((n_tokens, w.n_neurons()))))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        storage: &candle_core::CudaStorage,
        layout: &Layout,
    ) -> candle_core::Result<(candle_core::CudaStorage, Shape)> {
        let x = cuda::CudaRows::of(Self::NAME, "x", storage, layout, self.weights.d_model())?;
        self.check(x.n_tokens()).map_err(candle_core::Error::wrap)?;
        cuda::sparse_matvec(&self.weights, &self.mask, &x)
    }
}

/// The products of all rows: a dense projection, with the kernels of the sparse ones.
///
/// `y[t, i] = w[i] · x[t] + bias[i]`
///
/// # Shapes
/// `w` `[n_out, d_model]` any format · `bias` `[n_out]` · `x` `[n_tokens, d_model]` f32 · result
/// `[n_tokens, n_out]` f32.
/// # Errors
/// [`OpError::Shape`], [`OpError::Dtype`], [`OpError::NotContiguous`] or [`OpError::Device`] naming
/// the operand.
/// # Examples
/// ```
/// use candle_core::{Device, Tensor};
/// use powerinfer_ops::{NeuronMatrix, WeightFormat, linear};
/// let w = NeuronMatrix::from_f32(WeightFormat::BF16, 2, 2, &[1., 2., 3., 4.])?;
/// let x = Tensor::new(&[[1f32, 1.], [2., 0.]], &Device::Cpu)?;
/// assert_eq!(linear(&w, Some(&[0.5, 0.]), &x)?.to_vec2::<f32>()?, [[3.5, 7.], [2.5, 6.]]);
/// # Ok::<(), powerinfer_ops::OpError>(())
/// ```
pub fn linear(w: &NeuronMatrix, bias: Option<&[f32]>, x: &Tensor) -> Result<Tensor, OpError> {
    tensor::check_operand(Linear::NAME, "x", x, w.d_model())?;
    check_bias(Linear::NAME, w, bias)?;
    Ok(x.apply_op1_no_bwd(&Linear { w, bias })?)
}

/// [`linear`] without bias into a buffer that is reused: the head of a language model.
///
/// `out` ends up as `[n_tokens, n_out]` and grows only when it must.
///
/// # Errors
/// As [`linear`].
pub fn linear_into(w: &NeuronMatrix, x: &Tensor, out: &mut Vec<f32>) -> Result<(), OpError> {
    tensor::with_rows("linear_into", "x", x, w.d_model(), |values| {
        out.resize(x.dims()[0] * w.n_neurons(), 0.0);
        project(w, values, out);
        Ok(())
    })
}

/// `out[t, i] = w[i] · x[t]`, `[n_tokens, n_neurons]`.
pub(crate) fn project(w: &NeuronMatrix, x: &[f32], out: &mut [f32]) {
    let (kernels, mut scratch) = (RowKernels::best(), InputScratch::default());
    let x = Inputs::new(kernels, &[w.format()], w.d_model(), x, &mut scratch);
    rows::matvec(kernels, w, x, out);
}

struct Linear<'a> {
    w: &'a NeuronMatrix,
    bias: Option<&'a [f32]>,
}

impl Linear<'_> {
    const NAME: &'static str = "linear";
}

impl CustomOp1 for Linear<'_> {
    fn name(&self) -> &'static str {
        Self::NAME
    }

    fn cpu_fwd(
        &self,
        storage: &CpuStorage,
        layout: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        let (n_tokens, x) = custom_op_rows(Self::NAME, "x", storage, layout, self.w.d_model())?;
        let n_out = self.w.n_neurons();
        let mut y = vec![0.0; n_tokens * n_out];
        project(self.w, x, &mut y);
        add_to_rows(&mut y, self.bias.unwrap_or_default());
        Ok((CpuStorage::F32(y), Shape::from((n_tokens, n_out))))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        storage: &candle_core::CudaStorage,
        layout: &Layout,
    ) -> candle_core::Result<(candle_core::CudaStorage, Shape)> {
        let x = cuda::CudaRows::of(Self::NAME, "x", storage, layout, self.w.d_model())?;
        cuda::linear(self.w, self.bias, &x)
    }
}

/// Fails unless there is one bias a row, or none.
pub(crate) fn check_bias(
    op: &'static str,
    w: &NeuronMatrix,
    bias: Option<&[f32]>,
) -> Result<(), OpError> {
    let found = bias.map_or(w.n_neurons(), <[f32]>::len);
    OpError::check_shape(op, "bias", &[w.n_neurons()], &[found])
}

/// Fails unless `mask` is `[n_tokens, n_neurons]`.
pub(crate) fn check_mask(
    op: &'static str,
    mask: &ActivationMask,
    n_tokens: usize,
    n_neurons: usize,
) -> Result<(), OpError> {
    let found = [mask.n_tokens(), mask.n_neurons()];
    OpError::check_shape(op, "mask", &[n_tokens, n_neurons], &found)
}

/// Tokens and values of the operand of a custom op, which anybody may apply to any tensor.
pub(crate) fn custom_op_rows<'a>(
    op: &'static str,
    what: &'static str,
    storage: &'a CpuStorage,
    layout: &Layout,
    n_columns: usize,
) -> candle_core::Result<(usize, &'a [f32])> {
    let (n_tokens, found) = layout.shape().dims2()?;
    if found != n_columns {
        let (expected, found) = (vec![n_tokens, n_columns], vec![n_tokens, found]);
        let error = OpError::Shape { op, what, expected, found };
        return Err(candle_core::Error::wrap(error));
    }
    let values = tensor::rows(op, what, storage, layout).map_err(candle_core::Error::wrap)?;
    Ok((n_tokens, values))
}
