//! A request that another thread stops, and one after it.

use std::time::Duration;

use powerinfer::{CancelToken, Engine, FinishReason, GenerateOptions};

fn main() -> powerinfer::Result<()> {
    let engine = Engine::builder().model("assets/llama-relu-tiny").build()?;
    let mut session = engine.session()?;
    let cancel = CancelToken::new();
    // a slow reader, so that the other thread is in time
    let options = GenerateOptions::default()
        .with_max_tokens(500)
        .with_ignore_eos(true)
        .with_logits_hook(|_, _| std::thread::sleep(Duration::from_millis(1)))
        .with_cancel(&cancel);
    let stopper = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(50));
        cancel.cancel();
    });
    let cut = session.generate_text("It was a truth", &options)?;
    stopper.join().expect("the thread does not panic");
    assert_eq!(cut.finish_reason, FinishReason::Cancelled);
    assert!(cut.ids.len() < 500);
    let rest = session.generate_text("", &GenerateOptions::default().with_max_tokens(4))?;
    assert_eq!(rest.ids.len(), 4);
    println!("stopped after {} tokens, then went on:{}", cut.ids.len(), rest.text);
    Ok(())
}
