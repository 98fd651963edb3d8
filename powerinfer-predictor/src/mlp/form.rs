//! What two layers read, and what lies between them.

use std::fmt;
use std::str::FromStr;

/// The kind of two layers that a predictor is made of.
///
/// # Examples
/// ```
/// use powerinfer_predictor::{MlpForm, MlpHidden, MlpInput};
/// assert_eq!(MlpForm::ORIGINAL.hidden, MlpHidden::Relu);
/// assert_eq!("normed".parse(), Ok(MlpInput::Normed));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct MlpForm {
    /// What the first layer reads.
    pub input: MlpInput,
    /// What happens to its output.
    pub hidden: MlpHidden,
}

impl MlpForm {
    /// The original's: a ReLU between, on the residual stream. Its files say no other.
    pub const ORIGINAL: Self = Self { input: MlpInput::Residual, hidden: MlpHidden::Relu };
    /// A product of two thin matrices, on what the gate itself reads.
    pub const LOW_RANK: Self = Self { input: MlpInput::Normed, hidden: MlpHidden::Linear };
}

/// What the first layer of a predictor reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MlpInput {
    /// The residual stream before the norm.
    Residual,
    /// What gate and up are multiplied with.
    Normed,
}

/// What lies between the two layers of a predictor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MlpHidden {
    /// A ReLU.
    Relu,
    /// Nothing.
    Linear,
}

/// A name that is none of the known ones.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("expected {expected}")]
pub struct UnknownName {
    /// The names that are known.
    pub expected: &'static str,
}

impl fmt::Display for MlpInput {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Residual => "residual",
            Self::Normed => "normed",
        })
    }
}

impl FromStr for MlpInput {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        match name {
            "residual" => Ok(Self::Residual),
            "normed" => Ok(Self::Normed),
            _ => Err(UnknownName { expected: "residual or normed" }),
        }
    }
}

impl fmt::Display for MlpHidden {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Relu => "relu",
            Self::Linear => "linear",
        })
    }
}

impl FromStr for MlpHidden {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        match name {
            "relu" => Ok(Self::Relu),
            "linear" => Ok(Self::Linear),
            _ => Err(UnknownName { expected: "relu or linear" }),
        }
    }
}
