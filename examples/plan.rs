//! Splits the neurons of a model into hot and cold under a budget of fast memory, and says how fast that
//! would be.
//!
//! ```sh
//! cargo run --release --example plan
//! cargo run --release --example plan -- --vram-budget 8GiB --hardware rtx-4090 --out plan.json
//! cargo run --release --example plan -- --synthetic llama-7b --hardware rtx-2080ti \
//!     --offload everything --report plan.svg
//! ```
//!
//! Without `--hardware` this machine is measured and stands for both devices. A synthetic model has
//! nothing to count: `--density` and `--hot-share` say what its profile is like.

#[path = "support/budget_plot.rs"]
mod budget_plot;
#[path = "support/flags.rs"]
mod flags;
#[path = "support/report.rs"]
mod report;
#[path = "support/skew.rs"]
mod skew;
#[path = "support/svg.rs"]
mod svg;

use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Parser;
use powerinfer::core::{
    self, ActivationProfile, Arrangement, Hardware, ModelSizes, Offload, Plan, PlanRequest,
    PlannedDevice, Skew, Sparsity, StepTimes, Workload, simulate,
};
use powerinfer::models::synthetic::{Synthetic, SyntheticShape};
use powerinfer::models::{model_sizes, profile_path};
use powerinfer::ops::SequenceShape;
use powerinfer::ops::attention::KvLayout;
use powerinfer::{FastDevice, StandIn, StandInOptions};
use serde_json::json;

use budget_plot::{BudgetPoint, budget_plot};
use flags::{CommonFlags, DeviceFlag, at_least_one, not_yet, parse_share};
use report::{Outcome, check_outputs, note, print, print_json, write_text, wrong_usage};
use skew::skewed;

/// Memory that is read to measure this machine.
const MEASURED_BYTES: usize = 512 << 20;
/// Tokens of the longest pass that is planned for.
const LONGEST_PASS: usize = 512;
/// Budgets of the plot.
const PLOT_POINTS: u64 = 32;

/// Splits neurons into hot and cold under a budget.
#[derive(Debug, Parser)]
#[command(name = "plan")]
struct Flags {
    /// A profile [default: activation_counts.safetensors beside the model]
    #[arg(long, value_name = "FILE")]
    profile: Option<PathBuf>,
    /// A description of a machine, rtx-4090 or rtx-2080ti [default: this machine, measured]
    #[arg(long, value_name = "FILE|NAME")]
    hardware: Option<String>,
    /// Where the plan goes
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Where a plot of hit rate and speed against the budget goes
    #[arg(long, value_name = "FILE.svg")]
    report: Option<PathBuf>,
    /// Tokens that the cache has room for
    #[arg(long, value_name = "N", default_value = "512", value_parser = at_least_one)]
    context: usize,
    /// Plan a model of this shape instead of a file
    #[arg(long, value_name = "SHAPE", conflicts_with_all = ["model", "profile"])]
    synthetic: Option<SyntheticShape>,
    /// Share of a synthetic model's neurons that fires for a token [default: 0.1]
    #[arg(long, value_name = "X", value_parser = parse_share)]
    density: Option<f64>,
    /// Share of a synthetic model's neurons that makes 80 % of the activations [default: 0.26, or as near to
    /// it as --density allows]
    #[arg(long, value_name = "X", value_parser = parse_share)]
    hot_share: Option<f64>,
    #[command(flatten)]
    common: CommonFlags,
}

/// What is planned, and for which machine.
struct Task {
    name: String,
    sizes: ModelSizes,
    profile: ActivationProfile,
    hardware: Hardware,
    offload: Offload,
    workload: Workload,
    sync_rule: bool,
}

fn main() -> ExitCode {
    report::run(run)
}

fn run(flags: Flags) -> Outcome<()> {
    if flags.common.plan.is_some() {
        return not_yet("--plan", " here; inspect shows what is in a plan");
    }
    if flags.common.device_context.is_some() {
        return not_yet("--device-context", " here; use --context");
    }
    if flags.common.device != DeviceFlag::Cpu {
        return not_yet("--device", " here; nothing is run");
    }
    flags.common.refuse_unused(&["--holding", "--requantise-down", "--predictor-shift"])?;
    flags.common.refuse_predictor_flags()?;
    flags.common.refuse_what_only_gguf_needs()?;
    if flags.hardware.is_some() && flags.common.threads.is_some() {
        return wrong_usage("--threads is for this machine: it does not go with --hardware");
    }
    let of_synthetic = [("--density", flags.density), ("--hot-share", flags.hot_share)];
    let given = of_synthetic.into_iter().find(|(_, given)| given.is_some());
    if let Some((flag, _)) = given.filter(|_| flags.synthetic.is_none()) {
        return wrong_usage(&format!(
            "{flag} needs --synthetic: the profile of --model says how its neurons fire"
        ));
    }
    check_outputs(&[&flags.out, &flags.report])?;
    let task = Task::new(&flags)?;
    let budget = flags.common.vram_budget.unwrap_or_else(|| task.default_budget());
    let plan = task.plan(budget)?;
    if let Some(path) = &flags.out {
        plan.save(path)?;
    }
    if let Some(path) = &flags.report {
        write_text(path, &task.plot(budget)?)?;
    }
    if flags.common.json { print_json(&task.as_json(&plan)) } else { print(&task.as_text(&plan)) }
}

impl Task {
    fn new(flags: &Flags) -> Outcome<Self> {
        let common = &flags.common;
        let mut options = common
            .load_options()
            .with_dtype(common.dtype().weight_format())
            .with_kv_dtype(common.kv_dtype())
            .with_sparsity(common.sparsity());
        if let Some(predictor) = common.predictor() {
            options = options.with_predictor(predictor);
        }
        let (name, sizes, profile) = match flags.synthetic {
            Some(shape) => {
                let density = flags.density.unwrap_or(0.1);
                let synthetic = Synthetic::new(shape, density, 1)?;
                let sizes = synthetic.sizes(&options)?;
                let hot_share_80 = match flags.hot_share {
                    Some(hot_share) => skewed(synthetic, hot_share).map(|_| hot_share)?,
                    None => nearest_hot_share(&synthetic),
                };
                let profile = Skew { density, hot_share_80 }.profile(&sizes.model)?;
                (format!("synthetic {shape}"), sizes, profile)
            }
            None => {
                let path = common.model_path();
                let sizes = model_sizes(&path, &options)?;
                let beside = || profile_path(&path);
                let profile = flags.profile.clone().unwrap_or_else(beside);
                let name = path.file_name().unwrap_or(path.as_os_str()).display().to_string();
                (name, sizes, ActivationProfile::load(&profile)?)
            }
        };
        let hardware = match flags.hardware.as_deref() {
            None => Hardware::measured(&common.pool()?, MEASURED_BYTES)?,
            Some(name) if Path::new(name).exists() => Hardware::load(name.as_ref())?,
            Some(name) => match Hardware::preset(name) {
                Err(unknown @ core::Error::UnknownHardware { .. }) => {
                    return wrong_usage(&format!("--hardware: {unknown}"));
                }
                found => found?,
            },
        };
        let sparsity = match common.sparsity() {
            Sparsity::Auto if options.predictor.is_some() => Sparsity::Predicted,
            sparsity => sparsity,
        };
        let offload = common.offload.unwrap_or_default();
        let sync_rule = hardware.fast.rate() > hardware.host.rate();
        if !sync_rule {
            note("note: the fast device is no faster than the host: what pays for it is not asked");
        }
        let workload = Workload { context: flags.context, sparsity };
        Ok(Self { name, sizes, profile, hardware, offload, workload, sync_rule })
    }

    /// What the fast device could hold at most.
    fn most_bytes(&self) -> u64 {
        let none = self.hardware.fast.capacity_bytes;
        let neurons: u64 = self.sizes.layers.iter().map(|layer| layer.neuron_bytes()).sum();
        let neurons = neurons.saturating_mul(self.sizes.model.d_ff as u64);
        let all = if self.offload.has_dense_parts() {
            let kv = self.sizes.layer_kv_bytes(self.workload.context);
            let kv = kv.saturating_mul(self.sizes.layers.len() as u64);
            self.sizes.total_bytes().saturating_add(kv)
        } else {
            neurons
        };
        // ids, biases, rounding and scratch memory on top
        let scratch = self.scratch_bytes().unwrap_or(0);
        none.min(all.saturating_add(all / 50).saturating_add(1 << 16).saturating_add(scratch))
    }

    /// What the fast device has but for 256 MiB, or half of what it could use if that is not known.
    fn default_budget(&self) -> u64 {
        let most = self.most_bytes();
        match self.hardware.fast.capacity_bytes {
            u64::MAX => most / 2,
            capacity => most.min(capacity.saturating_sub(256 << 20)),
        }
    }

    fn plan(&self, budget: u64) -> Outcome<Plan> {
        let request = PlanRequest::new(&self.sizes, &self.profile, &self.hardware, budget)
            .with_offload(self.offload)
            .with_context(self.workload.context)
            .with_sparsity(self.workload.sparsity)
            .with_workspace_bytes(self.scratch_bytes()?)
            .with_sync_rule(self.sync_rule);
        Ok(core::plan(&request)?)
    }

    /// What a device takes beside weights and cache, going by the stand-in: of a device that nobody has
    /// nothing is known, and a run says if it takes more.
    fn scratch_bytes(&self) -> Outcome<u64> {
        let device = StandIn::new(StandInOptions::new(0))?;
        let (model, kv) = (&self.sizes.model, &self.sizes.kv);
        let network = device.workspace_bytes(model.d_ff, model.d_model, 0);
        if !self.offload.has_dense_parts() {
            return Ok(network);
        }
        let n_tokens = self.workload.context;
        let beside = |n_layers: usize| {
            let kv = KvLayout { n_kv_heads: kv.n_kv_heads, d_head: kv.d_head, dtype: kv.dtype };
            let shape = SequenceShape { d_model: model.d_model, n_layers, kv };
            let bytes = device.sequence_bytes(shape, n_tokens, n_tokens.min(LONGEST_PASS));
            let counted = self.sizes.layer_kv_bytes(n_tokens).saturating_mul(n_layers as u64);
            bytes.saturating_sub(counted)
        };
        // it grows evenly with the layers that go there
        Ok(network.saturating_add(beside(0).max(beside(self.sizes.layers.len()))))
    }

    fn times(&self, arrangement: Arrangement<'_>) -> StepTimes {
        simulate(&self.sizes, &self.profile, &self.hardware, self.workload, arrangement)
    }

    fn split_by_layers(&self, budget_bytes: u64) -> StepTimes {
        self.times(Arrangement::LayerSplit { budget_bytes })
    }

    fn plot(&self, chosen: u64) -> Outcome<String> {
        let most = self.most_bytes();
        let point = |step: u64| -> Outcome<BudgetPoint> {
            let budget_bytes = most / PLOT_POINTS * step;
            let plan = self.plan(budget_bytes)?;
            let split = self.split_by_layers(budget_bytes);
            Ok(BudgetPoint {
                budget_bytes,
                hit_rate: plan.hit_rate,
                tokens_per_second: plan.predicted_tokens_per_second,
                layer_split_tokens_per_second: split.tokens_per_second(),
            })
        };
        let points = (0..=PLOT_POINTS).map(point).collect::<Outcome<Vec<_>>>()?;
        let dense = self.times(Arrangement::DenseHost).tokens_per_second();
        let title = format!("{} on {}", self.name, self.hardware.name);
        let densities = (0..self.sizes.layers.len()).map(|layer| self.profile.density(layer));
        let density = densities.sum::<f64>() / self.sizes.layers.len().max(1) as f64;
        let subtitle = format!(
            "{:.1} % of the neurons fire, {:.0} % make 80 % of the activations; {} mode",
            100.0 * density,
            100.0 * self.profile.hot_share_of_model(0.8),
            self.mode(),
        );
        Ok(budget_plot(&title, &subtitle, &points, dense, chosen))
    }

    fn mode(&self) -> Sparsity {
        match self.workload.sparsity {
            Sparsity::Auto => Sparsity::Exact,
            sparsity => sparsity,
        }
    }

    fn as_json(&self, plan: &Plan) -> serde_json::Value {
        let times = self.times(Arrangement::HotCold(plan));
        let dense = self.times(Arrangement::DenseHost);
        let split = self.split_by_layers(plan.budget_bytes);
        let part = |times: &StepTimes| {
            json!({
                "attention": times.attention,
                "kv_cache": times.kv_cache,
                "predictor": times.predictor,
                "ffn": times.ffn,
                "ffn_fast": times.ffn_fast,
                "ffn_host": times.ffn_host,
                "head": times.head,
                "transfer": times.transfer,
                "sync": times.sync,
            })
        };
        json!({
            "model": self.name,
            "hardware": plan.hardware,
            "budget_bytes": plan.budget_bytes,
            "hot_neurons_per_layer": plan.hot_neurons_per_layer(),
            "bytes_fast": plan.bytes_fast,
            "bytes_host": plan.bytes_host,
            "hit_rate": plan.hit_rate,
            "predicted_tokens_per_second": plan.predicted_tokens_per_second,
            "layer_split_tokens_per_second": split.tokens_per_second(),
            "dense_tokens_per_second": dense.tokens_per_second(),
            "seconds": part(&times),
            "layer_split_seconds": part(&split),
            "dense_seconds": part(&dense),
        })
    }

    fn as_text(&self, plan: &Plan) -> String {
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        let d_ff = self.sizes.model.d_ff;
        let mut text = format!(
            "{} on {}, {:.1} MiB for the fast device\n\
             layer  fires    hot  hit rate  attention  predictor\n",
            self.name,
            plan.hardware,
            mib(plan.budget_bytes)
        );
        for (index, layer) in plan.layers.iter().enumerate() {
            let counts = self.profile.counts(index);
            // not `sum`, which is -0 of nothing
            let add = |sum: f64, id: usize| sum + counts[id] as f64;
            let all = (0..d_ff).fold(0.0, add);
            let hot = (0..d_ff).filter(|&id| layer.is_hot(id)).fold(0.0, add);
            let _ = writeln!(
                text,
                "{index:>5} {:>5.1} % {:>6} {:>7.1} % {:>10} {:>10}",
                100.0 * self.profile.density(index),
                layer.n_hot(),
                if all > 0.0 { 100.0 * hot / all } else { 0.0 },
                layer.attention.name(),
                if self.sizes.layers[index].predictor_bytes == 0 {
                    "-"
                } else {
                    layer.predictor.name()
                },
            );
        }
        let _ = writeln!(
            text,
            "all: {:.1} % of the activations are hot, {:.1} MiB on the fast device, {:.1} MiB on the host{}",
            100.0 * plan.hit_rate,
            mib(plan.bytes_fast),
            mib(plan.bytes_host),
            if plan.head == PlannedDevice::Fast { ", the head on the fast device" } else { "" },
        );
        let _ = writeln!(text, "\nms a token      hot and cold  by layers  dense on the host");
        let arranged = [
            self.times(Arrangement::HotCold(plan)),
            self.split_by_layers(plan.budget_bytes),
            self.times(Arrangement::DenseHost),
        ];
        type Seconds = fn(&StepTimes) -> f64;
        let rows: [(&str, Seconds); 7] = [
            ("attention", |times| times.attention),
            ("cache", |times| times.kv_cache),
            ("predictor", |times| times.predictor),
            ("neurons", |times| times.ffn),
            ("head", |times| times.head),
            ("between devices", |times| times.transfer + times.sync),
            ("all", StepTimes::total),
        ];
        for (name, of) in rows {
            let [hot_cold, split, dense] = arranged.each_ref().map(|times| 1e3 * of(times));
            let _ = writeln!(text, "{name:<15} {hot_cold:>12.3} {split:>10.3} {dense:>18.3}");
        }
        let [hot_cold, split, dense] = arranged.map(|times| times.tokens_per_second());
        let _ = writeln!(text, "{:<15} {hot_cold:>12.2} {split:>10.2} {dense:>18.2}", "tokens/s");
        text
    }
}

/// What `--hot-share` is by default: 0.26, or the least above it that neurons can have who fire as often
/// as these.
fn nearest_hot_share(synthetic: &Synthetic) -> f64 {
    let shares = (26..80).map(|share| f64::from(share) / 100.0);
    let mut possible = shares.filter(|&share| synthetic.clone().with_skew(share).is_ok());
    possible.next().unwrap_or(0.8)
}
