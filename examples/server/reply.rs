//! The answer, whole or as server-sent events.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::future::poll_fn;
use std::pin::Pin;
use std::task::{Context, Poll};

use axum::response::sse::{Event, KeepAlive, KeepAliveStream, Sse};
use futures_core::Stream;
use powerinfer::{Engine, FinishReason, Generated, Piece, PieceStream, TokenLogprobs};
use serde_json::{Value, json};

use super::desk::Seat;
use super::problem::Problem;
use super::request::{Ask, Kind};
use super::seconds_now;

/// What stands in for the logarithm of nothing, which JSON cannot say.
const LOG_ZERO: f32 = -9999.0;

/// Writes the answer to one request.
#[derive(Debug)]
pub(crate) struct Reply {
    engine: Engine,
    model_id: String,
    id: String,
    created: u64,
    ask: Ask,
    /// Bytes of text written so far, which is where the next token of a completion begins.
    offset: usize,
}

impl Reply {
    pub(crate) fn new(engine: Engine, model_id: String, id: String, ask: Ask) -> Self {
        Self { engine, model_id, id, created: seconds_now(), ask, offset: 0 }
    }

    /// Waits for the end. Dropped before, it cancels the request.
    pub(crate) async fn whole(
        mut self,
        mut pieces: PieceStream,
        seat: Seat,
    ) -> Result<Value, Problem> {
        while let Some(piece) = poll_fn(|cx| Pin::new(&mut pieces).poll_next(cx)).await {
            piece?;
        }
        let generated = seat.finish(pieces)?;
        let logprobs = self.logprobs(&generated.logprobs);
        let mut choice = match self.ask.kind {
            Kind::Completion => json!({"text": generated.text}),
            Kind::Chat => json!({"message": {
                "role": "assistant", "content": generated.text, "refusal": null,
            }}),
        };
        choice["index"] = 0.into();
        choice["finish_reason"] = finish_reason(&generated.finish_reason).into();
        choice["logprobs"] = logprobs;
        let mut answer = self.frame(&["text_completion", "chat.completion"], vec![choice]);
        answer["usage"] = usage(&generated);
        Ok(answer)
    }

    /// Events as the pieces come.
    pub(crate) fn events(self, pieces: PieceStream, seat: Seat) -> Sse<KeepAliveStream<Events>> {
        let mut waiting = VecDeque::new();
        if self.ask.kind == Kind::Chat {
            waiting.push_back(self.chunk(
                json!({"role": "assistant", "content": ""}),
                Value::Null,
                None,
            ));
        }
        let events = Events { reply: self, running: Some((pieces, seat)), waiting };
        Sse::new(events).keep_alive(KeepAlive::default())
    }

    fn frame(&self, objects: &[&str; 2], choices: Vec<Value>) -> Value {
        let object = match self.ask.kind {
            Kind::Completion => objects[0],
            Kind::Chat => objects[1],
        };
        json!({
            "id": self.id,
            "object": object,
            "created": self.created,
            "model": self.model_id,
            "choices": choices,
        })
    }

    fn chunk(&self, delta: Value, logprobs: Value, finish: Option<&FinishReason>) -> Value {
        let mut choice = match self.ask.kind {
            Kind::Completion => json!({"text": delta["content"].as_str().unwrap_or("")}),
            Kind::Chat => json!({"delta": delta}),
        };
        choice["index"] = 0.into();
        choice["finish_reason"] = finish.map_or(Value::Null, |reason| finish_reason(reason).into());
        choice["logprobs"] = logprobs;
        self.frame(&["text_completion", "chat.completion.chunk"], vec![choice])
    }

    fn piece(&mut self, piece: &Piece) -> Value {
        let logprobs = self.logprobs(&piece.logprobs);
        self.chunk(json!({"content": piece.text}), logprobs, None)
    }

    /// The last chunks: why it ended, and what it took.
    fn end(&self, generated: &Generated) -> Vec<Value> {
        let mut chunks = vec![self.chunk(json!({}), Value::Null, Some(&generated.finish_reason))];
        if self.ask.include_usage {
            let mut chunk = self.frame(&["text_completion", "chat.completion.chunk"], vec![]);
            chunk["usage"] = usage(generated);
            chunks.push(chunk);
        }
        chunks
    }

    fn logprobs(&mut self, tokens: &[TokenLogprobs]) -> Value {
        if self.ask.logprobs.is_none() {
            return Value::Null;
        }
        match self.ask.kind {
            Kind::Chat => {
                let content: Vec<Value> =
                    tokens.iter().map(|token| self.chat_logprob(token)).collect();
                json!({"content": content, "refusal": null})
            }
            Kind::Completion => self.completion_logprobs(tokens),
        }
    }

    fn chat_logprob(&self, token: &TokenLogprobs) -> Value {
        let one = |id: u32, logprob: f32| {
            let text = self.token_text(id);
            json!({"token": text, "logprob": logprob.max(LOG_ZERO), "bytes": text.as_bytes()})
        };
        let mut value = one(token.id, token.logprob);
        value["top_logprobs"] = token.top.iter().map(|&(id, logprob)| one(id, logprob)).collect();
        value
    }

    fn completion_logprobs(&mut self, tokens: &[TokenLogprobs]) -> Value {
        let mut offsets = Vec::new();
        let texts: Vec<String> = tokens.iter().map(|token| self.token_text(token.id)).collect();
        for text in &texts {
            offsets.push(self.offset);
            self.offset += text.len();
        }
        let top: Vec<Value> = tokens
            .iter()
            .map(|token| {
                let pairs = token.top.iter();
                pairs
                    .map(|&(id, lp)| (self.token_text(id), Value::from(lp.max(LOG_ZERO))))
                    .collect()
            })
            .collect();
        json!({
            "tokens": texts,
            "token_logprobs": tokens.iter().map(|token| token.logprob.max(LOG_ZERO)).collect::<Vec<_>>(),
            "top_logprobs": top,
            "text_offset": offsets,
        })
    }

    /// The text of a token on its own; of one without text, its name in the vocabulary.
    fn token_text(&self, id: u32) -> String {
        let Some(tokenizer) = self.engine.tokenizer() else {
            return String::new();
        };
        let text = tokenizer.decode(&[id]).unwrap_or_default();
        if text.is_empty() { tokenizer.token(id).unwrap_or_default() } else { text }
    }
}

/// The stream of events of one request. Dropping it, as happens when the client goes away, cancels
/// the request.
#[derive(Debug)]
pub(crate) struct Events {
    reply: Reply,
    running: Option<(PieceStream, Seat)>,
    waiting: VecDeque<Value>,
}

impl Stream for Events {
    type Item = Result<Event, Infallible>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let Self { reply, running, waiting } = &mut *self;
        while waiting.is_empty() {
            let Some((pieces, _)) = running else {
                return Poll::Ready(None);
            };
            match Pin::new(pieces).poll_next(cx) {
                Poll::Pending => return Poll::Pending,
                // a token whose text waits for the next one is no news, unless it was asked about
                Poll::Ready(Some(Ok(piece)))
                    if piece.text.is_empty() && piece.logprobs.is_empty() => {}
                Poll::Ready(Some(Ok(piece))) => waiting.push_back(reply.piece(&piece)),
                Poll::Ready(Some(Err(error))) => {
                    waiting.push_back(Problem::from(error).as_json());
                    *running = None;
                }
                Poll::Ready(None) => {
                    let ended = running.take().map(|(pieces, seat)| seat.finish(pieces));
                    match ended {
                        Some(Ok(generated)) => waiting.extend(reply.end(&generated)),
                        Some(Err(problem)) => waiting.push_back(problem.as_json()),
                        None => {}
                    }
                    waiting.push_back(Value::Null);
                }
            }
        }
        let data = match waiting.pop_front() {
            None | Some(Value::Null) => "[DONE]".to_owned(),
            Some(value) => value.to_string(),
        };
        Poll::Ready(Some(Ok(Event::default().data(data))))
    }
}

fn finish_reason(reason: &FinishReason) -> &'static str {
    match reason {
        FinishReason::MaxTokens | FinishReason::ContextFull => "length",
        _ => "stop",
    }
}

fn usage(generated: &Generated) -> Value {
    let (prompt, completion) = (generated.prompt_ids.len(), generated.ids.len());
    json!({
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": generated.cached_tokens},
    })
}
