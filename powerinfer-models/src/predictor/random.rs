//! Random predictors for synthetic models: they cost what trained ones cost and know nothing.

use powerinfer_core::Result;
use powerinfer_ops::{FfnWeights, NeuronMatrix, WeightFormat};
use powerinfer_predictor::MlpPredictor;

use super::model_error;
use crate::synthetic::{nearly_normal, normal_quantile};

/// Neurons that a trained predictor lists for each that fires.
const LISTED_PER_FIRING: f64 = 1.2;

/// Two random layers whose scores are normal numbers, with the threshold that lists so many neurons
/// that about as many rows are read as under a trained predictor of a gated network of which
/// `density` fires: that one reads 1.2 gate rows and an up and a down row for each neuron that
/// fires; of what this one lists, `density` fires.
pub(super) fn random_predictor(
    layer: usize,
    weights: &FfnWeights,
    (rank, density): (usize, f64),
    dtype: Option<WeightFormat>,
) -> Result<MlpPredictor> {
    let further = if weights.up.is_some() { 2.0 } else { 1.0 };
    let listed = density * (LISTED_PER_FIRING + further) / (1.0 + further * density);
    let threshold = normal_quantile(1.0 - listed.clamp(0.001, 0.999)) as f32;
    let (d_ff, d_model) = (weights.n_neurons(), weights.d_model());
    let matrix = |seed: u64, n_rows: usize, width: usize| {
        let format = dtype.unwrap_or(WeightFormat::F16);
        let scale = 1.0 / (width as f32).sqrt();
        let mut values = vec![0.0; width];
        NeuronMatrix::try_from_rows(format, n_rows, width, |row, bytes| {
            for (i, value) in values.iter_mut().enumerate() {
                *value = scale * nearly_normal(seed, row * width + i);
            }
            format.encode(&values, bytes);
            Ok::<(), powerinfer_ops::OpError>(())
        })
    };
    let seed = 2 * layer as u64;
    let (fc1, fc2) = (matrix(seed, rank, d_model)?, matrix(seed + 1, d_ff, rank)?);
    MlpPredictor::new(fc1, fc2, threshold).map_err(model_error)
}
