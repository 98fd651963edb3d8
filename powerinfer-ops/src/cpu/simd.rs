//! The row primitives written once over a vector of f32 lanes; each instruction set supplies the
//! vector and stamps out its table with [`simd_table!`].
//!
//! The idea: a row is read once, a vector a step, widened to f32 in a register and fused into one
//! accumulator. The naive loop is [`BlockFormat::dot`](crate::format::BlockFormat::dot). It may
//! be rewritten this way because
//! - one accumulator per row, its lanes added up at the end, is one fixed order of summation;
//!   four rows at once give four independent chains, which hide the latency of the fused
//!   multiply-add without changing that order;
//! - the end of a row that fills no vector is copied out and padded with zeros, which add nothing,
//!   so nothing is read beyond the row;
//! - a prefetch changes no value and never faults.

#![allow(unsafe_code, reason = "raw loads; the table's safe wrappers assert every length")]

use super::{GROUP, PANEL};

/// Bytes of a cache line, the unit of a prefetch.
const LINE: usize = 64;
/// Bytes of the widest vector of f32.
const WIDEST: usize = 64;

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
    unsafe fn store(self, at: *mut f32);
    /// `self · factor + addend`, rounded once.
    unsafe fn mul_add(self, factor: Self, addend: Self) -> Self;
    /// The sum of the lanes, in one fixed order.
    unsafe fn sum(self) -> f32;
    /// Asks for the line at `at` in the L2 cache. `at` need not be readable.
    unsafe fn prefetch(at: *const u8);
}

/// How the values of a format become f32 lanes.
pub(super) trait Lanes<V: Vector> {
    /// Bytes of a value.
    const BYTES: usize;

    /// # Safety
    /// - the CPU has the instruction set of `V`
    /// - `V::LANES * BYTES` bytes at `at` are readable
    unsafe fn load(at: *const u8) -> V;

    /// The first `n` values at `at`, the other lanes zero.
    ///
    /// # Safety
    /// - the CPU has the instruction set of `V`
    /// - `n * BYTES` bytes at `at` are readable, and `n <= V::LANES`
    #[inline(always)]
    unsafe fn load_part(at: *const u8, n: usize) -> V {
        let mut padded = [0u8; WIDEST];
        // SAFETY: the caller has the instructions and `n * BYTES <= WIDEST` readable bytes; all
        // formats encode zero as zero bytes.
        unsafe {
            std::ptr::copy_nonoverlapping(at, padded.as_mut_ptr(), n * Self::BYTES);
            Self::load(padded.as_ptr())
        }
    }
}

pub(super) struct F32;
pub(super) struct F16;
pub(super) struct Bf16;

macro_rules! lanes {
    ($format:ident, $bytes:literal, $load:ident) => {
        impl<V: Vector> Lanes<V> for $format {
            const BYTES: usize = $bytes;

            #[inline(always)]
            unsafe fn load(at: *const u8) -> V {
                // SAFETY: the caller has the instructions and the bytes.
                unsafe { V::$load(at) }
            }
        }
    };
}
lanes!(F32, 4, load_f32);
lanes!(F16, 2, load_f16);
lanes!(Bf16, 2, load_bf16);

/// Dot products of `R` rows with `T` vectors, as `[t][r]`.
///
/// # Safety
/// - the CPU has the instruction set of `V`
/// - all `xs` have one length, and each row has that length times `F::BYTES`
#[inline(always)]
pub(super) unsafe fn dots<V: Vector, F: Lanes<V>, const R: usize, const T: usize>(
    rows: [&[u8]; R],
    ahead: Option<[&[u8]; R]>,
    xs: [&[f32]; T],
) -> [[f32; R]; T] {
    let n = xs[0].len();
    let x_at = |x: &[f32], i: usize| x.as_ptr().wrapping_add(i).cast::<u8>();
    let row_at = |row: &[u8], i: usize| row.as_ptr().wrapping_add(i * F::BYTES);
    // SAFETY: the caller has the instructions; `i + LANES <= n` bounds the full loads of rows and
    // vectors, `n - i` the last ones, and prefetches access no memory.
    unsafe {
        let mut sums = [[V::zero(); R]; T];
        let mut i = 0;
        while i + V::LANES <= n {
            if let Some(ahead) = ahead
                && (i * F::BYTES).is_multiple_of(LINE)
            {
                for row in ahead {
                    V::prefetch(row_at(row, i));
                }
            }
            let values = rows.map(|row| F::load(row_at(row, i)));
            for (sums, x) in sums.iter_mut().zip(xs) {
                let x = V::load_f32(x_at(x, i));
                for (sum, value) in sums.iter_mut().zip(values) {
                    *sum = value.mul_add(x, *sum);
                }
            }
            i += V::LANES;
        }
        if i < n {
            let values = rows.map(|row| F::load_part(row_at(row, i), n - i));
            for (sums, x) in sums.iter_mut().zip(xs) {
                let x = <F32 as Lanes<V>>::load_part(x_at(x, i), n - i);
                for (sum, value) in sums.iter_mut().zip(values) {
                    *sum = value.mul_add(x, *sum);
                }
            }
        }
        sums.map(|sums| sums.map(|sum| sum.sum()))
    }
}

/// `y += Σ_r scales[r] · rows[r]` in order of `r`.
///
/// # Safety
/// - the CPU has the instruction set of `V`
/// - each row has the length of `y` times `F::BYTES`
#[inline(always)]
pub(super) unsafe fn axpys<V: Vector, F: Lanes<V>, const R: usize>(
    scales: [f32; R],
    rows: [&[u8]; R],
    ahead: Option<[&[u8]; R]>,
    y: &mut [f32],
) {
    let n = y.len();
    let row_at = |row: &[u8], i: usize| row.as_ptr().wrapping_add(i * F::BYTES);
    // SAFETY: the caller has the instructions; `i + LANES <= n` bounds the full loads and stores,
    // `n - i` the last ones, and prefetches access no memory.
    unsafe {
        let scales = scales.map(|scale| V::splat(scale));
        let mut i = 0;
        while i + V::LANES <= n {
            if let Some(ahead) = ahead
                && (i * F::BYTES).is_multiple_of(LINE)
            {
                for row in ahead {
                    V::prefetch(row_at(row, i));
                }
            }
            let mut sum = V::load_f32(y.as_ptr().add(i).cast());
            for (scale, row) in scales.iter().zip(rows) {
                sum = scale.mul_add(F::load(row_at(row, i)), sum);
            }
            sum.store(y.as_mut_ptr().add(i));
            i += V::LANES;
        }
        if i < n {
            let mut sum = <F32 as Lanes<V>>::load_part(y.as_ptr().add(i).cast(), n - i);
            for (scale, row) in scales.iter().zip(rows) {
                sum = scale.mul_add(F::load_part(row_at(row, i), n - i), sum);
            }
            store_part(sum, &mut y[i..]);
        }
    }
}

/// A row as f32.
///
/// # Safety
/// - the CPU has the instruction set of `V`
/// - `row` has the length of `values` times `F::BYTES`
#[inline(always)]
pub(super) unsafe fn decode<V: Vector, F: Lanes<V>>(row: &[u8], values: &mut [f32]) {
    let n = values.len();
    let row_at = |i: usize| row.as_ptr().wrapping_add(i * F::BYTES);
    let mut i = 0;
    // SAFETY: the caller has the instructions; `i + LANES <= n` bounds the full accesses, `n - i`
    // the last ones.
    unsafe {
        while i + V::LANES <= n {
            F::load(row_at(i)).store(values.as_mut_ptr().add(i));
            i += V::LANES;
        }
        if i < n {
            store_part(F::load_part(row_at(i), n - i), &mut values[i..]);
        }
    }
}

/// The first lanes of a vector.
///
/// # Safety
/// The CPU has the instruction set of `V`.
#[inline(always)]
unsafe fn store_part<V: Vector>(vector: V, out: &mut [f32]) {
    let mut lanes = [0f32; WIDEST / 4];
    // SAFETY: the caller has the instructions; `lanes` holds the widest vector.
    unsafe { vector.store(lanes.as_mut_ptr()) };
    out.copy_from_slice(&lanes[..out.len()]);
}

/// `ys[t] += Σ_r scales[t][r] · panel[r]` in order of `r`, `W` registers of a panel row at a time.
///
/// # Safety
/// - the CPU has the instruction set of `V`
/// - each `scales[t]` has `panel.len() / PANEL` values
#[inline(always)]
pub(super) unsafe fn axpy_tile<V: Vector, const W: usize>(
    scales: [&[f32]; GROUP],
    panel: &[f32],
    ys: &mut [[f32; PANEL]; GROUP],
) {
    let n_rows = panel.len() / PANEL;
    for column in (0..PANEL).step_by(W * V::LANES) {
        // SAFETY: the caller has the instructions; `column + W * LANES <= PANEL` bounds accesses
        // to `ys` and to a panel row, `r < n_rows` the row and the scales.
        unsafe {
            let mut sums = [[V::zero(); W]; GROUP];
            for (sums, y) in sums.iter_mut().zip(ys.iter()) {
                for (v, sum) in sums.iter_mut().enumerate() {
                    *sum = V::load_f32(y.as_ptr().add(column + v * V::LANES).cast());
                }
            }
            for r in 0..n_rows {
                let scales = scales.map(|scales| *scales.get_unchecked(r));
                // most neurons fire for none of four tokens, and adding zeros changes nothing
                if scales == [0.0; GROUP] {
                    continue;
                }
                let row: [V; W] = std::array::from_fn(|v| {
                    V::load_f32(panel.as_ptr().add(r * PANEL + column + v * V::LANES).cast())
                });
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

/// Stamps out the safe primitives of one instruction set: each asserts the lengths and enters a
/// function that has the instructions. `$tile_tokens` vectors of a tile and `$panel_registers`
/// registers of a panel row are taken at once, as many as the register file holds.
macro_rules! simd_table {
    ($name:literal, $vector:ty, $features:literal, $tile_tokens:literal, $panel_registers:literal) => {
        /// Handed out by `RowKernels::available` alone, after it saw the instructions.
        pub(super) static TABLE: Table = Table {
            name: $name,
            f32: primitives::<simd::F32>(),
            f16: primitives::<simd::F16>(),
            bf16: primitives::<simd::Bf16>(),
            axpy_tile,
            fold,
        };

        const fn primitives<F: Lanes<$vector>>() -> RowPrimitives {
            RowPrimitives {
                dot: dot::<F>,
                dot_group: dot_group::<F>,
                dot_tile: dot_tile::<F>,
                axpy: axpy::<F>,
                axpy_group: axpy_group::<F>,
                decode: decode::<F>,
            }
        }

        fn check<F: Lanes<$vector>>(rows: &[&[u8]], n: usize) {
            for row in rows {
                assert_eq!(row.len(), n * F::BYTES, "a row holds as many values as the vector");
            }
        }

        fn dot<F: Lanes<$vector>>(row: &[u8], x: &[f32]) -> f32 {
            #[target_feature(enable = $features)]
            fn inner<F: Lanes<$vector>>(row: &[u8], x: &[f32]) -> f32 {
                // SAFETY: this function has the instructions; its caller checked the lengths.
                let [[sum]] = unsafe { simd::dots::<$vector, F, 1, 1>([row], None, [x]) };
                sum
            }
            check::<F>(&[row], x.len());
            // SAFETY: the table is handed out only where the instructions exist; `check` bounds
            // the reads.
            unsafe { inner::<F>(row, x) }
        }

        fn dot_group<F: Lanes<$vector>>(rows: Rows<'_>, ahead: Rows<'_>, x: &[f32]) -> Group {
            #[target_feature(enable = $features)]
            fn inner<F: Lanes<$vector>>(rows: Rows<'_>, ahead: Rows<'_>, x: &[f32]) -> Group {
                // SAFETY: this function has the instructions; its caller checked the lengths.
                let [sums] = unsafe { simd::dots::<$vector, F, GROUP, 1>(rows, Some(ahead), [x]) };
                sums
            }
            check::<F>(&rows, x.len());
            // SAFETY: the table is handed out only where the instructions exist; `check` bounds
            // the reads.
            unsafe { inner::<F>(rows, ahead, x) }
        }

        fn dot_tile<F: Lanes<$vector>>(rows: Rows<'_>, xs: Vectors<'_>) -> [Group; GROUP] {
            #[target_feature(enable = $features)]
            fn inner<F: Lanes<$vector>>(
                rows: Rows<'_>,
                xs: [&[f32]; $tile_tokens],
            ) -> [Group; $tile_tokens] {
                // SAFETY: this function has the instructions; its caller checked the lengths.
                unsafe { simd::dots::<$vector, F, GROUP, $tile_tokens>(rows, None, xs) }
            }
            for x in xs {
                assert_eq!(x.len(), xs[0].len(), "the vectors of a tile have one length");
            }
            check::<F>(&rows, xs[0].len());
            let mut tile = [[0.0; GROUP]; GROUP];
            let (parts, _) = xs.as_chunks::<$tile_tokens>();
            let (tiles, _) = tile.as_chunks_mut::<$tile_tokens>();
            for (tile, xs) in tiles.iter_mut().zip(parts) {
                // SAFETY: the table is handed out only where the instructions exist; `check` and
                // the loop above bound the reads.
                *tile = unsafe { inner::<F>(rows, *xs) };
            }
            tile
        }

        fn axpy<F: Lanes<$vector>>(scale: f32, row: &[u8], y: &mut [f32]) {
            #[target_feature(enable = $features)]
            fn inner<F: Lanes<$vector>>(scale: f32, row: &[u8], y: &mut [f32]) {
                // SAFETY: this function has the instructions; its caller checked the lengths.
                unsafe { simd::axpys::<$vector, F, 1>([scale], [row], None, y) }
            }
            check::<F>(&[row], y.len());
            // SAFETY: the table is handed out only where the instructions exist; `check` bounds
            // the accesses.
            unsafe { inner::<F>(scale, row, y) }
        }

        fn axpy_group<F: Lanes<$vector>>(
            scales: Group,
            rows: Rows<'_>,
            ahead: Rows<'_>,
            y: &mut [f32],
        ) {
            #[target_feature(enable = $features)]
            fn inner<F: Lanes<$vector>>(
                scales: Group,
                rows: Rows<'_>,
                ahead: Rows<'_>,
                y: &mut [f32],
            ) {
                // SAFETY: this function has the instructions; its caller checked the lengths.
                unsafe { simd::axpys::<$vector, F, GROUP>(scales, rows, Some(ahead), y) }
            }
            check::<F>(&rows, y.len());
            // SAFETY: the table is handed out only where the instructions exist; `check` bounds
            // the accesses.
            unsafe { inner::<F>(scales, rows, ahead, y) }
        }

        fn decode<F: Lanes<$vector>>(row: &[u8], values: &mut [f32]) {
            #[target_feature(enable = $features)]
            fn inner<F: Lanes<$vector>>(row: &[u8], values: &mut [f32]) {
                // SAFETY: this function has the instructions; its caller checked the lengths.
                unsafe { simd::decode::<$vector, F>(row, values) }
            }
            check::<F>(&[row], values.len());
            // SAFETY: the table is handed out only where the instructions exist; `check` bounds
            // the accesses.
            unsafe { inner::<F>(row, values) }
        }

        fn axpy_tile(scales: Vectors<'_>, panel: &[f32], ys: &mut PanelTile) {
            #[target_feature(enable = $features)]
            fn inner(scales: Vectors<'_>, panel: &[f32], ys: &mut PanelTile) {
                // SAFETY: this function has the instructions; its caller checked the lengths.
                unsafe { simd::axpy_tile::<$vector, $panel_registers>(scales, panel, ys) }
            }
            for scales in scales {
                assert_eq!(scales.len() * PANEL, panel.len(), "one scale a panel row");
            }
            // SAFETY: the table is handed out only where the instructions exist; the loop above
            // bounds the accesses.
            unsafe { inner(scales, panel, ys) }
        }
    };
}
pub(super) use simd_table;
