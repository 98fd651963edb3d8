//! Prefill and decode speed, of a model or of a synthetic one, beside the machine's read
//! bandwidth.
//!
//! ```sh
//! cargo run --release --example bench
//! cargo run --release --example bench -- --synthetic llama-1b --density 0.1 --dtype f16 \
//!     --threads 2 --compare dense,exact
//! ```
//!
//! The modes run on one set of weights and take turns within each repetition, so that whatever else
//! the machine does meets them alike; medians are reported. A synthetic model has random weights of
//! real shapes whose gates fire for about `--density` of the neurons. It shows speed, never
//! quality. `--write DIR` writes it to a folder instead, to time loading it.

#[path = "support/arrangements.rs"]
mod arrangements;
#[path = "support/findings.rs"]
mod findings;
#[path = "support/flags.rs"]
mod flags;
#[path = "support/measure.rs"]
mod measure;
#[path = "support/progress.rs"]
mod progress;
#[path = "support/random_model.rs"]
mod random_model;
#[path = "support/report.rs"]
mod report;
#[path = "support/skew.rs"]
mod skew;
#[path = "support/split.rs"]
mod split;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use clap::Parser;
use powerinfer::models::LoadOptions;
use powerinfer::models::synthetic::Synthetic;
use powerinfer::ops::{ThreadPool, WeightFormat};
use powerinfer::{Engine, PredictorOptions, PredictorSource, Sparsity};
use serde_json::json;

use arrangements::{Arrangement, Task, compare};
use findings::measure_all;
use flags::{CommonFlags, at_least_one, not_yet, parse_share};
use measure::{Plan, peak_memory_bytes};
use progress::Progress;
use random_model::{SHAPES, random_model};
use report::{Outcome, note, print, print_json, wrong_usage};

/// The yardstick reads at least so much at least so often.
const BANDWIDTH_BYTES: usize = 1 << 30;
const BANDWIDTH_PASSES: usize = 5;

/// Prefill and decode speed.
#[derive(Debug, Parser)]
#[command(name = "bench")]
struct Flags {
    /// A model of random weights in a real shape
    #[arg(long, value_name = "NAME", conflicts_with = "model", value_parser = SHAPES)]
    synthetic: Option<String>,
    /// Share of a synthetic model's neurons that fire [default: 0.1]
    #[arg(long, value_name = "X", value_parser = parse_share)]
    density: Option<f64>,
    /// Share of a synthetic model's neurons that makes 80 % of the activations [default: all fire
    /// alike]
    #[arg(long, value_name = "X", value_parser = parse_share)]
    hot_share: Option<f64>,
    /// Layers of a synthetic model that have values of their own, which the others repeat in memory of their
    /// own: it is there sooner [default: all]
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    distinct_layers: Option<usize>,
    /// Measure the synthetic model with other parts on the fast device each time: a list of WHAT/MODE, where
    /// WHAT is one of --offload or cpu and MODE dense or exact
    #[arg(long, value_name = "LIST", value_delimiter = ',',
          conflicts_with_all = ["compare", "sparsity", "offload", "plan", "vram_budget", "predictor", "write"])]
    arrangements: Vec<Arrangement>,
    /// Budgets of the fast device for --arrangements, in hundredths of the model [default: 40,55,70]
    #[arg(long, value_name = "LIST", value_delimiter = ',',
          value_parser = clap::value_parser!(u64).range(0..=1000))]
    budgets: Vec<u64>,
    /// Begin no other of the --arrangements after so many seconds
    #[arg(long, value_name = "N")]
    seconds: Option<u64>,
    /// Tokens of the prompt
    #[arg(short, value_name = "N", default_value = "64", value_parser = at_least_one)]
    p: usize,
    /// Tokens to decode
    #[arg(short, value_name = "N", default_value = "32", value_parser = at_least_one)]
    n: usize,
    /// Tokens in the context when decoding begins, such as 32,2048 to compare; later repetitions go
    /// on where the first stopped [default: those of the prompt]
    #[arg(long, value_name = "N", value_delimiter = ',', value_parser = at_least_one)]
    context: Vec<usize>,
    /// Texts at once
    #[arg(long, value_name = "N", default_value = "1", value_parser = at_least_one)]
    batch: usize,
    /// How often to measure
    #[arg(long, value_name = "N", default_value = "5", value_parser = at_least_one)]
    repetitions: usize,
    /// Modes to compare, such as dense,exact [default: that of --sparsity]
    #[arg(long, value_name = "MODES", value_delimiter = ',', conflicts_with = "sparsity",
          value_parser = MODES)]
    compare: Vec<String>,
    /// Rank of a synthetic model's trained kind of predictor [default: 384]
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    predictor_rank: Option<usize>,
    /// Write the synthetic model to a folder and stop
    #[arg(long, value_name = "DIR",
          conflicts_with_all = ["compare", "sparsity", "p", "n", "context", "repetitions", "predictor"])]
    write: Option<PathBuf>,
    #[command(flatten)]
    common: CommonFlags,
}

/// Budgets of --arrangements, in hundredths of the model.
const BUDGETS: [u64; 3] = [40, 55, 70];
/// 6 % of the parameters of llama-1b.
const SYNTHETIC_RANK: usize = 384;

const SYNTHETIC_NOTE: &str =
    "note: a synthetic model of random weights: this shows speed, never quality";
const NO_BUDGET: &str = "--device hybrid with --synthetic needs --vram-budget";
const NO_PREDICTOR: &str =
    "--compare predicted:trained needs the file or folder of a predictor in --predictor";

const TRAINED: &str = "predicted:trained";
const QUANTIZED: &str = "predicted:quantized";

/// A mode to measure.
#[derive(Debug)]
struct Mode {
    /// What it was asked for as.
    name: Option<String>,
    /// `None`: as the model was loaded.
    sparsity: Option<Sparsity>,
    /// Whether it is that of the second engine.
    second: bool,
}

const MODES: [&str; 6] = ["auto", "dense", "exact", "predicted", TRAINED, QUANTIZED];

fn main() -> ExitCode {
    report::run(bench)
}

fn bench(flags: Flags) -> Outcome<()> {
    if flags.batch > 1 {
        return not_yet(&format!("--batch {}", flags.batch), "; use --batch 1");
    }
    flags.refuse_unused()?;
    let (modes, synthetic) = (flags.modes()?, flags.synthetic()?);
    let pool = flags.common.pool()?;
    if let (Some(synthetic), Some(dir)) = (&synthetic, &flags.write) {
        flags.common.refuse_fast_device()?;
        return write(synthetic, dir, &flags, &pool);
    }
    if let Some(synthetic) = synthetic.as_ref().filter(|_| !flags.arrangements.is_empty()) {
        note(SYNTHETIC_NOTE);
        return compare(&flags.comparison(synthetic), &pool);
    }
    let mut predictors = flags.predictors(&modes)?.into_iter();
    let first = predictors.next().flatten();
    let mut loaded = load(&flags, synthetic.as_ref(), first, &pool)?;
    if let Some(second) = predictors.next() {
        note("note: two kinds of predictors: the weights are in memory twice");
        loaded.second = Some(load(&flags, synthetic.as_ref(), second, &pool)?.engine);
    }
    if synthetic.is_some() {
        note(SYNTHETIC_NOTE);
    }
    for line in &loaded.engine.info().notes {
        note(&format!("note: {line}"));
    }
    let findings = measure_all(loaded, &modes, flags.plan(), &pool)?;
    if flags.common.json {
        print_json(&findings.as_json(&flags))
    } else {
        print(&findings.as_text())
    }
}

impl Flags {
    /// An error for flags that nothing comes of without another. The parser's own rule says nothing where
    /// that other one is excluded by a third.
    fn refuse_unused(&self) -> Outcome<()> {
        let is_synthetic = self.synthetic.is_some();
        let compares = !self.arrangements.is_empty();
        for (flag, given, other, is_there) in [
            ("--density", self.density.is_some(), "--synthetic", is_synthetic),
            ("--hot-share", self.hot_share.is_some(), "--synthetic", is_synthetic),
            ("--distinct-layers", self.distinct_layers.is_some(), "--synthetic", is_synthetic),
            ("--predictor-rank", self.predictor_rank.is_some(), "--synthetic", is_synthetic),
            ("--write", self.write.is_some(), "--synthetic", is_synthetic),
            ("--arrangements", compares, "--synthetic", is_synthetic),
            ("--budgets", !self.budgets.is_empty(), "--arrangements", compares),
            ("--seconds", self.seconds.is_some(), "--arrangements", compares),
            (
                "--predictor-rank",
                self.predictor_rank.is_some(),
                "--compare predicted:trained",
                self.asked(TRAINED),
            ),
        ] {
            if given && !is_there {
                let instead = match (other, &self.common.model) {
                    ("--synthetic", Some(_)) => ", and does not go with --model",
                    _ => "",
                };
                return wrong_usage(&format!("{flag} needs {other}{instead}"));
            }
        }
        if is_synthetic {
            self.common.refuse_unused(&["--holding", "--activation", "--requantise-down"])?;
        }
        if self.asked(TRAINED) && is_synthetic && self.common.predictor.is_some() {
            return wrong_usage(
                "--predictor does not go with --synthetic and --compare predicted:trained",
            );
        }
        Ok(())
    }

    /// The density of the synthetic model, if there is one.
    fn density(&self) -> Option<f64> {
        self.synthetic.as_ref().map(|_| self.density.unwrap_or(0.1))
    }

    fn synthetic(&self) -> Outcome<Option<Synthetic>> {
        let (Some(name), Some(density)) = (&self.synthetic, self.density()) else {
            return Ok(None);
        };
        let dtype = self.common.dtype().weight_format();
        random_model(name, density, self.hot_share, self.distinct_layers, dtype).map(Some)
    }

    /// Tokens that the fast device is to have room for unless told: those that are run.
    fn tokens(&self) -> usize {
        let longest = self.context.iter().max().copied().unwrap_or(0).max(self.p);
        // a session of a prompt, and one that repetitions write on in
        let written = self.repetitions.saturating_add(1).saturating_mul(self.n + 1);
        longest.saturating_add(self.p).saturating_add(written)
    }

    fn modes(&self) -> Outcome<Vec<Mode>> {
        if self.compare.is_empty() {
            return Ok(vec![Mode { name: None, sparsity: None, second: false }]);
        }
        let two_kinds = self.asked(TRAINED) && (self.asked("predicted") || self.asked(QUANTIZED));
        let mode = |name: &String| {
            let sparsity = match name.as_str() {
                QUANTIZED | TRAINED => Some(Sparsity::Predicted),
                name => Some(name.parse()?).filter(|&mode| mode != Sparsity::Auto),
            };
            let second = two_kinds && sparsity == Some(Sparsity::Predicted) && name != TRAINED;
            Ok(Mode { name: sparsity.map(|_| name.clone()), sparsity, second })
        };
        self.compare.iter().map(mode).collect()
    }

    fn asked(&self, name: &str) -> bool {
        self.compare.iter().any(|mode| mode == name)
    }

    /// The predictors of the engines that the modes need: of one, or of a second one for the quantised
    /// kind beside the trained one.
    fn predictors(&self, modes: &[Mode]) -> Outcome<Vec<Option<PredictorOptions>>> {
        if !self.asked(TRAINED) {
            let predicted = modes.iter().any(|mode| mode.sparsity == Some(Sparsity::Predicted));
            let default = || predicted.then(Default::default);
            return Ok(vec![self.common.predictor().or_else(default)]);
        }
        let trained = match self.density() {
            None => self.common.predictor().map_or_else(|| wrong_usage(NO_PREDICTOR), Ok)?,
            Some(density) => {
                let rank = self.predictor_rank.unwrap_or(SYNTHETIC_RANK);
                let random = PredictorOptions::new(PredictorSource::Random { rank, density });
                random.with_dtype(Some(self.common.predictor_dtype.unwrap_or(WeightFormat::Q8_0)))
            }
        };
        let mut all = vec![Some(trained)];
        if modes.iter().any(|mode| mode.second) {
            all.push(Some(PredictorOptions::default()));
        }
        Ok(all)
    }

    /// The task of `--arrangements`.
    fn comparison<'a>(&'a self, synthetic: &'a Synthetic) -> Task<'a> {
        Task {
            common: &self.common,
            synthetic,
            arrangements: &self.arrangements,
            percents: if self.budgets.is_empty() { &BUDGETS } else { &self.budgets },
            seconds: self.seconds,
            tokens: self.tokens(),
            plan: self.plan(),
            about: json!({
                "synthetic": self.synthetic,
                "density": self.density(),
                "hot_share": self.hot_share,
                "prompt_tokens": self.p,
                "decode_tokens": self.n,
                "repetitions": self.repetitions,
            }),
        }
    }

    fn plan(&self) -> Plan {
        let mut contexts = self.context.clone();
        if contexts.is_empty() {
            contexts.push(self.p);
        }
        Plan { prompt: self.p, decode: self.n, contexts, repetitions: self.repetitions }
    }
}

/// An engine and what loading it took.
#[derive(Debug)]
struct Loaded {
    engine: Engine,
    /// One with another predictor.
    second: Option<Engine>,
    seconds: f64,
    peak_memory_bytes: Option<u64>,
}

fn load(
    flags: &Flags,
    synthetic: Option<&Synthetic>,
    predictor: Option<PredictorOptions>,
    pool: &ThreadPool,
) -> Outcome<Loaded> {
    let progress = Progress::loading();
    let began = Instant::now();
    let engine = match synthetic {
        Some(synthetic) => {
            let mut options = LoadOptions::default()
                .with_dtype(flags.common.dtype().weight_format())
                .with_kv_dtype(flags.common.kv_dtype())
                .with_sparsity(flags.common.sparsity())
                .with_progress(progress.bytes());
            options.predictor = predictor;
            options.plan = flags.common.load_plan()?;
            let no_budget = || wrong_usage(NO_BUDGET);
            options.fast_device = flags.common.fast_device_for(options.plan.as_ref(), no_budget)?;
            if let Some(device) = &options.fast_device {
                flags.common.check_device_context(options.plan.as_ref(), device.as_ref())?;
            }
            options.offload = flags.common.offload();
            options.device_context = flags.common.device_context;
            options.max_context = Some(flags.tokens());
            let threads = match &options.fast_device {
                Some(device) => flags.common.threads_beside(device.as_ref())?.get(),
                None => pool.n_threads(),
            };
            let made = pool.install(|| synthetic.load(&options))?;
            Engine::builder().causal_lm(made).threads(threads).build()?
        }
        None => {
            let builder = flags.common.builder()?.model(flags.common.model_path());
            let builder = builder.on_load_progress(progress.bytes());
            match predictor {
                Some(predictor) => builder.predictor(predictor).build()?,
                None => builder.build()?,
            }
        }
    };
    let seconds = began.elapsed().as_secs_f64();
    Ok(Loaded { engine, second: None, seconds, peak_memory_bytes: peak_memory_bytes() })
}

fn write(synthetic: &Synthetic, dir: &Path, flags: &Flags, pool: &ThreadPool) -> Outcome<()> {
    let format = flags.common.dtype().weight_format().unwrap_or(WeightFormat::F16);
    let began = Instant::now();
    {
        let _progress = Progress::new("writing", 0);
        pool.install(|| synthetic.write(dir, format))?;
    }
    let bytes = std::fs::metadata(dir.join("model.safetensors")).map_or(0, |file| file.len());
    let seconds = began.elapsed().as_secs_f64();
    if flags.common.json {
        return print_json(&json!({"path": dir, "bytes": bytes, "seconds": seconds}));
    }
    print(&format!("{bytes} bytes written to {} in {seconds:.1} s\n", dir.display()))
}
