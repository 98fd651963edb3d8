//! Dot products over a vector of f32 lanes, see [`simd`](super::simd).

#![allow(
    clippy::needless_range_loop,
    reason = "plain loops: closures keep intrinsics from inlining"
)]
#![allow(unsafe_code, reason = "raw loads; the table's safe wrappers assert every length")]

use std::mem::MaybeUninit;
use std::ops::Range;

use super::simd::{
    F32, STEP, Steps, Vector, heads, own_turns, padded_row, padded_values, prefetch_turn,
    turn_bytes,
};

/// Accumulators of a dot product: two hide the latency of the fused multiply-add well enough for
/// a row that streams from memory.
const CHAINS: usize = 2;
/// Tiles of [`row_tiles`] whose sums are kept at once, and steps of columns between them: 32 KiB of
/// rows and tokens.
const TILES: usize = 24;
const COLUMN_STEPS: usize = 32;

/// Dot products of `R` rows with `T` vectors, as `[t][r]`.
///
/// # Safety
/// - the CPU has the instruction set of `V`
/// - all `xs` have one length, and each row holds that many values of `F`
#[inline(always)]
pub(super) unsafe fn dots<V: Vector, F: Steps<V>, const R: usize, const T: usize>(
    rows: [&[u8]; R],
    xs: [&[f32]; T],
) -> [[f32; R]; T] {
    let n_steps = xs[0].len() / STEP;
    // SAFETY: the caller has the instructions; `step < n_steps` bounds the loads of rows and
    // vectors, and what is left of them is copied to padded steps of its own.
    unsafe {
        let mut sums = [[[V::zero(); CHAINS]; R]; T];
        for step in 0..n_steps {
            let rows = rows.map(|row| row.as_ptr().add(step / F::STEPS * F::BYTES));
            let xs = xs.map(|x| x.as_ptr().add(step * STEP));
            dots_step::<V, F, R, T>(rows, step % F::STEPS, xs, &mut sums);
        }
        // longer blocks leave no rest
        if F::STEPS == 1 && !xs[0].len().is_multiple_of(STEP) {
            let rows = rows.map(|row| padded_row(&row[n_steps * F::BYTES..]));
            let xs = xs.map(|x| padded_values(&x[n_steps * STEP..]));
            let rows = std::array::from_fn(|r| rows[r].as_ptr());
            let xs = std::array::from_fn(|t| xs[t].as_ptr());
            dots_step::<V, F, R, T>(rows, 0, xs, &mut sums);
        }
        let mut totals = [[0.0; R]; T];
        for t in 0..T {
            for r in 0..R {
                totals[t][r] = sums[t][r][0].add(sums[t][r][1]).sum();
            }
        }
        totals
    }
}

/// Dot products of `R` rows with a vector, the sums of [`dots`], with the rows `ahead` on their way
/// into the cache meanwhile; [`TURN`](Steps::TURN) steps of a row before the next row.
///
/// # Safety
/// - the CPU has the instruction set of `V`
/// - each row holds as many values of `F` as `x`
#[inline(always)]
pub(super) unsafe fn dots_ahead<V: Vector, F: Steps<V>, const R: usize>(
    rows: [&[u8]; R],
    ahead: [&[u8]; R],
    x: &[f32],
) -> [f32; R] {
    let n_steps = x.len() / STEP;
    let n_turned = n_steps / F::TURN * F::TURN;
    // SAFETY: the caller has the instructions; `step < n_steps` bounds the loads of rows and the
    // vector, and what is left of them is copied to padded steps of its own.
    unsafe {
        let mut sums = [[[[V::zero(); CHAINS]; 1]; 1]; R];
        let own = own_turns::<R>(n_steps / F::TURN, turn_bytes::<V, F>());
        dots_turns::<V, F, R>(rows, (rows, n_steps / F::TURN - own), 0..own, x, &mut sums);
        dots_turns::<V, F, R>(rows, (ahead, 0), own..n_steps / F::TURN, x, &mut sums);
        for step in n_turned..n_steps {
            for r in 0..R {
                let row = rows[r].as_ptr().add(step / F::STEPS * F::BYTES);
                let x = x.as_ptr().add(step * STEP);
                dots_step::<V, F, 1, 1>([row], step % F::STEPS, [x], &mut sums[r]);
            }
        }
        // longer blocks leave no rest
        if F::STEPS == 1 && !x.len().is_multiple_of(STEP) {
            let x = padded_values(&x[n_steps * STEP..]);
            for r in 0..R {
                let row = padded_row(&rows[r][n_steps * F::BYTES..]);
                dots_step::<V, F, 1, 1>([row.as_ptr()], 0, [x.as_ptr()], &mut sums[r]);
            }
        }
        let mut totals = [0.0; R];
        for r in 0..R {
            totals[r] = sums[r][0][0][0].add(sums[r][0][0][1]).sum();
        }
        totals
    }
}

/// Some turns of [`dots_ahead`], with as many turns of the rows `asked` on their way meanwhile, from a
/// turn on.
///
/// # Safety
/// - the CPU has the instruction set of `V`
/// - `turns` lie in each row, and in `x`
#[inline(always)]
unsafe fn dots_turns<V: Vector, F: Steps<V>, const R: usize>(
    rows: [&[u8]; R],
    (asked, first_asked): ([&[u8]; R], usize),
    turns: Range<usize>,
    x: &[f32],
    sums: &mut [[[[V; CHAINS]; 1]; 1]; R],
) {
    for (turn, asked_turn) in turns.zip(first_asked..) {
        for r in 0..R {
            // SAFETY: the caller has the instructions and the turns.
            unsafe {
                prefetch_turn::<V, F>(asked[r], asked_turn);
                // as many in every turn: a number that varies took a fifth of the speed of f32
                for step in turn * F::TURN..(turn + 1) * F::TURN {
                    let row = rows[r].as_ptr().add(step / F::STEPS * F::BYTES);
                    let x = x.as_ptr().add(step * STEP);
                    dots_step::<V, F, 1, 1>([row], step % F::STEPS, [x], &mut sums[r]);
                }
            }
        }
    }
}

/// `out[t][r] = rows[r] · xs[t]` of decoded rows, all `len` values long: the sums of [`dots`], some
/// columns of all tiles at a time, so that the tokens' columns stay in the L1 cache.
///
/// # Safety
/// - the CPU has the instruction set of `V`
/// - `rows` is whole rows of `xs[0].len()` values, and all `xs` have one length
#[inline(always)]
pub(super) unsafe fn row_tiles<V: Vector, const R: usize, const T: usize>(
    rows: &[f32],
    xs: [&[f32]; T],
    out: &mut [f32],
) {
    let len = xs[0].len();
    let (n_rows, n_steps) = (rows.len() / len, len / STEP);
    let n_tiled = n_rows / R * R;
    for first in (0..n_tiled).step_by(R * TILES) {
        let n_tiles = (n_tiled - first).div_ceil(R).min(TILES);
        // SAFETY: the caller has the instructions; `first + tile * R + r < n_rows` bounds the
        // row, `step < n_steps` the column; a state is written for the first columns, of which
        // there are some if `n_steps > 0`.
        unsafe {
            // written before they are read, for the first columns
            let mut states = [const { MaybeUninit::uninit() }; TILES];
            for start in (0..n_steps).step_by(COLUMN_STEPS) {
                for tile in 0..n_tiles {
                    let mut sums = [[[V::zero(); CHAINS]; R]; T];
                    if start > 0 {
                        sums = states[tile].assume_init();
                    }
                    for step in start..n_steps.min(start + COLUMN_STEPS) {
                        let mut at = [rows.as_ptr().cast::<u8>(); R];
                        for r in 0..R {
                            let row = (first + tile * R + r) * len;
                            at[r] = rows.as_ptr().add(row + step * STEP).cast();
                        }
                        let xs = xs.map(|x| x.as_ptr().add(step * STEP));
                        dots_step::<V, F32, R, T>(at, 0, xs, &mut sums);
                    }
                    states[tile].write(sums);
                }
            }
            for tile in 0..n_tiles {
                let row = first + tile * R;
                let mut sums = [[[V::zero(); CHAINS]; R]; T];
                if n_steps > 0 {
                    sums = states[tile].assume_init();
                }
                if !len.is_multiple_of(STEP) {
                    let tails = |r: usize| &rows[(row + r) * len + n_steps * STEP..][..len % STEP];
                    let tails: [_; R] = std::array::from_fn(|r| padded_values(tails(r)));
                    let xs = xs.map(|x| padded_values(&x[n_steps * STEP..]));
                    let tails = std::array::from_fn(|r| tails[r].as_ptr().cast());
                    let xs = std::array::from_fn(|t| xs[t].as_ptr());
                    dots_step::<V, F32, R, T>(tails, 0, xs, &mut sums);
                }
                let mut lanes = [[V::zero(); R]; T];
                for t in 0..T {
                    for r in 0..R {
                        lanes[t][r] = sums[t][r][0].add(sums[t][r][1]);
                    }
                }
                let products = sum_lanes(&lanes);
                for t in 0..T {
                    for r in 0..R {
                        out[t * n_rows + row + r] = products[t][r];
                    }
                }
            }
        }
    }
    for row in n_tiled..n_rows {
        let bytes = bytemuck::cast_slice(&rows[row * len..][..len]);
        // SAFETY: the caller has the instructions; all slices have `len` values.
        let tile = unsafe { dots::<V, F32, 1, T>([bytes], xs) };
        for t in 0..T {
            out[t * n_rows + row] = tile[t][0];
        }
    }
}

/// The sum of the lanes of each vector.
///
/// # Safety
/// The CPU has the instruction set of `V`.
#[inline(always)]
pub(super) unsafe fn sum_lanes<V: Vector, const R: usize, const T: usize>(
    lanes: &[[V; R]; T],
) -> [[f32; R]; T] {
    let mut sums = [[0.0; R]; T];
    let (vectors, values) = (lanes.as_flattened(), sums.as_flattened_mut());
    let whole = vectors.len() / 4 * 4;
    for at in (0..whole).step_by(4) {
        let four = [vectors[at], vectors[at + 1], vectors[at + 2], vectors[at + 3]];
        // SAFETY: the caller has the instructions.
        values[at..at + 4].copy_from_slice(&unsafe { V::sum4(four) });
    }
    for at in whole..vectors.len() {
        // SAFETY: the caller has the instructions.
        values[at] = unsafe { vectors[at].sum() };
    }
    sums
}

/// One step of [`dots`].
///
/// # Safety
/// - the CPU has the instruction set of `V`
/// - each row has a block of `F` readable, each vector `STEP` values, and `step < F::STEPS`
#[inline(always)]
unsafe fn dots_step<V: Vector, F: Steps<V>, const R: usize, const T: usize>(
    rows: [*const u8; R],
    step: usize,
    xs: [*const f32; T],
    sums: &mut [[[V; CHAINS]; R]; T],
) {
    const { assert!((STEP / V::LANES).is_multiple_of(CHAINS), "whole turns of the chains") };
    // SAFETY: the caller has the instructions and the steps; `index` stays within a step.
    unsafe {
        let heads = heads::<V, F, R>(rows, step);
        for first in (0..STEP / V::LANES).step_by(CHAINS) {
            // short enough to be unrolled, so that the sums of each chain stay in registers
            for chain in 0..CHAINS {
                let index = first + chain;
                let mut values = [V::zero(); R];
                for r in 0..R {
                    values[r] = F::lanes(heads[r], rows[r], step, index);
                }
                for t in 0..T {
                    let x = V::load_f32(xs[t].add(index * V::LANES).cast());
                    for r in 0..R {
                        let sum = &mut sums[t][r][chain];
                        *sum = values[r].mul_add(x, *sum);
                    }
                }
            }
        }
    }
}
