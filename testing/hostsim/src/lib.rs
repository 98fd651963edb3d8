//! Runs the GPU side of powerinfer-ops on the CPU, for tests.
//!
//! A CUDA thread is a fibre; the order in which they run is given, so that a result which depends on
//! it shows a barrier that is missing. Memory of a [`HostBuffer`] lies between guards, which show
//! writes beyond it. The sequences of launches, and the device that is made of them, are the library's
//! own: this crate includes their files and implements the queue and the backend that they are written
//! against. [`SimDevice`] is that device.
//!
//! Not covered: races between blocks, the ordering of memory between threads, occupancy, speed.
//!
//! A kernel file under `powerinfer-ops/src/cuda/` is added to `src/all.cu`; a planted fault to the list in
//! `build.rs` and to [`Mutant`]; a planted mistake of a backend to [`Mistake`].
#![cfg(not(no_shim))]

// What the included files find at the root of their own crate.
pub(crate) use powerinfer_ops::{
    Activation, AttentionPart, DensePart, DeviceMemory, DeviceSequence, FastDevice, FfnCounts,
    FfnWeights, GateEstimate, HeadPart, HeldAttention, HeldFfn, HeldHead, HeldNeurons, HeldNorm,
    HeldRun, HotRows, LowBitFormat, MlpLayers, NeuronIds, NeuronMatrix, NormPart, OpError,
    PendingFfn, RowPredictor, SequenceShape, Slot, WeightFormat, attention,
};

mod fast_device {
    pub(crate) use crate::dense_check;
    pub(crate) use crate::held_shape::HeldShape;
}

#[path = "../../../powerinfer-ops/src/check.rs"]
mod check;
#[path = "../../../powerinfer-ops/src/fast_device/dense_check.rs"]
mod dense_check;
#[path = "../../../powerinfer-ops/src/fast_device/held_shape.rs"]
mod held_shape;

#[path = "../../../powerinfer-ops/src/cuda/dense_steps.rs"]
pub mod dense_steps;
#[path = "../../../powerinfer-ops/src/cuda/estimate_steps.rs"]
pub mod estimate_steps;
#[path = "../../../powerinfer-ops/src/cuda/ffn_steps.rs"]
pub mod ffn_steps;
#[path = "../../../powerinfer-ops/src/cuda/list_steps.rs"]
pub mod list_steps;
#[path = "../../../powerinfer-ops/src/cuda/mlp_steps.rs"]
pub mod mlp_steps;
#[path = "../../../powerinfer-ops/src/cuda/picks.rs"]
pub mod picks;
#[path = "../../../powerinfer-ops/src/cuda/queue.rs"]
pub mod queue;
#[path = "../../../powerinfer-ops/src/cuda/row_layout.rs"]
pub mod row_layout;
#[path = "../../../powerinfer-ops/src/cuda/steps.rs"]
pub mod steps;
#[path = "../../../powerinfer-ops/src/cuda/tiled_steps.rs"]
pub mod tiled_steps;

#[path = "../../../powerinfer-ops/src/cuda/backend.rs"]
mod backend;
#[path = "../../../powerinfer-ops/src/cuda/device.rs"]
mod device;
#[path = "../../../powerinfer-ops/src/cuda/estimate.rs"]
mod estimate;
#[path = "../../../powerinfer-ops/src/cuda/exchange.rs"]
mod exchange;
#[path = "../../../powerinfer-ops/src/cuda/held.rs"]
mod held;
#[path = "../../../powerinfer-ops/src/cuda/held_attention.rs"]
mod held_attention;
#[path = "../../../powerinfer-ops/src/cuda/held_head.rs"]
mod held_head;
#[path = "../../../powerinfer-ops/src/cuda/held_norm.rs"]
mod held_norm;
#[path = "../../../powerinfer-ops/src/cuda/held_predictor.rs"]
mod held_predictor;
#[path = "../../../powerinfer-ops/src/cuda/kv_memory.rs"]
mod kv_memory;
#[path = "../../../powerinfer-ops/src/cuda/matrix.rs"]
mod matrix;
#[path = "../../../powerinfer-ops/src/cuda/network.rs"]
mod network;
#[path = "../../../powerinfer-ops/src/cuda/pass_memory.rs"]
mod pass_memory;
#[path = "../../../powerinfer-ops/src/cuda/pending.rs"]
mod pending;
#[path = "../../../powerinfer-ops/src/cuda/projection.rs"]
mod projection;
#[path = "../../../powerinfer-ops/src/cuda/scratch.rs"]
mod scratch;
#[path = "../../../powerinfer-ops/src/cuda/sequence.rs"]
mod sequence;

mod host_buffer;
mod host_queue;
mod sim;
mod sim_backend;
mod sim_device;

pub use host_buffer::HostBuffer;
pub use host_queue::{HostQueue, LaunchError, Mutant};
pub use sim::Limits;
pub use sim_backend::Mistake;
pub use sim_device::SimDevice;
