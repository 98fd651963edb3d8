//! NVIDIA GPUs, through candle: the same operators on rows that lie in a GPU's memory.
//!
//! `cuda/*.cu` are the kernels, one operator a file; `build.rs` compiles them to PTX. Which kernels run in
//! which order is said in the `*steps.rs`, against a `Queue`. What lies on the device, and how it
//! works beside the CPU, is said in `device.rs` and the files that it uses, against a `Backend`: a queue with
//! memory. `testing/hostsim` runs both on a CPU. `stream.rs` is the backend on a GPU, and the only file
//! with unsafe code.
//!
//! `dense_steps.rs` and its kernels, norms, rotary embedding and attention, are tested in the same way
//! and not called yet: the layers of a model run the dense parts on the CPU.
//!
//! Nothing here has run on a GPU yet.

mod device_copy;
mod open;
mod operator;
mod stream;

#[allow(unreachable_pub, dead_code, reason = "shared with testing/hostsim")]
mod backend;
#[allow(unreachable_pub, dead_code, reason = "shared with testing/hostsim")]
mod dense_steps;
#[allow(unreachable_pub, dead_code, reason = "shared with testing/hostsim")]
mod device;
#[allow(unreachable_pub, dead_code, reason = "shared with testing/hostsim")]
mod estimate;
#[allow(unreachable_pub, dead_code, reason = "shared with testing/hostsim")]
mod estimate_steps;
#[allow(unreachable_pub, dead_code, reason = "shared with testing/hostsim")]
mod exchange;
#[allow(unreachable_pub, dead_code, reason = "shared with testing/hostsim")]
mod ffn_steps;
#[allow(unreachable_pub, dead_code, reason = "shared with testing/hostsim")]
mod held;
#[allow(unreachable_pub, dead_code, reason = "shared with testing/hostsim")]
mod held_attention;
#[allow(unreachable_pub, dead_code, reason = "shared with testing/hostsim")]
mod held_head;
#[allow(unreachable_pub, dead_code, reason = "shared with testing/hostsim")]
mod held_norm;
#[allow(unreachable_pub, dead_code, reason = "shared with testing/hostsim")]
mod kv_memory;
#[allow(unreachable_pub, dead_code, reason = "shared with testing/hostsim")]
mod matrix;
#[allow(unreachable_pub, dead_code, reason = "shared with testing/hostsim")]
mod network;
#[allow(unreachable_pub, dead_code, reason = "shared with testing/hostsim")]
mod pass_memory;
#[allow(unreachable_pub, dead_code, reason = "shared with testing/hostsim")]
mod pending;
#[allow(unreachable_pub, dead_code, reason = "shared with testing/hostsim")]
mod picks;
#[allow(unreachable_pub, dead_code, reason = "shared with testing/hostsim")]
mod projection;
#[allow(unreachable_pub, dead_code, reason = "shared with testing/hostsim")]
mod queue;
#[allow(unreachable_pub, dead_code, reason = "shared with testing/hostsim")]
mod row_layout;
#[allow(unreachable_pub, dead_code, reason = "shared with testing/hostsim")]
mod scratch;
#[allow(unreachable_pub, dead_code, reason = "shared with testing/hostsim")]
mod sequence;
#[allow(unreachable_pub, dead_code, reason = "shared with testing/hostsim")]
mod steps;

#[cfg(test)]
mod tests;

pub(crate) use device_copy::DeviceCopy;
pub(crate) use open::open;
pub(crate) use operator::{CudaRows, linear, sparse_axpy, sparse_matvec};
