//! What a forward pass did, as plain numbers that add up.

use std::ops::AddAssign;

/// How much of a model's feed-forward networks ran, and what it cost.
///
/// Every field is a sum over the tokens and adds to that of another step with
/// [`merge`](Self::merge).
///
/// # Examples
/// ```
/// use powerinfer_core::StepStats;
///
/// let mut stats = StepStats { n_tokens: 2, ..StepStats::default() };
/// stats.record_ffn(0, 30, 40, 200);
/// stats.record_ffn(1, 10, 20, 200);
/// assert_eq!(stats.density(), 0.15);
/// assert_eq!(stats.fired_density(), 0.1);
/// assert_eq!(stats.density_per_layer(), [0.2, 0.1]);
/// ```
#[derive(Debug, Clone, Default, PartialEq)]
pub struct StepStats {
    /// Tokens that went through.
    pub n_tokens: u64,
    /// A layer at a time: neurons whose activation was not zero.
    pub fired_per_layer: Vec<u64>,
    /// A layer at a time: neurons that the sparsity mode asked for, that is rows of the down
    /// projection that were used.
    pub rows_per_layer: Vec<u64>,
    /// A layer at a time: neurons that there are, `d_ff · n_tokens`.
    pub neurons_per_layer: Vec<u64>,
    /// A layer at a time: neurons whose gate was computed, which are all of them unless a predictor
    /// picks.
    pub picked_per_layer: Vec<u64>,
    /// A layer at a time: how the predictor's picks compare with the truth, where
    /// [`Step::measure_prediction`](crate::Step::measure_prediction) asks for it.
    pub prediction_per_layer: Vec<PredictionCounts>,
    /// Weights read, in bytes, the head and a predictor included.
    pub weight_bytes: u64,
    /// Time spent on predicting, in nanoseconds.
    pub predictor_ns: u64,
    /// How the work was shared with a fast device; all zero without one.
    pub split: SplitStats,
}

impl StepStats {
    /// Adds the counts of one feed-forward network, each summed over the tokens of the pass.
    pub fn record_ffn(&mut self, layer: usize, fired: u64, rows: u64, neurons: u64) {
        let counts = [
            (&mut self.fired_per_layer, fired),
            (&mut self.rows_per_layer, rows),
            (&mut self.neurons_per_layer, neurons),
        ];
        for (per_layer, count) in counts {
            at(per_layer, layer).add_assign(count);
        }
    }

    /// Adds how many neurons of a feed-forward network had their gate computed.
    pub fn record_picked(&mut self, layer: usize, picked: u64) {
        at(&mut self.picked_per_layer, layer).add_assign(picked);
    }

    /// Adds how a predictor's picks compare with the truth.
    pub fn record_prediction(&mut self, layer: usize, counts: PredictionCounts) {
        at(&mut self.prediction_per_layer, layer).add_assign(counts);
    }

    /// Adds what another step did.
    pub fn merge(&mut self, other: &Self) {
        self.n_tokens += other.n_tokens;
        add(&mut self.picked_per_layer, &other.picked_per_layer);
        add(&mut self.prediction_per_layer, &other.prediction_per_layer);
        add(&mut self.fired_per_layer, &other.fired_per_layer);
        add(&mut self.rows_per_layer, &other.rows_per_layer);
        add(&mut self.neurons_per_layer, &other.neurons_per_layer);
        self.weight_bytes += other.weight_bytes;
        self.predictor_ns += other.predictor_ns;
        self.split += other.split;
    }

    /// Sets everything to zero, keeping the memory.
    pub fn clear(&mut self) {
        self.n_tokens = 0;
        self.fired_per_layer.clear();
        self.rows_per_layer.clear();
        self.neurons_per_layer.clear();
        self.picked_per_layer.clear();
        self.prediction_per_layer.clear();
        self.weight_bytes = 0;
        self.predictor_ns = 0;
        self.split = SplitStats::default();
    }

    /// Share of neurons whose down row was used: 1 is dense. 0 if nothing ran.
    #[must_use]
    pub fn density(&self) -> f64 {
        share(self.rows_per_layer.iter().sum(), self.neurons_per_layer.iter().sum())
    }

    /// Share of neurons that fired. 0 if nothing ran.
    #[must_use]
    pub fn fired_density(&self) -> f64 {
        share(self.fired_per_layer.iter().sum(), self.neurons_per_layer.iter().sum())
    }

    /// Share of neurons whose gate was computed: 1 unless a predictor picks.
    #[must_use]
    pub fn picked_density(&self) -> f64 {
        if self.picked_per_layer.is_empty() {
            return 1.0;
        }
        share(self.picked_per_layer.iter().sum(), self.neurons_per_layer.iter().sum())
    }

    /// How predictions compare with the truth, over all layers; `None` if nobody asked or nothing
    /// predicts.
    #[must_use]
    pub fn prediction(&self) -> Option<PredictionCounts> {
        let measured = self.prediction_per_layer.iter().filter(|counts| counts.neurons > 0);
        measured.copied().reduce(|mut sum, counts| {
            sum += counts;
            sum
        })
    }

    /// [`density`](Self::density) of each layer.
    #[must_use]
    pub fn density_per_layer(&self) -> Vec<f64> {
        let layers = self.rows_per_layer.iter().zip(&self.neurons_per_layer);
        layers.map(|(&rows, &neurons)| share(rows, neurons)).collect()
    }
}

/// How feed-forward networks were shared between the CPU and a fast device; additive over tokens and
/// layers.
///
/// The two sides of a layer begin together, so its time is that of the longer one: the sides are
/// balanced where `fast_ns` is about `cold_ns` and little of it is spent waiting.
///
/// # Examples
/// ```
/// use powerinfer_core::SplitStats;
///
/// let mut split = SplitStats::default();
/// (split.layers, split.fired, split.fast_fired) = (2, 40, 30);
/// (split.cold_ns, split.fast_ns, split.wait_ns) = (90, 100, 20);
/// assert_eq!(split.hit_rate(), 0.75);
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SplitStats {
    /// Passes through a layer that both sides worked on.
    pub layers: u64,
    /// Neurons that fired in them.
    pub fired: u64,
    /// Of these, the hot ones.
    pub fast_fired: u64,
    /// Weights read on the fast device, in bytes; [`StepStats::weight_bytes`] counts them, too.
    pub fast_bytes: u64,
    /// Time that the CPU took for its rows, in nanoseconds.
    pub cold_ns: u64,
    /// Time that the fast device was at work, both ways over the link included, in nanoseconds.
    pub fast_ns: u64,
    /// Time that the CPU, done with its rows, waited for the fast device, in nanoseconds.
    pub wait_ns: u64,
}

impl SplitStats {
    /// Share of the neurons that fired which were hot; 0 if none fired.
    #[must_use]
    pub fn hit_rate(&self) -> f64 {
        share(self.fast_fired, self.fired)
    }
}

impl AddAssign for SplitStats {
    fn add_assign(&mut self, other: Self) {
        self.layers += other.layers;
        self.fired += other.fired;
        self.fast_fired += other.fast_fired;
        self.fast_bytes += other.fast_bytes;
        self.cold_ns += other.cold_ns;
        self.fast_ns += other.fast_ns;
        self.wait_ns += other.wait_ns;
    }
}

/// Counts of a prediction against the truth; additive over tokens and layers.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct PredictionCounts {
    /// Neurons there are: tokens × neurons.
    pub neurons: u64,
    /// Neurons that were picked.
    pub picked: u64,
    /// Neurons that truly fire.
    pub fired: u64,
    /// Neurons that were picked and truly fire.
    pub hits: u64,
    /// Sum of the magnitudes of all activations.
    pub mass: f64,
    /// Of these, the magnitudes of the neurons that were picked.
    pub mass_hits: f64,
}

impl PredictionCounts {
    /// Share of the firing neurons that were picked; 1 if none fires.
    #[must_use]
    pub fn recall(&self) -> f64 {
        if self.fired == 0 { 1.0 } else { share(self.hits, self.fired) }
    }

    /// Share of the activation mass that was picked; 1 if there is none.
    #[must_use]
    pub fn recall_mass(&self) -> f64 {
        if self.mass == 0.0 { 1.0 } else { self.mass_hits / self.mass }
    }

    /// Share of the picked neurons that fire; 1 if none was picked.
    #[must_use]
    pub fn precision(&self) -> f64 {
        if self.picked == 0 { 1.0 } else { share(self.hits, self.picked) }
    }

    /// Share of all neurons that were picked.
    #[must_use]
    pub fn picked_density(&self) -> f64 {
        share(self.picked, self.neurons)
    }

    /// Share of all neurons that truly fire.
    #[must_use]
    pub fn fired_density(&self) -> f64 {
        share(self.fired, self.neurons)
    }
}

impl AddAssign for PredictionCounts {
    fn add_assign(&mut self, other: Self) {
        self.neurons += other.neurons;
        self.picked += other.picked;
        self.fired += other.fired;
        self.hits += other.hits;
        self.mass += other.mass;
        self.mass_hits += other.mass_hits;
    }
}

/// Entry `layer`, which is made if it is not there.
fn at<T: Clone + Default>(per_layer: &mut Vec<T>, layer: usize) -> &mut T {
    if per_layer.len() <= layer {
        per_layer.resize(layer + 1, T::default());
    }
    &mut per_layer[layer]
}

fn add<T: Copy + Default + AddAssign>(to: &mut Vec<T>, from: &[T]) {
    if to.len() < from.len() {
        to.resize(from.len(), T::default());
    }
    for (to, from) in to.iter_mut().zip(from) {
        *to += *from;
    }
}

fn share(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(layers: &[(u64, u64, u64)]) -> StepStats {
        let mut stats =
            StepStats { n_tokens: 1, weight_bytes: 7, predictor_ns: 3, ..Default::default() };
        for (layer, &(fired, rows, neurons)) in layers.iter().enumerate() {
            stats.split += SplitStats { layers: 1, fired, fast_ns: rows, ..Default::default() };
            stats.record_ffn(layer, fired, rows, neurons);
        }
        stats
    }

    #[test]
    fn merging_adds_layer_by_layer_whatever_the_lengths() {
        for (one, other) in [(1, 3), (3, 1), (2, 2), (0, 2)] {
            let layers = [(1, 2, 10), (3, 4, 10), (5, 6, 10)];
            let (a, b) = (step(&layers[..one]), step(&layers[..other]));
            let mut both = a.clone();
            both.merge(&b);
            let mut reversed = b.clone();
            reversed.merge(&a);
            assert_eq!(both, reversed);
            assert_eq!((both.n_tokens, both.weight_bytes, both.predictor_ns), (2, 14, 6));
            assert_eq!(both.fired_per_layer.len(), one.max(other));
        }
    }

    #[test]
    fn recording_a_layer_again_adds() {
        let mut stats = step(&[(1, 2, 10)]);
        stats.record_ffn(0, 1, 3, 10);
        assert_eq!(stats.density(), 0.25);
        assert_eq!(stats.fired_density(), 0.1);
    }

    #[test]
    fn nothing_has_density_zero_and_clearing_gives_nothing() {
        let mut stats = step(&[(1, 2, 10)]);
        stats.clear();
        assert_eq!(stats, StepStats::default());
        assert_eq!((stats.density(), stats.fired_density()), (0.0, 0.0));
        assert!(stats.density_per_layer().is_empty());
    }
}
