//! The row primitives with AVX2, FMA and F16C: eight values a register.

#![allow(unsafe_code, reason = "intrinsics")]

use std::arch::x86_64::*;

use super::attention_rows::AVX2 as ATTENTION;
use super::int8::{self, InputGroup};
use super::simd::{self, Steps, Vector};
use super::simd_blocks;
use super::simd_dots;
use super::simd_sums;
use super::simd_table::simd_table;
use super::tiles::tiles;
use super::{
    F32Products, GROUP, Int8Table, PANEL, PANEL_ROWS, PanelTile, Products, RowPrimitives,
    RowValues, Rows, Table, TokenScales,
};

// 16 registers: 8 sums, 2 values of rows or panel, 1 of a vector or scale.
simd_table!(__m256, "avx2,fma,f16c", 2, 2, 2, 8);

/// Handed out by `RowKernels::available` alone, after it saw the instructions.
pub(super) static TABLE: Table = table("avx2", super::int8_avx2::INT8);

// SAFETY of each block below: the caller has the instructions and, for loads and stores, the bytes,
// as `Vector` requires; no intrinsic used here needs alignment.
impl Vector for __m256 {
    const LANES: usize = 8;

    #[inline(always)]
    unsafe fn zero() -> Self {
        // SAFETY: see above.
        unsafe { _mm256_setzero_ps() }
    }

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        // SAFETY: see above.
        unsafe { _mm256_set1_ps(value) }
    }

    #[inline(always)]
    unsafe fn load_f32(at: *const u8) -> Self {
        // SAFETY: see above.
        unsafe { _mm256_loadu_ps(at.cast()) }
    }

    #[inline(always)]
    unsafe fn load_f16(at: *const u8) -> Self {
        // SAFETY: see above.
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(at.cast())) }
    }

    #[inline(always)]
    unsafe fn load_bf16(at: *const u8) -> Self {
        // SAFETY: see above.
        unsafe {
            let halves = _mm256_cvtepu16_epi32(_mm_loadu_si128(at.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(halves))
        }
    }

    #[inline(always)]
    unsafe fn load_i8(at: *const u8) -> Self {
        // SAFETY: see above.
        unsafe { _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(at.cast()))) }
    }

    /// The scale.
    type Nibbles = Self;

    #[inline(always)]
    unsafe fn nibbles(scale: Self) -> Self {
        scale
    }

    #[inline(always)]
    unsafe fn load_u4(scale: Self, at: *const u8, high: bool) -> Self {
        // SAFETY: see above.
        unsafe {
            let bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(at.cast()));
            let numbers = if high {
                _mm256_srli_epi32::<4>(bytes)
            } else {
                _mm256_and_si256(bytes, _mm256_set1_epi32(15))
            };
            let values = _mm256_sub_epi32(numbers, _mm256_set1_epi32(8));
            _mm256_mul_ps(_mm256_cvtepi32_ps(values), scale)
        }
    }

    #[inline(always)]
    unsafe fn splat_f16(at: *const u8) -> Self {
        // SAFETY: see above.
        unsafe { _mm256_cvtph_ps(_mm_set1_epi16(at.cast::<i16>().read_unaligned())) }
    }

    type Ints = __m256i;

    #[inline(always)]
    unsafe fn load_u8(at: *const u8) -> __m256i {
        // SAFETY: see above.
        unsafe { _mm256_cvtepu8_epi32(_mm_loadl_epi64(at.cast())) }
    }

    #[inline(always)]
    unsafe fn bits(ints: __m256i, shift: u32, mask: i32) -> __m256i {
        // SAFETY: see above.
        unsafe {
            let shifted = _mm256_srl_epi32(ints, _mm_cvtsi32_si128(shift as i32));
            _mm256_and_si256(shifted, _mm256_set1_epi32(mask))
        }
    }

    #[inline(always)]
    unsafe fn spread_bits(word: u32) -> __m256i {
        // SAFETY: see above.
        unsafe {
            let lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
            let shifted = _mm256_srlv_epi32(_mm256_set1_epi32(word as i32), lanes);
            _mm256_and_si256(shifted, _mm256_set1_epi32(1))
        }
    }

    #[inline(always)]
    unsafe fn join(low: __m256i, high: __m256i, shift: u32) -> __m256i {
        // SAFETY: see above.
        unsafe { _mm256_or_si256(low, _mm256_sll_epi32(high, _mm_cvtsi32_si128(shift as i32))) }
    }

    #[inline(always)]
    unsafe fn minus(ints: __m256i, bias: i32) -> __m256i {
        // SAFETY: see above.
        unsafe { _mm256_sub_epi32(ints, _mm256_set1_epi32(bias)) }
    }

    #[inline(always)]
    unsafe fn to_f32(ints: __m256i) -> Self {
        // SAFETY: see above.
        unsafe { _mm256_cvtepi32_ps(ints) }
    }

    #[inline(always)]
    unsafe fn mul(self, factor: Self) -> Self {
        // SAFETY: see above.
        unsafe { _mm256_mul_ps(self, factor) }
    }

    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        // SAFETY: see above.
        unsafe { _mm256_add_ps(self, other) }
    }

    #[inline(always)]
    unsafe fn store(self, at: *mut f32) {
        // SAFETY: see above.
        unsafe { _mm256_storeu_ps(at, self) }
    }

    #[inline(always)]
    unsafe fn mul_add(self, factor: Self, addend: Self) -> Self {
        // SAFETY: see above.
        unsafe { _mm256_fmadd_ps(self, factor, addend) }
    }

    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        // SAFETY: see above.
        unsafe {
            let v = _mm_add_ps(_mm256_castps256_ps128(self), _mm256_extractf128_ps::<1>(self));
            let v = _mm_add_ps(v, _mm_movehl_ps(v, v));
            _mm_cvtss_f32(_mm_add_ss(v, _mm_shuffle_ps::<1>(v, v)))
        }
    }

    #[inline(always)]
    unsafe fn prefetch(at: *const u8) {
        // SAFETY: see above; a prefetch never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) }
    }
}

fn fold(bytes: &[u8]) -> u64 {
    #[target_feature(enable = "avx2")]
    fn inner(blocks: &[[__m256i; 16]]) -> u64 {
        let mut folds = [_mm256_setzero_si256(); 16];
        for block in blocks {
            for (fold, value) in folds.iter_mut().zip(block) {
                *fold = _mm256_xor_si256(*fold, *value);
            }
        }
        let all = folds.into_iter().fold(_mm256_setzero_si256(), |a, b| _mm256_xor_si256(a, b));
        bytemuck::cast::<__m256i, [u64; 4]>(all).into_iter().fold(0, |a, b| a ^ b)
    }
    // SAFETY: every bit pattern is a valid register, and `align_to` keeps within the bytes.
    let (head, blocks, tail) = unsafe { bytes.align_to::<[__m256i; 16]>() };
    let rest = super::scalar::fold(head) ^ super::scalar::fold(tail);
    // SAFETY: the table is handed out only where the instructions exist.
    rest ^ unsafe { inner(blocks) }
}
