//! The library's GPU as a whole, its kernels on a CPU: the cases of the GPU's own tests, planted
//! mistakes of a backend against them, and whole models.
#![cfg(not(no_shim))]
#![allow(clippy::unwrap_used, reason = "tests")]

#[path = "../../../../powerinfer-ops/src/cuda/tests/cases.rs"]
mod cases;
mod dense;
#[path = "../../../../powerinfer-ops/src/cuda/tests/dense_cases.rs"]
mod dense_cases;
#[path = "../../../../powerinfer-ops/src/cuda/tests/dense_model.rs"]
mod dense_model;
mod failure;
mod lost;
mod mistake;
mod model;
mod network;

// What the included cases find at the root of their own crate.
pub(crate) use hostsim::row_layout;
pub(crate) use powerinfer_ops::{
    Activation, AttentionPart, DensePart, DeviceSequence, FastDevice, FfnCounts, FfnWeights,
    GateEstimate, HeadPart, HeldAttention, HeldFfn, HeldHead, HeldNeurons, HeldNorm, HotRows,
    LowBitFormat, NeuronIds, NeuronMatrix, Neurons, NormPart, OpError, RowPredictor, SequenceShape,
    Slot, WeightFormat, Workspace, attention, ffn, linear,
};

/// Thread orders: ascending, descending, at random.
const ORDERS: [u64; 3] = [0, 1, 7];
