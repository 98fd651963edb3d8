//! What the device and all that it holds have in common: the queue and the books.

use std::fmt;
use std::sync::atomic::AtomicU64;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::exchange::Exchange;
use super::executor::Job;
use super::{ModelledSpeed, NAME, StandInFailure, StandInOptions, failed};
use crate::error::OpError;
use crate::fast_device::DeviceMemory;
use crate::threads::ThreadPool;

/// What the device and all that it holds have in common.
pub(super) struct Shared {
    /// Its threads end with it.
    _pool: ThreadPool,
    queue: Sender<Job>,
    ledger: Mutex<Ledger>,
    /// Buffers that no work is using.
    exchanges: Mutex<Vec<Exchange>>,
    pub(super) scratch_used: Arc<AtomicU64>,
    pub(super) speed: Option<ModelledSpeed>,
}

/// What was taken of the budget.
#[derive(Debug)]
pub(super) struct Ledger {
    pub(super) memory: DeviceMemory,
    /// Of this, what is reserved for the executor.
    pub(super) scratch: Scratch,
}

/// Scratch memory of the executor, which all work shares: of each kind what the largest takes.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Scratch {
    /// Of feed-forward networks.
    pub(super) ffn: u64,
    /// Of projections.
    pub(super) dense: u64,
    /// Of attention over a chunk of positions.
    pub(super) chunk: u64,
    /// Chunks of the longest sequence.
    pub(super) n_chunks: u64,
}

impl Scratch {
    pub(super) fn bytes(self) -> u64 {
        let attention = self.chunk.saturating_mul(self.n_chunks);
        self.ffn.saturating_add(self.dense).saturating_add(attention)
    }

    fn with(self, other: Self) -> Self {
        Self {
            ffn: self.ffn.max(other.ffn),
            dense: self.dense.max(other.dense),
            chunk: self.chunk.max(other.chunk),
            n_chunks: self.n_chunks.max(other.n_chunks),
        }
    }
}

impl Shared {
    pub(super) fn new(
        pool: ThreadPool,
        queue: Sender<Job>,
        options: StandInOptions,
        scratch_used: Arc<AtomicU64>,
    ) -> Self {
        let memory = DeviceMemory::new(options.budget_bytes);
        Self {
            _pool: pool,
            queue,
            ledger: Mutex::new(Ledger { memory, scratch: Scratch::default() }),
            exchanges: Mutex::new(Vec::new()),
            scratch_used,
            speed: options.speed,
        }
    }

    pub(super) fn ledger(&self) -> MutexGuard<'_, Ledger> {
        // numbers that are always whole
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes `bytes` of the budget, and whatever the executor needs for work that takes `scratch`.
    pub(super) fn reserve(&self, bytes: u64, scratch: Scratch) -> Result<(), OpError> {
        let mut ledger = self.ledger();
        let all = ledger.scratch.with(scratch);
        let more = all.bytes().saturating_sub(ledger.scratch.bytes());
        ledger.memory.take(NAME, bytes.saturating_add(more))?;
        ledger.scratch = all;
        Ok(())
    }

    pub(super) fn give_back(&self, bytes: u64) {
        self.ledger().memory.give_back(bytes);
    }

    /// Queues work, which is done in the order in which it comes.
    pub(super) fn send(&self, job: Job) -> Result<(), OpError> {
        self.queue.send(job).map_err(|_| failed(StandInFailure::Gone))
    }

    /// Buffers for a piece of work.
    pub(super) fn take_exchange(&self) -> Exchange {
        let mut idle = self.exchanges.lock().unwrap_or_else(PoisonError::into_inner);
        idle.pop().unwrap_or_default()
    }

    pub(super) fn return_exchange(&self, exchange: Exchange) {
        self.exchanges.lock().unwrap_or_else(PoisonError::into_inner).push(exchange);
    }
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared").field("ledger", &self.ledger).finish_non_exhaustive()
    }
}

/// A part of the budget, given back when it is dropped.
#[derive(Debug)]
pub(super) struct Taken {
    shared: Arc<Shared>,
    bytes: u64,
}

impl Taken {
    /// Takes `bytes` and reserves `scratch`.
    pub(super) fn new(shared: &Arc<Shared>, bytes: u64, scratch: Scratch) -> Result<Self, OpError> {
        shared.reserve(bytes, scratch)?;
        Ok(Self { shared: Arc::clone(shared), bytes })
    }

    pub(super) fn more(&mut self, bytes: u64, scratch: Scratch) -> Result<(), OpError> {
        self.shared.reserve(bytes, scratch)?;
        self.bytes += bytes;
        Ok(())
    }

    pub(super) fn less(&mut self, bytes: u64) {
        self.shared.give_back(bytes);
        self.bytes -= bytes;
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        self.shared.give_back(self.bytes);
    }
}
