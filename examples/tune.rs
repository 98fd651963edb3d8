//! The curve of perplexity against speed over the knob of predictors, with the dense and the exact
//! point.
//!
//! ```sh
//! cargo run --release --example tune
//! cargo run --release --example tune -- --predictors trained.safetensors,svd.safetensors,quantized:3 \
//!     --report curve.svg
//! ```
//!
//! Each predictor is run at each of `--shifts`: above 0 it lists more neurons and loses less.

#[path = "support/corpus.rs"]
mod corpus;
#[path = "support/curve_plot.rs"]
mod curve_plot;
#[path = "support/flags.rs"]
mod flags;
#[path = "support/measure.rs"]
#[allow(dead_code, reason = "an example of its own uses the rest")]
mod measure;
#[path = "support/progress.rs"]
mod progress;
#[path = "support/report.rs"]
mod report;
#[path = "support/score.rs"]
mod score;
#[path = "support/split.rs"]
mod split;
#[path = "support/svg.rs"]
mod svg;

use std::fmt::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use powerinfer::{Engine, Error, GenerateOptions, PredictorOptions, PredictorSource, Sparsity};
use serde_json::{Value, json};

use curve_plot::{Curve, curve_plot};
use flags::{CommonFlags, at_least_one, parse_predictor};
use measure::{median, some_ids};
use progress::Progress;
use report::{Outcome, check_outputs, note, print, print_json, write_text, wrong_usage};
use score::{Score, Window, windows};

/// Perplexity against speed over the knob of predictors.
#[derive(Debug, Parser)]
#[command(name = "tune")]
struct Flags {
    /// A UTF-8 text [default: the held-out Moby-Dick text in assets/]
    #[arg(long, value_name = "FILE")]
    text: Option<PathBuf>,
    /// Where a plot goes
    #[arg(long, value_name = "FILE.svg")]
    report: Option<PathBuf>,
    /// Predictors to compare: files, folders, quantized, quantized:N
    /// [default: that of --predictor, or quantized:2,quantized:3,quantized:4]
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = parse_predictor)]
    predictors: Vec<PredictorSource>,
    /// Settings of the knob
    #[arg(
        long,
        value_name = "LIST",
        value_delimiter = ',',
        allow_hyphen_values = true,
        default_value = "-1,-0.5,-0.25,0,0.25,0.5"
    )]
    shifts: Vec<f32>,
    /// Tokens of a window
    #[arg(long, value_name = "N", default_value = "512", value_parser = at_least_one)]
    context: usize,
    /// Score the first N tokens of the text only
    #[arg(long, value_name = "N", default_value = "4096", value_parser = at_least_one)]
    max_tokens: usize,
    /// Tokens to decode for a measurement of speed
    #[arg(short, value_name = "N", default_value = "64", value_parser = at_least_one)]
    n: usize,
    /// Measurements of speed, of which the median counts
    #[arg(long, value_name = "N", default_value = "3", value_parser = at_least_one)]
    repetitions: usize,
    #[command(flatten)]
    common: CommonFlags,
}

/// One setting and what it gives.
#[derive(Debug)]
struct Point {
    mode: Sparsity,
    /// Its name and the shift.
    predictor: Option<(String, f32)>,
    perplexity: f64,
    decode_tokens_per_second: f64,
    weight_bytes_per_token: f64,
    score: Score,
}

fn main() -> ExitCode {
    report::run(tune)
}

fn tune(flags: Flags) -> Outcome<()> {
    flags.common.refuse_fast_device()?;
    flags.common.refuse_unused(&["--sparsity", "--predictor-shift"])?;
    if flags.common.predictor.is_some() && !flags.predictors.is_empty() {
        return wrong_usage("--predictor does not go with --predictors");
    }
    check_outputs(&[&flags.report])?;
    let path = flags.text.clone().unwrap_or_else(default_text);
    let text = corpus::read_text(&path)?;
    let predictors = flags.predictors();
    let n_points = 2 + predictors.len() * flags.shifts.len();
    let bar = Progress::new("measuring", n_points as u64);
    let mut points = Vec::with_capacity(n_points);
    for mode in [Sparsity::Dense, Sparsity::Exact] {
        let engine = flags.engine(mode, None)?;
        points.push(measure(&flags, &engine, &text, None)?);
        bar.advance(1);
    }
    for source in &predictors {
        for &shift in &flags.shifts {
            let options = PredictorOptions::new(source.clone())
                .with_shift(shift)
                .with_dtype(flags.common.predictor_dtype);
            let engine = flags.engine(Sparsity::Predicted, Some(options))?;
            for line in &engine.info().notes {
                note(&format!("note: {}, shift {shift}: {line}", name(source)));
            }
            points.push(measure(&flags, &engine, &text, Some((name(source), shift)))?);
            bar.advance(1);
        }
    }
    drop(bar);
    if let Some(path) = &flags.report {
        write_text(path, &curve_plot("Perplexity against speed", &curves(&points)))?;
    }
    if flags.common.json {
        let points: Vec<Value> = points.iter().map(Point::as_json).collect();
        return print_json(&json!({ "points": points }));
    }
    print(&as_text(&points))
}

impl Flags {
    fn predictors(&self) -> Vec<PredictorSource> {
        if !self.predictors.is_empty() {
            return self.predictors.clone();
        }
        let bits = || ["quantized:2", "quantized:3", "quantized:4"];
        let quantized = || bits().into_iter().filter_map(|text| parse_predictor(text).ok());
        self.common.predictor.clone().map_or_else(|| quantized().collect(), |given| vec![given])
    }

    /// A model without a predictor of its own would take that of `--predictor`, which is one of several
    /// here.
    fn engine(&self, mode: Sparsity, predictor: Option<PredictorOptions>) -> Outcome<Engine> {
        let mut common = self.common.clone();
        (common.predictor, common.predictor_dtype) = (None, None);
        let builder = common.builder()?.sparsity(mode).model(common.model_path());
        Ok(match predictor {
            Some(predictor) => builder.predictor(predictor).build()?,
            None => builder.build()?,
        })
    }
}

fn default_text() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("assets/text/moby.val.txt")
}

fn name(source: &PredictorSource) -> String {
    match source {
        PredictorSource::Quantized(None) => "quantized".to_owned(),
        PredictorSource::Quantized(Some(bits)) => format!("quantized:{bits}"),
        PredictorSource::File(path) | PredictorSource::Folder(path) => {
            path.file_stem().unwrap_or(path.as_os_str()).to_string_lossy().into_owned()
        }
        _ => "in the model".to_owned(),
    }
}

fn measure(
    flags: &Flags,
    engine: &Engine,
    text: &str,
    predictor: Option<(String, f32)>,
) -> Outcome<Point> {
    let tokenizer = engine.tokenizer().ok_or(Error::NoTokenizer { what: "--text" })?;
    let end_id = engine.info().eos_token_ids.first().copied();
    let mut ids = corpus::tokenize(tokenizer, text, end_id)?;
    ids.truncate(flags.max_tokens);
    let begin = tokenizer.encode("", true)?.first().copied();
    let windows = windows(&ids, flags.context, begin)?;
    let score = score_all(engine, &windows)?;
    let (mut speeds, mut bytes) = (Vec::new(), 0.0);
    for _ in 0..flags.repetitions {
        let mut options = GenerateOptions::default().with_max_tokens(flags.n.saturating_add(1));
        options.ignore_eos = true;
        let prompt = some_ids(16, engine.info().vocab_size);
        let stats = engine.session()?.generate_text(prompt, &options)?.stats;
        speeds.push(stats.decode_tokens_per_second());
        bytes = stats.decode.weight_bytes as f64 / stats.decode.n_tokens.max(1) as f64;
    }
    Ok(Point {
        mode: engine.info().sparsity,
        predictor,
        perplexity: score.perplexity(),
        decode_tokens_per_second: median(&speeds),
        weight_bytes_per_token: bytes,
        score,
    })
}

fn score_all(engine: &Engine, windows: &[Window<'_>]) -> powerinfer::Result<Score> {
    let mut session = engine.session()?;
    session.measure_prediction(engine.info().sparsity == Sparsity::Predicted);
    let mut score = Score::default();
    for window in windows {
        session.reset();
        let logits = session.logits(&window.fed)?;
        score.add(&logits, window.scored);
    }
    Ok(score)
}

/// A line a predictor, and a dot a mode.
fn curves(points: &[Point]) -> Vec<Curve> {
    let mut curves: Vec<Curve> = Vec::new();
    for point in points {
        let name = match &point.predictor {
            Some((name, _)) => name.clone(),
            None => point.mode.name().to_owned(),
        };
        let place = (point.decode_tokens_per_second, point.perplexity);
        match curves.iter_mut().find(|curve| curve.name == name) {
            Some(curve) => curve.points.push(place),
            None => curves.push(Curve { name, points: vec![place] }),
        }
    }
    curves
}

impl Point {
    fn as_json(&self) -> Value {
        let quality = self.score.stats.prediction();
        json!({
            "mode": self.mode.name(),
            "predictor": self.predictor.as_ref().map(|(name, _)| name),
            "shift": self.predictor.as_ref().map(|(_, shift)| shift),
            "perplexity": self.perplexity,
            "decode_tokens_per_second": self.decode_tokens_per_second,
            "weight_bytes_per_token": self.weight_bytes_per_token,
            "ffn_density": self.score.stats.density(),
            "picked_density": self.score.stats.picked_density(),
            "recall": quality.map(|counts| counts.recall()),
            "recall_mass": quality.map(|counts| counts.recall_mass()),
        })
    }
}

fn as_text(points: &[Point]) -> String {
    let mut text = String::from(
        "predictor             shift  perplexity   change    listed  of mass  MB/token  decode tokens/s\n",
    );
    let dense = points.first().map_or(f64::NAN, |point| point.perplexity);
    for point in points {
        let (name, shift) = match &point.predictor {
            Some((name, shift)) => (name.as_str(), format!("{shift:+.2}")),
            None => (point.mode.name(), String::new()),
        };
        let mass = point
            .score
            .stats
            .prediction()
            .map_or("-".to_owned(), |counts| format!("{:.2} %", 100.0 * counts.recall_mass()));
        let _ = writeln!(
            text,
            "{name:<20} {shift:>6} {:>11.4} {:>+6.2} % {:>6.2} % {mass:>8} {:>9.2} {:>16.1}",
            point.perplexity,
            100.0 * (point.perplexity / dense - 1.0),
            100.0 * point.score.stats.picked_density(),
            1e-6 * point.weight_bytes_per_token,
            point.decode_tokens_per_second,
        );
    }
    text
}
