//! Q5_0: blocks of 32 values, an f16 scale and 32 five-bit numbers; ggml's format of that name.

use super::{BlockFormat, NumberFormat, Part};

/// 22 bytes for 32 values: `value[i] = scale · (number[i] − 16)`, exact in f32. After the scale come
/// the fifth bits, bit `i` of a little-endian word that of number `i`; then the lower four, in the
/// low half of byte `i` those of number `i`, in its high half those of number `i + 16`.
#[derive(Debug)]
pub(crate) struct Q50;

impl BlockFormat for Q50 {
    const NAME: &'static str = "q5_0";
    const BLOCK_LEN: usize = 32;
    const BLOCK_BYTES: usize = 22;

    /// The value of the largest magnitude becomes −16, whatever its sign, as in ggml's reference.
    fn encode_block(values: &[f32], block: &mut [u8]) {
        let scale = super::largest_magnitude(values) / -16.0;
        let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
        block[..2].copy_from_slice(&super::block_scale(scale, values).to_le_bytes());
        let number = |value: f32| ((value * inverse + 16.5) as u8).min(31);
        let mut fifth_bits = 0;
        for (i, &value) in values.iter().enumerate() {
            fifth_bits |= u32::from(number(value) >> 4) << i;
        }
        block[2..6].copy_from_slice(&fifth_bits.to_le_bytes());
        for (i, byte) in block[6..].iter_mut().enumerate() {
            *byte = number(values[i]) & 15 | (number(values[i + 16]) & 15) << 4;
        }
    }

    fn decode_block(block: &[u8], values: &mut [f32]) {
        let Part { scale, numbers, .. } = Self::part(block, 0);
        for (value, number) in values.iter_mut().zip(numbers) {
            *value = scale * f32::from(number);
        }
    }
}

impl NumberFormat for Q50 {
    fn part(block: &[u8], _: usize) -> Part {
        let fifth_bits = u32::from_le_bytes([block[2], block[3], block[4], block[5]]);
        let mut numbers = [0; 32];
        for (i, number) in numbers.iter_mut().enumerate() {
            let byte = block[6 + i % 16];
            let low = if i < 16 { byte & 15 } else { byte >> 4 };
            *number = (low | ((fifth_bits >> i & 1) as u8) << 4) as i8 - 16;
        }
        Part { scale: super::f16_at(block, 0), offset: 0.0, numbers }
    }
}
