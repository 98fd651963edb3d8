//! A trained predictor, for a device that runs it.

use super::{DensePart, RowPredictor};
use crate::activation::Activation;
use crate::check::check_shape;
use crate::error::OpError;
use crate::matrix::NeuronMatrix;

/// Two layers and the least score of a neuron that runs (PowerInfer, "Adaptive Sparsity Predictors"):
/// neuron `i` is picked where `rows[i] · activation(first · x + bias) ≥ threshold`. A score that is not a
/// number counts as reaching it.
#[derive(Debug, Clone, Copy)]
pub struct MlpLayers<'a> {
    /// `[rank, d_model]`
    pub first: DensePart<'a>,
    /// Whether the first layer reads the residual stream; else it reads what gate and up do.
    pub reads_residual: bool,
    /// What is applied between the layers; `None` takes the products as they are.
    pub activation: Option<Activation>,
    /// `[n_neurons, rank]`
    pub rows: &'a NeuronMatrix,
    /// The least score of a neuron that runs.
    pub threshold: f32,
}

impl MlpLayers<'_> {
    /// Values between the layers.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.first.weights.n_neurons()
    }

    /// Bytes of both layers.
    #[must_use]
    pub fn size_bytes(&self) -> usize {
        let bias = self.first.bias.map_or(0, size_of_val);
        self.first.weights.size_bytes() + bias + self.rows.size_bytes()
    }
}

impl RowPredictor<'_> {
    /// Whether it reads the residual stream; else it reads what gate and up do.
    #[must_use]
    pub fn reads_residual(&self) -> bool {
        matches!(self, Self::Scored(MlpLayers { reads_residual: true, .. }))
    }

    /// Values between its layers; 0 without.
    #[must_use]
    pub fn rank(&self) -> usize {
        match self {
            Self::Estimated(..) => 0,
            Self::Scored(layers) => layers.rank(),
        }
    }

    /// Bytes in memory.
    #[must_use]
    pub fn size_bytes(&self) -> usize {
        match self {
            Self::Estimated(estimate, _) => estimate.resident_bytes(),
            Self::Scored(layers) => layers.size_bytes(),
        }
    }

    /// Fails unless it is for `n_neurons` neurons and tokens of `d_model` values.
    ///
    /// # Errors
    /// [`OpError::Shape`].
    pub fn check_shape(&self, n_neurons: usize, d_model: usize) -> Result<(), OpError> {
        let (op, rank) = ("HeldFfn::hold_predictor", self.rank());
        let check = |what, expected: [usize; 2], found: [usize; 2]| {
            check_shape(op, what, &expected, &found)
        };
        let rows = "the predictor's rows";
        match self {
            Self::Estimated(estimate, _) => {
                let copy = estimate.rows();
                check(rows, [n_neurons, d_model], [copy.n_rows(), copy.n_columns()])
            }
            Self::Scored(MlpLayers { first, rows: last, .. }) => {
                let found = [rank, first.weights.d_model()];
                check("the predictor's first layer", [rank, d_model], found)?;
                let n_biases = first.bias.map_or(rank, <[f32]>::len);
                check_shape(op, "the predictor's bias", &[rank], &[n_biases])?;
                check(rows, [n_neurons, rank], [last.n_neurons(), last.d_model()])
            }
        }
    }
}
