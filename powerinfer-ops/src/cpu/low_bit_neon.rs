//! Estimates from low-bit copies with NEON: four rows a register.
//!
//! Numbers and input are multiplied as signed bytes into sixteen bits. A product is at most
//! 15 · 127; the eight quads of a block add up to 15240 and two of their sums to 30480, which
//! sixteen bits hold. One more instruction adds the two pairs of a row.

#![allow(unsafe_code, reason = "intrinsics")]
#![allow(clippy::needless_range_loop, reason = "closures keep intrinsics from being inlined")]

use std::arch::aarch64::*;

use super::low_bit::{GROUP_ROWS, LowBitTable};
use super::simd::Vector;
use crate::format::low_bit::LowBitFormat;
use crate::low_bit_matrix::LowBitInput;

/// Rows of a register.
const LANES: usize = 4;
/// Registers of a quad.
const PARTS: usize = GROUP_ROWS / LANES;

/// Handed out after detection only.
pub(super) static TABLE: LowBitTable = LowBitTable { name: "neon", estimate };

fn estimate(
    format: LowBitFormat,
    numbers: &[u8],
    scales: &[u8],
    x: &LowBitInput,
) -> [f32; GROUP_ROWS] {
    let mut sums = [0.0; GROUP_ROWS];
    // SAFETY: the table is handed out only where the instructions exist; `LowBitKernels` asserted
    // the lengths of numbers, scales and input.
    unsafe {
        match format {
            LowBitFormat::Bits2 => group::<2>(numbers, scales, x, &mut sums),
            LowBitFormat::Bits3 => group::<3>(numbers, scales, x, &mut sums),
            LowBitFormat::Bits4 => group::<4>(numbers, scales, x, &mut sums),
        }
    }
    sums
}

/// # Safety
/// - the CPU has NEON
/// - numbers and scales are those of sixteen rows, of as many blocks as `x` has
#[target_feature(enable = "neon")]
unsafe fn group<const BITS: u32>(
    numbers: &[u8],
    scales: &[u8],
    x: &LowBitInput,
    out: &mut [f32; GROUP_ROWS],
) {
    let block_bytes = BITS as usize * 64;
    let middle = ((1u32 << BITS) - 1) as f32 / 2.0;
    let mut sums = [vdupq_n_f32(0.0); PARTS];
    for (b, &x_scale) in x.scales.iter().enumerate() {
        let moved = vdupq_n_f32(middle * x.sums[b]);
        for part in 0..PARTS {
            // SAFETY: block `b` of the numbers, 32 of its scales' bytes and 8 quads of the input
            // exist; no load needs alignment.
            unsafe {
                let block = numbers.as_ptr().add(b * block_bytes + part * 16);
                let quads = x.quads.as_ptr().add(b * 8).cast::<i32>();
                let (mut low, mut high) = (vdupq_n_s16(0), vdupq_n_s16(0));
                for quad in 0..8 {
                    let number = vreinterpretq_s8_u8(quad_numbers::<BITS>(block, quad));
                    let values = vdupq_n_s32(quads.add(quad).read_unaligned());
                    let values = vreinterpretq_s8_s32(values);
                    low = vmlal_s8(low, vget_low_s8(number), vget_low_s8(values));
                    high = vmlal_high_s8(high, number, values);
                }
                let dots = vpaddlq_s16(vpaddq_s16(low, high));
                let value = vsubq_f32(vcvtq_f32_s32(dots), moved);
                let scale = float32x4_t::load_f16(scales.as_ptr().add(b * 32 + part * 8));
                let scale = vmulq_f32(scale, vdupq_n_f32(x_scale));
                sums[part] = vfmaq_f32(sums[part], value, scale);
            }
        }
    }
    for part in 0..PARTS {
        // SAFETY: four of the sixteen sums begin here.
        unsafe { vst1q_f32(out.as_mut_ptr().add(part * LANES), sums[part]) };
    }
}

/// The numbers of a quad of four rows, a byte each.
///
/// # Safety
/// - the CPU has NEON
/// - `block` points to the block's first byte of these rows
#[inline(always)]
unsafe fn quad_numbers<const BITS: u32>(block: *const u8, quad: usize) -> uint8x16_t {
    // SAFETY: the caller has the instructions and the block; `quad` is below 8. A negative count
    // shifts right.
    unsafe {
        if BITS == 4 {
            let bytes = vld1q_u8(block.add(quad / 2 * 64));
            let even = quad.is_multiple_of(2);
            return if even { vandq_u8(bytes, vdupq_n_u8(15)) } else { vshrq_n_u8::<4>(bytes) };
        }
        let bytes = vld1q_u8(block.add(quad / 4 * 64));
        let moved = vshlq_u8(bytes, vdupq_n_s8(-((quad % 4 * 2) as i8)));
        let low = vandq_u8(moved, vdupq_n_u8(3));
        if BITS == 2 {
            return low;
        }
        // the upper bit of this quad moves to bit 2
        let bytes = vld1q_u8(block.add(128));
        let moved = vshlq_u8(bytes, vdupq_n_s8(2 - quad as i8));
        vorrq_u8(low, vandq_u8(moved, vdupq_n_u8(4)))
    }
}
