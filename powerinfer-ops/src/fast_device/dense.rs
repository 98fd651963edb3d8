//! What surrounds the feed-forward networks of a model, on a fast device: norms, attention with its
//! keys and values, and the head.
//!
//! Where a layer's attention lies on the device, so does the residual stream, and of a layer only the
//! network's input goes to the host and the cold neurons' part comes back: two exchanges of
//! `[n_tokens, d_model]`, and none where no neuron is cold. A pass goes like this, each step by the
//! thread that computes it; only the steps that give something to the host wait:
//!
//! 1. [`DeviceSequence::begin`] makes room for the tokens, [`write`](DeviceSequence::write) brings the
//!    residual stream.
//! 2. For each layer the device's norms and attention run ([`HeldNorm::run`], [`HeldAttention::run`]), then
//!    the hot neurons ([`HeldFfn::start_in`](super::HeldFfn::start_in)) while the CPU
//!    [`read`](DeviceSequence::read)s the network's input and computes the cold ones;
//!    [`finish_ffn`](DeviceSequence::finish_ffn) adds both to the stream.
//! 3. [`HeldHead::run`] gives logits, or `read` the stream, where the next layer is the CPU's.
//! 4. [`take_runs`](DeviceSequence::take_runs) says what the networks did.

use std::any::Any;
use std::fmt;
use std::ops::Range;

use super::HeldRun;
use crate::attention::KvLayout;
use crate::error::OpError;
use crate::matrix::NeuronMatrix;

/// A matrix and what is added to its products.
#[derive(Debug, Clone, Copy)]
pub struct DensePart<'a> {
    /// `[n_out, n_in]`
    pub weights: &'a NeuronMatrix,
    /// `[n_out]`
    pub bias: Option<&'a [f32]>,
}

/// A norm.
#[derive(Debug, Clone, Copy)]
pub struct NormPart<'a> {
    /// `[d_model]`
    pub scale: &'a [f32],
    /// `[d_model]`; `None` adds nothing.
    pub shift: Option<&'a [f32]>,
    /// What is added to the mean square, or to the variance.
    pub eps: f32,
    /// Whether the mean is taken away first, which makes it a layer norm; else it is the norm by the
    /// root of the mean square.
    pub centred: bool,
}

/// Attention with its projections, as in
/// [`causal_attention`](crate::attention::causal_attention).
#[derive(Debug, Clone, Copy)]
pub struct AttentionPart<'a> {
    /// `[n_heads · d_head, d_model]`
    pub query: DensePart<'a>,
    /// `[n_kv_heads · d_head, d_model]`
    pub key: DensePart<'a>,
    /// `[n_kv_heads · d_head, d_model]`
    pub value: DensePart<'a>,
    /// `[d_model, n_heads · d_head]`
    pub output: DensePart<'a>,
    /// Query heads.
    pub n_heads: usize,
    /// Key and value heads.
    pub n_kv_heads: usize,
    /// Values of a head.
    pub d_head: usize,
    /// What products of queries and keys are multiplied with.
    pub scale: f32,
    /// How many positions a query sees, its own the last of them; `None` for all before it.
    pub window: Option<usize>,
    /// `[n_heads]` slopes of ALiBi.
    pub alibi_slopes: Option<&'a [f32]>,
    /// Whether queries and keys are turned by the angles of the pass, see
    /// [`DeviceSequence::begin`].
    pub rotary: bool,
}

/// The head of a model.
#[derive(Debug, Clone, Copy)]
pub struct HeadPart<'a> {
    /// The last norm.
    pub norm: Option<NormPart<'a>>,
    /// `[d_embedding, d_model]`; `None` where embeddings are as wide as the stream.
    pub projection: Option<DensePart<'a>>,
    /// `[vocab_size, d_embedding]`
    pub weights: &'a NeuronMatrix,
}

/// What a sequence has room for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SequenceShape {
    /// Values of a token.
    pub d_model: usize,
    /// Layers whose keys and values lie on the device; they are counted from 0 here.
    pub n_layers: usize,
    /// What each of them holds.
    pub kv: KvLayout,
}

/// Where the tokens of a pass lie in the memory of a sequence, `[n_tokens, d_model]` f32 each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Slot {
    /// The residual stream.
    Residual,
    /// What the attention reads, where that is not the stream itself.
    AttentionInput,
    /// What the feed-forward network reads, where that is neither of the others.
    FfnInput,
}

/// A norm that a device holds.
pub trait HeldNorm: fmt::Debug + Send + Sync {
    /// Normalises the tokens of a slot into a slot, which may be the same.
    ///
    /// # Errors
    /// [`OpError::Shape`] if the sequence has another width, [`OpError::ForeignSequence`],
    /// [`OpError::DeviceFailed`].
    fn run(&self, sequence: &mut dyn DeviceSequence, from: Slot, to: Slot) -> Result<(), OpError>;

    /// Bytes that it takes on the device.
    fn size_bytes(&self) -> u64;
}

/// An attention layer that a device holds.
pub trait HeldAttention: fmt::Debug + Send + Sync {
    /// Attends from the tokens of a slot, whose keys and values are written to `layer` of the sequence,
    /// and adds the result to the residual stream.
    ///
    /// # Errors
    /// As [`HeldNorm::run`]; [`OpError::Shape`] too if the sequence has no such layer, other heads or
    /// no angles where there must be.
    fn run(
        &self,
        sequence: &mut dyn DeviceSequence,
        layer: usize,
        from: Slot,
    ) -> Result<(), OpError>;

    /// Bytes that it takes on the device.
    fn size_bytes(&self) -> u64;
}

/// A head that a device holds.
pub trait HeldHead: fmt::Debug + Send + Sync {
    /// Writes the logits of some tokens of the residual stream to `logits`, `[n_tokens, vocab_size]`.
    /// Waits for them.
    ///
    /// # Errors
    /// As [`HeldNorm::run`]; [`OpError::Shape`] too for tokens that the pass does not have.
    fn run(
        &self,
        sequence: &mut dyn DeviceSequence,
        tokens: Range<usize>,
        logits: &mut Vec<f32>,
    ) -> Result<(), OpError>;

    /// Bytes that it takes on the device.
    fn size_bytes(&self) -> u64;
}

/// The residual stream of one text on a device, with the keys and values of its layers there.
///
/// Steps are done in the order in which they are asked for, networks that were started included.
pub trait DeviceSequence: fmt::Debug + Send + Sync {
    /// For the device that the sequence is of, to find its own.
    fn as_any(&mut self) -> &mut dyn Any;

    /// Begins a pass over `n_tokens` that stand at `first_position` and behind it. What was there from
    /// that position on is forgotten. `angles` are cosines and sines, `[n_tokens, d_head / 2]` each, by
    /// which heads are turned: the values `i` and `i + d_head / 2` by the same angle.
    ///
    /// Keys and values come with use and stay within the device's budget. What is left of a pass that
    /// failed is forgotten: networks that were started and what they did.
    ///
    /// # Errors
    /// [`OpError::DeviceBudget`], [`OpError::Allocation`], [`OpError::Shape`] for angles of another length
    /// and for a first position behind what was there, [`OpError::DeviceFailed`]. Positions before the
    /// first stay as they are.
    fn begin(
        &mut self,
        first_position: usize,
        n_tokens: usize,
        angles: Option<[&[f32]; 2]>,
    ) -> Result<(), OpError>;

    /// Brings values `[n_tokens, d_model]` to a slot.
    ///
    /// # Errors
    /// [`OpError::Shape`], [`OpError::DeviceFailed`].
    fn write(&mut self, slot: Slot, values: &[f32]) -> Result<(), OpError>;

    /// The values of a slot `[n_tokens, d_model]`, to replace what is in `values`. Waits for them, but
    /// not for a network that was started after they were there.
    ///
    /// # Errors
    /// [`OpError::DeviceFailed`].
    fn read(&mut self, slot: Slot, values: &mut Vec<f32>) -> Result<(), OpError>;

    /// Adds to the residual stream what a feed-forward network gave: the part of the network that was
    /// started last, if one was since the last call, and `part` `[n_tokens, d_model]`, if there is one.
    ///
    /// # Errors
    /// [`OpError::Shape`], [`OpError::DeviceFailed`].
    fn finish_ffn(&mut self, part: Option<&[f32]>) -> Result<(), OpError>;

    /// The first token of the pass whose residual stream is not finite. Waits for it.
    ///
    /// # Errors
    /// [`OpError::DeviceFailed`].
    fn first_broken_token(&mut self) -> Result<Option<usize>, OpError>;

    /// What the networks did that were started since the last call, in their order. Waits for them.
    ///
    /// # Errors
    /// [`OpError::DeviceFailed`].
    fn take_runs(&mut self) -> Result<Vec<HeldRun>, OpError>;

    /// Forgets positions from `len` on, and frees memory that holds nothing any more.
    fn truncate(&mut self, len: usize);

    /// A copy with memory of its own of the first `len` positions.
    ///
    /// # Errors
    /// [`OpError::DeviceBudget`], [`OpError::DeviceFailed`].
    fn try_clone(&self, len: usize) -> Result<Box<dyn DeviceSequence>, OpError>;

    /// Bytes that it takes on the device.
    fn size_bytes(&self) -> u64;
}
