//! A session: one context that grows, on an engine that many share.

use std::fmt;

use powerinfer_core::{
    CancelToken, Error as CoreError, Generation, GenerationOptions, KvCache, Step, StepStats,
    WantedLogits,
};

use crate::chat::{ChatMessage, ChatOptions};
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::options::{ContextPolicy, GenerateOptions, Prompt};
use crate::stream::{Generated, TextStream};
use crate::text::StreamDecoder;

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
        let mut cache = engine.model().new_cache();
        cache.limit_context(engine.max_context());
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

    /// Tokens that the context holds.
    #[must_use]
    pub fn max_context(&self) -> usize {
        self.cache.max_context()
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

    /// Memory that keys and values of the context take now, in bytes, but for those on a fast device. It
    /// grows by pages of 64 tokens; what a context of some length takes is
    /// [`KvShape::size_bytes`](powerinfer_core::KvShape::size_bytes) of the engine's
    /// [`info`](Engine::info).
    #[must_use]
    pub fn cache_bytes(&self) -> usize {
        self.cache.size_bytes()
    }

    /// Memory that the context takes on the engine's fast device now, in bytes: keys and values of the
    /// layers whose attention lies there, and what a pass left of its residual stream.
    #[must_use]
    pub fn device_cache_bytes(&self) -> u64 {
        self.cache.device_bytes()
    }

    /// Forgets all tokens from position `len` on; does nothing to a context of fewer.
    ///
    /// # Examples
    /// ```
    /// use powerinfer::{Engine, GenerateOptions};
    ///
    /// let engine = Engine::builder().model("assets/llama-relu-tiny").build()?;
    /// let mut session = engine.session()?;
    /// let options = GenerateOptions::default().with_max_tokens(4);
    /// let first = session.generate_text("It was a truth", &options)?;
    /// session.truncate(first.prompt_ids.len()); // take it back, and write it again
    /// assert_eq!(session.generate_text("", &options)?.text, first.text);
    /// # Ok::<(), powerinfer::Error>(())
    /// ```
    pub fn truncate(&mut self, len: usize) {
        if len >= self.len() {
            return;
        }
        // the last token, which may be pending, is among the forgotten ones
        self.pending = None;
        self.history.truncate(len);
        self.cache.truncate(len);
    }

    /// Forgets what follows the longest beginning that the context and `ids` have in common, and
    /// returns its length. [`generate_whole`](Self::generate_whole) does so by itself.
    pub fn keep_common_prefix(&mut self, ids: &[u32]) -> usize {
        let kept = self.common_prefix(ids);
        self.truncate(kept);
        kept
    }

    /// Another session with the same context. Both go their own ways from there.
    ///
    /// # Cost
    /// Next to nothing: keys and values are shared, and whoever goes on first copies one page of 64
    /// tokens.
    ///
    /// # Errors
    /// None so far; a limit on memory would be one.
    ///
    /// # Examples
    /// ```
    /// use powerinfer::{Engine, GenerateOptions};
    ///
    /// let engine = Engine::builder().model("assets/llama-relu-tiny").build()?;
    /// let mut session = engine.session()?;
    /// session.append("It was a truth")?;
    /// let options = GenerateOptions::default().with_max_tokens(4);
    /// let mut fork = session.fork()?;
    /// let (one, other) = (fork.generate_text("", &options)?, session.generate_text("", &options)?);
    /// assert_eq!(one.text, other.text);
    /// # Ok::<(), powerinfer::Error>(())
    /// ```
    pub fn fork(&self) -> Result<Self> {
        Ok(Self {
            engine: self.engine.clone(),
            cache: self.cache.clone(),
            step: Step::default(),
            history: self.history.clone(),
            pending: self.pending,
        })
    }

    /// Runs `prompt` and writes nothing: a beginning that [`fork`](Self::fork)s share, or a text of
    /// another speaker. Returns its tokens.
    ///
    /// # Errors
    /// Those of [`generate`](Self::generate) and of the stream.
    pub fn append(&mut self, prompt: impl Into<Prompt>) -> Result<Vec<u32>> {
        let options = GenerateOptions::default().with_max_tokens(0);
        Ok(self.generate(prompt, &options)?.finish()?.prompt_ids)
    }

    /// Forgets the context; the session is as new.
    pub fn reset(&mut self) {
        self.cache.clear();
        self.history.clear();
        self.pending = None;
    }

    /// Appends `prompt` to the context and returns the stream that continues it.
    ///
    /// Nothing runs before the stream is first asked; dropping the stream is how to cancel, and
    /// [`GenerateOptions::cancel`] from another thread. What was written by then stays in the
    /// context. An end token does not become part of it.
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
        let request = self.request(prompt.into(), options)?;
        self.start(request)
    }

    /// Continues `prompt`, which is the whole context and not only what comes next: what it shares
    /// with the context, from the beginning on, is kept, the rest of the context is forgotten, and
    /// the rest of the prompt runs. So a conversation that is sent again and again, a turn longer
    /// each time, costs its new tokens only.
    ///
    /// A text gets the special tokens that the tokenizer puts around one. What is kept stays as it
    /// ran, also where this request asks for another [`sparsity`](GenerateOptions::sparsity).
    ///
    /// # Errors
    /// As [`generate`](Self::generate); the session is then as before.
    ///
    /// # Examples
    /// ```
    /// use powerinfer::{Engine, GenerateOptions};
    ///
    /// let engine = Engine::builder().model("assets/llama-relu-tiny").build()?;
    /// let mut session = engine.session()?;
    /// let options = GenerateOptions::default().with_max_tokens(4);
    /// let first = session.generate_whole("It was a truth", &options)?.finish()?;
    /// let other = session.generate_whole("It was a ship", &options)?.finish()?;
    /// assert_eq!((first.cached_tokens, other.cached_tokens), (0, 4)); // `<s>It was a`
    /// # Ok::<(), powerinfer::Error>(())
    /// ```
    pub fn generate_whole(
        &mut self,
        prompt: impl Into<Prompt>,
        options: &GenerateOptions,
    ) -> Result<TextStream<'_>> {
        let request = self.whole_request(prompt.into(), options)?;
        self.start(request)
    }

    /// Answers a conversation: `messages`, all of it, written by the model's chat template. What the
    /// session has of it already does not run again, so each turn costs its new messages only.
    ///
    /// # Errors
    /// As [`Engine::chat_prompt`] and [`generate_whole`](Self::generate_whole).
    ///
    /// # Examples
    /// ```
    /// use powerinfer::{ChatMessage, Engine, GenerateOptions};
    ///
    /// let engine = Engine::builder().model("assets/llama-relu-tiny").build()?;
    /// let mut session = engine.session()?;
    /// let options = GenerateOptions::default().with_max_tokens(8);
    /// let mut messages = vec![ChatMessage::user("It was a truth")];
    /// let answer = session.chat(&messages, &options)?.finish()?;
    /// messages.push(ChatMessage::assistant(&answer.text));
    /// messages.push(ChatMessage::user("And then?"));
    /// let second = session.chat(&messages, &options)?.finish()?;
    /// assert!(second.cached_tokens >= answer.prompt_ids.len());
    /// # Ok::<(), powerinfer::Error>(())
    /// ```
    pub fn chat(
        &mut self,
        messages: &[ChatMessage],
        options: &GenerateOptions,
    ) -> Result<TextStream<'_>> {
        let prompt = self.engine.chat_prompt(messages, &ChatOptions::default())?;
        self.generate_whole(prompt, options)
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
        step.cancel = CancelToken::default();
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

    /// What `prompt` adds to the context, checked.
    pub(crate) fn request(&mut self, prompt: Prompt, options: &GenerateOptions) -> Result<Request> {
        let ids = self.prompt_ids(prompt, self.is_empty())?;
        self.check_request(&ids, options)?;
        let (have, max) = (self.history.len(), self.cache.max_context());
        let requested = ids.len() + usize::from(self.pending.is_some());
        if let ContextPolicy::DropOldest { keep_first } = options.context
            && (have + requested).saturating_add(options.max_tokens) > max
        {
            let mut whole = self.ids();
            whole.extend(ids);
            drop_oldest(&mut whole, keep_first, max, options.max_tokens);
            return Ok(self.take_over(whole, options));
        }
        if requested > max.saturating_sub(have) {
            return Err(CoreError::ContextExceeded { have, requested, max }.into());
        }
        if ids.is_empty() && self.pending.is_none() {
            if self.history.is_empty() {
                return Err(CoreError::EmptyPrompt.into());
            }
            // nothing new to run: the last token runs again, for the logits that follow it
            self.run_last_again();
        }
        let fed = self.pending.into_iter().chain(ids.iter().copied()).collect();
        Ok(Request { fed, prompt_ids: ids, cached_tokens: 0, options: options.clone() })
    }

    /// What `prompt` makes of the context, checked.
    pub(crate) fn whole_request(
        &mut self,
        prompt: Prompt,
        options: &GenerateOptions,
    ) -> Result<Request> {
        let mut ids = self.prompt_ids(prompt, true)?;
        self.check_request(&ids, options)?;
        let (requested, max) = (ids.len(), self.cache.max_context());
        if requested == 0 {
            return Err(CoreError::EmptyPrompt.into());
        }
        match options.context {
            ContextPolicy::DropOldest { keep_first }
                if requested.saturating_add(options.max_tokens) > max =>
            {
                drop_oldest(&mut ids, keep_first, max, options.max_tokens);
            }
            _ if requested > max => {
                return Err(CoreError::ContextExceeded { have: 0, requested, max }.into());
            }
            _ => {}
        }
        Ok(self.take_over(ids, options))
    }

    /// Makes `ids` the context, at least one of which is still to be run.
    fn take_over(&mut self, ids: Vec<u32>, options: &GenerateOptions) -> Request {
        let kept = self.keep_common_prefix(&ids);
        if kept == ids.len() && self.pending.is_none() {
            self.run_last_again();
        }
        let fed = ids[self.history.len()..].to_vec();
        let cached_tokens = self.history.len();
        Request { fed, prompt_ids: ids, cached_tokens, options: options.clone() }
    }

    /// Runs what was asked for.
    pub(crate) fn start(&mut self, request: Request) -> Result<TextStream<'_>> {
        let Request { fed, prompt_ids, cached_tokens, mut options } = request;
        if !options.ignore_eos {
            options.stop_ids.extend(self.engine.end_id());
        }
        let settings = GenerationOptions::default()
            .with_max_tokens(options.max_tokens)
            .with_sampling(options.sampling)
            .with_stop_ids(options.stop_ids)
            .with_ignore_eos(options.ignore_eos)
            .with_logprobs(options.logprobs)
            .with_logits_hook(options.logits_hook)
            .with_cancel(options.cancel);
        self.step.sparsity = options.sparsity;
        let Self { engine, cache, step, history, pending } = self;
        let decoder = match engine.tokenizer() {
            Some(tokenizer) => StreamDecoder::after(tokenizer, &[&history[..], &fed].concat())?,
            None => StreamDecoder::new(),
        };
        let generation = Generation::new(engine.model(), cache, step, history, &fed, settings)?;
        let (prompt, text) = ((prompt_ids, cached_tokens), (decoder, options.stop));
        Ok(TextStream::new(engine, generation, pending, prompt, text))
    }

    fn common_prefix(&self, ids: &[u32]) -> usize {
        let context = self.history.iter().chain(&self.pending);
        context.zip(ids).take_while(|(have, wanted)| have == wanted).count()
    }

    fn run_last_again(&mut self) {
        self.pending = self.history.pop();
        self.cache.truncate(self.history.len());
    }

    /// Refuses what could only fail later, when the context has changed.
    fn check_request(&self, ids: &[u32], options: &GenerateOptions) -> Result<()> {
        options.validate()?;
        if self.engine.tokenizer().is_none() && !options.stop.is_empty() {
            return Err(Error::NoTokenizer { what: "a stop string" });
        }
        let vocab_size = self.engine.info().vocab_size;
        let biased = options.sampling.logit_bias.iter().map(|(token, _)| token);
        match ids.iter().chain(biased).find(|id| **id as usize >= vocab_size) {
            Some(&token) => Err(CoreError::TokenOutOfRange { token, vocab_size }.into()),
            None => Ok(()),
        }
    }

    /// The ids of a prompt; special tokens go around the text that a context begins with, and a
    /// beginning-of-sequence token that the text has already is not put there again.
    fn prompt_ids(&self, prompt: Prompt, first: bool) -> Result<Vec<u32>> {
        match prompt {
            Prompt::Ids(ids) => Ok(ids),
            Prompt::Text(text) if first => self.engine.text_prompt(&text),
            Prompt::Text(text) => self.engine.encode(&text, false),
        }
    }
}

/// A request that has been checked: what is still to be run, and how.
#[derive(Debug)]
pub(crate) struct Request {
    fed: Vec<u32>,
    pub(crate) prompt_ids: Vec<u32>,
    cached_tokens: usize,
    pub(crate) options: GenerateOptions,
}

/// Takes away all but one of the beginning-of-sequence tokens that `ids` begin with.
pub(crate) fn begin_once(ids: &mut Vec<u32>, bos: Option<u32>) {
    let Some(bos) = bos else { return };
    let n = ids.iter().take_while(|id| **id == bos).count();
    ids.drain(..n.saturating_sub(1));
}

/// Forgets the oldest tokens after the first `keep_first`, so that `max_tokens` fit after the rest,
/// or half of a context of `max`.
fn drop_oldest(ids: &mut Vec<u32>, keep_first: usize, max: usize, max_tokens: usize) {
    let target = max.saturating_sub(max_tokens).max(max.div_ceil(2));
    let excess = ids.len().saturating_sub(target);
    // the last token stays: it is what the text goes on from
    let first = keep_first.min(target.saturating_sub(1));
    ids.drain(first..first + excess);
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Session")
            .field("architecture", &self.engine.info().architecture)
            .field("len", &self.len())
            .field("cache_bytes", &self.cache.size_bytes())
            .field("device_cache_bytes", &self.cache.device_bytes())
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
        Some(row) => Err(Error::NonFiniteLogits { position: before + row, layer: None }),
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
