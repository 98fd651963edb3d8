//! The generator of the sampler, written out so that a seed means the same in every release.

use crate::split_mix::SplitMix64;

/// xoshiro256++ 1.0 (Blackman and Vigna, "Scrambled Linear Pseudorandom Number Generators", 2021),
/// its state filled by SplitMix64 as its authors advise.
#[derive(Debug, Clone)]
pub(super) struct Random {
    state: [u64; 4],
}

impl Random {
    pub(super) fn new(seed: u64) -> Self {
        let mut filling = SplitMix64::new(seed);
        Self { state: std::array::from_fn(|_| filling.next_u64()) }
    }

    fn next_u64(&mut self) -> u64 {
        let s = &mut self.state;
        let result = s[0].wrapping_add(s[3]).rotate_left(23).wrapping_add(s[0]);
        let t = s[1] << 17;
        s[2] ^= s[0];
        s[3] ^= s[1];
        s[1] ^= s[2];
        s[0] ^= s[3];
        s[2] ^= t;
        s[3] = s[3].rotate_left(45);
        result
    }

    /// A number in `[0, 1)`, a multiple of 2⁻⁵³.
    pub(super) fn unit(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 / (1u64 << 53) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sequence_is_that_of_the_reference_implementation() {
        let mut random = Random { state: [1, 2, 3, 4] };
        let first: [u64; 6] = std::array::from_fn(|_| random.next_u64());
        assert_eq!(
            first,
            [
                41_943_041,
                58_720_359,
                3_588_806_011_781_223,
                3_591_011_842_654_386,
                9_228_616_714_210_784_205,
                9_973_669_472_204_895_162,
            ]
        );
    }

    #[test]
    fn units_fill_their_interval() {
        let mut random = Random::new(0);
        let units: Vec<f64> = (0..10_000).map(|_| random.unit()).collect();
        let mean = units.iter().sum::<f64>() / 1e4;
        assert!(units.iter().all(|unit| (0.0..1.0).contains(unit)));
        assert!((mean - 0.5).abs() < 0.01, "mean {mean}");
    }
}
