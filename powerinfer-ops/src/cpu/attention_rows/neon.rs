//! The exponential's needs with NEON, and its table.

#![allow(unsafe_code, reason = "intrinsics")]

use std::arch::aarch64::*;

use super::simd::{Exponential, attention_table};
use super::{AttentionRows, COLUMNS};
use crate::cpu::simd::{F16, F32, Vector};

// 32 registers: 16 sums at most, 8 of a row, a weight.
attention_table!(NEON, neon, float32x4_t, "neon", [2, 4, 8, 8]);

const _: () = assert!(COLUMNS.is_multiple_of(<float32x4_t as Vector>::LANES));

// SAFETY of each block below: the caller has the instructions, as `Exponential` requires.
impl Exponential for float32x4_t {
    #[inline(always)]
    unsafe fn max(self, other: Self) -> Self {
        // SAFETY: see above. A comparison with a NaN is false, where the instruction for the
        // maximum would give the NaN.
        unsafe { vbslq_f32(vcgtq_f32(self, other), self, other) }
    }

    #[inline(always)]
    unsafe fn largest(self) -> f32 {
        // SAFETY: see above.
        unsafe { vmaxvq_f32(self) }
    }

    #[inline(always)]
    unsafe fn round(self) -> Self {
        // SAFETY: see above.
        unsafe { vrndnq_f32(self) }
    }

    #[inline(always)]
    unsafe fn exp2_whole(self) -> Self {
        // SAFETY: see above.
        unsafe {
            let biased = vaddq_s32(vcvtq_s32_f32(self), vdupq_n_s32(127));
            vreinterpretq_f32_s32(vshlq_n_s32::<23>(biased))
        }
    }

    #[inline(always)]
    unsafe fn zero_below(self, x: Self, bound: Self) -> Self {
        // SAFETY: see above.
        unsafe {
            let bits = vbicq_u32(vreinterpretq_u32_f32(self), vcltq_f32(x, bound));
            vreinterpretq_f32_u32(bits)
        }
    }
}
