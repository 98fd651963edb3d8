//! Estimates from low-bit copies with AVX-512 and VNNI: a row is a lane.
//!
//! `vpdpbusd` adds the four products of numbers, which are unsigned, with signed bytes of the input
//! to each lane. Per block that is eight of them, a shift and a mask for most, and one fused
//! multiply-add: about 30 instructions for 512 weights, so that two bits a weight stream at the
//! speed of memory, too.

#![allow(unsafe_code, reason = "intrinsics")]

use std::arch::x86_64::*;

use super::low_bit::{GROUP_ROWS, LowBitTable};
use crate::format::low_bit::LowBitFormat;
use crate::low_bit_matrix::LowBitInput;

/// How far ahead numbers and scales are asked for. One thread of Zen 5, a copy of 5 MB out of memory,
/// 3 bits: 8 KiB 23 GB/s, 16 KiB 33, 24 and 32 KiB 30; not at all 15.
const AHEAD_BYTES: usize = 16 << 10;

/// Bytes of the scales of a block.
const SCALE_BYTES: usize = 32;

/// Handed out after detection only.
pub(super) static TABLE: LowBitTable = LowBitTable { name: "avx512vnni", estimate };

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
/// - the CPU has AVX-512 F, BW and VNNI, and F16C
/// - numbers and scales are those of sixteen rows, of as many blocks as `x` has
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn group<const BITS: u32>(
    numbers: &[u8],
    scales: &[u8],
    x: &LowBitInput,
    sums: &mut [f32; GROUP_ROWS],
) {
    let block_bytes = BITS as usize * 64;
    let middle = ((1u32 << BITS) - 1) as f32 / 2.0;
    let mut sum = _mm512_setzero_ps();
    for (b, &x_scale) in x.scales.iter().enumerate() {
        // SAFETY: block `b` of the numbers, 32 bytes of its scales and 8 quads of the input exist;
        // no load needs alignment, and a prefetch accesses no memory.
        unsafe {
            let block = numbers.as_ptr().add(b * block_bytes);
            // a block's share of the group, scales included, so that the next group is reached
            let ahead =
                numbers.as_ptr().wrapping_add(b * (block_bytes + SCALE_BYTES) + AHEAD_BYTES);
            for line in 0..=BITS as usize {
                _mm_prefetch::<_MM_HINT_T0>(ahead.wrapping_add(line * 64).cast());
            }
            let quads = x.quads.as_ptr().add(b * 8).cast::<i32>();
            let dots = match BITS {
                4 => dots_4(block, quads),
                3 => dots_3(block, quads),
                _ => dots_2(block, quads),
            };
            let moved = _mm512_set1_ps(middle * x.sums[b]);
            let value = _mm512_sub_ps(_mm512_cvtepi32_ps(dots), moved);
            let scale = _mm512_cvtph_ps(_mm256_loadu_si256(scales.as_ptr().add(b * 32).cast()));
            let scale = _mm512_mul_ps(scale, _mm512_set1_ps(x_scale));
            sum = _mm512_fmadd_ps(value, scale, sum);
        }
    }
    // SAFETY: sixteen sums are as long as a register.
    unsafe { _mm512_storeu_ps(sums.as_mut_ptr(), sum) };
}

/// `sums[r] += Σ numbers[4 r + i] · x[i]` with the quad `x` at `quads + quad`.
///
/// # Safety
/// - the CPU has AVX-512 VNNI
/// - the quad exists
#[inline(always)]
unsafe fn add(sums: __m512i, numbers: __m512i, quads: *const i32, quad: usize) -> __m512i {
    // SAFETY: the caller has the instructions and the quad.
    unsafe {
        _mm512_dpbusd_epi32(sums, numbers, _mm512_set1_epi32(quads.add(quad).read_unaligned()))
    }
}

/// # Safety
/// - the CPU has AVX-512 VNNI
/// - a block of four bits and eight quads exist
#[inline(always)]
unsafe fn dots_4(block: *const u8, quads: *const i32) -> __m512i {
    // SAFETY: the caller has the instructions, the block and the quads.
    unsafe {
        let mask = _mm512_set1_epi8(15);
        let (mut even, mut odd) = (_mm512_setzero_si512(), _mm512_setzero_si512());
        for pair in 0..4 {
            let bytes = _mm512_loadu_si512(block.add(pair * 64).cast());
            even = add(even, _mm512_and_si512(bytes, mask), quads, 2 * pair);
            let high = _mm512_and_si512(_mm512_srli_epi16::<4>(bytes), mask);
            odd = add(odd, high, quads, 2 * pair + 1);
        }
        _mm512_add_epi32(even, odd)
    }
}

/// # Safety
/// - the CPU has AVX-512 VNNI
/// - a block of two bits and eight quads exist
#[inline(always)]
unsafe fn dots_2(block: *const u8, quads: *const i32) -> __m512i {
    // SAFETY: the caller has the instructions, the block and the quads.
    unsafe {
        let mask = _mm512_set1_epi8(3);
        let (mut even, mut odd) = (_mm512_setzero_si512(), _mm512_setzero_si512());
        for four in 0..2 {
            let bytes = _mm512_loadu_si512(block.add(four * 64).cast());
            even = add(even, _mm512_and_si512(bytes, mask), quads, 4 * four);
            let next = _mm512_and_si512(_mm512_srli_epi16::<2>(bytes), mask);
            odd = add(odd, next, quads, 4 * four + 1);
            let next = _mm512_and_si512(_mm512_srli_epi16::<4>(bytes), mask);
            even = add(even, next, quads, 4 * four + 2);
            let next = _mm512_and_si512(_mm512_srli_epi16::<6>(bytes), mask);
            odd = add(odd, next, quads, 4 * four + 3);
        }
        _mm512_add_epi32(even, odd)
    }
}

/// # Safety
/// - the CPU has AVX-512 VNNI
/// - a block of three bits and eight quads exist
#[inline(always)]
unsafe fn dots_3(block: *const u8, quads: *const i32) -> __m512i {
    /// `(a & b) | (!a & c)`: bits of `b` where `a` is set.
    const CHOOSE: i32 = 0xCA;
    // SAFETY: the caller has the instructions, the block and the quads.
    unsafe {
        // bits 0 and 1 from one register, bit 2 from the other; what is above is cleared
        let (low_two, mask) = (_mm512_set1_epi8(3), _mm512_set1_epi8(7));
        let (mut even, mut odd) = (_mm512_setzero_si512(), _mm512_setzero_si512());
        let upper = _mm512_loadu_si512(block.add(128).cast());
        macro_rules! quad {
            ($sum:ident, $quad:literal, $low:expr, $upper:expr) => {
                let chosen = _mm512_ternarylogic_epi32::<CHOOSE>(low_two, $low, $upper);
                $sum = add($sum, _mm512_and_si512(chosen, mask), quads, $quad);
            };
        }
        let bytes = _mm512_loadu_si512(block.cast());
        quad!(even, 0, bytes, _mm512_slli_epi16::<2>(upper));
        quad!(odd, 1, _mm512_srli_epi16::<2>(bytes), _mm512_slli_epi16::<1>(upper));
        quad!(even, 2, _mm512_srli_epi16::<4>(bytes), upper);
        quad!(odd, 3, _mm512_srli_epi16::<6>(bytes), _mm512_srli_epi16::<1>(upper));
        let bytes = _mm512_loadu_si512(block.add(64).cast());
        quad!(even, 4, bytes, _mm512_srli_epi16::<2>(upper));
        quad!(odd, 5, _mm512_srli_epi16::<2>(bytes), _mm512_srli_epi16::<3>(upper));
        quad!(even, 6, _mm512_srli_epi16::<4>(bytes), _mm512_srli_epi16::<4>(upper));
        quad!(odd, 7, _mm512_srli_epi16::<6>(bytes), _mm512_srli_epi16::<5>(upper));
        _mm512_add_epi32(even, odd)
    }
}
