//! The flags that every example takes, and what becomes of them.
#![allow(dead_code, reason = "each example uses a part")]

#[path = "refusals.rs"]
mod refusals;
#[path = "size.rs"]
mod size;

use std::error::Error;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::Arc;

use clap::{Args, ValueEnum};
use powerinfer::core::Holding;
use powerinfer::models::LoadOptions;
use powerinfer::ops::{Activation, ThreadPool, WeightFormat};
use powerinfer::{
    Dtype, Engine, EngineBuilder, FastDevice, KvDtype, Offload, Plan, PredictorOptions,
    PredictorSource, Sparsity, StandIn, StandInOptions, open_cuda,
};

use super::report::{Outcome, wrong_usage};
#[allow(unused_imports, reason = "not every example reads another size")]
pub(crate) use size::{parse_size, parse_some_bytes};

/// Flags that say how an engine runs a model, for examples that run it themselves.
pub(crate) const OF_AN_ENGINE: [&str; 7] = [
    "--holding",
    "--requantise-down",
    "--kv-dtype",
    "--sparsity",
    "--predictor",
    "--predictor-shift",
    "--predictor-dtype",
];

/// Which model to run, and how.
#[derive(Debug, Clone, Args)]
pub(crate) struct CommonFlags {
    /// A model folder in Hugging Face layout, or a GGUF file [default: the demo model in assets/]
    #[arg(long, value_name = "PATH")]
    pub(crate) model: Option<PathBuf>,
    /// Copy weights into memory, or use them where they lie in the file
    #[arg(long, value_enum, default_value = "resident")]
    pub(crate) holding: HoldingFlag,
    /// The activation of the model in a GGUF file, whatever the file names or implies: relu, silu or gelu
    #[arg(long, value_name = "NAME")]
    pub(crate) activation: Option<Activation>,
    /// Quantise the down projections of a plain GGUF file anew, so that neurons can be skipped
    #[arg(long)]
    pub(crate) requantise_down: bool,
    /// What the weights are held as; auto keeps the file's type
    #[arg(long, value_enum, default_value = "auto")]
    pub(crate) dtype: DtypeFlag,
    /// What keys and values are cached as
    #[arg(long, value_enum, default_value = "f32")]
    pub(crate) kv_dtype: KvDtypeFlag,
    /// Threads to compute with [default: one a core]
    #[arg(long, value_name = "N", value_parser = parse_threads)]
    pub(crate) threads: Option<NonZeroUsize>,
    /// cpu; cuda or cuda:N for a GPU that does all; hybrid for a GPU beside the CPU, or if there is none
    /// a stand-in that takes one of the threads
    #[arg(long, default_value = "cpu", value_parser = parse_device)]
    pub(crate) device: DeviceFlag,
    /// Memory that the fast device may take, such as 8GiB or 1.5GB [default: that of the --plan, else what
    /// is free of a GPU's, half the model for a stand-in]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub(crate) vram_budget: Option<u64>,
    /// A plan of what lies on the fast device
    #[arg(long, value_name = "FILE", conflicts_with = "offload")]
    pub(crate) plan: Option<PathBuf>,
    /// What goes to the fast device: neurons that fire often; everything, attention and head first, then
    /// neurons; dense, attention and head only; layers, as many as fit; whole, all of it or an error
    /// [default: whole with cuda, with hybrid everything on a GPU and neurons on a stand-in]
    #[arg(long, value_name = "WHAT")]
    pub(crate) offload: Option<Offload>,
    /// Tokens of the context that the fast device is to have room for, where it holds keys and values
    /// [default: those of the --plan, else 2048]
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub(crate) device_context: Option<usize>,
    /// Which neurons of each feed-forward network to compute
    #[arg(long, value_enum, default_value = "auto")]
    pub(crate) sparsity: SparsityFlag,
    /// `quantized` to build a predictor from the gates, `quantized:2`, `:3` or `:4` to choose its bits,
    /// or a predictor's .safetensors file or folder
    #[arg(long, value_name = "PATH|quantized", value_parser = parse_predictor)]
    pub(crate) predictor: Option<PredictorSource>,
    /// Above 0 the predictor lists more neurons and misses fewer, below 0 the other way round
    #[arg(long, value_name = "X", default_value_t = 0.0, allow_hyphen_values = true)]
    pub(crate) predictor_shift: f32,
    /// What the weights of a trained predictor are held as [default: as they are stored]
    #[arg(long, value_name = "DTYPE")]
    pub(crate) predictor_dtype: Option<WeightFormat>,
    /// Print one JSON object on stdout and nothing else
    #[arg(long)]
    pub(crate) json: bool,
}

/// The values of `--dtype`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "verbatim")]
#[allow(non_camel_case_types, reason = "the names are what is typed")]
pub(crate) enum DtypeFlag {
    f32,
    f16,
    bf16,
    q8_0,
    q4_0,
    auto,
}

/// The values of `--holding`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum HoldingFlag {
    Resident,
    Mapped,
}

/// The values of `--kv-dtype`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "verbatim")]
#[allow(non_camel_case_types, reason = "the names are what is typed")]
pub(crate) enum KvDtypeFlag {
    f32,
    f16,
}

/// The values of `--sparsity`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum SparsityFlag {
    Dense,
    Exact,
    Predicted,
    Auto,
}

/// The values of `--device`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DeviceFlag {
    Cpu,
    Cuda(usize),
    Hybrid,
}

impl CommonFlags {
    /// The model: the one asked for or the demo model.
    pub(crate) fn model_path(&self) -> PathBuf {
        let demo = || {
            let root = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
            root.join("assets").join("llama-relu-tiny")
        };
        self.model.clone().unwrap_or_else(demo)
    }

    /// A builder with threads, dtype and sparsity set and no model yet.
    pub(crate) fn builder(&self) -> Outcome<EngineBuilder> {
        self.refuse_what_only_gguf_needs()?;
        self.refuse_predictor_flags()?;
        let mut builder = self.cpu_builder();
        let half = || Ok(self.cpu_builder().model(self.model_path()).estimate()?.model_bytes() / 2);
        let plan = self.load_plan()?;
        if let Some(device) = self.fast_device_for(plan.as_ref(), half)? {
            let threads = self.threads_beside(device.as_ref())?;
            builder = builder.threads(threads.get());
            if let Some(n_tokens) = self.device_context {
                self.check_device_context(plan.as_ref(), device.as_ref())?;
                builder = builder.device_context(n_tokens);
            }
            builder = builder.fast_device(device);
            if let Some(plan) = plan {
                builder = builder.plan(plan);
            }
            if let Some(offload) = self.offload() {
                builder = builder.offload(offload);
            }
        }
        Ok(builder)
    }

    /// The plan of `--plan`; without a device the flag is refused before its file is missed.
    pub(crate) fn load_plan(&self) -> Outcome<Option<Plan>> {
        if self.device == DeviceFlag::Cpu {
            return Ok(None);
        }
        Ok(self.plan.as_deref().map(Plan::load).transpose()?)
    }

    /// [`builder`](Self::builder) without a fast device.
    fn cpu_builder(&self) -> EngineBuilder {
        let mut builder = Engine::builder()
            .dtype(self.dtype())
            .kv_dtype(self.kv_dtype())
            .sparsity(self.sparsity())
            .holding(self.holding())
            .requantise_down(self.requantise_down);
        if let Some(threads) = self.threads {
            builder = builder.threads(threads.get());
        }
        if let Some(activation) = self.activation {
            builder = builder.gguf_activation(activation);
        }
        if let Some(predictor) = self.predictor() {
            builder = builder.predictor(predictor);
        }
        builder
    }

    /// The device that `--device` asks for, if any; `default_budget` is that of a stand-in.
    pub(crate) fn fast_device(
        &self,
        default_budget: impl FnOnce() -> Outcome<u64>,
    ) -> Outcome<Option<Arc<dyn FastDevice>>> {
        self.fast_device_for(None, default_budget)
    }

    /// [`fast_device`](Self::fast_device) with the budget of a plan where no other is given.
    pub(crate) fn fast_device_for(
        &self,
        plan: Option<&Plan>,
        default_budget: impl FnOnce() -> Outcome<u64>,
    ) -> Outcome<Option<Arc<dyn FastDevice>>> {
        let budget = self.vram_budget.or(plan.map(|plan| plan.budget_bytes));
        let gpu = |index| open_cuda(index, budget);
        match self.device {
            DeviceFlag::Cpu => self.refuse_device_flags().map(|()| None),
            DeviceFlag::Cuda(index) => Ok(Some(gpu(index)?)),
            DeviceFlag::Hybrid => {
                if let Ok(device) = gpu(0) {
                    return Ok(Some(device));
                }
                let budget = budget.map_or_else(default_budget, Ok)?;
                Ok(Some(Arc::new(StandIn::new(StandInOptions::new(budget))?)))
            }
        }
    }

    /// What is to go to the fast device, where the device is not to choose.
    pub(crate) fn offload(&self) -> Option<Offload> {
        match self.device {
            // a GPU that was asked for by name is to do all
            DeviceFlag::Cuda(_) if self.plan.is_none() => self.offload.or(Some(Offload::Whole)),
            _ => self.offload,
        }
    }

    /// Threads of the engine: all that were asked for, but for one that a stand-in takes where there
    /// is another.
    pub(crate) fn threads_beside(&self, device: &dyn FastDevice) -> Outcome<NonZeroUsize> {
        let available = || Ok(NonZeroUsize::new(self.pool()?.n_threads()));
        let threads = self.threads.map_or_else(available, |n| Ok::<_, Box<dyn Error>>(Some(n)))?;
        let threads = threads.unwrap_or(NonZeroUsize::MIN);
        let taken = usize::from(device.name() == "stand-in");
        Ok(NonZeroUsize::new(threads.get() - taken).unwrap_or(NonZeroUsize::MIN))
    }

    /// How a model is read that no engine runs.
    pub(crate) fn load_options(&self) -> LoadOptions {
        let mut options = LoadOptions::default();
        options.gguf_activation = self.activation;
        options
    }

    /// How weights are to be held.
    pub(crate) fn holding(&self) -> Holding {
        match self.holding {
            HoldingFlag::Resident => Holding::Resident,
            HoldingFlag::Mapped => Holding::Mapped,
        }
    }

    /// A pool with the threads asked for, for work outside of an engine.
    pub(crate) fn pool(&self) -> Outcome<ThreadPool> {
        Ok(ThreadPool::new(self.threads)?)
    }

    /// The dtype asked for.
    pub(crate) fn dtype(&self) -> Dtype {
        match self.dtype {
            DtypeFlag::auto => Dtype::Auto,
            DtypeFlag::f32 => Dtype::F32,
            DtypeFlag::f16 => Dtype::F16,
            DtypeFlag::bf16 => Dtype::Bf16,
            DtypeFlag::q8_0 => Dtype::Q8_0,
            DtypeFlag::q4_0 => Dtype::Q4_0,
        }
    }

    /// The type of the key-value cache asked for.
    pub(crate) fn kv_dtype(&self) -> KvDtype {
        match self.kv_dtype {
            KvDtypeFlag::f32 => KvDtype::F32,
            KvDtypeFlag::f16 => KvDtype::F16,
        }
    }

    /// The sparsity mode asked for.
    pub(crate) fn sparsity(&self) -> Sparsity {
        match self.sparsity {
            SparsityFlag::Auto => Sparsity::Auto,
            SparsityFlag::Dense => Sparsity::Dense,
            SparsityFlag::Exact => Sparsity::Exact,
            SparsityFlag::Predicted => Sparsity::Predicted,
        }
    }

    /// The predictor asked for, by its own flag or as what `predicted` mode needs.
    pub(crate) fn predictor(&self) -> Option<PredictorOptions> {
        // a model that holds one and is asked for nothing else runs that
        let wanted = self.predictor.is_some() || self.predictor_shift != 0.0;
        let source = self.predictor.clone().unwrap_or_default();
        wanted.then(|| {
            PredictorOptions::new(source)
                .with_shift(self.predictor_shift)
                .with_dtype(self.predictor_dtype)
        })
    }
}

/// The answer to flags of later versions.
pub(crate) fn not_yet<T>(what: &str, instead: &str) -> Outcome<T> {
    wrong_usage(&format!("{what} is not supported yet{instead}"))
}

/// A count of which 0 would mean nothing.
pub(crate) fn at_least_one(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) | Err(_) => Err("expected a whole number, at least 1".to_owned()),
        Ok(n) => Ok(n),
    }
}

/// A share of the neurons of a synthetic model.
#[allow(dead_code, reason = "not every example has one")]
pub(crate) fn parse_share(text: &str) -> Result<f64, String> {
    let share = text.parse().ok().filter(|share| (0.001..=0.999).contains(share));
    share.ok_or_else(|| format!("expected a number from 0.001 to 0.999, found {text:?}"))
}

fn parse_threads(text: &str) -> Result<NonZeroUsize, String> {
    let threads = text.parse().ok().filter(|threads: &NonZeroUsize| threads.get() <= 1024);
    threads.ok_or_else(|| "expected a number from 1 to 1024".to_owned())
}

pub(crate) fn parse_predictor(text: &str) -> Result<PredictorSource, String> {
    match text.strip_prefix("quantized") {
        Some("") => Ok(PredictorSource::Quantized(None)),
        Some(rest) if rest.starts_with(':') => {
            let bits = rest[1..].parse().map_err(|_| "expected 2, 3 or 4 bits".to_owned())?;
            Ok(PredictorSource::Quantized(Some(bits)))
        }
        _ if text.ends_with(".safetensors") => Ok(PredictorSource::File(text.into())),
        _ => Ok(PredictorSource::Folder(text.into())),
    }
}

fn parse_device(text: &str) -> Result<DeviceFlag, String> {
    let expected = || "expected cpu, cuda, cuda:N or hybrid".to_owned();
    match text {
        "cpu" => Ok(DeviceFlag::Cpu),
        "hybrid" => Ok(DeviceFlag::Hybrid),
        "cuda" => Ok(DeviceFlag::Cuda(0)),
        _ => {
            let number = text.strip_prefix("cuda:").and_then(|n| n.parse().ok());
            number.map(DeviceFlag::Cuda).ok_or_else(expected)
        }
    }
}
