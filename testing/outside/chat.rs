//! Two turns of a conversation, of which the second runs its own tokens only.

use powerinfer::{ChatMessage, Engine, GenerateOptions};

fn main() -> powerinfer::Result<()> {
    let engine = Engine::builder().model("assets/llama-relu-tiny").build()?;
    let mut session = engine.session()?;
    let options = GenerateOptions::default().with_max_tokens(12);
    let mut messages = vec![ChatMessage::user("It was a truth")];
    let first = session.chat(&messages, &options)?.finish()?;
    messages.push(ChatMessage::assistant(&first.text));
    messages.push(ChatMessage::user("And what did she say?"));
    let second = session.chat(&messages, &options)?.finish()?;
    assert_eq!(first.cached_tokens, 0);
    assert!(second.cached_tokens >= first.prompt_ids.len());
    assert_eq!(second.stats.prefill_tokens, second.prompt_ids.len() - second.cached_tokens);
    println!("{}\n{}", first.text, second.text);
    Ok(())
}
