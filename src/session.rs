//! A session: one context that grows, on an engine that many share.

use std::fmt;

use powerinfer_core::{Generation, GenerationOptions, KvCache, Step, StepStats, WantedLogits};

use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::options::{GenerateOptions, Prompt};
use crate::stream::{Generated, TextStream};

/// One context of an [`Engine`]: what was said so far, which each request continues.
///
/// A session keeps the keys and values of its context, so a second request costs only its own
/// tokens. It belongs to one user at a time; for several at once open several.
///
/// An error leaves the session as it was before the token that failed, and usable.
///
/// # Examples
/// ```
/// use powerinfer::{Engine, GenerateOptions};
///
/// let engine = Engine::builder().model("assets/llama-relu-tiny").build()?;
/// let mut session = engine.session()?;
/// let options = GenerateOptions::default().with_max_tokens(4);
/// let first = session.generate_text("It was a truth", &options)?;
/// let second = session.generate_text("", &options)?; // goes on where the first stopped
/// assert_eq!(first.text + &second.text, " to be, that she was not in");
/// # Ok::<(), powerinfer::Error>(())
/// ```
pub struct Session {
    engine: Engine,
    cache: KvCache,
    step: Step,
    /// The tokens in the cache.
    history: Vec<u32>,
    /// The token that was written last and has not been run: it goes before the next prompt.
    pending: Option<u32>,
}

impl Session {
    pub(crate) fn new(engine: Engine) -> Self {
        let cache = engine.model().new_cache();
        Self { engine, cache, step: Step::default(), history: Vec::new(), pending: None }
    }

    /// The engine that this session runs on.
    #[must_use]
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// Tokens in the context: prompts and everything written.
    #[must_use]
    pub fn len(&self) -> usize {
        self.history.len() + usize::from(self.pending.is_some())
    }

    /// Whether the context is empty, as in a new session.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The tokens in the context, in order.
    #[must_use]
    pub fn ids(&self) -> Vec<u32> {
        let mut ids = self.history.clone();
        ids.extend(self.pending);
        ids
    }

    /// From now on counts how the predictor's picks compare with the truth, in
    /// [`StepStats::prediction_per_layer`]; passes take two to three times as long.
    pub fn measure_prediction(&mut self, measure: bool) {
        self.step.measure_prediction = measure;
    }

    /// Forgets the context; the session is as new.
    pub fn reset(&mut self) {
        self.cache.clear();
        self.history.clear();
        self.pending = None;
    }

    /// Appends `prompt` to the context and returns the stream that continues it.
    ///
    /// Nothing runs before the stream is first asked; dropping the stream is how to cancel. What
    /// was written by then stays in the context. An end token does not become part of it.
    ///
    /// An empty prompt is legal where there is something to go on from: a text begun before, or
    /// the beginning-of-sequence token that the tokenizer puts before the first text.
    ///
    /// # Errors
    /// [`Error::InvalidOption`]; [`Error::NoTokenizer`] for text or stop strings without a
    /// tokenizer; [`Error::Tokenizer`]; [`Error::Core`] for an empty prompt with nothing before
    /// it, a token that does not exist, a prompt that does not fit the rest of the context (then
    /// nothing has run), and sampling settings outside their range; [`Error::PromptTooLong`] for a
    /// text so long that it is not even tokenised.
    pub fn generate(
        &mut self,
        prompt: impl Into<Prompt>,
        options: &GenerateOptions,
    ) -> Result<TextStream<'_>> {
        options.validate()?;
        let tokenizer = self.engine.tokenizer();
        if tokenizer.is_none() && !options.stop.is_empty() {
            return Err(Error::NoTokenizer { what: "a stop string" });
        }
        let prompt_ids = self.prompt_ids(prompt.into())?;
        if prompt_ids.is_empty() && self.pending.is_none() {
            // nothing new to run: the last token runs again, for the logits that follow it
            self.pending = self.history.pop();
            self.cache.truncate(self.history.len());
        }
        let fed: Vec<u32> = self.pending.into_iter().chain(prompt_ids.iter().copied()).collect();
        let settings = GenerationOptions::default()
            .with_max_tokens(options.max_tokens)
            .with_sampling(options.sampling.clone())
            .with_stop_ids(options.stop_ids.clone())
            .with_ignore_eos(options.ignore_eos);
        self.step.sparsity = options.sparsity;
        let Self { engine, cache, step, history, pending } = self;
        let generation = Generation::new(engine.model(), cache, step, history, &fed, settings)?;
        Ok(TextStream::new(engine, generation, pending, prompt_ids, options.stop.clone()))
    }

    /// As [`generate`](Self::generate), all at once.
    ///
    /// # Errors
    /// Those of [`generate`](Self::generate) and of the stream.
    pub fn generate_text(
        &mut self,
        prompt: impl Into<Prompt>,
        options: &GenerateOptions,
    ) -> Result<Generated> {
        self.generate(prompt, options)?.finish()
    }

    /// Appends `ids` to the context and returns the logits after each of them.
    ///
    /// # Shapes
    /// Result `[n_tokens, vocab_size]`, f32.
    /// # Cost
    /// One forward pass, and memory for all rows: score a long text in pieces.
    /// # Errors
    /// [`Error::Core`] if `ids` is empty, holds a token that does not exist, or does not fit the
    /// rest of the context, or if logits are not finite; the session is then as before.
    /// # Examples
    /// ```
    /// use powerinfer::Engine;
    ///
    /// let engine = Engine::builder().model("assets/llama-relu-tiny").build()?;
    /// let mut session = engine.session()?;
    /// let logits = session.logits(&[1, 1388, 342])?;
    /// assert_eq!((logits.n_tokens, logits.row(2).len()), (3, 4096));
    /// # Ok::<(), powerinfer::Error>(())
    /// ```
    pub fn logits(&mut self, ids: &[u32]) -> Result<Logits> {
        if ids.is_empty() {
            return Err(powerinfer_core::Error::EmptyPrompt.into());
        }
        let fed: Vec<u32> = self.pending.into_iter().chain(ids.iter().copied()).collect();
        let Self { engine, cache, step, history, .. } = self;
        step.wanted = WantedLogits::All;
        step.sparsity = None;
        step.stats.clear();
        let model = engine.model();
        let ran = engine.pool().install(|| model.forward(&fed, cache, step));
        let vocab_size = model.info().vocab_size;
        let checked =
            ran.and_then(|()| check_logits(step, vocab_size, cache.len(), history.len(), &fed));
        if let Err(error) = checked {
            cache.truncate(history.len());
            return Err(error.into());
        }
        history.extend_from_slice(&fed);
        self.pending = None;

        let mut values = std::mem::take(&mut step.logits);
        values.drain(..(fed.len() - ids.len()) * vocab_size);
        Ok(Logits { n_tokens: ids.len(), vocab_size, values, stats: step.stats.clone() })
    }

    /// Refuses a text that cannot fit before the tokenizer spends memory on it: no vocabulary spends
    /// this many bytes on each token of a text.
    fn check_length(&self, text: &str) -> Result<()> {
        const BYTES_PER_TOKEN: usize = 256;
        let max_context = self.cache.max_context();
        let max_bytes = max_context.saturating_mul(BYTES_PER_TOKEN);
        if text.len() <= max_bytes {
            return Ok(());
        }
        Err(Error::PromptTooLong { found_bytes: text.len(), max_bytes, max_context })
    }

    /// The ids of a prompt; special tokens go around the first text of a context only.
    fn prompt_ids(&self, prompt: Prompt) -> Result<Vec<u32>> {
        match prompt {
            Prompt::Ids(ids) => Ok(ids),
            Prompt::Text(text) => {
                let tokenizer = self.engine.tokenizer();
                let tokenizer = tokenizer.ok_or(Error::NoTokenizer { what: "the prompt" })?;
                self.check_length(&text)?;
                tokenizer.encode(&text, self.is_empty())
            }
        }
    }
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Session")
            .field("architecture", &self.engine.info().architecture)
            .field("len", &self.len())
            .field("cache_bytes", &self.cache.size_bytes())
            .finish_non_exhaustive()
    }
}

/// Holds a model to its contract after a pass over `fed` that asked for all logits.
fn check_logits(
    step: &Step,
    vocab_size: usize,
    in_cache: usize,
    before: usize,
    fed: &[u32],
) -> powerinfer_core::Result<()> {
    use powerinfer_core::Error;

    let (expected, found) = (before + fed.len(), in_cache);
    if found != expected {
        return Err(Error::CacheLength { expected, found });
    }
    let (expected, found) = (fed.len().saturating_mul(vocab_size), step.logits.len());
    if found != expected {
        return Err(Error::LogitsLength { expected, found });
    }
    let broken = |row: &[f32]| {
        row.iter().any(|logit| logit.is_nan() || *logit == f32::INFINITY)
            || row.iter().all(|logit| *logit == f32::NEG_INFINITY)
    };
    match step.logits.chunks_exact(vocab_size.max(1)).position(broken) {
        Some(row) => Err(Error::NonFiniteLogits { position: before + row }),
        None => Ok(()),
    }
}

/// The logits after each of some tokens.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Logits {
    /// Rows: one for each token.
    pub n_tokens: usize,
    /// Columns: one for each token that could come next.
    pub vocab_size: usize,
    /// `[n_tokens, vocab_size]`, row by row.
    pub values: Vec<f32>,
    /// What the pass that gave them did, a token written before included.
    pub stats: StepStats,
}

impl Logits {
    /// The logits after token `index`.
    ///
    /// # Panics
    /// If there is no such token.
    #[must_use]
    pub fn row(&self, index: usize) -> &[f32] {
        &self.values[index * self.vocab_size..][..self.vocab_size]
    }
}
