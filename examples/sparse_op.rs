//! The operators on one's own tensors: a feed-forward network densely, exactly and of picked
//! neurons, how long each takes, and how much of the read bandwidth it reaches.
//!
//! ```sh
//! cargo run --release --example sparse_op
//! cargo run --release --example sparse_op -- --d-model 4096 --d-ff 11008 --density 0.1 --dtype q4_0
//! ```
//!
//! `dense` reads every row; `exact` the whole gate and the up and down rows of the neurons that
//! fire; `picked` the three rows of the neurons that a predictor lists, here those that fire. Calls
//! go round over several networks, together larger than any cache.

#[path = "support/flags.rs"]
mod flags;
#[path = "support/report.rs"]
mod report;

use std::process::ExitCode;
use std::time::Instant;

use candle_core::{Device, Tensor};
use clap::Parser;
use powerinfer::core::SplitMix64;
use powerinfer::ops::{
    Activation, FfnCounts, FfnWeights, NeuronIds, NeuronMatrix, Neurons, OpError, WeightFormat,
    Workspace, ffn, read_bandwidth,
};
use serde_json::json;

use flags::CommonFlags;
use report::{Outcome, print, print_json};

/// Bytes that the bandwidth is measured over, and that the networks have at least together.
const COLD_BYTES: usize = 1 << 30;

/// Times a feed-forward network densely, exactly and of picked neurons.
#[derive(Debug, Parser)]
#[command(name = "sparse_op")]
struct Flags {
    /// Values of a token
    #[arg(long, value_name = "N", default_value_t = 2048, value_parser = clap::value_parser!(u32).range(32..=65536))]
    d_model: u32,
    /// Neurons
    #[arg(long, value_name = "N", default_value_t = 5632, value_parser = clap::value_parser!(u32).range(1..=262_144))]
    d_ff: u32,
    /// Share of the neurons that fire
    #[arg(long, value_name = "X", default_value_t = 0.1, value_parser = parse_density)]
    density: f64,
    /// Calls of each mode that the medians are taken over
    #[arg(long, value_name = "N", default_value_t = 40, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    calls: u32,
    #[command(flatten)]
    common: CommonFlags,
}

/// A network and the neurons of it that fire for the one input there is.
struct Network {
    weights: FfnWeights,
    firing: [NeuronIds; 1],
}

/// What one mode came to.
struct Timed {
    mode: &'static str,
    median_seconds: f64,
    counts: FfnCounts,
}

fn parse_density(text: &str) -> Result<f64, String> {
    let density = text.parse().ok().filter(|density| (0.0..=1.0).contains(density));
    density.ok_or_else(|| "expected a number from 0 to 1".to_owned())
}

fn main() -> ExitCode {
    report::run(sparse_op)
}

fn sparse_op(flags: Flags) -> Outcome<()> {
    flags.common.refuse_fast_device()?;
    flags.common.refuse_unused(&[
        "--model",
        "--holding",
        "--activation",
        "--requantise-down",
        "--kv-dtype",
        "--sparsity",
        "--predictor",
        "--predictor-shift",
        "--predictor-dtype",
    ])?;
    let format = flags.common.dtype().weight_format().unwrap_or(WeightFormat::F16);
    let pool = flags.common.pool()?;
    let bandwidth = read_bandwidth(&pool, COLD_BYTES, 7)?;
    let (runs, same) = pool.install(|| measure(&flags, format))?;
    if !same {
        return Err("the three modes gave different outputs".into());
    }

    let rows: Vec<_> = runs
        .iter()
        .map(|run| {
            let bytes_per_second = run.counts.bytes as f64 / run.median_seconds;
            json!({
                "mode": run.mode,
                "median_seconds": run.median_seconds,
                "bytes": run.counts.bytes,
                "neurons": run.counts.ran,
                "bytes_per_second": bytes_per_second,
                "share_of_read_bandwidth": bytes_per_second / bandwidth.bytes_per_second,
            })
        })
        .collect();
    if flags.common.json {
        return print_json(&json!({
            "d_model": flags.d_model, "d_ff": flags.d_ff, "density": flags.density,
            "dtype": format.name(), "threads": pool.n_threads(), "runs": rows,
            "read_bandwidth_bytes_per_second": bandwidth.bytes_per_second,
            "page_kind": bandwidth.page_kind,
        }));
    }
    let mut text = format!(
        "{} x {}, {format}, {} threads, read bandwidth {:.1} GB/s ({})\n",
        flags.d_model,
        flags.d_ff,
        pool.n_threads(),
        bandwidth.bytes_per_second / 1e9,
        bandwidth.page_kind
    );
    for (run, row) in runs.iter().zip(&rows) {
        text += &format!(
            "{:<7} {:>9.3} ms  {:>7.1} MB  {:>6.1} GB/s  {:>4.0} % of the bandwidth\n",
            run.mode,
            run.median_seconds * 1e3,
            run.counts.bytes as f64 / 1e6,
            row["bytes_per_second"].as_f64().unwrap_or(0.0) / 1e9,
            row["share_of_read_bandwidth"].as_f64().unwrap_or(0.0) * 100.0
        );
    }
    print(&text)
}

/// Times the modes in turn; whether they all gave the same output comes second.
fn measure(flags: &Flags, format: WeightFormat) -> Result<(Vec<Timed>, bool), OpError> {
    let (d_model, d_ff) = (flags.d_model as usize, flags.d_ff as usize);
    let network_bytes = 3 * d_ff * format.row_bytes(d_model)?;
    let n_networks = COLD_BYTES.div_ceil(network_bytes).clamp(2, 1024);
    let networks = (0..n_networks)
        .map(|seed| network(format, d_model, d_ff, flags.density, seed as u64))
        .collect::<Result<Vec<_>, _>>()?;
    let x = Tensor::ones((1, d_model), candle_core::DType::F32, &Device::Cpu)?;
    let mut workspace = Workspace::default();
    let mut run = |mode: &str, network: &Network| {
        let neurons = match mode {
            "dense" => Neurons::All,
            "exact" => Neurons::Firing,
            _ => Neurons::FiringOf(&network.firing),
        };
        ffn(&network.weights, neurons, &x, &mut workspace)
    };
    let modes = ["dense", "exact", "picked"];
    let mut results: Vec<_> = modes.iter().map(|_| (Vec::new(), FfnCounts::default())).collect();
    for call in 0..flags.calls as usize {
        for (index, mode) in modes.into_iter().enumerate() {
            // another network for each mode, so that none finds what the last one left
            let network = &networks[(call * modes.len() + index) % n_networks];
            let start = Instant::now();
            let (_, counts) = run(mode, network)?;
            results[index].0.push(start.elapsed().as_secs_f64());
            results[index].1 = counts;
        }
    }
    let mut outputs = Vec::new();
    for mode in modes {
        outputs.push(run(mode, &networks[0])?.0.to_vec2::<f32>()?);
    }
    let same = outputs.iter().all(|output| *output == outputs[0]);
    let timed = modes.into_iter().zip(results).map(|(mode, (mut seconds, counts))| {
        seconds.sort_by(f64::total_cmp);
        Timed { mode, median_seconds: seconds[seconds.len() / 2], counts }
    });
    Ok((timed.collect(), same))
}

/// A network in which a scattered share of `density` of the neurons fires for an input of ones.
fn network(
    format: WeightFormat,
    d_model: usize,
    d_ff: usize,
    density: f64,
    seed: u64,
) -> Result<Network, OpError> {
    let row: Vec<f32> = (0..d_model).map(|i| 0.01 + (i % 17) as f32 / 1000.0).collect();
    let negative: Vec<f32> = row.iter().map(|value| -value).collect();
    let mut random = SplitMix64::new(seed);
    let fires: Vec<bool> = (0..d_ff).map(|_| next_uniform(&mut random) < density).collect();
    let matrix = |signed: bool| {
        NeuronMatrix::try_from_rows(format, d_ff, d_model, |neuron, bytes| {
            let values = if signed && !fires[neuron] { &negative } else { &row };
            format.encode(values, bytes);
            Ok::<(), OpError>(())
        })
    };
    let weights =
        FfnWeights::new(matrix(true)?, Some(matrix(false)?), matrix(false)?, Activation::Relu)?;
    let ids = (0..).zip(&fires).filter(|(_, fires)| **fires).map(|(id, _)| id).collect();
    Ok(Network { weights, firing: [NeuronIds::from_sorted(ids)?] })
}

/// A uniform number below 1.
fn next_uniform(random: &mut SplitMix64) -> f64 {
    random.next_u64() as f64 / 2f64.powi(64)
}
