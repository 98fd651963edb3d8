//! Rows of 2, 3 or 4 bits a weight: too coarse to compute with, good enough to tell the sign of a
//! product.
//!
//! Blocks of 32 values share a scale in f16. A value is `scale · (number + ½ − 2^(bits−1))`, so that
//! with two bits the levels are ±½ and ±1½ scales: there is no zero, because a level spent on it
//! would be missing where it counts. The scale is fitted to the block by least squares.

use std::fmt;
use std::str::FromStr;

use half::f16;

use crate::error::OpError;

/// Values that share a scale.
pub(crate) const BLOCK: usize = 32;
/// How often numbers and scale are fitted to each other in turn; more changes next to nothing.
const FITS: usize = 3;

/// How many bits a weight of a [`LowBitMatrix`](crate::LowBitMatrix) takes, without its share of
/// the scale, which is half a bit.
///
/// # Examples
/// ```
/// use powerinfer_ops::LowBitFormat;
/// assert_eq!("3".parse::<LowBitFormat>()?, LowBitFormat::Bits3);
/// assert_eq!(LowBitFormat::Bits2.bits(), 2);
/// assert!("5".parse::<LowBitFormat>().is_err());
/// # Ok::<(), powerinfer_ops::OpError>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum LowBitFormat {
    /// Four levels: 2½ bits a weight in all.
    Bits2,
    /// Eight levels: 3½ bits a weight in all.
    Bits3,
    /// Sixteen levels: 4½ bits a weight in all.
    Bits4,
}

impl LowBitFormat {
    /// Every format, the smallest first.
    pub const ALL: [Self; 3] = [Self::Bits2, Self::Bits3, Self::Bits4];

    /// Bits of a number.
    #[must_use]
    pub fn bits(self) -> u32 {
        match self {
            Self::Bits2 => 2,
            Self::Bits3 => 3,
            Self::Bits4 => 4,
        }
    }

    /// What is subtracted from a number to give its level: half of the largest number.
    pub(crate) fn middle(self) -> f32 {
        ((1u32 << self.bits()) - 1) as f32 / 2.0
    }

    /// The numbers of a block, which may be short, and their scale; a scale of NaN if a value is not
    /// finite.
    pub(crate) fn encode(self, values: &[f32]) -> ([u8; BLOCK], f16) {
        let mut scale = self.first_scale(values);
        let mut numbers = [0; BLOCK];
        for fit in 0..=FITS {
            // the last numbers are those of the scale that is stored
            if fit == FITS {
                scale = f16::from_f32(scale).to_f32();
            }
            self.round(values, scale, &mut numbers);
            if fit < FITS {
                scale = self.fitted_scale(values, &numbers, scale);
            }
        }
        (numbers, super::block_scale(scale, values))
    }

    /// The value of a number.
    pub(crate) fn decode(self, number: u8, scale: f16) -> f32 {
        scale.to_f32() * (f32::from(number) - self.middle())
    }

    /// The best scale for normally distributed values (Max, "Quantizing for Minimum Distortion",
    /// 1960, table II).
    fn first_scale(self, values: &[f32]) -> f32 {
        let square: f32 = values.iter().map(|value| value * value).sum();
        let step = match self {
            Self::Bits2 => 0.9957,
            Self::Bits3 => 0.586,
            Self::Bits4 => 0.3352,
        };
        step * (square / values.len().max(1) as f32).sqrt()
    }

    /// The scale that fits the levels of `numbers` to `values` by least squares.
    fn fitted_scale(self, values: &[f32], numbers: &[u8; BLOCK], scale: f32) -> f32 {
        let (mut product, mut square) = (0.0, 0.0);
        for (value, number) in values.iter().zip(numbers) {
            let level = f32::from(*number) - self.middle();
            product += value * level;
            square += level * level;
        }
        // no level is zero, so the square is not; a product of zero means a block of zeros
        if product > 0.0 { product / square } else { scale }
    }

    /// The nearest level of each value.
    fn round(self, values: &[f32], scale: f32, numbers: &mut [u8; BLOCK]) {
        let inverse = if scale > 0.0 { 1.0 / scale } else { 0.0 };
        let largest = 2.0 * self.middle();
        for (number, value) in numbers.iter_mut().zip(values) {
            // a cast truncates, saturates and takes NaN to 0
            *number = (value * inverse + self.middle() + 0.5).clamp(0.0, largest + 0.5) as u8;
        }
    }
}

impl fmt::Display for LowBitFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.bits().fmt(f)
    }
}

impl FromStr for LowBitFormat {
    type Err = OpError;

    fn from_str(name: &str) -> Result<Self, OpError> {
        Self::ALL.into_iter().find(|format| format.to_string() == name).ok_or_else(|| {
            OpError::UnknownFormat { found: name.to_owned(), supported: "2, 3, 4 (bits)" }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use testing::Seeded;

    fn block(values: &[f32]) -> [f32; BLOCK] {
        values.try_into().unwrap()
    }

    fn decoded(format: LowBitFormat, values: &[f32; BLOCK]) -> [f32; BLOCK] {
        let (numbers, scale) = format.encode(values);
        numbers.map(|number| format.decode(number, scale))
    }

    #[test]
    fn errors_are_those_of_the_best_uniform_quantiser() {
        // distortion of Max's table II, a little less because the scale is fitted to each block
        for (format, distortion) in [
            (LowBitFormat::Bits2, 0.1188),
            (LowBitFormat::Bits3, 0.03744),
            (LowBitFormat::Bits4, 0.01154),
        ] {
            let values = Seeded::new(7).normal(320 * BLOCK);
            let (mut error, mut square) = (0.0, 0.0);
            for values in values.chunks_exact(BLOCK) {
                let values = block(values);
                for (value, back) in values.iter().zip(decoded(format, &values)) {
                    error += (value - back).powi(2);
                    square += value.powi(2);
                }
            }
            let found = error / square;
            assert!(found < distortion && found > 0.7 * distortion, "{format}: {found}");
        }
    }

    #[test]
    fn levels_are_halves_and_symmetrical() {
        let mut values = [0.0; BLOCK];
        for (i, value) in values.iter_mut().enumerate() {
            *value = [-1.5, -0.5, 0.5, 1.5][i % 4];
        }
        assert_eq!(decoded(LowBitFormat::Bits2, &values), values);
        for format in LowBitFormat::ALL {
            let values = block(&Seeded::new(3).normal(BLOCK));
            let mirrored = decoded(format, &values.map(|value| -value));
            for (back, mirrored) in decoded(format, &values).iter().zip(mirrored) {
                assert!((back + mirrored).abs() < 1e-6, "{format}: {back} {mirrored}");
            }
        }
    }

    #[test]
    fn zeros_stay_zeros_and_infinities_are_not_lost() {
        for format in LowBitFormat::ALL {
            assert_eq!(decoded(format, &[0.0; BLOCK]), [0.0; BLOCK]);
            for bad in [f32::NAN, f32::INFINITY] {
                let mut values = [1.0; BLOCK];
                values[9] = bad;
                assert!(decoded(format, &values).iter().all(|value| value.is_nan()), "{format}");
            }
        }
    }
}
