//! The one error type of this crate.

use std::path::PathBuf;

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
