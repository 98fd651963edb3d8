//! What `bench` measures, and how it says it.

use std::fmt::Write;

use powerinfer::Engine;
use powerinfer::ops::{ReadBandwidth, ThreadPool, read_bandwidth};
use serde_json::{Value, json};

use super::measure::{Plan, Run, peak_memory_bytes};
use super::progress::Progress;
use super::report::Outcome;
use super::{BANDWIDTH_BYTES, BANDWIDTH_PASSES, Flags, Loaded, Mode};

/// All that was measured.
#[derive(Debug)]
pub(crate) struct Findings {
    loaded: Loaded,
    plan: Plan,
    /// And whether the second engine ran it.
    runs: Vec<(bool, Run)>,
    bandwidth: ReadBandwidth,
}

pub(crate) fn measure_all(
    loaded: Loaded,
    modes: &[Mode],
    plan: Plan,
    pool: &ThreadPool,
) -> Outcome<Findings> {
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
    pub(crate) fn as_json(&self, flags: &Flags) -> Value {
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

    pub(crate) fn as_text(&self) -> String {
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
