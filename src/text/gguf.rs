//! A tokenizer out of the keys of a GGUF file.
//!
//! Two kinds: `gpt2`, byte-level BPE with a list of merges and a named way to split the text first,
//! and `llama`, SentencePiece's BPE with a score for each piece and bytes for what has none. Both are
//! put together from the library's parts, so that the ids are those of the tokenizer that the file
//! was made from.
//!
//! # Tokens written out in a text
//! Control tokens, the unknown token and tokens that a user defined become what they are wherever
//! they are written in a text, the longest first, as with the `tokenizer.json` they come from
//! (llama.cpp's `parse_special`). Text whose author must not write control tokens has to be
//! checked before. They have no text of their own when they are decoded, but for those that a user
//! defined.

mod keys;
mod pieces;
mod split;

use std::collections::HashMap;

use powerinfer_core::{Error as CoreError, GgufMetadata};
use tokenizers::decoders::{
    byte_fallback::ByteFallback, fuse::Fuse, sequence::Sequence as Decoders, strip::Strip,
};
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::normalizers::{Prepend, Replace, Sequence as Normalizers};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{AddedToken, NormalizerWrapper, Tokenizer as HfTokenizer};

use super::pipeline::{PieceTokenizer, Pipeline};
pub use keys::tokenizer_keys;
pub(super) use pieces::Pieces;

const MODEL: &str = "tokenizer.ggml.model";
const PRE: &str = "tokenizer.ggml.pre";
const TOKENS: &str = "tokenizer.ggml.tokens";
const SCORES: &str = "tokenizer.ggml.scores";
const TYPES: &str = "tokenizer.ggml.token_type";
const MERGES: &str = "tokenizer.ggml.merges";
const ADD_BOS: &str = "tokenizer.ggml.add_bos_token";
const ADD_EOS: &str = "tokenizer.ggml.add_eos_token";
const ADD_SPACE: &str = "tokenizer.ggml.add_space_prefix";
const REMOVE_SPACES: &str = "tokenizer.ggml.remove_extra_whitespaces";
const ARCHITECTURE: &str = "general.architecture";

/// The longest token that is taken: several times the longest in use. Looking for pairs costs time
/// in proportion to it.
const MAX_TOKEN_BYTES: usize = 4096;

/// A tokenizer, and the ids that it puts around a text.
#[derive(Debug)]
pub(super) struct Assembled {
    pub(super) pipeline: Pipeline,
    pub(super) before: Option<u32>,
    pub(super) after: Option<u32>,
}

/// Puts the tokenizer of a GGUF file together; the inner result is the library's.
pub(super) fn assemble(
    metadata: &GgufMetadata,
) -> Result<tokenizers::Result<Assembled>, CoreError> {
    match metadata.str(MODEL)? {
        "gpt2" => byte_level(metadata),
        "llama" => scored(metadata),
        _ => Err(metadata.error(MODEL, "gpt2 or llama")),
    }
}

/// Whether a file has a tokenizer at all.
pub(super) fn has_tokenizer(metadata: &GgufMetadata) -> Result<bool, CoreError> {
    Ok(metadata.optional_str(MODEL)?.is_some_and(|model| model != "none" && model != "no_vocab"))
}

/// What kind of token it is, in llama.cpp's numbering.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Comes out of merges; a number that the list leaves undefined, and one never used, too.
    Normal,
    /// Stands for what is not in the vocabulary.
    Unknown,
    /// Says something about the text and is no part of it.
    Control,
    /// Text that is never taken apart.
    UserDefined,
    /// A single byte, written as `<0x0A>`.
    Byte,
}

/// The tokens of a file: distinct, each of a sane length, as many as kinds.
struct Vocabulary<'a> {
    metadata: &'a GgufMetadata,
    /// Empty where an id has no token.
    tokens: Vec<&'a str>,
    kinds: Vec<Kind>,
    ids: HashMap<&'a str, u32>,
}

impl<'a> Vocabulary<'a> {
    fn read(metadata: &'a GgufMetadata) -> Result<Self, CoreError> {
        let tokens = metadata.strings(TOKENS)?;
        if tokens.is_empty() || u32::try_from(tokens.len()).is_err() {
            return Err(metadata.error(TOKENS, "at least one token and fewer than 2³²"));
        }
        let kinds = kinds(metadata, tokens.len())?;
        let mut ids = HashMap::with_capacity(tokens.len());
        for (id, &token) in (0u32..).zip(&tokens) {
            if token.len() > MAX_TOKEN_BYTES {
                let expected = format!("tokens of at most {MAX_TOKEN_BYTES} bytes");
                let found = format!("{} bytes in token {id}", token.len());
                return Err(wrong(metadata, TOKENS, expected, found));
            }
            if token.is_empty() {
                continue;
            }
            if let Some(first) = ids.insert(token, id) {
                let found = format!("{token:?} as token {first} and as token {id}");
                return Err(wrong(metadata, TOKENS, "every token once", found));
            }
        }
        Ok(Self { metadata, tokens, kinds, ids })
    }

    /// Tokens with their ids and kinds, without the empty ones.
    fn iter(&self) -> impl Iterator<Item = (u32, &'a str, Kind)> {
        let all = (0u32..).zip(&self.tokens).zip(&self.kinds);
        all.map(|((id, &token), &kind)| (id, token, kind)).filter(|(_, token, _)| !token.is_empty())
    }

    /// The tokens that are looked for in a text before anything else.
    fn added(&self) -> Vec<AddedToken> {
        self.iter()
            .filter_map(|(_, token, kind)| match kind {
                Kind::Control | Kind::Unknown => Some(AddedToken::from(token, true)),
                Kind::UserDefined => Some(AddedToken::from(token, false).normalized(false)),
                Kind::Normal | Kind::Byte => None,
            })
            .collect()
    }

    /// The id under a key; `default` if the key is not there.
    fn special(&self, key: &str, default: Option<u32>) -> Result<Option<u32>, CoreError> {
        let id = self.metadata.optional_u32(key)?.filter(|&id| id != u32::MAX).or(default);
        match id {
            Some(id) if self.tokens.get(id as usize).is_none_or(|token| token.is_empty()) => {
                let expected = format!("the id of one of {} tokens", self.tokens.len());
                Err(wrong(self.metadata, key, expected, id.to_string()))
            }
            id => Ok(id),
        }
    }

    /// The id that a switch puts at one end of a text.
    fn around(
        &self,
        switch: &str,
        switched_on: bool,
        (key, default): (&str, Option<u32>),
    ) -> Result<Option<u32>, CoreError> {
        if !self.metadata.optional_bool(switch)?.unwrap_or(switched_on) {
            return Ok(None);
        }
        let id = self.special(key, default)?;
        let missing = || self.metadata.error(key, format!("a token id, because of `{switch}`"));
        id.map(Some).ok_or_else(missing)
    }
}

/// Byte-level BPE.
fn byte_level(metadata: &GgufMetadata) -> Result<tokenizers::Result<Assembled>, CoreError> {
    let vocabulary = Vocabulary::read(metadata)?;
    let architecture = metadata.optional_str(ARCHITECTURE)?;
    let splitting = split::find(metadata.optional_str(PRE)?, architecture)
        .ok_or_else(|| metadata.error(PRE, format!("one of {}", split::supported())))?;
    let merges = merges(&vocabulary)?;
    let before = vocabulary.around(ADD_BOS, splitting.adds_bos, (BOS.0, None))?;
    let after = vocabulary.around(ADD_EOS, false, (EOS.0, None))?;
    let add_prefix_space = metadata.optional_bool(ADD_SPACE)?.unwrap_or(false);
    let ids: Vocab = vocabulary.iter().map(|(id, token, _)| (token.to_owned(), id)).collect();
    let model =
        BPE::builder().vocab_and_merges(ids, merges).ignore_merges(splitting.whole_words).build();
    let tokenizer = model.and_then(|model| {
        let mut tokenizer = HfTokenizer::new(model);
        tokenizer.with_normalizer(splitting.normalizer())?;
        tokenizer.with_pre_tokenizer(Some(splitting.pre_tokenizer(add_prefix_space)?));
        tokenizer.with_decoder(Some(ByteLevel::default()));
        tokenizer.add_tokens(vocabulary.added())?;
        Ok(tokenizer)
    });
    Ok(tokenizer.map(|tokenizer| {
        let pipeline = Pipeline::Library(Box::new(tokenizer));
        Assembled { pipeline, before, after }
    }))
}

/// The keys of the ids at both ends of a text, and those that SentencePiece gives them unless told
/// otherwise.
const BOS: (&str, Option<u32>) = ("tokenizer.ggml.bos_token_id", Some(1));
const EOS: (&str, Option<u32>) = ("tokenizer.ggml.eos_token_id", Some(2));

/// What SentencePiece writes for a space.
const SPACE: &str = "▁";

/// SentencePiece's BPE.
fn scored(metadata: &GgufMetadata) -> Result<tokenizers::Result<Assembled>, CoreError> {
    let vocabulary = Vocabulary::read(metadata)?;
    let n_tokens = vocabulary.tokens.len();
    let scores = metadata.f32s(SCORES)?;
    if scores.len() != n_tokens || scores.iter().any(|score| score.is_nan()) {
        return Err(metadata.error(SCORES, format!("{n_tokens} numbers, one a token")));
    }
    if metadata.optional_bool(REMOVE_SPACES)? == Some(true) {
        return Err(metadata.error(REMOVE_SPACES, "false or nothing"));
    }
    let before = vocabulary.around(ADD_BOS, true, BOS)?;
    let after = vocabulary.around(ADD_EOS, false, EOS)?;
    let model = Pieces::new(&vocabulary, &scores)?;
    let add_space_prefix = metadata.optional_bool(ADD_SPACE)?.unwrap_or(true);
    let tokenizer = || {
        let mut normalizers: Vec<NormalizerWrapper> = Vec::new();
        if add_space_prefix {
            normalizers.push(Prepend::new(SPACE.to_owned()).into());
        }
        normalizers.push(Replace::new(" ", SPACE)?.into());
        let mut decoders =
            vec![Replace::new(SPACE, " ")?.into(), ByteFallback::new().into(), Fuse::new().into()];
        if add_space_prefix {
            decoders.push(Strip::new(' ', 1, 0).into());
        }
        let mut tokenizer = PieceTokenizer::new(model);
        tokenizer.with_normalizer(Some(Normalizers::new(normalizers)))?;
        tokenizer.with_decoder(Some(Decoders::new(decoders)));
        tokenizer.add_tokens(vocabulary.added())?;
        Ok(tokenizer)
    };
    Ok(tokenizer().map(|tokenizer| {
        let pipeline = Pipeline::Pieces(Box::new(tokenizer));
        Assembled { pipeline, before, after }
    }))
}

/// The kinds of so many tokens.
fn kinds(metadata: &GgufMetadata, n_tokens: usize) -> Result<Vec<Kind>, CoreError> {
    let Some(numbers) = metadata.optional_i32s(TYPES)? else {
        return Ok(vec![Kind::Normal; n_tokens]);
    };
    if numbers.len() != n_tokens {
        return Err(metadata.error(TYPES, format!("{n_tokens} numbers, one a token")));
    }
    let kind = |(id, number)| match number {
        0 | 1 | 5 => Ok(Kind::Normal),
        2 => Ok(Kind::Unknown),
        3 => Ok(Kind::Control),
        4 => Ok(Kind::UserDefined),
        6 => Ok(Kind::Byte),
        other => {
            let found = format!("{other} for token {id}");
            Err(wrong(metadata, TYPES, "numbers from 0 to 6", found))
        }
    };
    numbers.into_iter().enumerate().map(kind).collect()
}

/// The merges as pairs of tokens, each of which makes a token.
fn merges(vocabulary: &Vocabulary<'_>) -> Result<Vec<(String, String)>, CoreError> {
    let metadata = vocabulary.metadata;
    let mut made = String::new();
    let mut pair = |(rank, merge): (usize, &str)| {
        let fail = |expected: &str| {
            let found = format!("{:?} as merge {rank}", shown(merge));
            Err(wrong(metadata, MERGES, expected, found))
        };
        // a token is never empty, but it may begin with a space
        let second = merge.char_indices().skip(1).find(|&(_, c)| c == ' ').map(|(at, _)| at);
        let Some((left, right)) = second.map(|at| (&merge[..at], &merge[at + 1..])) else {
            return fail("two tokens with a space between them");
        };
        made.clear();
        made.push_str(left);
        made.push_str(right);
        let known = [left, right, &made].iter().all(|token| vocabulary.ids.contains_key(token));
        if known {
            Ok((left.to_owned(), right.to_owned()))
        } else {
            fail("tokens that make a token")
        }
    };
    metadata.strings(MERGES)?.into_iter().enumerate().map(&mut pair).collect()
}

fn wrong(
    metadata: &GgufMetadata,
    key: &str,
    expected: impl Into<String>,
    found: impl Into<String>,
) -> CoreError {
    CoreError::Metadata {
        path: metadata.path().to_owned(),
        key: key.to_owned(),
        expected: expected.into(),
        found: found.into(),
    }
}

/// The beginning of a text that may be as long as the file.
fn shown(text: &str) -> String {
    text.chars().take(60).collect()
}

#[cfg(test)]
mod tests;
