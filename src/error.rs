//! The one error type of this crate.

use std::path::PathBuf;

use crate::stream::Generated;

/// The result of everything in this crate that can fail.
pub type Result<T> = std::result::Result<T, Error>;

/// What can go wrong between opening a model and reading its last piece of text.
///
/// The errors of the crates below come through with their own text: what was expected, what was
/// found, and the file, tensor or field. [`source`](std::error::Error::source) gives the causes.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A text that is longer than any context of that many tokens.
    #[error(
        "the prompt has {found_bytes} bytes, expected at most {max_bytes} for a context of \
         {max_context} tokens"
    )]
    PromptTooLong {
        /// Bytes of the text.
        found_bytes: usize,
        /// Bytes that could fit.
        max_bytes: usize,
        /// Tokens of the context.
        max_context: usize,
    },
    /// A file of the model is broken, or the model cannot run what it is asked: the context is
    /// full, a token does not exist, the logits are not finite.
    #[error(transparent)]
    Core(#[from] powerinfer_core::Error),
    /// The model could not be put together from files that are sound.
    #[error(transparent)]
    Models(Box<powerinfer_models::Error>),

    /// The builder was given neither a model folder nor a model of one's own, or both.
    #[error("expected either a model folder or a model of one's own, found {found}")]
    ModelSource {
        /// How many there were: `neither` or `both`.
        found: &'static str,
    },
    /// The model needs more memory than it was allowed; nothing of it has been loaded.
    #[error(
        "the model needs {needed_bytes} bytes of memory ({memory}), allowed are {budget_bytes}"
    )]
    OverBudget {
        /// Weights and one session with a full context.
        needed_bytes: u64,
        /// What was allowed.
        budget_bytes: u64,
        /// What the bytes are for.
        memory: Box<powerinfer_models::MemoryEstimate>,
    },
    /// The model came without a chat template, and none was given.
    #[error("the model has no chat template; give one, or write the prompt as a text")]
    NoChatTemplate,
    /// A chat template is broken, does not end, or refuses the messages.
    #[error("{origin}: the chat template failed")]
    ChatTemplate {
        /// The file, or `chat template` for one that was given as a text.
        origin: String,
        /// What is wrong: the line and the cause, or what the template itself says.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A file of settings is not the JSON that it should be.
    #[error("{path}: broken JSON")]
    Json {
        /// The file.
        path: PathBuf,
        /// Line, column and cause.
        #[source]
        source: serde_json::Error,
    },
    /// A request broke off in the middle. What it had written is here and in the session, which
    /// goes on from there.
    #[error("the text broke off after {} tokens", .generated.ids.len())]
    Interrupted {
        /// What there was before the error, as far as it had been given out.
        generated: Box<Generated>,
        /// Why it broke off.
        #[source]
        source: Box<Error>,
    },
    /// The thread of a request could not be started.
    #[error("cannot start a thread for the request")]
    Thread {
        /// The system's answer.
        #[source]
        source: std::io::Error,
    },
    /// The thread of a request panicked, in a logits hook or a model of one's own; its session is
    /// gone.
    #[error("the thread of the request panicked")]
    Panicked,
    /// A file could not be read.
    #[error("{path}: cannot be read")]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's answer.
        #[source]
        source: std::io::Error,
    },
    /// The tokenizer file is broken, or the tokenizer failed over a text.
    #[error("{path}: the tokenizer failed")]
    Tokenizer {
        /// The tokenizer's file.
        path: PathBuf,
        /// What the tokenizer library says.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A prompt or a stop string is text, and the model came without a tokenizer.
    #[error("{what} is text, but the model has no tokenizer; expected token ids")]
    NoTokenizer {
        /// What is text.
        what: &'static str,
    },
    /// An option outside its range.
    #[error("{field}: expected {expected}, found {found}")]
    InvalidOption {
        /// The option.
        field: &'static str,
        /// Its range.
        expected: &'static str,
        /// The value that was given.
        found: String,
    },
}

impl Error {
    /// Whether this is the answer to a [`CancelToken`](powerinfer_core::CancelToken) that was
    /// cancelled while a model was loaded. A request that is cancelled is no error: it ends with
    /// [`FinishReason::Cancelled`](crate::FinishReason::Cancelled).
    #[must_use]
    pub fn is_cancelled(&self) -> bool {
        matches!(self, Self::Core(powerinfer_core::Error::Cancelled))
    }
}

impl From<powerinfer_models::Error> for Error {
    fn from(error: powerinfer_models::Error) -> Self {
        match error {
            powerinfer_models::Error::Core(error) => Self::Core(error),
            error => Self::Models(Box::new(error)),
        }
    }
}

impl From<powerinfer_ops::OpError> for Error {
    fn from(error: powerinfer_ops::OpError) -> Self {
        Self::Core(error.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_travel_between_threads() {
        fn check<T: std::error::Error + Send + Sync + 'static>() {}
        check::<Error>();
    }

    #[test]
    fn text_says_what_was_expected_and_found() {
        let error = Error::InvalidOption {
            field: "threads",
            expected: "at least 1",
            found: "0".to_owned(),
        };
        assert_eq!(error.to_string(), "threads: expected at least 1, found 0");
    }
}
