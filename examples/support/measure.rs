//! One mode of a benchmark: what is run, how often, and the medians of it.

use std::fs;

use powerinfer::{
    Engine, GenerateOptions, GenerationStats, ModelInfo, Session, Sparsity, StepStats,
};
use serde_json::{Value, json};

use super::split::split_json;

/// What each repetition runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Plan {
    /// Tokens of the prompt that is timed.
    pub(crate) prompt: usize,
    /// Tokens that are decoded, one by one.
    pub(crate) decode: usize,
    /// Tokens in the context before the first of them, each to be measured on its own.
    pub(crate) contexts: Vec<usize>,
    pub(crate) repetitions: usize,
}

/// A plan that is longer than the model's context.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("the context of the model holds {max} tokens, the benchmark needs {needed}")]
pub(crate) struct DoesNotFit {
    max: usize,
    needed: usize,
}

impl Plan {
    /// The plan, if it fits the model.
    pub(crate) fn check(self, info: &ModelInfo) -> Result<Self, DoesNotFit> {
        let longest = self.contexts.iter().max().copied().unwrap_or(0);
        let needed = longest.saturating_add(self.decode).max(self.prompt);
        let max = info.max_context;
        if needed <= max { Ok(self) } else { Err(DoesNotFit { max, needed }) }
    }
}

/// A mode and what was measured of it.
#[derive(Debug)]
pub(crate) struct Run {
    /// What it was asked for as.
    name: Option<String>,
    /// `None`: as the model was loaded.
    mode: Option<Sparsity>,
    /// Tokens in the context when decoding begins.
    context: usize,
    /// A session that holds them, and what earlier repetitions wrote.
    filled: Option<Session>,
    prefill_speeds: Vec<f64>,
    decode_speeds: Vec<f64>,
    decode_seconds: f64,
    decode: StepStats,
}

impl Run {
    pub(crate) fn new(mode: Option<Sparsity>, context: usize) -> Self {
        let (prefill_speeds, decode_speeds) = (Vec::new(), Vec::new());
        Self {
            name: None,
            mode,
            context,
            filled: None,
            prefill_speeds,
            decode_speeds,
            decode_seconds: 0.0,
            decode: StepStats::default(),
        }
    }

    /// Sets what it is reported as, in place of its mode.
    pub(crate) fn named(mut self, name: &str) -> Self {
        self.name = Some(name.to_owned());
        self
    }

    /// What it is reported as.
    pub(crate) fn name(&self, engine: &Engine) -> String {
        self.name.clone().unwrap_or_else(|| self.mode(engine).name().to_owned())
    }

    /// Runs two tokens untimed, so that no repetition pays for first touches.
    pub(crate) fn warm_up(&self, engine: &Engine) -> powerinfer::Result<()> {
        self.generate(&mut engine.session()?, 1, 1)?;
        Ok(())
    }

    /// Adds one repetition.
    pub(crate) fn measure(&mut self, engine: &Engine, plan: &Plan) -> powerinfer::Result<()> {
        let mut session = engine.session()?;
        let mut stats = self.generate(&mut session, plan.prompt, plan.decode)?;
        self.prefill_speeds.push(stats.prefill_tokens_per_second());
        if self.context != plan.prompt {
            let goes_on =
                |session: &Session| session.len() + 1 + plan.decode <= engine.info().max_context;
            let (mut session, n_more) = match self.filled.take().filter(goes_on) {
                Some(session) => (session, 1),
                None => (engine.session()?, self.context),
            };
            stats = self.generate(&mut session, n_more, plan.decode)?;
            self.filled = Some(session);
        }
        self.decode_speeds.push(stats.decode_tokens_per_second());
        self.decode_seconds += stats.decode_time.as_secs_f64();
        self.decode.merge(&stats.decode);
        Ok(())
    }

    /// Runs a prompt and `n_decode` decode steps.
    fn generate(
        &self,
        session: &mut Session,
        n_prompt: usize,
        n_decode: usize,
    ) -> powerinfer::Result<GenerationStats> {
        let vocab_size = session.engine().info().vocab_size;
        // The prompt gives the first token, each decode step one more.
        let mut options = GenerateOptions::default().with_max_tokens(n_decode + 1);
        options.ignore_eos = true;
        options.sparsity = self.mode;
        let generated = session.generate_text(some_ids(n_prompt, vocab_size), &options)?;
        Ok(generated.stats)
    }

    pub(crate) fn mode(&self, engine: &Engine) -> Sparsity {
        self.mode.unwrap_or(engine.info().sparsity)
    }

    pub(crate) fn context(&self) -> usize {
        self.context
    }

    pub(crate) fn prefill_speed(&self) -> f64 {
        median(&self.prefill_speeds)
    }

    pub(crate) fn decode_speed(&self) -> f64 {
        median(&self.decode_speeds)
    }

    /// Share of neurons whose down row was read.
    pub(crate) fn density(&self) -> f64 {
        self.decode.density()
    }

    /// Share of neurons whose gate row was read.
    pub(crate) fn picked_density(&self) -> f64 {
        self.decode.picked_density()
    }

    /// Share of the decoding time that went into predicting.
    pub(crate) fn predictor_share(&self) -> f64 {
        if self.decode_seconds == 0.0 {
            return 0.0;
        }
        self.decode.predictor_ns as f64 * 1e-9 / self.decode_seconds
    }

    pub(crate) fn weight_bytes_per_token(&self) -> f64 {
        self.decode.weight_bytes as f64 / self.decode.n_tokens.max(1) as f64
    }

    pub(crate) fn as_json(&self, engine: &Engine) -> Value {
        json!({
            "mode": self.mode(engine).name(),
            "name": self.name(engine),
            "predictor": (self.mode(engine) == Sparsity::Predicted)
                .then(|| engine.info().predictor.clone()),
            "dtype": engine.info().dtypes.join(","),
            "threads": engine.n_threads(),
            "batch": 1,
            "kv_dtype": engine.info().kv.dtype.name(),
            "context": self.context,
            "prefill_tokens_per_second": self.prefill_speed(),
            "decode_tokens_per_second": self.decode_speed(),
            "weight_bytes_per_token": self.weight_bytes_per_token(),
            "ffn_density": self.density(),
            "picked_density": self.picked_density(),
            "predictor_seconds": self.decode.predictor_ns as f64 * 1e-9,
            "predictor_share": self.predictor_share(),
            "split": split_json(&self.decode),
        })
    }
}

/// Token ids scattered over the vocabulary, always the same.
pub(crate) fn some_ids(n: usize, vocab_size: usize) -> Vec<u32> {
    let id = |i: usize| i.wrapping_mul(7919).wrapping_add(17) % vocab_size.max(1);
    (0..n).map(|i| u32::try_from(id(i)).unwrap_or(0)).collect()
}

/// The middle of the sorted values, of an even number the mean of both; 0 of none.
pub(crate) fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    match (sorted.len(), sorted.len() / 2) {
        (0, _) => 0.0,
        (n, middle) if n % 2 == 0 => (sorted[middle - 1] + sorted[middle]) / 2.0,
        (_, middle) => sorted[middle],
    }
}

/// The most memory that this process ever held, where the system tells.
pub(crate) fn peak_memory_bytes() -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}
