//! The spine of PowerInfer: model files in, tokens out.
//!
//! This crate knows file formats and the token loop. What a layer computes is in
//! `powerinfer-models`, how it computes it in [`powerinfer_ops`]; text and tokenizers are in
//! `powerinfer`, which most applications use instead of this crate.
//!
//! # The flow
//!
//! | stage | type |
//! |---|---|
//! | `config.json` → one checked struct | [`ModelConfig`] |
//! | weight files → matrices by name, each checked, none overlooked | [`WeightStore`], [`TensorSource`] |
//! | how often each neuron fires | [`ActivationProfile`] |
//! | a budget and a machine → where everything goes, and how fast that is | [`plan`], [`Plan`], [`Hardware`], [`simulate`] |
//! | which neurons are hot, which cold | [`Placement`] |
//! | keys and values of the tokens so far | [`KvCache`] |
//! | tokens and cache → logits | [`CausalLm`], [`Step`] |
//! | logits → token | [`Sampler`], [`Sampling`] |
//! | prompt → tokens, one by one | [`Generation`], [`GenerationOptions`], [`LogitsHook`], [`CancelToken`] |
//! | what ran, what it cost | [`StepStats`], [`GenerationStats`] |
//!
//! Everything that fails, fails with an [`Error`] that says where, what was expected and what was
//! found. Files are not trusted: sizes that they state are checked before memory is allocated for
//! them, and no file makes this crate panic.
//!
//! # Example
//!
//! A model that says the sum of all tokens so far, with a context of 100. The cache of a model
//! without attention holds no numbers, only the count of tokens; this one keeps its sum there,
//! in a single key of one value.
//!
//! ```
//! use powerinfer_core::{
//!     CausalLm, Error, FinishReason, Generation, GenerationOptions, KvCache, KvShape, ModelInfo,
//!     Result, Step,
//! };
//! use powerinfer_ops::attention::{KvPages, PAGE_LEN};
//!
//! #[derive(Debug)]
//! struct Sum(ModelInfo);
//!
//! impl Sum {
//!     fn new() -> Self {
//!         let mut info = ModelInfo::default();
//!         info.architecture = "sum".to_owned();
//!         info.vocab_size = 50;
//!         let (n_layers, n_kv_heads, d_head, max_context) = (1, 1, 1, 100);
//!         info.kv = KvShape { n_layers, n_kv_heads, d_head, max_context, ..KvShape::default() };
//!         Self(info)
//!     }
//! }
//!
//! impl CausalLm for Sum {
//!     fn info(&self) -> &ModelInfo {
//!         &self.0
//!     }
//!
//!     fn forward(&self, tokens: &[u32], cache: &mut KvCache, step: &mut Step) -> Result<()> {
//!         let vocab_size = self.0.vocab_size;
//!         let have = cache.len();
//!         cache.reserve(tokens.len())?;
//!         let before = match have.checked_sub(1) {
//!             Some(last) => cache.layer(0).page(last / PAGE_LEN).key(0, last % PAGE_LEN)[0],
//!             None => 0.0,
//!         };
//!         let sums: Vec<f32> = tokens
//!             .iter()
//!             .scan(before, |sum, token| {
//!                 *sum = (*sum + *token as f32) % vocab_size as f32;
//!                 Some(*sum)
//!             })
//!             .collect();
//!         cache.write(0, &sums, &sums)?;
//!
//!         let rows = step.wanted.n_rows(tokens.len());
//!         step.logits.clear();
//!         step.logits.resize(rows * vocab_size, 0.0);
//!         let wanted = &sums[sums.len() - rows..];
//!         for (row, sum) in step.logits.chunks_exact_mut(vocab_size).zip(wanted) {
//!             row[*sum as usize] = 1.0;
//!         }
//!         step.stats.n_tokens += tokens.len() as u64;
//!         cache.commit();
//!         Ok(())
//!     }
//! }
//!
//! let model = Sum::new();
//! let (mut cache, mut step, mut history) = (model.new_cache(), Step::default(), Vec::new());
//! let options = GenerationOptions::default().with_max_tokens(5);
//! let mut tokens =
//!     Generation::new(&model, &mut cache, &mut step, &mut history, &[1, 2], options)?;
//!
//! assert_eq!(tokens.by_ref().collect::<Result<Vec<_>>>()?, [3, 6, 12, 24, 48]);
//! assert_eq!(tokens.finish_reason(), Some(FinishReason::MaxTokens));
//! assert_eq!(tokens.stats().decode.n_tokens, 4);
//! // the last token has not run yet
//! assert_eq!(tokens.pending(), Some(48));
//! assert_eq!(history, [1, 2, 3, 6, 12, 24]);
//! # Ok::<(), Error>(())
//! ```
//!
//! # Limits
//!
//! - Weights: safetensors, one file or shards with an index, of f32, f16 and bf16; GGUF, plain and
//!   PowerInfer's, of these and of the quantised types that [`powerinfer_ops`] computes.
//! - Configurations: those of Hugging Face for models with rotary embedding (unscaled, linear,
//!   llama3) and a ReLU or SiLU feed-forward network.
//! - One sequence a cache; its context is full when it is full, nothing is shifted out.
#![deny(unsafe_code)]

mod allocation;
mod cancel;
mod config;
mod digest;
mod error;
mod generation;
mod json;
mod kv_cache;
mod load_progress;
mod model;
mod placement;
mod profile;
mod regular_file;
mod replace_file;
mod sampler;
mod split_mix;
mod stats;
mod weights;

pub use cancel::CancelToken;
pub use config::{
    BlockOrder, GgufContext, ModelConfig, PositionConfig, RopeScaling, RotaryConfig,
    read_predictor_thresholds,
};
pub use digest::Digest;
pub use error::{Error, Result};
pub use generation::{
    FinishReason, Generation, GenerationOptions, GenerationStats, LogitsHook, TokenLogprobs,
};
pub use kv_cache::{KvCache, KvShape, LayerPages};
pub use load_progress::LoadProgress;
pub use model::{CausalLm, FfnObserver, FfnSeen, ModelInfo, Sparsity, Step, WantedLogits};
pub use placement::{
    Arrangement, DeviceMemorySpeed, Hardware, LayerSizes, ModelSizes, Offload, Placement, Plan,
    PlanRequest, PlannedDevice, PlannedLayer, PlannedModel, Skew, StepTimes, Workload, plan,
    simulate,
};
pub use profile::{ActivationProfile, ProfiledModel};
pub use replace_file::{check_output, replace_file};
pub use sampler::{Sampler, Sampling};
pub use split_mix::SplitMix64;
pub use stats::{PredictionCounts, SplitStats, StepStats};
pub use weights::{
    FileDtype, GgufArray, GgufElement, GgufFile, GgufHeader, GgufMetadata, GgufValue, GpuIndex,
    Holding, Layout, MappedTensor, TensorInfo, TensorSource, WeightStore, write_gguf,
    write_pytorch, write_safetensors, write_safetensors_with,
};
