//! The row primitives with NEON: four values a register.
//!
//! Only what every 64-bit ARM CPU has and stable Rust offers: the products of four bytes a lane
//! (`dotprod`) are not among the stable intrinsics.

#![allow(unsafe_code, reason = "intrinsics")]

use std::arch::aarch64::*;
use std::arch::asm;

use super::attention_rows::NEON as ATTENTION;
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

// 32 registers: 24 sums, 2 values of rows, 1 of a vector; or 16 sums, 4 of a panel, 1 scale.
simd_table!(float32x4_t, "neon", 2, 6, 4, 16);

/// Handed out by `RowKernels::available` alone, after it saw the instructions.
pub(super) static TABLE: Table = table("neon", super::int8_neon::INT8);

/// Signed bytes, the lowest four of eight, as 32 bits each.
///
/// # Safety
/// The CPU has NEON.
#[inline(always)]
unsafe fn widen(bytes: int8x8_t) -> int32x4_t {
    // SAFETY: the caller has the instructions.
    unsafe { vmovl_s16(vget_low_s16(vmovl_s8(bytes))) }
}

/// Four bytes and four zeros.
///
/// # Safety
/// - the CPU has NEON
/// - the four bytes are readable
#[inline(always)]
unsafe fn load_four(at: *const u8) -> uint8x8_t {
    // SAFETY: the caller has the instructions and the bytes.
    unsafe { vcreate_u8(u64::from(at.cast::<u32>().read_unaligned())) }
}

// SAFETY of each block below: the caller has the instructions and, for loads and stores, the bytes,
// as `Vector` requires; no intrinsic used here needs alignment.
impl Vector for float32x4_t {
    const LANES: usize = 4;

    #[inline(always)]
    unsafe fn zero() -> Self {
        // SAFETY: see above.
        unsafe { vdupq_n_f32(0.0) }
    }

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        // SAFETY: see above.
        unsafe { vdupq_n_f32(value) }
    }

    #[inline(always)]
    unsafe fn load_f32(at: *const u8) -> Self {
        // SAFETY: see above.
        unsafe { vld1q_f32(at.cast()) }
    }

    #[inline(always)]
    unsafe fn load_f16(at: *const u8) -> Self {
        // SAFETY: see above.
        unsafe { vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(at.cast()))) }
    }

    #[inline(always)]
    unsafe fn load_bf16(at: *const u8) -> Self {
        // SAFETY: see above.
        unsafe { vreinterpretq_f32_u32(vshll_n_u16::<16>(vld1_u16(at.cast()))) }
    }

    #[inline(always)]
    unsafe fn load_i8(at: *const u8) -> Self {
        // SAFETY: see above.
        unsafe { vcvtq_f32_s32(widen(vreinterpret_s8_u8(load_four(at)))) }
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
            let bytes = load_four(at);
            let numbers = if high { vshr_n_u8::<4>(bytes) } else { vand_u8(bytes, vdup_n_u8(15)) };
            let values = vsub_s8(vreinterpret_s8_u8(numbers), vdup_n_s8(8));
            vmulq_f32(vcvtq_f32_s32(widen(values)), scale)
        }
    }

    #[inline(always)]
    unsafe fn splat_f16(at: *const u8) -> Self {
        // SAFETY: see above.
        unsafe {
            let halves = vdup_n_u16(at.cast::<u16>().read_unaligned());
            vcvt_f32_f16(vreinterpret_f16_u16(halves))
        }
    }

    type Ints = int32x4_t;

    #[inline(always)]
    unsafe fn load_u8(at: *const u8) -> int32x4_t {
        // SAFETY: see above.
        unsafe { vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(vmovl_u8(load_four(at))))) }
    }

    #[inline(always)]
    unsafe fn bits(ints: int32x4_t, shift: u32, mask: i32) -> int32x4_t {
        // SAFETY: see above. A negative count shifts right.
        unsafe {
            let shifted = vshlq_u32(vreinterpretq_u32_s32(ints), vdupq_n_s32(-(shift as i32)));
            vandq_s32(vreinterpretq_s32_u32(shifted), vdupq_n_s32(mask))
        }
    }

    #[inline(always)]
    unsafe fn spread_bits(word: u32) -> int32x4_t {
        // SAFETY: see above. A negative count shifts right.
        unsafe {
            let counts = vld1q_s32([0, -1, -2, -3].as_ptr());
            let shifted = vshlq_u32(vdupq_n_u32(word), counts);
            vreinterpretq_s32_u32(vandq_u32(shifted, vdupq_n_u32(1)))
        }
    }

    #[inline(always)]
    unsafe fn join(low: int32x4_t, high: int32x4_t, shift: u32) -> int32x4_t {
        // SAFETY: see above.
        unsafe { vorrq_s32(low, vshlq_s32(high, vdupq_n_s32(shift as i32))) }
    }

    #[inline(always)]
    unsafe fn minus(ints: int32x4_t, bias: i32) -> int32x4_t {
        // SAFETY: see above.
        unsafe { vsubq_s32(ints, vdupq_n_s32(bias)) }
    }

    #[inline(always)]
    unsafe fn to_f32(ints: int32x4_t) -> Self {
        // SAFETY: see above.
        unsafe { vcvtq_f32_s32(ints) }
    }

    #[inline(always)]
    unsafe fn mul(self, factor: Self) -> Self {
        // SAFETY: see above.
        unsafe { vmulq_f32(self, factor) }
    }

    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        // SAFETY: see above.
        unsafe { vaddq_f32(self, other) }
    }

    #[inline(always)]
    unsafe fn store(self, at: *mut f32) {
        // SAFETY: see above.
        unsafe { vst1q_f32(at, self) }
    }

    #[inline(always)]
    unsafe fn mul_add(self, factor: Self, addend: Self) -> Self {
        // SAFETY: see above.
        unsafe { vfmaq_f32(addend, self, factor) }
    }

    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        // SAFETY: see above.
        unsafe {
            let pairs = vpaddq_f32(self, self);
            vgetq_lane_f32::<0>(vpaddq_f32(pairs, pairs))
        }
    }

    /// Neighbours are added as in `sum`, those of all vectors side by side.
    #[inline(always)]
    unsafe fn sum4(v: [Self; 4]) -> [f32; 4] {
        // SAFETY: see above.
        unsafe {
            let sums = vpaddq_f32(vpaddq_f32(v[0], v[1]), vpaddq_f32(v[2], v[3]));
            let mut lanes = [0.0; 4];
            vst1q_f32(lanes.as_mut_ptr(), sums);
            lanes
        }
    }

    #[inline(always)]
    #[allow(clippy::pointers_in_nomem_asm_block, reason = "a prefetch reads no memory")]
    unsafe fn prefetch(at: *const u8) {
        // the intrinsic is not stable
        // SAFETY: every CPU of the architecture has the instruction; it changes no register, no
        // flag and no memory, and never faults.
        unsafe {
            asm!("prfm pldl1keep, [{0}]", in(reg) at, options(nomem, nostack, preserves_flags));
        }
    }
}

fn fold(bytes: &[u8]) -> u64 {
    #[target_feature(enable = "neon")]
    fn inner(blocks: &[[uint64x2_t; 16]]) -> u64 {
        let mut folds = [vdupq_n_u64(0); 16];
        for block in blocks {
            for (fold, value) in folds.iter_mut().zip(block) {
                *fold = veorq_u64(*fold, *value);
            }
        }
        let all = folds.into_iter().fold(vdupq_n_u64(0), |a, b| veorq_u64(a, b));
        vgetq_lane_u64::<0>(all) ^ vgetq_lane_u64::<1>(all)
    }
    // SAFETY: every bit pattern is a valid register, and `align_to` keeps within the bytes.
    let (head, blocks, tail) = unsafe { bytes.align_to::<[uint64x2_t; 16]>() };
    let rest = super::scalar::fold(head) ^ super::scalar::fold(tail);
    // SAFETY: the table is handed out only where the instructions exist.
    rest ^ unsafe { inner(blocks) }
}
