//! The layers that architectures are built from: shared and configured, never copied.
//!
//! Activations are f32 tensors `[n_tokens, d_model]` on the CPU.

mod attention;
mod block;
mod decoder;
mod device_block;
mod embedding;
mod ffn_shard;
mod head;
mod hot_shard;
mod linear;
mod norm;
mod position;
mod rotary;
mod sparse_ffn;
mod split_predictor;

pub use attention::{Attention, AttentionHeads, Projections};
pub use block::{Block, BlockNorms, Pass};
pub use decoder::Decoder;
pub(crate) use decoder::check_finite;
pub use device_block::{DeviceBlock, PlacedBlock};
pub use embedding::Embedding;
pub use ffn_shard::FfnShard;
pub use head::Head;
pub use hot_shard::HotShard;
pub use linear::Linear;
pub use norm::{LayerNorm, Norm, RmsNorm};
pub use position::{LearnedPositions, Position};
pub(crate) use rotary::divisors as rotary_divisors;
pub use rotary::{Rotary, RotaryTable};
pub use sparse_ffn::SparseFfn;
pub(crate) use sparse_ffn::{Whole, compare};
pub(crate) use split_predictor::SplitPredictor;

pub use crate::loader::FfnTensors;
