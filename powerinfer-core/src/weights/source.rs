//! What weights are taken from, and what it says about them.

use std::fmt;
use std::path::PathBuf;

use powerinfer_ops::WeightFormat;

use super::MappedTensor;
use crate::error::Result;

/// The type that a file stores a tensor in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FileDtype {
    /// One that matrices are held in.
    Weights(WeightFormat),
    /// Any other, by its name in the file. No error until somebody takes the tensor.
    Other(String),
}

impl fmt::Display for FileDtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Weights(format) => format.fmt(f),
            Self::Other(name) => f.write_str(name),
        }
    }
}

/// What a file says about one of its tensors.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    /// The name, unique among the tensors of a source.
    pub name: String,
    /// The type that it is stored in.
    pub dtype: FileDtype,
    /// Its shape, outermost first.
    pub shape: Vec<usize>,
}

impl TensorInfo {
    /// Bytes that the file spends on it, saturated; none of a type that weights are not read from.
    pub(super) fn size_bytes(&self) -> u64 {
        let (&width, outer) = self.shape.split_last().unwrap_or((&1, &[]));
        let FileDtype::Weights(format) = &self.dtype else { return 0 };
        let row_bytes = format.row_bytes(width).unwrap_or(0) as u64;
        outer.iter().fold(row_bytes, |bytes, &n| bytes.saturating_mul(n as u64))
    }
}

/// Where tensors come from: the files of a model, or anything that can stand in for them.
pub trait TensorSource: Send + Sync + fmt::Debug {
    /// Every tensor.
    fn tensors(&self) -> Vec<TensorInfo>;

    /// Fills `out` with the packed bytes of a tensor from `offset_bytes` on, counted from its
    /// start; numbers are little endian, rows follow each other without padding.
    ///
    /// # Errors
    /// [`Error::MissingTensor`](crate::Error::MissingTensor) for an unknown name,
    /// [`Error::TensorRange`](crate::Error::TensorRange) for bytes that the tensor does not have,
    /// [`Error::Io`](crate::Error::Io).
    fn read(&self, name: &str, offset_bytes: u64, out: &mut [u8]) -> Result<()>;

    /// The packed bytes of a tensor where they lie, if they are in memory; no source needs this.
    fn mapped(&self, name: &str) -> Option<MappedTensor> {
        let _ = name;
        None
    }

    /// The file that holds a tensor, or for an unknown name the one that lists them all; it is
    /// what errors name.
    fn path(&self, name: &str) -> PathBuf;
}
