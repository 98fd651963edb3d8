//! A fast device made of CPU threads.

mod dense_parts;
mod dense_steps;
mod exchange;
mod executor;
mod rows;
mod sequence;
mod shared;
mod tokens;

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::time::Duration;

use crate::error::OpError;
use crate::fast_device::{
    AttentionPart, DeviceMemory, DeviceSequence, FastDevice, HeadPart, HeldAttention, HeldFfn,
    HeldHead, HeldNorm, HotRows, NormPart, SequenceShape,
};
use crate::threads::ThreadPool;

use dense_parts::{StandInAttention, StandInHead, StandInNorm};
use executor::serve;
use rows::{HeldRows, StandInFfn, ffn_scratch_bytes};
use sequence::StandInSequence;
use shared::Shared;

const NAME: &str = "stand-in";

/// Threads of their own that hold copies of hot rows and of dense parts and work beside the CPU of the
/// engine: a fast device that every machine has.
///
/// All of the hybrid path runs on it. Networks run while the CPU goes on; norms, attention and head are
/// waited for. It computes with the CPU's kernels, so it is no faster than
/// the CPU, and its threads come on top of the engine's; what it is for is to build and test on,
/// and, with a [`ModelledSpeed`], to show how the two sides of a split would fit together on
/// another machine.
///
/// Its budget covers the rows, their padding, biases and predictors, dense parts, sequences, and the
/// scratch memory of its executor. Inputs and outputs on their way are the host's, and so is what a kernel takes for the
/// time of a call, a few hundred KiB a thread.
///
/// # Examples
/// ```
/// use powerinfer_ops::{
///     Activation, FastDevice, FfnWeights, HeldNeurons, HotRows, NeuronIds, NeuronMatrix, StandIn,
///     StandInOptions, WeightFormat,
/// };
/// let m = |values: &[f32]| NeuronMatrix::from_f32(WeightFormat::F32, 2, 2, values);
/// let weights = FfnWeights::new(
///     m(&[1., 0., 0., 1.])?, Some(m(&[0., 1., 0., 1.])?), m(&[1., 1., 5., 5.])?, Activation::Relu)?;
/// let device = StandIn::new(StandInOptions::new(1 << 20))?;
/// let ids = NeuronIds::from_sorted(vec![1])?;
/// let hot = device.hold(HotRows { weights: &weights, ids: &ids, density: None })?;
/// let pending = hot.start(HeldNeurons::Firing, &[2., 3.])?;
/// let mut y = [6., 6.]; // what the CPU made of the other row meanwhile
/// let run = pending.wait(&mut y)?;
/// assert_eq!(y, [51., 51.]); // + relu(3) · 3 · [5, 5]
/// assert_eq!(run.counts.fired, 1);
/// # Ok::<(), powerinfer_ops::OpError>(())
/// ```
#[derive(Debug)]
pub struct StandIn {
    shared: Arc<Shared>,
    n_threads: usize,
}

/// How to set up a [`StandIn`].
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct StandInOptions {
    /// Memory that it may take, in bytes.
    pub budget_bytes: u64,
    /// Its threads; 1 by default.
    pub threads: NonZeroUsize,
    /// How fast it makes itself out to be; `None` is as fast as it is.
    pub speed: Option<ModelledSpeed>,
}

impl StandInOptions {
    /// One thread and no modelled speed.
    #[must_use]
    pub fn new(budget_bytes: u64) -> Self {
        Self { budget_bytes, threads: NonZeroUsize::MIN, speed: None }
    }

    /// Sets [`threads`](Self::threads).
    #[must_use]
    pub fn with_threads(mut self, threads: NonZeroUsize) -> Self {
        self.threads = threads;
        self
    }

    /// Sets [`speed`](Self::speed).
    #[must_use]
    pub fn with_speed(mut self, speed: ModelledSpeed) -> Self {
        self.speed = Some(speed);
        self
    }
}

/// The speed of a device that is not there. A piece of work takes at least
///
/// `2 · link_latency + exchanged bytes / link_bytes_per_second + weight bytes / bytes_per_second`
///
/// and a thread that is done earlier sleeps out the rest. A speed that is no positive number is
/// taken for infinite.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ModelledSpeed {
    /// Weights that the device reads in a second, in bytes.
    pub bytes_per_second: f64,
    /// Bytes that cross the link in a second.
    pub link_bytes_per_second: f64,
    /// What each way over the link takes, whatever its size.
    pub link_latency: Duration,
}

impl ModelledSpeed {
    /// How long a piece of work takes whose input comes from the host and whose output goes there.
    #[must_use]
    pub fn duration(self, weight_bytes: u64, exchanged_bytes: u64) -> Duration {
        let link = seconds(exchanged_bytes, self.link_bytes_per_second);
        let latency = self.link_latency.saturating_mul(2);
        latency.saturating_add(link).saturating_add(self.work(weight_bytes))
    }

    /// How long a piece of work takes whose input and output stay on the device.
    #[must_use]
    pub fn work(self, weight_bytes: u64) -> Duration {
        seconds(weight_bytes, self.bytes_per_second)
    }

    /// How long one way over the link takes.
    #[must_use]
    pub fn crossing(self, bytes: u64) -> Duration {
        self.link_latency.saturating_add(seconds(bytes, self.link_bytes_per_second))
    }
}

fn seconds(bytes: u64, per_second: f64) -> Duration {
    let seconds = if per_second > 0.0 { bytes as f64 / per_second } else { 0.0 };
    Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
}

/// Why a [`StandIn`] failed: the source of [`OpError::DeviceFailed`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StandInFailure {
    /// Its thread panicked over a piece of work; it is gone from then on.
    #[error("its thread panicked: {0}")]
    Panicked(String),
    /// Its thread is gone.
    #[error("its thread is gone")]
    Gone,
}

impl StandIn {
    /// The name that results go by.
    pub const NAME: &str = NAME;

    /// Starts the threads.
    ///
    /// # Errors
    /// [`OpError::ThreadCount`], [`OpError::ThreadPool`].
    pub fn new(options: StandInOptions) -> Result<Self, OpError> {
        let pool = ThreadPool::named("powerinfer-fast", Some(options.threads))?;
        let n_threads = pool.n_threads();
        let (queue, jobs) = channel();
        let scratch_used = Arc::new(AtomicU64::new(0));
        let (used, speed) = (Arc::clone(&scratch_used), options.speed);
        pool.spawn(move || serve(&jobs, speed, &used));
        let shared = Shared::new(pool, queue, options, scratch_used);
        Ok(Self { shared: Arc::new(shared), n_threads })
    }

    /// Threads that compute.
    #[must_use]
    pub fn n_threads(&self) -> usize {
        self.n_threads
    }

    /// Scratch memory that the executor takes at present, which is never more than what was reserved
    /// of the budget for it.
    #[must_use]
    pub fn scratch_bytes(&self) -> u64 {
        self.shared.scratch_used.load(Ordering::Relaxed)
    }
}

impl FastDevice for StandIn {
    fn name(&self) -> &str {
        NAME
    }

    fn describe(&self) -> String {
        let threads = if self.n_threads == 1 { "thread" } else { "threads" };
        format!("{NAME}, {} {threads} of the CPU", self.n_threads)
    }

    fn memory(&self) -> DeviceMemory {
        self.shared.ledger().memory
    }

    fn workspace_bytes(&self, n_neurons: usize, d_model: usize, rank: usize) -> u64 {
        ffn_scratch_bytes([n_neurons, d_model, rank])
    }

    fn hold(&self, rows: HotRows<'_>) -> Result<Box<dyn HeldFfn>, OpError> {
        let rows = HeldRows::copy(&self.shared, rows)?;
        Ok(Box::new(StandInFfn::new(Arc::new(rows))))
    }

    fn runs_dense_parts(&self) -> bool {
        true
    }

    fn sequence_bytes(&self, shape: SequenceShape, n_tokens: usize, pass_tokens: usize) -> u64 {
        sequence::bytes_at_most(shape, n_tokens, pass_tokens)
    }

    fn hold_norm(&self, norm: NormPart<'_>) -> Result<Box<dyn HeldNorm>, OpError> {
        Ok(Box::new(StandInNorm::hold(&self.shared, norm)?))
    }

    fn hold_attention(&self, part: AttentionPart<'_>) -> Result<Box<dyn HeldAttention>, OpError> {
        Ok(Box::new(StandInAttention::hold(&self.shared, part)?))
    }

    fn hold_head(&self, head: HeadPart<'_>) -> Result<Box<dyn HeldHead>, OpError> {
        Ok(Box::new(StandInHead::hold(&self.shared, head)?))
    }

    fn sequence(&self, shape: SequenceShape) -> Result<Box<dyn DeviceSequence>, OpError> {
        Ok(Box::new(StandInSequence::new(&self.shared, shape)?))
    }
}

fn failed(failure: StandInFailure) -> OpError {
    OpError::DeviceFailed { device: NAME.to_owned(), source: Box::new(failure) }
}

#[cfg(test)]
mod dense_tests;
#[cfg(test)]
mod tests;
