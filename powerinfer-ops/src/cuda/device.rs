//! A GPU as a fast device.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use candle_core::Device;

use super::exchange::Exchange;
use super::ffn_steps::ScratchShape;
use super::held::{CudaFfn, HeldRows};
use super::stream::{Memory, Stream};
use crate::error::OpError;
use crate::fast_device::{DeviceMemory, FastDevice, HeldFfn, HotRows};

/// Tokens that run together; a longer input is cut. Where it is cut changes no bit.
pub(super) const TOKENS_AT_ONCE: usize = 16;
/// Of the memory that is free where no budget is given, what is left to the driver, to kernels and to
/// others: a sixteenth.
const LEFT_SHARE: u64 = 16;

/// A GPU that holds hot rows and works beside the CPU.
///
/// All sessions share one stream: the steps of a network follow each other on it, and networks share
/// scratch memory.
#[derive(Debug)]
pub(crate) struct CudaFast {
    shared: Arc<Shared>,
}

/// What the device and all that it holds have in common.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) name: String,
    description: String,
    pub(super) stream: Stream,
    ledger: Mutex<Ledger>,
    /// Buffers that no work is using.
    exchanges: Mutex<Vec<Exchange>>,
}

/// What was taken of the budget, and the scratch memory. Whoever queues a network holds its lock.
#[derive(Debug)]
pub(super) struct Ledger {
    memory: DeviceMemory,
    pub(super) shape: ScratchShape,
    pub(super) scratch: Option<Memory>,
}

impl CudaFast {
    /// Opens the GPU `index`. The budget is what is asked for or what is free, whichever is less.
    pub(crate) fn open(index: usize, budget_bytes: Option<u64>) -> Result<Self, OpError> {
        let name = format!("cuda:{index}");
        let failed = |error| failed(&name, error);
        let device = Device::new_cuda_with_stream(index).map_err(failed)?;
        let stream = Stream::of(device.as_cuda_device().map_err(failed)?);
        let (free, total) = stream.free_bytes().map_err(failed)?;
        let budget = budget_bytes.map_or(free - free / LEFT_SHARE, |asked| asked.min(free));
        let description = stream.device_name().map_err(failed)?;
        let description = format!("{name}, {description}, {} MiB", total >> 20);
        let shape = ScratchShape::default();
        let ledger = Ledger { memory: DeviceMemory::new(budget), shape, scratch: None };
        let (ledger, exchanges) = (Mutex::new(ledger), Mutex::new(Vec::new()));
        Ok(Self { shared: Arc::new(Shared { name, description, stream, ledger, exchanges }) })
    }
}

impl FastDevice for CudaFast {
    fn name(&self) -> &str {
        &self.shared.name
    }

    fn describe(&self) -> String {
        self.shared.description.clone()
    }

    fn memory(&self) -> DeviceMemory {
        self.shared.ledger().memory
    }

    fn workspace_bytes(&self, n_neurons: usize, d_model: usize, _rank: usize) -> u64 {
        ScratchShape { n_neurons, d_model, n_tokens: TOKENS_AT_ONCE }.bytes() as u64
    }

    fn hold(&self, rows: HotRows<'_>) -> Result<Box<dyn HeldFfn>, OpError> {
        let rows = HeldRows::copy(&self.shared, rows)?;
        Ok(Box::new(CudaFfn::new(Arc::new(rows))))
    }
}

impl Shared {
    pub(super) fn ledger(&self) -> MutexGuard<'_, Ledger> {
        // numbers and memory that are always whole
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes `bytes` of the budget for rows, and what scratch memory of that shape takes beyond what
    /// there is.
    pub(super) fn reserve(&self, bytes: u64, shape: ScratchShape) -> Result<(), OpError> {
        let mut ledger = self.ledger();
        let shape = ledger.shape.union(shape);
        let (scratch_bytes, had) = (shape.bytes(), ledger.scratch.as_ref().map_or(0, Memory::len));
        let more = scratch_bytes.saturating_sub(had) as u64;
        ledger.memory.take(&self.name, bytes.saturating_add(more))?;
        if more > 0 {
            // for a moment both are there: other networks go on with the old one if this fails, and what
            // is queued has it already, as it is freed behind that
            match self.stream.memory(scratch_bytes) {
                Ok(memory) => (ledger.scratch, ledger.shape) = (Some(memory), shape),
                Err(error) => {
                    ledger.memory.give_back(bytes + more);
                    return Err(self.failed(error));
                }
            }
        }
        Ok(())
    }

    pub(super) fn give_back(&self, bytes: u64) {
        self.ledger().memory.give_back(bytes);
    }

    /// Buffers for a piece of work.
    pub(super) fn take_exchange(&self) -> Result<Exchange, OpError> {
        let idle = self.exchanges.lock().unwrap_or_else(PoisonError::into_inner).pop();
        idle.map_or_else(|| Exchange::new(&self.stream).map_err(|error| self.failed(error)), Ok)
    }

    pub(super) fn return_exchange(&self, exchange: Exchange) {
        self.exchanges.lock().unwrap_or_else(PoisonError::into_inner).push(exchange);
    }

    pub(super) fn failed(&self, error: candle_core::Error) -> OpError {
        failed(&self.name, error)
    }
}

fn failed(name: &str, error: candle_core::Error) -> OpError {
    OpError::DeviceFailed { device: name.to_owned(), source: Box::new(error) }
}
