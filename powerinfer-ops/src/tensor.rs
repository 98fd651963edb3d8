//! Between candle tensors and slices: what an operator asks of an activation tensor.

use candle_core::{CpuStorage, DType, Layout, Storage, Tensor};

use crate::error::OpError;

/// Runs `work` on the values of a contiguous f32 tensor `[n_tokens, n_columns]` on the CPU.
pub(crate) fn with_rows<R>(
    op: &'static str,
    what: &'static str,
    tensor: &Tensor,
    n_columns: usize,
    work: impl FnOnce(&[f32]) -> Result<R, OpError>,
) -> Result<R, OpError> {
    check_rows(op, what, tensor, n_columns)?;
    let (storage, layout) = tensor.storage_and_layout();
    match &*storage {
        Storage::Cpu(storage) => work(rows(op, what, storage, layout)?),
        _ => Err(on_another_device(op, what, tensor)),
    }
}

/// Lends the values of a contiguous f32 tensor on the CPU, in row order.
///
/// # Errors
/// What `work` returns, and [`OpError::Dtype`], [`OpError::NotContiguous`] or [`OpError::Device`] if
/// the tensor is another.
///
/// # Examples
/// ```
/// use candle_core::{Device, Tensor};
/// use powerinfer_ops::{OpError, with_f32};
/// let x = Tensor::new(&[[1f32, 2.], [3., 4.]], &Device::Cpu)?;
/// let sum = with_f32(&x, |values| Ok::<f32, OpError>(values.iter().sum()))?;
/// assert_eq!(sum, 10.0);
/// # Ok::<(), OpError>(())
/// ```
pub fn with_f32<R, E: From<OpError>>(
    tensor: &Tensor,
    work: impl FnOnce(&[f32]) -> Result<R, E>,
) -> Result<R, E> {
    let (storage, layout) = tensor.storage_and_layout();
    match &*storage {
        Storage::Cpu(storage) => work(rows("with_f32", "the tensor", storage, layout)?),
        _ => Err(on_another_device("with_f32", "the tensor", tensor).into()),
    }
}

/// Fails unless `tensor` is a contiguous f32 tensor `[n_tokens, n_columns]` on the CPU; returns
/// `n_tokens`.
pub(crate) fn check_rows(
    op: &'static str,
    what: &'static str,
    tensor: &Tensor,
    n_columns: usize,
) -> Result<usize, OpError> {
    let n_tokens = check_operand(op, what, tensor, n_columns)?;
    if !tensor.device().is_cpu() {
        return Err(on_another_device(op, what, tensor));
    }
    Ok(n_tokens)
}

/// Fails unless `tensor` is a contiguous f32 tensor `[n_tokens, n_columns]` on the CPU or on a GPU that
/// there are kernels for; returns `n_tokens`.
pub(crate) fn check_operand(
    op: &'static str,
    what: &'static str,
    tensor: &Tensor,
    n_columns: usize,
) -> Result<usize, OpError> {
    let dims = tensor.dims();
    if dims.len() != 2 || dims[1] != n_columns {
        let n_tokens = dims.first().copied().unwrap_or(1);
        let expected = vec![n_tokens, n_columns];
        return Err(OpError::Shape { op, what, expected, found: dims.to_vec() });
    }
    if tensor.dtype() != DType::F32 {
        let (expected, found) = (DType::F32, tensor.dtype());
        return Err(OpError::Dtype { op, what, expected, found });
    }
    if !tensor.device().is_cpu() && !tensor.device().is_cuda() {
        return Err(on_another_device(op, what, tensor));
    }
    if !tensor.is_contiguous() {
        let strides = tensor.stride().to_vec();
        return Err(OpError::NotContiguous { op, what, strides });
    }
    Ok(dims[0])
}

/// The values of a contiguous f32 tensor, as a custom op sees it.
pub(crate) fn rows<'a>(
    op: &'static str,
    what: &'static str,
    storage: &'a CpuStorage,
    layout: &Layout,
) -> Result<&'a [f32], OpError> {
    let CpuStorage::F32(values) = storage else {
        let found = candle_core::backend::BackendStorage::dtype(storage);
        return Err(OpError::Dtype { op, what, expected: DType::F32, found });
    };
    match layout.contiguous_offsets() {
        Some((first, last)) => Ok(&values[first..last]),
        None => {
            let strides = layout.stride().to_vec();
            Err(OpError::NotContiguous { op, what, strides })
        }
    }
}

fn on_another_device(op: &'static str, what: &'static str, tensor: &Tensor) -> OpError {
    let found = format!("{:?}", tensor.device().location());
    OpError::Device { op, what, expected: "the CPU", found }
}
