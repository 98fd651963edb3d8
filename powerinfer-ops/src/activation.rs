//! The functions between the two halves of a feed-forward network.

use std::f32::consts::FRAC_1_SQRT_2;
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
/// assert!(Activation::FatRelu { threshold: 0.01 }.is_sparse());
/// assert!("gelu_fast".parse::<Activation>().is_err());
/// # Ok::<(), powerinfer_ops::OpError>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum Activation {
    /// `max(x, 0)`: exactly zero for every neuron that does not fire.
    Relu,
    /// `x` where it is above the threshold, else 0 (ProSparse): a value just below the threshold
    /// is dropped whole, unlike under a shifted ReLU.
    FatRelu {
        /// From 0, which makes it `relu`.
        threshold: f32,
    },
    /// `x / (1 + e^-x)`: never exactly zero, so it runs densely.
    Silu,
    /// `x · Φ(x)` with the distribution function of the normal distribution itself, not its
    /// approximation by tanh: never exactly zero but far out, so it runs densely.
    Gelu,
}

impl Activation {
    /// Whether most values come out as exactly zero, so that neurons can be skipped without loss.
    #[must_use]
    pub fn is_sparse(self) -> bool {
        matches!(self, Self::Relu | Self::FatRelu { .. })
    }

    /// The name in a Hugging Face configuration.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Relu => "relu",
            Self::FatRelu { .. } => "fatrelu",
            Self::Silu => "silu",
            Self::Gelu => "gelu",
        }
    }

    /// The function itself. A NaN stays a NaN.
    #[must_use]
    pub fn apply(self, x: f32) -> f32 {
        match self {
            Self::Relu => above(0.0, x),
            Self::FatRelu { threshold } => above(threshold, x),
            Self::Silu => x / (1.0 + (-x).exp()),
            Self::Gelu => 0.5 * x * (1.0 + candle_core::cpu::erf::erf_f32(x * FRAC_1_SQRT_2)),
        }
    }
}

/// Not `f32::max`, which would turn a NaN into a neuron that silently does not fire; -0.0 becomes
/// 0.0.
fn above(threshold: f32, x: f32) -> f32 {
    if x <= threshold { 0.0 } else { x }
}

impl fmt::Display for Activation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The functions that a name alone says; [`Activation::FatRelu`] needs its threshold, too.
impl FromStr for Activation {
    type Err = OpError;

    fn from_str(name: &str) -> Result<Self, OpError> {
        match name {
            "relu" => Ok(Self::Relu),
            "silu" => Ok(Self::Silu),
            "gelu" => Ok(Self::Gelu),
            _ => Err(OpError::UnknownActivation {
                found: name.to_owned(),
                supported: "relu, silu and gelu (dense only), and fatrelu where its threshold is given",
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
    fn fatrelu_is_zero_up_to_the_threshold_and_the_value_above_it() {
        let fat = Activation::FatRelu { threshold: 0.01 };
        assert_eq!([-1.0, 0.0, 0.005, 0.01].map(|x| fat.apply(x)), [0.0; 4]);
        assert_eq!([0.010_001, 2.0].map(|x| fat.apply(x)), [0.010_001, 2.0]);
        assert!(fat.apply(f32::NAN).is_nan());
    }

    #[test]
    fn gelu_is_the_exact_one() {
        // the tanh approximation gives 1.954598 and -0.045402
        for (x, expected) in [(2.0, 1.954_499_7), (-2.0, -0.045_500_26), (1.0, 0.841_344_7)] {
            assert!((Activation::Gelu.apply(x) - expected).abs() < 1e-6, "{x}");
        }
        assert_eq!(Activation::Gelu.apply(0.0), 0.0);
    }

    #[test]
    fn silu_equals_its_definition() {
        assert_eq!(Activation::Silu.apply(0.0), 0.0);
        assert!((Activation::Silu.apply(1.0) - 0.731_058_6).abs() < 1e-6);
        assert!((Activation::Silu.apply(-20.0) + 4.122_307e-8).abs() < 1e-13);
    }
}
