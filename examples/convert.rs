//! Writes a model as a GGUF file, plain or PowerInfer's, in another type if asked.
//!
//! ```sh
//! cargo run --release --example convert -- --out demo.gguf
//! cargo run --release --example convert -- --model relu-llama-7b --powerinfer --dtype q4_0 --out relu-llama-7b.q4_0.gguf
//! ```

#[path = "support/flags.rs"]
mod flags;
#[path = "support/progress.rs"]
mod progress;
#[path = "support/report.rs"]
mod report;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use powerinfer::models::{ConvertOptions, PredictorTensors, convert, open};
use powerinfer::{PredictorSource, tokenizer_keys};
use serde_json::json;

use flags::{CommonFlags, not_yet};
use progress::Progress;
use report::{Outcome, note, print, print_json};

/// Writes a model as a GGUF file.
#[derive(Debug, Parser)]
#[command(name = "convert")]
struct Flags {
    /// The file to write
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    /// Write PowerInfer's kind of file, for ReLU models
    #[arg(long)]
    powerinfer: bool,
    #[command(flatten)]
    common: CommonFlags,
}

fn main() -> ExitCode {
    report::run(write)
}

fn write(flags: Flags) -> Outcome<()> {
    let common = &flags.common;
    common.refuse_fast_device()?;
    common.refuse_unused(&[
        "--holding",
        "--requantise-down",
        "--kv-dtype",
        "--sparsity",
        "--predictor-shift",
        "--predictor-dtype",
    ])?;
    let model = common.model_path();
    let mut options = ConvertOptions::default()
        .with_powerinfer(flags.powerinfer)
        .with_dtype(common.dtype().weight_format());
    options.load = common.load_options();
    let (config, _) = open(&model, &options.load)?;
    match &common.predictor {
        None => {}
        Some(PredictorSource::Folder(dir)) => {
            let predictor = PredictorTensors::from_folder(dir, config.n_layers)?;
            options = options.with_predictor(predictor);
        }
        Some(PredictorSource::File(path)) => {
            let predictor = PredictorTensors::from_file(path, config.n_layers)?;
            options = options.with_predictor(predictor);
        }
        Some(_) => return not_yet("writing another predictor than a file's or a folder's", ""),
    }
    if model.is_dir() {
        match tokenizer_keys(&model, config.vocab_size) {
            Ok(keys) => options.keys = keys,
            Err(error) => note(&format!("note: {error}: the file takes token ids only")),
        }
    }
    let converted = {
        let bar = Progress::new("writing", 1);
        let written = &mut |done, of| bar.reach(done, of);
        common.pool()?.install(|| convert(&model, &flags.out, &options, written))?
    };
    for line in &converted.notes {
        note(&format!("note: {line}"));
    }
    let (bytes, tensors) = (converted.bytes, converted.n_tensors);
    if common.json {
        return print_json(&json!({"bytes": bytes, "tensors": tensors, "notes": converted.notes}));
    }
    print(&format!("{bytes} bytes, {tensors} tensors written to {}\n", flags.out.display()))
}
