//! Counts how often each neuron of a model fires over a text, and shows how few do most of it.
//!
//! ```sh
//! cargo run --release --example profile
//! cargo run --release --example profile -- --text corpus.txt --out profile.safetensors \
//!     --report profile.svg
//! ```
//!
//! The text is tokenised without special tokens and fed in windows of `--context` tokens. With
//! `--out` the profile is written every few windows, and `--resume` goes on with the same text
//! where an interrupted run stopped; `--merge` adds profiles of other texts. `--activation-folder DIR`
//! shows the statistics that the original stores beside its models instead.

#[path = "support/corpus.rs"]
mod corpus;
#[path = "support/flags.rs"]
mod flags;
#[path = "support/hot_plot.rs"]
mod hot_plot;
#[path = "support/interrupt.rs"]
mod interrupt;
#[path = "support/progress.rs"]
mod progress;
#[path = "support/report.rs"]
mod report;
#[path = "support/svg.rs"]
mod svg;

use std::fmt::Write;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Parser;
use powerinfer::Tokenizer;
use powerinfer::core::ActivationProfile;
use powerinfer::models::{calibrate, load};
use serde_json::json;

use flags::{CommonFlags, at_least_one};
use hot_plot::hot_plot;
use interrupt::stop_on_ctrl_c;
use progress::Progress;
use report::{Outcome, check_outputs, note, print, print_json, write_text};

/// The share of activations that the neurons called hot make.
const HOT: f64 = 0.8;
/// How often the profile is written while it grows.
const SAVE_EVERY: Duration = Duration::from_secs(30);

/// Counts how often each neuron fires.
#[derive(Debug, Parser)]
#[command(name = "profile")]
struct Flags {
    /// A UTF-8 text [default: the held-out Austen text in assets/]
    #[arg(long, value_name = "FILE")]
    text: Option<PathBuf>,
    /// Where the profile goes
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Where a plot of it goes
    #[arg(long, value_name = "FILE.svg")]
    report: Option<PathBuf>,
    /// Run the first N tokens of the text only
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    max_tokens: Option<usize>,
    /// Tokens of a window
    #[arg(long, value_name = "N", default_value = "512", value_parser = at_least_one)]
    context: usize,
    /// Count how much each neuron matters, too
    #[arg(long)]
    impact: bool,
    /// Go on with the profile in --out
    #[arg(long, requires = "out")]
    resume: bool,
    /// Add a profile; may be given several times
    #[arg(long, value_name = "FILE")]
    merge: Vec<PathBuf>,
    /// Show the original's statistics in this folder and run nothing
    #[arg(long, value_name = "DIR", conflicts_with_all = ["text", "max_tokens", "resume", "impact"])]
    activation_folder: Option<PathBuf>,
    #[command(flatten)]
    common: CommonFlags,
}

/// Somebody pressed Ctrl-C.
#[derive(Debug, thiserror::Error)]
enum Interrupted {
    #[error("interrupted; {} holds what was counted, and --resume goes on from there", .0.display())]
    Kept(PathBuf),
    #[error("interrupted; nothing is kept without --out")]
    Nothing,
}

impl Interrupted {
    fn new(out: Option<&Path>) -> Self {
        out.map_or(Self::Nothing, |path| Self::Kept(path.to_owned()))
    }
}

fn main() -> ExitCode {
    report::run(profile)
}

fn profile(flags: Flags) -> Outcome<()> {
    flags.common.refuse_fast_device()?;
    flags.common.refuse_unused(&flags::OF_AN_ENGINE)?;
    check_outputs(&[&flags.out, &flags.report])?;
    let mut profile = match &flags.activation_folder {
        Some(dir) => ActivationProfile::from_activation_folder(dir)?,
        None => count(&flags)?,
    };
    for path in &flags.merge {
        profile.merge(&ActivationProfile::load(path)?)?;
    }
    if let Some(path) = &flags.out {
        profile.save(path)?;
    }
    if let Some(path) = &flags.report {
        write_text(path, &hot_plot(&profile))?;
    }
    if flags.common.json { print_json(&as_json(&profile)) } else { print(&as_text(&profile)) }
}

/// Runs the model over the text.
fn count(flags: &Flags) -> Outcome<ActivationProfile> {
    let dir = flags.common.model_path();
    let tokenizer = match dir.is_file() {
        true => Tokenizer::from_gguf(&dir)?,
        false => Tokenizer::from_file(dir.join("tokenizer.json"))?,
    };
    let path = flags.text.clone().unwrap_or_else(default_text);
    let text = corpus::read_text(&path)?;
    let pool = flags.common.pool()?;
    let model = {
        let progress = Progress::loading();
        let options = flags.common.load_options().with_dtype(flags.common.dtype().weight_format());
        let options = options.with_progress(progress.bytes());
        pool.install(|| load(&dir, &options))?
    };
    let info = model.info();
    let mut ids = corpus::tokenize(&tokenizer, &text, info.eos_token_ids.first().copied())?;
    ids.truncate(flags.max_tokens.unwrap_or(usize::MAX));
    let profile = match &flags.out {
        Some(path) if flags.resume && path.exists() => {
            let profile = ActivationProfile::load(path)?;
            profile.check_model(info)?;
            profile
        }
        _ => ActivationProfile::new(info, flags.impact)?,
    };
    let have = usize::try_from(profile.n_tokens()).unwrap_or(usize::MAX).min(ids.len());
    if have > 0 {
        note(&format!("note: {have} tokens are counted already, {} to go", ids.len() - have));
    }
    let progress = Progress::new("counting", ids.len() as u64);
    let (mut before, mut saved) = (0, Instant::now());
    let stop = stop_on_ctrl_c();
    let (mut failure, mut interrupted) = (None, false);
    let after_window = |profile: &ActivationProfile, done: usize| {
        progress.advance((done - before) as u64);
        before = done;
        interrupted = stop.is_cancelled();
        if let Some(path) =
            flags.out.as_ref().filter(|_| interrupted || saved.elapsed() > SAVE_EVERY)
        {
            saved = Instant::now();
            if let Err(error) = profile.save(path) {
                failure = Some(error);
                return ControlFlow::Break(());
            }
        }
        if interrupted { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    let context = flags.context.min(info.max_context);
    let run = || calibrate(&*model, &ids[have..], context, profile, after_window);
    let profile = pool.install(run)?;
    match failure {
        Some(error) => Err(error.into()),
        None if interrupted => Err(Interrupted::new(flags.out.as_deref()).into()),
        None => Ok(profile),
    }
}

fn default_text() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("assets/text/austen.val.txt")
}

fn layers(profile: &ActivationProfile) -> std::ops::Range<usize> {
    0..profile.model().n_layers
}

fn as_json(profile: &ActivationProfile) -> serde_json::Value {
    let model = profile.model();
    json!({
        "tokens": profile.n_tokens(),
        "n_layers": model.n_layers,
        "d_ff": model.d_ff,
        "architecture": model.architecture,
        "activation": model.activation,
        "density_per_layer": layers(profile).map(|l| profile.density(l)).collect::<Vec<_>>(),
        "hot_share_80_per_layer":
            layers(profile).map(|l| profile.hot_share(l, HOT)).collect::<Vec<_>>(),
        "hot_share_80": profile.hot_share_of_model(HOT),
        "hot_curve_per_layer": layers(profile).map(|l| profile.hot_curve(l, 20)).collect::<Vec<_>>(),
    })
}

fn as_text(profile: &ActivationProfile) -> String {
    let mut text = format!(
        "{} tokens, {} neurons a layer\nlayer  density  80 % by  never\n",
        profile.n_tokens(),
        profile.model().d_ff
    );
    for layer in layers(profile) {
        let never = profile.counts(layer).iter().filter(|&&count| count == 0).count();
        let _ = writeln!(
            text,
            "{layer:>5} {:>6.2} % {:>6.1} % {never:>6}",
            100.0 * profile.density(layer),
            100.0 * profile.hot_share(layer, HOT),
        );
    }
    let _ = writeln!(
        text,
        "all: {:.1} % of the neurons make 80 % of the activations",
        100.0 * profile.hot_share_of_model(HOT)
    );
    text
}
