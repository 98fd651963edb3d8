//! The block formats beyond Q8_0 and Q4_0 as steps of [`simd`](super::simd): numbers of a few bits are
//! put together in integer lanes, converted, and meet their scale in one multiplication.
//!
//! All products of scales and numbers are exact in f32, so that it does not matter whether an
//! offset is added in a fused operation or after the product, nor whether a number is shifted or
//! multiplied by a power of two: every table decodes the same bits.

#![allow(unsafe_code, reason = "raw loads; the table's safe wrappers assert every length")]

use super::simd::{STEP, Steps, Vector};
use crate::format::{BlockFormat, q4_k};

pub(super) struct Q41;
pub(super) struct Q50;
pub(super) struct Q4K;
pub(super) struct Q6K;

/// The low or high halves of the bytes of `V::LANES` numbers; the halves of 16 bytes are a step.
///
/// # Safety
/// - the CPU has the instruction set of `V`
/// - 16 bytes at `at` are readable, and `index * V::LANES < STEP`
#[inline(always)]
unsafe fn halves_of_16<V: Vector>(at: *const u8, index: usize) -> V::Ints {
    let value = index * V::LANES;
    // SAFETY: the caller has the instructions and the bytes.
    unsafe { V::bits(V::load_u8(at.wrapping_add(value % 16)), if value < 16 { 0 } else { 4 }, 15) }
}

impl<V: Vector> Steps<V> for Q41 {
    const BYTES: usize = 20;
    /// Scale and offset.
    type Head = (V, V);

    #[inline(always)]
    unsafe fn head(at: *const u8, _: usize) -> (V, V) {
        // SAFETY: the caller has the instructions and the bytes.
        unsafe { (V::splat_f16(at), V::splat_f16(at.wrapping_add(2))) }
    }

    #[inline(always)]
    unsafe fn lanes((scale, offset): (V, V), at: *const u8, _: usize, index: usize) -> V {
        // SAFETY: the caller has the instructions and the bytes.
        unsafe {
            let numbers = halves_of_16::<V>(at.wrapping_add(4), index);
            V::to_f32(numbers).mul_add(scale, offset)
        }
    }
}

impl<V: Vector> Steps<V> for Q50 {
    const BYTES: usize = 22;
    /// The scale, and the fifth bits.
    type Head = (V, u32);

    #[inline(always)]
    unsafe fn head(at: *const u8, _: usize) -> (V, u32) {
        // SAFETY: the caller has the instructions and the bytes.
        unsafe { (V::splat_f16(at), at.wrapping_add(2).cast::<u32>().read_unaligned()) }
    }

    #[inline(always)]
    unsafe fn lanes((scale, fifth): (V, u32), at: *const u8, _: usize, index: usize) -> V {
        // SAFETY: the caller has the instructions and the bytes.
        unsafe {
            let lower = halves_of_16::<V>(at.wrapping_add(6), index);
            let fifth = V::spread_bits(fifth >> (index * V::LANES));
            V::to_f32(V::minus(V::join(lower, fifth, 4), 16)).mul(scale)
        }
    }
}

impl<V: Vector> Steps<V> for Q4K {
    const BYTES: usize = 144;
    const STEPS: usize = 8;
    /// Scale and offset of the part that the step is.
    type Head = (V, V);

    #[inline(always)]
    unsafe fn head(at: *const u8, step: usize) -> (V, V) {
        // SAFETY: the caller has the instructions and the bytes.
        unsafe {
            let (scale, offset) = q4_k::part_scales(&*at.cast(), step);
            let (d, d_min) = (V::splat_f16(at), V::splat_f16(at.wrapping_add(2)));
            // numbers in high halves stay there, so that they are 16 times what they are
            let unit = if step.is_multiple_of(2) { 1.0 } else { 1.0 / 16.0 };
            (d.mul(V::splat(f32::from(scale) * unit)), d_min.mul(V::splat(-f32::from(offset))))
        }
    }

    #[inline(always)]
    unsafe fn lanes((scale, offset): (V, V), at: *const u8, step: usize, index: usize) -> V {
        // two steps lie in the halves of the same bytes
        let at = at.wrapping_add(q4_k::NUMBERS + step / 2 * STEP + index * V::LANES);
        // SAFETY: the caller has the instructions and the bytes.
        unsafe {
            let numbers =
                V::bits(V::load_u8(at), 0, if step.is_multiple_of(2) { 15 } else { 15 << 4 });
            V::to_f32(numbers).mul_add(scale, offset)
        }
    }
}

/// The lower bits of a number of Q6_K, for each of the four rows of a half block: where they are in
/// their byte, and what makes of them their part of the number without a shift.
const LOWER: [(i32, f32); 4] = [(0x0F, 1.0), (0x0F, 1.0), (0xF0, 1.0 / 16.0), (0xF0, 1.0 / 16.0)];
/// The same for the upper two bits.
const UPPER: [(i32, f32); 4] = [(0x03, 16.0), (0x0C, 4.0), (0x30, 1.0), (0xC0, 0.25)];

impl<V: Vector> Steps<V> for Q6K {
    const BYTES: usize = 210;
    const STEPS: usize = 8;
    /// The scales of the two parts that a step is.
    type Head = [V; 2];

    #[inline(always)]
    unsafe fn head(at: *const u8, step: usize) -> [V; 2] {
        // SAFETY: the caller has the instructions and the bytes.
        unsafe {
            let d = V::splat_f16(at.wrapping_add(208));
            let first = at.wrapping_add(192 + 2 * step).cast::<i8>();
            let second = first.wrapping_add(1);
            [d.mul(V::splat(f32::from(*first))), d.mul(V::splat(f32::from(*second)))]
        }
    }

    #[inline(always)]
    unsafe fn lanes(scales: [V; 2], at: *const u8, step: usize, index: usize) -> V {
        // four rows of 32 numbers a half of the block: see the format
        let (half, row, column) = (step / 4, step % 4, index * V::LANES);
        let lower = at.wrapping_add(half * 64 + row % 2 * 32 + column);
        let upper = at.wrapping_add(128 + half * 32 + column);
        // SAFETY: the caller has the instructions and the bytes.
        unsafe {
            let lower = V::to_f32(V::bits(V::load_u8(lower), 0, LOWER[row].0));
            let upper = V::to_f32(V::bits(V::load_u8(upper), 0, UPPER[row].0));
            let upper = upper.mul_add(V::splat(UPPER[row].1), V::splat(-32.0));
            lower.mul_add(V::splat(LOWER[row].1), upper).mul(scales[column / 16])
        }
    }
}

/// The steps cover the blocks that the formats define.
macro_rules! blocks_agree {
    ($($format:ident),*) => {$(
        const _: () = {
            type Defined = crate::format::$format;
            assert!(Defined::BLOCK_LEN == STEP * <$format as Steps<Probe>>::STEPS);
            assert!(Defined::BLOCK_BYTES == <$format as Steps<Probe>>::BYTES);
        };
    )*};
}
#[cfg(target_arch = "x86_64")]
type Probe = std::arch::x86_64::__m256;
#[cfg(target_arch = "aarch64")]
type Probe = std::arch::aarch64::float32x4_t;
blocks_agree!(Q41, Q50, Q4K, Q6K);
