//! The row primitives written once over a vector of f32 lanes; each instruction set supplies the
//! vector and stamps out its table with `simd_table!`.
//!
//! The idea: a row is read once, a vector a step, widened to f32 in a register and fused into one
//! accumulator. The naive loop is [`BlockFormat::dot`](crate::format::BlockFormat::dot). It may
//! be rewritten this way because
//! - two accumulators per row, taken in turn, added up with their lanes at the end, are one fixed
//!   order of summation, the same alone and in a tile;
//! - the end of a row that fills no vector is copied out and padded with zeros, which add nothing,
//!   so nothing is read beyond the row;
//! - a prefetch changes no value and never faults.
//!
//! Intrinsics must end up inlined in a function that has the instructions, or each becomes a call
//! (seen: Q4_0 eight times slower). Closures, and with them `array::map` and `from_fn`, get in the
//! way of that, so the loops below are plain ones.

#![allow(clippy::needless_range_loop, reason = "plain loops, see below")]
#![allow(unsafe_code, reason = "raw loads; the table's safe wrappers assert every length")]

use std::mem::MaybeUninit;
use std::ops::Range;

use super::{Grouping, PANEL, PANEL_ROWS, PanelTile, TILE_TOKENS};

/// Bytes of a cache line, the unit of a prefetch.
pub(super) const LINE: usize = 64;
/// How far ahead of its use a row of a group is asked for: four rows make as much as the hardware has
/// on its way at once. A single row is asked for as far as [`rows`](super::rows) says.
const NEAR_BYTES: usize = 2 << 10;
/// Accumulators of a dot product: two hide the latency of the fused multiply-add well enough for
/// a row that streams from memory.
const CHAINS: usize = 2;
/// Tiles of [`row_tiles`] whose sums are kept at once, and steps of columns between them: 32 KiB of
/// rows and tokens.
const TILES: usize = 24;
const COLUMN_STEPS: usize = 32;
/// Values that are loaded in one step: a block of the quantised formats, or an eighth of one.
pub(super) const STEP: usize = 32;
/// Bytes of a step of the widest format.
const WIDEST: usize = STEP * 4;

/// A vector register of f32 lanes.
///
/// # Safety
/// Every function requires that the CPU has the instruction set; loads and stores that the bytes
/// of all lanes at `at` are readable or writable. No alignment is required.
#[allow(clippy::missing_safety_doc, reason = "the one contract of all functions is stated above")]
pub(super) trait Vector: Copy {
    /// f32 values in a register.
    const LANES: usize;
    unsafe fn zero() -> Self;
    unsafe fn splat(value: f32) -> Self;
    unsafe fn load_f32(at: *const u8) -> Self;
    unsafe fn load_f16(at: *const u8) -> Self;
    unsafe fn load_bf16(at: *const u8) -> Self;
    /// Signed bytes.
    unsafe fn load_i8(at: *const u8) -> Self;
    /// What turns four-bit numbers into scaled values: the scale, or a table of all sixteen.
    type Nibbles: Copy;
    unsafe fn nibbles(scale: Self) -> Self::Nibbles;
    /// `scale · (number − 8)` of the low or high halves of `LANES` bytes.
    unsafe fn load_u4(nibbles: Self::Nibbles, at: *const u8, high: bool) -> Self;
    /// One f16 in all lanes.
    unsafe fn splat_f16(at: *const u8) -> Self;
    /// As many integers of 32 bits as there are lanes.
    type Ints: Copy;
    /// Unsigned bytes.
    unsafe fn load_u8(at: *const u8) -> Self::Ints;
    /// `(ints >> shift) & mask`
    unsafe fn bits(ints: Self::Ints, shift: u32, mask: i32) -> Self::Ints;
    /// Bit `i` of `word` in lane `i`, as 0 or 1.
    unsafe fn spread_bits(word: u32) -> Self::Ints;
    /// `low | (high << shift)`
    unsafe fn join(low: Self::Ints, high: Self::Ints, shift: u32) -> Self::Ints;
    unsafe fn minus(ints: Self::Ints, bias: i32) -> Self::Ints;
    unsafe fn to_f32(ints: Self::Ints) -> Self;
    unsafe fn mul(self, factor: Self) -> Self;
    unsafe fn add(self, other: Self) -> Self;
    unsafe fn store(self, at: *mut f32);
    /// `self · factor + addend`, rounded once.
    unsafe fn mul_add(self, factor: Self, addend: Self) -> Self;
    /// The sum of the lanes, in one fixed order.
    unsafe fn sum(self) -> f32;
    /// [`sum`](Self::sum) of four vectors, to the same bits.
    #[inline(always)]
    unsafe fn sum4(v: [Self; 4]) -> [f32; 4] {
        // SAFETY: the caller has the instructions.
        unsafe { [v[0].sum(), v[1].sum(), v[2].sum(), v[3].sum()] }
    }
    /// Asks for the line at `at`, which need not be readable.
    unsafe fn prefetch(at: *const u8);
}

/// How the values of a format become f32 lanes, a step of [`STEP`] values at a time.
///
/// A row is a sequence of blocks of `STEPS` steps each. A step is told where its block begins and
/// which of its steps it is, and finds what it needs there.
pub(super) trait Steps<V: Vector> {
    /// Bytes of a block.
    const BYTES: usize;
    /// Steps in a block.
    const STEPS: usize = 1;
    /// Steps of a row that are taken before the next row.
    const TURN: usize = 4;
    /// When several rows are better taken at once.
    const GROUPING: Grouping = Grouping::Always;
    /// What the vectors of a step share: a scale, or nothing.
    type Head: Copy;

    /// # Safety
    /// - the CPU has the instruction set of `V`
    /// - `BYTES` bytes at `at` are readable, and `step < STEPS`
    unsafe fn head(at: *const u8, step: usize) -> Self::Head;

    /// The values `index * V::LANES ..` of a step.
    ///
    /// # Safety
    /// - the CPU has the instruction set of `V`
    /// - `BYTES` bytes at `at` are readable, `step < STEPS`, and `index * V::LANES < STEP`
    unsafe fn lanes(head: Self::Head, at: *const u8, step: usize, index: usize) -> V;
}

pub(super) struct F32;
pub(super) struct F16;
pub(super) struct Bf16;
pub(super) struct Q80;
pub(super) struct Q40;

/// A format without blocks.
macro_rules! plain_steps {
    ($format:ident, $bytes:literal, $load:ident, $grouping:ident) => {
        impl<V: Vector> Steps<V> for $format {
            const BYTES: usize = STEP * $bytes;
            const TURN: usize = 1;
            const GROUPING: Grouping = Grouping::$grouping;
            type Head = ();

            #[inline(always)]
            unsafe fn head(_: *const u8, _: usize) {}

            #[inline(always)]
            unsafe fn lanes((): (), at: *const u8, _: usize, index: usize) -> V {
                // SAFETY: the caller has the instructions and the bytes.
                unsafe { V::$load(at.wrapping_add(index * V::LANES * $bytes)) }
            }
        }
    };
}
plain_steps!(F32, 4, load_f32, Scattered);
plain_steps!(F16, 2, load_f16, Scattered);
plain_steps!(Bf16, 2, load_bf16, Scattered);

impl<V: Vector> Steps<V> for Q80 {
    const BYTES: usize = 34;
    type Head = V;

    #[inline(always)]
    unsafe fn head(at: *const u8, _: usize) -> V {
        // SAFETY: the caller has the instructions and the bytes.
        unsafe { V::splat_f16(at) }
    }

    #[inline(always)]
    unsafe fn lanes(scale: V, at: *const u8, _: usize, index: usize) -> V {
        // SAFETY: the caller has the instructions and the bytes.
        unsafe { V::load_i8(at.wrapping_add(2 + index * V::LANES)).mul(scale) }
    }
}

impl<V: Vector> Steps<V> for Q40 {
    const BYTES: usize = 18;
    type Head = V::Nibbles;

    #[inline(always)]
    unsafe fn head(at: *const u8, _: usize) -> V::Nibbles {
        // SAFETY: the caller has the instructions and the bytes.
        unsafe { V::nibbles(V::splat_f16(at)) }
    }

    #[inline(always)]
    unsafe fn lanes(nibbles: V::Nibbles, at: *const u8, _: usize, index: usize) -> V {
        // the low halves of sixteen bytes, then the high halves
        let value = index * V::LANES;
        // SAFETY: the caller has the instructions and the bytes.
        unsafe { V::load_u4(nibbles, at.wrapping_add(2 + value % 16), value >= 16) }
    }
}

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
        if R > 1 {
            dots_turns::<V, F, R>(rows, (rows, n_steps / F::TURN - own), 0..own, x, &mut sums);
        }
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

/// `y += Σ_r scales[r] · rows[r]` in order of `r`, with the rows `ahead` on their way into the cache
/// meanwhile.
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
        if R > 1 {
            axpys_turns::<V, F, R>(splats, rows, (rows, n_turns - own), 0..own, y);
        }
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

/// Some turns of [`axpys`], as [`dots_turns`].
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
            for step in turn * F::TURN..(turn + 1) * F::TURN {
                let rows = rows.map(|row| row.as_ptr().add(step / F::STEPS * F::BYTES));
                axpys_step::<V, F, R>(scales, rows, step % F::STEPS, &mut *y.add(step));
            }
        }
    }
}

/// One step of [`axpys`].
///
/// # Safety
/// - the CPU has the instruction set of `V`
/// - each row has a block of `F` readable, and `step < F::STEPS`
#[inline(always)]
unsafe fn axpys_step<V: Vector, F: Steps<V>, const R: usize>(
    scales: [V; R],
    rows: [*const u8; R],
    step: usize,
    y: &mut [f32; STEP],
) {
    // SAFETY: the caller has the instructions and the steps; `index` stays within a step.
    unsafe {
        let heads = heads::<V, F, R>(rows, step);
        for index in 0..STEP / V::LANES {
            let at = y.as_mut_ptr().add(index * V::LANES);
            let mut sum = V::load_f32(at.cast());
            for r in 0..R {
                sum = scales[r].mul_add(F::lanes(heads[r], rows[r], step, index), sum);
            }
            sum.store(at);
        }
    }
}

/// In how many of the turns of rows that are taken `R` at a time the same rows are asked for,
/// [`NEAR_BYTES`] further on; in the others it is the rows ahead, from their beginning. A row alone and
/// short ones ask for the rows ahead only.
#[inline(always)]
pub(super) fn own_turns<const R: usize>(n_turns: usize, turn_bytes: usize) -> usize {
    let near = NEAR_BYTES / turn_bytes;
    if R == 1 || n_turns < 2 * near { 0 } else { n_turns - near }
}

/// Bytes of a turn of a row.
const fn turn_bytes<V: Vector, F: Steps<V>>() -> usize {
    F::TURN * F::BYTES / F::STEPS
}

/// Asks for the lines of a turn of the row `ahead`. Their number does not vary, so that there is no
/// branch between them: counting the lines that are passed took f32 down from 38 to 34 GB/s in a
/// stream and from 34 to 31 scattered.
///
/// # Safety
/// The CPU has the instruction set of `V`.
#[inline(always)]
unsafe fn prefetch_turn<V: Vector, F: Steps<V>>(ahead: &[u8], turn: usize) {
    let bytes = turn_bytes::<V, F>();
    for line in 0..bytes.div_ceil(LINE) {
        let at = ahead.as_ptr().wrapping_add(turn * bytes + line * LINE);
        // SAFETY: the caller has the instructions; a prefetch accesses no memory.
        unsafe { V::prefetch(at) };
    }
}

/// What the vectors of a step share, for each row.
///
/// # Safety
/// - the CPU has the instruction set of `V`
/// - each row has a block of `F` readable, and `step < F::STEPS`
#[inline(always)]
unsafe fn heads<V: Vector, F: Steps<V>, const R: usize>(
    rows: [*const u8; R],
    step: usize,
) -> [F::Head; R] {
    // SAFETY: the caller has the instructions and the steps.
    unsafe {
        let mut heads = [F::head(rows[0], step); R];
        for r in 1..R {
            heads[r] = F::head(rows[r], step);
        }
        heads
    }
}

/// A row as f32.
///
/// # Safety
/// - the CPU has the instruction set of `V`
/// - `row` holds as many values of `F` as `values`
#[inline(always)]
pub(super) unsafe fn decode<V: Vector, F: Steps<V>>(row: &[u8], values: &mut [f32]) {
    let (steps, rest) = values.as_chunks_mut::<STEP>();
    // SAFETY: the caller has the instructions; each step of `values` has one of `row`, and what is
    // left of it is copied to a padded step of its own.
    unsafe {
        let n_steps = steps.len();
        for (step, values) in steps.iter_mut().enumerate() {
            let block = row.as_ptr().add(step / F::STEPS * F::BYTES);
            decode_step::<V, F>(block, step % F::STEPS, values);
        }
        // longer blocks leave no rest
        if F::STEPS == 1 && !rest.is_empty() {
            let mut values = [0.0; STEP];
            let row = padded_row(&row[n_steps * F::BYTES..]);
            decode_step::<V, F>(row.as_ptr(), 0, &mut values);
            rest.copy_from_slice(&values[..rest.len()]);
        }
    }
}

/// One step of [`decode`].
///
/// # Safety
/// - the CPU has the instruction set of `V`
/// - a block of `F` is readable at `row`, and `step < F::STEPS`
#[inline(always)]
unsafe fn decode_step<V: Vector, F: Steps<V>>(
    row: *const u8,
    step: usize,
    values: &mut [f32; STEP],
) {
    // SAFETY: the caller has the instructions and the step; `index` stays within a step.
    unsafe {
        let head = F::head(row, step);
        for index in 0..STEP / V::LANES {
            F::lanes(head, row, step, index).store(values.as_mut_ptr().add(index * V::LANES));
        }
    }
}

/// The end of a row that fills no step, padded: every format without blocks has zero bytes for 0.
#[inline(always)]
fn padded_row(rest: &[u8]) -> [u8; WIDEST] {
    let mut padded = [0; WIDEST];
    padded[..rest.len()].copy_from_slice(rest);
    padded
}

/// The end of a vector that fills no step, padded with zeros.
#[inline(always)]
fn padded_values(rest: &[f32]) -> [f32; STEP] {
    let mut padded = [0.0; STEP];
    padded[..rest.len()].copy_from_slice(rest);
    padded
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
