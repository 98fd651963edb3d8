//! The library's GPU, on a CPU.

use std::sync::atomic::{AtomicUsize, Ordering};

use powerinfer_ops::{
    AttentionPart, DeviceMemory, DeviceSequence, FastDevice, HeadPart, HeldAttention, HeldFfn,
    HeldHead, HeldNorm, HotRows, NormPart, OpError, SequenceShape,
};

use crate::device::Gpu;
use crate::host_queue::HostQueue;
use crate::sim::{Limits, lock};
use crate::sim_backend::{Mistake, SimBackend};

/// A fast device whose kernels and logic are those of a GPU.
#[derive(Debug)]
pub struct SimDevice {
    gpu: Gpu<SimBackend>,
    backend: SimBackend,
    n_dense_parts: AtomicUsize,
}

impl SimDevice {
    /// A device with that budget whose threads run in the order of [`HostQueue::new`].
    #[must_use]
    pub fn new(budget_bytes: u64, order: u64) -> Self {
        Self::of(budget_bytes, order, Limits::NONE, None)
    }

    /// One that makes a mistake.
    #[must_use]
    pub fn mistaken(budget_bytes: u64, mistake: Mistake) -> Self {
        Self::of(budget_bytes, 0, Limits::NONE, Some(mistake))
    }

    /// One that has its limits.
    #[must_use]
    pub fn limited(budget_bytes: u64, limits: Limits) -> Self {
        Self::of(budget_bytes, 0, limits, None)
    }

    fn of(budget_bytes: u64, order: u64, limits: Limits, mistake: Option<Mistake>) -> Self {
        let backend = SimBackend::new(HostQueue::new(order), limits, mistake);
        let gpu = Gpu::new(backend.clone(), "shim".to_owned(), "a shim".to_owned(), budget_bytes);
        Self { gpu, backend, n_dense_parts: AtomicUsize::new(0) }
    }

    /// Norms, attention layers and heads that it was given.
    #[must_use]
    pub fn n_dense_parts(&self) -> usize {
        self.n_dense_parts.load(Ordering::Relaxed)
    }

    /// Bytes that are allocated, what has not been freed yet included.
    #[must_use]
    pub fn live_bytes(&self) -> u64 {
        lock(&self.backend.sim).live_bytes() as u64
    }

    /// Bytes that are allocated, once all that was queued has run.
    ///
    /// # Errors
    /// If a kernel failed, or wrote memory that was not its to write.
    pub fn allocated_bytes(&self) -> candle_core::Result<u64> {
        lock(&self.backend.sim).settle().map(|bytes| bytes as u64)
    }
}

impl FastDevice for SimDevice {
    fn name(&self) -> &str {
        self.gpu.name()
    }

    fn describe(&self) -> String {
        self.gpu.describe()
    }

    fn memory(&self) -> DeviceMemory {
        self.gpu.memory()
    }

    fn workspace_bytes(&self, n_neurons: usize, d_model: usize, rank: usize) -> u64 {
        self.gpu.workspace_bytes(n_neurons, d_model, rank)
    }

    fn hold(&self, rows: HotRows<'_>) -> Result<Box<dyn HeldFfn>, OpError> {
        self.gpu.hold(rows)
    }

    fn runs_dense_parts(&self) -> bool {
        self.gpu.runs_dense_parts()
    }

    fn sequence_bytes(&self, shape: SequenceShape, n_tokens: usize, pass_tokens: usize) -> u64 {
        self.gpu.sequence_bytes(shape, n_tokens, pass_tokens)
    }

    fn hold_norm(&self, norm: NormPart<'_>) -> Result<Box<dyn HeldNorm>, OpError> {
        self.n_dense_parts.fetch_add(1, Ordering::Relaxed);
        self.gpu.hold_norm(norm)
    }

    fn hold_attention(&self, part: AttentionPart<'_>) -> Result<Box<dyn HeldAttention>, OpError> {
        self.n_dense_parts.fetch_add(1, Ordering::Relaxed);
        self.gpu.hold_attention(part)
    }

    fn hold_head(&self, head: HeadPart<'_>) -> Result<Box<dyn HeldHead>, OpError> {
        self.n_dense_parts.fetch_add(1, Ordering::Relaxed);
        self.gpu.hold_head(head)
    }

    fn sequence(&self, shape: SequenceShape) -> Result<Box<dyn DeviceSequence>, OpError> {
        self.gpu.sequence(shape)
    }
}
