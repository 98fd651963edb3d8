//! NVIDIA GPUs, through candle: the same operators on rows that lie in a GPU's memory.
//!
//! `cuda/*.cu` are the kernels, one operator a file; `build.rs` compiles them to PTX. Which kernels run in
//! which order is said in the `*steps.rs`, against a `Queue`. What lies on the device, and how it
//! works beside the CPU, is said in `device.rs` and the files that it uses, against a `Backend`: a queue with
//! memory. `testing/hostsim` runs both on a CPU. `stream.rs` is the backend on a GPU, and the only file
//! with unsafe code.
//!
//! | file | what it holds |
//! |---|---|
//! | `device.rs` | the device: budget, scratch memory (`scratch.rs`) |
//! | `held.rs`, `held_predictor.rs`, `estimate.rs` | hot rows and what predicts which of them fire |
//! | `network.rs`, `exchange.rs`, `pending.rs` | a network that is queued, what crosses the link, its end |
//! | `sequence.rs`, `pass_memory.rs`, `kv_memory.rs` | the residual stream of a text, its keys and values |
//! | `held_norm.rs`, `held_attention.rs`, `held_head.rs` | dense parts that work on it |
//!
//! Nothing here has run on a GPU yet.

mod backend;
mod device;
mod device_copy;
mod estimate;
mod exchange;
mod held;
mod held_attention;
mod held_head;
mod held_norm;
mod held_predictor;
mod kv_memory;
mod matrix;
mod network;
mod open;
mod operator;
mod pass_memory;
mod pending;
mod projection;
mod scratch;
mod sequence;
mod stream;

#[allow(unreachable_pub, reason = "shared with testing/hostsim, where it is public")]
mod dense_steps;
#[allow(unreachable_pub, reason = "shared with testing/hostsim, where it is public")]
mod estimate_steps;
#[allow(unreachable_pub, reason = "shared with testing/hostsim, where it is public")]
mod ffn_steps;
#[allow(unreachable_pub, reason = "shared with testing/hostsim, where it is public")]
mod list_steps;
#[allow(unreachable_pub, reason = "shared with testing/hostsim, where it is public")]
mod mlp_steps;
#[allow(unreachable_pub, reason = "shared with testing/hostsim, where it is public")]
mod picks;
#[allow(unreachable_pub, reason = "shared with testing/hostsim, where it is public")]
mod queue;
#[allow(unreachable_pub, reason = "shared with testing/hostsim, where it is public")]
mod row_layout;
#[allow(unreachable_pub, reason = "shared with testing/hostsim, where it is public")]
mod steps;
#[allow(unreachable_pub, reason = "shared with testing/hostsim, where it is public")]
mod tiled_steps;

#[cfg(test)]
mod tests;

pub(crate) use device_copy::DeviceCopy;
pub(crate) use open::open;
pub(crate) use operator::{CudaRows, linear, sparse_axpy, sparse_matvec};
