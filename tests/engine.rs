//! The engine over the demo model: what it writes, and what sessions promise.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use powerinfer::{Engine, Error, FinishReason, GenerateOptions, Generated, Sampling, core};
use testing::fixture::tokenizer_cases;
use testing::{Fixture, assert_same_bits};

fn demo() -> Engine {
    Engine::builder().model(Fixture::demo().model_dir).threads(2).build().unwrap()
}

fn tokens(n: usize) -> GenerateOptions {
    GenerateOptions::default().with_max_tokens(n)
}

fn write(engine: &Engine, prompt: &str, options: &GenerateOptions) -> Generated {
    engine.session().unwrap().generate_text(prompt, options).unwrap()
}

#[test]
fn greedy_text_is_the_reference_text() {
    for fixture in Fixture::trained() {
        let engine = Engine::builder().model(&fixture.model_dir).threads(2).build().unwrap();
        for prompt in fixture.golden().prompts {
            let options = tokens(prompt.greedy_ids.len()).with_ignore_eos(true);
            let generated = write(&engine, prompt.text.as_deref().unwrap(), &options);
            // with the token that begins a text, which the tokenizer's post-processor adds
            assert_eq!(generated.prompt_ids, prompt.input_ids, "{}", fixture.name);
            assert_eq!(generated.ids, prompt.greedy_ids, "{}", fixture.name);
            assert_eq!(generated.text, prompt.greedy_text.unwrap());
            assert_eq!(generated.finish_reason, FinishReason::MaxTokens);
        }
    }
}

#[test]
fn tokenizer_cases_are_encoded_and_decoded_as_the_reference_does() {
    let engine = demo();
    let tokenizer = engine.tokenizer().unwrap();
    for case in tokenizer_cases() {
        assert_eq!(tokenizer.encode(&case.text, true).unwrap(), case.ids, "{:?}", case.text);
        let plain = tokenizer.encode(&case.text, false).unwrap();
        assert_eq!(plain, case.ids_no_special, "{:?}", case.text);
        assert_eq!(tokenizer.decode(&case.ids).unwrap(), case.decoded, "{:?}", case.text);
    }
}

#[test]
fn sessions_on_several_threads_write_what_one_alone_writes() {
    let engine = demo();
    let prompts = ["It was a truth", "The captain stood", "And God said"];
    let alone = prompts.map(|prompt| write(&engine, prompt, &tokens(24)).text);
    let together = std::thread::scope(|scope| {
        let writers = prompts.map(|prompt| {
            let engine = engine.clone();
            scope.spawn(move || write(&engine, prompt, &tokens(24)).text)
        });
        writers.map(|writer| writer.join().unwrap())
    });
    assert_eq!(together, alone);
}

#[test]
fn pieces_add_up_to_the_text_and_the_text_to_the_ids() {
    let engine = demo();
    let mut session = engine.session().unwrap();
    let mut stream = session.generate("naïve 日本", &tokens(40)).unwrap();
    let (mut text, mut ids) = (String::new(), Vec::new());
    for piece in stream.by_ref() {
        let piece = piece.unwrap();
        text.push_str(&piece.text);
        ids.extend(piece.ids);
    }
    let generated = stream.finish().unwrap();
    assert_eq!((&generated.text, &generated.ids), (&text, &ids));
    assert_eq!(text, engine.tokenizer().unwrap().decode(&ids).unwrap());
    assert_eq!(generated.stats.prefill_tokens, generated.prompt_ids.len());
    assert_eq!(generated.stats.decode_tokens, 39);
    assert!(generated.stats.decode.density() > 0.0 && generated.stats.decode.density() < 0.5);
}

#[test]
fn the_same_seed_gives_the_same_text() {
    let engine = demo();
    let seeded = |seed| {
        let sampling = Sampling::default().with_temperature(1.0).with_seed(seed);
        write(&engine, "It was a truth", &tokens(30).with_sampling(sampling)).text
    };
    assert_eq!(seeded(1), seeded(1));
    assert_ne!(seeded(1), seeded(2));
}

#[test]
fn a_stop_string_across_a_token_border_is_exact() {
    // The greedy text is " to be, that she was not": "e, th" is part of three tokens.
    let engine = demo();
    let options = tokens(30).with_stop(["e, th", "was"]);
    let generated = write(&engine, "It was a truth", &options);
    assert_eq!(generated.text, " to b");
    assert_eq!(generated.finish_reason, FinishReason::StopString("e, th".to_owned()));

    let mut session = engine.session().unwrap();
    let pieces: Vec<String> = session
        .generate("It was a truth", &options)
        .unwrap()
        .map(|piece| piece.unwrap().text)
        .collect();
    assert_eq!(pieces.concat(), " to b");
}

#[test]
fn text_held_for_a_stop_string_that_never_comes_is_given_out() {
    let engine = demo();
    let whole = write(&engine, "It was a truth", &tokens(6)).text;
    let stop = format!("{whole} and what never follows");
    let held = write(&engine, "It was a truth", &tokens(6).with_stop([stop]));
    assert_eq!((held.text, held.finish_reason), (whole, FinishReason::MaxTokens));
}

#[test]
fn a_stop_id_ends_the_text_before_it() {
    let engine = demo();
    let whole = write(&engine, "It was a truth", &tokens(8));
    let last = whole.ids[5];
    let first = whole.ids.iter().position(|&id| id == last).unwrap();
    let stopped = write(&engine, "It was a truth", &tokens(8).with_stop_ids([last]));
    assert_eq!(stopped.ids, whole.ids[..first]);
    assert_eq!(stopped.finish_reason, FinishReason::EndToken(last));
}

#[test]
fn a_dropped_stream_leaves_a_session_that_goes_on() {
    let engine = demo();
    let whole = write(&engine, "It was a truth", &tokens(12));
    let mut session = engine.session().unwrap();
    let mut stream = session.generate("It was a truth", &tokens(100)).unwrap();
    for _ in 0..5 {
        stream.next().unwrap().unwrap();
    }
    drop(stream);
    assert_eq!(session.len(), whole.prompt_ids.len() + 5);
    let rest = session.generate_text("", &tokens(7)).unwrap();
    assert_eq!(rest.ids, whole.ids[5..]);
    assert_eq!(session.ids(), [&whole.prompt_ids[..], &whole.ids].concat());

    session.reset();
    assert!(session.is_empty());
    assert_eq!(session.generate_text("It was a truth", &tokens(12)).unwrap().ids, whole.ids);
}

#[test]
fn only_the_first_text_of_a_context_gets_special_tokens() {
    let engine = demo();
    let mut session = engine.session().unwrap();
    let first = session.generate_text("It was", &tokens(2)).unwrap();
    let second = session.generate_text(" not", &tokens(2)).unwrap();
    assert_eq!(first.prompt_ids[0], 1);
    assert_ne!(second.prompt_ids[0], 1);
    let fed = session.generate_text(vec![1, 1], &tokens(1)).unwrap();
    assert_eq!(fed.prompt_ids, [1, 1]);
}

#[test]
fn the_second_prompt_sees_all_that_came_before() {
    let engine = demo();
    let mut session = engine.session().unwrap();
    let first = session.generate_text("It was a truth", &tokens(4)).unwrap();
    let second = session.generate_text(" The captain", &tokens(6)).unwrap();
    let all = [first.prompt_ids, first.ids, second.prompt_ids].concat();
    let at_once = engine.session().unwrap().generate_text(all, &tokens(6)).unwrap();
    assert_eq!(second.ids, at_once.ids);
}

#[test]
fn zero_tokens_only_append_the_prompt() {
    let engine = demo();
    let mut session = engine.session().unwrap();
    let nothing = session.generate_text("It was a truth", &tokens(0)).unwrap();
    assert!(nothing.ids.is_empty() && nothing.text.is_empty());
    assert_eq!(session.ids(), nothing.prompt_ids);
}

#[test]
fn an_empty_prompt_writes_from_the_beginning_token() {
    let engine = demo();
    let generated = write(&engine, "", &tokens(3));
    assert_eq!(generated.prompt_ids, [1]);
    assert_eq!(generated.ids.len(), 3);
    let error = engine.session().unwrap().generate(vec![], &tokens(3)).unwrap_err();
    assert!(matches!(error, Error::Core(core::Error::EmptyPrompt)));
}

#[test]
fn logits_do_not_depend_on_pieces_or_threads() {
    let ids = [1, 1388, 342, 261, 1988, 287];
    let engine = demo();
    let whole = engine.session().unwrap().logits(&ids).unwrap();
    let mut session = engine.session().unwrap();
    let parts = [&ids[..4], &ids[4..5], &ids[5..]].map(|part| session.logits(part).unwrap().values);
    assert_same_bits(&parts.concat(), &whole.values, "pieces");

    let alone = Engine::builder().model(Fixture::demo().model_dir).threads(1).build().unwrap();
    let alone = alone.session().unwrap().logits(&ids).unwrap();
    assert_same_bits(&alone.values, &whole.values, "one thread");
}

#[test]
fn logits_after_a_text_count_its_last_token() {
    let engine = demo();
    let mut session = engine.session().unwrap();
    let written = session.generate_text("It was a truth", &tokens(3)).unwrap();
    let after = session.logits(&[287]).unwrap();
    let all = [&written.prompt_ids[..], &written.ids, &[287]].concat();
    let whole = engine.session().unwrap().logits(&all).unwrap();
    assert_eq!(after.n_tokens, 1);
    assert_same_bits(after.row(0), whole.row(all.len() - 1), "last row");
    assert_eq!(session.ids(), all);
}

#[test]
fn a_request_may_run_dense_on_a_sparse_model() {
    let engine = demo();
    assert_eq!(engine.info().sparsity, powerinfer::Sparsity::Exact);
    let exact = write(&engine, "It was a truth", &tokens(8));
    let options = tokens(8).with_sparsity(powerinfer::Sparsity::Dense);
    let dense = write(&engine, "It was a truth", &options);
    assert_eq!(dense.text, exact.text);
    assert_eq!(dense.stats.decode.density(), 1.0);
    assert!(exact.stats.decode.density() < 0.2);
    assert!(exact.stats.decode.weight_bytes < dense.stats.decode.weight_bytes);
}

#[test]
fn the_context_ends_with_a_reason_and_refuses_what_does_not_fit() {
    let engine = demo();
    let mut session = engine.session().unwrap();
    let options = tokens(100).with_ignore_eos(true);
    let full = session.generate_text(vec![7; 500], &options).unwrap();
    assert_eq!(full.finish_reason, FinishReason::ContextFull);
    assert_eq!(full.ids.len(), 13, "512 fit, and the last needs no room");
    let error = session.generate("more", &tokens(1)).unwrap_err();
    assert!(matches!(error, Error::Core(core::Error::ContextExceeded { max: 512, .. })));
    let error = session.logits(&[1]).unwrap_err();
    assert!(matches!(error, Error::Core(core::Error::ContextExceeded { .. })));
    session.reset();
    assert_eq!(session.generate_text("It was", &tokens(2)).unwrap().ids.len(), 2);
}

#[test]
fn impossible_requests_are_errors_and_leave_the_session_as_it_was() {
    let engine = demo();
    let mut session = engine.session().unwrap();
    let error = session.generate(vec![4096], &tokens(1)).unwrap_err();
    assert!(matches!(error, Error::Core(core::Error::TokenOutOfRange { token: 4096, .. })));
    let error = session.logits(&[1, 4096]).unwrap_err();
    assert!(matches!(error, Error::Core(core::Error::TokenOutOfRange { token: 4096, .. })));
    let hot = tokens(1).with_sampling(Sampling::default().with_temperature(-1.0));
    let error = session.generate("It", &hot).unwrap_err();
    assert!(matches!(error, Error::Core(core::Error::InvalidSampling { .. })));
    let error = session.generate("It", &tokens(1).with_stop([""])).unwrap_err();
    assert!(matches!(error, Error::InvalidOption { field: "stop", .. }));
    assert!(session.is_empty());
    assert_eq!(session.generate_text("It was a truth", &tokens(1)).unwrap().ids.len(), 1);
}

#[test]
fn a_context_that_was_only_appended_to_can_be_gone_on_with() {
    let engine = demo();
    let expected = write(&engine, "It was a truth", &tokens(6)).text;
    // appended with nothing written
    let mut session = engine.session().unwrap();
    session.generate_text("It was a truth", &tokens(0)).unwrap();
    let before = session.ids();
    // a stream that is never asked changes nothing
    drop(session.generate("", &tokens(6)).unwrap());
    assert_eq!(session.ids(), before);
    assert_eq!(session.generate_text("", &tokens(6)).unwrap().text, expected);
    // appended by asking for its logits
    let mut session = engine.session().unwrap();
    session.logits(&before).unwrap();
    assert_eq!(session.generate_text("", &tokens(6)).unwrap().text, expected);
}

#[test]
fn a_text_that_no_context_holds_is_refused_before_it_is_tokenised() {
    let mut session = demo().session().unwrap();
    let long = "a".repeat(512 * 256 + 1);
    let error = session.generate(long.as_str(), &tokens(1)).unwrap_err();
    assert!(matches!(error, Error::PromptTooLong { found_bytes: 131_073, max_context: 512, .. }));
    assert!(session.is_empty());
    assert!(session.generate_text("It was", &tokens(1)).is_ok());
}
