//! Q4_1: blocks of 32 values, an f16 scale, an f16 offset and 32 four-bit numbers; ggml's format
//! of that name.

use super::{BlockFormat, NumberFormat, Part};

/// 20 bytes for 32 values: `value[i] = scale · number[i] + offset`, rounded once, because the
/// product is exact in f32. The low half of byte `i` is number `i`, its high half number `i + 16`.
#[derive(Debug)]
pub(crate) struct Q41;

impl BlockFormat for Q41 {
    const NAME: &'static str = "q4_1";
    const BLOCK_LEN: usize = 32;
    const BLOCK_BYTES: usize = 20;

    /// The smallest value becomes 0 and the largest 15, as in ggml's reference.
    fn encode_block(values: &[f32], block: &mut [u8]) {
        let (smallest, largest) = super::extremes(values);
        let scale = (largest - smallest) / 15.0;
        let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
        block[..2].copy_from_slice(&super::block_scale(scale, values).to_le_bytes());
        block[2..4].copy_from_slice(&super::block_scale(smallest, values).to_le_bytes());
        let number = |value: f32| (((value - smallest) * inverse + 0.5) as u8).min(15);
        for (i, byte) in block[4..].iter_mut().enumerate() {
            *byte = number(values[i]) | number(values[i + 16]) << 4;
        }
    }

    fn decode_block(block: &[u8], values: &mut [f32]) {
        let scale = super::f16_at(block, 0);
        let offset = super::f16_at(block, 2);
        for (i, byte) in block[4..].iter().enumerate() {
            values[i] = scale * f32::from(byte & 15) + offset;
            values[i + 16] = scale * f32::from(byte >> 4) + offset;
        }
    }
}

impl NumberFormat for Q41 {
    const OFFSETS: bool = true;

    fn part(block: &[u8], _: usize) -> Part {
        let mut numbers = [0; 32];
        for (i, byte) in block[4..].iter().enumerate() {
            numbers[i] = (byte & 15) as i8;
            numbers[i + 16] = (byte >> 4) as i8;
        }
        Part { scale: super::f16_at(block, 0), offset: super::f16_at(block, 2), numbers }
    }
}
