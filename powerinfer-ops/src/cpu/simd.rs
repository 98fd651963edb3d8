//! The row primitives written once over a vector of f32 lanes; each instruction set supplies the
//! vector and stamps out its table with `simd_table!`. Here: the vector, the formats, and what all loops
//! share; products are in [`simd_dots`](super::simd_dots), weighted sums in
//! [`simd_sums`](super::simd_sums).
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

use super::Grouping;
use super::rows::AHEAD_BYTES;
use super::simd_sums::{add_steps, axpys_steps};

/// Bytes of a cache line, the unit of a prefetch.
pub(super) const LINE: usize = 64;
/// How far ahead of its use a row of a group is asked for: four rows make as much as the hardware has
/// on its way at once. A single row is asked for as far as [`rows`](super::rows) says.
const NEAR_BYTES: usize = 2 << 10;
/// Values that are loaded in one step: a block of the quantised formats, or an eighth of one.
pub(super) const STEP: usize = 32;
/// Steps of blocks that are taken before the next row.
pub(super) const TURN: usize = 4;
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
    /// A turn of [`axpys`](super::simd_sums::axpys) over Q4_0, whose blocks begin at `rows`. `y` may be left in another order, that
    /// [`settle_u4`](Self::settle_u4) undoes.
    #[inline(always)]
    unsafe fn axpys_u4<const R: usize>(
        scales: [Self; R],
        rows: [*const u8; R],
        y: &mut [[f32; STEP]; TURN],
    ) {
        // SAFETY: the caller has the instructions and the blocks.
        unsafe { axpys_steps::<Self, Q40, R>(scales, rows, y) }
    }
    /// `y += sum`, where [`axpys_u4`](Self::axpys_u4) made the sum.
    #[inline(always)]
    unsafe fn settle_u4(sum: &[[f32; STEP]; TURN], y: &mut [[f32; STEP]; TURN]) {
        // SAFETY: the caller has the instructions.
        unsafe { add_steps::<Self>(sum, y) }
    }
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
    const TURN: usize = TURN;
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

    /// `scale · lanes + sum`, rounded once.
    ///
    /// # Safety
    /// As for [`lanes`](Self::lanes).
    #[inline(always)]
    unsafe fn add_lanes(
        (scale, sum): (V, V),
        head: Self::Head,
        at: *const u8,
        step: usize,
        index: usize,
    ) -> V {
        // SAFETY: the caller's promise is the same.
        unsafe { scale.mul_add(Self::lanes(head, at, step, index), sum) }
    }

    /// `y += Σ_r scales[r] · rows[r]` for a turn of blocks that begin at `rows`. `y` may be left in
    /// another order, that [`settle`](Self::settle) undoes.
    ///
    /// # Safety
    /// - the CPU has the instruction set of `V`
    /// - a turn of blocks is readable in each row, and `STEPS` is 1
    #[inline(always)]
    unsafe fn axpys_blocks<const R: usize>(
        scales: [V; R],
        rows: [*const u8; R],
        y: &mut [[f32; STEP]; TURN],
    ) {
        // SAFETY: the caller's promise is the same.
        unsafe { axpys_steps::<V, Self, R>(scales, rows, y) }
    }

    /// `y += sum`, where [`axpys_blocks`](Self::axpys_blocks) made the sum.
    ///
    /// # Safety
    /// The CPU has the instruction set of `V`.
    #[inline(always)]
    unsafe fn settle(sum: &[[f32; STEP]; TURN], y: &mut [[f32; STEP]; TURN]) {
        // SAFETY: the caller has the instructions.
        unsafe { add_steps::<V>(sum, y) }
    }
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
plain_steps!(F32, 4, load_f32, ScatteredOrLong);
plain_steps!(F16, 2, load_f16, ScatteredOrLong);
plain_steps!(Bf16, 2, load_bf16, ScatteredOrLong);

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

    /// The product of the scales is exact, see
    /// [`round_scale`](crate::format::WeightFormat::round_scale), so that it does not matter which two
    /// factors are multiplied first.
    #[inline(always)]
    unsafe fn add_lanes(
        (factor, sum): (V, V),
        scale: V,
        at: *const u8,
        _: usize,
        index: usize,
    ) -> V {
        // SAFETY: the caller has the instructions and the bytes.
        unsafe {
            let numbers = V::load_i8(at.wrapping_add(2 + index * V::LANES));
            factor.mul(scale).mul_add(numbers, sum)
        }
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

    #[inline(always)]
    unsafe fn axpys_blocks<const R: usize>(
        scales: [V; R],
        rows: [*const u8; R],
        y: &mut [[f32; STEP]; TURN],
    ) {
        // SAFETY: the caller has the instructions and the blocks.
        unsafe { V::axpys_u4(scales, rows, y) }
    }

    #[inline(always)]
    unsafe fn settle(sum: &[[f32; STEP]; TURN], y: &mut [[f32; STEP]; TURN]) {
        // SAFETY: the caller has the instructions.
        unsafe { V::settle_u4(sum, y) }
    }
}

/// In how many of the turns of rows that are taken `R` at a time the same rows are asked for, further
/// on; in the others it is the rows ahead, from their beginning. Short rows ask for the rows ahead only.
#[inline(always)]
pub(super) fn own_turns<const R: usize>(n_turns: usize, turn_bytes: usize) -> usize {
    let near = if R == 1 { AHEAD_BYTES } else { NEAR_BYTES } / turn_bytes;
    let shortest = if R == 1 { near } else { 2 * near };
    if n_turns < shortest { 0 } else { n_turns - near }
}

/// Bytes of a turn of a row.
pub(super) const fn turn_bytes<V: Vector, F: Steps<V>>() -> usize {
    F::TURN * F::BYTES / F::STEPS
}

/// Asks for the lines of a turn of the row `ahead`. Their number does not vary, so that there is no
/// branch between them: counting the lines that are passed took f32 down from 38 to 34 GB/s in a
/// stream and from 34 to 31 scattered.
///
/// # Safety
/// The CPU has the instruction set of `V`.
#[inline(always)]
pub(super) unsafe fn prefetch_turn<V: Vector, F: Steps<V>>(ahead: &[u8], turn: usize) {
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
pub(super) unsafe fn heads<V: Vector, F: Steps<V>, const R: usize>(
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
pub(super) fn padded_row(rest: &[u8]) -> [u8; WIDEST] {
    let mut padded = [0; WIDEST];
    padded[..rest.len()].copy_from_slice(rest);
    padded
}

/// The end of a vector that fills no step, padded with zeros.
#[inline(always)]
pub(super) fn padded_values(rest: &[f32]) -> [f32; STEP] {
    let mut padded = [0.0; STEP];
    padded[..rest.len()].copy_from_slice(rest);
    padded
}
