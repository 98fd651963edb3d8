//! The exponential's needs with AVX2 and AVX-512, and their tables.

#![allow(unsafe_code, reason = "intrinsics")]

use std::arch::x86_64::*;

use super::simd::{Exponential, attention_table};
use super::{AttentionRows, COLUMNS};
use crate::cpu::simd::{F16, F32, Vector};

// 16 registers: 8 sums at most, 4 of a row, a weight.
attention_table!(AVX2, avx2, __m256, "avx2,fma,f16c", [1, 2, 4, 4]);
// 32 registers: 16 sums, 4 of a row, a weight.
attention_table!(AVX512, avx512, __m512, "avx512f,avx512bw,avx512vl,avx2,fma,f16c", [2, 4, 4, 4]);

const _: () = assert!(COLUMNS.is_multiple_of(<__m512 as Vector>::LANES));

// SAFETY of each block below: the caller has the instructions, as `Exponential` requires.
impl Exponential for __m256 {
    #[inline(always)]
    unsafe fn max(self, other: Self) -> Self {
        // SAFETY: see above.
        unsafe { _mm256_max_ps(self, other) }
    }

    #[inline(always)]
    unsafe fn largest(self) -> f32 {
        // SAFETY: see above.
        unsafe {
            let v = _mm_max_ps(_mm256_castps256_ps128(self), _mm256_extractf128_ps::<1>(self));
            let v = _mm_max_ps(v, _mm_movehl_ps(v, v));
            _mm_cvtss_f32(_mm_max_ss(v, _mm_shuffle_ps::<1>(v, v)))
        }
    }

    #[inline(always)]
    unsafe fn round(self) -> Self {
        // SAFETY: see above.
        unsafe { _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(self) }
    }

    #[inline(always)]
    unsafe fn exp2_whole(self) -> Self {
        // SAFETY: see above.
        unsafe {
            let biased = _mm256_add_epi32(_mm256_cvtps_epi32(self), _mm256_set1_epi32(127));
            _mm256_castsi256_ps(_mm256_slli_epi32::<23>(biased))
        }
    }

    #[inline(always)]
    unsafe fn zero_below(self, x: Self, bound: Self) -> Self {
        // SAFETY: see above.
        unsafe { _mm256_and_ps(self, _mm256_cmp_ps::<_CMP_NLT_UQ>(x, bound)) }
    }
}

// SAFETY of each block below: the caller has the instructions, as `Exponential` requires.
impl Exponential for __m512 {
    #[inline(always)]
    unsafe fn max(self, other: Self) -> Self {
        // SAFETY: see above.
        unsafe { _mm512_max_ps(self, other) }
    }

    #[inline(always)]
    unsafe fn largest(self) -> f32 {
        // SAFETY: see above.
        unsafe {
            let high = _mm256_castpd_ps(_mm512_extractf64x4_pd::<1>(_mm512_castps_pd(self)));
            Exponential::max(_mm512_castps512_ps256(self), high).largest()
        }
    }

    #[inline(always)]
    unsafe fn round(self) -> Self {
        // SAFETY: see above.
        unsafe { _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(self) }
    }

    #[inline(always)]
    unsafe fn exp2_whole(self) -> Self {
        // SAFETY: see above.
        unsafe {
            let biased = _mm512_add_epi32(_mm512_cvtps_epi32(self), _mm512_set1_epi32(127));
            _mm512_castsi512_ps(_mm512_slli_epi32::<23>(biased))
        }
    }

    #[inline(always)]
    unsafe fn zero_below(self, x: Self, bound: Self) -> Self {
        // SAFETY: see above.
        unsafe { _mm512_maskz_mov_ps(_mm512_cmp_ps_mask::<_CMP_NLT_UQ>(x, bound), self) }
    }
}
