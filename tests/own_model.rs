//! Models of one's own behind the engine, among them such that fail: what a stream does then.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use powerinfer::core::{CausalLm, KvCache, KvShape, ModelInfo, Result as CoreResult, Step};
use powerinfer::{
    Dtype, Engine, EngineBuilder, Error, FinishReason, GenerateOptions, KvDtype, core,
};
use testing::Fixture;

/// Writes `script`, whatever the prompt: after position p comes `script[p]`, then the end token.
#[derive(Debug)]
struct Script {
    info: ModelInfo,
    script: Vec<u32>,
    /// Position whose logits are not finite, the first time that it is run.
    broken_at: Option<usize>,
    broken: std::sync::atomic::AtomicBool,
}

const END: u32 = 2;

impl Script {
    fn new(script: impl Into<Vec<u32>>) -> Self {
        let mut info = ModelInfo::default();
        info.architecture = "script".to_owned();
        info.vocab_size = 4096;
        info.max_context = 100;
        info.kv = KvShape { max_context: 100, ..KvShape::default() };
        info.eos_token_ids = vec![END];
        Self { info, script: script.into(), broken_at: None, broken: false.into() }
    }

    fn broken_at(self, position: usize) -> Self {
        Self { broken_at: Some(position), ..self }
    }

    /// The engine without a tokenizer.
    fn engine(self) -> Engine {
        Engine::builder().causal_lm(self).threads(1).build().unwrap()
    }

    fn engine_with_tokenizer(self) -> Engine {
        with_tokenizer(Engine::builder().causal_lm(self)).build().unwrap()
    }
}

fn with_tokenizer(builder: EngineBuilder) -> EngineBuilder {
    builder.tokenizer_file(Fixture::demo().model_dir.join("tokenizer.json")).threads(1)
}

impl CausalLm for Script {
    fn info(&self) -> &ModelInfo {
        &self.info
    }

    fn forward(&self, tokens: &[u32], cache: &mut KvCache, step: &mut Step) -> CoreResult<()> {
        cache.reserve(tokens.len())?;
        let end = cache.len() + tokens.len();
        let rows = step.wanted.n_rows(tokens.len());
        step.logits.clear();
        for position in end - rows..end {
            let mut row = vec![0.0; self.info.vocab_size];
            let next = self.script.get(position).copied().unwrap_or(END);
            row[next as usize] = 1.0;
            let broken = self.broken_at == Some(position);
            if broken && !self.broken.swap(true, std::sync::atomic::Ordering::Relaxed) {
                row[0] = f32::NAN;
            }
            step.logits.extend(row);
        }
        step.stats.n_tokens += tokens.len() as u64;
        cache.commit();
        Ok(())
    }
}

fn options() -> GenerateOptions {
    GenerateOptions::default().with_max_tokens(50)
}

#[test]
fn without_a_tokenizer_ids_go_in_and_out_and_text_is_refused() {
    let engine = Script::new([5, 6, 7]).engine();
    let mut session = engine.session().unwrap();
    let pieces: Vec<_> =
        session.generate(vec![9], &options()).unwrap().map(Result::unwrap).collect();
    let ids: Vec<_> = pieces.iter().flat_map(|piece| piece.ids.clone()).collect();
    assert_eq!(ids, [5, 6, 7]);
    assert!(pieces.iter().all(|piece| piece.text.is_empty()));

    let error = session.generate("text", &options()).unwrap_err();
    assert!(matches!(error, Error::NoTokenizer { what: "the prompt" }));
    let error = session.generate(vec![9], &options().with_stop(["x"])).unwrap_err();
    assert!(matches!(error, Error::NoTokenizer { what: "a stop string" }));
}

#[test]
fn an_end_token_is_neither_written_nor_part_of_the_context() {
    let engine = Script::new([5, 6]).engine();
    let mut session = engine.session().unwrap();
    let generated = session.generate_text(vec![9], &options()).unwrap();
    assert_eq!(generated.finish_reason, FinishReason::EndToken(END));
    assert_eq!(generated.ids, [5, 6]);
    assert_eq!(session.ids(), [9, 5, 6]);

    session.reset();
    let on = options().with_max_tokens(4).with_ignore_eos(true);
    assert_eq!(session.generate_text(vec![9], &on).unwrap().ids, [5, 6, END, END]);
}

#[test]
fn characters_of_several_tokens_come_whole() {
    let tokenizer_only = Script::new([]).engine_with_tokenizer();
    let text = "naïve 日本語 と 🐋!";
    let ids = tokenizer_only.tokenizer().unwrap().encode(text, false).unwrap();
    let engine = Script::new(ids).engine_with_tokenizer();
    let mut session = engine.session().unwrap();
    let mut stream = session.generate("", &options()).unwrap();
    let mut pieces = Vec::new();
    for piece in stream.by_ref() {
        let piece = piece.unwrap();
        assert!(!piece.text.contains('\u{fffd}'), "{:?}", piece.text);
        pieces.push(piece.text);
    }
    assert!(pieces.iter().filter(|piece| piece.is_empty()).count() > 5);
    assert_eq!(pieces.concat(), text);
    assert_eq!(stream.finish().unwrap().text, text);
}

#[test]
fn a_character_cut_off_at_the_end_is_replaced() {
    let tokenizer_only = Script::new([]).engine_with_tokenizer();
    let ids = tokenizer_only.tokenizer().unwrap().encode("a🐋", false).unwrap();
    let cut = ids.len() - 1;
    let engine = Script::new(&ids[..cut]).engine_with_tokenizer();
    let by_end = engine.session().unwrap().generate_text("", &options()).unwrap();
    assert_eq!(by_end.text, "a\u{fffd}");
    assert_eq!(by_end.finish_reason, FinishReason::EndToken(END));
    let short = options().with_max_tokens(cut);
    let by_length = engine.session().unwrap().generate_text("", &short).unwrap();
    assert_eq!(by_length.text, "a\u{fffd}");
    assert_eq!(by_length.finish_reason, FinishReason::MaxTokens);
}

#[test]
fn stop_strings_work_within_characters_of_several_tokens() {
    let tokenizer_only = Script::new([]).engine_with_tokenizer();
    let ids = tokenizer_only.tokenizer().unwrap().encode("see 🐋🐋 swim", false).unwrap();
    let engine = Script::new(ids).engine_with_tokenizer();
    let stop = options().with_stop(["🐋 s"]);
    let generated = engine.session().unwrap().generate_text("", &stop).unwrap();
    assert_eq!(generated.text, "see 🐋");
    assert_eq!(generated.finish_reason.name(), "stop_string");
}

#[test]
fn an_error_in_the_middle_comes_once_and_the_session_goes_on() {
    let engine = Script::new([5, 6, 7, 8]).broken_at(2).engine();
    let mut session = engine.session().unwrap();
    let mut stream = session.generate(vec![9], &options()).unwrap();
    assert_eq!(stream.next().unwrap().unwrap().ids, [5]);
    assert_eq!(stream.next().unwrap().unwrap().ids, [6]);
    let error = stream.next().unwrap().unwrap_err();
    assert!(matches!(error, Error::Core(core::Error::NonFiniteLogits { position: 2, .. })));
    assert!(stream.next().is_none() && stream.next().is_none());
    assert_eq!(stream.ids(), [5, 6]);
    assert_eq!(stream.finish_reason(), Some(&FinishReason::Failed));
    assert_eq!(stream.finish().unwrap().ids, [5, 6]);

    assert_eq!(session.ids(), [9, 5, 6]);
    let rest = session.generate_text(vec![], &options()).unwrap();
    assert_eq!(rest.ids, [7, 8]);
}

#[test]
fn an_error_in_the_prompt_leaves_the_session_as_it_was() {
    let engine = Script::new([5, 6]).broken_at(0).engine();
    let mut session = engine.session().unwrap();
    assert!(session.generate_text(vec![9], &options()).is_err());
    assert!(session.is_empty());
    assert_eq!(session.generate_text(vec![9], &options()).unwrap().ids, [5, 6]);
}

#[test]
fn settings_that_an_own_model_cannot_follow_are_refused() {
    let error = Engine::builder().causal_lm(Script::new([])).dtype(Dtype::F16).build().unwrap_err();
    assert!(matches!(error, Error::InvalidOption { field: "dtype", .. }));
    let both = Engine::builder().causal_lm(Script::new([])).model("assets/llama-relu-tiny");
    assert!(matches!(both.build().unwrap_err(), Error::ModelSource { found: "both" }));
    let kv = Engine::builder().causal_lm(Script::new([])).kv_dtype(KvDtype::F16).build();
    assert!(matches!(kv.unwrap_err(), Error::InvalidOption { field: "kv_dtype", .. }));
    let missing = Engine::builder().causal_lm(Script::new([])).tokenizer_file("no/tokenizer.json");
    assert!(matches!(missing.build().unwrap_err(), Error::Io { .. }));
}

#[test]
fn logits_that_are_not_finite_are_an_error_and_change_nothing() {
    let engine = Script::new([5, 6, 7]).broken_at(3).engine();
    let mut session = engine.session().unwrap();
    session.logits(&[1, 2]).unwrap();
    let error = session.logits(&[3, 4]).unwrap_err();
    assert!(matches!(error, Error::Core(core::Error::NonFiniteLogits { position: 3, .. })));
    assert_eq!(session.ids(), [1, 2]);
    session.logits(&[3]).unwrap();
    assert_eq!(session.ids(), [1, 2, 3]);
}
