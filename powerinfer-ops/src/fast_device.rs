//! A device that holds the hot rows of feed-forward networks and works beside the CPU.
//!
//! The paper's engine splits the neurons of a layer between two executors that run at the same
//! time (PowerInfer, "Neuron-aware Hybrid Execution"). The CPU is one of them; what the other must be
//! able to do is written down here, so that all above it runs and is tested on any implementation.
//!
//! A layer goes like this, each step by the thread that computes the forward pass:
//!
//! 1. [`HeldFfn::start`] takes a copy of the input and queues the work. It does not wait for it.
//! 2. The CPU computes its cold rows.
//! 3. [`PendingFfn::wait`] adds the device's partial output to the CPU's.
//!
//! So one input goes to the device and one partial output comes back, each `[n_tokens, d_model]`.

mod dense;
pub(crate) mod dense_check;
mod held_shape;
mod mlp_layers;

use std::fmt;
use std::sync::Arc;

use crate::error::OpError;
use crate::ffn::{FfnCounts, FfnWeights};
use crate::gate_estimate::GateEstimate;
use crate::mask::NeuronIds;

pub use dense::{
    AttentionPart, DensePart, DeviceSequence, HeadPart, HeldAttention, HeldHead, HeldNorm,
    NormPart, SequenceShape, Slot,
};
pub(crate) use held_shape::HeldShape;
pub use mlp_layers::MlpLayers;

/// A device with memory and an executor of its own.
///
/// It is shared by all sessions of an engine, which call it from several threads at once. Work is
/// done in the order in which it was started.
pub trait FastDevice: fmt::Debug + Send + Sync {
    /// The name that results go by: `stand-in`, `cuda:0`.
    fn name(&self) -> &str;

    /// The device in a few words, for people.
    fn describe(&self) -> String {
        self.name().to_owned()
    }

    /// What it may hold and does hold, everything counted that it allocated: padding, scratch memory
    /// and its buffers, too.
    fn memory(&self) -> DeviceMemory;

    /// Bytes that the device takes beside rows, once for all layers of at most `n_neurons` neurons
    /// and `d_model` values with a predictor between whose layers lie `rank` values (0 without): what a
    /// planner leaves of the budget.
    fn workspace_bytes(&self, n_neurons: usize, d_model: usize, rank: usize) -> u64;

    /// Copies hot rows to the device, where they stay until the value that is returned is dropped.
    ///
    /// Scratch memory that running them takes is reserved here, so that nothing is allocated on the
    /// device afterwards and [`start`](HeldFfn::start) cannot run over the budget.
    ///
    /// # Errors
    /// [`OpError::DeviceBudget`] if they do not fit, with nothing held of them;
    /// [`OpError::DownByOutput`], [`OpError::IdOutOfRange`], [`OpError::Allocation`];
    /// [`OpError::DeviceFailed`].
    fn hold(&self, rows: HotRows<'_>) -> Result<Box<dyn HeldFfn>, OpError>;

    /// Whether norms, attention and head can run on the device. Where they cannot, which is the default,
    /// the methods below fail.
    fn runs_dense_parts(&self) -> bool {
        false
    }

    /// Bytes that a sequence of so many tokens takes of the budget if no pass is over more than
    /// `pass_tokens`: what a planner leaves for each.
    fn sequence_bytes(&self, _shape: SequenceShape, _n_tokens: usize, _pass_tokens: usize) -> u64 {
        0
    }

    /// Copies a norm to the device.
    ///
    /// # Errors
    /// [`OpError::NoDenseParts`], [`OpError::DeviceBudget`], [`OpError::Shape`],
    /// [`OpError::DeviceFailed`]; so for the next two.
    fn hold_norm(&self, _norm: NormPart<'_>) -> Result<Box<dyn HeldNorm>, OpError> {
        Err(OpError::NoDenseParts { device: self.name().to_owned() })
    }

    /// Copies an attention layer to the device.
    ///
    /// # Errors
    /// As [`hold_norm`](Self::hold_norm).
    fn hold_attention(&self, _part: AttentionPart<'_>) -> Result<Box<dyn HeldAttention>, OpError> {
        Err(OpError::NoDenseParts { device: self.name().to_owned() })
    }

    /// Copies a head to the device.
    ///
    /// # Errors
    /// As [`hold_norm`](Self::hold_norm).
    fn hold_head(&self, _head: HeadPart<'_>) -> Result<Box<dyn HeldHead>, OpError> {
        Err(OpError::NoDenseParts { device: self.name().to_owned() })
    }

    /// An empty sequence.
    ///
    /// # Errors
    /// [`OpError::NoDenseParts`], [`OpError::DeviceBudget`], [`OpError::DeviceFailed`].
    fn sequence(&self, _shape: SequenceShape) -> Result<Box<dyn DeviceSequence>, OpError> {
        Err(OpError::NoDenseParts { device: self.name().to_owned() })
    }
}

/// The hot rows of a layer on a device.
pub trait HeldFfn: fmt::Debug + Send + Sync {
    /// Neurons that are held.
    fn n_neurons(&self) -> usize;

    /// Values of a token.
    fn d_model(&self) -> usize;

    /// Bytes that they take on the device, a predictor's rows and padding included.
    fn size_bytes(&self) -> u64;

    /// Copies a predictor of the same neurons, in the same order, to the device, so that it picks
    /// there with no trip to the host: a second step, since rows of neurons come first where the budget
    /// is short. `false` if the device does not run it, which is the default; the CPU then runs it.
    ///
    /// # Errors
    /// [`OpError::DeviceBudget`] if they do not fit, with nothing held of them; [`OpError::Shape`],
    /// [`OpError::DeviceFailed`].
    fn hold_predictor(&self, _predictor: RowPredictor<'_>) -> Result<bool, OpError> {
        Ok(false)
    }

    /// Copies the bias of down `[d_model]` to the device, which adds it once for each network that was
    /// begun by [`start_in`](Self::start_in), when it is finished. `false` if the device adds no biases,
    /// which is the default; it is then part of what [`DeviceSequence::finish_ffn`] is given.
    ///
    /// # Errors
    /// As [`hold_predictor`](Self::hold_predictor).
    fn hold_down_bias(&self, _bias: &[f32]) -> Result<bool, OpError> {
        Ok(false)
    }

    /// Whether the device holds a predictor, so that [`HeldNeurons::Predicted`] can be asked for.
    fn has_predictor(&self) -> bool {
        false
    }

    /// Queues the work on `x` `[n_tokens, d_model]`, of which a copy is taken, and returns at once.
    /// Ids are local: 0 is the first row that is held.
    ///
    /// # Cost
    /// Copies `x`, the ids and what a predictor reads into buffers that are reused. Allocates nothing in
    /// proportion to the number of neurons, once the buffers have grown.
    /// # Errors
    /// [`OpError::Shape`] if `x`, the lists or what the predictor reads do not fit the rows,
    /// [`OpError::IdOutOfRange`], [`OpError::NotSparse`] if neurons are to be left out under an
    /// activation that is never zero, [`OpError::NoHeldPredictor`], [`OpError::DeviceFailed`].
    fn start(&self, neurons: HeldNeurons<'_>, x: &[f32]) -> Result<Box<dyn PendingFfn>, OpError>;

    /// [`start`](Self::start) with the tokens of a slot of a sequence on the same device. The output
    /// stays there, for [`DeviceSequence::finish_ffn`]. A predictor that reads the residual stream finds
    /// it in [`Slot::Residual`], unless it is given with [`HeldNeurons::Predicted`].
    ///
    /// # Errors
    /// As `start`; [`OpError::ForeignSequence`] if the sequence is another device's,
    /// [`OpError::NoDenseParts`] if the device runs no dense parts, which is the default.
    fn start_in(
        &self,
        _neurons: HeldNeurons<'_>,
        _sequence: &mut dyn DeviceSequence,
        _from: Slot,
    ) -> Result<(), OpError> {
        Err(OpError::NoDenseParts { device: "the device".to_owned() })
    }

    /// A copy of the rows on the host: for those who watch what every neuron gives, which is done
    /// there. Slow: everything crosses the link.
    ///
    /// # Errors
    /// [`OpError::Allocation`], [`OpError::DeviceFailed`].
    fn read_back(&self) -> Result<FfnWeights, OpError>;
}

/// Work that was started. Dropping it gives the result up; the device finishes the work all the
/// same.
#[must_use = "the partial output is added by `wait`"]
pub trait PendingFfn: fmt::Debug + Send {
    /// Waits for the work and adds the partial output to `y` `[n_tokens, d_model]`.
    ///
    /// # Errors
    /// [`OpError::DeviceFailed`] if the device failed or is gone; `y` is as it was. Never waits for
    /// a device that is gone. [`OpError::Shape`] if `y` has another length than `x` had.
    fn wait(self: Box<Self>, y: &mut [f32]) -> Result<HeldRun, OpError>;
}

/// The rows that a device is to hold.
#[derive(Debug, Clone, Copy)]
pub struct HotRows<'a> {
    /// The whole layer, of which the device copies what it needs.
    pub weights: &'a FfnWeights,
    /// The hot neurons of the layer.
    pub ids: &'a NeuronIds,
    /// The share of the hot neurons that is expected to fire for a token, going by a profile. The
    /// device chooses by it how to compute them: from some density on, reading all rows in order
    /// is faster than finding out which matter. It must come from what is known before the first
    /// token, so that equal inputs give equal bits. `None` if nothing is known.
    pub density: Option<f64>,
}

/// A predictor whose last step has a row for each neuron.
#[derive(Debug, Clone, Copy)]
pub enum RowPredictor<'a> {
    /// A low-bit copy of the gate and a margin, as in [`Neurons::Estimated`](crate::Neurons).
    Estimated(&'a GateEstimate, f32),
    /// Two layers whose scores decide, as in [`Neurons::Scored`](crate::Neurons).
    Scored(MlpLayers<'a>),
}

/// Which of the held neurons are to be computed.
///
/// A device may compute more of them than that, as long as the others add nothing to the output
/// and do not count as having fired.
#[derive(Debug, Clone, Copy)]
pub enum HeldNeurons<'a> {
    /// All.
    All,
    /// Those that fire.
    Firing,
    /// Those of the given ones that fire; one list a token.
    FiringOf(&'a [NeuronIds]),
    /// Those that fire of the ones that the predictor picks that the device holds. The residual stream
    /// `[n_tokens, d_model]` for one that [reads it](RowPredictor::reads_residual), nothing for others.
    ///
    /// [`RowPredictor::Estimated`] picks exactly the neurons that the CPU would pick.
    /// [`RowPredictor::Scored`] may decide otherwise where a score is the threshold but for rounding:
    /// where the two lie no further apart than the sums of the two products may, which a device adds up
    /// in an order of its own.
    Predicted(&'a [f32]),
}

/// What a device did with a piece of work.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct HeldRun {
    /// As on the CPU; `bytes` are those read on the device.
    pub counts: FfnCounts,
    /// Time from when the device took the work up, with both ways over the link, to when the
    /// output was there, in nanoseconds.
    pub busy_ns: u64,
}

impl HeldRun {
    /// What was done, and how long it took.
    #[must_use]
    pub fn new(counts: FfnCounts, busy_ns: u64) -> Self {
        Self { counts, busy_ns }
    }
}

/// The memory of a device, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceMemory {
    /// What it may take.
    pub budget_bytes: u64,
    /// What it has taken.
    pub held_bytes: u64,
    /// The most it ever had taken.
    pub peak_bytes: u64,
}

impl DeviceMemory {
    /// A budget of which nothing is taken.
    #[must_use]
    pub fn new(budget_bytes: u64) -> Self {
        Self { budget_bytes, held_bytes: 0, peak_bytes: 0 }
    }

    /// Takes `bytes` of the budget, or fails and takes nothing.
    ///
    /// # Errors
    /// [`OpError::DeviceBudget`], which names `device`.
    ///
    /// # Examples
    /// ```
    /// use powerinfer_ops::{DeviceMemory, OpError};
    /// let mut memory = DeviceMemory::new(10);
    /// memory.take("stand-in", 7)?;
    /// assert!(matches!(
    ///     memory.take("stand-in", 4),
    ///     Err(OpError::DeviceBudget { asked_bytes: 4, held_bytes: 7, budget_bytes: 10, .. })
    /// ));
    /// memory.give_back(7);
    /// assert_eq!((memory.held_bytes, memory.peak_bytes), (0, 7));
    /// # Ok::<(), OpError>(())
    /// ```
    pub fn take(&mut self, device: &str, bytes: u64) -> Result<(), OpError> {
        let Self { budget_bytes, held_bytes, .. } = *self;
        let held = held_bytes.checked_add(bytes).filter(|&held| held <= budget_bytes);
        let Some(held) = held else {
            let device = device.to_owned();
            return Err(OpError::DeviceBudget {
                device,
                asked_bytes: bytes,
                held_bytes,
                budget_bytes,
            });
        };
        (self.held_bytes, self.peak_bytes) = (held, self.peak_bytes.max(held));
        Ok(())
    }

    /// Gives `bytes` back.
    pub fn give_back(&mut self, bytes: u64) {
        self.held_bytes = self.held_bytes.saturating_sub(bytes);
    }
}

/// The GPU with that number, which may take `budget_bytes`, or what is free of its memory.
///
/// # Errors
/// [`OpError::FeatureOff`] in a build without the feature `cuda`, [`OpError::DeviceFailed`] where there
/// is no such GPU or no driver for it.
pub fn open_cuda(index: usize, budget_bytes: Option<u64>) -> Result<Arc<dyn FastDevice>, OpError> {
    #[cfg(feature = "cuda")]
    return Ok(Arc::new(crate::cuda::open(index, budget_bytes)?));
    #[cfg(not(feature = "cuda"))]
    {
        let _ = budget_bytes;
        Err(OpError::FeatureOff { device: format!("cuda:{index}"), feature: "cuda" })
    }
}
