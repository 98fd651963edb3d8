//! Products of whole numbers with NEON: a block of 32 weights at a time.
//!
//! Signed bytes are multiplied into sixteen bits, where two products are added up, at most
//! `2 · 128 · 127`, which fits; their sums go to 32 bits. A lane ends up with eight products of a
//! block; the lanes are scaled and added up in f32, even and odd blocks apart.

#![allow(unsafe_code, reason = "intrinsics")]
#![allow(clippy::needless_range_loop, reason = "closures keep intrinsics from being inlined")]

use std::arch::aarch64::*;

use bytemuck::Zeroable;

use super::int8::{BLOCK, BLOCKS, InputGroup, WeightGroup};
use super::simd::{LINE, Vector};
use super::tiles::{int8_rows, tiles};
use super::{GROUP, Grouping, Int8Products, Int8Table, RowValues, Rows};
use crate::format::{NumberFormat, Q40, Q80};

/// Accumulators of a product, for the blocks in turn.
const CHAINS: usize = 2;
const _: () = assert!(BLOCKS.is_multiple_of(CHAINS));
/// Where the second halves of the blocks of a group begin.
const SECOND: usize = BLOCK / 2 * BLOCKS;

/// The products of every format of whole numbers.
pub(super) const INT8: Int8Table = Int8Table { q8_0: products::<Q80>(), q4_0: products::<Q40>() };

/// The products of a format.
const fn products<F: Blocks>() -> Int8Products {
    Int8Products {
        dot: dot::<F>,
        dot_group: dot_group::<F>,
        grouping: Grouping::Always,
        unpack: unpack::<F>,
        block,
        gather,
    }
}

/// A block: first half, second half, scale in all lanes.
type Block = (int8x16_t, int8x16_t, float32x4_t);

/// How a block of a format becomes registers.
trait Blocks: NumberFormat {
    /// # Safety
    /// - the CPU has NEON
    /// - a block at `at` is readable
    unsafe fn load(at: *const u8) -> Block;
}

impl Blocks for Q40 {
    #[inline(always)]
    unsafe fn load(at: *const u8) -> Block {
        // SAFETY: the caller has the instructions and the 18 bytes.
        unsafe {
            let (bytes, eight) = (vld1q_u8(at.add(2)), vdupq_n_s8(8));
            let first = vreinterpretq_s8_u8(vandq_u8(bytes, vdupq_n_u8(15)));
            let second = vreinterpretq_s8_u8(vshrq_n_u8::<4>(bytes));
            (vsubq_s8(first, eight), vsubq_s8(second, eight), float32x4_t::splat_f16(at))
        }
    }
}

impl Blocks for Q80 {
    #[inline(always)]
    unsafe fn load(at: *const u8) -> Block {
        // SAFETY: the caller has the instructions and the 34 bytes.
        unsafe {
            let numbers = at.add(2).cast();
            (vld1q_s8(numbers), vld1q_s8(numbers.add(16)), float32x4_t::splat_f16(at))
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

/// Adds the products of two blocks to `sum`.
///
/// # Safety
/// The CPU has NEON.
#[inline(always)]
unsafe fn add_block(w: Block, x: Block, sum: float32x4_t) -> float32x4_t {
    // SAFETY: the caller has the instructions.
    unsafe {
        let low = vmull_s8(vget_low_s8(w.0), vget_low_s8(x.0));
        let low = vmlal_s8(low, vget_low_s8(w.1), vget_low_s8(x.1));
        let high = vmull_high_s8(w.0, x.0);
        let high = vmlal_high_s8(high, w.1, x.1);
        let products = vpadalq_s16(vpaddlq_s16(low), high);
        vfmaq_f32(sum, vcvtq_f32_s32(products), vmulq_f32(w.2, x.2))
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
    let n_blocks = rows[0].len() / F::BLOCK_BYTES;
    let mut line = 0;
    // SAFETY: the caller has the instructions; `first + block < n_blocks` bounds the reads of rows.
    unsafe {
        let mut sums = [[float32x4_t::zero(); CHAINS]; R];
        for (g, x) in x.iter().enumerate() {
            let first = g * BLOCKS;
            let n = (n_blocks - first).min(BLOCKS);
            while line < (first + n) * F::BLOCK_BYTES {
                for r in 0..R {
                    float32x4_t::prefetch(ahead[r].as_ptr().wrapping_add(line));
                }
                line += LINE;
            }
            for block in 0..n {
                let values = load_group(x.numbers.as_ptr(), x.scales.as_ptr(), block);
                for r in 0..R {
                    let at = rows[r].as_ptr().add((first + block) * F::BLOCK_BYTES);
                    let sum = &mut sums[r][block % CHAINS];
                    *sum = add_block(F::load(at), values, *sum);
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
        for (blocks, group) in row.chunks(BLOCKS * F::BLOCK_BYTES).zip(groups) {
            *group = WeightGroup::zeroed();
            for (block, bytes) in blocks.chunks_exact(F::BLOCK_BYTES).enumerate() {
                // SAFETY: this function has the instructions; `bytes` is a block; the arrays of a
                // group are 128 and 64 bytes long, and `block < BLOCKS`.
                unsafe {
                    let (first, second, scale) = F::load(bytes.as_ptr());
                    let to = group.numbers.as_mut_ptr().add(block * BLOCK / 2).cast();
                    vst1q_s8(to, first);
                    vst1q_s8(to.add(SECOND), second);
                    vst1q_f32(group.scales.as_mut_ptr().add(block * 4), scale);
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
unsafe fn tile<const R: usize, const T: usize>(
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
                add_tile(rows, xs, (g, pair), &mut sums[0]);
                add_tile(rows, xs, (g, pair + 1), &mut sums[1]);
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
unsafe fn add_tile<const R: usize, const T: usize>(
    rows: [&[WeightGroup]; R],
    xs: [&[InputGroup]; T],
    (group, block): (usize, usize),
    sums: &mut [[float32x4_t; R]; T],
) {
    // SAFETY: the caller has the instructions, the group and the block.
    unsafe {
        let mut weights = [(vdupq_n_s8(0), vdupq_n_s8(0), float32x4_t::zero()); R];
        for r in 0..R {
            let row = rows[r].get_unchecked(group);
            weights[r] = load_group(row.numbers.as_ptr().cast(), row.scales.as_ptr(), block);
        }
        for t in 0..T {
            let x = xs[t].get_unchecked(group);
            let values = load_group(x.numbers.as_ptr(), x.scales.as_ptr(), block);
            for r in 0..R {
                sums[t][r] = add_block(weights[r], values, sums[t][r]);
            }
        }
    }
}
