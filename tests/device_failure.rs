//! A session whose fast device fails: the text so far stays, and where the device comes back it goes on.
#![allow(clippy::unwrap_used, reason = "helper functions of tests")]

#[path = "../powerinfer-models/tests/support/failing.rs"]
mod failing;

use std::error::Error as _;
use std::path::Path;
use std::sync::Arc;

use failing::{Failing, Switch};
use powerinfer::{Engine, Error, FastDevice, GenerateOptions, Placement, Session};
use powerinfer_ops::{StandIn, StandInOptions};

const PROMPT: &str = "It was a truth";
const N_TOKENS: usize = 12;

/// The demo model, all of it on a device that fails when it is told to, and what tells it.
fn engine() -> (Engine, Arc<Switch>) {
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/llama-relu-tiny");
    let info = Engine::builder().model(&model).build().unwrap().info().clone();
    let switch = Switch::new(false);
    let inner = Arc::new(StandIn::new(StandInOptions::new(u64::MAX)).unwrap());
    let device: Arc<dyn FastDevice> = Arc::new(Failing { inner, switch: Arc::clone(&switch) });
    let placement = Placement::all_fast(info.n_layers, info.d_ff);
    let engine = Engine::builder().model(&model).fast_device(device).placement(placement);
    (engine.build().unwrap(), switch)
}

fn options(n_tokens: usize) -> GenerateOptions {
    GenerateOptions::default().with_max_tokens(n_tokens)
}

/// Fails unless the error is that of the device; the tokens that were given out before it.
fn assert_broken(error: &Error) -> usize {
    let mut causes = vec![error.to_string()];
    let mut cause = error.source();
    while let Some(error) = cause {
        causes.push(error.to_string());
        cause = error.source();
    }
    assert!(causes.iter().any(|cause| cause.contains("failing")), "{causes:?}");
    match error {
        Error::Interrupted { generated, .. } => generated.ids.len(),
        _ => 0,
    }
}

fn written(session: &Session, n_prompt: usize) -> Vec<u32> {
    session.ids()[n_prompt..].to_vec()
}

#[test]
fn a_text_goes_on_after_a_device_has_failed_at_any_token() {
    let (engine, switch) = engine();
    let mut whole = engine.session().unwrap();
    let expected = whole.generate_text(PROMPT, &options(N_TOKENS)).unwrap();
    let n_prompt = expected.prompt_ids.len();
    let n_steps = switch.n_steps();
    let mut lengths = Vec::new();
    for at in (0..n_steps).step_by(7) {
        let mut session = engine.session().unwrap();
        // what opening a session asks of the device is not counted
        switch.fail(at..at + 1);
        let Err(error) = session.generate_text(PROMPT, &options(N_TOKENS)) else { continue };
        let so_far = assert_broken(&error);
        lengths.push(so_far);
        if session.len() < n_prompt {
            // the prompt itself failed, and nothing of it is there
            assert!(session.is_empty(), "step {at}");
            let again = session.generate_text(PROMPT, &options(N_TOKENS)).unwrap();
            assert_eq!(again.ids, expected.ids, "step {at}");
            continue;
        }
        let kept = written(&session, n_prompt);
        assert_eq!(kept, expected.ids[..kept.len()], "step {at}");
        assert!(kept.len() >= so_far, "step {at}: {} of {so_far}", kept.len());
        let rest = N_TOKENS - kept.len();
        if rest > 0 {
            let after = session.generate_text("", &options(rest)).unwrap();
            assert_eq!(after.ids, expected.ids[kept.len()..], "step {at}");
        }
    }
    lengths.dedup();
    assert!(lengths.len() > N_TOKENS / 2, "broke off after {lengths:?}");
}

#[test]
fn a_device_that_is_gone_is_what_every_request_says() {
    let (engine, switch) = engine();
    let mut session = engine.session().unwrap();
    let expected = session.generate_text(PROMPT, &options(4)).unwrap();
    switch.fail(0..usize::MAX);
    for _ in 0..2 {
        let before = session.ids();
        let _ = assert_broken(&session.generate_text("", &options(4)).unwrap_err());
        assert_eq!(session.ids(), before);
        let _ = assert_broken(&session.logits(&[5]).unwrap_err());
        assert_eq!(session.ids(), before);
    }
    let mut other = engine.session().unwrap();
    let _ = assert_broken(&other.generate_text(PROMPT, &options(4)).unwrap_err());
    session.reset();
    switch.fail(0..0);
    for session in [&mut session, &mut other] {
        session.reset();
        assert_eq!(session.generate_text(PROMPT, &options(4)).unwrap().ids, expected.ids);
    }
}
