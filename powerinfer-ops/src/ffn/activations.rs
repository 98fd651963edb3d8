//! The activations of a network, for those who watch it: profilers, and measures of predictors.

use candle_core::Tensor;

use super::FfnWeights;
use crate::error::OpError;
use crate::matrix::NeuronMatrix;
use crate::sparse_matvec::project;
use crate::tensor::with_rows;

/// The activations of every neuron, as down would be multiplied with them: `act(gate) · up`.
///
/// # Shapes
/// `x` `[n_tokens, d_model]` f32 · `h` ends up as `[n_tokens, n_neurons]`.
/// # Errors
/// As [`linear`](crate::linear) for `x`.
/// # Examples
/// ```
/// use candle_core::{Device, Tensor};
/// use powerinfer_ops::{Activation, FfnWeights, NeuronMatrix, WeightFormat, ffn_activations};
/// let m = |values: &[f32]| NeuronMatrix::from_f32(WeightFormat::F32, 2, 2, values);
/// let weights = FfnWeights::new(
///     m(&[1., 0., -1., 0.])?, Some(m(&[0., 1., 0., 1.])?), m(&[1., 1., 5., 5.])?, Activation::Relu)?;
/// let mut h = Vec::new();
/// ffn_activations(&weights, &Tensor::new(&[[2f32, 3.]], &Device::Cpu)?, &mut h)?;
/// assert_eq!(h, [6., 0.]);
/// # Ok::<(), powerinfer_ops::OpError>(())
/// ```
pub fn ffn_activations(weights: &FfnWeights, x: &Tensor, h: &mut Vec<f32>) -> Result<(), OpError> {
    with_rows("ffn_activations", "x", x, weights.d_model(), |values| {
        products(&weights.gate, values, h);
        let n_neurons = weights.n_neurons().max(1);
        for h in h.chunks_exact_mut(n_neurons) {
            h.iter_mut().enumerate().for_each(|(neuron, h)| *h = weights.activate(neuron, *h));
        }
        if let Some(matrix) = &weights.up {
            let mut up = Vec::new();
            products(matrix, values, &mut up);
            for (h, up) in h.chunks_exact_mut(n_neurons).zip(up.chunks_exact(n_neurons)) {
                for (neuron, (h, &up)) in h.iter_mut().zip(up).enumerate() {
                    *h = weights.gated(neuron, *h, up);
                }
            }
        }
        Ok(())
    })
}

fn products(matrix: &NeuronMatrix, x: &[f32], out: &mut Vec<f32>) {
    out.clear();
    out.resize(x.len() / matrix.d_model().max(1) * matrix.n_neurons(), 0.0);
    project(matrix, x, out);
}
