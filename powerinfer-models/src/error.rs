//! The one error type of this crate.

use std::path::PathBuf;

/// The result of this crate's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What can go wrong while a model is loaded, converted or watched.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file, a tensor or an operator.
    #[error(transparent)]
    Core(#[from] powerinfer_core::Error),
    /// A predictor does not fit its layer.
    #[error(transparent)]
    Predictor(powerinfer_predictor::Error),
    /// Sparse inference was asked for, but every neuron of the model fires.
    #[error(
        "sparsity `{sparsity}` needs an activation that is zero for most neurons (relu), \
         the model has `{activation}`; use `auto` or `dense`"
    )]
    NotSparse {
        /// The mode that was asked for.
        sparsity: powerinfer_core::Sparsity,
        /// The activation of the model.
        activation: powerinfer_ops::Activation,
    },
    /// A mode that this loader does not know.
    #[error("sparsity `{sparsity}` is not supported by this loader")]
    UnsupportedSparsity {
        /// The mode that was asked for.
        sparsity: powerinfer_core::Sparsity,
    },
    /// A trained predictor that misses nearly everything in every layer.
    #[error(
        "the predictor lists less than {:.0} % of the activation mass in every layer: it is that of \
         another model", 100.0 * .floor
    )]
    PredictorOfAnotherModel {
        /// The share that it has to list.
        floor: f64,
    },
    /// Settings of a predictor that cannot be.
    #[error(
        "predictor: expected a finite shift and a floor from 0 to 1, found shift {shift} and floor \
         {floor:?}"
    )]
    PredictorOptions {
        /// The shift that was given.
        shift: f32,
        /// The floor that was given.
        floor: Option<f64>,
    },
    /// A predictor cannot be made as it was asked for.
    #[error("making a predictor: expected {expected}, found {found}")]
    Training {
        /// What it takes.
        expected: String,
        /// What there is.
        found: String,
    },
    /// A checkpoint is that of another run: of another model, another text or other options.
    #[error("{path}: the checkpoint of another run: {}", .differences.join("; "))]
    OtherRun {
        /// The checkpoint.
        path: PathBuf,
        /// What differs, each as `seed: expected 1, found 0`.
        differences: Vec<String>,
    },
    /// A model has something that a format has no way to say.
    #[error("{what} cannot be said in a {format} file")]
    NotConvertible {
        /// What it has.
        what: &'static str,
        /// The format.
        format: &'static str,
    },
    /// A density that no synthetic model can have.
    #[error("density must lie between 0.001 and 0.999, found {found}")]
    Density {
        /// The density that was asked for.
        found: f64,
    },
    /// A synthetic model whose firing is to be more skewed than can be.
    #[error(
        "skew {found}, expected a share of the neurons from 0.001 to 0.8 that can make 80 % of the \
         activations at a density of {density}"
    )]
    Skew {
        /// The share that was asked for.
        found: f64,
        /// The density that it was asked for at.
        density: f64,
    },
    /// A synthetic model that does not exist.
    #[error("unknown synthetic model {found:?}, supported: {supported}")]
    UnknownSynthetic {
        /// The name that was given.
        found: String,
        /// The names that are known.
        supported: String,
    },
}

impl From<powerinfer_predictor::Error> for Error {
    fn from(error: powerinfer_predictor::Error) -> Self {
        match error {
            // what is wrong with a file is the same wherever it was read
            powerinfer_predictor::Error::Core(error) => Self::Core(*error),
            other => Self::Predictor(other),
        }
    }
}

impl From<powerinfer_ops::OpError> for Error {
    fn from(error: powerinfer_ops::OpError) -> Self {
        Self::Core(error.into())
    }
}
