//! Q6_K: blocks of 256 values in sixteen parts, each with a scale of eight bits, and six-bit
//! numbers; ggml's format of that name.

use super::BlockFormat;

/// Values that share a scale.
const PART_LEN: usize = 16;
/// Where the upper two bits of the numbers begin.
const UPPER: usize = 128;
/// Where the scales of the parts begin.
const SCALES: usize = 192;
/// Where the scale of the block lies.
const SCALE: usize = 208;

/// 210 bytes for 256 values: `value = (d · scale) · (number − 32)`, exact in f32. `scale` is a signed
/// byte, one a part of 16 values, and `d` an f16 at the end of the block. Each half of the values
/// has four rows of 32: the lower four bits of rows 0 and 1 are the low halves of 64 bytes, those of
/// rows 2 and 3 the high halves, and bits `2r` and `2r + 1` of 32 further bytes are the upper two of
/// row `r`.
#[derive(Debug)]
pub(crate) struct Q6K;

impl BlockFormat for Q6K {
    const NAME: &'static str = "q6_k";
    const BLOCK_LEN: usize = 256;
    const BLOCK_BYTES: usize = 210;

    /// The value of the largest magnitude in each part becomes about −32. ggml's quantiser searches
    /// for scales with a smaller error, so its bytes are others, and better ones.
    fn encode_block(values: &[f32], block: &mut [u8]) {
        let mut scales = [0.0; 16];
        for (scale, values) in scales.iter_mut().zip(values.chunks_exact(PART_LEN)) {
            *scale = super::largest_magnitude(values) / -32.0;
        }
        let d = super::block_scale(super::largest_magnitude(&scales) / -128.0, values);
        block.fill(0);
        block[SCALE..].copy_from_slice(&d.to_le_bytes());
        let d = d.to_f32();
        for (part, (scale, values)) in
            scales.into_iter().zip(values.chunks_exact(PART_LEN)).enumerate()
        {
            let scale = nearest(scale, d, -128.0, 127.0);
            block[SCALES + part] = scale as u8;
            let scale = d * f32::from(scale);
            for (i, &value) in values.iter().enumerate() {
                let number = (nearest(value, scale, -32.0, 31.0) + 32) as u8;
                let place = Place::of(part * PART_LEN + i);
                block[place.lower] |= (number & 15) << place.lower_shift;
                block[place.upper] |= number >> 4 << place.upper_shift;
            }
        }
    }

    fn decode_block(block: &[u8], values: &mut [f32]) {
        let d = super::f16_at(block, SCALE);
        for (i, value) in values.iter_mut().enumerate() {
            let place = Place::of(i);
            let lower = block[place.lower] >> place.lower_shift & 15;
            let upper = block[place.upper] >> place.upper_shift & 3;
            let scale = d * f32::from(block[SCALES + i / PART_LEN] as i8);
            *value = scale * (f32::from(lower | upper << 4) - 32.0);
        }
    }
}

/// Where the bits of a number lie.
struct Place {
    lower: usize,
    lower_shift: usize,
    upper: usize,
    upper_shift: usize,
}

impl Place {
    fn of(i: usize) -> Self {
        let (half, row, column) = (i / 128, i / 32 % 4, i % 32);
        Self {
            lower: half * 64 + row % 2 * 32 + column,
            lower_shift: row / 2 * 4,
            upper: UPPER + half * 32 + column,
            upper_shift: row * 2,
        }
    }
}

/// How many times `step` makes `value`, to the nearest, within bounds.
fn nearest(value: f32, step: f32, least: f32, most: f32) -> i8 {
    if step == 0.0 { 0 } else { (value / step).round().clamp(least, most) as i8 }
}
