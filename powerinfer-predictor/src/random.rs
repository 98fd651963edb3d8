//! Numbers that only the seed decides.

/// SplitMix64 (Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators", 2014): a counter
/// whose every value is mixed, so that one generator is the same on every platform.
#[derive(Debug, Clone)]
pub(crate) struct Random(u64);

impl Random {
    /// A generator of its own for each pair of numbers.
    pub(crate) fn new(seed: u64, stream: u64) -> Self {
        let mut this = Self(seed);
        this.0 = this.next_u64() ^ stream.wrapping_mul(0xD134_2543_DE82_EF95);
        this
    }

    pub(crate) fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Of mean 0 and variance 1, nearly normal: a sum of four even numbers, which needs no function
    /// that platforms round differently.
    pub(crate) fn normal(&mut self) -> f32 {
        let sum: f32 = (0..4).map(|_| (self.next_u64() >> 40) as f32 / (1u32 << 24) as f32).sum();
        (sum - 2.0) * 3f32.sqrt()
    }

    /// The numbers below `n` in any order.
    pub(crate) fn order(&mut self, n: usize) -> Vec<usize> {
        let mut order: Vec<usize> = (0..n).collect();
        for last in (1..n).rev() {
            let other = (u128::from(self.next_u64()) * (last as u128 + 1)) >> 64;
            order.swap(last, other as usize);
        }
        order
    }
}
