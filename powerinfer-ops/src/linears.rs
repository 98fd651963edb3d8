//! Several dense projections of the same tokens, as queries, keys and values.

use candle_core::{Device, Tensor};

use crate::cpu::product::Inputs;
use crate::cpu::{RowKernels, rows};
use crate::error::OpError;
use crate::format::WeightFormat;
use crate::matrix::NeuronMatrix;
use crate::residual::add_to_rows;
use crate::sparse_matvec::check_bias;
use crate::tensor;
use crate::workspace::Workspace;

/// Projects the same tokens with several matrices: what [`linear`](crate::linear) gives for each, to
/// the bit.
///
/// The threads are asked once for all of them, and values that are rounded for the products of
/// quantised rows are rounded once.
///
/// # Shapes
/// Each matrix `[n_out, d_model]` any format, with a bias `[n_out]` or none · `x`
/// `[n_tokens, d_model]` f32 · results `[n_tokens, n_out]` f32.
/// # Errors
/// As [`linear`](crate::linear).
/// # Examples
/// ```
/// use candle_core::{Device, Tensor};
/// use powerinfer_ops::{NeuronMatrix, WeightFormat, Workspace, linears};
/// let w = NeuronMatrix::from_f32(WeightFormat::F32, 2, 2, &[1., 2., 3., 4.])?;
/// let v = NeuronMatrix::from_f32(WeightFormat::F16, 1, 2, &[1., -1.])?;
/// let x = Tensor::new(&[[1f32, 1.]], &Device::Cpu)?;
/// let [y, z] = linears([(&w, Some(&[0.5, 0.])), (&v, None)], &x, &mut Workspace::default())?;
/// assert_eq!((y.to_vec2::<f32>()?, z.to_vec2::<f32>()?), (vec![vec![3.5, 7.]], vec![vec![0.]]));
/// # Ok::<(), powerinfer_ops::OpError>(())
/// ```
pub fn linears<const N: usize>(
    projections: [(&NeuronMatrix, Option<&[f32]>); N],
    x: &Tensor,
    workspace: &mut Workspace,
) -> Result<[Tensor; N], OpError> {
    const NAME: &str = "linears";
    let d_model = projections.first().map_or(0, |(w, _)| w.d_model());
    for (w, bias) in projections {
        tensor::check_rows(NAME, "x", x, w.d_model())?;
        check_bias(NAME, w, bias)?;
    }
    tensor::with_rows(NAME, "x", x, d_model, |values| {
        let n_tokens = x.dims()[0];
        let mut outs = projections.map(|(w, _)| vec![0.0; n_tokens * w.n_neurons()]);
        let kernels = RowKernels::best();
        let formats: [WeightFormat; N] = projections.map(|(w, _)| w.format());
        let inputs = Inputs::new(kernels, &formats, d_model, values, &mut workspace.inputs);
        if n_tokens == 1 {
            let products = projections.iter().zip(&mut outs);
            let products = products.map(|((w, _), out)| (*w, &mut out[..])).collect();
            rows::matvecs(kernels, products, inputs);
        } else {
            for ((w, _), out) in projections.iter().zip(&mut outs) {
                rows::matvec(kernels, w, inputs, out);
            }
        }
        let mut tensors = Vec::with_capacity(N);
        for ((w, bias), mut out) in projections.into_iter().zip(outs) {
            add_to_rows(&mut out, bias.unwrap_or_default());
            tensors.push(Tensor::from_vec(out, (n_tokens, w.n_neurons()), &Device::Cpu)?);
        }
        Ok(<[Tensor; N]>::try_from(tensors).expect("one for each projection"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::linear;
    use testing::Seeded;

    #[test]
    fn several_projections_are_each_of_them_to_the_bit() {
        let d = 64;
        for n_tokens in [0, 1, 3] {
            let x = Seeded::new(1).normal(n_tokens * d);
            let x = Tensor::from_vec(x, (n_tokens, d), &Device::Cpu).unwrap();
            let matrix = |format, n: usize| {
                NeuronMatrix::from_f32(format, n, d, &Seeded::new(n as u64).normal(n * d)).unwrap()
            };
            let (q, k) = (matrix(WeightFormat::Q8_0, 700), matrix(WeightFormat::F16, 1));
            let (v, bias) = (matrix(WeightFormat::Q4_0, 900), Seeded::new(2).normal(900));
            let all = [(&q, None), (&k, None), (&v, Some(&bias[..]))];
            for n_threads in [1, 3] {
                let pool = crate::ThreadPool::new(std::num::NonZeroUsize::new(n_threads)).unwrap();
                let found = pool.install(|| linears(all, &x, &mut Workspace::default()).unwrap());
                for ((w, bias), found) in all.into_iter().zip(found) {
                    let alone = linear(w, bias, &x).unwrap();
                    assert_eq!(found.dims(), alone.dims());
                    let [found, alone] =
                        [found, alone].map(|y| y.flatten_all().unwrap().to_vec1::<f32>().unwrap());
                    assert_eq!(found, alone, "{n_tokens} tokens, {n_threads} threads");
                }
            }
        }
    }

    #[test]
    fn a_matrix_of_another_width_or_bias_is_refused() {
        let matrix =
            |d: usize| NeuronMatrix::from_f32(WeightFormat::F32, 2, d, &vec![1.0; 2 * d]).unwrap();
        let (w, wider) = (matrix(4), matrix(5));
        let x = Tensor::zeros((1, 4), candle_core::DType::F32, &Device::Cpu).unwrap();
        let run = |all: [(&NeuronMatrix, Option<&[f32]>); 2]| {
            linears(all, &x, &mut Workspace::default()).unwrap_err()
        };
        assert!(matches!(run([(&w, None), (&wider, None)]), OpError::Shape { what: "x", .. }));
        let bias = run([(&w, Some(&[1.0])), (&w, None)]);
        assert!(matches!(bias, OpError::Shape { what: "bias", .. }));
    }
}
