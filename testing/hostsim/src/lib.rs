//! Runs the CUDA kernels of powerinfer-ops on the CPU, for tests.
//!
//! A CUDA thread is a fibre; the order in which they run is given, so that a result which depends on
//! it shows a barrier that is missing. Memory of a [`HostBuffer`] lies between guards, which show
//! writes beyond it. The sequences of launches are the library's own: this crate includes their
//! files and implements the queue that they are written against.
//!
//! Not covered: races between blocks, the ordering of memory between threads, occupancy, speed.
//!
//! A kernel file under `powerinfer-ops/src/cuda/` is added to `src/all.cu`; a planted fault to the list in
//! `build.rs` and to [`Mutant`].
#![cfg(not(no_shim))]

pub(crate) use powerinfer_ops::{Activation, GateEstimate, LowBitFormat, WeightFormat};

#[path = "../../../powerinfer-ops/src/cuda/dense_steps.rs"]
pub mod dense_steps;
#[path = "../../../powerinfer-ops/src/cuda/estimate_steps.rs"]
pub mod estimate_steps;
#[path = "../../../powerinfer-ops/src/cuda/ffn_steps.rs"]
pub mod ffn_steps;
#[path = "../../../powerinfer-ops/src/cuda/picks.rs"]
pub mod picks;
#[path = "../../../powerinfer-ops/src/cuda/queue.rs"]
pub mod queue;
#[path = "../../../powerinfer-ops/src/cuda/row_layout.rs"]
pub mod row_layout;
#[path = "../../../powerinfer-ops/src/cuda/steps.rs"]
pub mod steps;

mod host_buffer;
mod host_queue;

pub use host_buffer::HostBuffer;
pub use host_queue::{HostQueue, LaunchError, Mutant};
