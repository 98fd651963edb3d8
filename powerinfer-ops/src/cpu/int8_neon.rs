//! Products of whole numbers with NEON: a block of 32 weights at a time.
//!
//! Signed bytes are multiplied into sixteen bits, where two products are added up, at most
//! `2 · 128 · 127`, which fits; their sums go to 32 bits. A lane ends up with eight products of a
//! block; the lanes are scaled and added up in f32, even and odd blocks apart.

#![allow(unsafe_code, reason = "intrinsics")]
#![allow(clippy::needless_range_loop, reason = "closures keep intrinsics from being inlined")]

use std::arch::aarch64::*;

use bytemuck::Zeroable;

use super::int8::{
    BLOCK, BLOCKS, InputGroup, OFFSET_BITS, Offsets, WeightGroup, WithOffsets, WithoutOffsets,
};
use super::simd::{LINE, Vector};
use super::tiles::{int8_rows, tiles};
use super::{GROUP, Grouping, Int8Products, Int8Table, RowValues, Rows};
use crate::format::{BlockFormat, NumberFormat, Q4K, Q40, Q41, Q50, Q80, q4_k};

/// Accumulators of a product, for the blocks in turn.
const CHAINS: usize = 2;
const _: () = assert!(BLOCKS.is_multiple_of(CHAINS));
/// Where the second halves of the blocks of a group begin.
const SECOND: usize = BLOCK / 2 * BLOCKS;

/// The products of every format of whole numbers.
pub(super) const INT8: Int8Table = Int8Table {
    q8_0: products::<Q80>(),
    q4_0: products::<Q40>(),
    q4_1: products::<Q41>(),
    q5_0: products::<Q50>(),
    q4_k: products::<Q4K>(),
};

/// The products of a format.
const fn products<F: Blocks>() -> Int8Products {
    Int8Products {
        dot: dot::<F>,
        dot_group: dot_group::<F>,
        grouping: Grouping::Always,
        unpack: unpack::<F>,
        block: if F::OFFSETS { block::<WithOffsets> } else { block::<WithoutOffsets> },
        gather: if F::OFFSETS { gather::<WithOffsets> } else { gather::<WithoutOffsets> },
    }
}

/// 32 numbers: first half, second half, scale in all lanes.
type Block = (int8x16_t, int8x16_t, float32x4_t);
/// 32 weights, and their offset in all lanes.
type Weights = (Block, float32x4_t);

/// How a part of a row becomes registers.
trait Blocks: NumberFormat {
    /// Bytes of a part.
    const BYTES: usize = Self::BLOCK_BYTES / Self::PARTS;

    /// A part of a row, with an offset of zeros where the format has none.
    ///
    /// # Safety
    /// - the CPU has NEON
    /// - the block that holds the part is readable
    unsafe fn load(row: *const u8, part: usize) -> Weights;
}

/// The low and the high halves of bytes.
///
/// # Safety
/// The CPU has NEON.
#[inline(always)]
unsafe fn nibbles(bytes: uint8x16_t) -> (int8x16_t, int8x16_t) {
    // SAFETY: the caller has the instructions.
    unsafe {
        let first = vreinterpretq_s8_u8(vandq_u8(bytes, vdupq_n_u8(15)));
        (first, vreinterpretq_s8_u8(vshrq_n_u8::<4>(bytes)))
    }
}

impl Blocks for Q40 {
    #[inline(always)]
    unsafe fn load(row: *const u8, part: usize) -> Weights {
        // SAFETY: the caller has the instructions and the 18 bytes.
        unsafe {
            let at = row.add(part * Self::BYTES);
            let ((first, second), eight) = (nibbles(vld1q_u8(at.add(2))), vdupq_n_s8(8));
            let numbers = (vsubq_s8(first, eight), vsubq_s8(second, eight));
            ((numbers.0, numbers.1, float32x4_t::splat_f16(at)), float32x4_t::zero())
        }
    }
}

impl Blocks for Q41 {
    #[inline(always)]
    unsafe fn load(row: *const u8, part: usize) -> Weights {
        // SAFETY: the caller has the instructions and the 20 bytes.
        unsafe {
            let at = row.add(part * Self::BYTES);
            let (first, second) = nibbles(vld1q_u8(at.add(4)));
            ((first, second, float32x4_t::splat_f16(at)), float32x4_t::splat_f16(at.add(2)))
        }
    }
}

impl Blocks for Q50 {
    #[inline(always)]
    unsafe fn load(row: *const u8, part: usize) -> Weights {
        // SAFETY: the caller has the instructions and the 22 bytes.
        unsafe {
            let at = row.add(part * Self::BYTES);
            let (first, second) = nibbles(vld1q_u8(at.add(6)));
            let first = with_fifth_bits(first, at.add(2));
            let second = with_fifth_bits(second, at.add(4));
            ((first, second, float32x4_t::splat_f16(at)), float32x4_t::zero())
        }
    }
}

/// Numbers of five bits, less 16, whose lower four are given; the upper ones are the bits of two
/// bytes.
///
/// # Safety
/// - the CPU has NEON
/// - two bytes at `bits` are readable
#[inline(always)]
unsafe fn with_fifth_bits(lower: int8x16_t, bits: *const u8) -> int8x16_t {
    const EACH: [u8; 8] = [1, 2, 4, 8, 16, 32, 64, 128];
    // SAFETY: the caller has the instructions and the bytes.
    unsafe {
        let bytes = vcombine_u8(vdup_n_u8(*bits), vdup_n_u8(*bits.add(1)));
        let each = vld1_u8(EACH.as_ptr());
        let set = vtstq_u8(bytes, vcombine_u8(each, each));
        // the bit would add the 16 that are taken off
        let off = vbicq_u8(vdupq_n_u8(16), set);
        vsubq_s8(lower, vreinterpretq_s8_u8(off))
    }
}

impl Blocks for Q4K {
    #[inline(always)]
    unsafe fn load(row: *const u8, part: usize) -> Weights {
        let in_block = part % Self::PARTS;
        // SAFETY: the caller has the instructions and the block.
        unsafe {
            let block = row.add(part / Self::PARTS * Self::BLOCK_BYTES);
            // two parts are the low and the high halves of the same bytes
            let at = block.add(q4_k::NUMBERS + in_block / 2 * BLOCK);
            let (low_0, high_0) = nibbles(vld1q_u8(at));
            let (low_1, high_1) = nibbles(vld1q_u8(at.add(16)));
            let (scale, offset) = q4_k::part_scales(&*block.cast(), in_block);
            let scale = vmulq_n_f32(float32x4_t::splat_f16(block), f32::from(scale));
            let offset = vmulq_n_f32(float32x4_t::splat_f16(block.add(2)), -f32::from(offset));
            let (first, second) =
                if in_block.is_multiple_of(2) { (low_0, low_1) } else { (high_0, high_1) };
            ((first, second, scale), offset)
        }
    }
}

impl Blocks for Q80 {
    #[inline(always)]
    unsafe fn load(row: *const u8, part: usize) -> Weights {
        // SAFETY: the caller has the instructions and the 34 bytes.
        unsafe {
            let at = row.add(part * Self::BYTES);
            let numbers = at.add(2).cast();
            let block = (vld1q_s8(numbers), vld1q_s8(numbers.add(16)), float32x4_t::splat_f16(at));
            (block, float32x4_t::zero())
        }
    }
}

/// Block `block` of a group of numbers and scales, weights or values.
///
/// # Safety
/// - the CPU has NEON
/// - `numbers` and `scales` are those of a group, and `block < BLOCKS`
#[inline(always)]
unsafe fn load_group(numbers: *const i8, scales: *const f32, block: usize) -> Block {
    // SAFETY: the caller has the instructions and the group.
    unsafe {
        let first = numbers.add(block * BLOCK / 2);
        (vld1q_s8(first), vld1q_s8(first.add(SECOND)), vld1q_f32(scales.add(block * 4)))
    }
}

/// Adds the products of some weights with block `block` of some values to `sum`.
///
/// # Safety
/// - the CPU has NEON
/// - `block < BLOCKS`
#[inline(always)]
unsafe fn add_block(
    has_offset: bool,
    (w, offset): Weights,
    (group, block): (&InputGroup, usize),
    sum: float32x4_t,
) -> float32x4_t {
    // SAFETY: the caller has the instructions and the block; there are 16 corrections.
    unsafe {
        let x = load_group(group.numbers.as_ptr(), group.scales.as_ptr(), block);
        let low = vmull_s8(vget_low_s8(w.0), vget_low_s8(x.0));
        let low = vmlal_s8(low, vget_low_s8(w.1), vget_low_s8(x.1));
        let high = vmull_high_s8(w.0, x.0);
        let high = vmlal_high_s8(high, w.1, x.1);
        let products = vpadalq_s16(vpaddlq_s16(low), high);
        let sum = vfmaq_f32(sum, vcvtq_f32_s32(products), vmulq_f32(w.2, x.2));
        if !has_offset {
            return sum;
        }
        let corrections = vld1q_s32(group.corrections.as_ptr().add(4 * block));
        let less = vcvtq_f32_s32(vshrq_n_s32::<{ OFFSET_BITS as i32 }>(corrections));
        vfmsq_f32(sum, less, vmulq_f32(offset, x.2))
    }
}

/// `R` rows times a token.
///
/// # Safety
/// - the CPU has NEON
/// - each row holds the blocks of `x`, the last group at least one
#[inline(always)]
unsafe fn dots<F: Blocks, const R: usize>(
    rows: [&[u8]; R],
    ahead: [&[u8]; R],
    x: &[InputGroup],
) -> [f32; R] {
    let n_blocks = rows[0].len() / F::BYTES;
    let mut line = 0;
    // SAFETY: the caller has the instructions; `first + block < n_blocks` bounds the reads of rows.
    unsafe {
        let mut sums = [[float32x4_t::zero(); CHAINS]; R];
        for (g, x) in x.iter().enumerate() {
            let first = g * BLOCKS;
            let n = (n_blocks - first).min(BLOCKS);
            while line < (first + n) * F::BYTES {
                for r in 0..R {
                    float32x4_t::prefetch(ahead[r].as_ptr().wrapping_add(line));
                }
                line += LINE;
            }
            for block in 0..n {
                for r in 0..R {
                    let weights = F::load(rows[r].as_ptr(), first + block);
                    let sum = &mut sums[r][block % CHAINS];
                    *sum = add_block(F::OFFSETS, weights, (x, block), *sum);
                }
            }
        }
        let mut totals = [0.0; R];
        for r in 0..R {
            totals[r] = sums[r][0].add(sums[r][1]).sum();
        }
        totals
    }
}

int8_rows!(Blocks, "neon", 2, 4);

/// Signed weights; blocks that the row has not are zeros.
fn unpack<F: Blocks>(row: &[u8], groups: &mut [WeightGroup]) {
    #[target_feature(enable = "neon")]
    fn inner<F: Blocks>(row: &[u8], groups: &mut [WeightGroup]) {
        let n_blocks = row.len() / F::BYTES;
        for (g, group) in groups.iter_mut().enumerate() {
            *group = WeightGroup::zeroed();
            for block in 0..(n_blocks - g * BLOCKS).min(BLOCKS) {
                // SAFETY: this function has the instructions; the row has the part; the arrays of a
                // group are 128, 64 and 64 bytes long, and `block < BLOCKS`.
                unsafe {
                    let ((first, second, scale), offset) =
                        F::load(row.as_ptr(), g * BLOCKS + block);
                    let to = group.numbers.as_mut_ptr().add(block * BLOCK / 2).cast();
                    vst1q_s8(to, first);
                    vst1q_s8(to.add(SECOND), second);
                    vst1q_f32(group.scales.as_mut_ptr().add(block * 4), scale);
                    vst1q_f32(group.offsets.as_mut_ptr().add(block * 4), offset);
                }
            }
        }
    }
    super::check_blocks::<F>(&[row], groups.len());
    // SAFETY: the table is handed out only where the instructions exist.
    unsafe { inner::<F>(row, groups) }
}

/// The products of a tile, `[t][r]`.
///
/// # Safety
/// - the CPU has NEON
/// - all slices have one length
#[inline(always)]
unsafe fn tile<O: Offsets, const R: usize, const T: usize>(
    rows: [&[WeightGroup]; R],
    xs: [&[InputGroup]; T],
) -> [[f32; R]; T] {
    let n_groups = rows[0].len();
    // SAFETY: the caller has the instructions; `g < n_groups` and `pair + 1 < BLOCKS`.
    unsafe {
        let mut sums = [[[float32x4_t::zero(); R]; T]; CHAINS];
        for g in 0..n_groups {
            for pair in (0..BLOCKS).step_by(CHAINS) {
                // written out, so that the sums stay in registers
                add_tile::<O, R, T>(rows, xs, (g, pair), &mut sums[0]);
                add_tile::<O, R, T>(rows, xs, (g, pair + 1), &mut sums[1]);
            }
        }
        let mut products = [[0.0; R]; T];
        for t in 0..T {
            for r in 0..R {
                products[t][r] = sums[0][t][r].add(sums[1][t][r]).sum();
            }
        }
        products
    }
}

/// Adds the products of one block of all rows and tokens.
///
/// # Safety
/// - the CPU has NEON
/// - all slices have the group, and `block < BLOCKS`
#[inline(always)]
unsafe fn add_tile<O: Offsets, const R: usize, const T: usize>(
    rows: [&[WeightGroup]; R],
    xs: [&[InputGroup]; T],
    (group, block): (usize, usize),
    sums: &mut [[float32x4_t; R]; T],
) {
    // SAFETY: the caller has the instructions, the group and the block.
    unsafe {
        let zero = float32x4_t::zero();
        let mut weights = [((vdupq_n_s8(0), vdupq_n_s8(0), zero), zero); R];
        for r in 0..R {
            let row = rows[r].get_unchecked(group);
            let numbers = load_group(row.numbers.as_ptr().cast(), row.scales.as_ptr(), block);
            weights[r] = (numbers, vld1q_f32(row.offsets.as_ptr().add(4 * block)));
        }
        for t in 0..T {
            let x = xs[t].get_unchecked(group);
            for r in 0..R {
                sums[t][r] = add_block(O::ANY, weights[r], (x, block), sums[t][r]);
            }
        }
    }
}
