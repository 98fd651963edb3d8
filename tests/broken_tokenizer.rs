//! Broken tokenizer files: whatever is in them, a typed error or a tokenizer that works, and never
//! a panic.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::fs;
use std::path::PathBuf;

use powerinfer::{Error, Tokenizer};
use proptest::prelude::*;
use testing::Fixture;

/// A small tokenizer of the demo's kind, so that many variants of it load quickly.
fn small() -> String {
    let text = fs::read_to_string(Fixture::demo().model_dir.join("tokenizer.json")).unwrap();
    let mut json: serde_json::Value = serde_json::from_str(&text).unwrap();
    let model = &mut json["model"];
    let vocab = model["vocab"].as_object_mut().unwrap();
    vocab.retain(|_, id| id.as_u64().unwrap() < 300);
    let vocab = vocab.clone();
    let merges = model["merges"].as_array_mut().unwrap();
    merges.retain(|pair| {
        let part = |i: usize| pair[i].as_str().unwrap();
        vocab.contains_key(&format!("{}{}", part(0), part(1)))
    });
    json.to_string()
}

/// Loads `bytes` as a tokenizer file and uses what comes of it.
fn try_out(bytes: &[u8]) -> Result<(), Error> {
    let dir = tempfile::tempdir().unwrap();
    let path: PathBuf = dir.path().join("tokenizer.json");
    fs::write(&path, bytes).unwrap();
    let tokenizer = Tokenizer::from_file(&path)?;
    let ids = tokenizer.encode("It was a truth, naïve 🐋", true)?;
    tokenizer.decode(&ids)?;
    tokenizer.decode(&(0..320).collect::<Vec<_>>())?;
    Ok(())
}

fn assert_typed(outcome: Result<(), Error>, file: &str) {
    match outcome {
        Ok(()) | Err(Error::Tokenizer { .. }) => {}
        Err(error) => panic!("{error} for {file}"),
    }
}

#[test]
fn the_small_tokenizer_works() {
    try_out(small().as_bytes()).unwrap();
}

#[test]
fn a_file_cut_short_is_an_error() {
    let whole = small();
    for cut in (0..whole.len()).step_by(whole.len() / 40) {
        let error = try_out(&whole.as_bytes()[..cut]).unwrap_err();
        assert!(matches!(error, Error::Tokenizer { .. }), "cut at {cut}");
        assert!(error.to_string().contains("tokenizer.json"));
        assert!(std::error::Error::source(&error).is_some());
    }
}

#[test]
fn files_that_are_no_tokenizer_are_errors() {
    for bytes in
        [&b"{}"[..], b"[]", b"null", b"\xff\xfe", br#"{"model": {}}"#, br#"{"version": "2.0"}"#]
    {
        let error = try_out(bytes).unwrap_err();
        assert!(matches!(error, Error::Tokenizer { .. }), "{bytes:?}");
    }
}

#[test]
fn valid_json_that_contradicts_itself_is_no_panic() {
    type Edit = fn(&mut serde_json::Value);
    let edits: [(&str, Edit); 7] = [
        ("an id twice", |json| json["model"]["vocab"]["!"] = 7.into()),
        ("an id beyond all", |json| json["model"]["vocab"]["!"] = u32::MAX.into()),
        ("no merges", |json| json["model"]["merges"] = serde_json::json!([])),
        ("a merge of unknown parts", |json| {
            json["model"]["merges"] = serde_json::json!([["q", "🐋"]])
        }),
        ("a merge of one part", |json| json["model"]["merges"] = serde_json::json!([["q"]])),
        ("an added token without a place", |json| {
            json["added_tokens"][0]["id"] = 4_000_000_000u32.into()
        }),
        ("an endless post-processor", |json| {
            json["post_processor"] = serde_json::json!({"type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "<x>", "type_id": 0}}],
                "pair": [], "special_tokens": {}});
        }),
    ];
    for (what, edit) in edits {
        let mut json: serde_json::Value = serde_json::from_str(&small()).unwrap();
        edit(&mut json);
        assert_typed(try_out(json.to_string().as_bytes()), what);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn flipped_bits_are_no_panic(flips in prop::collection::vec((any::<prop::sample::Index>(), 0u8..8), 1..4)) {
        thread_local!(static SMALL: String = small());
        let mut bytes = SMALL.with(|small| small.clone().into_bytes());
        for (index, bit) in flips {
            let at = index.index(bytes.len());
            bytes[at] ^= 1 << bit;
        }
        let shown = String::from_utf8_lossy(&bytes).into_owned();
        assert_typed(try_out(&bytes), &shown);
    }
}
