//! Makes a predictor of which neurons fire, for a ReLU model, from text.
//!
//! ```sh
//! cargo run --release --example train_predictor -- --out demo.safetensors
//! cargo run --release --example perplexity -- --predictor demo.safetensors
//! cargo run --release --example train_predictor -- --method svd --text corpus.txt --out svd.safetensors
//! ```
//!
//! `trained` fits two thin layers to what the model does over the text, each layer of the model with a
//! rank of its own; `svd` factors the gates and takes thresholds from the text; `quantized`, which
//! loading makes by itself, is only measured. What is reported was measured on parts of the text that were held
//! out. `--checkpoint FILE` keeps the state after each piece of text: after Ctrl-C the same command goes on
//! from there, and gives the same bytes as an uninterrupted run.
//! `--original` makes the original's form, which its folders (an `--out` that does not end in
//! `.safetensors`) and PowerInfer's GGUF files can hold.

#[path = "support/corpus.rs"]
mod corpus;
#[path = "support/flags.rs"]
mod flags;
#[path = "support/interrupt.rs"]
mod interrupt;
#[path = "support/progress.rs"]
mod progress;
#[path = "support/report.rs"]
mod report;

use std::fmt::Write;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use clap::{Parser, ValueEnum};
use powerinfer::Tokenizer;
use powerinfer::core::{
    CausalLm, Error as CoreError, PredictionCounts, Sparsity, Step, WantedLogits,
};
use powerinfer::models::{
    Error, PredictorOptions, PredictorSource, TrainMethod, TrainOptions, TrainStage,
    TrainedPredictor, load, train_predictor,
};
use powerinfer::ops::{LowBitFormat, ThreadPool};
use powerinfer::predictor::PredictionTarget;
use serde_json::json;

use flags::{CommonFlags, at_least_one};
use interrupt::stop_on_ctrl_c;
use progress::Progress;
use report::{Outcome, check_outputs, print, print_json, wrong_usage};

/// Makes a predictor of which neurons fire.
#[derive(Debug, Parser)]
#[command(name = "train_predictor")]
struct Flags {
    /// A UTF-8 text; may be given several times [default: the training texts in assets/]
    #[arg(long, value_name = "FILE")]
    text: Vec<PathBuf>,
    /// Where the predictor goes
    #[arg(long, value_name = "FILE", conflicts_with = "bits")]
    out: Option<PathBuf>,
    /// How it is made
    #[arg(long, value_enum, default_value = "trained")]
    method: Method,
    /// Bits a weight of the quantized one
    #[arg(long, value_name = "N")]
    bits: Option<LowBitFormat>,
    /// Share of the activation mass that each layer is to list
    #[arg(long, value_name = "X", default_value_t = 0.975)]
    target_recall: f64,
    /// The most neurons that a layer may list, as a share of all, even if that misses the target
    #[arg(long, value_name = "X", default_value_t = 1.0)]
    max_density: f64,
    /// The most parameters, as a share of the model's
    #[arg(long, value_name = "X", default_value_t = 0.1)]
    max_share: f64,
    /// Use so many tokens at most, evenly of all texts
    #[arg(long, value_name = "N", default_value = "400000", value_parser = at_least_one)]
    max_tokens: usize,
    /// Decides everything that is random
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Make the original's form: a ReLU between, on the residual stream
    #[arg(long)]
    original: bool,
    /// Keep the state here, and go on from it if it is there
    #[arg(long, value_name = "FILE")]
    checkpoint: Option<PathBuf>,
    #[command(flatten)]
    common: CommonFlags,
}

impl Flags {
    /// What could only fail after the work.
    fn check(&self) -> Outcome<()> {
        let quantized = self.method == Method::Quantized;
        if self.bits.is_some() && !quantized {
            return wrong_usage("--bits goes with --method quantized");
        }
        let Some(out) = &self.out else { return Ok(()) };
        if quantized {
            return wrong_usage(
                "--method quantized writes no file: loading makes the copies (--predictor quantized)",
            );
        }
        if out.extension().is_some_and(|end| end == "safetensors") {
            return check_outputs(&[&self.out, &self.checkpoint]);
        }
        match self.original {
            true => check_outputs(&[&self.checkpoint]),
            false => wrong_usage(
                "--out ends in .safetensors, or names the folder of an --original predictor",
            ),
        }
    }

    /// What is left of a run that was broken off.
    fn interrupted(&self) -> Interrupted {
        match self.checkpoint.clone() {
            Some(path) if path.exists() => Interrupted::Kept(path),
            Some(path) => Interrupted::TooEarly(path),
            None => Interrupted::Nothing,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Method {
    Trained,
    Svd,
    Quantized,
}

/// Somebody pressed Ctrl-C.
#[derive(Debug, thiserror::Error)]
enum Interrupted {
    #[error("interrupted; {} holds what was fitted, and the same command goes on from there", .0.display())]
    Kept(PathBuf),
    #[error("interrupted before there was anything to keep in {}", .0.display())]
    TooEarly(PathBuf),
    #[error("interrupted; nothing is kept without --checkpoint")]
    Nothing,
}

/// What is reported of any method.
#[derive(Debug)]
struct Findings {
    method: &'static str,
    counts: Vec<PredictionCounts>,
    ranks: Vec<Option<usize>>,
    thresholds: Vec<Option<f32>>,
    parameters: u64,
    model_parameters: u64,
    tokens: usize,
    held_out: usize,
    finished: bool,
    seconds: f64,
}

fn main() -> ExitCode {
    report::run(train)
}

fn train(flags: Flags) -> Outcome<()> {
    flags.common.refuse_fast_device()?;
    flags.common.refuse_unused(&flags::OF_AN_ENGINE)?;
    flags.check()?;
    let pool = flags.common.pool()?;
    let tokens = tokens(&flags)?;
    let began = Instant::now();
    let mut findings = match flags.method {
        Method::Quantized => quantized(&flags, &tokens, &pool)?,
        Method::Trained => fitted(&flags, TrainMethod::Trained, &tokens, &pool)?,
        Method::Svd => fitted(&flags, TrainMethod::Svd, &tokens, &pool)?,
    };
    findings.seconds = began.elapsed().as_secs_f64();
    if flags.common.json { print_json(&findings.as_json()) } else { print(&findings.as_text()) }
}

/// The ids of all texts, of each as many.
fn tokens(flags: &Flags) -> Outcome<Vec<u32>> {
    let dir = flags.common.model_path();
    let tokenizer = match dir.is_file() {
        true => Tokenizer::from_gguf(&dir)?,
        false => Tokenizer::from_file(dir.join("tokenizer.json"))?,
    };
    let paths = if flags.text.is_empty() { default_texts() } else { flags.text.clone() };
    let each = flags.max_tokens.div_ceil(paths.len());
    let mut all = Vec::new();
    for path in &paths {
        let text = corpus::read_text(path)?;
        let mut ids = corpus::tokenize(&tokenizer, &text, end_id(&tokenizer))?;
        ids.truncate(each);
        all.extend(ids);
    }
    Ok(all)
}

/// The end of a document, where the tokenizer has the usual name for it.
fn end_id(tokenizer: &Tokenizer) -> Option<u32> {
    ["</s>", "<|endoftext|>"].into_iter().find_map(|token| tokenizer.token_id(token))
}

fn default_texts() -> Vec<PathBuf> {
    let dir = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("assets/text");
    ["austen.train.txt", "moby.train.txt"].map(|name| dir.join(name)).to_vec()
}

fn fitted(
    flags: &Flags,
    method: TrainMethod,
    tokens: &[u32],
    pool: &ThreadPool,
) -> Outcome<Findings> {
    let model = {
        let progress = Progress::loading();
        let options = flags.common.load_options().with_dtype(flags.common.dtype().weight_format());
        let options = options.with_progress(progress.bytes());
        pool.install(|| load(&flags.common.model_path(), &options))?
    };
    let mut target = PredictionTarget::default();
    (target.recall_mass, target.max_density) = (flags.target_recall, flags.max_density);
    let options = TrainOptions::new(method)
        .with_target(target)
        .with_share_of_model(flags.max_share)
        .with_original(flags.original)
        .with_seed(flags.seed)
        .with_checkpoint(flags.checkpoint.clone());
    let bar = Progress::new("making", 1);
    let stop = stop_on_ctrl_c();
    let mut report = |stage: &TrainStage| {
        match *stage {
            TrainStage::Survey { done, of } | TrainStage::Fit { done, of, .. } => {
                bar.reach(done as u64, of as u64);
            }
            TrainStage::Factors { layer, of } | TrainStage::Ranks { layer, of } => {
                bar.reach(layer as u64, of as u64);
            }
            _ => {}
        }
        if stop.is_cancelled() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    let made = pool.install(|| train_predictor(&*model, tokens, &options, &mut report));
    drop(bar);
    let made = match made {
        Err(Error::Core(CoreError::Cancelled)) => return Err(flags.interrupted().into()),
        made => made?,
    };
    if let Some(path) = &flags.out {
        match path.extension().is_some_and(|end| end == "safetensors") {
            true => made.predictor.save(path)?,
            false => made.predictor.save_folder(path)?,
        }
    }
    Ok(Findings::of_trained(made, model.info().n_parameters))
}

/// Measures what loading makes by itself.
fn quantized(flags: &Flags, tokens: &[u32], pool: &ThreadPool) -> Outcome<Findings> {
    let predictor = PredictorOptions::new(PredictorSource::Quantized(flags.bits)).with_floor(0.0);
    let options = flags
        .common
        .load_options()
        .with_dtype(flags.common.dtype().weight_format())
        .with_predictor(predictor);
    let model = pool.install(|| load(&flags.common.model_path(), &options))?;
    let info = model.info();
    let defaults = TrainOptions::new(TrainMethod::Svd);
    let context = defaults.context.min(info.max_context);
    let windows: Vec<&[u32]> = tokens.chunks_exact(context).collect();
    let n = (defaults.held_out / context).clamp(1, windows.len().max(1));
    let mut step = Step {
        wanted: WantedLogits::None,
        sparsity: Some(Sparsity::Exact),
        measure_prediction: true,
        ..Step::default()
    };
    let bar = Progress::new("measuring", n as u64);
    let mut cache = model.new_cache();
    for i in 0..n.min(windows.len()) {
        cache.clear();
        let window = windows[(2 * i + 1) * windows.len() / (2 * n)];
        pool.install(|| model.forward(window, &mut cache, &mut step))?;
        bar.advance(1);
    }
    let (n_layers, gate) = (info.n_layers, (info.d_ff * info.d_model) as u64);
    Ok(Findings {
        method: "quantized",
        counts: step.stats.prediction_per_layer,
        ranks: vec![None; n_layers],
        thresholds: vec![None; n_layers],
        parameters: gate * n_layers as u64,
        model_parameters: info.n_parameters,
        tokens: 0,
        held_out: n * context,
        finished: true,
        seconds: 0.0,
    })
}

impl Findings {
    fn of_trained(made: TrainedPredictor, model_parameters: u64) -> Self {
        let layers = &made.predictor.layers;
        Self {
            method: if made.predictor.method == "svd" { "svd" } else { "trained" },
            ranks: layers.iter().map(|weights| Some(weights.rank)).collect(),
            thresholds: layers.iter().map(|weights| Some(weights.threshold)).collect(),
            parameters: layers.iter().map(|weights| weights.n_parameters()).sum(),
            counts: made.counts,
            model_parameters,
            tokens: made.n_tokens,
            held_out: made.n_held_out,
            finished: made.finished,
            seconds: 0.0,
        }
    }

    fn share_of_model(&self) -> f64 {
        self.parameters as f64 / self.model_parameters.max(1) as f64
    }

    /// All layers together.
    fn all(&self) -> PredictionCounts {
        self.counts.iter().fold(PredictionCounts::default(), |mut sum, counts| {
            sum += *counts;
            sum
        })
    }

    fn as_json(&self) -> serde_json::Value {
        let layers: Vec<_> = (0..self.counts.len())
            .map(|layer| {
                let counts = &self.counts[layer];
                json!({
                    "rank": self.ranks[layer],
                    "threshold": self.thresholds[layer],
                    "recall": counts.recall(),
                    "recall_mass": counts.recall_mass(),
                    "density": counts.picked_density(),
                    "fired_density": counts.fired_density(),
                })
            })
            .collect();
        let all = self.all();
        json!({
            "method": self.method,
            "layers": layers,
            "recall": all.recall(),
            "recall_mass": all.recall_mass(),
            "density": all.picked_density(),
            "fired_density": all.fired_density(),
            "parameters": self.parameters,
            "share_of_model": self.share_of_model(),
            "tokens": self.tokens,
            "held_out_tokens": self.held_out,
            "finished": self.finished,
            "seconds": self.seconds,
        })
    }

    fn as_text(&self) -> String {
        let mut text =
            String::from("layer  rank  threshold  fires    listed   per firing  recall  of mass\n");
        let mut line = |name: String,
                        rank: String,
                        threshold: String,
                        counts: &PredictionCounts| {
            let _ = writeln!(
                text,
                "{name:>5} {rank:>5} {threshold:>10} {:>5.2} % {:>6.2} % {:>10.2} {:>8.2} % {:>6.2} %",
                100.0 * counts.fired_density(),
                100.0 * counts.picked_density(),
                counts.picked as f64 / counts.fired.max(1) as f64,
                100.0 * counts.recall(),
                100.0 * counts.recall_mass(),
            );
        };
        for (layer, counts) in self.counts.iter().enumerate() {
            let rank = self.ranks[layer].map_or("-".to_owned(), |rank| rank.to_string());
            let threshold = self.thresholds[layer].map_or("-".to_owned(), |t| format!("{t:.3}"));
            line(layer.to_string(), rank, threshold, counts);
        }
        line("all".to_owned(), String::new(), String::new(), &self.all());
        let _ = writeln!(
            text,
            "{} parameters, {:.1} % of the model; {} tokens, measured on {} others, {:.0} s",
            self.parameters,
            100.0 * self.share_of_model(),
            self.tokens,
            self.held_out,
            self.seconds,
        );
        text
    }
}
