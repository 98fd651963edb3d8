//! Says what is in a model folder, in a GGUF file, in a profile, in a plan or in the index of GPU
//! neurons that PowerInfer leaves beside a model, without loading weights.
//!
//! ```sh
//! cargo run --release --example inspect
//! cargo run --release --example inspect -- path/to/model --json
//! cargo run --release --example inspect -- model.gguf
//! ```

#[path = "support/flags.rs"]
mod flags;
#[path = "support/report.rs"]
mod report;

use std::collections::BTreeSet;
use std::fmt::Write;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Parser;
use powerinfer::Tokenizer;
use powerinfer::core::{
    ActivationProfile, FileDtype, GgufFile, GpuIndex, ModelConfig, Plan, TensorInfo, TensorSource,
};
use powerinfer::models::{GgufPredictor, open};
use powerinfer::predictor::PredictorFile;
use serde_json::json;

use flags::CommonFlags;
use report::{Outcome, note, print, print_json, printable};

/// Says what is in a model folder, a GGUF file, a profile, a plan or an index of GPU neurons.
#[derive(Debug, Parser)]
#[command(name = "inspect")]
struct Flags {
    /// A model folder, a .gguf or .gpuidx file, a profile or a plan [default: the demo model in assets/]
    #[arg(value_name = "FILE", conflicts_with = "model")]
    file: Option<PathBuf>,
    #[command(flatten)]
    common: CommonFlags,
}

/// What the files say.
#[derive(Debug)]
struct Contents {
    path: PathBuf,
    config: ModelConfig,
    /// The file's own, under the names that it gives them.
    tensors: Vec<TensorInfo>,
    /// That of a PowerInfer file.
    predictor: Option<GgufPredictor>,
    notes: Vec<String>,
}

fn main() -> ExitCode {
    report::run(inspect)
}

fn inspect(flags: Flags) -> Outcome<()> {
    flags.common.refuse_fast_device()?;
    flags.common.refuse_unused(&[
        "--holding",
        "--requantise-down",
        "--dtype",
        "--kv-dtype",
        "--sparsity",
        "--threads",
        "--predictor",
        "--predictor-shift",
        "--predictor-dtype",
    ])?;
    let path = match flags.file {
        Some(path) => path,
        None => flags.common.model_path(),
    };
    if path.extension().is_some_and(|end| end == "gpuidx") {
        return inspect_gpu_index(&path, flags.common.json);
    }
    match kind(&path)? {
        Kind::Safetensors => match PredictorFile::open(&path) {
            Ok(predictor) => return describe_predictor(&predictor, flags.common.json),
            Err(_) => return inspect_profile(&path, flags.common.json),
        },
        Kind::Json => return inspect_plan(&path, flags.common.json),
        Kind::Model => {}
    }
    let contents = Contents::read(path, &flags.common)?;
    if flags.common.json { print_json(&contents.as_json()) } else { print(&contents.as_text()) }
}

/// What a path leads to, going by what is in the file, whatever its name.
enum Kind {
    /// A plan, of what is known.
    Json,
    /// A predictor or a profile.
    Safetensors,
    /// A folder or a GGUF file, or none of these.
    Model,
}

fn kind(path: &Path) -> Outcome<Kind> {
    if !path.is_file() {
        return Ok(Kind::Model);
    }
    let mut first = Vec::new();
    std::fs::File::open(path)?.take(64).read_to_end(&mut first)?;
    let text = first.trim_ascii_start();
    Ok(match text.first() {
        _ if first.starts_with(b"GGUF") => Kind::Model,
        // a header of JSON after the eight bytes of its length
        _ if first.get(8) == Some(&b'{') && first[6..8] == [0, 0] => Kind::Safetensors,
        Some(b'{') => Kind::Json,
        _ if path.extension().is_some_and(|end| end == "json") => Kind::Json,
        _ if path.extension().is_some_and(|end| end == "safetensors") => Kind::Safetensors,
        _ => Kind::Model,
    })
}

/// Says what a predictor is like.
fn describe_predictor(file: &PredictorFile, as_json: bool) -> Outcome<()> {
    let (model, [d_model, d_ff], form) = (file.model(), file.shape(), file.form());
    if as_json {
        return print_json(&json!({
            "architecture": model.architecture,
            "activation": model.activation,
            "method": file.method(),
            "n_layers": file.n_layers(),
            "d_model": d_model,
            "d_ff": d_ff,
            "parameters": file.n_parameters(),
            "input": form.input.to_string(),
            "hidden": form.hidden.to_string(),
            "predictor": file.ranks(),
            "threshold": file.thresholds(),
        }));
    }
    print(&format!(
        "{} predictor of {} layers of {d_ff} neurons, width {d_model}, for {}: {} parameters, ranks \
         {:?}, thresholds {:?}, {} on the {} stream\n",
        printable(file.method()),
        file.n_layers(),
        printable(&model.architecture),
        file.n_parameters(),
        file.ranks(),
        file.thresholds(),
        form.hidden,
        form.input,
    ))
}

/// Says what a profile was counted on.
fn inspect_profile(path: &Path, as_json: bool) -> Outcome<()> {
    let profile = ActivationProfile::load(path)?;
    let (model, tokens) = (profile.model(), profile.n_tokens());
    let (n_layers, d_ff, share) = (model.n_layers, model.d_ff, profile.hot_share_of_model(0.8));
    if as_json {
        return print_json(&json!({
            "architecture": model.architecture,
            "activation": model.activation,
            "n_layers": n_layers,
            "d_model": model.d_model,
            "d_ff": d_ff,
            "tokens": tokens,
            "hot_share_80": share,
        }));
    }
    print(&format!(
        "profile of {n_layers} layers of {d_ff} neurons over {tokens} tokens: {:.1} % of the neurons \
         make 80 % of the activations\n",
        100.0 * share
    ))
}

/// Says what a plan is for, and what of it is hot.
fn inspect_plan(path: &Path, as_json: bool) -> Outcome<()> {
    let plan = Plan::load(path)?;
    let (model, hot) = (&plan.model, plan.hot_neurons_per_layer());
    if as_json {
        return print_json(&json!({
            "architecture": model.architecture,
            "activation": model.activation,
            "n_layers": model.n_layers,
            "d_model": model.d_model,
            "d_ff": model.d_ff,
            "ffn_tensors": model.ffn_tensors,
            "hardware": plan.hardware,
            "budget_bytes": plan.budget_bytes,
            "hot_neurons_per_layer": hot,
            "bytes_fast": plan.bytes_fast,
            "bytes_host": plan.bytes_host,
            "hit_rate": plan.hit_rate,
            "predicted_tokens_per_second": plan.predicted_tokens_per_second,
        }));
    }
    print(&format!(
        "plan of {} layers of {} neurons ({}, {}) for {}: {} of {} bytes on the fast device, {:.1} % of \
         the activations hot, {:.2} tokens per second predicted\nhot neurons: {hot:?}\n",
        model.n_layers,
        model.d_ff,
        printable(&model.architecture),
        printable(&model.activation),
        printable(&plan.hardware),
        plan.bytes_fast,
        plan.budget_bytes,
        100.0 * plan.hit_rate,
        plan.predicted_tokens_per_second,
    ))
}

/// Says how many neurons of each layer PowerInfer's engine put on the GPU.
fn inspect_gpu_index(path: &Path, as_json: bool) -> Outcome<()> {
    let index = GpuIndex::open(path)?;
    let placement = &index.placement;
    let hot: Vec<usize> =
        (0..placement.n_layers()).map(|layer| placement.hot(layer).len()).collect();
    if let Some(warning) = index.warning {
        note(&format!("warning: {warning}"));
    }
    if as_json {
        return print_json(&json!({
            "hot_neurons_per_layer": hot,
            "d_ff": placement.d_ff(),
            "vram_bytes": index.vram_bytes,
            "warning": index.warning,
        }));
    }
    let (n, bytes) = (placement.d_ff(), index.vram_bytes);
    print(&format!("made for {bytes} bytes; of {n} neurons a layer on the GPU: {hot:?}\n"))
}

impl Contents {
    fn read(path: PathBuf, common: &CommonFlags) -> Outcome<Self> {
        let (config, store) = open(&path, &common.load_options())?;
        let (tensors, predictor): (Vec<_>, _) = if path.is_dir() {
            (store.tensors().cloned().collect(), None)
        } else {
            (GgufFile::open(&path)?.tensors(), GgufPredictor::open(&path)?)
        };
        let notes = notes(&path, &config, &tensors);
        Ok(Self { path, config, tensors, predictor, notes })
    }

    /// Numbers in all tensors.
    fn parameters(&self) -> u64 {
        let count = |tensor: &TensorInfo| tensor.shape.iter().map(|&n| n as u64).product::<u64>();
        self.tensors.iter().map(count).sum()
    }

    fn dtypes(&self) -> BTreeSet<String> {
        self.tensors.iter().map(|tensor| tensor.dtype.to_string()).collect()
    }

    fn as_json(&self) -> serde_json::Value {
        let config = &self.config;
        json!({
            "architecture": config.model_type,
            "parameters": self.parameters(),
            "tensors": self.tensors.len(),
            "dtypes": self.dtypes(),
            "activation": config.activation.to_string(),
            "sparse": config.activation.is_sparse(),
            "predictor": self.predictor.as_ref().map(|mlp| json!({"kind": "mlp", "ranks": mlp.ranks()})),
            "threshold": self.predictor.as_ref().map(GgufPredictor::thresholds),
            "n_layers": config.n_layers,
            "d_model": config.d_model,
            "d_ff": config.d_ff,
            "n_heads": config.n_heads,
            "n_kv_heads": config.n_kv_heads,
            "d_head": config.d_head,
            "vocab_size": config.vocab_size,
            "max_context": config.max_context,
            "eos_token_ids": config.eos_token_ids,
            "notes": self.notes,
        })
    }

    fn as_text(&self) -> String {
        let config = &self.config;
        let dtypes = Vec::from_iter(self.dtypes()).join(", ");
        let sparse = if config.activation.is_sparse() { "sparse" } else { "not sparse" };
        let lines = [
            ("model", self.path.display().to_string()),
            ("architecture", config.model_type.clone()),
            ("layers", config.n_layers.to_string()),
            ("width", config.d_model.to_string()),
            ("neurons", format!("{} a layer", config.d_ff)),
            ("activation", format!("{}, {sparse}", config.activation)),
            ("heads", format!("{} of {}", config.n_heads, config.d_head)),
            ("kv heads", config.n_kv_heads.to_string()),
            ("vocabulary", config.vocab_size.to_string()),
            ("context", config.max_context.to_string()),
            ("end ids", format!("{:?}", config.eos_token_ids)),
            ("parameters", self.parameters().to_string()),
            ("tensors", format!("{}, {dtypes}", self.tensors.len())),
        ];
        let mut text = String::new();
        for (name, value) in lines {
            let _ = writeln!(text, "{name:<13} {value}");
        }
        if let Some(predictor) = &self.predictor {
            let (ranks, thresholds) = (predictor.ranks(), predictor.thresholds());
            let _ =
                writeln!(text, "{:<13} ranks {ranks:?}, thresholds {thresholds:?}", "predictor");
        }
        for note in &self.notes {
            let _ = writeln!(text, "note: {note}");
        }
        for tensor in &self.tensors {
            let name = printable(&tensor.name);
            let _ = writeln!(text, "  {name:<50} {:<5} {:?}", tensor.dtype, tensor.shape);
        }
        text
    }
}

/// What is worth knowing before the model is loaded.
fn notes(path: &Path, config: &ModelConfig, tensors: &[TensorInfo]) -> Vec<String> {
    let mut notes = Vec::new();
    if !config.activation.is_sparse() {
        let activation = config.activation;
        notes.push(format!("{activation} fires for every neuron: expect no gain from sparsity"));
    }
    if config.eos_token_ids.is_empty() {
        notes.push("no end token: texts end by length or by a stop string".to_owned());
    }
    let unread = tensors.iter().filter(|tensor| matches!(tensor.dtype, FileDtype::Other(_)));
    for tensor in unread {
        notes.push(format!("{} is {}, which weights are not read from", tensor.name, tensor.dtype));
    }
    let tokenizer = path.join("tokenizer.json");
    if path.is_file() {
        return notes;
    }
    if !tokenizer.exists() {
        notes.push("no tokenizer.json: token ids only".to_owned());
    } else if let Err(error) = Tokenizer::from_file(&tokenizer) {
        notes.push(format!("{error}: token ids only"));
    }
    notes
}
