//! Q4_K: blocks of 256 values in eight parts, each with a scale and an offset of six bits, and
//! four-bit numbers; ggml's format of that name.

use super::{BlockFormat, NumberFormat, Part};

/// Values that share a scale and an offset.
const PART_LEN: usize = 32;
/// Where the four-bit numbers begin.
pub(crate) const NUMBERS: usize = 16;

/// 144 bytes for 256 values: `value = (d · scale) · number − (d_min · offset)`, rounded once, since
/// both products are exact in f32. `d` and `d_min` are f16, one a block; `scale` and `offset` are
/// six-bit numbers, one a part of 32 values, packed into twelve bytes as [`part_scales`] says. Parts
/// `2k` and `2k + 1` are the low and the high halves of the same 32 bytes.
#[derive(Debug)]
pub(crate) struct Q4K;

impl BlockFormat for Q4K {
    const NAME: &'static str = "q4_k";
    const BLOCK_LEN: usize = 256;
    const BLOCK_BYTES: usize = 144;

    /// The range of each part, widened to hold zero, is cut into fifteen steps. ggml's quantiser
    /// searches for scales with a smaller error, so its bytes are others, and better ones.
    fn encode_block(values: &[f32], block: &mut [u8]) {
        let mut ranges = [(0.0, 0.0); 8];
        for (range, values) in ranges.iter_mut().zip(values.chunks_exact(PART_LEN)) {
            let (smallest, largest) = super::extremes(values);
            let offset = 0f32.max(-smallest);
            *range = ((largest + offset).max(0.0) / 15.0, offset);
        }
        let most = |of: fn(&(f32, f32)) -> f32| ranges.iter().map(of).fold(0f32, f32::max) / 63.0;
        block[..2].copy_from_slice(&super::block_scale(most(|r| r.0), values).to_le_bytes());
        block[2..4].copy_from_slice(&super::block_scale(most(|r| r.1), values).to_le_bytes());
        let (d, d_min) = (super::f16_at(block, 0), super::f16_at(block, 2));
        block[4..].fill(0);
        for (part, (range, values)) in ranges.iter().zip(values.chunks_exact(PART_LEN)).enumerate()
        {
            let (scale, offset) = (steps(range.0, d, 63.0), steps(range.1, d_min, 63.0));
            set_part_scales(block, part, scale, offset);
            let (scale, offset) = (d * f32::from(scale), d_min * f32::from(offset));
            for (byte, &value) in block[NUMBERS + part / 2 * PART_LEN..].iter_mut().zip(values) {
                *byte |= steps(value + offset, scale, 15.0) << (part % 2 * 4);
            }
        }
    }

    fn decode_block(block: &[u8], values: &mut [f32]) {
        for (part, values) in values.chunks_exact_mut(PART_LEN).enumerate() {
            let Part { scale, offset, numbers } = Self::part(block, part);
            for (value, number) in values.iter_mut().zip(numbers) {
                *value = scale * f32::from(number) + offset;
            }
        }
    }
}

impl NumberFormat for Q4K {
    const OFFSETS: bool = true;

    fn part(block: &[u8], part: usize) -> Part {
        let head = block.first_chunk().expect("a block is longer than its head");
        let (scale, offset) = part_scales(head, part);
        let mut numbers = [0; PART_LEN];
        for (number, byte) in numbers.iter_mut().zip(&block[NUMBERS + part / 2 * PART_LEN..]) {
            *number = (byte >> (part % 2 * 4) & 15) as i8;
        }
        Part {
            scale: super::f16_at(block, 0) * f32::from(scale),
            offset: -(super::f16_at(block, 2) * f32::from(offset)),
            numbers,
        }
    }
}

/// Scale and offset of a part, six bits each. Bytes 4 to 7 of a block hold the scales of parts 0
/// to 3 and bytes 8 to 11 their offsets, in the lower six bits; the upper two bits of these are the
/// upper two of parts 4 to 7, whose lower four are the halves of bytes 12 to 15, the scale's low.
#[inline(always)]
pub(crate) fn part_scales(head: &[u8; NUMBERS], part: usize) -> (u8, u8) {
    let i = part % 4;
    let (scale, offset, low) = (head[4 + i], head[8 + i], head[12 + i]);
    if part < 4 {
        (scale & 63, offset & 63)
    } else {
        (low & 15 | scale >> 6 << 4, low >> 4 | offset >> 6 << 4)
    }
}

/// Scales and offsets of parts 0 to 3 or, of the second half, of parts 4 to 7, a byte each: what
/// [`part_scales`] gives, four at a time.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub(crate) fn four_part_scales(head: &[u8; NUMBERS], half: usize) -> (u32, u32) {
    let bytes =
        |at: usize| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
    let (scales, offsets, low) = (bytes(4), bytes(8), bytes(12));
    if half == 0 {
        (scales & 0x3F3F_3F3F, offsets & 0x3F3F_3F3F)
    } else {
        (
            low & 0x0F0F_0F0F | scales >> 2 & 0x3030_3030,
            low >> 4 & 0x0F0F_0F0F | offsets >> 2 & 0x3030_3030,
        )
    }
}

/// Writes what [`part_scales`] reads over zero bits, the parts in order.
fn set_part_scales(block: &mut [u8], part: usize, scale: u8, offset: u8) {
    if part < 4 {
        block[4 + part] = scale;
        block[8 + part] = offset;
    } else {
        block[8 + part] = scale & 15 | (offset & 15) << 4;
        block[part] |= scale >> 4 << 6;
        block[4 + part] |= offset >> 4 << 6;
    }
}

/// How many times `step` makes `value`, to the nearest, from 0 to `most`.
fn steps(value: f32, step: f32, most: f32) -> u8 {
    if step == 0.0 { 0 } else { (value / step).round().clamp(0.0, most) as u8 }
}
