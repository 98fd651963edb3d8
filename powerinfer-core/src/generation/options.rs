//! What a generation is asked for, and what it reports.

use std::fmt;
use std::time::Duration;

use crate::cancel::CancelToken;
use crate::generation::LogitsHook;
use crate::sampler::Sampling;
use crate::stats::StepStats;

/// How far to generate and how to choose tokens.
///
/// # Examples
/// ```
/// use powerinfer_core::{GenerationOptions, Sampling};
///
/// let options = GenerationOptions::default()
///     .with_max_tokens(64)
///     .with_sampling(Sampling::default().with_temperature(0.8));
/// assert_eq!(options.prefill_chunk, 256);
/// ```
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct GenerationOptions {
    /// Tokens to generate at most. With 0 the prompt is run and nothing follows. Default 128.
    pub max_tokens: usize,
    /// How a token is chosen. Default greedy.
    pub sampling: Sampling,
    /// Tokens that end the text, besides those of the model. Default none.
    pub stop_ids: Vec<u32>,
    /// Whether the model's own end tokens are tokens as any other. Default false.
    pub ignore_eos: bool,
    /// Tokens of the prompt that run through the model at once; 0 for all. More need more memory
    /// for activations. Changes no result. Default 256.
    pub prefill_chunk: usize,
    /// Give, with each token, its log-probability and those of so many likeliest tokens. Default
    /// `None`.
    pub logprobs: Option<usize>,
    /// Changes logits before a token is chosen from them. Default `None`.
    pub logits_hook: Option<LogitsHook>,
    /// Stops the generation, from another thread, before the next layer. Default: one that nobody
    /// else has.
    pub cancel: CancelToken,
}

impl Default for GenerationOptions {
    fn default() -> Self {
        Self {
            max_tokens: 128,
            sampling: Sampling::default(),
            stop_ids: Vec::new(),
            ignore_eos: false,
            prefill_chunk: 256,
            logprobs: None,
            logits_hook: None,
            cancel: CancelToken::default(),
        }
    }
}

impl GenerationOptions {
    /// With another [`max_tokens`](Self::max_tokens).
    #[must_use]
    pub fn with_max_tokens(self, max_tokens: usize) -> Self {
        Self { max_tokens, ..self }
    }

    /// With another [`sampling`](Self::sampling).
    #[must_use]
    pub fn with_sampling(self, sampling: Sampling) -> Self {
        Self { sampling, ..self }
    }

    /// With other [`stop_ids`](Self::stop_ids).
    #[must_use]
    pub fn with_stop_ids(self, stop_ids: Vec<u32>) -> Self {
        Self { stop_ids, ..self }
    }

    /// With another [`ignore_eos`](Self::ignore_eos).
    #[must_use]
    pub fn with_ignore_eos(self, ignore_eos: bool) -> Self {
        Self { ignore_eos, ..self }
    }

    /// With another [`prefill_chunk`](Self::prefill_chunk).
    #[must_use]
    pub fn with_prefill_chunk(self, prefill_chunk: usize) -> Self {
        Self { prefill_chunk, ..self }
    }

    /// With another [`logprobs`](Self::logprobs).
    #[must_use]
    pub fn with_logprobs(self, logprobs: Option<usize>) -> Self {
        Self { logprobs, ..self }
    }

    /// With another [`logits_hook`](Self::logits_hook).
    #[must_use]
    pub fn with_logits_hook(self, logits_hook: Option<LogitsHook>) -> Self {
        Self { logits_hook, ..self }
    }

    /// With another [`cancel`](Self::cancel).
    #[must_use]
    pub fn with_cancel(self, cancel: CancelToken) -> Self {
        Self { cancel, ..self }
    }
}

/// Why a generation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FinishReason {
    /// The model chose this token, which ends a text. It is not given out.
    EndToken(u32),
    /// As many tokens as asked for.
    MaxTokens,
    /// The context has no room for another token.
    ContextFull,
}

impl fmt::Display for FinishReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::EndToken(_) => "end_token",
            Self::MaxTokens => "max_tokens",
            Self::ContextFull => "context_full",
        })
    }
}

/// What a generation has done so far. The time between two calls of `next` counts nowhere.
#[derive(Debug, Clone, Default, PartialEq)]
#[non_exhaustive]
pub struct GenerationStats {
    /// Tokens of the prompt, once they have run.
    pub prefill_tokens: usize,
    /// Time to run them and to choose the first token.
    pub prefill_time: Duration,
    /// Tokens that ran one by one after the prompt.
    pub decode_tokens: usize,
    /// Time to run them and to choose a token after each.
    pub decode_time: Duration,
    /// Tokens given out: one more than `decode_tokens`, unless an end token was chosen.
    pub generated_tokens: usize,
    /// What the model did for the prompt.
    pub prefill: StepStats,
    /// What it did for the tokens after it.
    pub decode: StepStats,
}

impl GenerationStats {
    /// Tokens of the prompt a second; 0 before they have run.
    #[must_use]
    pub fn prefill_tokens_per_second(&self) -> f64 {
        per_second(self.prefill_tokens, self.prefill_time)
    }

    /// Tokens a second after the prompt; 0 before one has run.
    #[must_use]
    pub fn decode_tokens_per_second(&self) -> f64 {
        per_second(self.decode_tokens, self.decode_time)
    }
}

fn per_second(n_tokens: usize, time: Duration) -> f64 {
    if time.is_zero() { 0.0 } else { n_tokens as f64 / time.as_secs_f64() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_tokens_by_seconds_and_zero_before_the_first() {
        let mut stats = GenerationStats::default();
        assert_eq!(stats.prefill_tokens_per_second(), 0.0);
        assert_eq!(stats.decode_tokens_per_second(), 0.0);
        stats.prefill_tokens = 6;
        stats.prefill_time = Duration::from_millis(500);
        stats.decode_tokens = 3;
        stats.decode_time = Duration::from_secs(2);
        assert_eq!(stats.prefill_tokens_per_second(), 12.0);
        assert_eq!(stats.decode_tokens_per_second(), 1.5);
    }
}
