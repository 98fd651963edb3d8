//! Streamed text equals one-shot text, whatever the ids and wherever stop strings fall.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::sync::{Arc, LazyLock, Mutex};

use powerinfer::core::{CausalLm, KvCache, KvShape, ModelInfo, Result as CoreResult, Step};
use powerinfer::{Engine, FinishReason, GenerateOptions, Tokenizer};
use proptest::prelude::*;
use testing::Fixture;

/// Writes the ids that it was told to, after a prompt of one token.
#[derive(Debug)]
struct Dictated {
    info: ModelInfo,
    ids: Arc<Mutex<Vec<u32>>>,
}

impl CausalLm for Dictated {
    fn info(&self) -> &ModelInfo {
        &self.info
    }

    fn forward(&self, tokens: &[u32], cache: &mut KvCache, step: &mut Step) -> CoreResult<()> {
        cache.reserve(tokens.len())?;
        let position = cache.len() + tokens.len() - 1;
        let next = self.ids.lock().unwrap().get(position).copied().unwrap_or(0);
        step.logits.clear();
        step.logits.resize(self.info.vocab_size, 0.0);
        step.logits[next as usize] = 1.0;
        cache.commit();
        Ok(())
    }
}

/// An engine, what it is to write, and whose turn it is.
struct Dictation {
    engine: Engine,
    ids: Arc<Mutex<Vec<u32>>>,
    turn: Mutex<()>,
}

static DICTATION: LazyLock<Dictation> = LazyLock::new(|| {
    let ids = Arc::new(Mutex::new(Vec::new()));
    let mut info = ModelInfo::default();
    info.vocab_size = 4096;
    info.max_context = 1000;
    info.kv = KvShape::default();
    info.kv.max_context = 1000;
    let model = Dictated { info, ids: Arc::clone(&ids) };
    let tokenizer = Fixture::demo().model_dir.join("tokenizer.json");
    let engine = Engine::builder().causal_lm(model).tokenizer_file(tokenizer).threads(1).build();
    Dictation { engine: engine.unwrap(), ids, turn: Mutex::new(()) }
});

/// Pieces of a stream and the one-shot text of the same request.
fn both_forms(ids: &[u32], stops: &[String]) -> (Vec<String>, String, FinishReason) {
    let Dictation { engine, ids: dictated, turn } = &*DICTATION;
    let _turn = turn.lock().unwrap();
    *dictated.lock().unwrap() = ids.to_vec();
    let options = GenerateOptions::default().with_max_tokens(ids.len()).with_stop(stops);
    let mut session = engine.session().unwrap();
    let stream = session.generate([7], &options).unwrap();
    let pieces = stream.map(|piece| piece.unwrap().text).collect();
    let whole = engine.session().unwrap().generate_text([7], &options).unwrap();
    assert!(whole.ids.iter().eq(&ids[..whole.ids.len()]));
    (pieces, whole.text, whole.finish_reason)
}

fn one_shot(tokenizer: &Tokenizer, ids: &[u32]) -> String {
    tokenizer.decode(ids).unwrap()
}

/// Where the text ends by the plain definition: before the stop string that is complete first, the
/// longest of those that are complete together.
fn cut<'a>(text: &'a str, stops: &'a [String]) -> (&'a str, Option<&'a str>) {
    for end in 0..=text.len() {
        let before = &text.as_bytes()[..end];
        let ended = stops.iter().filter(|stop| before.ends_with(stop.as_bytes()));
        if let Some(stop) = ended.max_by_key(|stop| stop.len()) {
            return (&text[..end - stop.len()], Some(stop));
        }
    }
    (text, None)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(10_000))]

    // Half of the ids are single bytes, which make broken and split characters.
    #[test]
    fn pieces_of_any_ids_add_up_to_the_one_shot_text(
        ids in prop::collection::vec(prop_oneof![3u32..260, 3u32..4096], 1..24),
    ) {
        let (pieces, whole, _) = both_forms(&ids, &[]);
        let expected = one_shot(DICTATION.engine.tokenizer().unwrap(), &ids);
        prop_assert_eq!(pieces.concat(), &*expected);
        prop_assert_eq!(whole, expected);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    // Stop strings cut out of the text itself, so that they begin and end within tokens.
    #[test]
    fn stop_strings_cut_both_forms_at_the_same_character(
        ids in prop::collection::vec(prop_oneof![3u32..260, 260u32..4096, 260u32..4096], 1..24),
        parts in prop::collection::vec((0usize..60, 1usize..9), 1..4),
    ) {
        let text = one_shot(DICTATION.engine.tokenizer().unwrap(), &ids);
        let chars: Vec<char> = text.chars().collect();
        let part = |&(start, len): &(usize, usize)| -> String {
            chars.iter().skip(start % chars.len().max(1)).take(len).collect()
        };
        let mut stops: Vec<String> = parts.iter().map(part).collect();
        stops.retain(|stop| !stop.is_empty());
        let (expected, stop) = cut(&text, &stops);
        let (pieces, whole, reason) = both_forms(&ids, &stops);
        prop_assert_eq!(&pieces.concat(), &whole);
        match stop {
            Some(stop) => {
                prop_assert_eq!(whole, expected);
                prop_assert_eq!(reason, FinishReason::StopString(stop.to_owned()));
            }
            None => {
                prop_assert_eq!(&whole, &text);
                prop_assert_eq!(reason, FinishReason::MaxTokens);
            }
        }
    }
}

/// A tokenizer that writes spaces as `▁` and leaves out the one in front of a text, as LLaMA 2's.
fn write_pieces(path: &std::path::Path) {
    let json = serde_json::json!({
        "version": "1.0",
        "added_tokens": [{"id": 0, "content": "<s>", "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false, "special": true}],
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
        "model": {"type": "BPE", "merges": [],
            "vocab": {"<s>": 0, "▁Hello": 1, "▁wor": 2, "ld": 3, ".": 4}},
    });
    std::fs::write(path, json.to_string()).unwrap();
}

#[test]
fn the_space_after_a_prompt_is_part_of_the_text() {
    let dir = tempfile::tempdir().unwrap();
    write_pieces(&dir.path().join("tokenizer.json"));
    let ids = Arc::new(Mutex::new(vec![1, 2, 3, 4, 1, 4]));
    let model = Dictated { info: DICTATION.engine.info().clone(), ids };
    let tokenizer = dir.path().join("tokenizer.json");
    let engine =
        Engine::builder().causal_lm(model).tokenizer_file(tokenizer).threads(1).build().unwrap();
    let mut session = engine.session().unwrap();
    let mut write = |prompt: &[u32], n: usize| {
        let options = GenerateOptions::default().with_max_tokens(n);
        session.generate_text(prompt.to_vec(), &options).unwrap().text
    };
    // at the beginning of a text there is none
    assert_eq!(write(&[0], 2), "Hello wor");
    // what follows is one text with what came before
    assert_eq!(write(&[], 2), "ld.");
    assert_eq!(write(&[], 2), " Hello.");
}
