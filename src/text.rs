//! Text on one side, token ids on the other: the only module that knows a tokenizer.

mod fence;
mod gguf;
mod pipeline;
mod stop_strings;
mod stream_decoder;

use std::any::Any;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use powerinfer_core::{GgufFile, GgufMetadata};
use tokenizers::{DecoderWrapper, Tokenizer as HfTokenizer};

use crate::error::{Error, Result};
use gguf::Assembled;
pub use gguf::tokenizer_keys;
use pipeline::Pipeline;

pub(crate) use fence::read as read_file;
pub(crate) use stop_strings::StopStrings;
pub(crate) use stream_decoder::StreamDecoder;

/// Turns text into token ids and token ids into text, as a Hugging Face `tokenizer.json` or the keys
/// of a GGUF file say.
///
/// Truncation and padding that the file may ask for are switched off: the ids are those of the
/// whole text and of nothing else.
///
/// # Examples
/// ```
/// use powerinfer::Tokenizer;
///
/// let tokenizer = Tokenizer::from_file("assets/llama-relu-tiny/tokenizer.json")?;
/// let ids = tokenizer.encode("It was a truth", true)?;
/// assert_eq!(ids, [1, 1388, 342, 261, 1988]); // 1 is `<s>`, put there by the file
/// assert_eq!(tokenizer.decode(&ids)?, "It was a truth");
/// # Ok::<(), powerinfer::Error>(())
/// ```
pub struct Tokenizer {
    inner: Pipeline,
    path: PathBuf,
    byte_level: bool,
    /// Ids that a file without a post-processor puts around a text.
    before: Option<u32>,
    after: Option<u32>,
}

impl Tokenizer {
    /// Reads a `tokenizer.json`.
    ///
    /// # Errors
    /// [`Error::Io`] if the file cannot be read or is no regular file of at most 256 MiB;
    /// [`Error::Tokenizer`] if it is not a tokenizer, asks for absurd amounts of memory, or made the
    /// tokenizer library panic (whose message Rust's panic hook then writes to stderr).
    pub fn from_file(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let bytes =
            fence::read(path).map_err(|source| Error::Io { path: path.to_path_buf(), source })?;
        let inner = guarded(path, || {
            fence::check(&bytes)?;
            let mut inner = HfTokenizer::from_bytes(&bytes)?;
            inner.with_truncation(None)?;
            inner.with_padding(None);
            Ok(inner)
        })?;
        let pipeline = Pipeline::Library(Box::new(inner));
        Ok(Self::new(path, Assembled { pipeline, before: None, after: None }))
    }

    /// Reads the tokenizer in the keys of a GGUF file.
    ///
    /// # Errors
    /// [`Error::Core`] if the file is none or names no tokenizer, and as
    /// [`from_gguf_metadata`](Self::from_gguf_metadata).
    pub fn from_gguf(path: impl AsRef<Path>) -> Result<Self> {
        Self::from_gguf_metadata(GgufFile::open(path.as_ref())?.metadata())
    }

    /// [`from_gguf`](Self::from_gguf) for a file that may have no tokenizer.
    pub(crate) fn in_gguf(path: &Path) -> Result<Option<Self>> {
        let file = GgufFile::open(path)?;
        let found = gguf::has_tokenizer(file.metadata())?;
        found.then(|| Self::from_gguf_metadata(file.metadata())).transpose()
    }

    /// Puts together the tokenizer that the keys `tokenizer.ggml.…` describe: `gpt2`, byte-level BPE,
    /// or `llama`, SentencePiece's BPE.
    ///
    /// Control tokens and tokens that a user defined are found wherever they are written in a text,
    /// as with a `tokenizer.json`.
    ///
    /// # Errors
    /// [`Error::Core`] with [`Metadata`](powerinfer_core::Error::Metadata) naming the key: another
    /// kind, a way to split text that is not known, lists of different lengths, a token that comes
    /// twice or is absurdly long, a merge of what is no token, an id out of range.
    /// [`Error::Tokenizer`] if the tokenizer library refuses what passed these checks.
    ///
    /// # Examples
    /// ```
    /// use powerinfer::Tokenizer;
    /// use powerinfer::core::{GgufMetadata, GgufValue};
    ///
    /// let text = |text: &str| GgufValue::String(text.to_owned());
    /// let metadata = GgufMetadata::new("m.gguf", [
    ///     ("tokenizer.ggml.model".to_owned(), text("gpt2")),
    ///     ("tokenizer.ggml.pre".to_owned(), text("gpt-2")),
    ///     ("tokenizer.ggml.tokens".to_owned(), GgufValue::strings(["a", "b", "ab"])),
    ///     ("tokenizer.ggml.merges".to_owned(), GgufValue::strings(["a b"])),
    /// ]);
    /// let tokenizer = Tokenizer::from_gguf_metadata(&metadata)?;
    /// assert_eq!(tokenizer.encode("aab", true)?, [0, 2]);
    /// # Ok::<(), powerinfer::Error>(())
    /// ```
    pub fn from_gguf_metadata(metadata: &GgufMetadata) -> Result<Self> {
        let path = metadata.path();
        let assembled = guarded(path, || Ok(gguf::assemble(metadata)))??;
        let refused = |source| Error::Tokenizer { path: path.to_path_buf(), source };
        Ok(Self::new(path, assembled.map_err(refused)?))
    }

    fn new(path: &Path, assembled: Assembled) -> Self {
        let Assembled { pipeline: inner, before, after } = assembled;
        let byte_level = inner.decoder().is_some_and(is_byte_level);
        Self { inner, path: path.to_path_buf(), byte_level, before, after }
    }

    /// The file that this tokenizer was read from.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Number of ids, the added tokens included; a model may have more rows than that.
    #[must_use]
    pub fn vocab_size(&self) -> usize {
        self.inner.vocab_size()
    }

    /// The id of a token as it is written in the vocabulary, for example `"<s>"`.
    #[must_use]
    pub fn token_id(&self, token: &str) -> Option<u32> {
        self.inner.token_id(token)
    }

    /// A token as it is written in the vocabulary; `None` for an id without one.
    #[must_use]
    pub fn token(&self, id: u32) -> Option<String> {
        self.inner.token(id)
    }

    /// The ids of `text`.
    ///
    /// `add_special` puts around the text the special tokens that the file asks for, the
    /// beginning-of-sequence token above all. A special token written out in `text` becomes that
    /// token either way.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] if the tokenizer refuses the text or panics.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>> {
        let ids = guarded(&self.path, || self.inner.encode(text, add_special))?;
        let (before, after) = if add_special { (self.before, self.after) } else { (None, None) };
        Ok(before.into_iter().chain(ids).chain(after).collect())
    }

    /// The text of `ids`: special tokens and ids without a token are left out, bytes that are no
    /// UTF-8 become U+FFFD.
    ///
    /// It is the text that a stream of the same ids yields piece by piece.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] if the file's decoder fails; a byte-level one cannot.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        let mut decoder = StreamDecoder::new();
        let mut text = String::new();
        for &id in ids {
            text.push_str(&decoder.push(self, id)?);
        }
        text.push_str(&decoder.finish(self)?);
        Ok(text)
    }

    /// The vocabulary's spelling of `id`; `None` for special tokens, which have no text, and for
    /// ids without a token.
    fn text_token(&self, id: u32) -> Option<String> {
        self.inner.token(id).filter(|token| !self.inner.is_special(token))
    }

    /// One call of the file's own decoder over `ids`.
    fn decode_window(&self, ids: &[u32]) -> Result<String> {
        guarded(&self.path, || self.inner.decode(ids))
    }
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tokenizer")
            .field("path", &self.path)
            .field("vocab_size", &self.vocab_size())
            .field("byte_level", &self.byte_level)
            .finish()
    }
}

fn is_byte_level(decoder: &DecoderWrapper) -> bool {
    match decoder {
        DecoderWrapper::ByteLevel(_) => true,
        DecoderWrapper::Sequence(sequence) => {
            matches!(sequence.get_decoders(), [DecoderWrapper::ByteLevel(_)])
        }
        _ => false,
    }
}

/// Runs a call into the tokenizer library, which panics over some crafted files, so that every
/// failure comes back as an error.
///
/// The closure may be cut off anywhere: it only reads the tokenizer, whose one mutable part is a
/// cache behind a lock that the library itself skips once it is poisoned.
fn guarded<T>(path: &Path, call: impl FnOnce() -> tokenizers::Result<T>) -> Result<T> {
    let source = match catch_unwind(AssertUnwindSafe(call)) {
        Ok(Ok(value)) => return Ok(value),
        Ok(Err(source)) => source,
        Err(payload) => Box::new(TokenizerPanic(panic_text(payload.as_ref()))) as _,
    };
    Err(Error::Tokenizer { path: path.to_path_buf(), source })
}

fn panic_text(payload: &(dyn Any + Send)) -> String {
    match (payload.downcast_ref::<&str>(), payload.downcast_ref::<String>()) {
        (Some(text), _) => (*text).to_owned(),
        (_, Some(text)) => text.clone(),
        _ => "no message".to_owned(),
    }
}

#[derive(Debug, thiserror::Error)]
#[error("the tokenizer library panicked: {0}")]
struct TokenizerPanic(String);

#[cfg(test)]
mod tests {
    use std::error::Error as _;

    use super::*;

    const DEMO: &str =
        concat!(env!("CARGO_MANIFEST_DIR"), "/assets/llama-relu-tiny/tokenizer.json");

    fn demo() -> Tokenizer {
        Tokenizer::from_file(DEMO).unwrap()
    }

    #[test]
    fn special_tokens_have_ids_and_no_text() {
        let tokenizer = demo();
        assert_eq!(tokenizer.token_id("</s>"), Some(2));
        assert_eq!(tokenizer.encode("", true).unwrap(), [1]);
        assert_eq!(tokenizer.encode("</s>", false).unwrap(), [2]);
        assert_eq!(tokenizer.decode(&[1, 2, 0, u32::MAX]).unwrap(), "");
    }

    #[test]
    fn truncation_and_padding_of_the_file_are_ignored() {
        let text = std::fs::read_to_string(DEMO).unwrap();
        let mut json: serde_json::Value = serde_json::from_str(&text).unwrap();
        json["truncation"] = serde_json::json!({
            "direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0
        });
        json["padding"] = serde_json::json!({
            "strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": null,
            "pad_id": 0, "pad_type_id": 0, "pad_token": "<pad>"
        });
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("tokenizer.json");
        std::fs::write(&path, json.to_string()).unwrap();
        let ids = Tokenizer::from_file(&path).unwrap().encode("It was a truth", true).unwrap();
        assert_eq!(ids, [1, 1388, 342, 261, 1988]);
    }

    #[test]
    fn a_panic_becomes_an_error_with_its_text() {
        let failed = guarded::<()>(Path::new("t.json"), || panic!("index {} out of range", 3));
        let error = failed.unwrap_err();
        assert!(matches!(&error, Error::Tokenizer { path, .. } if path == Path::new("t.json")));
        let cause = error.source().unwrap().to_string();
        assert_eq!(cause, "the tokenizer library panicked: index 3 out of range");
    }

    #[test]
    fn a_missing_file_is_an_io_error_that_names_it() {
        let error = Tokenizer::from_file("no/such/tokenizer.json").unwrap_err();
        assert!(matches!(error, Error::Io { path, .. } if path.ends_with("tokenizer.json")));
    }
}
