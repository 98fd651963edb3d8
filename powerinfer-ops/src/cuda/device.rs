//! A GPU as a fast device.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::backend::{Backend, Block};
use super::exchange::Exchange;
use super::held::HeldRows;
use super::held_attention::GpuAttention;
use super::held_head::GpuHead;
use super::held_norm::GpuNorm;
use super::network::GpuFfn;
use super::queue::Address;
use super::scratch::Needs;
use super::sequence::{GpuSequence, bytes_at_most};
use crate::{
    AttentionPart, DeviceMemory, DeviceSequence, FastDevice, HeadPart, HeldAttention, HeldFfn,
    HeldHead, HeldNorm, HotRows, NormPart, OpError, SequenceShape,
};

/// Tokens that run together; a longer input is cut. Where it is cut changes no bit.
///
/// Every weight is read once for them, and scratch memory grows with them. From about 20 tokens on
/// arithmetic takes longer than reading f16 weights (67 TFLOP/s of f32 against 3.4 TB/s on an H100, two
/// operations for each weight and token), so with 128 reading is a sixth of it, and more would gain
/// little. A model of 4096 values and 11008 neurons takes 40 MB of scratch memory so.
pub(crate) const TOKENS_AT_ONCE: usize = 128;

/// A device that holds hot rows and works beside the CPU.
///
/// All sessions share one queue: the steps of a network follow each other on it, and networks share
/// scratch memory.
#[derive(Debug)]
pub(crate) struct Gpu<B: Backend> {
    shared: Arc<Shared<B>>,
}

/// What the device and all that it holds have in common.
#[derive(Debug)]
pub(crate) struct Shared<B: Backend> {
    pub(crate) name: String,
    description: String,
    pub(crate) backend: B,
    ledger: Mutex<Ledger<B>>,
    /// Buffers that no work is using.
    exchanges: Mutex<Vec<Exchange<B>>>,
}

/// What was taken of the budget, and the scratch memory. Whoever queues a network holds its lock.
#[derive(Debug)]
pub(crate) struct Ledger<B: Backend> {
    memory: DeviceMemory,
    /// What scratch memory is large enough for.
    pub(crate) needs: Needs,
    scratch: Option<B::Block>,
}

impl<B: Backend> Gpu<B> {
    /// A device with a budget of which nothing is taken.
    pub(crate) fn new(backend: B, name: String, description: String, budget_bytes: u64) -> Self {
        let memory = DeviceMemory::new(budget_bytes);
        let ledger = Ledger { memory, needs: Needs::default(), scratch: None };
        let (ledger, exchanges) = (Mutex::new(ledger), Mutex::new(Vec::new()));
        Self { shared: Arc::new(Shared { name, description, backend, ledger, exchanges }) }
    }
}

impl<B: Backend> FastDevice for Gpu<B> {
    fn name(&self) -> &str {
        &self.shared.name
    }

    fn describe(&self) -> String {
        self.shared.description.clone()
    }

    fn memory(&self) -> DeviceMemory {
        self.shared.ledger().memory
    }

    fn workspace_bytes(&self, n_neurons: usize, d_model: usize, rank: usize) -> u64 {
        Needs::of_network(n_neurons, d_model, rank).bytes() as u64
    }

    fn hold(&self, rows: HotRows<'_>) -> Result<Box<dyn HeldFfn>, OpError> {
        let rows = HeldRows::copy(&self.shared, rows)?;
        Ok(Box::new(GpuFfn::new(Arc::new(rows))))
    }

    fn runs_dense_parts(&self) -> bool {
        true
    }

    fn sequence_bytes(&self, shape: SequenceShape, n_tokens: usize, pass_tokens: usize) -> u64 {
        bytes_at_most::<B>(shape, n_tokens, pass_tokens)
    }

    fn hold_norm(&self, norm: NormPart<'_>) -> Result<Box<dyn HeldNorm>, OpError> {
        Ok(Box::new(GpuNorm::copy(&self.shared, norm)?))
    }

    fn hold_attention(&self, part: AttentionPart<'_>) -> Result<Box<dyn HeldAttention>, OpError> {
        Ok(Box::new(GpuAttention::copy(&self.shared, part)?))
    }

    fn hold_head(&self, head: HeadPart<'_>) -> Result<Box<dyn HeldHead>, OpError> {
        Ok(Box::new(GpuHead::copy(&self.shared, head)?))
    }

    fn sequence(&self, shape: SequenceShape) -> Result<Box<dyn DeviceSequence>, OpError> {
        Ok(Box::new(GpuSequence::new(&self.shared, shape)?))
    }
}

impl<B: Backend> Ledger<B> {
    /// Where scratch memory begins, which is large enough for what was reserved.
    pub(crate) fn scratch(&self) -> Address {
        self.scratch.as_ref().map_or(Address::NULL, Block::address)
    }
}

impl<B: Backend> Shared<B> {
    pub(crate) fn ledger(&self) -> MutexGuard<'_, Ledger<B>> {
        // numbers and memory that are always whole
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes `bytes` of the budget, and what scratch memory for these needs takes beyond what there is.
    pub(crate) fn reserve(&self, bytes: u64, needs: Needs) -> Result<Reserved<'_, B>, OpError> {
        let mut ledger = self.ledger();
        let needs = ledger.needs.union(needs);
        let (n_bytes, had) = (needs.bytes(), ledger.scratch.as_ref().map_or(0, Block::n_bytes));
        let more = n_bytes.saturating_sub(had) as u64;
        ledger.memory.take(&self.name, bytes.saturating_add(more))?;
        if more > 0 {
            // for a moment both are there: other work goes on with the old one if this fails, and what
            // is queued has it already, as it is freed behind that
            match self.backend.block(n_bytes) {
                Ok(block) => ledger.scratch = Some(block),
                Err(error) => {
                    ledger.memory.give_back(bytes + more);
                    return Err(self.failed(error));
                }
            }
        }
        ledger.needs = needs;
        Ok(Reserved { shared: self, bytes })
    }

    pub(crate) fn give_back(&self, bytes: u64) {
        self.ledger().memory.give_back(bytes);
    }

    /// Buffers for a piece of work.
    pub(crate) fn take_exchange(&self) -> Result<Exchange<B>, OpError> {
        let idle = self.exchanges.lock().unwrap_or_else(PoisonError::into_inner).pop();
        idle.map_or_else(|| Exchange::new(&self.backend).map_err(|error| self.failed(error)), Ok)
    }

    pub(crate) fn return_exchange(&self, exchange: Exchange<B>) {
        self.exchanges.lock().unwrap_or_else(PoisonError::into_inner).push(exchange);
    }

    pub(crate) fn failed(&self, error: candle_core::Error) -> OpError {
        OpError::DeviceFailed { device: self.name.clone(), source: Box::new(error) }
    }
}

/// Bytes that were taken of the budget, given back unless they are kept.
#[derive(Debug)]
pub(crate) struct Reserved<'a, B: Backend> {
    shared: &'a Shared<B>,
    bytes: u64,
}

impl<B: Backend> Reserved<'_, B> {
    pub(crate) fn keep(mut self) {
        self.bytes = 0;
    }
}

impl<B: Backend> Drop for Reserved<'_, B> {
    fn drop(&mut self) {
        self.shared.give_back(self.bytes);
    }
}
