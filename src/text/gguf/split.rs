//! How a text is split before pairs are merged: the names that files give it, and what they mean.
//!
//! The name stands for the splitting in the `tokenizer.json` that the file was made from; that, in
//! the library's own parts, is what is here, so that even its oddities are the original's. A name
//! that is not here is refused: a wrong splitting still gives text, only with worse ids.

use serde_json::Value;
use tokenizers::normalizers::NFC;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::punctuation::Punctuation;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{NormalizerWrapper, PreTokenizerWrapper, Result, SplitDelimiterBehavior};

/// GPT-2's words, with their space.
const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
/// LLaMA 3's: contractions in any case, numbers of up to three digits.
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Qwen 2's: the same with single digits.
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Tekken's: words are cut where lower case ends.
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Three digits at a time.
const THREE_DIGITS: &str = "[0-9][0-9][0-9]";

/// A splitting.
#[derive(Debug, Clone, Copy)]
pub(super) struct Splitting {
    /// What files call it.
    names: &'static [&'static str],
    steps: &'static [Step],
    /// Whether the text is first brought into the composed form of Unicode.
    composes: bool,
    /// Whether a word that is a token is not put together from merges.
    pub(super) whole_words: bool,
    /// Whether a text begins with the beginning-of-sequence token unless the file says otherwise.
    pub(super) adds_bos: bool,
}

/// One cut through the text, or the step from text to bytes.
#[derive(Debug, Clone, Copy)]
enum Step {
    /// Matches and what lies between them.
    Regex(&'static str),
    /// Each numeric character for itself.
    EachDigit,
    /// Runs of numeric characters.
    Digits,
    /// Runs of punctuation.
    Punctuation,
    /// Bytes as GPT-2's alphabet, split into GPT-2's words before or not at all.
    Bytes { words: bool },
}

const GPT2_BYTES: Step = Step::Bytes { words: true };
const BYTES: Step = Step::Bytes { words: false };

const fn splitting(names: &'static [&'static str], steps: &'static [Step]) -> Splitting {
    Splitting { names, steps, composes: false, whole_words: false, adds_bos: false }
}

const SPLITTINGS: [Splitting; 7] = [
    // what llama.cpp does for files that name none
    splitting(
        &["default"],
        &[
            Step::Regex(r"[\p{P}\$\+<=>\^~\|]+"),
            Step::Regex(GPT2),
            Step::Regex(r"\p{N}+"),
            Step::Regex(THREE_DIGITS),
            BYTES,
        ],
    ),
    splitting(&["gpt-2", "phi-2"], &[GPT2_BYTES]),
    splitting(
        &["falcon"],
        &[Step::Punctuation, GPT2_BYTES, Step::Digits, Step::Regex(THREE_DIGITS)],
    ),
    splitting(&["smollm", "starcoder", "refact"], &[Step::EachDigit, GPT2_BYTES]),
    Splitting { composes: true, ..splitting(&["qwen2"], &[Step::Regex(QWEN2), BYTES]) },
    Splitting {
        whole_words: true,
        adds_bos: true,
        ..splitting(&["llama-bpe", "llama3", "llama-v3"], &[Step::Regex(LLAMA3), BYTES])
    },
    Splitting {
        whole_words: true,
        adds_bos: true,
        ..splitting(&["tekken"], &[Step::Regex(TEKKEN), BYTES])
    },
];

/// The names that are known, separated by commas.
pub(super) fn supported() -> String {
    SPLITTINGS.iter().flat_map(|splitting| splitting.names).copied().collect::<Vec<_>>().join(", ")
}

/// The splitting of a name. Files of the time before there were names have those of their
/// architecture: PowerInfer's OPT and Falcon.
pub(super) fn find(name: Option<&str>, architecture: Option<&str>) -> Option<Splitting> {
    let name = name.unwrap_or(match architecture {
        Some("opt") => "gpt-2",
        Some("falcon") => "falcon",
        _ => "default",
    });
    SPLITTINGS.into_iter().find(|splitting| splitting.names.contains(&name))
}

/// The name of the splitting of a `tokenizer.json`, and whether it puts a space before a text;
/// `None` if it has no name.
pub(super) fn name_of(
    pre_tokenizer: &Value,
    normalizer: &Value,
    whole_words: bool,
) -> Option<(&'static str, bool)> {
    let given = steps(pre_tokenizer);
    let composes = match steps(normalizer).as_slice() {
        [] => false,
        [only] if only["type"] == "NFC" => true,
        _ => return None,
    };
    let named = SPLITTINGS.iter().flat_map(|splitting| [(splitting, false), (splitting, true)]);
    named
        .filter(|(splitting, _)| splitting.composes == composes)
        .filter(|(splitting, _)| splitting.whole_words == whole_words)
        .find(|(splitting, add_prefix_space)| {
            let made = splitting.pre_tokenizer(*add_prefix_space).ok();
            let made = made.and_then(|made| serde_json::to_value(made).ok());
            made.is_some_and(|made| steps(&made) == given)
        })
        .map(|(splitting, add_prefix_space)| (splitting.names[0], add_prefix_space))
}

/// The steps of a part of a `tokenizer.json`, without what does not change ids.
pub(super) fn steps(part: &Value) -> Vec<Value> {
    let Value::Object(fields) = part else { return Vec::new() };
    let inner = ["pretokenizers", "normalizers"].into_iter().find_map(|name| fields.get(name));
    if let Some(Value::Array(parts)) = inner {
        return parts.iter().flat_map(steps).collect();
    }
    let mut fields = fields.clone();
    fields.remove("trim_offsets");
    vec![Value::Object(fields)]
}

impl Splitting {
    pub(super) fn normalizer(&self) -> Option<NormalizerWrapper> {
        self.composes.then(|| NFC.into())
    }

    pub(super) fn pre_tokenizer(&self, add_prefix_space: bool) -> Result<PreTokenizerWrapper> {
        let step = |step: &Step| {
            Ok(match *step {
                Step::Regex(regex) => {
                    let pattern = SplitPattern::Regex(regex.to_owned());
                    Split::new(pattern, SplitDelimiterBehavior::Isolated, false)?.into()
                }
                Step::EachDigit => Digits::new(true).into(),
                Step::Digits => Digits::new(false).into(),
                Step::Punctuation => Punctuation::new(SplitDelimiterBehavior::Contiguous).into(),
                Step::Bytes { words } => ByteLevel::new(add_prefix_space, true, words).into(),
            })
        };
        let steps = self.steps.iter().map(step).collect::<Result<Vec<PreTokenizerWrapper>>>()?;
        Ok(Sequence::new(steps).into())
    }
}
