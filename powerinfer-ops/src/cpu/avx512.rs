//! The row primitives with AVX-512 (F, BW, VL): sixteen values a register.

#![allow(unsafe_code, reason = "intrinsics")]

use std::arch::x86_64::*;

use super::attention_rows::AVX512 as ATTENTION;
use super::int8::{self, InputGroup};
use super::simd::{self, STEP, Steps, TURN, Vector};
use super::simd_blocks;
use super::simd_dots;
use super::simd_sums;
use super::simd_table::simd_table;
use super::tiles::tiles;
use super::{
    F32Products, GROUP, Int8Table, PANEL, PANEL_ROWS, PanelTile, Products, RowPrimitives,
    RowValues, Rows, Table, TokenScales,
};

// 32 registers: 24 sums, 3 values of rows, 1 of a vector; or 16 sums, 4 of a panel, 1 scale.
simd_table!(__m512, "avx512f,avx512bw,avx512vl,avx2,fma,f16c", 2, 6, 4, 16);

/// Handed out by `RowKernels::available` alone, after it saw the instructions.
pub(super) static TABLE: Table = table("avx512", super::int8_avx2::INT8);

/// The same for CPUs that have VNNI as well.
pub(super) static TABLE_VNNI: Table = table("avx512vnni", super::int8_avx512::INT8);

// SAFETY of each block below: the caller has the instructions and, for loads and stores, the bytes,
// as `Vector` requires; no intrinsic used here needs alignment.
impl Vector for __m512 {
    const LANES: usize = 16;

    #[inline(always)]
    unsafe fn zero() -> Self {
        // SAFETY: see above.
        unsafe { _mm512_setzero_ps() }
    }

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        // SAFETY: see above.
        unsafe { _mm512_set1_ps(value) }
    }

    #[inline(always)]
    unsafe fn load_f32(at: *const u8) -> Self {
        // SAFETY: see above.
        unsafe { _mm512_loadu_ps(at.cast()) }
    }

    #[inline(always)]
    unsafe fn load_f16(at: *const u8) -> Self {
        // SAFETY: see above.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(at.cast())) }
    }

    #[inline(always)]
    unsafe fn load_bf16(at: *const u8) -> Self {
        // SAFETY: see above.
        unsafe {
            let halves = _mm512_cvtepu16_epi32(_mm256_loadu_si256(at.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(halves))
        }
    }

    #[inline(always)]
    unsafe fn load_i8(at: *const u8) -> Self {
        // SAFETY: see above.
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(at.cast()))) }
    }

    /// The scaled value of each of the sixteen numbers.
    type Nibbles = Self;

    #[inline(always)]
    unsafe fn nibbles(scale: Self) -> Self {
        // SAFETY: see above.
        unsafe {
            let values = _mm512_setr_ps(
                -8.0, -7.0, -6.0, -5.0, -4.0, -3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0,
                7.0,
            );
            _mm512_mul_ps(values, scale)
        }
    }

    #[inline(always)]
    unsafe fn load_u4(nibbles: Self, at: *const u8, high: bool) -> Self {
        // SAFETY: see above. The permutation looks at the lowest four bits of an index only.
        unsafe {
            let bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(at.cast()));
            let indices = if high { _mm512_srli_epi32::<4>(bytes) } else { bytes };
            _mm512_permutexvar_ps(indices, nibbles)
        }
    }

    /// Four blocks in one register, a dword of numbers a lane: eight shifts give all numbers, where each
    /// block alone takes two loads that spread bytes, and one vector of scales serves all. So the sums of
    /// register `n` are those of number `n` of each dword.
    #[inline(always)]
    unsafe fn axpys_u4<const R: usize>(
        factors: [Self; R],
        rows: [*const u8; R],
        y: &mut [[f32; STEP]; TURN],
    ) {
        // SAFETY: the caller has the instructions and the 72 bytes; `n < 8` bounds the sums.
        unsafe {
            let numbers = _mm512_setr_ps(
                -8.0, -7.0, -6.0, -5.0, -4.0, -3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0,
                7.0,
            );
            let mut dwords = [_mm512_setzero_si512(); R];
            let mut scales = [_mm512_setzero_ps(); R];
            for r in 0..R {
                let (bytes, of_blocks) = four_q4_0_blocks(rows[r]);
                dwords[r] = bytes;
                scales[r] = _mm512_mul_ps(factors[r], of_blocks);
            }
            let y = y.as_flattened_mut().as_mut_ptr();
            for n in 0..8 {
                let at = y.add(n * Self::LANES);
                let mut sum = _mm512_loadu_ps(at);
                for r in 0..R {
                    // the permutation looks at the lowest four bits of an index only
                    let values = _mm512_permutexvar_ps(dwords[r], numbers);
                    sum = _mm512_fmadd_ps(scales[r], values, sum);
                    dwords[r] = _mm512_srli_epi32::<4>(dwords[r]);
                }
                _mm512_storeu_ps(at, sum);
            }
        }
    }

    /// Number `n` of dword `d` of a block is value `4 · d + n / 2` of its first half if `n` is even, else
    /// of its second.
    #[inline(always)]
    unsafe fn settle_u4(sum: &[[f32; STEP]; TURN], y: &mut [[f32; STEP]; TURN]) {
        // SAFETY: the caller has the instructions; a turn is eight registers.
        unsafe {
            let sum = sum.as_flattened().as_ptr();
            let y = y.as_flattened_mut().as_mut_ptr();
            let mut halves = [[_mm512_setzero_ps(); 4]; 2];
            for n in 0..8 {
                halves[n % 2][n / 2] = _mm512_loadu_ps(sum.add(n * Self::LANES));
            }
            for (half, [a, b, c, d]) in halves.into_iter().enumerate() {
                // a dword's four values side by side
                let low = _mm512_castps_pd(_mm512_unpacklo_ps(a, b));
                let low_more = _mm512_castps_pd(_mm512_unpacklo_ps(c, d));
                let high = _mm512_castps_pd(_mm512_unpackhi_ps(a, b));
                let high_more = _mm512_castps_pd(_mm512_unpackhi_ps(c, d));
                let d0 = _mm512_unpacklo_pd(low, low_more);
                let d1 = _mm512_unpackhi_pd(low, low_more);
                let d2 = _mm512_unpacklo_pd(high, high_more);
                let d3 = _mm512_unpackhi_pd(high, high_more);
                // the four dwords of a block
                let (even, odd) = (
                    [_mm512_shuffle_f64x2::<0x44>(d0, d1), _mm512_shuffle_f64x2::<0xEE>(d0, d1)],
                    [_mm512_shuffle_f64x2::<0x44>(d2, d3), _mm512_shuffle_f64x2::<0xEE>(d2, d3)],
                );
                for pair in 0..2 {
                    let first = _mm512_shuffle_f64x2::<0x88>(even[pair], odd[pair]);
                    let second = _mm512_shuffle_f64x2::<0xDD>(even[pair], odd[pair]);
                    let at = y.add(2 * pair * STEP + half * Self::LANES);
                    let next = at.add(STEP);
                    let first = _mm512_add_ps(_mm512_loadu_ps(at), _mm512_castpd_ps(first));
                    let second = _mm512_add_ps(_mm512_loadu_ps(next), _mm512_castpd_ps(second));
                    _mm512_storeu_ps(at, first);
                    _mm512_storeu_ps(next, second);
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn splat_f16(at: *const u8) -> Self {
        // SAFETY: see above.
        unsafe { _mm512_cvtph_ps(_mm256_set1_epi16(at.cast::<i16>().read_unaligned())) }
    }

    type Ints = __m512i;

    #[inline(always)]
    unsafe fn load_u8(at: *const u8) -> __m512i {
        // SAFETY: see above.
        unsafe { _mm512_cvtepu8_epi32(_mm_loadu_si128(at.cast())) }
    }

    #[inline(always)]
    unsafe fn bits(ints: __m512i, shift: u32, mask: i32) -> __m512i {
        // SAFETY: see above.
        unsafe {
            let shifted = _mm512_srl_epi32(ints, _mm_cvtsi32_si128(shift as i32));
            _mm512_and_si512(shifted, _mm512_set1_epi32(mask))
        }
    }

    #[inline(always)]
    unsafe fn spread_bits(word: u32) -> __m512i {
        // SAFETY: see above.
        unsafe {
            let lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
            let shifted = _mm512_srlv_epi32(_mm512_set1_epi32(word as i32), lanes);
            _mm512_and_si512(shifted, _mm512_set1_epi32(1))
        }
    }

    #[inline(always)]
    unsafe fn join(low: __m512i, high: __m512i, shift: u32) -> __m512i {
        // SAFETY: see above.
        unsafe { _mm512_or_si512(low, _mm512_sll_epi32(high, _mm_cvtsi32_si128(shift as i32))) }
    }

    #[inline(always)]
    unsafe fn minus(ints: __m512i, bias: i32) -> __m512i {
        // SAFETY: see above.
        unsafe { _mm512_sub_epi32(ints, _mm512_set1_epi32(bias)) }
    }

    #[inline(always)]
    unsafe fn to_f32(ints: __m512i) -> Self {
        // SAFETY: see above.
        unsafe { _mm512_cvtepi32_ps(ints) }
    }

    #[inline(always)]
    unsafe fn mul(self, factor: Self) -> Self {
        // SAFETY: see above.
        unsafe { _mm512_mul_ps(self, factor) }
    }

    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        // SAFETY: see above.
        unsafe { _mm512_add_ps(self, other) }
    }

    #[inline(always)]
    unsafe fn store(self, at: *mut f32) {
        // SAFETY: see above.
        unsafe { _mm512_storeu_ps(at, self) }
    }

    #[inline(always)]
    unsafe fn mul_add(self, factor: Self, addend: Self) -> Self {
        // SAFETY: see above.
        unsafe { _mm512_fmadd_ps(self, factor, addend) }
    }

    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        // SAFETY: see above.
        unsafe {
            let high = _mm256_castpd_ps(_mm512_extractf64x4_pd::<1>(_mm512_castps_pd(self)));
            _mm256_add_ps(_mm512_castps512_ps256(self), high).sum()
        }
    }

    /// Halves are added to halves as in `sum`, those of two and four vectors side by side.
    #[inline(always)]
    unsafe fn sum4(v: [Self; 4]) -> [f32; 4] {
        // SAFETY: see above.
        unsafe {
            let mut eights = [_mm256_setzero_ps(); 4];
            for i in 0..4 {
                let high = _mm256_castpd_ps(_mm512_extractf64x4_pd::<1>(_mm512_castps_pd(v[i])));
                eights[i] = _mm256_add_ps(_mm512_castps512_ps256(v[i]), high);
            }
            let mut fours = [_mm256_setzero_ps(); 2];
            for i in 0..2 {
                let (a, b) = (eights[2 * i], eights[2 * i + 1]);
                let low = _mm256_permute2f128_ps::<0x20>(a, b);
                fours[i] = _mm256_add_ps(low, _mm256_permute2f128_ps::<0x31>(a, b));
            }
            let (ab, cd) = (_mm256_castps_pd(fours[0]), _mm256_castps_pd(fours[1]));
            let low = _mm256_castpd_ps(_mm256_unpacklo_pd(ab, cd));
            let twos = _mm256_add_ps(low, _mm256_castpd_ps(_mm256_unpackhi_pd(ab, cd)));
            // sums of a, c, b, d in every second lane
            let ones = _mm256_add_ps(twos, _mm256_movehdup_ps(twos));
            let mut lanes = [0.0; 8];
            _mm256_storeu_ps(lanes.as_mut_ptr(), ones);
            [lanes[0], lanes[4], lanes[2], lanes[6]]
        }
    }

    #[inline(always)]
    unsafe fn prefetch(at: *const u8) {
        // SAFETY: see above; a prefetch never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) }
    }
}

/// The numbers of four blocks of Q4_0, without what is between them, and their scales, four times each.
///
/// # Safety
/// - the CPU has AVX-512 F and BW
/// - 72 bytes at `at` are readable
#[inline(always)]
pub(super) unsafe fn four_q4_0_blocks(at: *const u8) -> (__m512i, __m512) {
    // SAFETY: the caller has the instructions and the bytes.
    unsafe {
        let words = _mm512_loadu_si512(at.cast());
        // the second register begins at word 4, so that it ends with the last block
        let more = _mm512_loadu_si512(at.add(8).cast());
        let places = _mm512_loadu_si512(PLACES.as_ptr().cast());
        let scale_places = _mm512_setr_epi64(0, 9 * EACH, 18 * EACH, 27 * EACH, 0, 0, 0, 0);
        let scales = _mm512_permutexvar_epi16(scale_places, words);
        (
            _mm512_permutex2var_epi16(words, places, more),
            _mm512_cvtph_ps(_mm512_castsi512_si256(scales)),
        )
    }
}

/// A word four times.
pub(super) const EACH: i64 = 0x0001_0001_0001_0001;

/// Where the numbers of four blocks of nine words are, of which the first is a scale, in the words from
/// 0 on and, from 32, those from 4 on.
const PLACES: [i16; 32] = {
    let mut places = [0; 32];
    let mut i = 0;
    while i < places.len() {
        let word = (i / 8 * 9 + 1 + i % 8) as i16;
        places[i] = if word < 32 { word } else { word - 4 + 32 };
        i += 1;
    }
    places
};

fn fold(bytes: &[u8]) -> u64 {
    #[target_feature(enable = "avx512f,avx2")]
    fn inner(blocks: &[[__m512i; 8]]) -> u64 {
        let mut folds = [_mm512_setzero_si512(); 8];
        for block in blocks {
            for (fold, value) in folds.iter_mut().zip(block) {
                *fold = _mm512_xor_si512(*fold, *value);
            }
        }
        let all = folds.into_iter().fold(_mm512_setzero_si512(), |a, b| _mm512_xor_si512(a, b));
        let half =
            _mm256_xor_si256(_mm512_castsi512_si256(all), _mm512_extracti64x4_epi64::<1>(all));
        bytemuck::cast::<__m256i, [u64; 4]>(half).into_iter().fold(0, |a, b| a ^ b)
    }
    // SAFETY: every bit pattern is a valid register, and `align_to` keeps within the bytes.
    let (head, blocks, tail) = unsafe { bytes.align_to::<[__m512i; 8]>() };
    let rest = super::scalar::fold(head) ^ super::scalar::fold(tail);
    // SAFETY: the table is handed out only where the instructions exist.
    rest ^ unsafe { inner(blocks) }
}
