use std::collections::BTreeMap;

use powerinfer_core::GgufValue;
use proptest::prelude::*;
use serde_json::Value;
use testing::fixture::{assets_dir, fixtures_dir, tokenizer_cases};

use super::*;
use crate::{Error, Tokenizer};

type Keys = BTreeMap<String, GgufValue>;

fn text(text: &str) -> GgufValue {
    GgufValue::String(text.to_owned())
}

fn json(path: &std::path::Path) -> Value {
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn stored() -> Value {
    json(&fixtures_dir().join("gguf_tokenizers.json"))
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

fn strings(value: &Value) -> Vec<&str> {
    value.as_array().unwrap().iter().map(|text| text.as_str().unwrap()).collect()
}

/// The demo model's `tokenizer.json` as a GGUF file holds it.
fn demo() -> Keys {
    let tokenizer = json(&assets_dir().join("llama-relu-tiny/tokenizer.json"));
    let vocab = tokenizer["model"]["vocab"].as_object().unwrap();
    let mut tokens = vec![""; vocab.len()];
    for (token, id) in vocab {
        tokens[id.as_u64().unwrap() as usize] = token;
    }
    let mut types = vec![1; tokens.len()];
    for added in tokenizer["added_tokens"].as_array().unwrap() {
        types[added["id"].as_u64().unwrap() as usize] = 3;
    }
    let merges: Vec<String> = tokenizer["model"]["merges"]
        .as_array()
        .unwrap()
        .iter()
        .map(|pair| strings(pair).join(" "))
        .collect();
    Keys::from([
        (MODEL.to_owned(), text("gpt2")),
        (PRE.to_owned(), text("gpt-2")),
        (TOKENS.to_owned(), GgufValue::strings(tokens)),
        (TYPES.to_owned(), GgufValue::i32s(&types)),
        (MERGES.to_owned(), GgufValue::strings(merges.iter().map(String::as_str))),
        (BOS.0.to_owned(), GgufValue::U32(1)),
        (EOS.0.to_owned(), GgufValue::U32(2)),
        (ADD_BOS.to_owned(), GgufValue::Bool(true)),
    ])
}

/// A small vocabulary of SentencePiece's kind: bytes, and pieces with scores.
fn pieces(pieces: &[(&str, f32)]) -> Keys {
    let bytes: Vec<String> = (0..=255u8).map(|byte| format!("<0x{byte:02X}>")).collect();
    let named = ["<unk>", "<s>", "</s>"].into_iter().chain(bytes.iter().map(String::as_str));
    let mut types = vec![2, 3, 3];
    types.resize(3 + 256, 6);
    types.resize(3 + 256 + pieces.len(), 1);
    let scores = [0.0; 3 + 256].into_iter().chain(pieces.iter().map(|piece| piece.1));
    Keys::from([
        (MODEL.to_owned(), text("llama")),
        (TOKENS.to_owned(), GgufValue::strings(named.chain(pieces.iter().map(|piece| piece.0)))),
        (SCORES.to_owned(), GgufValue::f32s(&scores.collect::<Vec<f32>>())),
        (TYPES.to_owned(), GgufValue::i32s(&types)),
    ])
}

fn read(keys: Keys) -> crate::Result<Tokenizer> {
    Tokenizer::from_gguf_metadata(&GgufMetadata::new("m.gguf", keys))
}

fn with(mut keys: Keys, key: &str, value: GgufValue) -> Keys {
    keys.insert(key.to_owned(), value);
    keys
}

#[test]
fn the_demo_vocabulary_gives_the_ids_of_its_tokenizer_json() {
    let tokenizer = read(demo()).unwrap();
    assert_eq!(tokenizer.vocab_size(), 4096);
    for case in tokenizer_cases() {
        assert_eq!(tokenizer.encode(&case.text, true).unwrap(), case.ids, "{:?}", case.text);
        assert_eq!(tokenizer.encode(&case.text, false).unwrap(), case.ids_no_special);
        // this goes token by token, as a stream does
        assert_eq!(tokenizer.decode(&case.ids).unwrap(), case.decoded, "{:?}", case.text);
    }
}

#[test]
fn each_splitting_gives_the_ids_of_the_original_tokenizers() {
    let stored = stored();
    let texts = strings(&stored["byte_level"]["texts"]);
    let named = stored["byte_level"]["ids"].as_object().unwrap();
    for (name, expected) in named {
        let keys = with(with(demo(), PRE, text(name)), ADD_BOS, GgufValue::Bool(false));
        let tokenizer = read(keys).unwrap();
        for (text, expected) in texts.iter().zip(expected.as_array().unwrap()) {
            assert_eq!(tokenizer.encode(text, true).unwrap(), ids(expected), "{name} {text:?}");
        }
    }
    // those that share one
    assert_eq!(named.len(), split::supported().split(", ").count() - 5);
}

#[test]
fn scored_pieces_give_the_ids_of_sentencepiece() {
    let stored = &stored()["sentencepiece"];
    let numbers = |name: &str| stored[name].as_array().unwrap().iter();
    let scores: Vec<f32> = numbers("scores").map(|score| score.as_f64().unwrap() as f32).collect();
    let types: Vec<i32> = numbers("types").map(|kind| kind.as_i64().unwrap() as i32).collect();
    let keys = Keys::from([
        (MODEL.to_owned(), text("llama")),
        (TOKENS.to_owned(), GgufValue::strings(strings(&stored["tokens"]))),
        (SCORES.to_owned(), GgufValue::f32s(&scores)),
        (TYPES.to_owned(), GgufValue::i32s(&types)),
    ]);
    let tokenizer = read(keys.clone()).unwrap();
    for case in numbers("cases") {
        let text = case["text"].as_str().unwrap();
        let expected = ids(&case["ids"]);
        assert_eq!(tokenizer.encode(text, false).unwrap(), expected, "{text:?}");
        let with_bos: Vec<u32> = [1].into_iter().chain(expected.clone()).collect();
        assert_eq!(tokenizer.encode(text, true).unwrap(), with_bos, "{text:?}");
        assert_eq!(tokenizer.decode(&expected).unwrap(), case["decoded"].as_str().unwrap());
    }
    let bare = read(with(keys, ADD_SPACE, GgufValue::Bool(false))).unwrap();
    let (a, space_a) = (bare.token_id("a").unwrap(), bare.token_id("▁a").unwrap());
    assert_eq!(bare.encode("a a", false).unwrap(), [a, space_a]);
    assert_eq!(bare.decode(&[space_a, a]).unwrap(), " aa");
}

#[test]
fn the_leftmost_of_equal_pairs_is_joined_first() {
    let keys = pieces(&[("a", 0.0), ("b", 0.0), ("c", 0.0), ("ab", -1.0), ("bc", -1.0)]);
    let tokenizer = read(with(keys, ADD_SPACE, GgufValue::Bool(false))).unwrap();
    let id = |token| tokenizer.token_id(token).unwrap();
    assert_eq!(tokenizer.encode("abc", false).unwrap(), [id("ab"), id("c")]);
    assert_eq!(tokenizer.encode("bcbc", false).unwrap(), [id("bc"), id("bc")]);
}

#[test]
fn runs_of_what_is_no_piece_are_one_unknown_token_where_there_are_no_bytes() {
    let keys = Keys::from([
        (MODEL.to_owned(), text("llama")),
        (TOKENS.to_owned(), GgufValue::strings(["<unk>", "<s>", "</s>", "a", "▁"])),
        (SCORES.to_owned(), GgufValue::f32s(&[0.0, 0.0, 0.0, -1.0, -2.0])),
        (TYPES.to_owned(), GgufValue::i32s(&[2, 3, 3, 1, 1])),
    ]);
    let tokenizer = read(keys.clone()).unwrap();
    assert_eq!(tokenizer.encode("axya", true).unwrap(), [1, 4, 3, 0, 3]);
    let error = read(with(keys, TYPES, GgufValue::i32s(&[1, 3, 3, 1, 1]))).unwrap_err();
    assert!(error.to_string().contains("unknown token"), "{error}");
}

#[test]
fn tokens_written_out_in_a_text_are_those_tokens() {
    let tokenizer = read(demo()).unwrap();
    assert_eq!(tokenizer.encode("</s><s>", false).unwrap(), [2, 1]);
    assert_eq!(tokenizer.decode(&[2, 1]).unwrap(), "");
    let mut keys = pieces(&[("a", 0.0), ("▁", -1.0), ("<sep>", 0.0)]);
    let mut types = vec![2, 3, 3];
    types.resize(3 + 256, 6);
    types.extend([1, 1, 4]);
    keys.insert(TYPES.to_owned(), GgufValue::i32s(&types));
    let tokenizer = read(keys).unwrap();
    let id = |token| tokenizer.token_id(token).unwrap();
    let (a, space, sep) = (id("a"), id("▁"), id("<sep>"));
    assert_eq!(tokenizer.encode("a<sep>a</s>", false).unwrap(), [space, a, sep, space, a, 2]);
    // a user's token has a text, a control token has none
    assert_eq!(tokenizer.decode(&[space, a, sep, 2]).unwrap(), "a<sep>");
}

#[test]
fn ids_around_a_text_are_those_that_the_file_asks_for() {
    let around = |add_bos: Option<bool>, add_eos: Option<bool>, pre: &str| {
        let mut keys = with(demo(), PRE, text(pre));
        keys.remove(ADD_BOS);
        keys.extend(add_bos.map(|on| (ADD_BOS.to_owned(), GgufValue::Bool(on))));
        keys.extend(add_eos.map(|on| (ADD_EOS.to_owned(), GgufValue::Bool(on))));
        read(keys).unwrap().encode("", true).unwrap()
    };
    assert_eq!(around(None, None, "gpt-2"), [0; 0]);
    assert_eq!(around(Some(true), Some(true), "gpt-2"), [1, 2]);
    assert_eq!(around(None, None, "llama-bpe"), [1]);
    assert_eq!(around(Some(false), Some(true), "llama-bpe"), [2]);
    // SentencePiece's defaults
    let tokenizer = read(pieces(&[("a", 0.0)])).unwrap();
    assert_eq!(tokenizer.encode("", true).unwrap(), [1]);
}

#[test]
fn files_older_than_the_names_split_as_their_architecture_does() {
    let split_of = |architecture: Option<&str>| {
        let mut keys = demo();
        keys.remove(PRE);
        keys.extend(architecture.map(|name| (ARCHITECTURE.to_owned(), text(name))));
        read(keys).unwrap().encode("ab, 12345", false).unwrap()
    };
    let named = |name: &str| {
        read(with(demo(), PRE, text(name))).unwrap().encode("ab, 12345", false).unwrap()
    };
    assert_eq!(split_of(Some("opt")), named("gpt-2"));
    assert_eq!(split_of(Some("falcon")), named("falcon"));
    assert_eq!(split_of(Some("llama")), named("default"));
    assert_eq!(split_of(None), named("default"));
    assert_ne!(named("gpt-2"), named("default"));
}

#[test]
fn metadata_that_contradicts_itself_is_an_error_that_names_the_key() {
    let tokens = |tokens: &[&str]| GgufValue::strings(tokens.iter().copied());
    let long = "x".repeat(MAX_TOKEN_BYTES + 1);
    let mut one_wrong_type = vec![1; 4096];
    one_wrong_type[7] = 9;
    let scored = || pieces(&[("a", 0.0)]);
    let mut no_byte = vec![2, 3, 3];
    no_byte.resize(3 + 256 + 1, 6);
    let cases: Vec<(Keys, &str, &str)> = vec![
        (with(demo(), MODEL, text("bert")), MODEL, "gpt2 or llama"),
        (with(demo(), PRE, text("gpt-9")), PRE, "smollm"),
        (with(demo(), PRE, GgufValue::U32(1)), PRE, "string"),
        (with(demo(), TOKENS, tokens(&[])), TOKENS, "at least one"),
        (with(demo(), TOKENS, tokens(&["a", "b", "a"])), TYPES, "3 numbers"),
        (with(demo(), TYPES, GgufValue::i32s(&[1; 7])), TYPES, "4096 numbers"),
        (with(demo(), TYPES, GgufValue::i32s(&one_wrong_type)), TYPES, "9 for token 7"),
        (with(demo(), MERGES, GgufValue::strings(["ab"])), MERGES, "two tokens"),
        (with(demo(), MERGES, GgufValue::strings([" ", "a b"])), MERGES, "two tokens"),
        (with(demo(), MERGES, GgufValue::strings(["a 🐋"])), MERGES, "make a token"),
        (with(demo(), MERGES, GgufValue::strings([long.as_str()])), MERGES, "two tokens"),
        (with(demo(), BOS.0, GgufValue::U32(4096)), BOS.0, "4096 tokens"),
        (with(demo(), BOS.0, GgufValue::U32(u32::MAX)), BOS.0, "add_bos_token"),
        (with(demo(), ADD_BOS, GgufValue::U32(1)), ADD_BOS, "true or false"),
        (with(scored(), SCORES, GgufValue::f32s(&[0.0; 5])), SCORES, "260 numbers"),
        (with(scored(), SCORES, GgufValue::f32s(&[f32::NAN; 260])), SCORES, "260 numbers"),
        (with(scored(), TYPES, GgufValue::i32s(&no_byte)), TYPES, "<0x00> to <0xFF>"),
        (with(scored(), EOS.0, GgufValue::U32(260)), "", ""),
        (with(scored(), REMOVE_SPACES, GgufValue::Bool(true)), REMOVE_SPACES, "false"),
    ];
    for (keys, key, part) in cases {
        let result = read(keys);
        if key.is_empty() {
            // an id that nothing asks for does no harm
            result.unwrap();
            continue;
        }
        let error = result.unwrap_err();
        let Error::Core(CoreError::Metadata { key: named, .. }) = &error else {
            panic!("{error:?}");
        };
        assert_eq!(named, key, "{error}");
        assert!(error.to_string().contains(part), "{error}");
    }
    let mut twice = demo();
    twice.remove(TYPES);
    let error = read(with(twice.clone(), TOKENS, tokens(&["a", "b", "a"]))).unwrap_err();
    assert!(error.to_string().contains("\"a\" as token 0 and as token 2"), "{error}");
    let error = read(with(twice, TOKENS, tokens(&["a", &long]))).unwrap_err();
    assert!(error.to_string().contains("4097 bytes in token 1"), "{error}");
    for key in [MODEL, TOKENS, MERGES] {
        let mut keys = demo();
        keys.remove(key);
        let error = read(keys).unwrap_err();
        assert!(error.to_string().contains(key), "{error}");
    }
}

#[test]
fn empty_tokens_are_ids_without_a_token() {
    let keys = Keys::from([
        (MODEL.to_owned(), text("gpt2")),
        (TOKENS.to_owned(), GgufValue::strings(["a", "", "b", ""])),
        (MERGES.to_owned(), GgufValue::strings([])),
    ]);
    let tokenizer = read(keys).unwrap();
    assert_eq!(tokenizer.encode("ab", true).unwrap(), [0, 2]);
    assert_eq!(tokenizer.decode(&[0, 1, 2, 3, 4]).unwrap(), "ab");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    /// What joining pairs comes to, said without a queue: join the best pair until there is none.
    #[test]
    fn joining_takes_the_best_pair_each_time(text in "[ab]{0,24}", scores in prop::array::uniform8(-4i8..4)) {
        let names = ["a", "b", "aa", "ab", "ba", "bb", "aba", "abab"];
        let scored: Vec<(&str, f32)> =
            names.into_iter().zip(scores).map(|(name, score)| (name, f32::from(score))).collect();
        let tokenizer = read(with(pieces(&scored), ADD_SPACE, GgufValue::Bool(false))).unwrap();
        let mut parts: Vec<String> = text.chars().map(String::from).collect();
        loop {
            let pairs = parts.windows(2).map(|pair| pair.concat()).enumerate();
            let known = pairs.filter_map(|(at, made)| {
                scored.iter().find(|(name, _)| *name == made).map(|&(_, score)| (at, made, score))
            });
            let best = known.reduce(|best, next| if next.2 > best.2 { next } else { best });
            let Some((at, made, _)) = best else { break };
            parts.splice(at..at + 2, [made]);
        }
        let expected: Vec<u32> =
            parts.iter().map(|part| tokenizer.token_id(part).unwrap()).collect();
        prop_assert_eq!(tokenizer.encode(&text, false).unwrap(), expected);
    }

    #[test]
    fn any_metadata_is_an_error_or_a_tokenizer_whose_ids_are_tokens(
        model in prop::sample::select(vec!["gpt2", "llama", "x"]),
        pre in prop::sample::select(vec!["gpt-2", "falcon", "llama-bpe", "default", "x"]),
        tokens in prop::collection::vec("[ab ▁<>Ġ]{0,3}", 0..12),
        scores in prop::collection::vec(any::<f32>(), 0..12),
        types in prop::collection::vec(-1i32..8, 0..12),
        merges in prop::collection::vec("[ab ]{0,4}", 0..4),
        lens in prop::array::uniform2(any::<bool>()),
        (bos, switches) in (0u32..14, prop::array::uniform3(any::<Option<bool>>())),
    ) {
        // half of the time the lists are as long as each other
        let cut = |len: usize, same: bool| if same { tokens.len() } else { len };
        let scores: Vec<f32> =
            scores.iter().copied().cycle().take(cut(scores.len(), lens[0])).collect();
        let types: Vec<i32> =
            types.iter().copied().cycle().take(cut(types.len(), lens[1])).collect();
        let mut keys = Keys::from([
            (MODEL.to_owned(), text(model)),
            (PRE.to_owned(), text(pre)),
            (TOKENS.to_owned(), GgufValue::strings(tokens.iter().map(String::as_str))),
            (SCORES.to_owned(), GgufValue::f32s(&scores)),
            (TYPES.to_owned(), GgufValue::i32s(&types)),
            (MERGES.to_owned(), GgufValue::strings(merges.iter().map(String::as_str))),
            (BOS.0.to_owned(), GgufValue::U32(bos)),
        ]);
        for (key, on) in [ADD_BOS, ADD_EOS, ADD_SPACE].into_iter().zip(switches) {
            keys.extend(on.map(|on| (key.to_owned(), GgufValue::Bool(on))));
        }
        match read(keys) {
            Ok(tokenizer) => {
                let ids = tokenizer.encode("ab <b▁a>\n🐋", true).unwrap();
                prop_assert!(ids.iter().all(|&id| (id as usize) < tokens.len()), "{ids:?}");
                tokenizer.decode(&(0..14).collect::<Vec<u32>>()).unwrap();
            }
            Err(Error::Core(CoreError::Metadata { .. })) => {}
            Err(error) => prop_assert!(false, "{error:?}"),
        }
    }

    #[test]
    fn any_pieces_stream_to_the_text_they_decode_to_at_once(text in "[ abß日🐋]{0,30}") {
        thread_local!(static TOKENIZER: Tokenizer =
            read(pieces(&[("a", -1.0), ("b", -2.0), ("▁", -3.0), ("▁a", 2.0), ("ab", 1.0)])).unwrap());
        TOKENIZER.with(|tokenizer| {
            let ids = tokenizer.encode(&text, false).unwrap();
            assert_eq!(tokenizer.decode(&ids).unwrap(), text);
        });
    }
}
