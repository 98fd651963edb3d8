//! A coarse copy of a weight matrix, laid out so that sixteen rows are multiplied at once.
//!
//! A group is sixteen rows. Of each block of 32 columns it holds eight quads, the numbers of four
//! neighbouring columns of all its rows: 64 numbers, row by row. A register of 64 bytes holds two
//! quads as halves of its bytes (4 bits) or four as quarters (2 bits); with three bits a third
//! register holds the upper bits of all eight quads, one bit position each. So an instruction that
//! adds four products of bytes to each of sixteen 32-bit numbers serves sixteen rows, the four
//! bytes of the input are the same for all of them, and no sum ever crosses a register.
//!
//! After the numbers of all blocks come the scales, sixteen f16 a block.

use std::fmt;
use std::sync::Arc;

use bytemuck::Zeroable;
use half::f16;
use rayon::prelude::*;

use crate::bytes::{AlignedBytes, LINE_BYTES};
use crate::cpu::RowKernels;
use crate::cpu::int8::{self, InputGroup};
use crate::cpu::low_bit::{GROUP_ROWS, LowBitKernels};
use crate::error::OpError;
use crate::format::low_bit::{BLOCK, LowBitFormat};
use crate::mask::NeuronIds;
use crate::matrix::NeuronMatrix;

/// Columns of a quad.
const QUAD: usize = 4;
/// Quads of a block.
const QUADS: usize = BLOCK / QUAD;
/// Numbers of a quad, over the rows of a group.
const QUAD_NUMBERS: usize = QUAD * GROUP_ROWS;

/// A low-bit copy of a matrix `[n_rows, n_columns]`, to estimate products with.
///
/// # Examples
/// ```
/// use powerinfer_ops::{LowBitFormat, LowBitMatrix, NeuronMatrix, WeightFormat};
/// let w = NeuronMatrix::from_f32(WeightFormat::F32, 1, 4, &[1., -1., 1., 1.])?;
/// let copy = LowBitMatrix::new(LowBitFormat::Bits2, &w)?;
/// let mut products = [0.0];
/// copy.estimate(&[1., 2., 3., 4.], &mut products);
/// assert!((products[0] - 6.0).abs() < 0.1);
/// # Ok::<(), powerinfer_ops::OpError>(())
/// ```
#[derive(Clone)]
pub struct LowBitMatrix {
    bytes: Arc<AlignedBytes>,
    format: LowBitFormat,
    n_rows: usize,
    n_columns: usize,
    /// `[n_rows]`
    errors: Arc<[f32]>,
}

impl LowBitMatrix {
    /// Rounds every row of `matrix`. Runs on the current pool.
    ///
    /// # Errors
    /// [`OpError::TooLarge`], [`OpError::Allocation`].
    pub fn new(format: LowBitFormat, matrix: &NeuronMatrix) -> Result<Self, OpError> {
        let (n_rows, n_columns) = (matrix.n_neurons(), matrix.d_model());
        let n_blocks = n_columns.div_ceil(BLOCK);
        let stride = Self::group_bytes(format, n_blocks);
        let n_groups = n_rows.div_ceil(GROUP_ROWS);
        let total = n_groups.checked_mul(stride).filter(|&total| total <= isize::MAX as usize);
        let total = total.ok_or(OpError::TooLarge { n_rows: n_groups, row_bytes: stride })?;
        let mut bytes = AlignedBytes::zeroed(total)?;
        let mut errors = vec![0.0; n_rows];
        if stride > 0 {
            let groups = bytes.as_mut_slice().par_chunks_exact_mut(stride);
            let groups = groups.zip(errors.par_chunks_mut(GROUP_ROWS)).enumerate();
            groups.for_each_init(
                || vec![0.0; n_columns],
                |values, (group, (bytes, errors))| {
                    for (r, error) in errors.iter_mut().enumerate() {
                        matrix.row_to_f32(group * GROUP_ROWS + r, values);
                        *error = encode_row(format, bytes, r, values);
                    }
                },
            );
        }
        Ok(Self { bytes: Arc::new(bytes), format, n_rows, n_columns, errors: errors.into() })
    }

    /// Copies some rows into a matrix of their own, number by number: the estimates of a row stay
    /// the same bits.
    ///
    /// # Errors
    /// [`OpError::IdOutOfRange`] if an id is beyond the rows, [`OpError::Allocation`].
    pub fn pick_rows(&self, ids: &NeuronIds) -> Result<Self, OpError> {
        if let Some(id) = ids.last().filter(|&id| id as usize >= self.n_rows) {
            let op = "LowBitMatrix::pick_rows";
            return Err(OpError::IdOutOfRange { op, id, n_rows: self.n_rows });
        }
        let (format, n_blocks) = (self.format, self.n_columns.div_ceil(BLOCK));
        let stride = Self::group_bytes(format, n_blocks);
        let mut bytes = AlignedBytes::zeroed(ids.len().div_ceil(GROUP_ROWS) * stride)?;
        let from = self.bytes.as_slice();
        for (row, &id) in ids.as_slice().iter().enumerate() {
            let (to_group, from_group) = (row / GROUP_ROWS, id as usize / GROUP_ROWS);
            let to = &mut bytes.as_mut_slice()[to_group * stride..][..stride];
            let from = &from[from_group * stride..][..stride];
            copy_row(format, n_blocks, (from, id as usize % GROUP_ROWS), (to, row % GROUP_ROWS));
        }
        let errors = ids.as_slice().iter().map(|&id| self.errors[id as usize]).collect();
        let (bytes, n_rows) = (Arc::new(bytes), ids.len());
        Ok(Self { bytes, format, n_rows, n_columns: self.n_columns, errors })
    }

    /// Bytes that a row takes in a [`GateEstimate`](crate::GateEstimate) of whole groups of rows.
    #[must_use]
    pub fn row_bytes(format: LowBitFormat, n_columns: usize) -> usize {
        let group = Self::group_bytes(format, n_columns.div_ceil(BLOCK));
        // error, cut and deviation
        group.div_ceil(GROUP_ROWS) + 3 * size_of::<f32>()
    }

    /// Bytes in memory, padding and the rows' errors included.
    #[must_use]
    pub fn resident_bytes(&self) -> usize {
        self.bytes.as_slice().len() + self.errors.len() * size_of::<f32>()
    }

    /// Rows.
    #[must_use]
    pub fn n_rows(&self) -> usize {
        self.n_rows
    }

    /// Values of a row.
    #[must_use]
    pub fn n_columns(&self) -> usize {
        self.n_columns
    }

    /// Bits of a number.
    #[must_use]
    pub fn format(&self) -> LowBitFormat {
        self.format
    }

    /// How far each row is from the one that it copies, as a Euclidean norm.
    #[must_use]
    pub fn errors(&self) -> &[f32] {
        &self.errors
    }

    /// Number `column` of a row, as another device's copy holds it, too.
    ///
    /// # Panics
    /// If row or column is out of range.
    #[must_use]
    pub fn number(&self, row: usize, column: usize) -> u8 {
        assert!(column < self.n_columns, "column {column} of {}", self.n_columns);
        let (numbers, _) = self.group(row);
        let block = &numbers[column / BLOCK * number_bytes(self.format)..];
        number_at(self.format, block, row % GROUP_ROWS, column % BLOCK)
    }

    /// The scale of a block of 32 numbers.
    ///
    /// # Panics
    /// If row or block is out of range.
    #[must_use]
    pub fn scale(&self, row: usize, block: usize) -> f16 {
        let (_, scales) = self.group(row);
        let scale = &scales[block * scale_bytes() + row % GROUP_ROWS * size_of::<f16>()..];
        f16::from_le_bytes([scale[0], scale[1]])
    }

    /// Numbers and scales of the group of a row.
    fn group(&self, row: usize) -> (&[u8], &[u8]) {
        assert!(row < self.n_rows, "row {row} of {}", self.n_rows);
        let n_blocks = self.n_columns.div_ceil(BLOCK);
        let stride = Self::group_bytes(self.format, n_blocks);
        let bytes = &self.bytes.as_slice()[row / GROUP_ROWS * stride..][..stride];
        let (numbers, rest) = bytes.split_at(n_blocks * number_bytes(self.format));
        (numbers, &rest[..n_blocks * scale_bytes()])
    }

    /// Bytes that a pass over all rows reads.
    #[must_use]
    pub fn size_bytes(&self) -> usize {
        let n_blocks = self.n_columns.div_ceil(BLOCK);
        let group = n_blocks * (number_bytes(self.format) + scale_bytes());
        self.n_rows.div_ceil(GROUP_ROWS) * group
    }

    /// Estimates of the products of all rows with `x`, which is rounded to 8 bits first.
    ///
    /// # Panics
    /// If `x` does not hold `n_columns` values or `products` not `n_rows`.
    pub fn estimate(&self, x: &[f32], products: &mut [f32]) {
        assert_eq!(products.len(), self.n_rows, "one product a row");
        let mut input = LowBitInput::default();
        input.round(RowKernels::best(), x);
        let kernels = LowBitKernels::best();
        for (group, products) in products.chunks_mut(GROUP_ROWS).enumerate() {
            let sums = self.estimate_group(kernels, group, &input);
            products.copy_from_slice(&sums[..products.len()]);
        }
    }

    /// Estimates of the products of the sixteen rows of a group; zeros for rows beyond the last.
    pub(crate) fn estimate_group(
        &self,
        kernels: LowBitKernels,
        group: usize,
        x: &LowBitInput,
    ) -> [f32; GROUP_ROWS] {
        assert_eq!(x.n_values, self.n_columns, "as many values as columns");
        let (numbers, scales) = self.group(group * GROUP_ROWS);
        kernels.estimate(self.format, numbers, scales, x)
    }

    /// Bytes of a group, whole cache lines.
    fn group_bytes(format: LowBitFormat, n_blocks: usize) -> usize {
        (n_blocks * (number_bytes(format) + scale_bytes())).next_multiple_of(LINE_BYTES)
    }
}

impl fmt::Debug for LowBitMatrix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LowBitMatrix([{}, {}], {} bits)", self.n_rows, self.n_columns, self.format)
    }
}

/// Bytes of the numbers of a block, over the rows of a group.
pub(crate) fn number_bytes(format: LowBitFormat) -> usize {
    format.bits() as usize * BLOCK * GROUP_ROWS / 8
}

/// Bytes of the scales of a block.
pub(crate) fn scale_bytes() -> usize {
    GROUP_ROWS * size_of::<f16>()
}

/// Where number `column` of row `r` lies in its block: byte and lowest bit of each part, with how
/// many bits the part has.
fn places(format: LowBitFormat, r: usize, column: usize) -> [(usize, u32, u32); 2] {
    let (quad, byte) = (column / QUAD, r * QUAD + column % QUAD);
    let low = |bits: u32| {
        let per_byte = (8 / bits) as usize;
        (quad / per_byte * QUAD_NUMBERS + byte, (quad % per_byte) as u32 * bits, bits)
    };
    match format {
        LowBitFormat::Bits2 => [low(2), (0, 0, 0)],
        LowBitFormat::Bits3 => [low(2), (2 * QUAD_NUMBERS + byte, quad as u32, 1)],
        LowBitFormat::Bits4 => [low(4), (0, 0, 0)],
    }
}

/// Number `column` of row `r` of a block.
pub(crate) fn number_at(format: LowBitFormat, block: &[u8], r: usize, column: usize) -> u8 {
    let (mut number, mut have) = (0, 0);
    for (byte, shift, bits) in places(format, r, column) {
        number |= (block[byte] >> shift & ((1u8 << bits) - 1)) << have;
        have += bits;
    }
    number
}

/// Writes row `r` of a group; returns how far it is from `values`.
fn encode_row(format: LowBitFormat, bytes: &mut [u8], r: usize, values: &[f32]) -> f32 {
    let n_blocks = values.len().div_ceil(BLOCK);
    let (numbers, scales) = bytes.split_at_mut(n_blocks * number_bytes(format));
    let mut square = 0.0;
    for (at, values) in values.chunks(BLOCK).enumerate() {
        let (encoded, scale) = format.encode(values);
        let block = &mut numbers[at * number_bytes(format)..][..number_bytes(format)];
        for (column, (&number, value)) in encoded.iter().zip(values).enumerate() {
            let mut left = number;
            for (byte, shift, bits) in places(format, r, column) {
                block[byte] |= (left & ((1u8 << bits) - 1)) << shift;
                left >>= bits;
            }
            square += (value - format.decode(number, scale)).powi(2);
        }
        let place = at * scale_bytes() + r * size_of::<f16>();
        scales[place..][..size_of::<f16>()].copy_from_slice(&scale.to_le_bytes());
    }
    square.sqrt()
}

/// Copies a row of a group to a row of an empty one.
fn copy_row(
    format: LowBitFormat,
    n_blocks: usize,
    (from, from_row): (&[u8], usize),
    (to, to_row): (&mut [u8], usize),
) {
    let (number_bytes, scale_bytes) = (number_bytes(format), scale_bytes());
    for at in 0..n_blocks {
        let numbers = at * number_bytes..(at + 1) * number_bytes;
        for column in 0..BLOCK {
            let mut left = number_at(format, &from[numbers.clone()], from_row, column);
            for (byte, shift, bits) in places(format, to_row, column) {
                to[numbers.start + byte] |= (left & ((1u8 << bits) - 1)) << shift;
                left >>= bits;
            }
        }
        let scales = n_blocks * number_bytes + at * scale_bytes;
        let place =
            |row: usize| scales + row * size_of::<f16>()..scales + (row + 1) * size_of::<f16>();
        to[place(to_row)].copy_from_slice(&from[place(from_row)]);
    }
}

/// A token rounded to 8 bits, in the order that groups are laid out for.
#[derive(Debug, Default)]
pub(crate) struct LowBitInput {
    pub(crate) n_values: usize,
    /// Four signed bytes each, eight a block; zeros after the last value.
    pub(crate) quads: Vec<[i8; QUAD]>,
    /// What a byte of the block stands for.
    pub(crate) scales: Vec<f32>,
    /// The sum of the bytes of the block, which f32 holds exactly.
    pub(crate) sums: Vec<f32>,
    /// Euclidean norm of the values.
    pub(crate) norm: f32,
    padded: Vec<f32>,
    rounded: Vec<InputGroup>,
}

impl LowBitInput {
    /// Replaces the values. Where one of a block is not finite, the block's scale is not a number,
    /// and no estimate over it is one.
    pub(crate) fn round(&mut self, kernels: RowKernels, values: &[f32]) {
        let n_blocks = values.len().div_ceil(BLOCK);
        self.n_values = values.len();
        self.padded.clear();
        self.padded.extend_from_slice(values);
        self.padded.resize(n_blocks * BLOCK, 0.0);
        self.rounded.resize(int8::n_groups(values.len()), InputGroup::zeroed());
        (kernels.table().quantize)(&self.padded, &mut self.rounded);
        self.quads.resize(n_blocks * QUADS, [0; QUAD]);
        self.scales.resize(n_blocks, 0.0);
        self.sums.resize(n_blocks, 0.0);
        for (b, quads) in self.quads.as_chunks_mut::<QUADS>().0.iter_mut().enumerate() {
            let (group, block) = (&self.rounded[b / int8::BLOCKS], b % int8::BLOCKS);
            let mut sum = 0;
            for (byte, number) in
                quads.as_flattened_mut().iter_mut().zip(group.block_numbers(block))
            {
                *byte = number;
                sum += i32::from(number);
            }
            self.scales[b] = group.block_scale(block);
            self.sums[b] = sum as f32;
        }
        self.norm = values.iter().map(|value| value * value).sum::<f32>().sqrt();
    }

    /// Bytes held at present.
    /// Bytes for a token.
    pub(crate) fn bytes_at_most(n_values: usize) -> usize {
        let n_blocks = n_values.div_ceil(BLOCK);
        // numbers, padded values, scales and sums
        let of_block = BLOCK + (BLOCK + 2) * size_of::<f32>();
        n_blocks * of_block + int8::n_groups(n_values) * size_of::<InputGroup>()
    }

    pub(crate) fn size_bytes(&self) -> usize {
        let floats = self.scales.capacity() + self.sums.capacity() + self.padded.capacity();
        self.quads.capacity() * QUAD
            + floats * size_of::<f32>()
            + self.rounded.capacity() * size_of::<InputGroup>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::WeightFormat;
    use testing::Seeded;

    /// What the copy holds, read number by number.
    fn decoded(copy: &LowBitMatrix, row: usize) -> Vec<f32> {
        let n_blocks = copy.n_columns.div_ceil(BLOCK);
        let stride = LowBitMatrix::group_bytes(copy.format, n_blocks);
        let group = &copy.bytes.as_slice()[row / GROUP_ROWS * stride..][..stride];
        let (numbers, scales) = group.split_at(n_blocks * number_bytes(copy.format));
        let r = row % GROUP_ROWS;
        (0..copy.n_columns)
            .map(|column| {
                let (block, at) = (column / BLOCK, column % BLOCK);
                let numbers = &numbers[block * number_bytes(copy.format)..];
                let scale = &scales[block * scale_bytes() + 2 * r..];
                let scale = f16::from_le_bytes([scale[0], scale[1]]);
                copy.format.decode(number_at(copy.format, numbers, r, at), scale)
            })
            .collect()
    }

    #[test]
    fn a_copy_holds_the_rounded_rows_and_knows_how_far_they_are() {
        for format in LowBitFormat::ALL {
            for (n, d) in [(1, 1), (16, 32), (17, 33), (40, 100), (3, 64)] {
                let values = Seeded::new(d as u64).normal(n * d);
                let matrix = NeuronMatrix::from_f32(WeightFormat::F32, n, d, &values).unwrap();
                let copy = LowBitMatrix::new(format, &matrix).unwrap();
                assert_eq!(copy.errors().len(), n);
                for (row, values) in values.chunks_exact(d).enumerate() {
                    let back = decoded(&copy, row);
                    for (at, values) in values.chunks(BLOCK).enumerate() {
                        let (numbers, scale) = format.encode(values);
                        for (i, number) in numbers.iter().take(values.len()).enumerate() {
                            assert_eq!(back[at * BLOCK + i], format.decode(*number, scale));
                        }
                    }
                    let square: f32 = values.iter().zip(&back).map(|(a, b)| (a - b).powi(2)).sum();
                    assert!((copy.errors()[row] - square.sqrt()).abs() < 1e-4);
                }
            }
        }
    }

    #[test]
    fn every_table_gives_the_same_estimates_to_the_bit() {
        for format in LowBitFormat::ALL {
            for (n, d) in [(1, 1), (16, 31), (20, 32), (35, 100), (16, 2048), (48, 4544)] {
                let mut random = Seeded::new(d as u64);
                let matrix =
                    NeuronMatrix::from_f32(WeightFormat::F32, n, d, &random.normal(n * d)).unwrap();
                let copy = LowBitMatrix::new(format, &matrix).unwrap();
                let mut input = LowBitInput::default();
                input.round(RowKernels::best(), &random.normal(d));
                for group in 0..n.div_ceil(GROUP_ROWS) {
                    let scalar = copy.estimate_group(LowBitKernels::available()[0], group, &input);
                    for kernels in LowBitKernels::available() {
                        let found = copy.estimate_group(kernels, group, &input);
                        assert_eq!(
                            found.map(f32::to_bits),
                            scalar.map(f32::to_bits),
                            "{format} bits, {kernels:?}, {n} × {d}"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn extreme_numbers_do_not_overflow() {
        for format in LowBitFormat::ALL {
            let d = 256;
            let matrix =
                NeuronMatrix::from_f32(WeightFormat::F32, 2, d, &vec![1.0; 2 * d]).unwrap();
            let copy = LowBitMatrix::new(format, &matrix).unwrap();
            for x in [vec![3.0; d], vec![-3.0; d]] {
                let expected: f32 = decoded(&copy, 0).iter().zip(&x).map(|(w, x)| w * x).sum();
                let mut products = [0.0; 2];
                copy.estimate(&x, &mut products);
                assert!((products[0] / expected - 1.0).abs() < 1e-5, "{format}: {products:?}");
                assert_eq!(products[0], products[1]);
            }
        }
    }

    #[test]
    fn an_input_that_is_not_finite_gives_no_number() {
        let matrix = NeuronMatrix::from_f32(WeightFormat::F32, 1, 40, &[1.0; 40]).unwrap();
        let copy = LowBitMatrix::new(LowBitFormat::Bits3, &matrix).unwrap();
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut x = [1.0; 40];
            x[35] = bad;
            let mut products = [0.0];
            copy.estimate(&x, &mut products);
            assert!(products[0].is_nan());
        }
    }
}
