//! Seeded test data: the same seed gives the same bits on every platform and in every release.

/// A pseudo-random generator for test data: SplitMix64.
///
/// One 64-bit counter advanced by a constant, each value passed through a mixing function
/// (Steele, Lea, Flood: "Fast Splittable Pseudorandom Number Generators", 2014). It is written out
/// here, and uses no function of the platform's maths library, so that a failing seed fails
/// everywhere and for ever. Not for cryptography, and not the library's sampler.
///
/// # Examples
/// ```
/// use testing::Seeded;
///
/// let mut data = Seeded::new(7);
/// let x = data.uniform(1000, -1.0, 1.0);
/// assert!(x.iter().all(|x| (-1.0..1.0).contains(x)));
/// assert_eq!(x, Seeded::new(7).uniform(1000, -1.0, 1.0));
/// ```
#[derive(Debug, Clone)]
pub struct Seeded {
    state: u64,
}

impl Seeded {
    /// A generator whose whole sequence is given by `seed`.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self { state: seed }
    }

    /// The next 64 bits.
    pub fn next_u64(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A whole number below `end`, each equally likely.
    ///
    /// # Panics
    /// If `end` is 0.
    pub fn below(&mut self, end: usize) -> usize {
        assert!(end > 0, "no whole number lies below 0");
        // The high word of the product; its bias, end / 2^64, is beneath any test's notice.
        ((u128::from(self.next_u64()) * end as u128) >> 64) as usize
    }

    /// A number in `[0, 1)`, a multiple of 2⁻²⁴.
    pub fn unit(&mut self) -> f32 {
        (self.next_u64() >> 40) as f32 / (1u32 << 24) as f32
    }

    /// True with probability `share`.
    pub fn chance(&mut self, share: f32) -> bool {
        self.unit() < share
    }

    /// `len` numbers evenly spread over `[low, high)`.
    ///
    /// Rounding can give `high` itself when the span is not a power of two.
    pub fn uniform(&mut self, len: usize, low: f32, high: f32) -> Vec<f32> {
        (0..len).map(|_| low + (high - low) * self.unit()).collect()
    }

    /// `len` numbers of mean 0 and variance 1, nearly normal, between −6 and 6.
    ///
    /// Each is a sum of twelve uniform numbers less six: close enough to normal for weights and
    /// activations, and additions round alike on every platform, which logarithms do not.
    pub fn normal(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| (0..12).map(|_| self.unit()).sum::<f32>() - 6.0).collect()
    }

    /// A sorted set of unique ids below `end`, each in it with probability `density`.
    ///
    /// # Panics
    /// If `end` does not fit u32.
    pub fn ids(&mut self, end: usize, density: f32) -> Vec<u32> {
        let end = u32::try_from(end).expect("ids are u32");
        (0..end).filter(|_| self.chance(density)).collect()
    }

    /// Exactly `count` sorted unique ids below `end`, every set equally likely.
    ///
    /// # Panics
    /// If `count` exceeds `end`, or `end` does not fit u32.
    pub fn ids_exactly(&mut self, end: usize, count: usize) -> Vec<u32> {
        assert!(count <= end, "{count} unique ids below {end} do not exist");
        let end = u32::try_from(end).expect("ids are u32");
        let mut wanted = count;
        (0..end)
            .filter(|id| {
                let left = (end - id) as usize;
                let picked = wanted > 0 && self.below(left) < wanted;
                wanted -= usize::from(picked);
                picked
            })
            .collect()
    }

    /// Cuts `total` into pieces of 1 to `largest`, whose lengths add up to it.
    ///
    /// # Panics
    /// If `largest` is 0.
    pub fn pieces(&mut self, total: usize, largest: usize) -> Vec<usize> {
        let mut left = total;
        let mut pieces = Vec::new();
        while left > 0 {
            let piece = 1 + self.below(largest.min(left));
            pieces.push(piece);
            left -= piece;
        }
        pieces
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sequence_is_the_published_one() {
        // The first values of the reference implementation for seed 1234567.
        let mut data = Seeded::new(1_234_567);
        let first: Vec<u64> = (0..3).map(|_| data.next_u64()).collect();
        assert_eq!(
            first,
            [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423]
        );
    }

    #[test]
    fn uniform_fills_its_interval() {
        let values = Seeded::new(1).uniform(10_000, -2.0, 2.0);
        let mean = values.iter().sum::<f32>() / values.len() as f32;
        assert!(values.iter().all(|v| (-2.0..2.0).contains(v)));
        assert!(mean.abs() < 0.1, "mean {mean}");
        assert!(values.iter().any(|v| *v < -1.9) && values.iter().any(|v| *v > 1.9));
    }

    #[test]
    fn normal_has_mean_zero_and_variance_one() {
        let values = Seeded::new(2).normal(10_000);
        let mean = values.iter().sum::<f32>() / values.len() as f32;
        let variance = values.iter().map(|v| v * v).sum::<f32>() / values.len() as f32;
        assert!(mean.abs() < 0.05, "mean {mean}");
        assert!((variance - 1.0).abs() < 0.05, "variance {variance}");
    }

    #[test]
    fn ids_are_sorted_unique_and_as_dense_as_asked() {
        let ids = Seeded::new(3).ids(10_000, 0.1);
        assert!(ids.windows(2).all(|pair| pair[0] < pair[1]));
        assert!((900..1100).contains(&ids.len()), "{} ids", ids.len());
        assert!(Seeded::new(3).ids(100, 0.0).is_empty());
        assert_eq!(Seeded::new(3).ids(100, 1.0).len(), 100);
    }

    #[test]
    fn ids_exactly_gives_the_count() {
        let mut data = Seeded::new(4);
        for (end, count) in [(0, 0), (1, 0), (1, 1), (17, 17), (1000, 1), (1000, 999)] {
            let ids = data.ids_exactly(end, count);
            assert_eq!(ids.len(), count);
            assert!(ids.windows(2).all(|pair| pair[0] < pair[1]));
            assert!(ids.iter().all(|id| (*id as usize) < end));
        }
    }

    #[test]
    fn pieces_add_up() {
        let mut data = Seeded::new(5);
        for (total, largest) in [(0, 1), (1, 1), (40, 1), (40, 7), (40, 100)] {
            let pieces = data.pieces(total, largest);
            assert_eq!(pieces.iter().sum::<usize>(), total);
            assert!(pieces.iter().all(|piece| (1..=largest).contains(piece)));
        }
    }
}
