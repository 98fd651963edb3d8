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
#[path = "support/split.rs"]
mod split;

use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use clap::Parser;
use powerinfer::models::LoadOptions;
use powerinfer::models::synthetic::Synthetic;
use powerinfer::ops::{ReadBandwidth, ThreadPool, WeightFormat, read_bandwidth};
use powerinfer::{Engine, PredictorOptions, PredictorSource, Sparsity};
use serde_json::{Value, json};

use arrangements::{Arrangement, Task, compare};
use flags::{CommonFlags, at_least_one, not_yet};
use measure::{Plan, Run, peak_memory_bytes};
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
    #[arg(long, value_name = "X", requires = "synthetic")]
    density: Option<f64>,
    /// Share of a synthetic model's neurons that makes 80 % of the activations [default: all fire
    /// alike]
    #[arg(long, value_name = "X", requires = "synthetic")]
    hot_share: Option<f64>,
    /// Layers of a synthetic model that have values of their own, which the others repeat in memory of their
    /// own: it is there sooner [default: all]
    #[arg(long, value_name = "N", requires = "synthetic", value_parser = at_least_one)]
    distinct_layers: Option<usize>,
    /// Measure the synthetic model with other parts on the fast device each time: a list of WHAT/MODE, where
    /// WHAT is one of --offload or cpu and MODE dense or exact
    #[arg(long, value_name = "LIST", value_delimiter = ',', requires = "synthetic",
          conflicts_with_all = ["compare", "offload", "plan", "vram_budget", "predictor", "write"])]
    arrangements: Vec<Arrangement>,
    /// Budgets of the fast device for --arrangements, in hundredths of the model
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "40,55,70",
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
    #[arg(long, value_name = "N", requires = "synthetic", value_parser = at_least_one)]
    predictor_rank: Option<usize>,
    /// Write the synthetic model to a folder and stop
    #[arg(long, value_name = "DIR", requires = "synthetic")]
    write: Option<PathBuf>,
    #[command(flatten)]
    common: CommonFlags,
}

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

    /// Tokens that the fast device is to have room for: those that are run.
    fn device_context(&self) -> usize {
        let longest = self.context.iter().max().copied().unwrap_or(0).max(self.p);
        // a session of a prompt, and one that repetitions write on in
        let written = self.repetitions.saturating_add(1).saturating_mul(self.n + 1);
        let tokens = longest.saturating_add(self.p).saturating_add(written);
        self.common.device_context.unwrap_or(tokens)
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
            percents: &self.budgets,
            seconds: self.seconds,
            device_context: self.device_context(),
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
            options.fast_device = flags.common.fast_device(|| wrong_usage(NO_BUDGET))?;
            if let Some(path) = &flags.common.plan {
                options.plan = Some(powerinfer::Plan::load(path)?);
            }
            options.offload = flags.common.offload();
            options.device_context = Some(flags.device_context());
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

/// All that was measured.
#[derive(Debug)]
struct Findings {
    loaded: Loaded,
    plan: Plan,
    /// And whether the second engine ran it.
    runs: Vec<(bool, Run)>,
    bandwidth: ReadBandwidth,
}

fn measure_all(loaded: Loaded, modes: &[Mode], plan: Plan, pool: &ThreadPool) -> Outcome<Findings> {
    let plan = plan.check(loaded.engine.info())?;
    let mut runs = runs(modes, &plan.contexts);
    let n_steps = (plan.repetitions as u64).saturating_mul(runs.len() as u64);
    let progress = Progress::new("measuring", n_steps);
    let before = read_bandwidth(pool, BANDWIDTH_BYTES, BANDWIDTH_PASSES)?;
    for (second, run) in &mut runs {
        run.warm_up(loaded.engine(*second))?;
    }
    for _ in 0..plan.repetitions {
        for (second, run) in &mut runs {
            run.measure(loaded.engine(*second), &plan)?;
            progress.advance(1);
        }
    }
    // Once before and once after, as other work on the machine comes and goes.
    let after = read_bandwidth(pool, BANDWIDTH_BYTES, BANDWIDTH_PASSES)?;
    let after_is_best = after.bytes_per_second > before.bytes_per_second;
    let bandwidth = if after_is_best { after } else { before };
    Ok(Findings { loaded, plan, runs, bandwidth })
}

/// Every mode with every length of the context, and whether the second engine runs it.
fn runs(modes: &[Mode], contexts: &[usize]) -> Vec<(bool, Run)> {
    let of_mode = |mode: &Mode| {
        let run = |&context: &usize| {
            let run = Run::new(mode.sparsity, context);
            let run = match &mode.name {
                Some(name) => run.named(name),
                None => run,
            };
            (mode.second, run)
        };
        contexts.iter().map(run).collect::<Vec<_>>()
    };
    modes.iter().flat_map(of_mode).collect()
}

impl Loaded {
    fn engine(&self, second: bool) -> &Engine {
        self.second.as_ref().filter(|_| second).unwrap_or(&self.engine)
    }
}

impl Findings {
    fn as_json(&self, flags: &Flags) -> Value {
        let Self { loaded, plan, runs, bandwidth } = self;
        let info = loaded.engine.info();
        json!({
            "runs": runs.iter().map(|(second, run)| run.as_json(loaded.engine(*second))).collect::<Vec<_>>(),
            "read_bandwidth_bytes_per_second": bandwidth.bytes_per_second,
            "page_kind": bandwidth.page_kind,
            "synthetic": flags.synthetic,
            "density": flags.density(),
            "predictor": info.predictor,
            "fast_device": info.fast_device,
            "fast_bytes": info.fast_bytes,
            "prompt_tokens": plan.prompt,
            "decode_tokens": plan.decode,
            "context": plan.contexts[0],
            "repetitions": plan.repetitions,
            "parameters": info.n_parameters,
            "weight_bytes_resident": info.weight_bytes,
            "load_seconds": loaded.seconds,
            "peak_memory_after_load_bytes": loaded.peak_memory_bytes,
            "peak_memory_bytes": peak_memory_bytes(),
        })
    }

    fn as_text(&self) -> String {
        let (engine, bandwidth) = (&self.loaded.engine, self.bandwidth.bytes_per_second);
        let mut text = format!(
            "read bandwidth {:.2} GB/s on {} threads ({})\n\
             mode                dtype  context  prefill tokens/s  decode tokens/s  picked    run  predicting  MB/token   GB/s  of bandwidth\n",
            bandwidth * 1e-9,
            engine.n_threads(),
            self.bandwidth.page_kind,
        );
        for (second, run) in &self.runs {
            let engine = self.loaded.engine(*second);
            let bytes_per_second = run.decode_speed() * run.weight_bytes_per_token();
            let _ = writeln!(
                text,
                "{:<19} {:<6} {:>7} {:>17.2} {:>16.2} {:>5.1} % {:>4.1} % {:>9.1} % {:>9.1} {:>6.2} {:>11.0} %",
                run.name(engine),
                engine.info().dtypes.join(","),
                run.context(),
                run.prefill_speed(),
                run.decode_speed(),
                100.0 * run.picked_density(),
                100.0 * run.density(),
                100.0 * run.predictor_share(),
                1e-6 * run.weight_bytes_per_token(),
                1e-9 * bytes_per_second,
                100.0 * bytes_per_second / bandwidth,
            );
        }
        text
    }
}
