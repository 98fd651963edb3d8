//! The keys of a GGUF file out of a `tokenizer.json`: the way back.
//!
//! GGUF knows a few kinds of tokenizers by name. What is not one of them to the letter is refused,
//! since a tokenizer that is nearly the same gives other ids.

use std::collections::HashSet;
use std::path::Path;

use powerinfer_core::GgufValue;
use serde_json::{Map, Value};

use super::split;
use super::{
    ADD_BOS, ADD_EOS, ADD_SPACE, BOS, EOS, MERGES, MODEL, PRE, SCORES, SPACE, TOKENS, TYPES,
};
use crate::chat::ChatTemplate;
use crate::error::{Error, Result};
use crate::text::fence;

const UNKNOWN: &str = "tokenizer.ggml.unknown_token_id";
const TEMPLATE: &str = "tokenizer.chat_template";
/// More ids than any model has embeddings.
const MAX_TOKENS: usize = 1 << 24;

// llama.cpp's numbering
const NORMAL: i32 = 1;
const UNKNOWN_KIND: i32 = 2;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;
const UNUSED: i32 = 5;
const BYTE: i32 = 6;

/// A tokenizer that GGUF has no way to say.
#[derive(Debug, thiserror::Error)]
#[error("{0} cannot be said in a GGUF file")]
struct NotSaid(String);

/// The keys that describe, in a GGUF file, the tokenizer of a model folder, for
/// [`ConvertOptions::keys`](powerinfer_models::ConvertOptions): its `tokenizer.json`, and its chat
/// template ([`ChatTemplate::from_dir`]). `n_tokens` is the number of the model's embeddings; ids
/// beyond the tokenizer's become tokens that are never used.
///
/// # Errors
/// [`Error::Io`] if there is no such file; [`Error::Tokenizer`] if it is broken, or a tokenizer that
/// GGUF cannot say: of another kind than byte-level BPE and SentencePiece's BPE, with another
/// normaliser, splitting or post-processor than those that have a name, or with more ids than
/// `n_tokens`.
///
/// # Examples
/// ```
/// use powerinfer::{Tokenizer, core::GgufMetadata, tokenizer_keys};
///
/// let keys = tokenizer_keys("assets/llama-relu-tiny", 4096)?;
/// let tokenizer = Tokenizer::from_gguf_metadata(&GgufMetadata::new("m.gguf", keys))?;
/// assert_eq!(tokenizer.encode("It was a truth", true)?, [1, 1388, 342, 261, 1988]);
/// # Ok::<(), powerinfer::Error>(())
/// ```
pub fn tokenizer_keys(
    folder: impl AsRef<Path>,
    n_tokens: usize,
) -> Result<Vec<(String, GgufValue)>> {
    let folder = folder.as_ref();
    let path = folder.join("tokenizer.json");
    let mut keys = match read(&path)? {
        Some(json) => {
            keys_of(&json, n_tokens).map_err(|source| Error::Tokenizer { path, source })?
        }
        None => {
            let source = std::io::ErrorKind::NotFound.into();
            return Err(Error::Io { path, source });
        }
    };
    if let Some(template) = ChatTemplate::from_dir(folder)? {
        keys.push((TEMPLATE.to_owned(), GgufValue::String(template.text().to_owned())));
    }
    Ok(keys)
}

/// A JSON file; `None` if it is not there.
fn read(path: &Path) -> Result<Option<Value>> {
    let bytes = match fence::read(path) {
        Ok(bytes) => bytes,
        Err(source) if source.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(Error::Io { path: path.to_path_buf(), source }),
    };
    let parsed = serde_json::from_slice(&bytes);
    let broken = |source: serde_json::Error| Error::Tokenizer {
        path: path.to_path_buf(),
        source: Box::new(source),
    };
    parsed.map(Some).map_err(broken)
}

type Keys = Vec<(String, GgufValue)>;

fn keys_of(json: &Value, n_tokens: usize) -> tokenizers::Result<Keys> {
    let model = &json["model"];
    if model["type"] != "BPE" {
        return not_said(format!("a tokenizer of the type {}", model["type"]));
    }
    for name in ["dropout", "continuing_subword_prefix", "end_of_word_suffix"] {
        if !matches!(model[name], Value::Null) && model[name] != "" {
            return not_said(format!("model.{name}"));
        }
    }
    let vocabulary = Vocabulary::read(json, n_tokens)?;
    let merges = merges(model)?;
    let mut keys = Vec::new();
    let mut add = |key: &str, value: GgufValue| keys.push((key.to_owned(), value));
    if model["byte_fallback"] == true {
        add(MODEL, GgufValue::String("llama".to_owned()));
        add(ADD_SPACE, GgufValue::Bool(space_prefix(json)?));
        add(SCORES, GgufValue::f32s(&scores(&vocabulary, &merges)?));
    } else {
        let whole_words = model["ignore_merges"] == true;
        let pre = split::name_of(&json["pre_tokenizer"], &json["normalizer"], whole_words);
        let Some((pre, add_prefix_space)) = pre else {
            return not_said("this way to split a text");
        };
        add(MODEL, GgufValue::String("gpt2".to_owned()));
        add(PRE, GgufValue::String(pre.to_owned()));
        add(ADD_SPACE, GgufValue::Bool(add_prefix_space));
        let lines: Vec<String> =
            merges.iter().map(|[left, right]| format!("{left} {right}")).collect();
        // the token before the space is never empty, but may be one
        if merges.iter().any(|[left, _]| left.chars().skip(1).any(|c| c == ' ')) {
            return not_said("a merge of a token with a space in it");
        }
        add(MERGES, GgufValue::strings(lines.iter().map(String::as_str)));
    }
    add(TOKENS, GgufValue::strings(vocabulary.tokens.iter().map(String::as_str)));
    add(TYPES, GgufValue::i32s(&vocabulary.kinds));
    if let Some(id) = vocabulary.unknown {
        add(UNKNOWN, GgufValue::U32(id));
    }
    let [before, after] = around(&json["post_processor"])?;
    for (switch, (key, _), token) in [(ADD_BOS, BOS, before), (ADD_EOS, EOS, after)] {
        add(switch, GgufValue::Bool(token.is_some()));
        if let Some(token) = token {
            let id = vocabulary.id(&token).ok_or_else(|| format!("no token {token:?}"))?;
            add(key, GgufValue::U32(id));
        }
    }
    Ok(keys)
}

fn not_said<T>(what: impl Into<String>) -> tokenizers::Result<T> {
    Err(Box::new(NotSaid(what.into())))
}

/// Every id with its token and kind.
struct Vocabulary {
    tokens: Vec<String>,
    kinds: Vec<i32>,
    unknown: Option<u32>,
}

impl Vocabulary {
    fn read(json: &Value, n_tokens: usize) -> tokenizers::Result<Self> {
        if n_tokens > MAX_TOKENS {
            return not_said(format!("a vocabulary of {n_tokens} tokens"));
        }
        let empty = Map::new();
        let vocab = json["model"]["vocab"].as_object().unwrap_or(&empty);
        let mut tokens: Vec<Option<String>> = vec![None; n_tokens];
        let mut kinds = vec![UNUSED; n_tokens];
        let mut put = |token: &str, id: &Value, kind: i32| {
            let at = id.as_u64().and_then(|id| usize::try_from(id).ok());
            let Some(at) = at.filter(|at| *at < n_tokens) else {
                return not_said(format!("token {token:?}, whose id {id} is not below {n_tokens}"));
            };
            if tokens[at].as_deref().is_some_and(|other| other != token) {
                return not_said(format!("a second token of the id {id}, {token:?},"));
            }
            (tokens[at], kinds[at]) = (Some(token.to_owned()), kind);
            Ok(())
        };
        let bytes = json["model"]["byte_fallback"] == true;
        for (token, id) in vocab {
            put(token, id, if bytes && is_byte(token) { BYTE } else { NORMAL })?;
        }
        let unknown = json["model"]["unk_token"].as_str();
        for added in json["added_tokens"].as_array().into_iter().flatten() {
            let content = added["content"].as_str().unwrap_or_default();
            for name in ["single_word", "lstrip", "rstrip"] {
                if added[name] == true {
                    return not_said(format!("{name} of the token {content:?}"));
                }
            }
            let kind = match added["special"] == true {
                true if unknown == Some(content) => UNKNOWN_KIND,
                true => CONTROL,
                false => USER_DEFINED,
            };
            put(content, &added["id"], kind)?;
        }
        let name = |(id, token): (usize, Option<String>)| token.unwrap_or(format!("[PAD{id}]"));
        let tokens: Vec<String> = tokens.into_iter().enumerate().map(name).collect();
        let mut this = Self { tokens, kinds, unknown: None };
        this.unknown = unknown.and_then(|token| this.id(token));
        Ok(this)
    }

    fn id(&self, token: &str) -> Option<u32> {
        self.tokens.iter().position(|known| known == token).map(|id| id as u32)
    }
}

/// Whether a token stands for a byte: `<0x0A>`.
fn is_byte(token: &str) -> bool {
    let digits = token.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'));
    digits.is_some_and(|digits| digits.len() == 2 && u8::from_str_radix(digits, 16).is_ok())
}

/// The merges, each written as a pair or as a line.
fn merges(model: &Value) -> tokenizers::Result<Vec<[String; 2]>> {
    let pair = |merge: &Value| match merge {
        Value::String(line) => {
            let (left, right) = line.split_once(' ')?;
            Some([left.to_owned(), right.to_owned()])
        }
        Value::Array(pair) => match &pair[..] {
            [Value::String(left), Value::String(right)] => Some([left.clone(), right.clone()]),
            _ => None,
        },
        _ => None,
    };
    let merges = model["merges"].as_array().into_iter().flatten().map(pair);
    merges.collect::<Option<_>>().ok_or_else(|| "merges that are no pairs of tokens".into())
}

/// A score for each token under which SentencePiece's way, to merge the pair whose token has the
/// highest score, merges the pairs that the list of merges would.
///
/// It is the same if the list has every pair that makes a token, and all pairs that make one token
/// before all that make another.
fn scores(vocabulary: &Vocabulary, merges: &[[String; 2]]) -> tokenizers::Result<Vec<f32>> {
    let ids: std::collections::HashMap<&str, usize> =
        (vocabulary.tokens.iter().enumerate()).map(|(id, token)| (token.as_str(), id)).collect();
    let pairs: HashSet<(&str, &str)> =
        merges.iter().map(|[left, right]| (left.as_str(), right.as_str())).collect();
    // what no merge makes is never merged
    let mut scores = vec![-(merges.len() as f32) - 1.0; vocabulary.tokens.len()];
    let mut made = HashSet::new();
    let mut last = String::new();
    for [left, right] in merges {
        let token = format!("{left}{right}");
        if token == last {
            continue;
        }
        let Some(&id) = ids.get(token.as_str()) else {
            return Err(format!("a merge that makes no token: {token:?}").into());
        };
        let halves = token.char_indices().skip(1).map(|(at, _)| token.split_at(at));
        let mut halves = halves.filter(|(a, b)| ids.contains_key(a) && ids.contains_key(b));
        if !made.insert(id) || halves.any(|pair| !pairs.contains(&pair)) {
            return not_said(format!("the order of the merges that make {token:?}"));
        }
        scores[id] = -(made.len() as f32);
        last = token;
    }
    Ok(scores)
}

/// Whether a space is put before a text.
fn space_prefix(json: &Value) -> tokenizers::Result<bool> {
    let replaces = serde_json::json!({
        "type": "Replace", "pattern": { "String": " " }, "content": SPACE
    });
    let prepends = serde_json::json!({ "type": "Prepend", "prepend": SPACE });
    let steps = split::steps(&json["normalizer"]);
    match (steps.as_slice(), &json["pre_tokenizer"]) {
        ([first, second], Value::Null) if *first == prepends && *second == replaces => Ok(true),
        ([only], Value::Null) if *only == replaces => Ok(false),
        _ => not_said("this normaliser"),
    }
}

/// The tokens that are put before and after a text.
fn around(processor: &Value) -> tokenizers::Result<[Option<String>; 2]> {
    match processor["type"].as_str() {
        None | Some("ByteLevel") => Ok([None, None]),
        Some("Sequence") => {
            let mut found = [None, None];
            for processor in processor["processors"].as_array().into_iter().flatten() {
                match (around(processor)?, &found) {
                    ([None, None], _) => {}
                    (tokens, [None, None]) => found = tokens,
                    _ => return not_said("two post-processors"),
                }
            }
            Ok(found)
        }
        Some("TemplateProcessing") => template(&processor["single"]),
        Some(other) => not_said(format!("the post-processor {other}")),
    }
}

/// What is before and after the text in a template.
fn template(parts: &Value) -> tokenizers::Result<[Option<String>; 2]> {
    let mut found = [None, None];
    let mut side = 0;
    for part in parts.as_array().into_iter().flatten() {
        if part.get("Sequence").is_some() {
            side += 1;
            continue;
        }
        match (part["SpecialToken"]["id"].as_str(), found.get_mut(side)) {
            (Some(token), Some(place @ None)) => *place = Some(token.to_owned()),
            _ => return not_said("this post-processor"),
        }
    }
    if side == 1 { Ok(found) } else { not_said("this post-processor") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::Tokenizer;
    use powerinfer_core::GgufMetadata;
    use serde_json::json;
    use testing::Fixture;

    fn back(json: &Value, n_tokens: usize) -> tokenizers::Result<Tokenizer> {
        let keys = keys_of(json, n_tokens)?;
        Ok(Tokenizer::from_gguf_metadata(&GgufMetadata::new("m.gguf", keys))?)
    }

    fn error(json: &Value) -> String {
        keys_of(json, 4200).unwrap_err().to_string()
    }

    fn demo() -> Value {
        read(&Fixture::demo().model_dir.join("tokenizer.json")).unwrap().unwrap()
    }

    #[test]
    fn every_trained_model_s_ids_come_through() {
        for fixture in Fixture::trained() {
            let keys = tokenizer_keys(&fixture.model_dir, 4096).unwrap();
            let found = Tokenizer::from_gguf_metadata(&GgufMetadata::new("m.gguf", keys)).unwrap();
            let cases = testing::fixture::tokenizer_cases();
            assert!(cases.len() > 10);
            for case in cases {
                assert_eq!(found.encode(&case.text, true).unwrap(), case.ids, "{}", case.text);
                let plain = found.encode(&case.text, false).unwrap();
                assert_eq!(plain, case.ids_no_special, "{}", case.text);
                assert_eq!(found.decode(&case.ids).unwrap(), case.decoded, "{}", case.text);
            }
        }
    }

    #[test]
    fn more_embeddings_than_tokens_are_filled_up() {
        let found = back(&demo(), 4200).unwrap();
        assert_eq!(found.encode("It was a truth", true).unwrap(), [1, 1388, 342, 261, 1988]);
        assert!(keys_of(&demo(), 4000).unwrap_err().to_string().contains("not below 4000"));
    }

    #[test]
    fn what_is_nearly_a_kind_is_refused() {
        let changed = |change: &dyn Fn(&mut Value)| {
            let mut json = demo();
            change(&mut json);
            error(&json)
        };
        for (change, named) in [
            (
                &(|json: &mut Value| json["model"]["type"] = json!("Unigram"))
                    as &dyn Fn(&mut Value),
                "Unigram",
            ),
            (&|json| json["model"]["end_of_word_suffix"] = json!("</w>"), "end_of_word_suffix"),
            (&|json| json["model"]["ignore_merges"] = json!(true), "split a text"),
            (&|json| json["normalizer"] = json!({"type": "Lowercase"}), "split a text"),
            (&|json| json["pre_tokenizer"]["use_regex"] = json!(false), "split a text"),
            (&|json| json["pre_tokenizer"] = json!({"type": "Whitespace"}), "split a text"),
            (&|json| json["post_processor"] = json!({"type": "BertProcessing"}), "BertProcessing"),
            (&|json| json["added_tokens"][0]["lstrip"] = json!(true), "lstrip"),
            (&|json| json["added_tokens"][0]["id"] = json!(7), "second token"),
            (&|json| json["model"]["merges"][0] = json!(["a"]), "no pairs"),
        ] {
            let text = changed(change);
            assert!(text.contains(named), "{named}: {text}");
        }
    }

    /// A small SentencePiece BPE as transformers writes it.
    fn pieces() -> Value {
        let mut vocab: Map<String, Value> = Map::new();
        let mut put = |token: &str| {
            let id = vocab.len();
            vocab.insert(token.to_owned(), json!(id));
        };
        ["<unk>", "<s>", "</s>"].into_iter().for_each(&mut put);
        (0..=255).for_each(|byte| put(&format!("<0x{byte:02X}>")));
        ["▁a", "ab", "▁ab", "▁", "a", "b"].into_iter().for_each(&mut put);
        json!({
            "added_tokens": [
                {"id": 0, "content": "<unk>", "special": true},
                {"id": 1, "content": "<s>", "special": true},
                {"id": 2, "content": "</s>", "special": true},
            ],
            "normalizer": {"type": "Sequence", "normalizers": [
                {"type": "Prepend", "prepend": "▁"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            ]},
            "pre_tokenizer": null,
            "post_processor": {"type": "TemplateProcessing", "single": [
                {"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
            ]},
            "model": {
                "type": "BPE", "unk_token": "<unk>", "byte_fallback": true, "vocab": vocab,
                "merges": ["▁ a", "a b", "▁a b", "▁ ab"],
            },
        })
    }

    #[test]
    fn merges_of_pieces_become_scores() {
        let tokenizer = back(&pieces(), 270).unwrap();
        let id = |token: &str| tokenizer.token_id(token).unwrap();
        let ids = tokenizer.encode("ab ba\n", true).unwrap();
        let newline = id("<0x0A>");
        assert_eq!(ids, [1, id("▁ab"), id("▁"), id("b"), id("a"), newline]);
    }

    #[test]
    fn merges_that_no_score_gives_are_refused() {
        let mut json = pieces();
        json["model"]["merges"] = json!(["▁ a", "a b", "▁a b"]);
        assert!(error(&json).contains("the order of the merges"), "a pair is missing");
        json["model"]["merges"] = json!(["▁a b", "▁ a", "a b", "▁ ab"]);
        assert!(error(&json).contains("the order of the merges"), "pairs of a token are apart");
        json = pieces();
        json["pre_tokenizer"] = json!({"type": "Metaspace"});
        assert!(error(&json).contains("normaliser"));
    }
}
