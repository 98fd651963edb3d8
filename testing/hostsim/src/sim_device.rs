//! The library's GPU, on a CPU.

use candle_core::Result;
use powerinfer_ops::{DeviceMemory, FastDevice, HeldFfn, HotRows, OpError};

use crate::device::Gpu;
use crate::host_queue::HostQueue;
use crate::sim::lock;
use crate::sim_backend::{Mistake, SimBackend};

/// A fast device whose kernels and logic are those of a GPU.
#[derive(Debug)]
pub struct SimDevice {
    gpu: Gpu<SimBackend>,
    backend: SimBackend,
}

impl SimDevice {
    /// A device with that budget whose threads run in the order of [`HostQueue::new`].
    #[must_use]
    pub fn new(budget_bytes: u64, order: u64) -> Self {
        Self::of(budget_bytes, order, None)
    }

    /// Likewise, of a backend with a fault.
    #[must_use]
    pub fn of(budget_bytes: u64, order: u64, mistake: Option<Mistake>) -> Self {
        let backend = SimBackend::new(HostQueue::new(order), mistake);
        let gpu = Gpu::new(backend.clone(), "shim".to_owned(), "a shim".to_owned(), budget_bytes);
        Self { gpu, backend }
    }

    /// Bytes that are allocated, once all that was queued has run.
    ///
    /// # Errors
    /// If a kernel failed, or wrote memory that was not its to write.
    pub fn allocated_bytes(&self) -> Result<u64> {
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

    fn hold(&self, rows: HotRows<'_>) -> std::result::Result<Box<dyn HeldFfn>, OpError> {
        self.gpu.hold(rows)
    }
}
