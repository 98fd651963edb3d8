//! The bodies over registers, and what the exponential needs of each.
//!
//! A tile keeps `T · W` registers of sums, loads `W` registers of a row and multiplies them with one
//! weight of each query: `T · W` products for `W` loads. `T` and `W` follow from how many registers
//! there are; they change no sum.
//!
//! The exponential is the usual one: `e^x = 2^n · e^r` with `n = round(x / ln 2)`, so that
//! `|r| ≤ ln 2 / 2`, where the Taylor polynomial of degree seven is right to 6 parts in 10⁹. `x` is
//! never positive here, so `2^n` needs no care but for underflow: below −87.3, where the result
//! would not be a normal number, it is 0.

#![allow(clippy::needless_range_loop, reason = "plain loops, as in `simd`")]
#![allow(unsafe_code, reason = "raw loads; the table's safe wrappers assert every length")]

use std::f32::consts::LOG2_E;

use super::{Panel, SPAN, Weights};
use crate::bytes::LINE_BYTES;
use crate::cpu::simd::{STEP, Steps, Vector};

/// The least exponent with a normal result, a little rounded up.
const LOWEST: f32 = -87.3;
/// `ln 2` in two parts, the first with so few digits that its multiples by `n` are exact.
const LN2_HIGH: f32 = 355.0 / 512.0;
const LN2_LOW: f32 = -2.121_944_4e-4;
/// `1 / 7!`, `1 / 6!` … `1 / 0!`.
const TAYLOR: [f32; 8] =
    [1.0 / 5040.0, 1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0];

/// What the exponential needs beside the arithmetic of a [`Vector`].
///
/// # Safety
/// Every function requires that the CPU has the instruction set.
#[allow(clippy::missing_safety_doc, reason = "the one contract of all functions is stated above")]
pub(super) trait Exponential: Vector {
    /// The larger, and `other` where one is a NaN.
    unsafe fn max(self, other: Self) -> Self;
    /// The largest lane.
    unsafe fn largest(self) -> f32;
    /// To the nearest whole number.
    unsafe fn round(self) -> Self;
    /// `2^self` of whole numbers from −126 to 0.
    unsafe fn exp2_whole(self) -> Self;
    /// 0 where `x` is below `bound`, and `self` elsewhere, NaN included.
    unsafe fn zero_below(self, x: Self, bound: Self) -> Self;
}

/// Adds the rows of a panel to `T` outputs, `W` registers of a row at a time; returns the first
/// column that was left because it fills no `W` registers.
///
/// # Safety
/// - the CPU has the instruction set of `V`
/// - `panel` keeps what [`Panel::check`] asks for with `T` queries at `weights` and `ys`
#[inline(always)]
unsafe fn add_columns<V: Vector, F: Steps<V, Head = ()>, const T: usize, const W: usize>(
    weights: *const Weights,
    panel: &Panel<'_>,
    first: usize,
    ys: *mut f32,
) -> usize {
    let (stride, row_bytes) = (panel.stride, panel.stride * F::BYTES / STEP);
    let mut column = first;
    let (mut ahead, ahead_end) = (panel.ahead.as_ptr(), panel.ahead.as_ptr_range().end);
    while column + W * V::LANES <= panel.columns.end {
        // SAFETY: the caller has the instructions; `column` and its `W` registers end within a row,
        // `r` is a row of the panel and a weight of each query, `t` a query.
        unsafe {
            let mut sums = [[V::zero(); W]; T];
            for t in 0..T {
                for v in 0..W {
                    sums[t][v] = V::load_f32(ys.add(t * stride + column + v * V::LANES).cast());
                }
            }
            let mut row = panel.bytes.as_ptr().add(panel.rows.start * row_bytes);
            row = row.add(column * F::BYTES / STEP);
            for r in panel.rows.start..panel.rows.end {
                if ahead < ahead_end {
                    // as much as is loaded below
                    for line in 0..(W * V::LANES * F::BYTES / STEP).div_ceil(LINE_BYTES) {
                        V::prefetch(ahead.wrapping_add(line * LINE_BYTES));
                    }
                    ahead = ahead.wrapping_add(W * V::LANES * F::BYTES / STEP);
                }
                let mut values = [V::zero(); W];
                for v in 0..W {
                    values[v] = F::lanes((), row, 0, v);
                }
                for t in 0..T {
                    let weight = V::splat(*weights.add(t).cast::<f32>().add(r));
                    for v in 0..W {
                        sums[t][v] = weight.mul_add(values[v], sums[t][v]);
                    }
                }
                row = row.wrapping_add(row_bytes);
            }
            for t in 0..T {
                for v in 0..W {
                    sums[t][v].store(ys.add(t * stride + column + v * V::LANES));
                }
            }
        }
        column += W * V::LANES;
    }
    column
}

/// [`add_columns`] to the last column.
///
/// # Safety
/// As [`add_columns`].
#[inline(always)]
pub(super) unsafe fn add_to<V: Vector, F: Steps<V, Head = ()>, const T: usize, const W: usize>(
    weights: *const Weights,
    panel: &Panel<'_>,
    ys: *mut f32,
) {
    // SAFETY: as the caller's.
    unsafe {
        let rest = add_columns::<V, F, T, W>(weights, panel, panel.columns.start, ys);
        add_columns::<V, F, T, 1>(weights, panel, rest, ys);
    }
}

/// # Safety
/// The CPU has the instruction set of `V`.
#[inline(always)]
pub(super) unsafe fn scale_and_max<V: Exponential>(scores: &mut Weights, scale: f32) -> f32 {
    // SAFETY: the caller has the instructions; `p` and a register from it on are within the scores.
    unsafe {
        let (scale, mut max) = (V::splat(scale), V::splat(f32::NEG_INFINITY));
        for p in (0..SPAN).step_by(V::LANES) {
            let at = scores.as_mut_ptr().add(p);
            let scaled = V::load_f32(at.cast()).mul(scale);
            scaled.store(at);
            max = Exponential::max(scaled, max);
        }
        max.largest()
    }
}

/// # Safety
/// The CPU has the instruction set of `V`.
#[inline(always)]
pub(super) unsafe fn exp_and_sum<V: Exponential>(scores: &mut Weights, max: f32) -> f32 {
    // SAFETY: the caller has the instructions; `p` and a register from it on are within the scores.
    unsafe {
        let (max, mut sum) = (V::splat(-max), V::zero());
        for p in (0..SPAN).step_by(V::LANES) {
            let at = scores.as_mut_ptr().add(p);
            let e = exp(V::load_f32(at.cast()).add(max));
            e.store(at);
            sum = sum.add(e);
        }
        sum.sum()
    }
}

/// `e^x` of numbers that are not positive; a NaN stays one.
///
/// # Safety
/// The CPU has the instruction set of `V`.
#[inline(always)]
unsafe fn exp<V: Exponential>(x: V) -> V {
    // SAFETY: the caller has the instructions.
    unsafe {
        let lowest = V::splat(LOWEST);
        // in this order a NaN comes through
        let bounded = Exponential::max(lowest, x);
        let n = bounded.mul(V::splat(LOG2_E)).round();
        let r = n.mul_add(V::splat(-LN2_HIGH), bounded);
        let r = n.mul_add(V::splat(-LN2_LOW), r);
        let mut e = V::splat(TAYLOR[0]);
        for i in 1..TAYLOR.len() {
            e = e.mul_add(r, V::splat(TAYLOR[i]));
        }
        e.mul(n.exp2_whole()).zero_below(x, lowest)
    }
}

/// Stamps out the table of one instruction set: safe functions that assert what the bodies rely on
/// and enter one that has the instructions. A tile of eight, four, two and one queries takes as many
/// registers of a row as given.
macro_rules! attention_table {
    ($table:ident, $module:ident, $vector:ty, $features:literal, [$w8:literal, $w4:literal, $w2:literal, $w1:literal]) => {
        /// Handed out by `RowKernels::available` alone, after it saw the instructions.
        pub(in crate::cpu) static $table: AttentionRows = AttentionRows {
            add_f32: $module::add::<F32>,
            add_f16: $module::add::<F16>,
            scale_and_max: $module::scale_and_max,
            exp_and_sum: $module::exp_and_sum,
        };

        mod $module {
            use crate::cpu::attention_rows::simd::{self, add_to};
            use crate::cpu::attention_rows::{Panel, Weights};
            use crate::cpu::simd::{STEP, Steps};

            use super::*;

            pub(super) fn add<F: Steps<$vector, Head = ()>>(
                weights: &[Weights],
                panel: Panel<'_>,
                ys: &mut [f32],
            ) {
                #[target_feature(enable = $features)]
                fn inner<F: Steps<$vector, Head = ()>>(
                    weights: &[Weights],
                    panel: &Panel<'_>,
                    ys: &mut [f32],
                ) {
                    let (mut weights, mut ys) = (weights, ys);
                    while !weights.is_empty() {
                        let n = 1 << weights.len().ilog2();
                        let (at, y) = (weights.as_ptr(), ys.as_mut_ptr());
                        // SAFETY: this function has the instructions; its caller checked the panel
                        // for all queries, and `n` are left at `at` and `y`.
                        unsafe {
                            match n {
                                8 => add_to::<$vector, F, 8, $w8>(at, panel, y),
                                4 => add_to::<$vector, F, 4, $w4>(at, panel, y),
                                2 => add_to::<$vector, F, 2, $w2>(at, panel, y),
                                _ => add_to::<$vector, F, 1, $w1>(at, panel, y),
                            }
                        }
                        weights = &weights[n..];
                        ys = &mut ys[n * panel.stride..];
                    }
                }
                panel.check(weights, ys, F::BYTES / STEP);
                // SAFETY: the table is handed out only where the instructions exist; `check` bounds
                // the accesses.
                unsafe { inner::<F>(weights, &panel, ys) }
            }

            pub(super) fn scale_and_max(scores: &mut Weights, scale: f32) -> f32 {
                #[target_feature(enable = $features)]
                fn inner(scores: &mut Weights, scale: f32) -> f32 {
                    // SAFETY: this function has the instructions.
                    unsafe { simd::scale_and_max::<$vector>(scores, scale) }
                }
                // SAFETY: the table is handed out only where the instructions exist.
                unsafe { inner(scores, scale) }
            }

            pub(super) fn exp_and_sum(scores: &mut Weights, max: f32) -> f32 {
                #[target_feature(enable = $features)]
                fn inner(scores: &mut Weights, max: f32) -> f32 {
                    // SAFETY: this function has the instructions.
                    unsafe { simd::exp_and_sum::<$vector>(scores, max) }
                }
                // SAFETY: the table is handed out only where the instructions exist.
                unsafe { inner(scores, max) }
            }
        }
    };
}

pub(super) use attention_table;
