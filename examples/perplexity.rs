//! Perplexity of a text: how surprised a model is by each of its tokens.
//!
//! ```sh
//! cargo run --release --example perplexity -- --text assets/text/austen.val.txt
//! ```
//!
//! The text is tokenised without special tokens (a NUL byte ends a document) and cut into windows
//! of `--context` tokens; what is left over is dropped. Each window is fed as the
//! beginning-of-sequence token and all its tokens but the last, and all are scored. A model
//! without a beginning-of-sequence token cannot score the first of a window.

#[path = "support/corpus.rs"]
mod corpus;
#[path = "support/flags.rs"]
mod flags;
#[path = "support/progress.rs"]
mod progress;
#[path = "support/report.rs"]
mod report;
#[path = "support/score.rs"]
mod score;
#[path = "support/split.rs"]
mod split;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use clap::Parser;
use powerinfer::{Engine, Error, Sparsity, Tokenizer};
use serde_json::json;

use flags::{CommonFlags, at_least_one};
use progress::Progress;
use report::{Outcome, note, print, print_json};
use score::{Score, Window, windows};
use split::split_json;

/// Perplexity of a text.
#[derive(Debug, Parser)]
#[command(name = "perplexity")]
struct Flags {
    /// A UTF-8 text [default: the held-out Austen text in assets/]
    #[arg(long, value_name = "FILE")]
    text: Option<PathBuf>,
    /// Tokens of a window
    #[arg(long, value_name = "N", default_value = "512", value_parser = at_least_one)]
    context: usize,
    /// Score the first N tokens of the text only
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    max_tokens: Option<usize>,
    #[command(flatten)]
    common: CommonFlags,
}

fn main() -> ExitCode {
    report::run(perplexity)
}

fn perplexity(flags: Flags) -> Outcome<()> {
    let mut builder = flags.common.builder()?;
    if flags.common.plan.is_none() {
        // as much as a window is long
        builder = builder.max_context(flags.context);
    }
    let path = flags.text.clone().unwrap_or_else(default_text);
    let text = corpus::read_text(&path)?;
    let engine = {
        let progress = Progress::loading();
        let builder = builder.on_load_progress(progress.bytes());
        builder.model(flags.common.model_path()).build()?
    };
    let tokenizer = engine.tokenizer().ok_or(Error::NoTokenizer { what: "--text" })?;
    let end_id = engine.info().eos_token_ids.first().copied();
    let mut ids = corpus::tokenize(tokenizer, &text, end_id)?;
    ids.truncate(flags.max_tokens.unwrap_or(usize::MAX));
    let windows = windows(&ids, flags.context, begin_id(tokenizer)?)?;

    let began = Instant::now();
    let score = score_all(&engine, &windows)?;
    let tokens_per_second = score.tokens as f64 / began.elapsed().as_secs_f64();
    let quality = score.stats.prediction();
    for line in &engine.info().notes {
        note(&format!("note: {line}"));
    }
    if flags.common.json {
        return print_json(&json!({
            "perplexity": score.perplexity(),
            "tokens": score.tokens,
            "ffn_density": score.stats.density(),
            "picked_density": score.stats.picked_density(),
            "recall": quality.map(|counts| counts.recall()),
            "recall_mass": quality.map(|counts| counts.recall_mass()),
            "fired_density": quality.map(|counts| counts.fired_density()),
            "predictor": engine.info().predictor,
            "fast_device": engine.info().fast_device,
            "split": split_json(&score.stats),
            "tokens_per_second": tokens_per_second,
            "sparsity": engine.info().sparsity.name(),
            "dtype": engine.info().dtypes.join(","),
        }));
    }
    if let Some(counts) = quality {
        print(&format!(
            "{:.2} % of neurons picked, {:.2} % fire; of these {:.2} % are picked, with {:.3} % of \
             their mass\n",
            100.0 * counts.picked_density(),
            100.0 * counts.fired_density(),
            100.0 * counts.recall(),
            100.0 * counts.recall_mass(),
        ))?;
    }
    print(&format!(
        "perplexity {:.4} over {} tokens ({} windows of {}), {:.1} % of neurons run, {:.0} tokens/s\n",
        score.perplexity(),
        score.tokens,
        windows.len(),
        flags.context,
        100.0 * score.stats.density(),
        tokens_per_second,
    ))
}

fn default_text() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("assets/text/austen.val.txt")
}

/// The token that the tokenizer begins a text with, if it does.
fn begin_id(tokenizer: &Tokenizer) -> powerinfer::Result<Option<u32>> {
    Ok(tokenizer.encode("", true)?.first().copied())
}

fn score_all(engine: &Engine, windows: &[Window<'_>]) -> powerinfer::Result<Score> {
    let progress = Progress::new("scoring", windows.len() as u64);
    let mut session = engine.session()?;
    session.measure_prediction(engine.info().sparsity == Sparsity::Predicted);
    let mut score = Score::default();
    for window in windows {
        session.reset();
        let logits = session.logits(&window.fed)?;
        score.add(&logits, window.scored);
        progress.advance(1);
    }
    Ok(score)
}
