//! Sums of activation tensors on the engine's own threads.
//!
//! candle adds large tensors on a pool of its own, whose size no caller can set; a prefill would
//! use more threads than the engine was given.

use candle_core::{Device, Tensor};
use rayon::prelude::*;

use crate::error::OpError;
use crate::tensor::with_rows;

/// Values worth a task of their own.
const TASK_LEN: usize = 16 << 10;

/// The sum of a residual stream and what a block adds to it.
///
/// # Shapes
/// `a`, `b` and the result are `[n_tokens, d_model]` f32.
/// # Errors
/// [`OpError::Shape`], [`OpError::Dtype`], [`OpError::NotContiguous`] or [`OpError::Device`] naming
/// the operand.
/// # Examples
/// ```
/// use candle_core::{Device, Tensor};
/// let a = Tensor::new(&[[1f32, 2.]], &Device::Cpu)?;
/// assert_eq!(powerinfer_ops::residual_add(&a, &a)?.to_vec2::<f32>()?, [[2., 4.]]);
/// # Ok::<(), powerinfer_ops::OpError>(())
/// ```
pub fn residual_add(a: &Tensor, b: &Tensor) -> Result<Tensor, OpError> {
    let d_model = b.dims().last().copied().unwrap_or(0);
    with_rows("residual_add", "a", a, d_model, |a_values| {
        with_rows("residual_add", "b", b, d_model, |b_values| {
            if a_values.len() != b_values.len() {
                let (expected, found) = (a.dims().to_vec(), b.dims().to_vec());
                return Err(OpError::Shape { op: "residual_add", what: "b", expected, found });
            }
            let mut sum = a_values.to_vec();
            let add = |(sum, b): (&mut [f32], &[f32])| {
                sum.iter_mut().zip(b).for_each(|(sum, b)| *sum += b);
            };
            if sum.len() <= TASK_LEN {
                add((&mut sum, b_values));
            } else {
                sum.par_chunks_mut(TASK_LEN).zip(b_values.par_chunks(TASK_LEN)).for_each(add);
            }
            Ok(Tensor::from_vec(sum, a.shape(), &Device::Cpu)?)
        })
    })
}

/// Adds a bias to every token.
///
/// # Shapes
/// `x` and the result `[n_tokens, d_model]` f32 · `bias` `[d_model]`.
/// # Errors
/// As [`residual_add`].
pub fn add_bias(x: &Tensor, bias: &[f32]) -> Result<Tensor, OpError> {
    with_rows("add_bias", "x", x, bias.len(), |values| {
        let mut sum = values.to_vec();
        add_to_rows(&mut sum, bias);
        Ok(Tensor::from_vec(sum, x.shape(), &Device::Cpu)?)
    })
}

/// Adds a bias to each row of as many values; none where it is empty.
pub(crate) fn add_to_rows(rows: &mut [f32], bias: &[f32]) {
    if bias.is_empty() {
        return;
    }
    for row in rows.chunks_exact_mut(bias.len()) {
        row.iter_mut().zip(bias).for_each(|(value, bias)| *value += bias);
    }
}
