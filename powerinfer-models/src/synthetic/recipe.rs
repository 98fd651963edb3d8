//! How a value of a tensor is made: by its index alone, so that any part can be made by itself.

use powerinfer_core::SplitMix64;

/// How the values of a tensor are made.
pub(super) struct Recipe<'a> {
    pub(super) shape: Vec<usize>,
    /// Standard deviation.
    pub(super) scale: f32,
    pub(super) first_column: First<'a>,
    pub(super) first_row_zero: bool,
    /// Whether rows and columns were exchanged after all this was said.
    pub(super) turned: bool,
}

/// What the first value of each row is, or of a vector all values.
#[derive(Clone, Copy)]
pub(super) enum First<'a> {
    /// As random as the others.
    Random,
    Same(f32),
    /// A row's own, times a factor.
    Of(&'a [f32], f32),
}

impl Recipe<'_> {
    pub(super) fn value(&self, index: usize, seed: u64) -> f32 {
        let [n_rows, n_columns] = match *self.shape.as_slice() {
            [rows, columns] => [rows, columns],
            _ => [self.shape[0], 1],
        };
        let (index, n_columns) = match self.turned {
            true => (index % n_columns * n_rows + index / n_columns, n_rows),
            false => (index, n_columns),
        };
        if self.first_row_zero && index < n_columns {
            return 0.0;
        }
        match self.first_column {
            First::Same(value) if index.is_multiple_of(n_columns) => value,
            First::Of(values, factor) if index.is_multiple_of(n_columns) => {
                values[index / n_columns] * factor
            }
            _ => self.scale * nearly_normal(seed, index),
        }
    }
}

/// A sum of four uniform numbers, mean 0 and variance 1: sums of many of them are normal, and it
/// costs a billion of them few seconds.
pub(crate) fn nearly_normal(seed: u64, index: usize) -> f32 {
    let bits = SplitMix64::mix(seed.wrapping_add((index as u64).wrapping_mul(SplitMix64::STEP)));
    let sum: u32 = (0..4).map(|word| (bits >> (16 * word)) as u32 & 0xFFFF).sum();
    // four uniform numbers of width 65536 have standard deviation 65536 / √3
    (sum as f32 - 131_070.0) * (1.732_050_8 / 65_536.0)
}
