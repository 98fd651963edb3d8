//! Prefill, then decode: an iterator of tokens over any model.

mod hook;
mod logprobs;
mod options;

use std::iter::FusedIterator;
use std::time::Instant;

use crate::error::{Error, Result};
use crate::kv_cache::KvCache;
use crate::model::{CausalLm, Step, WantedLogits};
use crate::sampler::Sampler;
pub use hook::LogitsHook;
pub use logprobs::TokenLogprobs;
pub use options::{FinishReason, GenerationOptions, GenerationStats};

/// Tokens that continue a prompt, one at each [`next`](Iterator::next).
///
/// The first `next` runs the prompt through the model, each later one the token before. Nothing
/// runs in between, so dropping the iterator is how to cancel.
///
/// Cache and history belong to the caller and stay in step: `history` lists the tokens that are
/// in `cache`. Both can go into another generation afterwards. The last token that was given out
/// is in neither, as it has not been run: [`pending`](Self::pending) gives it, to be put before
/// the next prompt.
///
/// A `next` that fails gives its error once and leaves cache and history as they were before it;
/// then the iterator has ended.
///
/// # Examples
/// The [crate page](crate) has a whole one.
#[derive(Debug)]
#[must_use = "iterators are lazy: nothing runs before the first `next`"]
pub struct Generation<'a> {
    model: &'a dyn CausalLm,
    cache: &'a mut KvCache,
    step: &'a mut Step,
    history: &'a mut Vec<u32>,
    sampler: Sampler,
    /// Sorted.
    stop_ids: Vec<u32>,
    max_tokens: usize,
    prefill_chunk: usize,
    hook: Option<LogitsHook>,
    n_logprobs: Option<usize>,
    /// The logits as the model gave them, where log-probabilities are wanted.
    own_logits: Vec<f32>,
    logprobs: Option<TokenLogprobs>,
    state: State,
    stats: GenerationStats,
}

#[derive(Debug)]
enum State {
    /// The prompt is still to be run.
    Prefill(Vec<u32>),
    /// The token that was given out last is still to be run.
    Decode(u32),
    /// No more tokens; with the one that was given out last and not run.
    Finished(FinishReason, Option<u32>),
    /// An error has been given out; with the token that was given out before it and not run.
    Failed(Option<u32>),
}

impl<'a> Generation<'a> {
    /// Gets ready to continue what is in `cache` with `prompt` and what the model makes of it.
    /// Runs nothing.
    ///
    /// `history` lists the tokens in `cache`, both empty for a new text. Statistics of `step` are
    /// cleared at each pass.
    ///
    /// # Errors
    /// [`Error::EmptyPrompt`]; [`Error::TokenOutOfRange`] for the prompt and for logit biases;
    /// [`Error::ContextExceeded`] if the prompt does not fit; [`Error::CacheLength`] if history
    /// and cache disagree; [`Error::InvalidSampling`].
    pub fn new(
        model: &'a dyn CausalLm,
        cache: &'a mut KvCache,
        step: &'a mut Step,
        history: &'a mut Vec<u32>,
        prompt: &[u32],
        options: GenerationOptions,
    ) -> Result<Self> {
        let GenerationOptions { max_tokens, sampling, mut stop_ids, .. } = options;
        let GenerationOptions { ignore_eos, prefill_chunk, .. } = options;
        let vocab_size = model.info().vocab_size;
        if prompt.is_empty() {
            return Err(Error::EmptyPrompt);
        }
        let biased = sampling.logit_bias.iter().map(|(token, _)| token);
        if let Some(&token) = prompt.iter().chain(biased).find(|id| **id as usize >= vocab_size) {
            return Err(Error::TokenOutOfRange { token, vocab_size });
        }
        let (have, max) = (cache.len(), cache.max_context());
        if history.len() != have {
            return Err(Error::CacheLength { expected: history.len(), found: have });
        }
        if prompt.len() > max.saturating_sub(have) {
            return Err(Error::ContextExceeded { have, requested: prompt.len(), max });
        }
        if !ignore_eos {
            stop_ids.extend_from_slice(&model.info().eos_token_ids);
        }
        stop_ids.sort_unstable();
        let sampler = Sampler::new(sampling)?;
        step.cancel = options.cancel;
        Ok(Self {
            model,
            cache,
            step,
            history,
            sampler,
            stop_ids,
            max_tokens,
            prefill_chunk: if prefill_chunk == 0 { prompt.len() } else { prefill_chunk },
            hook: options.logits_hook,
            n_logprobs: options.logprobs,
            own_logits: Vec::new(),
            logprobs: None,
            state: State::Prefill(prompt.to_vec()),
            stats: GenerationStats::default(),
        })
    }

    /// Why the tokens ended; `None` while there may be more, and after an error. Known as soon as
    /// the last token has been given out, except for an end token, which the model must first
    /// choose.
    #[must_use]
    pub fn finish_reason(&self) -> Option<FinishReason> {
        match self.state {
            State::Finished(reason, _) => Some(reason),
            _ => None,
        }
    }

    /// The token that was given out last and is not yet in cache and history. An end token, which
    /// is not given out, is not among them either.
    #[must_use]
    pub fn pending(&self) -> Option<u32> {
        match self.state {
            State::Decode(token) => Some(token),
            State::Finished(_, token) | State::Failed(token) => token,
            State::Prefill(_) => None,
        }
    }

    /// How likely the token was that was given out last, where
    /// [`GenerationOptions::logprobs`] asked for it.
    #[must_use]
    pub fn logprobs(&self) -> Option<&TokenLogprobs> {
        self.logprobs.as_ref()
    }

    /// What has run so far.
    #[must_use]
    pub fn stats(&self) -> &GenerationStats {
        &self.stats
    }

    /// Runs the prompt and chooses the first token.
    fn prefill(&mut self, prompt: &[u32]) -> Result<Option<u32>> {
        let began = Instant::now();
        let n_chunks = prompt.len().div_ceil(self.prefill_chunk);
        for (index, chunk) in prompt.chunks(self.prefill_chunk).enumerate() {
            let last = index + 1 == n_chunks && self.max_tokens > 0;
            self.forward(chunk, if last { WantedLogits::Last } else { WantedLogits::None })?;
            self.stats.prefill.merge(&self.step.stats);
        }
        let token = if self.max_tokens > 0 { Some(self.sample()?) } else { None };
        self.stats.prefill_tokens += prompt.len();
        self.stats.prefill_time += began.elapsed();
        Ok(token)
    }

    /// Runs the token that was given out last and chooses the next.
    fn decode(&mut self, token: u32) -> Result<u32> {
        let began = Instant::now();
        self.forward(&[token], WantedLogits::Last)?;
        self.stats.decode.merge(&self.step.stats);
        let next = self.sample()?;
        self.stats.decode_tokens += 1;
        self.stats.decode_time += began.elapsed();
        Ok(next)
    }

    /// Runs `tokens` and holds the model to its contract.
    fn forward(&mut self, tokens: &[u32], wanted: WantedLogits) -> Result<()> {
        self.step.cancel.check()?;
        self.step.wanted = wanted;
        self.step.stats.clear();
        self.model.forward(tokens, self.cache, self.step)?;
        self.history.extend_from_slice(tokens);
        let (expected, found) = (self.history.len(), self.cache.len());
        if found != expected {
            return Err(Error::CacheLength { expected, found });
        }
        let expected = wanted.n_rows(tokens.len()).saturating_mul(self.model.info().vocab_size);
        let found = self.step.logits.len();
        if found != expected && wanted != WantedLogits::None {
            return Err(Error::LogitsLength { expected, found });
        }
        Ok(())
    }

    fn sample(&mut self) -> Result<u32> {
        let logits = &mut self.step.logits;
        if self.n_logprobs.is_some() {
            self.own_logits.clone_from(logits);
        }
        if let Some(hook) = &self.hook {
            hook.apply(self.history, logits);
        }
        let id = self.sampler.sample(logits, self.history)?;
        self.logprobs = self.n_logprobs.map(|n| TokenLogprobs::of(&self.own_logits, id, n));
        Ok(id)
    }

    /// The token to give out, and with it the state after it.
    fn advance(&mut self, chosen: Option<u32>) -> (Option<u32>, State) {
        let Some(token) = chosen else {
            return (None, State::Finished(FinishReason::MaxTokens, None));
        };
        if self.stop_ids.binary_search(&token).is_ok() {
            return (None, State::Finished(FinishReason::EndToken(token), None));
        }
        self.stats.generated_tokens += 1;
        let state = if self.stats.generated_tokens >= self.max_tokens {
            State::Finished(FinishReason::MaxTokens, Some(token))
        } else if self.cache.len() >= self.cache.max_context() {
            State::Finished(FinishReason::ContextFull, Some(token))
        } else {
            State::Decode(token)
        };
        (Some(token), state)
    }
}

impl Iterator for Generation<'_> {
    type Item = Result<u32>;

    fn next(&mut self) -> Option<Result<u32>> {
        let before = self.history.len();
        // the state after an error, and after a panic in the model
        let failed = State::Failed(self.pending());
        let chosen = match std::mem::replace(&mut self.state, failed) {
            State::Prefill(prompt) => self.prefill(&prompt),
            State::Decode(token) => self.decode(token).map(Some),
            ended @ (State::Finished(..) | State::Failed(_)) => {
                self.state = ended;
                return None;
            }
        };
        match chosen {
            Ok(chosen) => {
                let (token, state) = self.advance(chosen);
                self.state = state;
                token.map(Ok)
            }
            Err(error) => {
                self.history.truncate(before);
                self.cache.truncate(before);
                Some(Err(error))
            }
        }
    }
}

impl FusedIterator for Generation<'_> {}

#[cfg(test)]
mod tests;
