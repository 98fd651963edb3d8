//! Running a stored model the way the laws need it.
#![allow(dead_code, reason = "each test uses a part")]

use std::num::NonZeroUsize;
use std::sync::LazyLock;

use powerinfer_core::{
    CausalLm, KvCache, ModelConfig, ModelInfo, Placement, Sparsity, Step, StepStats, WantedLogits,
};
use powerinfer_models::{
    LoadOptions, PredictorOptions, PredictorSource, load, supported_model_types,
};
use powerinfer_ops::attention::KvDtype;
use powerinfer_ops::{LowBitFormat, NeuronIds, ThreadPool, WeightFormat};
use testing::{Fixture, Seeded};

/// No fixture is longer.
pub(crate) const MAX_BYTES: u64 = 1 << 20;

/// The modes that the fixture's model runs in; what holds in one has to hold in the other.
pub(crate) fn modes(fixture: &Fixture) -> &'static [Sparsity] {
    let config = ModelConfig::from_dir(&fixture.model_dir, &supported_model_types());
    match config.expect("a fixture's configuration").activation.is_sparse() {
        true => &[Sparsity::Dense, Sparsity::Exact],
        false => &[Sparsity::Dense],
    }
}

/// What came out of some tokens.
#[derive(Debug, Default)]
pub(crate) struct Run {
    /// `[n_tokens, vocab_size]` logits after each token.
    pub(crate) logits: Vec<f32>,
    /// The statistics of all steps together.
    pub(crate) stats: StepStats,
}

impl Run {
    /// The logits after token `i`.
    pub(crate) fn row(&self, model: &dyn CausalLm, i: usize) -> &[f32] {
        let vocab_size = model.info().vocab_size;
        &self.logits[i * vocab_size..(i + 1) * vocab_size]
    }
}

/// The fixture's model, its weights held in the file's own type.
pub(crate) fn load_fixture(fixture: &Fixture, sparsity: Sparsity) -> Box<dyn CausalLm> {
    load_fixture_as(fixture, sparsity, None)
}

/// The fixture's model, its weights held as `dtype`.
pub(crate) fn load_fixture_as(
    fixture: &Fixture,
    sparsity: Sparsity,
    dtype: Option<WeightFormat>,
) -> Box<dyn CausalLm> {
    let options =
        LoadOptions::default().with_sparsity(sparsity).with_dtype(dtype).with_pytorch(MAX_BYTES);
    load(&fixture.model_dir, &options).unwrap_or_else(|error| panic!("{}: {error}", fixture.name))
}

/// The fixture's model in its default mode, with keys and values cached in f16.
pub(crate) fn load_with_f16_cache(fixture: &Fixture, sparsity: Sparsity) -> Box<dyn CausalLm> {
    let options = LoadOptions::default()
        .with_sparsity(sparsity)
        .with_kv_dtype(KvDtype::F16)
        .with_pytorch(MAX_BYTES);
    load(&fixture.model_dir, &options).unwrap_or_else(|error| panic!("{}: {error}", fixture.name))
}

/// What every pass runs in that is not about threads: a pool of our own, as an engine's do.
static POOL: LazyLock<ThreadPool> = LazyLock::new(|| pool(2));

/// A pool of that many threads.
pub(crate) fn pool(n_threads: usize) -> ThreadPool {
    ThreadPool::new(NonZeroUsize::new(n_threads)).expect("a pool of a few threads")
}

/// One forward pass over `tokens`, logits wanted for all of them.
pub(crate) fn forward(
    model: &dyn CausalLm,
    cache: &mut KvCache,
    tokens: &[u32],
) -> powerinfer_core::Result<Run> {
    let mut step = Step { wanted: WantedLogits::All, ..Step::default() };
    POOL.install(|| model.forward(tokens, cache, &mut step))?;
    Ok(Run { logits: step.logits, stats: step.stats })
}

/// Runs `tokens` over one fresh cache, in pieces of these lengths.
pub(crate) fn run(model: &dyn CausalLm, tokens: &[u32], pieces: &[usize]) -> Run {
    let mut cache = model.new_cache();
    let mut all = Run::default();
    let mut done = 0;
    for piece in pieces {
        let run = forward(model, &mut cache, &tokens[done..done + piece]).expect("a forward pass");
        done += piece;
        assert_eq!(cache.len(), done, "positions in the cache");
        all.logits.extend(run.logits);
        all.stats.merge(&run.stats);
    }
    assert_eq!(done, tokens.len(), "the pieces make up the tokens");
    all
}

/// Continues `prompt` by `n` tokens, each the one of the highest logit; the last is not fed.
///
/// The run is over the positions that gave the ids: the prompt's last and all generated but one.
pub(crate) fn greedy(model: &dyn CausalLm, prompt: &[u32], n: usize) -> (Vec<u32>, Run) {
    let mut cache = model.new_cache();
    let (last, before) = prompt.split_last().expect("a prompt of at least one token");
    if !before.is_empty() {
        forward(model, &mut cache, before).expect("a forward pass");
    }
    let (mut ids, mut all, mut next) = (Vec::new(), Run::default(), *last);
    for _ in 0..n {
        let run = forward(model, &mut cache, &[next]).expect("a forward pass");
        next = argmax(&run.logits);
        ids.push(next);
        all.logits.extend(run.logits);
        all.stats.merge(&run.stats);
    }
    (ids, all)
}

/// `n` ids that the model knows.
pub(crate) fn random_tokens(model: &dyn CausalLm, n: usize, seed: u64) -> Vec<u32> {
    let mut data = Seeded::new(seed);
    (0..n).map(|_| data.below(model.info().vocab_size) as u32).collect()
}

/// The first position of the highest value.
fn argmax(logits: &[f32]) -> u32 {
    let highest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let first = logits.iter().position(|logit| *logit == highest);
    first.expect("a finite logit") as u32
}

/// Options under which every layer of a sparse model has a predictor.
pub(crate) fn options(fixture: &Fixture) -> LoadOptions {
    let options = LoadOptions::default().with_pytorch(MAX_BYTES);
    if !modes(fixture).contains(&Sparsity::Exact) {
        return options;
    }
    // no layer is to be without its predictor, however bad it is on a random model
    let bits = PredictorSource::Quantized(Some(LowBitFormat::Bits3));
    options.with_predictor(PredictorOptions::new(bits).with_floor(0.0))
}

/// A random part of every layer's neurons, attention of every `nth` layer (of none for 0), and the head.
pub(crate) fn placement(info: &ModelInfo, share: f32, nth: usize, head: bool) -> Placement {
    let mut random = Seeded::new(7);
    let hot = (0..info.n_layers).map(|_| {
        NeuronIds::from_sorted(random.ids(info.d_ff, share)).expect("ids and layers of the model")
    });
    let attention = (0..info.n_layers).map(|layer| nth > 0 && (layer + 1).is_multiple_of(nth));
    Placement::new(hot.collect(), info.d_ff)
        .expect("ids and layers of the model")
        .with_fast_attention(attention.collect())
        .expect("ids and layers of the model")
        .with_fast_head(head)
}
