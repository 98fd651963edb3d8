//! The generator that everything random here begins with.

/// SplitMix64 (Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators", 2014): a counter
/// whose every value is mixed, so that a seed gives the same numbers on every platform and in every
/// release. Not for cryptography.
///
/// # Examples
/// ```
/// use powerinfer_core::SplitMix64;
///
/// let mut random = SplitMix64::new(1_234_567);
/// assert_eq!(random.next_u64(), 6_457_827_717_110_365_317);
/// assert_eq!(random.next_u64(), 3_203_168_211_198_807_973);
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SplitMix64(u64);

impl SplitMix64 {
    /// What the counter advances by: 2⁶⁴ over the golden ratio, made odd.
    pub const STEP: u64 = 0x9E37_79B9_7F4A_7C15;

    /// A generator whose whole sequence is given by `seed`.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next 64 bits.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(Self::STEP);
        Self::mix(self.0)
    }

    /// The mixing function: for numbers that are asked for in any order, each of a counter of its own.
    #[must_use]
    pub fn mix(value: u64) -> u64 {
        let value = (value ^ (value >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let value = (value ^ (value >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        value ^ (value >> 31)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sequence_is_that_of_the_reference_implementation() {
        let mut random = SplitMix64::new(1_234_567);
        let first: [u64; 3] = std::array::from_fn(|_| random.next_u64());
        assert_eq!(
            first,
            [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423]
        );
    }
}
