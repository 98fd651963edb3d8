//! How rows of weights lie on the device.
//!
//! A thread reads sixteen bytes at a time. Blocks of quantised formats are 18 or 34 bytes in files and
//! on the CPU; on the device a row holds the numbers of all its blocks first, then their scales, and
//! begins at a multiple of sixteen bytes. `format.cuh` reads what is written here.

use crate::{GateEstimate, LowBitFormat, WeightFormat};

/// Bytes that a thread reads at a time.
const PIECE_BYTES: usize = 16;
/// Bytes of a block's scale.
const SCALE_BYTES: usize = 2;
/// Values of a block of whole numbers.
pub const BLOCK: usize = 32;

/// The layout of a matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowLayout {
    /// What the rows hold.
    pub format: WeightFormat,
    /// Values of a row.
    pub n_columns: usize,
    /// Pieces of sixteen bytes of numbers in a row.
    pub n_pieces: usize,
    /// Bytes from a row to the next.
    pub stride: usize,
}

impl RowLayout {
    /// The formats that there are kernels for.
    pub const FORMATS: [WeightFormat; 5] = [
        WeightFormat::F32,
        WeightFormat::F16,
        WeightFormat::BF16,
        WeightFormat::Q8_0,
        WeightFormat::Q4_0,
    ];

    /// The layout of rows of `n_columns` values; `None` if there are no kernels for the format or
    /// rows cannot be so long.
    #[must_use]
    pub fn new(format: WeightFormat, n_columns: usize) -> Option<Self> {
        if !Self::FORMATS.contains(&format) || i32::try_from(n_columns).is_err() {
            return None;
        }
        let row_bytes = format.row_bytes(n_columns).ok()?;
        let n_blocks = if is_blocks(format) { n_columns / BLOCK } else { 0 };
        let n_pieces = (row_bytes - n_blocks * SCALE_BYTES).div_ceil(PIECE_BYTES);
        let stride =
            (n_pieces * PIECE_BYTES + n_blocks * SCALE_BYTES).next_multiple_of(PIECE_BYTES);
        Some(Self { format, n_columns, n_pieces, stride })
    }

    /// Whether inputs are multiplied as whole numbers.
    #[must_use]
    pub fn takes_numbers(&self) -> bool {
        is_blocks(self.format)
    }

    /// Writes a row as a `NeuronMatrix` holds it into `stride` bytes that are
    /// zero.
    pub fn pack(&self, row: &[u8], out: &mut [u8]) {
        if !is_blocks(self.format) {
            out[..row.len()].copy_from_slice(row);
            return;
        }
        let (numbers, scales) = out.split_at_mut(self.n_pieces * PIECE_BYTES);
        let number_bytes = self.format.block_bytes() - SCALE_BYTES;
        let blocks = row.chunks_exact(self.format.block_bytes());
        let places =
            numbers.chunks_exact_mut(number_bytes).zip(scales.chunks_exact_mut(SCALE_BYTES));
        for (block, (numbers, scale)) in blocks.zip(places) {
            scale.copy_from_slice(&block[..SCALE_BYTES]);
            numbers.copy_from_slice(&block[SCALE_BYTES..]);
        }
    }

    /// The row that was packed.
    pub fn unpack(&self, packed: &[u8], row: &mut [u8]) {
        if !is_blocks(self.format) {
            row.copy_from_slice(&packed[..row.len()]);
            return;
        }
        let (numbers, scales) = packed.split_at(self.n_pieces * PIECE_BYTES);
        let number_bytes = self.format.block_bytes() - SCALE_BYTES;
        let blocks = row.chunks_exact_mut(self.format.block_bytes());
        let places = numbers.chunks_exact(number_bytes).zip(scales.chunks_exact(SCALE_BYTES));
        for (block, (numbers, scale)) in blocks.zip(places) {
            block[..SCALE_BYTES].copy_from_slice(scale);
            block[SCALE_BYTES..].copy_from_slice(numbers);
        }
    }
}

/// Formats whose rows are blocks of 32 whole numbers with a scale.
fn is_blocks(format: WeightFormat) -> bool {
    matches!(format, WeightFormat::Q8_0 | WeightFormat::Q4_0)
}

/// The layout of a low-bit copy of a gate: two blocks of 32 numbers a piece.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LowBitLayout {
    /// Bits of a number.
    pub bits: usize,
    /// Pieces of a row.
    pub n_pieces: usize,
    /// Bytes from a row to the next.
    pub stride: usize,
}

impl LowBitLayout {
    /// The layout of rows of `n_columns` numbers.
    #[must_use]
    pub fn new(format: LowBitFormat, n_columns: usize) -> Self {
        let bits = format.bits() as usize;
        let n_pieces = n_columns.div_ceil(2 * BLOCK);
        let piece_bytes = 2 * (BLOCK * bits / 8 + SCALE_BYTES);
        Self { bits, n_pieces, stride: (n_pieces * piece_bytes).next_multiple_of(PIECE_BYTES) }
    }

    /// Writes row `row` of the copy into `stride` bytes that are zero.
    pub fn pack(&self, estimate: &GateEstimate, row: usize, out: &mut [u8]) {
        let low_bits = if self.bits == 4 { 4 } else { 2 };
        let word_bytes = 2 * BLOCK * low_bits / 8;
        let (words, rest) = out.split_at_mut(self.n_pieces * word_bytes);
        let third_bytes = if self.bits == 3 { 2 * BLOCK / 8 } else { 0 };
        let (thirds, scales) = rest.split_at_mut(self.n_pieces * third_bytes);
        let copy = estimate.rows();
        for column in 0..copy.n_columns() {
            let number = copy.number(row, column);
            let per_word = 32 / low_bits;
            let (word, at) = (column / per_word, column % per_word);
            let low = number & ((1 << low_bits) - 1);
            words[word * 4 + at % 4] |= low << (at / 4 * low_bits);
            if self.bits == 3 {
                let (word, at) = (column / BLOCK, column % BLOCK);
                thirds[word * 4 + at % 4] |= (number >> 2) << (at / 4);
            }
        }
        for (block, scale) in scales.chunks_exact_mut(SCALE_BYTES).enumerate() {
            if block * BLOCK < copy.n_columns() {
                scale.copy_from_slice(&copy.scale(row, block).to_le_bytes());
            }
        }
    }
}
