//! Architectures: from a model folder to a [`CausalLm`](powerinfer_core::CausalLm).
//!
//! [`load`] is the whole flow: configuration → weights → placement → layers. An architecture is one
//! file that says in which order its blocks come and what its tensors are called; all arithmetic
//! is in [`layers`], which are public so that models of one's own can be built from them.
//!
//! | `model_type` | what it covers |
//! |---|---|
//! | `llama` | grouped queries, rotary embedding (default, linear, llama3), biases, tied and untied heads |
//! | `sparsellama` | ProSparse: the same with `fatrelu`, whose threshold is `hidden_act_param` |
//! | `mistral` | the same with a sliding window |
//! | `bamboo`, `turbosparse` | the same with dReLU: the activation on gate and up |
//! | `opt` | norms before or after, projected embeddings, learned positions, with or without biases and weights of norms |
//! | `falcon`, `RefinedWeb`, `RefinedWebModel` | attention and feed-forward network side by side or in turn, one norm or two; one, some or all key-value heads; rotary or ALiBi; the keys of every release |
//!
//! `relu` and `fatrelu` run sparsely, `silu` and `gelu` (the exact one) densely. Any other setting
//! that would change what is computed is an error that names it.
//!
//! # Modes
//!
//! - [`Sparsity::Dense`](powerinfer_core::Sparsity): every neuron.
//! - [`Sparsity::Exact`](powerinfer_core::Sparsity): the gate in full, up and down for the neurons that
//!   it lets through. The same logits as dense, to the bit.
//! - [`Sparsity::Predicted`](powerinfer_core::Sparsity): gate, up and down for what a predictor lists;
//!   a little loss for less reading, see [`PredictorOptions`].
//! - [`Sparsity::Auto`](powerinfer_core::Sparsity): exact where the activation is sparse, else dense;
//!   predicted only if a predictor is given.
//!
//! # Hot and cold
//!
//! With [`LoadOptions::fast_device`] the hot neurons of every layer lie on that device and run there
//! while the CPU runs the cold ones. Which are hot is what a placement or a plan says, or what
//! a profile and the device's budget come to.
//!
//! # Examples
//!
//! A small model with random weights, run without any file:
//!
//! ```
//! use powerinfer_core::{CausalLm, Step};
//! use powerinfer_models::LoadOptions;
//! use powerinfer_models::synthetic::{Synthetic, SyntheticShape};
//!
//! let synthetic = Synthetic::new(SyntheticShape::Tiny, 0.1, 7)?;
//! let model = synthetic.load(&LoadOptions::default())?;
//! let (mut cache, mut step) = (model.new_cache(), Step::default());
//! model.forward(&[1, 5, 9], &mut cache, &mut step)?;
//! assert_eq!(step.logits.len(), model.info().vocab_size);
//! assert!((step.stats.density() - 0.1).abs() < 0.02);
//! # Ok::<(), powerinfer_models::Error>(())
//! ```
//!
//! # Limits
//!
//! Weights come from safetensors, from GGUF files, or on request from PyTorch files. Everything
//! but hot neurons runs on the CPU.
#![forbid(unsafe_code)]

mod calibrate;
mod convert;
mod error;
mod estimate;
mod falcon;
mod gguf_names;
mod gguf_predictor;
pub mod layers;
mod llama;
mod load;
mod loader;
mod opt;
mod placing;
mod predictor;
mod registry;
mod sizes;
pub mod synthetic;
mod train;

pub use calibrate::calibrate;
pub use convert::{ConvertOptions, Converted, PredictorTensors, convert};
pub use error::{Error, Result};
pub use estimate::{MemoryEstimate, estimate};
pub use gguf_predictor::{GgufPredictor, MlpPredictorWeights};
pub use load::{LoadOptions, load, open};
pub use loader::Loader;
pub use placing::profile_path;
pub use predictor::{PredictorOptions, PredictorSource};
pub use registry::supported_model_types;
pub use sizes::model_sizes;
pub use train::{TrainMethod, TrainOptions, TrainStage, TrainedPredictor, train_predictor};
