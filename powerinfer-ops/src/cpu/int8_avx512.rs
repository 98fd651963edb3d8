//! Products of whole numbers with AVX-512 VNNI: 128 weights in two instructions.
//!
//! The instruction multiplies unsigned bytes with signed ones, so a weight is read as
//! `number + offset`, and `offset · Σ x` is taken off again by starting the sum at
//! [`InputGroup::corrections`]. A lane holds eight products of one block; the lanes are scaled and
//! added up in f32.

#![allow(unsafe_code, reason = "intrinsics")]
#![allow(clippy::needless_range_loop, reason = "closures keep intrinsics from being inlined")]

use std::arch::x86_64::*;

use super::int8::{BLOCKS, InputGroup, WeightGroup};
use super::simd::{self, LINE, Vector};
use super::tiles::{int8_rows, tiles};
use super::{GROUP, Grouping, Int8Products, Int8Table, RowValues, Rows};
use crate::format::{NumberFormat, Q40, Q80};

/// The products of every format of whole numbers.
pub(super) const INT8: Int8Table = Int8Table { q8_0: products::<Q80>(), q4_0: products::<Q40>() };

/// The products of a format.
const fn products<F: Groups>() -> Int8Products {
    Int8Products {
        dot: dot::<F>,
        dot_group: dot_group::<F>,
        grouping: Grouping::Scattered,
        unpack: unpack::<F>,
        block,
        gather,
    }
}

/// How four blocks of a format become registers.
trait Groups: NumberFormat {
    /// Bytes of four blocks.
    const BYTES: usize = BLOCKS * Self::BLOCK_BYTES;
    /// How far to shift corrections for an offset of 128 right.
    const SHIFT: i32;

    /// First halves, second halves, scales four times each.
    ///
    /// # Safety
    /// - the CPU has AVX-512 F, BW and VL
    /// - `BYTES` bytes at `at` are readable
    unsafe fn load(at: *const u8) -> (__m512i, __m512i, __m512);
}

/// Sixteen bytes at `at`, `at + stride`, `at + 2 · stride` and `at + 3 · stride`.
///
/// # Safety
/// - the CPU has AVX-512 F
/// - the bytes are readable
#[inline(always)]
unsafe fn four<const STRIDE: usize>(at: *const u8) -> __m512i {
    // SAFETY: the caller has the instructions and the bytes.
    unsafe {
        let first = _mm512_castsi128_si512(_mm_loadu_si128(at.cast()));
        let second = _mm_loadu_si128(at.add(STRIDE).cast());
        let third = _mm_loadu_si128(at.add(2 * STRIDE).cast());
        let fourth = _mm_loadu_si128(at.add(3 * STRIDE).cast());
        let both = _mm512_mask_broadcast_i32x4(first, 0x00F0, second);
        let three = _mm512_mask_broadcast_i32x4(both, 0x0F00, third);
        _mm512_mask_broadcast_i32x4(three, 0xF000, fourth)
    }
}

/// The sixteen lowest words as f32.
///
/// # Safety
/// The CPU has AVX-512 F.
#[inline(always)]
unsafe fn halves(words: __m512i) -> __m512 {
    // SAFETY: the caller has the instructions.
    unsafe { _mm512_cvtph_ps(_mm512_castsi512_si256(words)) }
}

impl Groups for Q40 {
    /// From 128 to 8.
    const SHIFT: i32 = 4;

    #[inline(always)]
    unsafe fn load(at: *const u8) -> (__m512i, __m512i, __m512) {
        // SAFETY: the caller has the instructions and the 72 bytes.
        unsafe {
            let bytes = four::<18>(at.add(2));
            let low = _mm512_set1_epi8(15);
            let (first, second) = (
                _mm512_and_si512(bytes, low),
                _mm512_and_si512(_mm512_srli_epi16::<4>(bytes), low),
            );
            // the scales are the words 0, 9, 18 and 27 of the first 64 bytes
            let words = _mm512_loadu_si512(at.cast());
            let places = _mm512_setr_epi64(
                0x0000_0000_0000_0000,
                0x0009_0009_0009_0009,
                0x0012_0012_0012_0012,
                0x001B_001B_001B_001B,
                0,
                0,
                0,
                0,
            );
            (first, second, halves(_mm512_permutexvar_epi16(places, words)))
        }
    }
}

impl Groups for Q80 {
    const SHIFT: i32 = 0;

    #[inline(always)]
    unsafe fn load(at: *const u8) -> (__m512i, __m512i, __m512) {
        // SAFETY: the caller has the instructions and the 136 bytes.
        unsafe {
            let unsigned = _mm512_set1_epi8(i8::MIN);
            let first = _mm512_xor_si512(four::<34>(at.add(2)), unsigned);
            let second = _mm512_xor_si512(four::<34>(at.add(18)), unsigned);
            // the scales are the words 0, 17, 34 and 51: 32 is the first of the second register
            let words = _mm512_loadu_si512(at.cast());
            let more = _mm512_loadu_si512(at.add(64).cast());
            let places = _mm512_setr_epi64(
                0x0000_0000_0000_0000,
                0x0011_0011_0011_0011,
                0x0022_0022_0022_0022,
                0x0033_0033_0033_0033,
                0,
                0,
                0,
                0,
            );
            (first, second, halves(_mm512_permutex2var_epi16(words, places, more)))
        }
    }
}

/// `R` rows times a token.
///
/// # Safety
/// - the CPU has AVX-512 F, BW, VL and VNNI
/// - each row holds the blocks of `x`, the last group at least one
#[inline(always)]
unsafe fn dots<F: Groups, const R: usize>(
    rows: [&[u8]; R],
    ahead: [&[u8]; R],
    x: &[InputGroup],
) -> [f32; R] {
    let n_whole = rows[0].len() / F::BYTES;
    let mut line = 0;
    // SAFETY: the caller has the instructions; `n_whole` groups lie in each row and in `x`, and
    // what is left is copied to a padded group of its own.
    unsafe {
        let mut sums = [_mm512_setzero_ps(); R];
        for g in 0..n_whole {
            while line < (g + 1) * F::BYTES {
                for r in 0..R {
                    <__m512 as Vector>::prefetch(ahead[r].as_ptr().wrapping_add(line));
                }
                line += LINE;
            }
            for r in 0..R {
                sums[r] = add_group::<F>(rows[r].as_ptr().add(g * F::BYTES), &x[g], sums[r]);
            }
        }
        if n_whole < x.len() {
            for r in 0..R {
                // the longest group
                let mut padded = [0u8; BLOCKS * 34];
                let rest = &rows[r][n_whole * F::BYTES..];
                padded[..rest.len()].copy_from_slice(rest);
                sums[r] = add_group::<F>(padded.as_ptr(), &x[n_whole], sums[r]);
            }
        }
        let [totals] = simd::sum_lanes(&[sums]);
        totals
    }
}

/// Adds the products of a group to `sum`.
///
/// # Safety
/// - the CPU has AVX-512 F, BW, VL and VNNI
/// - `F::BYTES` bytes at `at` are readable
#[inline(always)]
unsafe fn add_group<F: Groups>(at: *const u8, x: &InputGroup, sum: __m512) -> __m512 {
    // SAFETY: the caller has the instructions and the bytes; a group is all readable.
    unsafe {
        let (first, second, scales) = F::load(at);
        let (x_first, x_second, x_scales, corrections) = load_input(x);
        let start = _mm512_sra_epi32(corrections, _mm_cvtsi32_si128(F::SHIFT));
        let products =
            _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(start, first, x_first), second, x_second);
        _mm512_fmadd_ps(_mm512_cvtepi32_ps(products), _mm512_mul_ps(scales, x_scales), sum)
    }
}

/// First halves, second halves, scales, corrections.
///
/// # Safety
/// The CPU has AVX-512 F.
#[inline(always)]
unsafe fn load_input(x: &InputGroup) -> (__m512i, __m512i, __m512, __m512i) {
    // SAFETY: the caller has the instructions; the arrays are 128, 64 and 64 bytes long.
    unsafe {
        (
            _mm512_loadu_si512(x.numbers.as_ptr().cast()),
            _mm512_loadu_si512(x.numbers.as_ptr().add(64).cast()),
            _mm512_loadu_ps(x.scales.as_ptr()),
            _mm512_loadu_si512(x.corrections.as_ptr().cast()),
        )
    }
}

// Sixteen sums, three registers of weights.
int8_rows!(Groups, "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c", 4, 4);

/// Weights offset by 128.
fn unpack<F: Groups>(row: &[u8], groups: &mut [WeightGroup]) {
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
    fn inner<F: Groups>(row: &[u8], groups: &mut [WeightGroup]) {
        let to_128 = (128 - (128 >> F::SHIFT)) as u8 as i8;
        for (g, group) in groups.iter_mut().enumerate() {
            let mut padded = [0u8; BLOCKS * 34];
            let rest = &row[g * F::BYTES..];
            let at = if rest.len() < F::BYTES {
                padded[..rest.len()].copy_from_slice(rest);
                padded.as_ptr()
            } else {
                rest.as_ptr()
            };
            // SAFETY: this function has the instructions; `at` has `BYTES` bytes; the arrays of a
            // group are 128 and 64 bytes long.
            unsafe {
                let (first, second, scales) = F::load(at);
                let offset = _mm512_set1_epi8(to_128);
                let to = group.numbers.as_mut_ptr();
                _mm512_storeu_si512(to.cast(), _mm512_add_epi8(first, offset));
                _mm512_storeu_si512(to.add(64).cast(), _mm512_add_epi8(second, offset));
                _mm512_storeu_ps(group.scales.as_mut_ptr(), scales);
            }
        }
    }
    super::check_blocks::<F>(&[row], groups.len());
    // SAFETY: the table is handed out only where the instructions exist; the check bounds the reads.
    unsafe { inner::<F>(row, groups) }
}

/// The products of a tile, `[t][r]`.
///
/// # Safety
/// - the CPU has AVX-512 F, BW, VL and VNNI
/// - all slices have one length
#[inline(always)]
unsafe fn tile<const R: usize, const T: usize>(
    rows: [&[WeightGroup]; R],
    xs: [&[InputGroup]; T],
) -> [[f32; R]; T] {
    let n_groups = rows[0].len();
    // SAFETY: the caller has the instructions; `g < n_groups` bounds the reads.
    unsafe {
        let mut sums = [[_mm512_setzero_ps(); R]; T];
        for g in 0..n_groups {
            for r in 0..R {
                let row = rows[r].get_unchecked(g);
                let first = _mm512_loadu_si512(row.numbers.as_ptr().cast());
                let second = _mm512_loadu_si512(row.numbers.as_ptr().add(64).cast());
                let scales = _mm512_loadu_ps(row.scales.as_ptr());
                for t in 0..T {
                    let (x_first, x_second, x_scales, start) = load_input(xs[t].get_unchecked(g));
                    let products = _mm512_dpbusd_epi32(start, first, x_first);
                    let products = _mm512_dpbusd_epi32(products, second, x_second);
                    sums[t][r] = _mm512_fmadd_ps(
                        _mm512_cvtepi32_ps(products),
                        _mm512_mul_ps(scales, x_scales),
                        sums[t][r],
                    );
                }
            }
        }
        simd::sum_lanes(&sums)
    }
}
