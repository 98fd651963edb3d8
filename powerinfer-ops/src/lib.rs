//! Neuron-aware operators for [candle](candle_core): a row of a weight matrix is a neuron, and only
//! the rows that are asked for are read.
//!
//! PowerInfer (arXiv 2312.12456, "Neuron-aware Operator") computes the feed-forward network of a
//! ReLU model only for the neurons that fire. These operators do that work on the CPU, and the
//! dense projections around it with the same kernels.
//!
//! # Operators
//!
//! | operator | computes | reads |
//! |---|---|---|
//! | [`sparse_matvec`] | `mask ⊙ (x · Wᵀ)`: gate and up | the picked rows |
//! | [`sparse_axpy`] | `(mask ⊙ h) · W`: down, stored transposed | the picked rows |
//! | [`ffn`] | a whole feed-forward network, gated or not | all gate rows, then what fires |
//! | [`hybrid_ffn`] | the same, its hot rows on a fast device meanwhile | the same |
//! | [`linear`], [`linears`], [`linear_into`] | `x · Wᵀ + b` | all rows |
//! | [`causal_attention`](attention::causal_attention) | attention over a paged cache | the cache |
//! | [`embed`] | rows by token id | one row a token |
//! | [`residual_add`], [`add_bias`] | sums of activations | – |
//!
//! [`with_f32`] lends the values of a tensor as a slice.
//!
//! Activations are contiguous f32 candle tensors `[n_tokens, d_model]`; weights are
//! [`NeuronMatrix`]es in any [`WeightFormat`].
//!
//! # What is promised
//!
//! - **Same bits.** Every product of a row and a token is one sum in one fixed order, and so is every
//!   column of a weighted sum of rows. Skipped or computed, alone or among other tokens, on one
//!   thread or many: the same bits. Only another instruction set or another split of the neurons
//!   changes the rounding.
//! - **Nothing silent.** A wrong shape, type, device or stride is an [`OpError`] that names the
//!   operator and the operand.
//!
//! # Kernels
//!
//! [`RowKernels`] are chosen at run time: `scalar` (the definition, everywhere), `avx2` (with FMA
//! and F16C), `avx512` (F, BW, VL) and `avx512vnni` on x86-64, `neon` on 64-bit ARM. Other
//! architectures run the scalar kernels. The NEON kernels are tested under an emulator; nobody has
//! measured their speed yet.
//!
//! Dot products of quantised rows, those of Q6_K apart, round the values they meet to eight bits in
//! blocks of 32, as ggml does, and multiply whole numbers: the product moves by at most
//! `Σ_blocks max|x| / 254 · Σ_i |w[i]|`. Weighted sums of rows take activations as they are, those of
//! Q8_0 and Q4_0 in 13 significant bits: then the scale of a block times the activation is exact.
//!
//! Work is cut into tasks for the rayon pool it is called in; see [`ThreadPool`].
//!
//! # Fast devices
//!
//! A [`FastDevice`] holds the hot rows of a feed-forward network within a budget and computes them
//! while the CPU computes the others: [`HeldFfn::start`] queues the work, [`PendingFfn::wait`] adds
//! its partial output. [`StandIn`] is one made of threads.
//!
//! # Examples
//! ```
//! use candle_core::{Device, Tensor};
//! use powerinfer_ops::{ActivationMask, NeuronMatrix, WeightFormat, sparse_matvec};
//!
//! let gate = NeuronMatrix::from_f32(WeightFormat::F16, 4, 2, &[1., 1., 2., 0., 0., 3., -1., 4.])?;
//! let mut mask = ActivationMask::new(1, 4);
//! mask.set(0, 1);
//! mask.set(0, 3);
//! let x = Tensor::new(&[[0.5f32, 2.0]], &Device::Cpu)?;
//! let y = sparse_matvec(&gate, &mask, &x)?;
//! assert_eq!(y.to_vec2::<f32>()?, [[0.0, 1.0, 0.0, 7.5]]);
//! # Ok::<(), powerinfer_ops::OpError>(())
//! ```
//!
//! # Limits
//!
//! `unsafe` is confined to the files of one instruction set each and the bodies they share, and to the
//! one that launches CUDA kernels.
#![deny(unsafe_code)]

mod activation;
pub mod attention;
mod bandwidth;
mod bytes;
mod check;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
mod embedding;
mod error;
mod fast_device;
mod ffn;
mod format;
mod gate_estimate;
mod hybrid_ffn;
mod linears;
mod low_bit_matrix;
mod mask;
mod matrix;
mod par_fill;
mod residual;
mod sparse_axpy;
mod sparse_matvec;
mod stand_in;
mod tensor;
mod threads;
mod workspace;

pub use activation::Activation;
pub use bandwidth::{ReadBandwidth, read_bandwidth};
pub use cpu::RowKernels;
pub use embedding::embed;
pub use error::OpError;
pub use fast_device::{
    AttentionPart, DensePart, DeviceMemory, DeviceSequence, FastDevice, HeadPart, HeldAttention,
    HeldFfn, HeldHead, HeldNeurons, HeldNorm, HeldRun, HotRows, NormPart, PendingFfn, RowPredictor,
    SequenceShape, Slot, open_cuda,
};
pub use ffn::{FfnCounts, FfnWeights, NeuronScores, Neurons, ffn, ffn_activations};
pub use format::WeightFormat;
pub use format::low_bit::LowBitFormat;
pub use gate_estimate::GateEstimate;
pub use hybrid_ffn::{HybridRun, hybrid_ffn};
pub use linears::linears;
pub use low_bit_matrix::LowBitMatrix;
pub use mask::{ActivationMask, NeuronIds};
pub use matrix::{NeuronMatrix, SharedBytes};
pub use par_fill::par_fill;
pub use residual::{add_bias, residual_add};
pub use sparse_axpy::{SparseAxpy, sparse_axpy};
pub use sparse_matvec::{SparseMatvec, linear, linear_into, sparse_matvec};
pub use stand_in::{ModelledSpeed, StandIn, StandInFailure, StandInOptions};
pub use tensor::with_f32;
pub use threads::ThreadPool;
pub use workspace::Workspace;
