//! One synthetic model under several budgets, each time with other parts on the fast device.

use std::fmt::Write;
use std::str::FromStr;
use std::time::Instant;

use powerinfer::models::LoadOptions;
use powerinfer::models::synthetic::Synthetic;
use powerinfer::ops::{ThreadPool, read_bandwidth};
use powerinfer::{Engine, Offload, Sparsity};
use serde_json::{Value, json};

use super::flags::{CommonFlags, DeviceFlag};
use super::measure::{Plan, Run, peak_memory_bytes};
use super::progress::Progress;
use super::report::{Outcome, note, print, print_json, wrong_usage};

/// What goes to the fast device, and which neurons run: `layers/dense`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Arrangement {
    /// `None`: no fast device at all, `cpu`.
    offload: Option<Offload>,
    mode: Sparsity,
}

impl FromStr for Arrangement {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parts = text.split_once('/').ok_or("expected WHAT/MODE, such as layers/dense")?;
        let offload = match parts.0 {
            "cpu" => None,
            name => Some(name.parse().map_err(|error: powerinfer::core::Error| error.to_string())?),
        };
        let mode = parts.1.parse().map_err(|error: powerinfer::core::Error| error.to_string())?;
        match mode {
            Sparsity::Dense | Sparsity::Exact => Ok(Self { offload, mode }),
            _ => Err("expected the mode dense or exact".to_owned()),
        }
    }
}

/// What is to be measured.
pub(crate) struct Task<'a> {
    pub(crate) common: &'a CommonFlags,
    pub(crate) synthetic: &'a Synthetic,
    pub(crate) arrangements: &'a [Arrangement],
    /// Budgets, in hundredths of the model.
    pub(crate) percents: &'a [u64],
    /// Seconds after which no other arrangement is begun.
    pub(crate) seconds: Option<u64>,
    /// Tokens of the longest context that is run.
    pub(crate) tokens: usize,
    pub(crate) plan: Plan,
    pub(crate) about: Value,
}

/// The arrangements that one engine runs.
struct Group<'a> {
    offload: Option<Offload>,
    /// `None`: as much as there is.
    percent: Option<u64>,
    arrangements: &'a [Arrangement],
}

/// Some of the arrangements could not be run.
#[derive(Debug, thiserror::Error)]
#[error("{0} of {1} arrangements failed; the results say why")]
struct SomeFailed(usize, usize);

/// Measures all and prints what was found; an arrangement that fails does not keep the others.
pub(crate) fn compare(task: &Task<'_>, pool: &ThreadPool) -> Outcome<()> {
    if task.common.device == DeviceFlag::Cpu {
        return wrong_usage("--arrangements needs --device hybrid or cuda");
    }
    let has_dense_parts =
        |arrangement: &Arrangement| arrangement.offload.is_some_and(Offload::has_dense_parts);
    if let Some(n_tokens) = task.common.device_context
        && !task.arrangements.iter().any(has_dense_parts)
    {
        return wrong_usage(&format!(
            "--device-context {n_tokens} is for keys and values on the fast device: it does not go with \
             --arrangements of neurons and cpu alone"
        ));
    }
    // a device that cannot be had is an error, also where no arrangement would use it
    drop(task.common.fast_device(|| Ok(0))?);
    let began = Instant::now();
    let is_late = || task.seconds.is_some_and(|seconds| began.elapsed().as_secs() >= seconds);
    let groups = task.groups();
    let bandwidth = read_bandwidth(pool, 1 << 30, 5)?;
    let (mut found, mut left_out, mut n_failed) = (Vec::new(), Vec::new(), 0);
    let progress = Progress::new("measuring", groups.len() as u64);
    for group in &groups {
        if is_late() {
            left_out.push(group.name());
            continue;
        }
        found.push(task.measure(group, pool).unwrap_or_else(|error| {
            n_failed += 1;
            note(&format!("note: {}: {error}", group.name()));
            json!({"name": group.name(), "error": error.to_string()})
        }));
        progress.advance(1);
    }
    drop(progress);
    let results = json!({
        "about": task.about,
        "model_bytes": task.model_bytes()?,
        "read_bandwidth_bytes_per_second": bandwidth.bytes_per_second,
        "arrangements": found,
        "left_out": left_out,
        "seconds": began.elapsed().as_secs_f64(),
        "peak_memory_bytes": peak_memory_bytes(),
    });
    if task.common.json {
        print_json(&results)?
    } else {
        print(&as_text(&results))?
    }
    match n_failed {
        0 => Ok(()),
        n => Err(SomeFailed(n, groups.len()).into()),
    }
}

impl Group<'_> {
    fn name(&self) -> String {
        let what = self.offload.map_or("cpu", Offload::name);
        self.percent.map_or(what.to_owned(), |percent| format!("{what} at {percent} %"))
    }
}

impl<'a> Task<'a> {
    /// Neighbours of one kind share an engine. What no budget matters to is measured once.
    fn groups(&self) -> Vec<Group<'a>> {
        let mut groups = Vec::new();
        for (index, &percent) in self.percents.iter().enumerate() {
            for arrangements in self.arrangements.chunk_by(|a, b| a.offload == b.offload) {
                let offload = arrangements[0].offload;
                let unlimited = matches!(offload, None | Some(Offload::Whole));
                if !unlimited || index == 0 {
                    let percent = (!unlimited).then_some(percent);
                    groups.push(Group { offload, percent, arrangements });
                }
            }
        }
        groups
    }

    fn options(&self) -> LoadOptions {
        let mut options = LoadOptions::default()
            .with_dtype(self.common.dtype().weight_format())
            .with_kv_dtype(self.common.kv_dtype())
            .with_max_context(self.tokens);
        options.device_context = self.common.device_context;
        options
    }

    fn model_bytes(&self) -> Outcome<u64> {
        Ok(self.synthetic.sizes(&self.options())?.total_bytes())
    }

    fn measure(&self, group: &Group<'_>, pool: &ThreadPool) -> Outcome<Value> {
        let model_bytes = self.model_bytes()?;
        let budget = group.percent.map(|percent| model_bytes / 100 * percent);
        let mut options = self.options();
        let mut threads = pool.n_threads();
        if let Some(offload) = group.offload {
            let limited = CommonFlags { vram_budget: budget, ..self.common.clone() };
            // for a stand-in that nobody limits
            let device = limited.fast_device(|| Ok(model_bytes.saturating_mul(4)))?;
            let device = device.expect("there is one but with --device cpu, which is refused");
            threads = limited.threads_beside(device.as_ref())?.get();
            options = options.with_offload(offload).with_fast_device(device);
        }
        let began = Instant::now();
        let model = pool.install(|| self.synthetic.load(&options))?;
        let engine = Engine::builder().causal_lm(model).threads(threads).build()?;
        let load_seconds = began.elapsed().as_secs_f64();
        let plan = self.plan.clone().check(engine.info())?;
        let contexts = &plan.contexts;
        let of_mode = |arrangement: &Arrangement| {
            let mode = Some(arrangement.mode);
            contexts.iter().map(move |&context| Run::new(mode, context)).collect::<Vec<_>>()
        };
        let mut runs: Vec<Run> = group.arrangements.iter().flat_map(of_mode).collect();
        for run in &runs {
            run.warm_up(&engine)?;
        }
        for _ in 0..plan.repetitions {
            for run in &mut runs {
                run.measure(&engine, &plan)?;
            }
        }
        let info = engine.info();
        let memory = options.fast_device.as_ref().map(|device| device.memory());
        Ok(json!({
            "name": group.name(),
            "offload": group.offload.map_or("cpu", Offload::name),
            "budget_percent": group.percent,
            "budget_bytes": budget,
            "fast_device": info.fast_device,
            "fast_bytes": info.fast_bytes,
            "fast_peak_bytes": memory.map(|memory| memory.peak_bytes),
            "notes": info.notes,
            "load_seconds": load_seconds,
            "runs": runs.iter().map(|run| run.as_json(&engine)).collect::<Vec<_>>(),
        }))
    }
}

fn as_text(results: &Value) -> String {
    let mut text = format!(
        "{:<22} {:<6} {:>8} {:>17} {:>16} {:>9}\n",
        "what", "mode", "context", "prefill tokens/s", "decode tokens/s", "hit rate"
    );
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    for found in list(&results["arrangements"]) {
        let name = found["name"].as_str().unwrap_or_default();
        if let Some(error) = found["error"].as_str() {
            let _ = writeln!(text, "{name:<22} {error}");
        }
        for run in list(&found["runs"]) {
            let number = |field: &str| run[field].as_f64().unwrap_or(0.0);
            let hit_rate = run["split"]["hit_rate"].as_f64();
            let _ = writeln!(
                text,
                "{name:<22} {:<6} {:>8} {:>17.2} {:>16.2} {:>9}",
                run["mode"].as_str().unwrap_or_default(),
                run["context"].as_u64().unwrap_or(0),
                number("prefill_tokens_per_second"),
                number("decode_tokens_per_second"),
                hit_rate.map_or("-".to_owned(), |rate| format!("{:.0} %", 100.0 * rate)),
            );
        }
    }
    for name in list(&results["left_out"]) {
        let _ =
            writeln!(text, "{:<22} left out, as time was up", name.as_str().unwrap_or_default());
    }
    text
}
