//! NVIDIA GPUs, through candle: the same operators on rows that lie in a GPU's memory.
//!
//! `cuda/*.cu` are the kernels, one operator a file; `build.rs` compiles them to PTX. `queue.rs`,
//! `row_layout.rs`, `picks.rs` and the `*steps.rs` say what lies where and which kernels run
//! in which order; they know no GPU, so that `testing/hostsim` runs them on a CPU. `stream.rs` is
//! the queue on a GPU, and the only file with unsafe code.
//!
//! `dense_steps.rs` and its kernels, norms, rotary embedding and attention, are tested in the same way
//! and not called yet: the layers of a model run the dense parts on the CPU.
//!
//! Nothing here has run on a GPU yet.

mod device;
mod estimate;
mod exchange;
mod held;
mod matrix;
mod operator;
mod pending;
mod stream;

#[allow(unreachable_pub, dead_code, reason = "shared with testing/hostsim, where it is public")]
mod estimate_steps;
#[allow(unreachable_pub, dead_code, reason = "shared with testing/hostsim, where it is public")]
mod ffn_steps;
#[allow(unreachable_pub, dead_code, reason = "shared with testing/hostsim, where it is public")]
mod picks;
#[allow(unreachable_pub, dead_code, reason = "shared with testing/hostsim, where it is public")]
mod queue;
#[allow(unreachable_pub, dead_code, reason = "shared with testing/hostsim, where it is public")]
mod row_layout;
#[allow(unreachable_pub, dead_code, reason = "shared with testing/hostsim, where it is public")]
mod steps;

#[cfg(test)]
mod tests;

pub(crate) use device::CudaFast;
pub(crate) use matrix::DeviceCopy;
pub(crate) use operator::{CudaRows, linear, sparse_axpy, sparse_matvec};
