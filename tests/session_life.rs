//! The life of a session: appended to, cut, forked, cancelled, broken off and gone on with.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::time::Duration;

use powerinfer::models::{ConvertOptions, convert};
use powerinfer::{
    CancelToken, ChatMessage, ChatOptions, ChatTemplate, ContextPolicy, Engine, Error,
    FinishReason, GenerateOptions, Generated, Sampling, Session, core, tokenizer_keys,
};
use testing::Fixture;

const PROMPT: &str = "It was a truth";

fn demo() -> Engine {
    Engine::builder().model(Fixture::demo().model_dir).threads(2).build().unwrap()
}

fn tokens(n: usize) -> GenerateOptions {
    GenerateOptions::default().with_max_tokens(n)
}

fn write(session: &mut Session, prompt: &str, n: usize) -> Generated {
    session.generate_text(prompt, &tokens(n)).unwrap()
}

#[test]
fn what_is_appended_in_pieces_is_what_is_fed_at_once() {
    let engine = demo();
    let mut pieces = engine.session().unwrap();
    let first = pieces.append("It was").unwrap();
    let second = pieces.append(" a truth").unwrap();
    assert_eq!((first[0], pieces.len()), (1, first.len() + second.len()));
    let whole = [first, second].concat();
    let at_once = engine.session().unwrap().generate_text(whole, &tokens(8)).unwrap();
    assert_eq!(write(&mut pieces, "", 8).ids, at_once.ids);
}

#[test]
fn a_session_cut_back_writes_as_if_it_had_never_gone_on() {
    let engine = demo();
    let mut session = engine.session().unwrap();
    let first = write(&mut session, PROMPT, 20);
    let all = session.ids();
    for len in [all.len(), all.len() - 1, all.len() - 2, first.prompt_ids.len(), 1] {
        let mut cut = session.fork().unwrap();
        cut.truncate(len);
        assert_eq!(cut.ids(), all[..len]);
        let fresh = engine.session().unwrap().generate_text(&all[..len], &tokens(5)).unwrap();
        assert_eq!(write(&mut cut, "", 5).ids, fresh.ids, "cut to {len}");
    }
    session.truncate(usize::MAX);
    assert_eq!(session.ids(), all);
    session.truncate(0);
    assert!(session.is_empty());
    assert_eq!(write(&mut session, PROMPT, 20).ids, first.ids);
}

#[test]
fn forks_share_the_past_and_not_the_future() {
    let engine = demo();
    let mut session = engine.session().unwrap();
    session.append("The captain stood").unwrap();
    let mut fork = session.fork().unwrap();
    let other = write(&mut fork, " on the ship, and", 12);
    let own = write(&mut session, " in the garden, and", 12);
    for (ids, written) in [(fork.ids(), other), (session.ids(), own)] {
        let prompt = ids[..ids.len() - 12].to_vec();
        let alone = engine.session().unwrap().generate_text(prompt, &tokens(12)).unwrap();
        assert_eq!(written.ids, alone.ids);
    }
}

#[test]
fn a_whole_prompt_keeps_what_it_shares_and_writes_the_same() {
    let engine = demo();
    let mut session = engine.session().unwrap();
    let mut whole = write(&mut session, PROMPT, 10).prompt_ids;
    let everything = session.ids();
    // all of it, most of it, another end, something else, and all of it again
    let prompts = [
        everything.clone(),
        everything[..6].to_vec(),
        [&everything[..6], &[287, 9]].concat(),
        vec![1, 287, 261],
        std::mem::take(&mut whole),
    ];
    for prompt in prompts {
        let shared = session.ids().iter().zip(&prompt).take_while(|(a, b)| a == b).count();
        let found = session.generate_whole(&prompt[..], &tokens(6)).unwrap().finish().unwrap();
        let fresh = engine.session().unwrap().generate_text(&prompt[..], &tokens(6)).unwrap();
        assert_eq!((found.ids, &found.prompt_ids), (fresh.ids, &prompt));
        assert!(
            found.cached_tokens <= shared && found.cached_tokens + 1 >= shared.min(prompt.len())
        );
        assert_eq!(found.stats.prefill_tokens, prompt.len() - found.cached_tokens);
    }
}

#[test]
fn a_refused_whole_prompt_leaves_the_context() {
    let engine = demo();
    let mut session = engine.session().unwrap();
    write(&mut session, PROMPT, 5);
    let before = session.ids();
    for prompt in [vec![4096], vec![7; 513], vec![]] {
        assert!(session.generate_whole(prompt, &tokens(1)).is_err());
        assert_eq!(session.ids(), before);
    }
}

#[test]
fn a_conversation_runs_its_new_messages_only() {
    let engine = demo();
    let mut session = engine.session().unwrap();
    let mut messages = vec![ChatMessage::user(PROMPT)];
    for turn in 0..3 {
        let answer = session.chat(&messages, &tokens(8)).unwrap().finish().unwrap();
        let fresh =
            engine.session().unwrap().chat(&messages, &tokens(8)).unwrap().finish().unwrap();
        assert_eq!((&answer.ids, &answer.text), (&fresh.ids, &fresh.text), "turn {turn}");
        assert_eq!(fresh.cached_tokens, 0);
        if turn > 0 {
            assert!(answer.stats.prefill_tokens < answer.prompt_ids.len() / 2 + 8, "turn {turn}");
            assert!(answer.cached_tokens >= 5);
        }
        messages.push(ChatMessage::assistant(answer.text));
        messages.push(ChatMessage::user("And what did she say?"));
    }
}

#[test]
fn a_text_that_begins_with_its_beginning_token_has_one() {
    let engine = demo();
    let mut session = engine.session().unwrap();
    let once = session.append("<s>It was").unwrap();
    assert_eq!(once, engine.session().unwrap().append("It was").unwrap());
    let chat = engine.chat_prompt(&[ChatMessage::user("<s>It was")], &Default::default()).unwrap();
    assert_eq!(chat.iter().filter(|id| **id == 1).count(), 1);
    // ids are fed as they are
    assert_eq!(engine.session().unwrap().append(vec![1, 1, 7]).unwrap(), [1, 1, 7]);
}

#[test]
fn a_model_without_a_template_says_so_and_takes_one() {
    let folder =
        Fixture::demo().model_dir.parent().unwrap().join("../testing/fixtures/models/opt-tiny");
    let engine = Engine::builder().model(&folder).threads(1).build().unwrap();
    let messages = [ChatMessage::user("hi")];
    let error = engine.session().unwrap().chat(&messages, &tokens(1)).unwrap_err();
    assert!(matches!(error, Error::NoChatTemplate));
    let given = Engine::builder().model(&folder).threads(1);
    let given = given.chat_template("{{ messages[0].content }}").build().unwrap();
    assert!(given.session().unwrap().chat(&messages, &tokens(1)).is_ok());
    let broken = Engine::builder().model(&folder).chat_template("{% if %}").build();
    assert!(matches!(broken.unwrap_err(), Error::ChatTemplate { .. }));
}

#[test]
fn a_cancelled_request_ends_with_the_text_so_far_and_the_session_goes_on() {
    let engine = demo();
    let mut session = engine.session().unwrap();
    let whole = write(&mut session, PROMPT, 12);
    session.reset();
    let cancel = CancelToken::new();
    let mut stream = session.generate(PROMPT, &tokens(100).with_cancel(&cancel)).unwrap();
    for _ in 0..5 {
        stream.next().unwrap().unwrap();
    }
    cancel.cancel();
    assert!(stream.by_ref().all(|piece| piece.unwrap().ids.is_empty()));
    let cut = stream.finish().unwrap();
    assert_eq!(cut.finish_reason, FinishReason::Cancelled);
    assert_eq!(cut.ids, whole.ids[..5]);
    assert_eq!(cut.text, engine.tokenizer().unwrap().decode(&cut.ids).unwrap());
    assert_eq!(write(&mut session, "", 7).ids, whole.ids[5..]);
}

#[test]
fn a_request_cancelled_in_its_prompt_leaves_the_session_as_it_was() {
    let engine = demo();
    let mut session = engine.session().unwrap();
    write(&mut session, PROMPT, 5);
    let before = session.ids();
    let cancel = CancelToken::new();
    cancel.cancel();
    let options = tokens(5).with_cancel(&cancel);
    let nothing = session.generate_text(" and", &options).unwrap();
    assert_eq!((nothing.finish_reason, nothing.ids.len()), (FinishReason::Cancelled, 0));
    assert_eq!(session.ids(), before);
    let mut fork = session.fork().unwrap();
    assert_eq!(write(&mut session, " and", 5).ids, write(&mut fork, " and", 5).ids);
}

#[test]
fn a_load_is_cancelled_from_another_thread() {
    let cancel = CancelToken::new();
    cancel.cancel();
    let builder = Engine::builder().model(Fixture::demo().model_dir).threads(1);
    let error = builder.cancel(&cancel).build().unwrap_err();
    assert!(error.is_cancelled());
    assert!(matches!(error, Error::Core(core::Error::Cancelled)));
    assert_eq!(error.to_string(), "cancelled");
}

#[test]
fn log_probabilities_are_those_of_the_logits() {
    let engine = demo();
    let mut session = engine.session().unwrap();
    let sampling = Sampling::default().with_temperature(1.5).with_seed(3);
    let options = tokens(6).with_sampling(sampling.clone()).with_logprobs(3);
    let generated = session.generate_text(PROMPT, &options).unwrap();
    assert_eq!(generated.logprobs.len(), 6);
    let plain = tokens(6).with_sampling(sampling);
    let plain = engine.session().unwrap().generate_text(PROMPT, &plain).unwrap();
    assert_eq!(plain.ids, generated.ids, "asking changes nothing");
    assert!(plain.logprobs.is_empty());

    let all = [&generated.prompt_ids[..], &generated.ids].concat();
    let logits = engine.session().unwrap().logits(&all).unwrap();
    for (i, token) in generated.logprobs.iter().enumerate() {
        let row = logits.row(generated.prompt_ids.len() - 1 + i);
        let sum: f64 = row.iter().map(|&x| f64::from(x).exp()).sum();
        let expected = f64::from(row[token.id as usize]) - sum.ln();
        assert_eq!(token.id, generated.ids[i]);
        assert!((f64::from(token.logprob) - expected).abs() < 1e-4);
        assert_eq!(token.top.len(), 3);
        let best = row.iter().copied().fold(f32::MIN, f32::max);
        assert_eq!(row[token.top[0].0 as usize], best);
        assert!(token.top[0].1 >= token.top[1].1 && token.top[1].1 >= token.top[2].1);
    }
}

#[test]
fn a_hook_has_its_say_before_the_sampler() {
    let engine = demo();
    let forbidden = write(&mut engine.session().unwrap(), PROMPT, 1).ids[0];
    let options = tokens(10).with_logits_hook(move |so_far, logits| {
        assert!(so_far.len() >= 5);
        logits[forbidden as usize] = f32::NEG_INFINITY;
    });
    let generated = engine.session().unwrap().generate_text(PROMPT, &options).unwrap();
    assert!(!generated.ids.contains(&forbidden));
    let nothing_left = tokens(3).with_logits_hook(|_, logits| logits.fill(f32::NEG_INFINITY));
    let error = engine.session().unwrap().generate_text(PROMPT, &nothing_left).unwrap_err();
    assert!(matches!(
        error,
        Error::Core(core::Error::NonFiniteLogits { position: 4, layer: None })
    ));
}

#[test]
fn an_error_in_the_middle_carries_the_text_so_far() {
    let engine = demo();
    let mut session = engine.session().unwrap();
    let whole = write(&mut session, PROMPT, 8);
    session.reset();
    let prompt_len = whole.prompt_ids.len();
    let options = tokens(8).with_logits_hook(move |so_far, logits| {
        if so_far.len() == prompt_len + 4 {
            logits[0] = f32::NAN;
        }
    });
    let error = session.generate_text(PROMPT, &options).unwrap_err();
    let Error::Interrupted { generated, source } = error else {
        panic!("{error:?}");
    };
    assert_eq!(
        (&generated.ids[..], generated.finish_reason),
        (&whole.ids[..4], FinishReason::Failed)
    );
    assert!(matches!(*source, Error::Core(core::Error::NonFiniteLogits { .. })));
    assert_eq!(write(&mut session, "", 4).ids, whole.ids[4..]);
}

#[test]
fn a_full_context_is_an_error_unless_the_oldest_may_go() {
    let engine = Engine::builder().model(Fixture::demo().model_dir).threads(2).max_context(64);
    let engine = engine.build().unwrap();
    assert_eq!((engine.max_context(), engine.session().unwrap().max_context()), (64, 64));
    let mut session = engine.session().unwrap();
    session.append(vec![7; 60]).unwrap();
    let error = session.generate(vec![8; 10], &tokens(4)).unwrap_err();
    assert!(matches!(
        error,
        Error::Core(core::Error::ContextExceeded { have: 60, requested: 10, max: 64 })
    ));
    let drop = tokens(4).with_context(ContextPolicy::DropOldest { keep_first: 2 });
    let found = session.generate_text(vec![8; 10], &drop).unwrap();
    let expected = [vec![7; 50], vec![8; 10]].concat();
    assert_eq!((found.prompt_ids.len(), &found.prompt_ids), (60, &expected));
    assert_eq!(found.ids.len(), 4);
    let fresh = engine.session().unwrap().generate_text(expected, &tokens(4)).unwrap();
    assert_eq!(found.ids, fresh.ids);
    // asked for more than the context has, half of it stays
    let greedy = tokens(1000).with_ignore_eos(true);
    let greedy = greedy.with_context(ContextPolicy::DropOldest { keep_first: 1 });
    let found = session.generate_whole((100..200).collect::<Vec<u32>>(), &greedy).unwrap();
    let found = found.finish().unwrap();
    assert_eq!(found.prompt_ids, [vec![100], (169..200).collect()].concat());
    assert_eq!((found.ids.len(), found.finish_reason), (33, FinishReason::ContextFull));
}

#[test]
fn a_model_over_its_budget_is_refused_with_figures() {
    let builder = || Engine::builder().model(Fixture::demo().model_dir).threads(1);
    let memory = builder().estimate().unwrap();
    let needed = memory.total_bytes(1, usize::MAX);
    assert!(builder().memory_budget(needed).build().is_ok());
    let error = builder().memory_budget(needed - 1).build().unwrap_err();
    let text = error.to_string();
    assert!(text.contains(&needed.to_string()) && text.contains("weights 13.3 MiB"), "{text}");
    let smaller = builder().max_context(64).estimate().unwrap();
    assert!(smaller.total_bytes(1, usize::MAX) < needed);
    assert!(builder().max_context(64).memory_budget(needed - 1).build().is_ok());
}

#[test]
fn an_async_stream_gives_the_same_pieces_and_the_session_back() {
    let engine = demo();
    let options = tokens(12).with_logprobs(1);
    let expected = engine.session().unwrap().generate_text(PROMPT, &options).unwrap();
    let stream = engine.session().unwrap().into_stream(PROMPT, &options).unwrap();
    assert_eq!(stream.prompt_ids(), expected.prompt_ids);
    let (generated, mut session) = stream.finish().unwrap();
    assert_eq!((&generated.text, &generated.logprobs), (&expected.text, &expected.logprobs));
    assert_eq!(session.len(), expected.prompt_ids.len() + 12);
    write(&mut session, "", 2);
    let whole = session.into_stream_whole(PROMPT, &options).unwrap();
    let (again, _) = whole.finish().unwrap();
    assert_eq!((again.ids, again.cached_tokens), (expected.ids, 4));
}

#[test]
fn dropping_an_async_stream_stops_its_thread_and_a_panic_is_an_error() {
    let engine = demo();
    let alive = std::sync::Arc::new(());
    let held = alive.clone();
    let options = tokens(1_000_000).with_ignore_eos(true).with_logits_hook(move |_, _| {
        let _ = &held;
        std::thread::sleep(Duration::from_millis(1));
    });
    let stream = engine.session().unwrap().into_stream(PROMPT, &options).unwrap();
    drop((options, stream));
    let began = std::time::Instant::now();
    while std::sync::Arc::strong_count(&alive) > 1 {
        assert!(began.elapsed() < Duration::from_secs(20), "the thread goes on");
        std::thread::sleep(Duration::from_millis(1));
    }

    let panics = tokens(3).with_logits_hook(|_, _| panic!("made to fail"));
    let stream = engine.session().unwrap().into_stream(PROMPT, &panics).unwrap();
    assert!(matches!(stream.finish(), Err(Error::Panicked)));
    assert_eq!(write(&mut engine.session().unwrap(), PROMPT, 2).ids.len(), 2);
}

#[test]
fn a_gguf_file_brings_its_chat_template_along() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("demo.gguf");
    let folder = Fixture::demo().model_dir;
    let mut options = ConvertOptions::default();
    options.keys = tokenizer_keys(&folder, 4096).unwrap();
    convert(&folder, &path, &options, &mut |_, _| {}).unwrap();
    let template = ChatTemplate::from_gguf(&path).unwrap().unwrap();
    let own = ChatTemplate::from_dir(&folder).unwrap().unwrap();
    assert_eq!(template.text(), own.text());
    assert_eq!(
        (template.token("bos_token"), template.token("eos_token")),
        (Some("<s>"), Some("</s>"))
    );
    let gguf = Engine::builder().model(&path).threads(1).build().unwrap();
    let messages = [ChatMessage::user(PROMPT)];
    let options = ChatOptions::default();
    let prompt = gguf.chat_prompt(&messages, &options).unwrap();
    assert_eq!(prompt, demo().chat_prompt(&messages, &options).unwrap());
    let needed = Engine::builder().model(&path).estimate().unwrap().weight_bytes;
    assert!(needed >= gguf.info().weight_bytes && needed < gguf.info().weight_bytes * 6 / 5);
}
