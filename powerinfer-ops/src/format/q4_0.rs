//! Q4_0: blocks of 32 values, an f16 scale and 32 four-bit numbers; ggml's format of that name.

use super::{BlockFormat, NumberFormat, Part};

/// 18 bytes for 32 values: `value[i] = scale · (number[i] − 8)`, exact in f32. The low half of byte
/// `i` is number `i`, its high half number `i + 16`.
#[derive(Debug)]
pub(crate) struct Q40;

impl BlockFormat for Q40 {
    const NAME: &'static str = "q4_0";
    const BLOCK_LEN: usize = 32;
    const BLOCK_BYTES: usize = 18;

    /// The value of the largest magnitude becomes −8, whatever its sign, as in ggml's reference.
    fn encode_block(values: &[f32], block: &mut [u8]) {
        let scale = super::largest_magnitude(values) / -8.0;
        let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
        block[..2].copy_from_slice(&super::block_scale(scale, values).to_le_bytes());
        let number = |value: f32| ((value * inverse + 8.5) as u8).min(15);
        for (i, byte) in block[2..].iter_mut().enumerate() {
            *byte = number(values[i]) | number(values[i + 16]) << 4;
        }
    }

    fn decode_block(block: &[u8], values: &mut [f32]) {
        let Part { scale, numbers, .. } = Self::part(block, 0);
        for (value, number) in values.iter_mut().zip(numbers) {
            *value = scale * f32::from(number);
        }
    }
}

impl NumberFormat for Q40 {
    fn part(block: &[u8], _: usize) -> Part {
        let mut numbers = [0; 32];
        for (i, byte) in block[2..].iter().enumerate() {
            numbers[i] = (byte & 15) as i8 - 8;
            numbers[i + 16] = (byte >> 4) as i8 - 8;
        }
        Part { scale: super::f16_at(block, 0), offset: 0.0, numbers }
    }
}
