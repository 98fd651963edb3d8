//! Q8_0: blocks of 32 values, an f16 scale and 32 signed bytes; ggml's format of that name.

use super::{BlockFormat, NumberFormat, Part};

/// 34 bytes for 32 values: `value[i] = scale · byte[i]`, exact in f32.
#[derive(Debug)]
pub(crate) struct Q80;

impl BlockFormat for Q80 {
    const NAME: &'static str = "q8_0";
    const BLOCK_LEN: usize = 32;
    const BLOCK_BYTES: usize = 34;

    /// The largest magnitude becomes ±127; halves round away from zero, as in ggml's reference.
    fn encode_block(values: &[f32], block: &mut [u8]) {
        let largest = values.iter().fold(0f32, |largest, value| largest.max(value.abs()));
        let scale = largest / 127.0;
        let inverse = if scale > 0.0 { 1.0 / scale } else { 0.0 };
        block[..2].copy_from_slice(&super::block_scale(scale, values).to_le_bytes());
        for (byte, value) in block[2..].iter_mut().zip(values) {
            *byte = (value * inverse).round() as i8 as u8;
        }
    }

    fn decode_block(block: &[u8], values: &mut [f32]) {
        let Part { scale, numbers, .. } = Self::part(block, 0);
        for (value, number) in values.iter_mut().zip(numbers) {
            *value = scale * f32::from(number);
        }
    }
}

impl NumberFormat for Q80 {
    fn part(block: &[u8], _: usize) -> Part {
        let mut numbers = [0; 32];
        for (number, byte) in numbers.iter_mut().zip(&block[2..]) {
            *number = *byte as i8;
        }
        Part { scale: super::f16_at(block, 0), offset: 0.0, numbers }
    }
}
