//! Products of whole numbers with AVX2: 64 weights at a time.
//!
//! The instruction multiplies unsigned bytes with signed ones and adds pairs in sixteen bits. It
//! takes the magnitude of a weight and the value with the weight's sign; a pair is at most
//! `2 · 128 · 127`, which fits. A lane ends up with eight products of one block; the lanes are
//! scaled and added up in f32.

#![allow(unsafe_code, reason = "intrinsics")]
#![allow(clippy::needless_range_loop, reason = "closures keep intrinsics from being inlined")]

use std::arch::x86_64::*;

use super::int8::{
    BLOCKS, InputGroup, OFFSET_BITS, Offsets, WeightGroup, WithOffsets, WithoutOffsets,
};
use super::simd::{LINE, Vector};
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
const fn products<F: Pairs>() -> Int8Products {
    Int8Products {
        dot: dot::<F>,
        dot_group: dot_group::<F>,
        grouping: Grouping::Always,
        unpack: unpack::<F>,
        block: if F::OFFSETS { block::<WithOffsets> } else { block::<WithoutOffsets> },
        gather: if F::OFFSETS { gather::<WithOffsets> } else { gather::<WithoutOffsets> },
    }
}

/// 64 weights: first halves, second halves, signed; scales and offsets, four times each. Where a format
/// has no offsets they are zeros.
type Pair = (__m256i, __m256i, __m256, __m256);

/// How two parts of a row become registers.
trait Pairs: NumberFormat {
    /// Bytes of two parts.
    const BYTES: usize = 2 * Self::BLOCK_BYTES / Self::PARTS;

    /// Parts `2 · pair` and `2 · pair + 1` of a row.
    ///
    /// # Safety
    /// - the CPU has AVX2 and F16C
    /// - the blocks that hold the parts are readable
    unsafe fn load(row: *const u8, pair: usize) -> Pair;
}

/// Sixteen bytes at `at` and at `at + stride`.
///
/// # Safety
/// - the CPU has AVX2
/// - the bytes are readable
#[inline(always)]
unsafe fn two(at: *const u8, stride: usize) -> __m256i {
    // SAFETY: the caller has the instructions and the bytes.
    unsafe {
        let first = _mm256_castsi128_si256(_mm_loadu_si128(at.cast()));
        _mm256_inserti128_si256::<1>(first, _mm_loadu_si128(at.add(stride).cast()))
    }
}

/// The f16 at `at` and at `at + stride`, four times each.
///
/// # Safety
/// - the CPU has AVX2 and F16C
/// - the bytes are readable
#[inline(always)]
unsafe fn scales(at: *const u8, stride: usize) -> __m256 {
    // SAFETY: the caller has the instructions and the bytes.
    unsafe {
        let first = _mm_set1_epi16(at.cast::<i16>().read_unaligned());
        let second = _mm_set1_epi16(at.add(stride).cast::<i16>().read_unaligned());
        _mm256_cvtph_ps(_mm_unpacklo_epi64(first, second))
    }
}

/// The low and the high halves of bytes.
///
/// # Safety
/// The CPU has AVX2.
#[inline(always)]
unsafe fn nibbles(bytes: __m256i) -> (__m256i, __m256i) {
    // SAFETY: the caller has the instructions.
    unsafe {
        let low = _mm256_set1_epi8(15);
        (_mm256_and_si256(bytes, low), _mm256_and_si256(_mm256_srli_epi16::<4>(bytes), low))
    }
}

/// Numbers of five bits, less 16, whose lower four are given. The upper ones are the bits of the bytes
/// `byte` and `byte + 1` of each half of `words`.
///
/// # Safety
/// The CPU has AVX2.
#[inline(always)]
unsafe fn with_fifth_bits(lower: __m256i, words: __m256i, byte: i64) -> __m256i {
    const EACH: i64 = 0x0101_0101_0101_0101;
    // SAFETY: the caller has the instructions.
    unsafe {
        let (low, high) = (byte * EACH, (byte + 1) * EACH);
        let bytes = _mm256_shuffle_epi8(words, _mm256_setr_epi64x(low, high, low, high));
        let bits = _mm256_set1_epi64x(i64::from_le_bytes([1, 2, 4, 8, 16, 32, 64, 128]));
        let clear = _mm256_cmpeq_epi8(_mm256_and_si256(bytes, bits), _mm256_setzero_si256());
        // the bit would add the 16 that are taken off
        _mm256_sub_epi8(lower, _mm256_and_si256(clear, _mm256_set1_epi8(16)))
    }
}

/// Four times each of two values.
///
/// # Safety
/// The CPU has AVX2.
#[inline(always)]
unsafe fn fours(first: f32, second: f32) -> __m256 {
    // SAFETY: the caller has the instructions.
    unsafe { _mm256_set_m128(_mm_set1_ps(second), _mm_set1_ps(first)) }
}

impl Pairs for Q40 {
    #[inline(always)]
    unsafe fn load(row: *const u8, pair: usize) -> Pair {
        // SAFETY: the caller has the instructions and the 36 bytes.
        unsafe {
            let at = row.add(pair * Self::BYTES);
            let (first, second) = nibbles(two(at.add(2), Self::BLOCK_BYTES));
            let eight = _mm256_set1_epi8(8);
            (
                _mm256_sub_epi8(first, eight),
                _mm256_sub_epi8(second, eight),
                scales(at, Self::BLOCK_BYTES),
                _mm256_setzero_ps(),
            )
        }
    }
}

impl Pairs for Q41 {
    #[inline(always)]
    unsafe fn load(row: *const u8, pair: usize) -> Pair {
        // SAFETY: the caller has the instructions and the 40 bytes.
        unsafe {
            let at = row.add(pair * Self::BYTES);
            let (first, second) = nibbles(two(at.add(4), Self::BLOCK_BYTES));
            (first, second, scales(at, Self::BLOCK_BYTES), scales(at.add(2), Self::BLOCK_BYTES))
        }
    }
}

impl Pairs for Q50 {
    #[inline(always)]
    unsafe fn load(row: *const u8, pair: usize) -> Pair {
        // SAFETY: the caller has the instructions and the 44 bytes.
        unsafe {
            let at = row.add(pair * Self::BYTES);
            let (first, second) = nibbles(two(at.add(6), Self::BLOCK_BYTES));
            let word_0 = at.add(2).cast::<i32>().read_unaligned();
            let word_1 = at.add(2 + Self::BLOCK_BYTES).cast::<i32>().read_unaligned();
            let words = _mm256_set_m128i(_mm_set1_epi32(word_1), _mm_set1_epi32(word_0));
            (
                with_fifth_bits(first, words, 0),
                with_fifth_bits(second, words, 2),
                scales(at, Self::BLOCK_BYTES),
                _mm256_setzero_ps(),
            )
        }
    }
}

impl Pairs for Q4K {
    #[inline(always)]
    unsafe fn load(row: *const u8, pair: usize) -> Pair {
        let in_block = pair % (Self::PARTS / 2);
        // SAFETY: the caller has the instructions and the block.
        unsafe {
            let block = row.add(pair / (Self::PARTS / 2) * Self::BLOCK_BYTES);
            // two parts are the low and the high halves of the same bytes
            let bytes = _mm256_loadu_si256(block.add(q4_k::NUMBERS + 32 * in_block).cast());
            let (low, high) = nibbles(bytes);
            let head = &*block.cast();
            let (scale_0, offset_0) = q4_k::part_scales(head, 2 * in_block);
            let (scale_1, offset_1) = q4_k::part_scales(head, 2 * in_block + 1);
            let (d, d_min) = (scales(block, 0), scales(block.add(2), 0));
            (
                _mm256_permute2x128_si256::<0x20>(low, high),
                _mm256_permute2x128_si256::<0x31>(low, high),
                _mm256_mul_ps(d, fours(f32::from(scale_0), f32::from(scale_1))),
                _mm256_mul_ps(d_min, fours(-f32::from(offset_0), -f32::from(offset_1))),
            )
        }
    }
}

impl Pairs for Q80 {
    #[inline(always)]
    unsafe fn load(row: *const u8, pair: usize) -> Pair {
        // SAFETY: the caller has the instructions and the 68 bytes.
        unsafe {
            let at = row.add(pair * Self::BYTES);
            (
                two(at.add(2), Self::BLOCK_BYTES),
                two(at.add(18), Self::BLOCK_BYTES),
                scales(at, Self::BLOCK_BYTES),
                _mm256_setzero_ps(),
            )
        }
    }
}

/// The sums of eight products in each lane.
///
/// # Safety
/// The CPU has AVX2.
#[inline(always)]
unsafe fn lanes(weights: (__m256i, __m256i), x: (__m256i, __m256i)) -> __m256 {
    // SAFETY: the caller has the instructions.
    unsafe {
        let ones = _mm256_set1_epi16(1);
        let first =
            _mm256_maddubs_epi16(_mm256_abs_epi8(weights.0), _mm256_sign_epi8(x.0, weights.0));
        let second =
            _mm256_maddubs_epi16(_mm256_abs_epi8(weights.1), _mm256_sign_epi8(x.1, weights.1));
        let sum = _mm256_add_epi32(_mm256_madd_epi16(first, ones), _mm256_madd_epi16(second, ones));
        _mm256_cvtepi32_ps(sum)
    }
}

/// Adds the products of a pair of blocks to `sum`.
///
/// # Safety
/// - the CPU has AVX2 and FMA
/// - `pair < 2`
#[inline(always)]
unsafe fn add_pair(
    has_offsets: bool,
    (first, second, scales, offsets): Pair,
    (x, pair): (&InputGroup, usize),
    sum: __m256,
) -> __m256 {
    // SAFETY: the caller has the instructions and the pair; the corrections are 64 bytes long.
    unsafe {
        let (numbers, x_scales) = load_input(x, pair);
        let products = lanes((first, second), numbers);
        let sum = _mm256_fmadd_ps(products, _mm256_mul_ps(scales, x_scales), sum);
        if !has_offsets {
            return sum;
        }
        let corrections = _mm256_loadu_si256(x.corrections.as_ptr().add(8 * pair).cast());
        let less = _mm256_cvtepi32_ps(_mm256_srai_epi32::<{ OFFSET_BITS as i32 }>(corrections));
        _mm256_fnmadd_ps(less, _mm256_mul_ps(offsets, x_scales), sum)
    }
}

/// First halves, second halves and scales of blocks `2 · pair` and `2 · pair + 1`.
///
/// # Safety
/// - the CPU has AVX2
/// - `pair < 2`
#[inline(always)]
unsafe fn load_input(x: &InputGroup, pair: usize) -> ((__m256i, __m256i), __m256) {
    // SAFETY: the caller has the instructions; the arrays are 128 and 64 bytes long.
    unsafe {
        let numbers = x.numbers.as_ptr().add(32 * pair);
        let first = _mm256_loadu_si256(numbers.cast());
        let second = _mm256_loadu_si256(numbers.add(64).cast());
        ((first, second), _mm256_loadu_ps(x.scales.as_ptr().add(8 * pair)))
    }
}

/// `R` rows times a token.
///
/// # Safety
/// - the CPU has AVX2, FMA and F16C
/// - each row holds the blocks of `x`, the last group at least one
#[inline(always)]
unsafe fn dots<F: Pairs, const R: usize>(
    rows: [&[u8]; R],
    ahead: [&[u8]; R],
    x: &[InputGroup],
) -> [f32; R] {
    let group_bytes = 2 * F::BYTES;
    let n_whole = rows[0].len() / group_bytes;
    let mut line = 0;
    // SAFETY: the caller has the instructions; `n_whole` groups lie in each row and in `x`, and
    // what is left is copied to a padded group of its own.
    unsafe {
        let mut sums = [[_mm256_setzero_ps(); 2]; R];
        for g in 0..n_whole {
            while line < (g + 1) * group_bytes {
                for r in 0..R {
                    <__m256 as Vector>::prefetch(ahead[r].as_ptr().wrapping_add(line));
                }
                line += LINE;
            }
            for r in 0..R {
                add_group::<F>((rows[r].as_ptr(), g), &x[g], &mut sums[r]);
            }
        }
        if n_whole < x.len() {
            for r in 0..R {
                // the longest group
                let mut padded = [0u8; BLOCKS * 34];
                let rest = &rows[r][n_whole * group_bytes..];
                padded[..rest.len()].copy_from_slice(rest);
                add_group::<F>((padded.as_ptr(), 0), &x[n_whole], &mut sums[r]);
            }
        }
        let mut totals = [0.0; R];
        for r in 0..R {
            totals[r] = sums[r][0].add(sums[r][1]).sum();
        }
        totals
    }
}

/// Adds the products of a group to the sums of its two pairs of blocks.
///
/// # Safety
/// - the CPU has AVX2, FMA and F16C
/// - the row holds group `g`
#[inline(always)]
unsafe fn add_group<F: Pairs>(
    (row, g): (*const u8, usize),
    x: &InputGroup,
    sums: &mut [__m256; 2],
) {
    for pair in 0..2 {
        // SAFETY: the caller has the instructions and the group.
        unsafe {
            let weights = F::load(row, 2 * g + pair);
            sums[pair] = add_pair(F::OFFSETS, weights, (x, pair), sums[pair]);
        }
    }
}

// Eight sums, three registers of weights.
int8_rows!(Pairs, "avx2,fma,f16c", 2, 2);

/// Signed weights.
fn unpack<F: Pairs>(row: &[u8], groups: &mut [WeightGroup]) {
    #[target_feature(enable = "avx2,fma,f16c")]
    fn inner<F: Pairs>(row: &[u8], groups: &mut [WeightGroup]) {
        for (g, group) in groups.iter_mut().enumerate() {
            let mut padded = [0u8; BLOCKS * 34];
            let rest = &row[2 * g * F::BYTES..];
            let (row, g) = if rest.len() < 2 * F::BYTES {
                padded[..rest.len()].copy_from_slice(rest);
                (padded.as_ptr(), 0)
            } else {
                (row.as_ptr(), g)
            };
            for pair in 0..2 {
                // SAFETY: this function has the instructions; the row has group `g`; the arrays of
                // a group are 128, 64 and 64 bytes long.
                unsafe {
                    let (first, second, scales, offsets) = F::load(row, 2 * g + pair);
                    let to = group.numbers.as_mut_ptr().add(32 * pair);
                    _mm256_storeu_si256(to.cast(), first);
                    _mm256_storeu_si256(to.add(64).cast(), second);
                    _mm256_storeu_ps(group.scales.as_mut_ptr().add(8 * pair), scales);
                    if F::OFFSETS {
                        _mm256_storeu_ps(group.offsets.as_mut_ptr().add(8 * pair), offsets);
                    }
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
/// - the CPU has AVX2 and FMA
/// - all slices have one length
#[inline(always)]
unsafe fn tile<O: Offsets, const R: usize, const T: usize>(
    rows: [&[WeightGroup]; R],
    xs: [&[InputGroup]; T],
) -> [[f32; R]; T] {
    let n_groups = rows[0].len();
    // SAFETY: the caller has the instructions; `g < n_groups` bounds the reads.
    unsafe {
        let mut sums = [[[_mm256_setzero_ps(); 2]; R]; T];
        for g in 0..n_groups {
            for pair in 0..2 {
                for r in 0..R {
                    let row = rows[r].get_unchecked(g);
                    let numbers = row.numbers.as_ptr().add(32 * pair);
                    let first = _mm256_loadu_si256(numbers.cast());
                    let second = _mm256_loadu_si256(numbers.add(64).cast());
                    let scales = _mm256_loadu_ps(row.scales.as_ptr().add(8 * pair));
                    let offsets = _mm256_loadu_ps(row.offsets.as_ptr().add(8 * pair));
                    let weights = (first, second, scales, offsets);
                    for t in 0..T {
                        let x = xs[t].get_unchecked(g);
                        sums[t][r][pair] = add_pair(O::ANY, weights, (x, pair), sums[t][r][pair]);
                    }
                }
            }
        }
        let mut products = [[0.0; R]; T];
        for t in 0..T {
            for r in 0..R {
                products[t][r] = sums[t][r][0].add(sums[t][r][1]).sum();
            }
        }
        products
    }
}
