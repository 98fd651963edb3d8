//! The functions between the two halves of a feed-forward network.

use std::fmt;
use std::str::FromStr;

use crate::error::OpError;

/// An activation function.
///
/// # Examples
/// ```
/// use powerinfer_ops::Activation;
/// assert_eq!("relu".parse::<Activation>()?, Activation::Relu);
/// assert!(Activation::Relu.is_sparse() && !Activation::Silu.is_sparse());
/// assert!("gelu_fast".parse::<Activation>().is_err());
/// # Ok::<(), powerinfer_ops::OpError>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Activation {
    /// `max(x, 0)`: exactly zero for every neuron that does not fire.
    Relu,
    /// `x / (1 + e^-x)`: never exactly zero, so it runs densely.
    Silu,
}

impl Activation {
    /// Whether most values come out as exactly zero, so that neurons can be skipped without loss.
    #[must_use]
    pub fn is_sparse(self) -> bool {
        matches!(self, Self::Relu)
    }

    /// The name in a Hugging Face configuration.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Relu => "relu",
            Self::Silu => "silu",
        }
    }

    /// The function itself. A NaN stays a NaN.
    #[must_use]
    pub fn apply(self, x: f32) -> f32 {
        match self {
            // not `f32::max`, which would turn a NaN into a neuron that silently does not fire;
            // -0.0 becomes 0.0
            Self::Relu => {
                if x <= 0.0 {
                    0.0
                } else {
                    x
                }
            }
            Self::Silu => x / (1.0 + (-x).exp()),
        }
    }
}

impl fmt::Display for Activation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Activation {
    type Err = OpError;

    fn from_str(name: &str) -> Result<Self, OpError> {
        match name {
            "relu" => Ok(Self::Relu),
            "silu" => Ok(Self::Silu),
            _ => Err(OpError::UnknownActivation {
                found: name.to_owned(),
                supported: "relu, silu (dense only)",
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn relu_is_zero_or_the_value_and_keeps_nan() {
        assert_eq!(Activation::Relu.apply(-3.0), 0.0);
        assert!(Activation::Relu.apply(-0.0).is_sign_positive());
        assert_eq!(Activation::Relu.apply(3.5), 3.5);
        assert!(Activation::Relu.apply(f32::NAN).is_nan());
    }

    #[test]
    fn silu_equals_its_definition() {
        assert_eq!(Activation::Silu.apply(0.0), 0.0);
        assert!((Activation::Silu.apply(1.0) - 0.731_058_6).abs() < 1e-6);
        assert!((Activation::Silu.apply(-20.0) + 4.122_307e-8).abs() < 1e-13);
    }
}
