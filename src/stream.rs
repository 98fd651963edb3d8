//! The stream of a request: pieces of text as they come, and what came of it in the end.

use std::fmt;
use std::iter::FusedIterator;

use powerinfer_core::{
    Error as CoreError, FinishReason as TokenFinish, Generation, GenerationStats, TokenLogprobs,
};

use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::text::{StopStrings, StreamDecoder};

/// Pieces of text that continue a prompt, one for each token.
///
/// A piece is always whole characters, so it is empty while a character or a possible stop string
/// is incomplete. All pieces together are the text that decoding all ids at once gives, up to the
/// stop string if there was one.
///
/// Dropping the stream cancels the request: nothing runs between two pieces. Another thread cancels
/// it by [`GenerateOptions::cancel`](crate::GenerateOptions::cancel), in the middle of one. After an
/// error the stream has ended; [`text`](Self::text) is what there was before it.
#[must_use = "a stream is lazy: nothing runs before the first piece is asked for"]
pub struct TextStream<'a> {
    engine: &'a Engine,
    generation: Generation<'a>,
    pending: &'a mut Option<u32>,
    decoder: StreamDecoder,
    stops: StopStrings,
    prompt_ids: Vec<u32>,
    cached_tokens: usize,
    ids: Vec<u32>,
    logprobs: Vec<TokenLogprobs>,
    text: String,
    finish_reason: Option<FinishReason>,
}

/// A piece of a stream.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Piece {
    /// Text that is complete with this piece; may be empty.
    pub text: String,
    /// The tokens that were written since the last piece; a piece of text that had been held back
    /// may come without any.
    pub ids: Vec<u32>,
    /// How likely each of them was, where [`GenerateOptions::logprobs`] asked for it; else empty.
    ///
    /// [`GenerateOptions::logprobs`]: crate::GenerateOptions::logprobs
    pub logprobs: Vec<TokenLogprobs>,
}

/// Why a text ended.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FinishReason {
    /// The model chose this end token, which is not part of the text.
    EndToken(u32),
    /// The text ran into this stop string, which is not part of it.
    StopString(String),
    /// As many tokens as were asked for.
    MaxTokens,
    /// No further token fits the context.
    ContextFull,
    /// Somebody cancelled the request. What was written stays in the session; a prompt that had not
    /// run to its end does not.
    Cancelled,
    /// The stream gave out an error.
    Failed,
}

impl FinishReason {
    /// A name for logs and JSON: `end_token`, `stop_string`, `max_tokens`, `context_full`,
    /// `cancelled` or `failed`.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::EndToken(_) => "end_token",
            Self::StopString(_) => "stop_string",
            Self::MaxTokens => "max_tokens",
            Self::ContextFull => "context_full",
            Self::Cancelled => "cancelled",
            Self::Failed => "failed",
        }
    }
}

impl fmt::Display for FinishReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A request from its prompt to its end.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Generated {
    /// The prompt as the model got it, special tokens included.
    pub prompt_ids: Vec<u32>,
    /// How many of them did not run, as the session had them already; 0 unless the prompt was a
    /// [whole context](crate::Session::generate_whole).
    pub cached_tokens: usize,
    /// The tokens that were written, those of a stop string included, an end token not.
    pub ids: Vec<u32>,
    /// How likely each of them was, where it was asked for; else empty.
    pub logprobs: Vec<TokenLogprobs>,
    /// The text that was written.
    pub text: String,
    /// Why it ended.
    pub finish_reason: FinishReason,
    /// Tokens, time and work of prefill and decode.
    pub stats: GenerationStats,
}

impl Generated {
    /// A request that broke off before anything ran.
    pub(crate) fn failed(prompt_ids: Vec<u32>) -> Self {
        Self {
            prompt_ids,
            cached_tokens: 0,
            ids: Vec::new(),
            logprobs: Vec::new(),
            text: String::new(),
            finish_reason: FinishReason::Failed,
            stats: GenerationStats::default(),
        }
    }
}

impl<'a> TextStream<'a> {
    pub(crate) fn new(
        engine: &'a Engine,
        generation: Generation<'a>,
        pending: &'a mut Option<u32>,
        (prompt_ids, cached_tokens): (Vec<u32>, usize),
        (decoder, stop): (StreamDecoder, Vec<String>),
    ) -> Self {
        Self {
            engine,
            generation,
            pending,
            decoder,
            stops: StopStrings::new(stop),
            prompt_ids,
            cached_tokens,
            ids: Vec::new(),
            logprobs: Vec::new(),
            text: String::new(),
            finish_reason: None,
        }
    }

    /// The prompt as the model gets it, special tokens included.
    #[must_use]
    pub fn prompt_ids(&self) -> &[u32] {
        &self.prompt_ids
    }

    /// How many tokens of the prompt did not run, as the session had them already.
    #[must_use]
    pub fn cached_tokens(&self) -> usize {
        self.cached_tokens
    }

    /// The tokens written so far.
    #[must_use]
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// The text given out so far.
    #[must_use]
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Why the stream ended; `None` while it may go on.
    #[must_use]
    pub fn finish_reason(&self) -> Option<&FinishReason> {
        self.finish_reason.as_ref()
    }

    /// Tokens, time and work so far.
    #[must_use]
    pub fn stats(&self) -> &GenerationStats {
        self.generation.stats()
    }

    /// Runs to the end, if that is not reached yet, and returns the whole.
    ///
    /// After an error that was already given out it returns what there was before it, with
    /// [`FinishReason::Failed`].
    ///
    /// # Errors
    /// The stream's next error; if something had been written by then,
    /// [`Error::Interrupted`] with both.
    pub fn finish(mut self) -> Result<Generated> {
        let failed = self.by_ref().find_map(Result::err);
        let generated = Generated {
            finish_reason: self.finish_reason.unwrap_or(FinishReason::Failed),
            stats: self.generation.stats().clone(),
            prompt_ids: self.prompt_ids,
            cached_tokens: self.cached_tokens,
            ids: self.ids,
            logprobs: self.logprobs,
            text: self.text,
        };
        match failed {
            None => Ok(generated),
            Some(source) if generated.ids.is_empty() => Err(source),
            Some(source) => {
                Err(Error::Interrupted { generated: Box::new(generated), source: Box::new(source) })
            }
        }
    }

    /// One more token: the piece it makes, or `None` at the end of the tokens.
    fn step(&mut self) -> Result<Option<Piece>> {
        let Self { engine, generation, .. } = self;
        let next = engine.pool().install(|| generation.next());
        // a prompt that did not run to its end leaves the token before it where it was
        if self.generation.stats().prefill_tokens > 0 {
            *self.pending = self.generation.pending();
        }
        let (id, mut ended) = match next.transpose() {
            Err(CoreError::Cancelled) => (None, Some(FinishReason::Cancelled)),
            next => (next?, self.generation.finish_reason().map(FinishReason::from)),
        };
        let mut logprobs = Vec::new();
        let mut text = String::new();
        if let Some(id) = id {
            self.ids.push(id);
            logprobs.extend(self.generation.logprobs().cloned());
            self.logprobs.extend_from_slice(&logprobs);
            text = self.completed_by(id)?;
        }
        if self.finish_reason.is_none() && ended.is_some() {
            text.push_str(&self.rest()?);
            self.finish_reason = self.finish_reason.take().or(ended.take());
        }
        self.text.push_str(&text);
        let ids: Vec<u32> = id.into_iter().collect();
        let piece = !(ids.is_empty() && text.is_empty());
        Ok(piece.then_some(Piece { text, ids, logprobs }))
    }

    /// The text that a token completes and that no stop string can claim.
    fn completed_by(&mut self, id: u32) -> Result<String> {
        let Some(tokenizer) = self.engine.tokenizer() else {
            return Ok(String::new());
        };
        let text = self.decoder.push(tokenizer, id)?;
        Ok(self.release(text))
    }

    /// The text that was held back, when no more tokens follow.
    fn rest(&mut self) -> Result<String> {
        let Some(tokenizer) = self.engine.tokenizer() else {
            return Ok(String::new());
        };
        let undecoded = self.decoder.finish(tokenizer)?;
        let mut text = self.release(undecoded);
        if self.finish_reason.is_none() {
            text.push_str(&self.stops.finish());
        }
        Ok(text)
    }

    fn release(&mut self, text: String) -> String {
        let released = self.stops.push(text);
        if let Some(stop) = released.stop {
            self.finish_reason = Some(FinishReason::StopString(stop));
        }
        released.text
    }
}

impl Iterator for TextStream<'_> {
    type Item = Result<Piece>;

    fn next(&mut self) -> Option<Result<Piece>> {
        if self.finish_reason.is_some() {
            return None;
        }
        let step = self.step();
        if step.is_err() {
            self.finish_reason = Some(FinishReason::Failed);
        }
        if let Some(reason) = &self.finish_reason {
            let stats = self.generation.stats();
            tracing::debug!(
                %reason,
                prefill_tokens = stats.prefill_tokens,
                prefill_time = ?stats.prefill_time,
                decode_tokens = stats.decode_tokens,
                decode_time = ?stats.decode_time,
                "text ended"
            );
        }
        step.transpose()
    }
}

impl FusedIterator for TextStream<'_> {}

impl fmt::Debug for TextStream<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TextStream")
            .field("text", &self.text)
            .field("finish_reason", &self.finish_reason)
            .finish_non_exhaustive()
    }
}

impl From<TokenFinish> for FinishReason {
    fn from(reason: TokenFinish) -> Self {
        match reason {
            TokenFinish::EndToken(id) => Self::EndToken(id),
            TokenFinish::ContextFull => Self::ContextFull,
            // The crates move in step: a reason that core learns gets its line here.
            TokenFinish::MaxTokens | _ => Self::MaxTokens,
        }
    }
}
