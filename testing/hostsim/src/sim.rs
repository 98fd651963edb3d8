//! A device's memory and its queue, nothing of which runs before somebody waits for it.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use candle_core::{Error, Result};

use crate::host_buffer::HostBuffer;
use crate::host_queue::HostQueue;
use crate::queue::{Address, Arg, Launch, Queue};

/// What a buffer is filled with when it is freed, and host memory until a copy to it has happened:
/// no number as f32, beyond every matrix as an id.
pub(crate) const POISON: u8 = 0xFF;

/// Memory of the host as copies find it when they happen.
pub(crate) type Shared = Arc<Mutex<Vec<u8>>>;

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Something that was appended.
#[derive(Debug)]
pub(crate) enum Work {
    Launch { file: &'static str, kernel: String, grid: [u32; 3], threads: u32, args: Vec<Arg> },
    Send { from: Shared, range: Range<usize>, to: Address },
    Receive { from: Address, to: Shared, range: Range<usize> },
    Free(Address),
    Event,
}

/// A device.
#[derive(Debug)]
pub(crate) struct Sim {
    kernels: HostQueue,
    buffers: BTreeMap<u64, HostBuffer>,
    /// Memory that was freed: kept, so that who reads it finds poison and who writes it is found.
    freed: Vec<HostBuffer>,
    live_bytes: usize,
    queue: VecDeque<Work>,
    /// Pieces of work that have run; what is in the queue are those that follow.
    n_done: u64,
    limits: Limits,
    /// Why a piece of work failed: so do all after it.
    failure: Option<String>,
}

/// What a device does not go beyond.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Memory that there is, whatever its budget.
    pub memory_bytes: usize,
    /// Pieces of work after which it is lost.
    pub n_work: u64,
}

impl Limits {
    /// A device that is never lost.
    pub const NONE: Self = Self { memory_bytes: usize::MAX, n_work: u64::MAX };
}

impl Sim {
    pub(crate) fn new(kernels: HostQueue, limits: Limits) -> Self {
        Self {
            kernels,
            buffers: BTreeMap::new(),
            freed: Vec::new(),
            live_bytes: 0,
            queue: VecDeque::new(),
            n_done: 0,
            limits,
            failure: None,
        }
    }

    /// Appends work and returns its number, counted from 1.
    pub(crate) fn push(&mut self, work: Work) -> u64 {
        if let (Some(_), Work::Free(address)) = (&self.failure, &work) {
            // a device that is lost has given all memory back
            let _ = self.free(*address);
        }
        self.queue.push_back(work);
        self.n_done + self.queue.len() as u64
    }

    /// Runs what was appended up to that number.
    pub(crate) fn run_until(&mut self, number: u64) -> Result<()> {
        while self.failure.is_none() && self.n_done < number {
            let Some(work) = self.queue.pop_front() else { break };
            self.n_done += 1;
            let lost = self.n_done > self.limits.n_work;
            let done = if lost { Err("it is lost".to_owned()) } else { self.run(work) };
            if let Err(failure) = done {
                self.fail(failure);
            }
        }
        match &self.failure {
            Some(failure) => Err(Error::msg(failure)),
            None => Ok(()),
        }
    }

    /// Runs all that was appended.
    pub(crate) fn run_all(&mut self) -> Result<()> {
        self.run_until(u64::MAX)
    }

    fn fail(&mut self, failure: String) {
        self.failure = Some(failure);
        for work in std::mem::take(&mut self.queue) {
            self.push(work);
        }
    }

    pub(crate) fn live_bytes(&self) -> usize {
        self.live_bytes
    }

    pub(crate) fn allocate(&mut self, n_bytes: usize) -> Result<Address> {
        if n_bytes > self.limits.memory_bytes.saturating_sub(self.live_bytes) {
            return Err(Error::msg("no memory"));
        }
        let buffer = HostBuffer::new(n_bytes);
        let address = buffer.address();
        self.live_bytes += n_bytes;
        self.buffers.insert(address.0, buffer);
        Ok(address)
    }

    /// Frees memory at once.
    pub(crate) fn free(&mut self, address: Address) -> std::result::Result<(), String> {
        let buffer = self.buffers.remove(&address.0).ok_or("freed twice")?;
        self.live_bytes -= buffer.len();
        let overrun = buffer.is_overrun();
        buffer.write(address, &vec![POISON; buffer.len()]);
        self.freed.push(buffer);
        if overrun { Err("written beyond memory".to_owned()) } else { Ok(()) }
    }

    pub(crate) fn write(&self, to: Address, bytes: &[u8]) -> std::result::Result<(), String> {
        self.buffer(to, bytes.len())?.write(to, bytes);
        Ok(())
    }

    pub(crate) fn read(&self, from: Address, len: usize) -> std::result::Result<Vec<u8>, String> {
        Ok(self.buffer(from, len)?.read(from, len))
    }

    /// Bytes that are allocated, once everything has run; fails where memory was written that nobody
    /// had.
    pub(crate) fn settle(&mut self) -> Result<usize> {
        self.run_all()?;
        let untouched = |buffer: &HostBuffer| buffer.bytes().iter().all(|&byte| byte == POISON);
        if self.buffers.values().any(HostBuffer::is_overrun)
            || !self.freed.drain(..).all(|buffer| !buffer.is_overrun() && untouched(&buffer))
        {
            return Err(Error::msg("written beyond memory, or after it was freed"));
        }
        Ok(self.live_bytes)
    }

    fn buffer(&self, at: Address, len: usize) -> std::result::Result<&HostBuffer, String> {
        let (start, buffer) =
            self.buffers.range(..=at.0).next_back().ok_or("a copy to or from no memory")?;
        let end = (at.0 - start) as usize + len;
        if end <= buffer.len() { Ok(buffer) } else { Err(format!("a copy beyond {start:#x}")) }
    }

    fn run(&mut self, work: Work) -> std::result::Result<(), String> {
        match work {
            Work::Launch { file, kernel, grid, threads, args } => {
                let launch = Launch { file, kernel: &kernel, grid, threads, args: &args };
                self.kernels.launch(&launch).map_err(|error| error.to_string())
            }
            Work::Send { from, range, to } => self.write(to, &lock(&from)[range]),
            Work::Receive { from, to, range } => {
                let bytes = self.read(from, range.len())?;
                lock(&to)[range].copy_from_slice(&bytes);
                Ok(())
            }
            Work::Free(address) => self.free(address),
            Work::Event => Ok(()),
        }
    }
}
