//! Dot products of quantised rows with values rounded to eight bits.
//!
//! The idea: a block of 32 weights is `scale · number[i]` with small whole numbers. If the 32 values
//! it meets are `x_scale · x_number[i]` as well, the block's share of the product is
//! `scale · x_scale · Σ number[i] · x_number[i]`, and the sum is one of whole numbers, which CPUs
//! form four products a lane at a time. An offset that the weights share adds
//! `offset · x_scale · Σ x_number[i]`. The naive loop is
//! [`NumberFormat::dot_int8`](crate::format::NumberFormat::dot_int8).
//!
//! What it costs in exactness: `x_scale` is the largest magnitude of the block over 127, so each
//! value moves by at most half of it and a product by at most
//! `Σ_blocks max|x| / 254 · Σ_i |w[i]|`, besides the rounding of f32 sums. ggml makes the same
//! trade. The whole numbers are the same in every kernel table; only the sum over blocks, in f32,
//! has an order of its own in each.
//!
//! Values are laid out for the widest registers: four blocks are a group, the first halves of its
//! blocks side by side, then the second halves. That is how the four-bit numbers of four blocks
//! come out of a register.

use bytemuck::{Pod, Zeroable};

/// Values of a block.
pub(crate) const BLOCK: usize = 32;
/// Half of a block.
const HALF: usize = BLOCK / 2;
/// Blocks of a group.
pub(crate) const BLOCKS: usize = 4;
/// Values of a group.
const GROUP_VALUES: usize = BLOCK * BLOCKS;
/// By how many bits numbers are shifted to the left in [`InputGroup::corrections`], as 128 is what is
/// added to signed bytes to make them unsigned.
pub(crate) const OFFSET_BITS: u32 = 7;
/// Added to a float below 2²² it leaves the nearest whole number in the lowest bits, ties to even.
const ROUND: f32 = 12_582_912.0;
/// The largest magnitude below which a block counts as zeros: the inverse of its scale would be
/// infinite.
const SMALLEST: f32 = 1e-36;

/// 128 values of a token, rounded to eight bits.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C, align(64))]
pub(crate) struct InputGroup {
    /// From −127 to 127: the first halves of the four blocks, then the second halves.
    pub(crate) numbers: [i8; GROUP_VALUES],
    /// `−128 · Σ numbers` for each run of four numbers and the four half a group further on: what
    /// a sum of products has too little or too much where weights were made unsigned.
    pub(crate) corrections: [i32; 16],
    /// The scale of each block, four times.
    pub(crate) scales: [f32; 16],
}

/// 128 weights of a row, unpacked to bytes: what a tile of products reads.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C, align(64))]
pub(crate) struct WeightGroup {
    /// Laid out as [`InputGroup::numbers`]; signed, or made unsigned as the kernel table likes it.
    pub(crate) numbers: [u8; GROUP_VALUES],
    /// The scale of each block, four times.
    pub(crate) scales: [f32; 16],
    /// The offset of each block, four times; not written for formats that have none.
    pub(crate) offsets: [f32; 16],
}

/// Whether weights have offsets: what tiles of products are compiled for.
pub(crate) trait Offsets {
    const ANY: bool;
}

/// Weights that have.
pub(crate) struct WithOffsets;

/// Weights that have not.
pub(crate) struct WithoutOffsets;

impl Offsets for WithOffsets {
    const ANY: bool = true;
}

impl Offsets for WithoutOffsets {
    const ANY: bool = false;
}

/// Groups of a row of `n_values` values.
pub(crate) fn n_groups(n_values: usize) -> usize {
    n_values.div_ceil(GROUP_VALUES)
}

impl InputGroup {
    /// The numbers of a block, in order.
    pub(crate) fn block_numbers(&self, block: usize) -> impl Iterator<Item = i8> {
        let (first, second) = self.numbers.split_at(GROUP_VALUES / 2);
        let half = block * HALF..(block + 1) * HALF;
        first[half.clone()].iter().chain(&second[half]).copied()
    }

    /// The scale of a block.
    pub(crate) fn block_scale(&self, block: usize) -> f32 {
        self.scales[block * BLOCKS]
    }
}

/// Rounds the values of a token, whole blocks, to eight bits; the last group is filled up with
/// zeros. A block with a value that is not finite gets NaN for a scale, so nothing is lost.
///
/// Plain loops without a branch a value: each kernel table compiles them for its instructions,
/// with the same bits everywhere.
#[inline(always)]
pub(crate) fn quantize(values: &[f32], groups: &mut [InputGroup]) {
    for (values, group) in values.chunks(GROUP_VALUES).zip(groups) {
        *group = InputGroup::zeroed();
        for (block, values) in values.as_chunks::<BLOCK>().0.iter().enumerate() {
            let (scale, inverse) = scale_of(values);
            group.scales[block * BLOCKS..][..BLOCKS].fill(scale);
            for (i, value) in values.iter().enumerate() {
                let rounded = (value * inverse + ROUND).to_bits().wrapping_sub(ROUND.to_bits());
                let half = i / HALF * (GROUP_VALUES / 2);
                // the lowest eight bits of a number from −127 to 127
                group.numbers[half + block * HALF + i % HALF] = rounded as i8;
            }
        }
        for (lane, correction) in group.corrections.iter_mut().enumerate() {
            let mut sum = 0;
            for i in 0..4 {
                sum += i32::from(group.numbers[lane * 4 + i]);
                sum += i32::from(group.numbers[GROUP_VALUES / 2 + lane * 4 + i]);
            }
            *correction = -(sum << OFFSET_BITS);
        }
    }
}

/// The scale of a block and what to multiply its values with.
#[inline(always)]
fn scale_of(values: &[f32; BLOCK]) -> (f32, f32) {
    // magnitudes order as their bits do, with infinity and NaN above all numbers
    let mut bits = 0;
    for value in values {
        bits = bits.max(value.to_bits() & !(1 << 31));
    }
    let largest = f32::from_bits(bits);
    if largest < SMALLEST {
        (0.0, 0.0)
    } else if largest < f32::INFINITY {
        (largest / 127.0, 127.0 / largest)
    } else {
        (f32::NAN, 0.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use testing::Seeded;

    fn quantized(values: &[f32]) -> Vec<InputGroup> {
        let mut groups = vec![InputGroup::zeroed(); n_groups(values.len())];
        quantize(values, &mut groups);
        groups
    }

    fn back(groups: &[InputGroup], n: usize) -> Vec<f32> {
        let blocks = (0..n / BLOCK).map(|b| (&groups[b / BLOCKS], b % BLOCKS));
        blocks
            .flat_map(|(group, b)| {
                group.block_numbers(b).map(move |x| f32::from(x) * group.block_scale(b))
            })
            .collect()
    }

    #[test]
    fn a_value_moves_by_at_most_half_a_step() {
        for n in [32, 64, 128, 160, 512] {
            let values = Seeded::new(n as u64).normal(n);
            let found = back(&quantized(&values), n);
            for (values, found) in values.chunks(BLOCK).zip(found.chunks(BLOCK)) {
                let largest = values.iter().fold(0f32, |a, b| a.max(b.abs()));
                for (value, found) in values.iter().zip(found) {
                    assert!((value - found).abs() <= largest / 254.0 * 1.0001, "{value} {found}");
                }
            }
        }
    }

    #[test]
    fn the_largest_value_is_127_and_ties_go_to_even() {
        let mut values = [0.0; BLOCK];
        (values[0], values[17], values[2], values[3]) = (-127.0, 2.5, 3.5, 127.0);
        let groups = quantized(&values);
        let numbers: Vec<i8> = groups[0].block_numbers(0).collect();
        assert_eq!((numbers[0], numbers[17], numbers[2], numbers[3]), (-127, 2, 4, 127));
        assert_eq!(groups[0].scales, [[1.0; 4], [0.0; 4], [0.0; 4], [0.0; 4]].concat()[..]);
        // the lane of number 0: −127 + 4 + 127; 17 is the second of the second half
        assert_eq!(groups[0].corrections[0], -128 * (-127 + 4 + 127 + 2));
    }

    #[test]
    fn zeros_stay_zeros_and_what_is_not_finite_is_not_lost() {
        let groups = quantized(&[0.0; 64]);
        assert_eq!(back(&groups, 64), [0.0; 64]);
        assert_eq!(back(&quantized(&[1e-40; 32]), 32), [0.0; 32]);
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut values = [1.0; 64];
            values[40] = bad;
            let groups = quantized(&values);
            assert!(groups[0].block_scale(1).is_nan());
            assert_eq!(groups[0].block_scale(0), 1.0 / 127.0);
        }
    }
}
