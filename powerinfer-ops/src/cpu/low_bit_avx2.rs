//! Estimates from low-bit copies with AVX2 and FMA: eight rows a register.
//!
//! `vpmaddubsw` multiplies numbers, which are unsigned, with signed bytes of the input and adds
//! pairs in 16 bits. The largest pair is 15 · 127 · 2 = 3810, and the eight quads of a block add up
//! to at most 30480, which 16 bits hold; one more instruction adds the two pairs of a row.

#![allow(unsafe_code, reason = "intrinsics")]

use std::arch::x86_64::*;

use super::low_bit::{GROUP_ROWS, LowBitTable};
use crate::format::low_bit::LowBitFormat;
use crate::low_bit_matrix::LowBitInput;

/// Rows of a register.
const LANES: usize = 8;

/// Handed out after detection only.
pub(super) static TABLE: LowBitTable = LowBitTable { name: "avx2", estimate };

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
/// - the CPU has AVX2, FMA and F16C
/// - numbers and scales are those of sixteen rows, of as many blocks as `x` has
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn group<const BITS: u32>(
    numbers: &[u8],
    scales: &[u8],
    x: &LowBitInput,
    sums: &mut [f32; GROUP_ROWS],
) {
    let block_bytes = BITS as usize * 64;
    let middle = ((1u32 << BITS) - 1) as f32 / 2.0;
    for half in 0..2 {
        let mut sum = _mm256_setzero_ps();
        for (b, &x_scale) in x.scales.iter().enumerate() {
            // SAFETY: block `b` of the numbers, 32 of its scales' bytes and 8 quads of the input
            // exist; no load needs alignment.
            unsafe {
                let block = numbers.as_ptr().add(b * block_bytes + half * 32);
                let quads = x.quads.as_ptr().add(b * 8).cast::<i32>();
                let mut dots = _mm256_setzero_si256();
                for quad in 0..8 {
                    let number = quad_numbers::<BITS>(block, quad);
                    let values = _mm256_set1_epi32(quads.add(quad).read_unaligned());
                    dots = _mm256_add_epi16(dots, _mm256_maddubs_epi16(number, values));
                }
                let dots = _mm256_madd_epi16(dots, _mm256_set1_epi16(1));
                let moved = _mm256_set1_ps(middle * x.sums[b]);
                let value = _mm256_sub_ps(_mm256_cvtepi32_ps(dots), moved);
                let at = scales.as_ptr().add(b * 32 + half * 16).cast();
                let scale = _mm256_cvtph_ps(_mm_loadu_si128(at));
                let scale = _mm256_mul_ps(scale, _mm256_set1_ps(x_scale));
                sum = _mm256_fmadd_ps(value, scale, sum);
            }
        }
        // SAFETY: eight of the sixteen sums begin here.
        unsafe { _mm256_storeu_ps(sums.as_mut_ptr().add(half * LANES), sum) };
    }
}

/// The numbers of a quad of eight rows, a byte each.
///
/// # Safety
/// - the CPU has AVX2
/// - `block` points to the block's first byte of these rows
#[inline(always)]
unsafe fn quad_numbers<const BITS: u32>(block: *const u8, quad: usize) -> __m256i {
    // SAFETY: the caller has the instructions and the block; `quad` is below 8.
    unsafe {
        if BITS == 4 {
            let bytes = _mm256_loadu_si256(block.add(quad / 2 * 64).cast());
            let shifted =
                if quad.is_multiple_of(2) { bytes } else { _mm256_srli_epi16::<4>(bytes) };
            return _mm256_and_si256(shifted, _mm256_set1_epi8(15));
        }
        let bytes = _mm256_loadu_si256(block.add(quad / 4 * 64).cast());
        let count = _mm_cvtsi32_si128((quad % 4 * 2) as i32);
        let low = _mm256_and_si256(_mm256_srl_epi16(bytes, count), _mm256_set1_epi8(3));
        if BITS == 2 {
            return low;
        }
        // the upper bit of this quad moves to bit 2
        let bytes = _mm256_loadu_si256(block.add(128).cast());
        let moved = if quad < 2 {
            _mm256_sll_epi16(bytes, _mm_cvtsi32_si128(2 - quad as i32))
        } else {
            _mm256_srl_epi16(bytes, _mm_cvtsi32_si128(quad as i32 - 2))
        };
        _mm256_or_si256(low, _mm256_and_si256(moved, _mm256_set1_epi8(4)))
    }
}
