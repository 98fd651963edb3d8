//! A conversation on the terminal, by the model's chat template.
//!
//! ```sh
//! cargo run --release --example chat -- --system "You are a sailor." --temperature 0.8
//! echo "Where is the whale?" | cargo run --release --example chat -- --json
//! ```
//!
//! Each line that is typed is a message; an empty line is none, and the end of the input ends the
//! conversation. Answers go to stdout, all else to stderr. The cache is kept between turns, so each
//! costs its new messages only. A model without a template needs `--chat-template`.

#[path = "support/flags.rs"]
mod flags;
#[path = "support/progress.rs"]
mod progress;
#[path = "support/report.rs"]
mod report;
#[path = "support/sampling.rs"]
mod sampling;

use std::io::{BufRead, IsTerminal, Read};
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use powerinfer::{ChatMessage, ContextPolicy, Engine, Generated, Session};
use serde_json::{Value, json};

use flags::CommonFlags;
use progress::Progress;
use report::{Outcome, echo, note, print, print_json};
use sampling::SamplingFlags;

/// The longest line that is taken for a message.
const MAX_LINE_BYTES: u64 = 1 << 20;

/// Talks with a model.
#[derive(Debug, Parser)]
#[command(name = "chat")]
struct Flags {
    /// The first message; without it, the first line of the input
    prompt: Option<String>,
    /// Instructions before the conversation
    #[arg(long, value_name = "STR")]
    system: Option<String>,
    /// A file with a chat template, in place of the model's
    #[arg(long, value_name = "FILE")]
    chat_template: Option<PathBuf>,
    #[command(flatten)]
    sampling: SamplingFlags,
    #[command(flatten)]
    common: CommonFlags,
}

fn main() -> ExitCode {
    report::run(chat)
}

fn chat(flags: Flags) -> Outcome<()> {
    let engine = load(&flags)?;
    let mut session = engine.session()?;
    let mut messages: Vec<ChatMessage> = flags.system.iter().map(ChatMessage::system).collect();
    let mut turns: Vec<Value> = Vec::new();
    let mut first = flags.prompt.clone();
    while let Some(line) = first.take().map_or_else(next_line, |line| Ok(Some(line)))? {
        if line.trim().is_empty() {
            continue;
        }
        messages.push(ChatMessage::user(line));
        let answer = answer(&mut session, &messages, &flags)?;
        messages.push(ChatMessage::assistant(&answer.text));
        turns.push(turn(&answer));
    }
    if flags.common.json {
        let messages: Vec<Value> = messages
            .iter()
            .map(|message| json!({"role": message.role, "content": message.content}))
            .collect();
        return print_json(&json!({
            "messages": messages,
            "turns": turns,
            "fast_device": engine.info().fast_device,
            "sparsity": engine.info().sparsity.name(),
            "dtype": engine.info().dtypes.join(","),
            "seed": flags.sampling.seed,
        }));
    }
    Ok(())
}

fn load(flags: &Flags) -> Outcome<Engine> {
    let progress = Progress::loading();
    let mut builder = flags.common.builder()?.model(flags.common.model_path());
    builder = builder.on_load_progress(progress.bytes());
    if let Some(path) = &flags.chat_template {
        builder = builder.chat_template(report::read_text(path)?);
    }
    let engine = builder.build()?;
    for line in &engine.info().notes {
        note(&format!("note: {line}"));
    }
    Ok(engine)
}

/// Writes the answer to the last message as it comes, unless all goes into one JSON object.
fn answer(session: &mut Session, messages: &[ChatMessage], flags: &Flags) -> Outcome<Generated> {
    // a long conversation forgets its oldest turns, as its window on the terminal does
    let options =
        flags.sampling.options()?.with_context(ContextPolicy::DropOldest { keep_first: 1 });
    let mut stream = session.chat(messages, &options)?;
    if !flags.common.json {
        for piece in stream.by_ref() {
            print(&piece?.text)?;
        }
        print("\n")?;
    }
    Ok(stream.finish()?)
}

fn turn(answer: &Generated) -> Value {
    json!({
        "text": answer.text,
        "ids": answer.ids,
        "finish_reason": answer.finish_reason.name(),
        "prompt_tokens": answer.prompt_ids.len(),
        "cached_tokens": answer.cached_tokens,
        "prefill_seconds": answer.stats.prefill_time.as_secs_f64(),
        "decode_tokens_per_second": answer.stats.decode_tokens_per_second(),
    })
}

/// The next line of the input; `None` at its end.
fn next_line() -> Outcome<Option<String>> {
    let stdin = std::io::stdin();
    if stdin.is_terminal() {
        echo("> ");
    }
    let mut line = String::new();
    let read = stdin.lock().take(MAX_LINE_BYTES).read_line(&mut line)?;
    if read as u64 == MAX_LINE_BYTES {
        return Err(format!("a message has more than {MAX_LINE_BYTES} bytes").into());
    }
    Ok((read > 0).then(|| line.trim_end_matches(['\n', '\r']).to_owned()))
}
