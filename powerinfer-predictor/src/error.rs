//! The one error type of this crate.

use std::path::PathBuf;

use powerinfer_ops::OpError;

/// The result of this crate's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What can be wrong with a predictor or its inputs.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An operator refused its operands.
    #[error(transparent)]
    Op(#[from] OpError),
    /// A file of predictors, or something in it.
    #[error(transparent)]
    Core(Box<powerinfer_core::Error>),
    /// A layer of a file of predictors cannot be used.
    #[error("{}: the predictor of layer {layer} cannot be used", path.display())]
    InFile {
        /// The file.
        path: PathBuf,
        /// The layer.
        layer: usize,
        /// What is wrong there.
        #[source]
        source: Box<Error>,
    },
    /// candle refused an operation.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
    /// A weight or a threshold of a predictor is not a finite number.
    #[error("predictor: {what}, row {row}, holds a value that is not a finite number")]
    NotFinite {
        /// The part of the predictor.
        what: &'static str,
        /// Its row.
        row: usize,
    },
    /// A rank that factors cannot give.
    #[error("predictor: expected a rank from 1 to {max}, found {found}")]
    Rank {
        /// The highest.
        max: usize,
        /// The one that was asked for.
        found: usize,
    },
    /// There is nothing to fit a predictor to, or to measure it on: no tokens, or no neuron fired.
    #[error("predictor: expected tokens for which neurons fire, found none")]
    NoSamples,
    /// Two masks that are to be compared have different shapes.
    #[error("masks of {predicted:?} and {oracle:?} tokens × neurons cannot be compared")]
    MaskShape {
        /// Tokens and neurons of the prediction.
        predicted: (usize, usize),
        /// Tokens and neurons of the truth.
        oracle: (usize, usize),
    },
}

impl From<powerinfer_core::Error> for Error {
    fn from(error: powerinfer_core::Error) -> Self {
        Self::Core(Box::new(error))
    }
}
