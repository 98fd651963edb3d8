//! Writes text after a prompt, piece by piece.
//!
//! ```sh
//! cargo run --release --example generate -- "It was a truth" --temperature 0.8 --seed 7
//! cargo run --release --example generate -- --prompt-ids 1,1388,342 --max-tokens 20 --json
//! ```
//!
//! The text goes to stdout. On a terminal the prompt is shown before it and a summary after it, on
//! stderr both.

#[path = "support/flags.rs"]
mod flags;
#[path = "support/progress.rs"]
mod progress;
#[path = "support/report.rs"]
mod report;
#[path = "support/sampling.rs"]
mod sampling;
#[path = "support/split.rs"]
mod split;

use std::io::IsTerminal;
use std::process::ExitCode;

use clap::Parser;
use powerinfer::{Engine, Generated, Prompt, Session};
use serde_json::json;

use flags::CommonFlags;
use progress::Progress;
use report::{Outcome, note, print, print_json};
use sampling::SamplingFlags;
use split::{split_json, split_line};

/// Writes text after a prompt.
#[derive(Debug, Parser)]
#[command(name = "generate")]
struct Flags {
    /// The text to continue
    #[arg(default_value = "It was a truth", conflicts_with = "prompt_ids")]
    prompt: String,
    /// Token ids to continue, fed as they are
    #[arg(long, value_name = "1,2,3", value_delimiter = ',')]
    prompt_ids: Option<Vec<u32>>,
    #[command(flatten)]
    sampling: SamplingFlags,
    #[command(flatten)]
    common: CommonFlags,
}

fn main() -> ExitCode {
    report::run(generate)
}

fn generate(flags: Flags) -> Outcome<()> {
    let engine = {
        let progress = Progress::loading();
        let builder = flags.common.builder()?.on_load_progress(progress.bytes());
        builder.model(flags.common.model_path()).build()?
    };
    for line in &engine.info().notes {
        note(&format!("note: {line}"));
    }
    let mut session = engine.session()?;
    let generated = if flags.common.json {
        let _progress = Progress::new("writing", 0);
        session.generate_text(flags.prompt(), &flags.sampling.options()?)?
    } else {
        write_as_it_comes(&mut session, &flags)?
    };
    if flags.common.json {
        return print_json(&as_json(&engine, &generated, &flags));
    }
    note(&summary(&generated));
    Ok(())
}

impl Flags {
    fn prompt(&self) -> Prompt {
        match &self.prompt_ids {
            Some(ids) => ids.clone().into(),
            None => self.prompt.as_str().into(),
        }
    }
}

fn write_as_it_comes(session: &mut Session, flags: &Flags) -> Outcome<Generated> {
    let mut stream = session.generate(flags.prompt(), &flags.sampling.options()?)?;
    if std::io::stderr().is_terminal() && flags.prompt_ids.is_none() {
        report::echo(&flags.prompt);
    }
    for piece in stream.by_ref() {
        print(&piece?.text)?;
    }
    print("\n")?;
    Ok(stream.finish()?)
}

fn as_json(engine: &Engine, generated: &Generated, flags: &Flags) -> serde_json::Value {
    let (stats, info) = (&generated.stats, engine.info());
    // The decode steps; a text of one token has none.
    let work = if stats.decode_tokens > 0 { &stats.decode } else { &stats.prefill };
    json!({
        "prompt_ids": generated.prompt_ids,
        "ids": generated.ids,
        "text": generated.text,
        "finish_reason": generated.finish_reason.name(),
        "prefill_tokens": stats.prefill_tokens,
        "prefill_seconds": stats.prefill_time.as_secs_f64(),
        "decode_tokens": stats.decode_tokens,
        "decode_seconds": stats.decode_time.as_secs_f64(),
        "decode_tokens_per_second": stats.decode_tokens_per_second(),
        "ffn_density": work.density(),
        "ffn_density_per_layer": work.density_per_layer(),
        "picked_density": work.picked_density(),
        "weight_bytes_per_token": work.weight_bytes.checked_div(work.n_tokens).unwrap_or(0),
        "weight_bytes_resident": info.weight_bytes,
        "predictor_seconds": work.predictor_ns as f64 * 1e-9,
        "predictor": info.predictor,
        "fast_device": info.fast_device,
        "fast_bytes": info.fast_bytes,
        "split": split_json(work),
        "sparsity": info.sparsity.name(),
        "dtype": info.dtypes.join(","),
        "seed": flags.sampling.seed,
    })
}

fn summary(generated: &Generated) -> String {
    let stats = &generated.stats;
    let split = match split_line(&stats.decode) {
        Some(line) => format!("; {line}"),
        None => String::new(),
    };
    format!(
        "{} tokens ({}), prefill {:.0} tokens/s, decode {:.0} tokens/s, {:.1} % of neurons run{split}",
        generated.ids.len(),
        generated.finish_reason,
        stats.prefill_tokens_per_second(),
        stats.decode_tokens_per_second(),
        100.0 * stats.decode.density(),
    )
}
