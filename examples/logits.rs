//! Runs token ids through a model and writes the logits after each of them.
//!
//! ```sh
//! cargo run --release --example logits -- --ids 1,1388,342,261,1988
//! cargo run --release --example logits -- --ids 1,1388,342 --chunks 2,1 --out logits.safetensors
//! ```
//!
//! The file holds `logits`, f32 `[n_tokens, vocab_size]`, and `ffn_active`, i64 `[n_layers]`: the
//! neurons that fired, summed over the tokens.

#[path = "support/flags.rs"]
mod flags;
#[path = "support/progress.rs"]
mod progress;
#[path = "support/report.rs"]
mod report;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::error::ErrorKind;
use clap::{CommandFactory, Parser};
use powerinfer::{Engine, Error, StepStats};
use safetensors::tensor::{Dtype, TensorView, serialize};
use serde_json::json;

use flags::CommonFlags;
use progress::Progress;
use report::{Outcome, print, print_json};

/// What the demo model is asked about when nothing else is.
const DEFAULT_TEXT: &str = "It was a truth";

/// Runs token ids through a model and writes the logits.
#[derive(Debug, Parser)]
#[command(name = "logits")]
struct Flags {
    /// Token ids, fed as they are [default: those of "It was a truth"]
    #[arg(long, value_name = "1,2,3", value_delimiter = ',')]
    ids: Option<Vec<u32>>,
    /// Sizes of the pieces to feed over one cache [default: one piece]
    #[arg(long, value_name = "5,1,1", value_delimiter = ',')]
    chunks: Option<Vec<usize>>,
    /// Where to write the logits
    #[arg(long, value_name = "FILE.safetensors")]
    out: Option<PathBuf>,
    #[command(flatten)]
    common: CommonFlags,
}

/// The logits of all tokens, from however many pieces.
#[derive(Debug, Default)]
struct Rows {
    vocab_size: usize,
    values: Vec<f32>,
    stats: StepStats,
}

fn main() -> ExitCode {
    report::run(logits)
}

fn logits(flags: Flags) -> Outcome<()> {
    let builder = flags.common.builder()?;
    if let Some(ids) = &flags.ids {
        chunk_sizes(flags.chunks.as_deref(), ids.len())?;
    }
    let _progress = Progress::new("running", 0);
    let engine = builder.model(flags.common.model_path()).build()?;
    let ids = match flags.ids {
        Some(ids) => ids,
        None => default_ids(&engine)?,
    };
    let sizes = chunk_sizes(flags.chunks.as_deref(), ids.len())?;
    let rows = run(&engine, &ids, &sizes)?;
    if let Some(path) = &flags.out {
        rows.write(path)?;
    }
    let top1 = rows.top1();
    if flags.common.json {
        return print_json(&json!({
            "n_tokens": ids.len(),
            "vocab_size": rows.vocab_size,
            "top1": top1,
            "ffn_active": rows.stats.fired_per_layer,
            "fast_device": engine.info().fast_device,
        }));
    }
    for (id, top) in ids.iter().zip(top1) {
        print(&format!("after {id}: {top}{}\n", spelled(&engine, top)))?;
    }
    Ok(())
}

fn default_ids(engine: &Engine) -> powerinfer::Result<Vec<u32>> {
    let tokenizer = engine.tokenizer();
    tokenizer.ok_or(Error::NoTokenizer { what: "the default of --ids" })?.encode(DEFAULT_TEXT, true)
}

/// The pieces to feed; sizes that do not add up are wrong usage.
fn chunk_sizes(asked: Option<&[usize]>, n_tokens: usize) -> Result<Vec<usize>, clap::Error> {
    let sizes = asked.map_or_else(|| vec![n_tokens], <[usize]>::to_vec);
    let sum = sizes.iter().try_fold(0usize, |sum, &size| sum.checked_add(size));
    if sum == Some(n_tokens) && !sizes.contains(&0) {
        return Ok(sizes);
    }
    let found = sizes.iter().map(usize::to_string).collect::<Vec<_>>().join(",");
    let message = format!("--chunks {found}: expected sizes above 0 that add up to {n_tokens}");
    Err(Flags::command().error(ErrorKind::ValueValidation, message))
}

fn run(engine: &Engine, ids: &[u32], sizes: &[usize]) -> powerinfer::Result<Rows> {
    let mut session = engine.session()?;
    let mut rows = Rows::default();
    let mut rest = ids;
    for &size in sizes {
        let (chunk, after) = rest.split_at(size);
        rest = after;
        let logits = session.logits(chunk)?;
        rows.vocab_size = logits.vocab_size;
        rows.values.extend_from_slice(&logits.values);
        rows.stats.merge(&logits.stats);
    }
    Ok(rows)
}

impl Rows {
    /// The likeliest next token after each token, of equals the first.
    fn top1(&self) -> Vec<usize> {
        let best = |row: &[f32]| {
            let ids = (0..row.len()).rev();
            ids.max_by(|&a, &b| row[a].total_cmp(&row[b])).unwrap_or(0)
        };
        self.values.chunks_exact(self.vocab_size.max(1)).map(best).collect()
    }

    fn write(&self, path: &Path) -> Outcome<()> {
        let logits: Vec<u8> = self.values.iter().flat_map(|x| x.to_le_bytes()).collect();
        let fired: Vec<u8> =
            self.stats.fired_per_layer.iter().flat_map(|n| n.to_le_bytes()).collect();
        let shape = vec![self.values.len() / self.vocab_size.max(1), self.vocab_size];
        let n_layers = vec![self.stats.fired_per_layer.len()];
        let tensors = [
            ("logits", TensorView::new(Dtype::F32, shape, &logits)?),
            ("ffn_active", TensorView::new(Dtype::I64, n_layers, &fired)?),
        ];
        // written through links and devices: nothing at `path` is replaced by another file
        let bytes = serialize(tensors, None)?;
        std::fs::write(path, bytes)
            .map_err(|source| Unwritten { path: path.to_path_buf(), source })?;
        Ok(())
    }
}

/// The token's text, where the model has a tokenizer.
fn spelled(engine: &Engine, id: usize) -> String {
    let id = u32::try_from(id).unwrap_or(u32::MAX);
    let text = engine.tokenizer().and_then(|tokenizer| tokenizer.decode(&[id]).ok());
    text.map_or_else(String::new, |text| format!(" {text:?}"))
}

#[derive(Debug, thiserror::Error)]
#[error("cannot write {}", path.display())]
struct Unwritten {
    path: PathBuf,
    source: std::io::Error,
}
