//! Numbers that only the seed decides.

use powerinfer_core::SplitMix64;

/// A [`SplitMix64`] and what is made of its numbers.
#[derive(Debug, Clone)]
pub(crate) struct Random(SplitMix64);

impl Random {
    /// A generator of its own for each pair of numbers.
    pub(crate) fn new(seed: u64, stream: u64) -> Self {
        let first = SplitMix64::new(seed).next_u64();
        Self(SplitMix64::new(first ^ stream.wrapping_mul(0xD134_2543_DE82_EF95)))
    }

    pub(crate) fn next_u64(&mut self) -> u64 {
        self.0.next_u64()
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
