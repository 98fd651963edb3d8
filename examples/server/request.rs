//! What a client asks for: OpenAI's JSON, checked.

use std::collections::BTreeMap;
use std::time::{SystemTime, UNIX_EPOCH};

use powerinfer::{ChatMessage, ChatOptions, Engine, GenerateOptions, Sampling};
use serde::Deserialize;
use serde_json::Value;

use super::problem::Problem;

/// Which of the two interfaces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Completion,
    Chat,
}

impl Kind {
    pub(crate) fn id_prefix(self) -> &'static str {
        match self {
            Self::Completion => "cmpl",
            Self::Chat => "chatcmpl",
        }
    }
}

/// The body of a request; fields that change nothing here are ignored, as clients send many.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Body {
    model: Option<String>,
    prompt: Option<Prompt>,
    messages: Option<Vec<Message>>,
    tools: Option<Value>,
    max_tokens: Option<usize>,
    max_completion_tokens: Option<usize>,
    temperature: Option<f32>,
    top_p: Option<f32>,
    top_k: Option<usize>,
    min_p: Option<f32>,
    repetition_penalty: Option<f32>,
    logit_bias: Option<BTreeMap<String, f32>>,
    seed: Option<i64>,
    stop: Option<Stop>,
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    /// A number for completions, yes or no for chats.
    logprobs: Option<Value>,
    top_logprobs: Option<usize>,
    ignore_eos: Option<bool>,
    // refused unless they say what is done anyway
    n: Option<u64>,
    best_of: Option<u64>,
    echo: Option<bool>,
    suffix: Option<String>,
    presence_penalty: Option<f32>,
    frequency_penalty: Option<f32>,
    response_format: Option<ResponseFormat>,
    functions: Option<Value>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Prompt {
    Text(String),
    Ids(Vec<u32>),
    Texts(Vec<String>),
    IdLists(Vec<Vec<u32>>),
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Stop {
    One(String),
    Many(Vec<String>),
}

#[derive(Debug, Deserialize)]
struct Message {
    role: String,
    content: Option<Content>,
    #[serde(flatten)]
    more: BTreeMap<String, Value>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Content {
    Text(String),
    Parts(Vec<Part>),
}

#[derive(Debug, Deserialize)]
struct Part {
    #[serde(rename = "type")]
    kind: String,
    text: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
struct StreamOptions {
    #[serde(default)]
    include_usage: bool,
}

#[derive(Debug, Deserialize)]
struct ResponseFormat {
    #[serde(rename = "type")]
    kind: String,
}

/// A request, ready to be run.
#[derive(Debug)]
pub(crate) struct Ask {
    pub(crate) kind: Kind,
    pub(crate) model: Option<String>,
    pub(crate) stream: bool,
    pub(crate) include_usage: bool,
    pub(crate) logprobs: Option<usize>,
    prompt: AskedPrompt,
    options: GenerateOptions,
    max_tokens: Option<usize>,
}

#[derive(Debug)]
enum AskedPrompt {
    Text(String),
    Ids(Vec<u32>),
    Chat(Vec<ChatMessage>, ChatOptions),
}

impl Ask {
    /// Reads a body; `number` makes seeds of requests without one differ.
    pub(crate) fn parse(kind: Kind, bytes: &[u8], number: u64) -> Result<Self, Problem> {
        let body: Body = serde_json::from_slice(bytes)
            .map_err(|error| Problem::invalid("body", format!("broken JSON: {error}")))?;
        body.refuse_unsupported()?;
        let logprobs = body.n_logprobs(kind)?;
        let mut options = GenerateOptions::default()
            .with_sampling(body.sampling(number)?)
            .with_ignore_eos(body.ignore_eos.unwrap_or(false))
            .with_stop(match body.stop {
                Some(Stop::One(stop)) => vec![stop],
                Some(Stop::Many(stops)) => stops,
                None => Vec::new(),
            });
        options.logprobs = logprobs;
        let max_tokens = body.max_completion_tokens.or(body.max_tokens);
        let include_usage = body.stream_options.is_some_and(|options| options.include_usage);
        let prompt = match kind {
            Kind::Completion => completion_prompt(body.prompt)?,
            Kind::Chat => chat_prompt(body.messages, body.tools)?,
        };
        let stream = body.stream.unwrap_or(false);
        Ok(Self {
            kind,
            model: body.model,
            stream,
            include_usage,
            logprobs,
            prompt,
            options,
            max_tokens,
        })
    }

    /// The prompt as the model gets it.
    pub(crate) fn prompt_ids(&self, engine: &Engine) -> powerinfer::Result<Vec<u32>> {
        match &self.prompt {
            AskedPrompt::Ids(ids) => Ok(ids.clone()),
            AskedPrompt::Text(text) => engine.text_prompt(text),
            AskedPrompt::Chat(messages, options) => engine.chat_prompt(messages, options),
        }
    }

    /// How the request is served: what the interface says where the client does not.
    pub(crate) fn options(&self, engine: &Engine) -> GenerateOptions {
        let default = match self.kind {
            Kind::Completion => 16,
            Kind::Chat => engine.max_context(),
        };
        self.options.clone().with_max_tokens(self.max_tokens.unwrap_or(default))
    }
}

impl Body {
    fn sampling(&self, number: u64) -> Result<Sampling, Problem> {
        let seed = self.seed.map_or_else(|| some_seed(number), i64::cast_unsigned);
        let mut bias = Vec::new();
        for (token, value) in self.logit_bias.iter().flatten() {
            let id = token.parse().map_err(|_| {
                Problem::invalid("logit_bias", format!("expected token ids, found {token:?}"))
            })?;
            bias.push((id, *value));
        }
        let sampling = Sampling::default()
            .with_temperature(self.temperature.unwrap_or(1.0))
            .with_top_p(self.top_p.unwrap_or(1.0))
            .with_top_k(self.top_k)
            .with_min_p(self.min_p.unwrap_or(0.0))
            .with_repetition_penalty(self.repetition_penalty.unwrap_or(1.0))
            .with_logit_bias(bias)
            .with_seed(seed);
        Ok(sampling)
    }

    fn n_logprobs(&self, kind: Kind) -> Result<Option<usize>, Problem> {
        const MOST: u64 = 20;
        let wrong =
            || Problem::invalid("logprobs", "logprobs: expected 0 to 20, or true for chats");
        let n = match (kind, &self.logprobs) {
            (_, None | Some(Value::Null | Value::Bool(false))) => return Ok(None),
            (Kind::Chat, Some(Value::Bool(true))) => self.top_logprobs.unwrap_or(0) as u64,
            (Kind::Completion, Some(Value::Number(n))) => n.as_u64().ok_or_else(wrong)?,
            _ => return Err(wrong()),
        };
        if n > MOST {
            return Err(wrong());
        }
        Ok(Some(n as usize))
    }

    fn refuse_unsupported(&self) -> Result<(), Problem> {
        let is_zero = |penalty: Option<f32>| penalty.is_none_or(|penalty| penalty == 0.0);
        let done = [
            ("n", self.n.is_none_or(|n| n == 1)),
            ("best_of", self.best_of.is_none_or(|n| n == 1)),
            ("echo", !self.echo.unwrap_or(false)),
            ("suffix", self.suffix.is_none()),
            ("presence_penalty", is_zero(self.presence_penalty)),
            ("frequency_penalty", is_zero(self.frequency_penalty)),
            (
                "response_format",
                self.response_format.as_ref().is_none_or(|format| format.kind == "text"),
            ),
            ("functions", self.functions.is_none()),
        ];
        match done.iter().find(|(_, done)| !done) {
            Some((name, _)) => Err(Problem::unsupported(name)),
            None => Ok(()),
        }
    }
}

fn completion_prompt(prompt: Option<Prompt>) -> Result<AskedPrompt, Problem> {
    let one = || Problem::invalid("prompt", "prompt: expected one text or one list of token ids");
    match prompt.ok_or_else(one)? {
        Prompt::Text(text) => Ok(AskedPrompt::Text(text)),
        Prompt::Ids(ids) => Ok(AskedPrompt::Ids(ids)),
        Prompt::Texts(texts) => {
            let [text] = <[String; 1]>::try_from(texts).map_err(|_| one())?;
            Ok(AskedPrompt::Text(text))
        }
        Prompt::IdLists(lists) => {
            let [ids] = <[Vec<u32>; 1]>::try_from(lists).map_err(|_| one())?;
            Ok(AskedPrompt::Ids(ids))
        }
    }
}

fn chat_prompt(
    messages: Option<Vec<Message>>,
    tools: Option<Value>,
) -> Result<AskedPrompt, Problem> {
    let messages = messages.filter(|messages| !messages.is_empty());
    let missing = || Problem::invalid("messages", "messages: expected at least one");
    let messages = messages.ok_or_else(missing)?.into_iter().map(|message| {
        let text = match message.content {
            Some(Content::Text(text)) => text,
            Some(Content::Parts(parts)) => text_of(parts)?,
            None => String::new(),
        };
        let chat = ChatMessage::new(message.role, text);
        Ok(message.more.into_iter().fold(chat, |chat, (name, value)| chat.with_field(name, value)))
    });
    let messages = messages.collect::<Result<_, Problem>>()?;
    let options = ChatOptions::default();
    let options = match tools {
        Some(tools) => options.with_tools(tools),
        None => options,
    };
    Ok(AskedPrompt::Chat(messages, options))
}

fn text_of(parts: Vec<Part>) -> Result<String, Problem> {
    let text = |part: Part| match (part.kind.as_str(), part.text) {
        ("text", Some(text)) => Ok(text),
        (kind, _) => {
            Err(Problem::invalid("messages", format!("content of type {kind:?}: expected text")))
        }
    };
    parts.into_iter().map(text).collect()
}

fn some_seed(number: u64) -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos());
    now as u64 ^ number.rotate_left(32)
}
