//! Weighted sums of rows over a vector of f32 lanes, see [`simd`](super::simd).

#![allow(
    clippy::needless_range_loop,
    reason = "plain loops: closures keep intrinsics from inlining"
)]
#![allow(unsafe_code, reason = "raw loads; the table's safe wrappers assert every length")]

use std::ops::Range;

use super::rows::add;
use super::simd::{
    STEP, Steps, TURN, Vector, own_turns, padded_row, padded_values, prefetch_turn, turn_bytes,
};
use super::{PANEL, PANEL_ROWS, PanelTile, TILE_TOKENS};

/// Lanes of the shortest vector.
const FEWEST_LANES: usize = 4;

/// `y += Σ_r scales[r] · rows[r]` in order of `r`, with the rows `ahead` on their way into the cache
/// meanwhile. `y` is left in an order that [`settle`] undoes.
///
/// # Safety
/// - the CPU has the instruction set of `V`
/// - each row holds as many values of `F` as `y`
#[inline(always)]
pub(super) unsafe fn axpys<V: Vector, F: Steps<V>, const R: usize>(
    scales: [f32; R],
    rows: [&[u8]; R],
    ahead: [&[u8]; R],
    y: &mut [f32],
) {
    let (steps, rest) = y.as_chunks_mut::<STEP>();
    let n_steps = steps.len();
    // SAFETY: the caller has the instructions; `step < n_steps` bounds the loads of the rows, and
    // what is left of them is copied to padded steps of its own.
    unsafe {
        let mut splats = [V::zero(); R];
        for r in 0..R {
            splats[r] = V::splat(scales[r]);
        }
        let (n_turns, y) = (n_steps / F::TURN, steps.as_mut_ptr());
        let own = own_turns::<R>(n_turns, turn_bytes::<V, F>());
        axpys_turns::<V, F, R>(splats, rows, (rows, n_turns - own), 0..own, y);
        axpys_turns::<V, F, R>(splats, rows, (ahead, 0), own..n_turns, y);
        for step in n_steps / F::TURN * F::TURN..n_steps {
            let rows = rows.map(|row| row.as_ptr().add(step / F::STEPS * F::BYTES));
            axpys_step::<V, F, R>(splats, rows, step % F::STEPS, &mut *y.add(step));
        }
        // longer blocks leave no rest
        if F::STEPS == 1 && !rest.is_empty() {
            let rows = rows.map(|row| padded_row(&row[n_steps * F::BYTES..]));
            let mut y = padded_values(rest);
            axpys_step::<V, F, R>(splats, std::array::from_fn(|r| rows[r].as_ptr()), 0, &mut y);
            rest.copy_from_slice(&y[..rest.len()]);
        }
    }
}

/// Some turns of [`axpys`], asking for others meanwhile.
///
/// # Safety
/// - the CPU has the instruction set of `V`
/// - `turns` lie in each row, and in the values at `y`, which are nobody else's
#[inline(always)]
unsafe fn axpys_turns<V: Vector, F: Steps<V>, const R: usize>(
    scales: [V; R],
    rows: [&[u8]; R],
    (asked, first_asked): ([&[u8]; R], usize),
    turns: Range<usize>,
    y: *mut [f32; STEP],
) {
    for (turn, asked_turn) in turns.zip(first_asked..) {
        // SAFETY: the caller has the instructions and the turns.
        unsafe {
            for r in 0..R {
                prefetch_turn::<V, F>(asked[r], asked_turn);
            }
            if F::STEPS == 1 && F::TURN == TURN {
                let rows = rows.map(|row| row.as_ptr().add(turn * TURN * F::BYTES));
                F::axpys_blocks(scales, rows, &mut *y.add(turn * TURN).cast());
                continue;
            }
            for step in turn * F::TURN..(turn + 1) * F::TURN {
                let rows = rows.map(|row| row.as_ptr().add(step / F::STEPS * F::BYTES));
                axpys_step::<V, F, R>(scales, rows, step % F::STEPS, &mut *y.add(step));
            }
        }
    }
}

/// [`Steps::axpys_blocks`] in the order of values.
///
/// # Safety
/// As for [`Steps::axpys_blocks`].
#[inline(always)]
pub(super) unsafe fn axpys_steps<V: Vector, F: Steps<V> + ?Sized, const R: usize>(
    scales: [V; R],
    rows: [*const u8; R],
    y: &mut [[f32; STEP]; TURN],
) {
    for step in 0..TURN {
        // SAFETY: the caller has the instructions and the blocks.
        unsafe {
            let rows = rows.map(|row| row.add(step * F::BYTES));
            axpys_step::<V, F, R>(scales, rows, 0, &mut y[step]);
        }
    }
}

/// `y += sum`, where [`axpys`] made the sum over rows of `F`, or whole panels of it.
///
/// # Safety
/// The CPU has the instruction set of `V`.
#[inline(always)]
pub(super) unsafe fn settle<V: Vector, F: Steps<V>>(sum: &[f32], y: &mut [f32]) {
    let (sums, rest) = sum.as_chunks::<STEP>();
    let (ys, rest_of_y) = y.as_chunks_mut::<STEP>();
    add(rest_of_y, rest);
    let (turns, rest) = sums.as_chunks::<TURN>();
    let (ys, rest_of_y) = ys.as_chunks_mut::<TURN>();
    add(rest_of_y.as_flattened_mut(), rest.as_flattened());
    for (sum, y) in turns.iter().zip(ys) {
        // SAFETY: the caller has the instructions.
        unsafe { F::settle(sum, y) };
    }
}

/// `y += sum` in the order of values.
///
/// # Safety
/// The CPU has the instruction set of `V`.
#[inline(always)]
pub(super) unsafe fn add_steps<V: Vector>(sum: &[[f32; STEP]; TURN], y: &mut [[f32; STEP]; TURN]) {
    let (sum, y) = (sum.as_flattened().as_ptr(), y.as_flattened_mut().as_mut_ptr());
    for at in (0..TURN * STEP).step_by(V::LANES) {
        // SAFETY: the caller has the instructions; `at + LANES` is within a turn.
        unsafe {
            let (sum, y) = (sum.add(at), y.add(at));
            V::load_f32(y.cast()).add(V::load_f32(sum.cast())).store(y);
        }
    }
}

/// One step of [`axpys`].
///
/// # Safety
/// - the CPU has the instruction set of `V`
/// - each row has a block of `F` readable, and `step < F::STEPS`
#[inline(always)]
unsafe fn axpys_step<V: Vector, F: Steps<V> + ?Sized, const R: usize>(
    scales: [V; R],
    rows: [*const u8; R],
    step: usize,
    y: &mut [f32; STEP],
) {
    // SAFETY: the caller has the instructions and the steps; `index` stays within a step.
    unsafe {
        // no store in between, so that what two vectors have in common is loaded once
        let mut sums = [V::zero(); STEP / FEWEST_LANES];
        for index in 0..STEP / V::LANES {
            sums[index] = V::load_f32(y.as_ptr().add(index * V::LANES).cast());
        }
        for r in 0..R {
            let head = F::head(rows[r], step);
            for index in 0..STEP / V::LANES {
                sums[index] = F::add_lanes((scales[r], sums[index]), head, rows[r], step, index);
            }
        }
        for index in 0..STEP / V::LANES {
            sums[index].store(y.as_mut_ptr().add(index * V::LANES));
        }
    }
}

/// `ys[t] += Σ_r scales[t][r] · panel[r]` in order of `r`, `W` registers of a panel row at a time.
///
/// # Safety
/// - the CPU has the instruction set of `V`
/// - `panel` has `PANEL_ROWS * PANEL` values
#[inline(always)]
pub(super) unsafe fn axpy_tile<V: Vector, const W: usize>(
    scales: [&[f32; PANEL_ROWS]; TILE_TOKENS],
    panel: &[f32],
    PanelTile(ys): &mut PanelTile,
) {
    for column in (0..PANEL).step_by(W * V::LANES) {
        // SAFETY: the caller has the instructions; `column + W * LANES <= PANEL` bounds accesses
        // to `ys` and to a panel row, `r < PANEL_ROWS` the row.
        unsafe {
            let mut sums = [[V::zero(); W]; TILE_TOKENS];
            for (sums, y) in sums.iter_mut().zip(ys.iter()) {
                for (v, sum) in sums.iter_mut().enumerate() {
                    *sum = V::load_f32(y.as_ptr().add(column + v * V::LANES).cast());
                }
            }
            for r in 0..PANEL_ROWS {
                let scales = scales.map(|scales| scales[r]);
                let mut row = [V::zero(); W];
                for (v, value) in row.iter_mut().enumerate() {
                    let at = panel.as_ptr().add(r * PANEL + column + v * V::LANES);
                    *value = V::load_f32(at.cast());
                }
                for (sums, scale) in sums.iter_mut().zip(scales) {
                    let scale = V::splat(scale);
                    for (sum, value) in sums.iter_mut().zip(row) {
                        *sum = scale.mul_add(value, *sum);
                    }
                }
            }
            for (sums, y) in sums.iter().zip(ys.iter_mut()) {
                for (v, sum) in sums.iter().enumerate() {
                    sum.store(y.as_mut_ptr().add(column + v * V::LANES));
                }
            }
        }
    }
}

/// `y += Σ_r scales[r] · panel[r]` over the rows `r` whose bit is set in `picked`, the lowest first,
/// `W` registers at a time.
///
/// # Safety
/// - the CPU has the instruction set of `V`
/// - `panel` has `PANEL_ROWS * PANEL` values
#[inline(always)]
pub(super) unsafe fn axpy_picked<V: Vector, const W: usize>(
    scales: &[f32; PANEL_ROWS],
    picked: u64,
    panel: &[f32],
    y: &mut [f32; PANEL],
) {
    for column in (0..PANEL).step_by(W * V::LANES) {
        // SAFETY: the caller has the instructions and the panel; `column + W * LANES <= PANEL`
        // bounds accesses to `y` and to a panel row.
        unsafe {
            let mut sums = [V::zero(); W];
            for v in 0..W {
                sums[v] = V::load_f32(y.as_ptr().add(column + v * V::LANES).cast());
            }
            let mut left = picked;
            while left != 0 {
                let row = left.trailing_zeros() as usize;
                left &= left - 1;
                let scale = V::splat(scales[row]);
                let at = panel.as_ptr().add(row * PANEL + column);
                for v in 0..W {
                    sums[v] = scale.mul_add(V::load_f32(at.add(v * V::LANES).cast()), sums[v]);
                }
            }
            for v in 0..W {
                sums[v].store(y.as_mut_ptr().add(column + v * V::LANES));
            }
        }
    }
}
