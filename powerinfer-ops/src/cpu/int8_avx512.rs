//! Products of whole numbers with AVX-512 VNNI: 128 weights in two instructions.
//!
//! The instruction multiplies unsigned bytes with signed ones, so a weight is read as
//! `number + offset`, and `offset · Σ x` is taken off again by starting the sum at
//! [`InputGroup::corrections`]. A lane holds eight products of one block; the lanes are scaled and
//! added up in f32.

#![allow(unsafe_code, reason = "intrinsics")]
#![allow(clippy::needless_range_loop, reason = "closures keep intrinsics from being inlined")]

use std::arch::x86_64::*;
use std::ops::Range;

use super::avx512::{EACH, four_q4_0_blocks};
use super::int8::{
    BLOCKS, InputGroup, OFFSET_BITS, Offsets, WeightGroup, WithOffsets, WithoutOffsets,
};
use super::simd::{self, LINE, Vector};
use super::simd_dots;
use super::tiles::{int8_rows, tiles};
use super::{GROUP, Grouping, Int8Products, Int8Table, RowValues, Rows};
use crate::format::{BlockFormat, NumberFormat, Q4K, Q40, Q41, Q50, Q80, q4_k};

/// The products of every format of whole numbers.
pub(super) const INT8: Int8Table = Int8Table {
    q8_0: products::<Q80>(),
    q4_0: products::<Q40>(),
    q4_1: products::<Q41>(),
    q5_0: products::<Q50>(),
    q4_k: products::<Q4K>(),
};

/// The products of a format.
const fn products<F: Groups>() -> Int8Products {
    Int8Products {
        dot: dot::<F>,
        dot_group: dot_group::<F>,
        grouping: Grouping::Scattered,
        unpack: unpack::<F>,
        block: if F::OFFSETS { block::<WithOffsets> } else { block::<WithoutOffsets> },
        gather: if F::OFFSETS { gather::<WithOffsets> } else { gather::<WithoutOffsets> },
    }
}

/// 128 weights: first halves, second halves, unsigned; scales and offsets, four times each. Where a
/// format has no offsets they are zeros.
type Group = (__m512i, __m512i, __m512, __m512);

/// How four parts of a row become registers.
trait Groups: NumberFormat {
    /// Bytes of four parts.
    const BYTES: usize = BLOCKS * Self::BLOCK_BYTES / Self::PARTS;
    /// How far to shift corrections for an offset of 128 right; of no meaning with offsets, where
    /// numbers are unsigned to begin with.
    const SHIFT: i32;

    /// Parts `4 · g` to `4 · g + 3` of a row.
    ///
    /// # Safety
    /// - the CPU has AVX-512 F, BW and VL
    /// - the blocks that hold the parts are readable
    unsafe fn load(row: *const u8, g: usize) -> Group;

    /// [`load`](Self::load) where nothing else is loaded meanwhile, if another way is faster then.
    ///
    /// # Safety
    /// As for `load`.
    #[inline(always)]
    unsafe fn load_alone(row: *const u8, g: usize) -> Group {
        // SAFETY: the caller's promise is the same.
        unsafe { Self::load(row, g) }
    }
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

/// The low and the high halves of bytes.
///
/// # Safety
/// The CPU has AVX-512 BW.
#[inline(always)]
unsafe fn nibbles(bytes: __m512i) -> (__m512i, __m512i) {
    // SAFETY: the caller has the instructions.
    unsafe {
        let low = _mm512_set1_epi8(15);
        (_mm512_and_si512(bytes, low), _mm512_and_si512(_mm512_srli_epi16::<4>(bytes), low))
    }
}

/// Four words of the 128 bytes of `words` and `more`, as f32, four times each.
///
/// # Safety
/// The CPU has AVX-512 F and BW.
#[inline(always)]
unsafe fn scales(words: __m512i, more: __m512i, places: [i64; 4]) -> __m512 {
    // SAFETY: the caller has the instructions.
    unsafe {
        let places = _mm512_setr_epi64(
            places[0] * EACH,
            places[1] * EACH,
            places[2] * EACH,
            places[3] * EACH,
            0,
            0,
            0,
            0,
        );
        halves(_mm512_permutex2var_epi16(words, places, more))
    }
}

impl Groups for Q40 {
    /// From 128 to 8.
    const SHIFT: i32 = 4;

    #[inline(always)]
    unsafe fn load(row: *const u8, g: usize) -> Group {
        // SAFETY: the caller has the instructions and the 72 bytes.
        unsafe {
            let at = row.add(g * Self::BYTES);
            let (first, second) = nibbles(four::<18>(at.add(2)));
            // the first words of blocks of nine
            let words = _mm512_loadu_si512(at.cast());
            (first, second, scales(words, words, [0, 9, 18, 27]), _mm512_setzero_ps())
        }
    }

    /// Two whole registers and a permutation of their words: 36 GB/s in a stream of one row at a time
    /// for 33, but 20 for 22 with four scattered rows.
    #[inline(always)]
    unsafe fn load_alone(row: *const u8, g: usize) -> Group {
        // SAFETY: the caller has the instructions and the 72 bytes.
        unsafe {
            let (bytes, scales) = four_q4_0_blocks(row.add(g * Self::BYTES));
            let (first, second) = nibbles(bytes);
            (first, second, scales, _mm512_setzero_ps())
        }
    }
}

impl Groups for Q80 {
    const SHIFT: i32 = 0;

    #[inline(always)]
    unsafe fn load(row: *const u8, g: usize) -> Group {
        // SAFETY: the caller has the instructions and the 136 bytes.
        unsafe {
            let at = row.add(g * Self::BYTES);
            let unsigned = _mm512_set1_epi8(i8::MIN);
            let first = _mm512_xor_si512(four::<34>(at.add(2)), unsigned);
            let second = _mm512_xor_si512(four::<34>(at.add(18)), unsigned);
            // the first words of blocks of 17
            let words = _mm512_loadu_si512(at.cast());
            let more = _mm512_loadu_si512(at.add(64).cast());
            (first, second, scales(words, more, [0, 17, 34, 51]), _mm512_setzero_ps())
        }
    }
}

impl Groups for Q41 {
    const SHIFT: i32 = 0;

    #[inline(always)]
    unsafe fn load(row: *const u8, g: usize) -> Group {
        // SAFETY: the caller has the instructions and the 80 bytes.
        unsafe {
            let at = row.add(g * Self::BYTES);
            let (first, second) = nibbles(four::<20>(at.add(4)));
            // the first and the second words of blocks of ten
            let words = _mm512_loadu_si512(at.cast());
            (
                first,
                second,
                scales(words, words, [0, 10, 20, 30]),
                scales(words, words, [1, 11, 21, 31]),
            )
        }
    }
}

impl Groups for Q50 {
    /// From 128 to 16.
    const SHIFT: i32 = 3;

    #[inline(always)]
    unsafe fn load(row: *const u8, g: usize) -> Group {
        // SAFETY: the caller has the instructions and the 88 bytes.
        unsafe {
            let at = row.add(g * Self::BYTES);
            let (first, second) = nibbles(four::<22>(at.add(6)));
            // the fifth bits of the first halves and of the second ones
            let (mut low, mut high) = (0, 0);
            for block in 0..BLOCKS {
                let bits = at.add(2 + block * Self::BLOCK_BYTES).cast::<u32>().read_unaligned();
                low |= u64::from(bits & 0xFFFF) << (16 * block);
                high |= u64::from(bits >> 16) << (16 * block);
            }
            let sixteen = _mm512_set1_epi8(16);
            // the first words of blocks of eleven; the second register begins at word 12, so that
            // it ends with the last block
            let words = _mm512_loadu_si512(at.cast());
            let more = _mm512_loadu_si512(at.add(24).cast());
            (
                _mm512_mask_add_epi8(first, low, first, sixteen),
                _mm512_mask_add_epi8(second, high, second, sixteen),
                scales(words, more, [0, 11, 22, 32 + 33 - 12]),
                _mm512_setzero_ps(),
            )
        }
    }
}

impl Groups for Q4K {
    const SHIFT: i32 = 0;

    #[inline(always)]
    unsafe fn load(row: *const u8, g: usize) -> Group {
        let half = g % (Self::PARTS / BLOCKS);
        // SAFETY: the caller has the instructions and the block.
        unsafe {
            let block = row.add(g / (Self::PARTS / BLOCKS) * Self::BLOCK_BYTES);
            // two parts are the low and the high halves of the same 32 bytes
            let bytes = _mm512_loadu_si512(block.add(q4_k::NUMBERS + 64 * half).cast());
            let shifts = _mm512_setr_epi64(0, 0, 4, 4, 0, 0, 4, 4);
            let low = _mm512_set1_epi8(15);
            let first =
                _mm512_srlv_epi64(_mm512_shuffle_i32x4::<0b10_10_00_00>(bytes, bytes), shifts);
            let second =
                _mm512_srlv_epi64(_mm512_shuffle_i32x4::<0b11_11_01_01>(bytes, bytes), shifts);
            let (scales, offsets) = q4_k::four_part_scales(&*block.cast(), half);
            (
                _mm512_and_si512(first, low),
                _mm512_and_si512(second, low),
                products_of(block, scales),
                _mm512_sub_ps(_mm512_setzero_ps(), products_of(block.add(2), offsets)),
            )
        }
    }
}

/// The f16 at `at` times each of four bytes, four times each.
///
/// # Safety
/// - the CPU has AVX-512 F and F16C
/// - two bytes at `at` are readable
#[inline(always)]
unsafe fn products_of(at: *const u8, bytes: u32) -> __m512 {
    // SAFETY: the caller has the instructions and the bytes.
    unsafe {
        let factor = _mm_cvtph_ps(_mm_set1_epi16(at.cast::<i16>().read_unaligned()));
        let numbers = _mm_cvtepi32_ps(_mm_cvtepu8_epi32(_mm_cvtsi32_si128(bytes as i32)));
        let places = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
        _mm512_permutexvar_ps(places, _mm512_castps128_ps512(_mm_mul_ps(factor, numbers)))
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
    // SAFETY: the caller has the instructions; `n_whole` groups lie in each row and in `x`, and
    // what is left is copied to a padded group of its own.
    unsafe {
        let mut sums = [_mm512_setzero_ps(); R];
        let own = simd::own_turns::<R>(n_whole, F::BYTES);
        dots_groups::<F, R>(rows, (rows, n_whole - own), 0..own, x, &mut sums);
        dots_groups::<F, R>(rows, (ahead, 0), own..n_whole, x, &mut sums);
        if n_whole < x.len() {
            for r in 0..R {
                // the longest group
                let mut padded = [0u8; BLOCKS * 34];
                let rest = &rows[r][n_whole * F::BYTES..];
                padded[..rest.len()].copy_from_slice(rest);
                let weights = F::load(padded.as_ptr(), 0);
                sums[r] = add((F::OFFSETS, F::SHIFT), weights, &x[n_whole], sums[r]);
            }
        }
        let [totals] = simd_dots::sum_lanes(&[sums]);
        totals
    }
}

/// Some groups of [`dots`], with as many groups of the rows `asked` on their way meanwhile, from a
/// group on.
///
/// # Safety
/// - the CPU has AVX-512 F, BW, VL and VNNI
/// - `groups` lie in each row, and in `x`
#[inline(always)]
unsafe fn dots_groups<F: Groups, const R: usize>(
    rows: [&[u8]; R],
    (asked, first_asked): ([&[u8]; R], usize),
    groups: Range<usize>,
    x: &[InputGroup],
    sums: &mut [__m512; R],
) {
    let (first, mut line) = (groups.start, 0);
    for g in groups {
        // SAFETY: the caller has the instructions and the groups; a prefetch reads nothing.
        unsafe {
            while line < (g + 1 - first) * F::BYTES {
                for r in 0..R {
                    let at = asked[r].as_ptr().wrapping_add(first_asked * F::BYTES + line);
                    <__m512 as Vector>::prefetch(at);
                }
                line += LINE;
            }
            for r in 0..R {
                let row = rows[r].as_ptr();
                let weights = if R == 1 { F::load_alone(row, g) } else { F::load(row, g) };
                sums[r] = add((F::OFFSETS, F::SHIFT), weights, &x[g], sums[r]);
            }
        }
    }
}

/// Adds the products of a group to `sum`; without offsets, weights are `128 >> shift` too large.
///
/// # Safety
/// The CPU has AVX-512 F, BW, VL and VNNI.
#[inline(always)]
unsafe fn add(
    (has_offsets, shift): (bool, i32),
    (first, second, scales, offsets): Group,
    x: &InputGroup,
    sum: __m512,
) -> __m512 {
    // SAFETY: the caller has the instructions; a group is all readable.
    unsafe {
        let (x_first, x_second, x_scales, corrections) = load_input(x);
        let start = if has_offsets {
            _mm512_setzero_si512()
        } else {
            _mm512_sra_epi32(corrections, _mm_cvtsi32_si128(shift))
        };
        let products =
            _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(start, first, x_first), second, x_second);
        let products = _mm512_cvtepi32_ps(products);
        let sum = _mm512_fmadd_ps(products, _mm512_mul_ps(scales, x_scales), sum);
        if !has_offsets {
            return sum;
        }
        let less = _mm512_cvtepi32_ps(_mm512_srai_epi32::<OFFSET_BITS>(corrections));
        _mm512_fnmadd_ps(less, _mm512_mul_ps(offsets, x_scales), sum)
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

/// Weights offset by 128, those with offsets as they are.
fn unpack<F: Groups>(row: &[u8], groups: &mut [WeightGroup]) {
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
    fn inner<F: Groups>(row: &[u8], groups: &mut [WeightGroup]) {
        let to_128 = if F::OFFSETS { 0 } else { (128 - (128 >> F::SHIFT)) as u8 as i8 };
        for (g, group) in groups.iter_mut().enumerate() {
            let mut padded = [0u8; BLOCKS * 34];
            let rest = &row[g * F::BYTES..];
            let (row, g) = if rest.len() < F::BYTES {
                padded[..rest.len()].copy_from_slice(rest);
                (padded.as_ptr(), 0)
            } else {
                (row.as_ptr(), g)
            };
            // SAFETY: this function has the instructions; the row has group `g`; the arrays of a
            // group are 128, 64 and 64 bytes long.
            unsafe {
                let (first, second, scales, offsets) = F::load(row, g);
                let offset = _mm512_set1_epi8(to_128);
                let to = group.numbers.as_mut_ptr();
                _mm512_storeu_si512(to.cast(), _mm512_add_epi8(first, offset));
                _mm512_storeu_si512(to.add(64).cast(), _mm512_add_epi8(second, offset));
                _mm512_storeu_ps(group.scales.as_mut_ptr(), scales);
                if F::OFFSETS {
                    _mm512_storeu_ps(group.offsets.as_mut_ptr(), offsets);
                }
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
unsafe fn tile<O: Offsets, const R: usize, const T: usize>(
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
                let offsets = _mm512_loadu_ps(row.offsets.as_ptr());
                let weights = (first, second, scales, offsets);
                for t in 0..T {
                    sums[t][r] = add((O::ANY, 0), weights, xs[t].get_unchecked(g), sums[t][r]);
                }
            }
        }
        simd_dots::sum_lanes(&sums)
    }
}
