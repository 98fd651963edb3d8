//! What a forward pass did, as plain numbers that add up.

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
#[derive(Debug, Clone, Default, PartialEq, Eq)]
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
    /// Weights read, in bytes, the head and a predictor included.
    pub weight_bytes: u64,
    /// Time spent on predicting, in nanoseconds.
    pub predictor_ns: u64,
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
            if per_layer.len() <= layer {
                per_layer.resize(layer + 1, 0);
            }
            per_layer[layer] += count;
        }
    }

    /// Adds what another step did.
    pub fn merge(&mut self, other: &Self) {
        self.n_tokens += other.n_tokens;
        add(&mut self.fired_per_layer, &other.fired_per_layer);
        add(&mut self.rows_per_layer, &other.rows_per_layer);
        add(&mut self.neurons_per_layer, &other.neurons_per_layer);
        self.weight_bytes += other.weight_bytes;
        self.predictor_ns += other.predictor_ns;
    }

    /// Sets everything to zero, keeping the memory.
    pub fn clear(&mut self) {
        self.n_tokens = 0;
        self.fired_per_layer.clear();
        self.rows_per_layer.clear();
        self.neurons_per_layer.clear();
        self.weight_bytes = 0;
        self.predictor_ns = 0;
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

    /// [`density`](Self::density) of each layer.
    #[must_use]
    pub fn density_per_layer(&self) -> Vec<f64> {
        let layers = self.rows_per_layer.iter().zip(&self.neurons_per_layer);
        layers.map(|(&rows, &neurons)| share(rows, neurons)).collect()
    }
}

fn add(to: &mut Vec<u64>, from: &[u64]) {
    if to.len() < from.len() {
        to.resize(from.len(), 0);
    }
    for (to, from) in to.iter_mut().zip(from) {
        *to += from;
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
