//! The one error type of this crate.

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
    /// Two masks that are to be compared have different shapes.
    #[error("masks of {predicted:?} and {oracle:?} tokens × neurons cannot be compared")]
    MaskShape {
        /// Tokens and neurons of the prediction.
        predicted: (usize, usize),
        /// Tokens and neurons of the truth.
        oracle: (usize, usize),
    },
}
