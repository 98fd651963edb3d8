//! What a caller may choose: the type of the weights, the prompt, and how a request is served.

use std::fmt;
use std::str::FromStr;

use powerinfer_core::{CancelToken, LogitsHook, Sampling, Sparsity};
use powerinfer_ops::WeightFormat;

use crate::error::{Error, Result};

/// What the weights are held as in memory.
///
/// # Examples
/// ```
/// use powerinfer::Dtype;
///
/// assert_eq!("bf16".parse::<Dtype>()?, Dtype::Bf16);
/// assert_eq!(Dtype::Auto.to_string(), "auto");
/// assert!("int4".parse::<Dtype>().is_err());
/// # Ok::<(), powerinfer::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Dtype {
    /// The type that the file has.
    #[default]
    Auto,
    /// 32-bit floats.
    F32,
    /// 16-bit floats of IEEE 754.
    F16,
    /// 16-bit floats with the exponent of 32-bit ones.
    Bf16,
    /// Bytes in blocks of 32 with a scale: about 8.5 bits a weight. Rounds the weights.
    Q8_0,
    /// Four-bit numbers in blocks of 32 with a scale: 4.5 bits a weight. Rounds the weights.
    Q4_0,
}

impl Dtype {
    const NAMES: [(&'static str, Self); 6] = [
        ("auto", Self::Auto),
        ("f32", Self::F32),
        ("f16", Self::F16),
        ("bf16", Self::Bf16),
        ("q8_0", Self::Q8_0),
        ("q4_0", Self::Q4_0),
    ];

    /// The format that this names, for models of one's own; `None` for the file's.
    #[must_use]
    pub fn weight_format(self) -> Option<WeightFormat> {
        match self {
            Self::Auto => None,
            Self::F32 => Some(WeightFormat::F32),
            Self::F16 => Some(WeightFormat::F16),
            Self::Bf16 => Some(WeightFormat::BF16),
            Self::Q8_0 => Some(WeightFormat::Q8_0),
            Self::Q4_0 => Some(WeightFormat::Q4_0),
        }
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = Self::NAMES.iter().find(|(_, dtype)| dtype == self);
        f.pad(name.map_or("", |(name, _)| name))
    }
}

impl FromStr for Dtype {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let known = Self::NAMES.iter().find(|(name, _)| *name == text);
        known.map(|&(_, dtype)| dtype).ok_or_else(|| Error::InvalidOption {
            field: "dtype",
            expected: "auto, f32, f16, bf16, q8_0 or q4_0",
            found: text.to_owned(),
        })
    }
}

/// What a session is asked to continue.
///
/// # Examples
/// ```
/// use powerinfer::Prompt;
///
/// assert_eq!(Prompt::from("Once"), Prompt::Text("Once".to_owned()));
/// assert_eq!(Prompt::from(vec![1, 2]), Prompt::Ids(vec![1, 2]));
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Prompt {
    /// Text for the tokenizer. The first text of a session gets the special tokens that the
    /// tokenizer file puts around a text (a beginning-of-sequence token, if any), later ones none.
    Text(String),
    /// Token ids, fed as they are.
    Ids(Vec<u32>),
}

impl From<&str> for Prompt {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

impl From<String> for Prompt {
    fn from(text: String) -> Self {
        Self::Text(text)
    }
}

impl From<&String> for Prompt {
    fn from(text: &String) -> Self {
        Self::Text(text.clone())
    }
}

impl From<Vec<u32>> for Prompt {
    fn from(ids: Vec<u32>) -> Self {
        Self::Ids(ids)
    }
}

impl From<&[u32]> for Prompt {
    fn from(ids: &[u32]) -> Self {
        Self::Ids(ids.to_vec())
    }
}

impl<const N: usize> From<[u32; N]> for Prompt {
    fn from(ids: [u32; N]) -> Self {
        Self::Ids(ids.to_vec())
    }
}

/// How one request is served; the default is greedy, up to 128 tokens.
///
/// # Examples
/// ```
/// use powerinfer::{GenerateOptions, Sampling};
///
/// let options = GenerateOptions::default()
///     .with_max_tokens(40)
///     .with_sampling(Sampling::default().with_temperature(0.8).with_seed(7))
///     .with_stop(["\n\n"]);
/// assert_eq!(options.stop, ["\n\n"]);
/// ```
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct GenerateOptions {
    /// Most tokens to write; 0 only appends the prompt to the context.
    pub max_tokens: usize,
    /// How a token is chosen from the logits.
    pub sampling: Sampling,
    /// Texts that end the generation; neither they nor anything after them is yielded.
    pub stop: Vec<String>,
    /// Token ids that end the generation, beside the model's own end tokens.
    pub stop_ids: Vec<u32>,
    /// Write on over the model's own end tokens.
    pub ignore_eos: bool,
    /// Run this request in another mode than the model was loaded with, for example dense, to
    /// compare both on one set of weights.
    pub sparsity: Option<Sparsity>,
    /// Give, with each token, its log-probability and those of so many likeliest tokens; `None`
    /// gives none.
    pub logprobs: Option<usize>,
    /// Changes the logits before a token is chosen from them: a say of one's own in what is written.
    pub logits_hook: Option<LogitsHook>,
    /// Stops the request from another thread, before the next layer; the text so far stays. The
    /// default is one that nobody else has.
    pub cancel: CancelToken,
    /// What becomes of a prompt that does not fit the rest of the context.
    pub context: ContextPolicy,
}

/// What becomes of a prompt that does not fit the rest of the context.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum ContextPolicy {
    /// It is refused. A text that fills the context ends with
    /// [`ContextFull`](crate::FinishReason::ContextFull).
    #[default]
    Error,
    /// Tokens after the first `keep_first` are forgotten, the oldest first, until prompt and
    /// [`max_tokens`](GenerateOptions::max_tokens) fit, or half of the context is free. What stays
    /// runs anew, as its positions have changed.
    DropOldest {
        /// Tokens at the beginning that stay: instructions, or the beginning-of-sequence token.
        keep_first: usize,
    },
}

impl Default for GenerateOptions {
    fn default() -> Self {
        Self {
            max_tokens: 128,
            sampling: Sampling::default(),
            stop: Vec::new(),
            stop_ids: Vec::new(),
            ignore_eos: false,
            sparsity: None,
            logprobs: None,
            logits_hook: None,
            cancel: CancelToken::default(),
            context: ContextPolicy::default(),
        }
    }
}

impl GenerateOptions {
    /// Sets [`max_tokens`](Self::max_tokens).
    #[must_use]
    pub fn with_max_tokens(mut self, max_tokens: usize) -> Self {
        self.max_tokens = max_tokens;
        self
    }

    /// Sets [`sampling`](Self::sampling).
    #[must_use]
    pub fn with_sampling(mut self, sampling: Sampling) -> Self {
        self.sampling = sampling;
        self
    }

    /// Sets [`stop`](Self::stop).
    #[must_use]
    pub fn with_stop<S: Into<String>>(mut self, stop: impl IntoIterator<Item = S>) -> Self {
        self.stop = stop.into_iter().map(Into::into).collect();
        self
    }

    /// Sets [`stop_ids`](Self::stop_ids).
    #[must_use]
    pub fn with_stop_ids(mut self, stop_ids: impl IntoIterator<Item = u32>) -> Self {
        self.stop_ids = stop_ids.into_iter().collect();
        self
    }

    /// Sets [`ignore_eos`](Self::ignore_eos).
    #[must_use]
    pub fn with_ignore_eos(mut self, ignore_eos: bool) -> Self {
        self.ignore_eos = ignore_eos;
        self
    }

    /// Sets [`sparsity`](Self::sparsity).
    #[must_use]
    pub fn with_sparsity(mut self, sparsity: Sparsity) -> Self {
        self.sparsity = Some(sparsity);
        self
    }

    /// Sets [`logprobs`](Self::logprobs) to those of the token itself and of `n_top` others.
    #[must_use]
    pub fn with_logprobs(mut self, n_top: usize) -> Self {
        self.logprobs = Some(n_top);
        self
    }

    /// Sets [`logits_hook`](Self::logits_hook) to `hook`, which gets the tokens so far and the
    /// logits that follow them.
    ///
    /// # Examples
    /// A sampler of one's own leaves one token above −∞:
    /// ```
    /// use powerinfer::{Engine, GenerateOptions};
    ///
    /// let engine = Engine::builder().model("assets/llama-relu-tiny").build()?;
    /// let options = GenerateOptions::default().with_max_tokens(3).with_logits_hook(|so_far, logits| {
    ///     let mut by_logit: Vec<usize> = (0..logits.len()).collect();
    ///     by_logit.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
    ///     let mine = by_logit[so_far.len() % 2]; // the best, then the second best, …
    ///     logits.fill(f32::NEG_INFINITY);
    ///     logits[mine] = 0.0;
    /// });
    /// let text = engine.session()?.generate_text("It was a truth", &options)?.text;
    /// assert_ne!(text, " to be,");
    /// # Ok::<(), powerinfer::Error>(())
    /// ```
    #[must_use]
    pub fn with_logits_hook(
        mut self,
        hook: impl Fn(&[u32], &mut [f32]) + Send + Sync + 'static,
    ) -> Self {
        self.logits_hook = Some(LogitsHook::new(hook));
        self
    }

    /// Sets [`cancel`](Self::cancel).
    #[must_use]
    pub fn with_cancel(mut self, cancel: &CancelToken) -> Self {
        self.cancel = cancel.clone();
        self
    }

    /// Sets [`context`](Self::context).
    #[must_use]
    pub fn with_context(mut self, context: ContextPolicy) -> Self {
        self.context = context;
        self
    }

    pub(crate) fn validate(&self) -> Result<()> {
        if self.stop.iter().any(String::is_empty) {
            return Err(Error::InvalidOption {
                field: "stop",
                expected: "strings that are not empty",
                found: "an empty string".to_owned(),
            });
        }
        Ok(self.sampling.validate()?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dtype_names_go_both_ways() {
        for (name, dtype) in Dtype::NAMES {
            assert_eq!(name.parse::<Dtype>().unwrap(), dtype);
            assert_eq!(dtype.to_string(), name);
        }
    }

    #[test]
    fn empty_stop_strings_are_refused() {
        let options = GenerateOptions::default().with_stop(["a", ""]);
        let error = options.validate().unwrap_err();
        assert!(matches!(error, Error::InvalidOption { field: "stop", .. }));
    }
}
