//! How a row of weights is stored: the list of formats and what each must define.

mod bf16;
mod f16;
mod f32;
pub(crate) mod low_bit;
mod q4_0;
mod q4_1;
pub(crate) mod q4_k;
mod q5_0;
mod q6_k;
mod q8_0;

use std::fmt;
use std::str::FromStr;

use crate::cpu::int8::{self, InputGroup};
use crate::error::OpError;

/// Values in the longest block of any format.
pub(crate) const MAX_BLOCK_LEN: usize = 256;

/// What one file under `format/` defines: how a block of values lies in bytes.
///
/// The provided `dot` and `axpy` are the scalar truth of the format: plain loops in index order
/// with f32 accumulation. Every kernel is measured against them, so they are never tuned.
pub(crate) trait BlockFormat {
    /// Name in configurations and command lines.
    const NAME: &'static str;
    /// Values in a block.
    const BLOCK_LEN: usize;
    /// Bytes of a block.
    const BLOCK_BYTES: usize;

    /// Writes `BLOCK_LEN` values into `BLOCK_BYTES` bytes, rounding to nearest, ties to even.
    fn encode_block(values: &[f32], block: &mut [u8]);

    /// Reads `BLOCK_LEN` values from `BLOCK_BYTES` bytes.
    fn decode_block(block: &[u8], values: &mut [f32]);

    /// `Σ_i row[i] · x[i]`
    fn dot(row: &[u8], x: &[f32]) -> f32 {
        let mut values = [0.0; MAX_BLOCK_LEN];
        let values = &mut values[..Self::BLOCK_LEN];
        let mut sum = 0.0;
        for (block, x) in row.chunks_exact(Self::BLOCK_BYTES).zip(x.chunks_exact(Self::BLOCK_LEN)) {
            Self::decode_block(block, values);
            for (value, x) in values.iter().zip(x) {
                sum += value * x;
            }
        }
        sum
    }

    /// `y[i] += scale · row[i]`
    fn axpy(scale: f32, row: &[u8], y: &mut [f32]) {
        let mut values = [0.0; MAX_BLOCK_LEN];
        let values = &mut values[..Self::BLOCK_LEN];
        let blocks = row.chunks_exact(Self::BLOCK_BYTES).zip(y.chunks_exact_mut(Self::BLOCK_LEN));
        for (block, y) in blocks {
            Self::decode_block(block, values);
            for (value, y) in values.iter().zip(y) {
                *y += scale * value;
            }
        }
    }
}

/// A format of whole numbers, each 32 of which share a scale and perhaps an offset.
///
/// It has two scalar truths: products with values as they are ([`BlockFormat::dot`]), and with
/// values rounded to eight bits, which dense and sparse products use.
pub(crate) trait NumberFormat: BlockFormat {
    /// Parts of a block.
    const PARTS: usize = Self::BLOCK_LEN / int8::BLOCK;
    /// Whether parts have offsets. The numbers of a format that has them are not negative.
    const OFFSETS: bool = false;

    /// One of the parts of a block.
    fn part(block: &[u8], part: usize) -> Part;

    /// All parts of a row.
    fn parts(row: &[u8]) -> impl Iterator<Item = Part> {
        let blocks = row.chunks_exact(Self::BLOCK_BYTES);
        blocks.flat_map(|block| (0..Self::PARTS).map(move |part| Self::part(block, part)))
    }

    /// `Σ_p x_scale_p · (scale_p · Σ_i number_i · x_number_i + offset_p · Σ_i x_number_i)`
    fn dot_int8(row: &[u8], x: &[InputGroup]) -> f32 {
        let mut product = 0.0;
        for (p, part) in Self::parts(row).enumerate() {
            let (group, p) = (&x[p / int8::BLOCKS], p % int8::BLOCKS);
            let (mut products, mut sum) = (0, 0);
            for (number, x) in part.numbers.into_iter().zip(group.block_numbers(p)) {
                products += i32::from(number) * i32::from(x);
                sum += i32::from(x);
            }
            product += part.scale * group.block_scale(p) * products as f32;
            product += part.offset * group.block_scale(p) * sum as f32;
        }
        product
    }
}

/// Values that share a scale: `value[i] = scale · number[i] + offset`.
#[derive(Debug)]
pub(crate) struct Part {
    pub(crate) scale: f32,
    pub(crate) offset: f32,
    pub(crate) numbers: [i8; int8::BLOCK],
}

/// The scale of a quantised block; NaN if a value is not finite, so that the loss shows wherever
/// the block is used.
fn block_scale(scale: f32, values: &[f32]) -> half::f16 {
    let finite = values.iter().all(|value| value.is_finite());
    if finite { half::f16::from_f32(scale) } else { half::f16::NAN }
}

/// The f16 at a place of a block.
fn f16_at(block: &[u8], at: usize) -> f32 {
    half::f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

/// The smallest and the largest of some values, the first of several: of zeros with different signs
/// `f32::min` gives one or the other depending on the CPU.
fn extremes(values: &[f32]) -> (f32, f32) {
    let first = (values[0], values[0]);
    values.iter().fold(first, |(least, most), &value| {
        (if value < least { value } else { least }, if value > most { value } else { most })
    })
}

/// The first value of the largest magnitude.
fn largest_magnitude(values: &[f32]) -> f32 {
    let larger = |a: f32, &b: &f32| if b.abs() > a.abs() { b } else { a };
    values.iter().fold(0.0, larger)
}

/// How the rows of a [`NeuronMatrix`](crate::NeuronMatrix) are stored.
///
/// # Examples
/// ```
/// use powerinfer_ops::WeightFormat;
/// let mut row = [0u8; 6];
/// WeightFormat::F16.encode(&[1.0, -2.5, 0.1], &mut row);
/// let mut back = [0.0; 3];
/// WeightFormat::F16.decode(&row, &mut back);
/// assert_eq!(back[..2], [1.0, -2.5]);
/// assert!((back[2] - 0.1).abs() < 1e-4);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[allow(non_camel_case_types, reason = "ggml's names")]
pub enum WeightFormat {
    /// IEEE 754 binary32, little endian.
    F32,
    /// IEEE 754 binary16, little endian.
    F16,
    /// The upper half of a binary32, little endian.
    BF16,
    /// Blocks of 32 values: an f16 scale, then 32 signed bytes (ggml's `Q8_0`).
    Q8_0,
    /// Blocks of 32 values: an f16 scale, then 32 four-bit numbers from −8 to 7 (ggml's `Q4_0`).
    Q4_0,
    /// Blocks of 32 values: an f16 scale, an f16 offset, then 32 four-bit numbers from 0 to 15
    /// (ggml's `Q4_1`).
    Q4_1,
    /// Blocks of 32 values: an f16 scale, then 32 five-bit numbers from −16 to 15 (ggml's `Q5_0`).
    Q5_0,
    /// Blocks of 256 values in eight parts with a scale and an offset of six bits each, and
    /// four-bit numbers (ggml's `Q4_K`). Made to be read: what [`encode`](Self::encode) writes is
    /// less exact than what ggml's quantiser finds.
    Q4_K,
    /// Blocks of 256 values in sixteen parts with a scale of eight bits each, and six-bit numbers
    /// (ggml's `Q6_K`). Made to be read, as [`Q4_K`](Self::Q4_K).
    Q6_K,
}

/// Runs an expression with `$F` bound to the [`BlockFormat`] of a [`WeightFormat`]: the one list
/// that a new format joins.
macro_rules! for_format {
    ($format:expr, $F:ident => $body:expr) => {
        match $format {
            WeightFormat::F32 => {
                type $F = F32;
                $body
            }
            WeightFormat::F16 => {
                type $F = F16;
                $body
            }
            WeightFormat::BF16 => {
                type $F = Bf16;
                $body
            }
            WeightFormat::Q8_0 => {
                type $F = Q80;
                $body
            }
            WeightFormat::Q4_0 => {
                type $F = Q40;
                $body
            }
            WeightFormat::Q4_1 => {
                type $F = Q41;
                $body
            }
            WeightFormat::Q5_0 => {
                type $F = Q50;
                $body
            }
            WeightFormat::Q4_K => {
                type $F = Q4K;
                $body
            }
            WeightFormat::Q6_K => {
                type $F = Q6K;
                $body
            }
        }
    };
}
pub(crate) use {
    bf16::Bf16, f16::F16, f32::F32, q4_0::Q40, q4_1::Q41, q4_k::Q4K, q5_0::Q50, q6_k::Q6K,
    q8_0::Q80,
};

impl WeightFormat {
    /// Every format, in the order of the list above.
    pub const ALL: [WeightFormat; 9] = [
        WeightFormat::F32,
        WeightFormat::F16,
        WeightFormat::BF16,
        WeightFormat::Q8_0,
        WeightFormat::Q4_0,
        WeightFormat::Q4_1,
        WeightFormat::Q5_0,
        WeightFormat::Q4_K,
        WeightFormat::Q6_K,
    ];

    /// The name used in configurations and command lines, for instance `"f16"`.
    #[must_use]
    pub fn name(self) -> &'static str {
        for_format!(self, F => F::NAME)
    }

    /// Values in a block; a row holds a multiple of it.
    #[must_use]
    pub fn block_len(self) -> usize {
        for_format!(self, F => F::BLOCK_LEN)
    }

    /// Bytes of a block.
    #[must_use]
    pub fn block_bytes(self) -> usize {
        for_format!(self, F => F::BLOCK_BYTES)
    }

    /// Bytes of a row of `n_columns` values, without padding.
    ///
    /// # Errors
    /// [`OpError::RowLength`] if the row does not consist of whole blocks, [`OpError::TooLarge`]
    /// if it does not fit the address space.
    pub fn row_bytes(self, n_columns: usize) -> Result<usize, OpError> {
        let block_len = self.block_len();
        if !n_columns.is_multiple_of(block_len) {
            return Err(OpError::RowLength { format: self.name(), block_len, n_columns });
        }
        (n_columns / block_len)
            .checked_mul(self.block_bytes())
            .ok_or(OpError::TooLarge { n_rows: 1, row_bytes: usize::MAX })
    }

    /// Reads a row.
    ///
    /// # Panics
    /// If `row` is not as long as `values.len()` values are in this format.
    pub fn decode(self, row: &[u8], values: &mut [f32]) {
        self.check(row, values.len());
        for_format!(self, F => {
            let blocks = row.chunks_exact(F::BLOCK_BYTES);
            for (block, values) in blocks.zip(values.chunks_exact_mut(F::BLOCK_LEN)) {
                F::decode_block(block, values);
            }
        });
    }

    /// Writes a row, rounding to nearest.
    ///
    /// # Panics
    /// If `row` is not as long as `values.len()` values are in this format.
    pub fn encode(self, values: &[f32], row: &mut [u8]) {
        self.check(row, values.len());
        for_format!(self, F => {
            let blocks = row.chunks_exact_mut(F::BLOCK_BYTES);
            for (block, values) in blocks.zip(values.chunks_exact(F::BLOCK_LEN)) {
                F::encode_block(values, block);
            }
        });
    }

    /// `Σ_i row[i] · x[i]`, in index order with f32 accumulation: the definition that kernels
    /// are tested against.
    ///
    /// # Panics
    /// If `row` is not as long as `x.len()` values are in this format.
    #[must_use]
    pub fn dot(self, row: &[u8], x: &[f32]) -> f32 {
        self.check(row, x.len());
        for_format!(self, F => F::dot(row, x))
    }

    /// `y[i] += scale · row[i]`: the definition that kernels are tested against.
    ///
    /// # Panics
    /// If `row` is not as long as `y.len()` values are in this format.
    pub fn axpy(self, scale: f32, row: &[u8], y: &mut [f32]) {
        self.check(row, y.len());
        for_format!(self, F => F::axpy(scale, row, y));
    }

    /// Whether [`round_scale`](Self::round_scale) rounds.
    pub(crate) fn rounds_scales(self) -> bool {
        matches!(self, Self::Q8_0 | Self::Q4_0)
    }

    /// What a row is multiplied with in a weighted sum: `scale` in 13 significant bits for Q8_0 and
    /// Q4_0, else as it is.
    ///
    /// The scale of a block has eleven bits, so that its product with a rounded one is exact in f32:
    /// it may be taken once a block, and whether it is changes no bit of a sum. (ggml rounds these
    /// factors to eight bits.) Magnitudes from 2¹¹⁶ on become NaN.
    #[must_use]
    pub fn round_scale(self, scale: f32) -> f32 {
        if !self.rounds_scales() {
            return scale;
        }
        // Veltkamp's splitting: the upper 24 - 11 bits
        let upper = scale * ((1 << 11) + 1) as f32;
        upper - (upper - scale)
    }

    fn check(self, row: &[u8], n_values: usize) {
        let expected = n_values / self.block_len() * self.block_bytes();
        assert!(
            n_values.is_multiple_of(self.block_len()) && row.len() == expected,
            "{n_values} values in {self} take {expected} bytes, found {}",
            row.len()
        );
    }
}

impl fmt::Display for WeightFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for WeightFormat {
    type Err = OpError;

    fn from_str(name: &str) -> Result<Self, OpError> {
        Self::ALL.into_iter().find(|format| format.name() == name).ok_or_else(|| {
            OpError::UnknownFormat {
                found: name.to_owned(),
                supported: "f32, f16, bf16, q8_0, q4_0, q4_1, q5_0, q4_k, q6_k",
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use testing::{GgmlBlocks, Seeded};

    #[test]
    fn names_and_formats_are_one_to_one() {
        for format in WeightFormat::ALL {
            assert_eq!(format.name().parse::<WeightFormat>().unwrap(), format);
        }
        assert!(matches!("q8_1".parse::<WeightFormat>(), Err(OpError::UnknownFormat { .. })));
    }

    #[test]
    fn what_was_encoded_decodes_within_half_a_unit_in_the_last_place() {
        for (format, epsilon) in
            [(WeightFormat::F32, 0.0), (WeightFormat::F16, 4.9e-4), (WeightFormat::BF16, 3.91e-3)]
        {
            let values: Vec<f32> = (-50..50).map(|i| i as f32 * 0.0371).collect();
            let mut row = vec![0; format.row_bytes(values.len()).unwrap()];
            format.encode(&values, &mut row);
            let mut back = vec![0.0; values.len()];
            format.decode(&row, &mut back);
            for (value, back) in values.iter().zip(&back) {
                assert!((value - back).abs() <= epsilon * value.abs(), "{format}: {value} {back}");
            }
            let mut again = vec![0; row.len()];
            format.encode(&back, &mut again);
            assert_eq!(row, again, "{format}: encoding what was decoded changes nothing");
        }
    }

    #[test]
    fn bytes_are_the_standard_little_endian_ones() {
        let cases: [(WeightFormat, &[u8]); 3] = [
            (WeightFormat::F32, &[0x00, 0x00, 0xC0, 0xBF]),
            (WeightFormat::F16, &[0x00, 0xBE]),
            (WeightFormat::BF16, &[0xC0, 0xBF]),
        ];
        for (format, expected) in cases {
            let mut row = vec![0; expected.len()];
            format.encode(&[-1.5], &mut row);
            assert_eq!(row, expected, "{format}");
        }
    }

    #[test]
    fn rounding_is_to_nearest_with_ties_to_even() {
        let mut row = [0; 2];
        // halfway between 1 and the next f16 goes to the even neighbour, which is 1
        WeightFormat::F16.encode(&[1.0 + 2f32.powi(-11)], &mut row);
        assert_eq!(row, [0x00, 0x3C]);
        WeightFormat::BF16.encode(&[1.0 + 2f32.powi(-8)], &mut row);
        assert_eq!(row, [0x80, 0x3F]);
        WeightFormat::BF16.encode(&[1.0 + 3.0 * 2f32.powi(-8)], &mut row);
        assert_eq!(row, [0x82, 0x3F]);
    }

    /// A block whose scale is 1, so that every number can be read off.
    fn counted(largest: f32) -> Vec<f32> {
        let mut values: Vec<f32> = (0..32).map(|i| (i as f32 - 16.0) / 4.0).collect();
        values[5] = largest;
        values
    }

    #[test]
    fn q8_0_bytes_are_ggml_s() {
        let mut row = [0; 34];
        WeightFormat::Q8_0.encode(&counted(127.0), &mut row);
        assert_eq!(row[..2], [0x00, 0x3C]);
        // -4, -3.75, -3.5, -3.25, -3: halves round away from zero
        assert_eq!(row[2..7].iter().map(|&b| b as i8).collect::<Vec<_>>(), [-4, -4, -4, -3, -3]);
        assert_eq!(row[7], 127);
        assert_eq!(row[33] as i8, 4);
    }

    #[test]
    fn q4_0_bytes_are_ggml_s() {
        let mut row = [0; 18];
        // the largest magnitude is -8, so the scale is 1
        WeightFormat::Q4_0.encode(&counted(-8.0), &mut row);
        assert_eq!(row[..2], [0x00, 0x3C]);
        // low: trunc(-4 + 8.5) = 4, trunc(-3.75 + 8.5) = 4; high: trunc(0 + 8.5) = 8
        assert_eq!(row[2], 0x84);
        assert_eq!(row[3], 0x84);
        assert_eq!(row[7] & 15, 0);
        // a positive largest value gets a negative scale and number 0
        WeightFormat::Q4_0.encode(&counted(8.0), &mut row);
        assert_eq!(row[..2], [0x00, 0xBC]);
        assert_eq!(row[7] & 15, 0);
        let mut back = [0.0; 32];
        WeightFormat::Q4_0.decode(&row, &mut back);
        assert_eq!((back[5], back[0], back[31]), (8.0, -4.0, 4.0));
    }

    /// The formats of blocks, and how many steps of a block are as long as its largest magnitude.
    const QUANTISED: [(WeightFormat, f32); 6] = [
        (WeightFormat::Q8_0, 127.0),
        (WeightFormat::Q4_0, 8.0),
        (WeightFormat::Q4_1, 7.5),
        (WeightFormat::Q5_0, 16.0),
        (WeightFormat::Q4_K, 7.5),
        (WeightFormat::Q6_K, 32.0),
    ];

    #[test]
    fn blocks_are_read_as_ggml_reads_them() {
        for (format, _) in QUANTISED {
            let blocks = GgmlBlocks::of(format.name());
            let mut values = [0.0; 256];
            format.decode(&blocks.quantised, &mut values);
            assert_eq!(values[..], blocks.quantised_read, "{format}");
            format.decode(&blocks.noise, &mut values);
            assert_eq!(values[..], blocks.noise_read, "{format}");
        }
    }

    #[test]
    fn blocks_of_32_are_written_as_ggml_s_reference_writes_them() {
        for (format, _) in QUANTISED {
            let blocks = GgmlBlocks::of(format.name());
            let mut row = vec![0; blocks.quantised.len()];
            format.encode(&blocks.values, &mut row);
            // the others are made to be read: their encoder is a simpler one
            assert_eq!(row == blocks.quantised, format.block_len() == 32, "{format}");
        }
    }

    #[test]
    fn the_simple_encoders_lose_at_most_twice_what_ggml_s_lose() {
        for format in [WeightFormat::Q4_K, WeightFormat::Q6_K] {
            let blocks = GgmlBlocks::of(format.name());
            let values = Seeded::new(1).normal(256);
            let mut row = vec![0; format.block_bytes()];
            let mut read = [0.0; 256];
            let mut lost = |values: &[f32]| {
                format.encode(values, &mut row);
                format.decode(&row, &mut read);
                values.iter().zip(&read).map(|(a, b)| (a - b) * (a - b)).sum::<f32>().sqrt()
            };
            let ours = lost(&blocks.values);
            let differences = blocks.values.iter().zip(&blocks.quantised_read);
            let ggml = differences.map(|(a, b)| (a - b) * (a - b)).sum::<f32>().sqrt();
            assert!(ours <= 2.0 * ggml, "{format}: {ours} {ggml}");
            // unit normal values: about a step over the root of twelve
            let bits = if format == WeightFormat::Q4_K { 4 } else { 6 };
            let step = 6.0 / (1 << bits) as f32;
            assert!(lost(&values) <= step * 16.0 / 12f32.sqrt(), "{format}");
        }
    }

    #[test]
    fn quantised_values_are_within_a_step_of_the_original() {
        for (format, steps) in QUANTISED {
            let values: Vec<f32> = (0..512).map(|i| (i as f32 * 1.7).sin() * 3.0).collect();
            let mut row = vec![0; format.row_bytes(512).unwrap()];
            format.encode(&values, &mut row);
            let mut back = vec![0.0; 512];
            format.decode(&row, &mut back);
            for (values, back) in values.chunks(32).zip(back.chunks(32)) {
                let largest = values.iter().fold(0f32, |a, b| a.max(b.abs()));
                for (value, back) in values.iter().zip(back) {
                    // half a step, a whole one where an end is clipped; scales are rounded, too
                    let step = largest / steps * 1.2;
                    assert!((value - back).abs() <= step, "{format}: {value} {back}");
                }
            }
        }
    }

    #[test]
    fn zeros_stay_zeros_and_infinities_are_not_lost() {
        for (format, _) in QUANTISED {
            let mut row = vec![0xAA; format.block_bytes()];
            let mut back = vec![1.0; format.block_len()];
            format.encode(&vec![0.0; back.len()], &mut row);
            format.decode(&row, &mut back);
            assert!(back.iter().all(|&value| value == 0.0), "{format}");
            for bad in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN] {
                let mut values = counted(1.0).repeat(back.len() / 32);
                values[7] = bad;
                format.encode(&values, &mut row);
                format.decode(&row, &mut back);
                assert!(back.iter().all(|value| value.is_nan()), "{format}");
            }
        }
    }
}
