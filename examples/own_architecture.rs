//! An architecture of one's own behind the same engine: sampling, streaming, stop strings and
//! statistics come with it.
//!
//! ```sh
//! cargo run --release --example own_architecture
//! cargo run --release --example own_architecture -- "And God said" --depth 4
//! ```
//!
//! The model here is a decoder that stops early: it runs the first `--depth` layers of a LLaMA
//! and goes straight to the head. It is built from the layers in `powerinfer::models::layers`, and
//! what makes it a model is `impl CausalLm`. At full depth it writes what `generate` writes; with
//! one layer fewer it is faster and worse.

#[path = "support/flags.rs"]
mod flags;
#[path = "support/progress.rs"]
mod progress;
#[path = "support/report.rs"]
mod report;

use std::path::Path;
use std::process::ExitCode;

use clap::Parser;
use powerinfer::core::{self, CausalLm, Error, KvCache, ModelConfig, ModelInfo, Step, WeightStore};
use powerinfer::models::layers::{
    Attention, AttentionHeads, Block, BlockNorms, Embedding, FfnTensors, Head, Pass, Position,
    Projections, RmsNorm,
};
use powerinfer::models::{self, Loader};
use powerinfer::ops::WeightFormat;
use powerinfer::{Engine, GenerateOptions, Sparsity};
use serde_json::json;

use flags::{CommonFlags, at_least_one};
use progress::Progress;
use report::{Outcome, note, print, print_json};

/// Writes text with an architecture of one's own.
#[derive(Debug, Parser)]
#[command(name = "own_architecture")]
struct Flags {
    /// The text to continue
    #[arg(default_value = "It was a truth")]
    prompt: String,
    /// Layers to run [default: all]
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    depth: Option<usize>,
    /// Most tokens to write
    #[arg(long, value_name = "N", default_value = "60", value_parser = at_least_one)]
    max_tokens: usize,
    #[command(flatten)]
    common: CommonFlags,
}

/// A LLaMA that leaves out its last layers.
#[derive(Debug)]
struct EarlyExit {
    info: ModelInfo,
    embedding: Embedding,
    position: Position,
    blocks: Vec<Block>,
    norm: RmsNorm,
    head: Head,
}

impl CausalLm for EarlyExit {
    fn info(&self) -> &ModelInfo {
        &self.info
    }

    fn forward(&self, tokens: &[u32], cache: &mut KvCache, step: &mut Step) -> core::Result<()> {
        if tokens.is_empty() {
            return Err(Error::EmptyPrompt);
        }
        let mut x = self.embedding.forward(tokens)?;
        cache.reserve(tokens.len())?;
        let rotary = self.position.rotary(cache.len(), tokens.len())?;
        let rotary = rotary.as_ref();
        let sparsity = step.sparsity.unwrap_or(self.info.sparsity);
        for (layer, block) in self.blocks.iter().enumerate() {
            x = block.forward(&x, Pass { layer, sparsity, rotary }, cache, step)?;
        }
        let n_rows = step.wanted.n_rows(tokens.len());
        let wanted = x.narrow(0, tokens.len() - n_rows, n_rows)?;
        step.logits.clear();
        if n_rows > 0 {
            self.head.forward(&self.norm.forward(&wanted)?, &mut step.logits)?;
        }
        step.stats.n_tokens += tokens.len() as u64;
        cache.commit();
        Ok(())
    }
}

impl EarlyExit {
    /// Loads the first `depth` layers of the LLaMA in `dir`.
    fn load(
        dir: &Path,
        depth: Option<usize>,
        dtype: Option<WeightFormat>,
        sparsity: Sparsity,
    ) -> models::Result<Self> {
        let config = ModelConfig::from_dir(dir, &["llama"])?;
        let mut store = WeightStore::open(dir)?;
        let depth = depth.unwrap_or(config.n_layers).min(config.n_layers);
        let loader = &mut Loader::new(&mut store, dtype, None);
        let (d_model, eps) = (config.d_model, config.norm_eps);
        let table = loader.matrix("model.embed_tokens.weight", config.vocab_size, d_model)?;
        let embedding = Embedding::new(table);
        let model = Self {
            info: info(&config, depth, sparsity),
            position: Position::new(&config.position, config.d_head, None),
            blocks: (0..depth)
                .map(|layer| block(&config, layer, loader))
                .collect::<Result<_, _>>()?,
            norm: loader.rms_norm("model.norm", d_model, eps)?,
            head: Head::load("lm_head.weight", &embedding, config.tie_word_embeddings, loader)?,
            embedding,
        };
        // The layers that are left out may stay in the file, and nothing else.
        store.finish(&|name| name.starts_with("model.layers."))?;
        Ok(model)
    }
}

fn info(config: &ModelConfig, depth: usize, sparsity: Sparsity) -> ModelInfo {
    let mut info = ModelInfo::default();
    info.architecture = "early-exit".to_owned();
    info.n_layers = depth;
    info.d_model = config.d_model;
    info.d_ff = config.d_ff;
    info.vocab_size = config.vocab_size;
    info.max_context = config.max_context;
    info.kv = config.kv_shape();
    info.activation = config.activation.to_string();
    info.sparsity = match sparsity {
        Sparsity::Auto if config.activation.is_sparse() => Sparsity::Exact,
        Sparsity::Auto => Sparsity::Dense,
        asked => asked,
    };
    info.eos_token_ids.clone_from(&config.eos_token_ids);
    info
}

fn block(config: &ModelConfig, layer: usize, loader: &mut Loader<'_>) -> core::Result<Block> {
    let name = |part: &str| format!("model.layers.{layer}.{part}");
    let heads = AttentionHeads::new(config.n_heads, config.n_kv_heads, config.d_head);
    let (d_model, eps) = (config.d_model, config.norm_eps);
    let (q, kv, bias) = (heads.query_width(), heads.kv_width(), config.attention_bias);
    let norms = BlockNorms::Before {
        attention: loader.rms_norm(&name("input_layernorm"), d_model, eps)?.into(),
        ffn: loader.rms_norm(&name("post_attention_layernorm"), d_model, eps)?.into(),
    };
    let projections = Projections {
        query: loader.linear(&name("self_attn.q_proj"), q, d_model, bias)?,
        key: loader.linear(&name("self_attn.k_proj"), kv, d_model, bias)?,
        value: loader.linear(&name("self_attn.v_proj"), kv, d_model, bias)?,
        output: loader.linear(&name("self_attn.o_proj"), d_model, q, bias)?,
    };
    Ok(Block {
        norms,
        attention: Attention::new(projections, heads),
        ffn: loader.ffn(FfnTensors {
            gate: &name("mlp.gate_proj"),
            up: Some(&name("mlp.up_proj")),
            down: &name("mlp.down_proj"),
            d_ff: config.d_ff,
            d_model,
            bias: config.mlp_bias,
            activation: config.activation,
            up_activation: config.up_activation,
        })?,
    })
}

fn main() -> ExitCode {
    report::run(own_architecture)
}

fn own_architecture(flags: Flags) -> Outcome<()> {
    let common = &flags.common;
    common.refuse_fast_device()?;
    common.refuse_unused(&[
        "--holding",
        "--activation",
        "--requantise-down",
        "--predictor",
        "--predictor-shift",
        "--predictor-dtype",
    ])?;
    let dir = common.model_path();
    let (dtype, sparsity) = (common.dtype().weight_format(), common.sparsity());
    let pool = common.pool()?;
    let mut model = {
        let _progress = Progress::loading();
        pool.install(|| EarlyExit::load(&dir, flags.depth, dtype, sparsity))?
    };
    model.info.kv.dtype = common.kv_dtype();
    note(&format!("{} layers, {}", model.info.n_layers, model.info.sparsity));

    let engine = Engine::builder()
        .causal_lm(model)
        .tokenizer_file(dir.join("tokenizer.json"))
        .threads(pool.n_threads())
        .build()?;
    let mut session = engine.session()?;
    let options = GenerateOptions::default().with_max_tokens(flags.max_tokens);
    if common.json {
        let generated = session.generate_text(&flags.prompt, &options)?;
        return print_json(&json!({
            "architecture": engine.info().architecture,
            "depth": engine.info().n_layers,
            "prompt_ids": generated.prompt_ids,
            "ids": generated.ids,
            "text": generated.text,
            "finish_reason": generated.finish_reason.name(),
        }));
    }
    for piece in session.generate(&flags.prompt, &options)? {
        print(&piece?.text)?;
    }
    print("\n")
}
