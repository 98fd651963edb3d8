//! The library's backend on a [`Sim`].

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use candle_core::Result;

use crate::backend::{Backend, Block, Pinned};
use crate::host_queue::HostQueue;
use crate::queue::{Address, Launch, Queue};
use crate::sim::{Limits, POISON, Shared, Sim, Work, lock};

/// A promise that a backend does not keep, to prove that tests see what relies on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mistake {
    /// Host memory is read without waiting for the copy to it.
    AnswerTooEarly,
    /// Host memory is overwritten before the copy from it has happened.
    OverwrittenUnderWay,
    /// Memory is freed at once, and not behind what was appended.
    FreedUnderWay,
    /// Copies to the device happen at once, and not behind what was appended.
    CopiedOutOfTurn,
    /// A copy beside the queue does not wait for the event that it is to wait for.
    EventIgnored,
}

impl Mistake {
    /// Every one.
    pub const ALL: [Self; 5] = [
        Self::AnswerTooEarly,
        Self::OverwrittenUnderWay,
        Self::FreedUnderWay,
        Self::CopiedOutOfTurn,
        Self::EventIgnored,
    ];
}

/// A device that runs what it is asked for when somebody waits for it, and no further.
#[derive(Debug, Clone)]
pub(crate) struct SimBackend {
    pub(crate) sim: Arc<Mutex<Sim>>,
    mistake: Option<Mistake>,
}

impl SimBackend {
    pub(crate) fn new(kernels: HostQueue, limits: Limits, mistake: Option<Mistake>) -> Self {
        Self { sim: Arc::new(Mutex::new(Sim::new(kernels, limits))), mistake }
    }

    fn makes(&self, mistake: Mistake) -> bool {
        self.mistake == Some(mistake)
    }
}

fn msg(error: String) -> candle_core::Error {
    candle_core::Error::msg(error)
}

/// Memory of the device.
#[derive(Debug)]
pub(crate) struct SimBlock {
    backend: SimBackend,
    address: Address,
    n_bytes: usize,
}

impl Block for SimBlock {
    fn address(&self) -> Address {
        self.address
    }

    fn n_bytes(&self) -> usize {
        self.n_bytes
    }
}

impl Drop for SimBlock {
    fn drop(&mut self) {
        let mut sim = lock(&self.backend.sim);
        if self.backend.makes(Mistake::FreedUnderWay) {
            let _ = sim.free(self.address);
        } else {
            sim.push(Work::Free(self.address));
        }
    }
}

/// Memory of the host.
#[derive(Debug)]
pub(crate) struct SimPinned {
    backend: SimBackend,
    /// As the host sees it.
    seen: Vec<u8>,
    /// As the device sees it.
    shared: Shared,
    /// What the device wrote and the host has not looked at yet.
    received: Vec<Range<usize>>,
    /// The last copy.
    last: AtomicU64,
}

impl SimPinned {
    fn wait(&self) -> Result<()> {
        lock(&self.backend.sim).run_until(self.last.load(Ordering::Relaxed))
    }

    fn copied(&self, number: u64) {
        self.last.store(number, Ordering::Relaxed);
    }
}

impl Pinned for SimPinned {
    fn n_bytes(&self) -> usize {
        self.seen.len()
    }

    fn bytes(&mut self) -> Result<&[u8]> {
        if !self.backend.makes(Mistake::AnswerTooEarly) {
            self.wait()?;
            for range in self.received.drain(..) {
                self.seen[range.clone()].copy_from_slice(&lock(&self.shared)[range]);
            }
        }
        Ok(&self.seen)
    }

    fn bytes_mut(&mut self) -> Result<&mut [u8]> {
        if !self.backend.makes(Mistake::OverwrittenUnderWay) {
            self.wait()?;
        }
        Ok(&mut self.seen)
    }
}

impl Drop for SimPinned {
    fn drop(&mut self) {
        let _ = self.wait();
    }
}

impl Queue for SimBackend {
    type Error = candle_core::Error;

    fn launch(&self, launch: &Launch<'_>) -> Result<()> {
        lock(&self.sim).push(Work::Launch {
            file: launch.file,
            kernel: launch.kernel.to_owned(),
            grid: launch.grid,
            threads: launch.threads,
            args: launch.args.to_vec(),
        });
        Ok(())
    }
}

impl Backend for SimBackend {
    type Block = SimBlock;
    type Pinned = SimPinned;
    /// The number of the piece of work.
    type Event = AtomicU64;

    fn block(&self, n_bytes: usize) -> Result<SimBlock> {
        let address = lock(&self.sim).allocate(n_bytes)?;
        Ok(SimBlock { backend: self.clone(), address, n_bytes })
    }

    fn pinned(&self, n_bytes: usize) -> Result<SimPinned> {
        let n_bytes = n_bytes.max(1);
        Ok(SimPinned {
            backend: self.clone(),
            seen: vec![0; n_bytes],
            shared: Arc::new(Mutex::new(vec![0; n_bytes])),
            received: Vec::new(),
            last: AtomicU64::new(0),
        })
    }

    fn event(&self) -> Result<AtomicU64> {
        Ok(AtomicU64::new(0))
    }

    fn upload(&self, bytes: &[u8], to: Address) -> Result<()> {
        let mut sim = lock(&self.sim);
        sim.run_all()?;
        if bytes.is_empty() { Ok(()) } else { sim.write(to, bytes).map_err(msg) }
    }

    fn download(&self, from: Address, bytes: &mut [u8]) -> Result<()> {
        let mut sim = lock(&self.sim);
        sim.run_all()?;
        bytes.copy_from_slice(&sim.read(from, bytes.len()).map_err(msg)?);
        Ok(())
    }

    fn send(&self, from: &SimPinned, range: Range<usize>, to: Address) -> Result<()> {
        let mut sim = lock(&self.sim);
        // the host's and the device's view of the memory are one in truth: a copy that has not
        // happened yet sees what the host wrote since
        lock(&from.shared)[range.clone()].copy_from_slice(&from.seen[range.clone()]);
        if self.makes(Mistake::CopiedOutOfTurn) {
            return sim.write(to, &from.seen[range]).map_err(msg);
        }
        from.copied(sim.push(Work::Send { from: Arc::clone(&from.shared), range, to }));
        Ok(())
    }

    fn receive(&self, from: Address, to: &mut SimPinned, range: Range<usize>) -> Result<()> {
        to.seen[range.clone()].fill(POISON);
        to.received.push(range.clone());
        let work = Work::Receive { from, to: Arc::clone(&to.shared), range };
        to.copied(lock(&self.sim).push(work));
        Ok(())
    }

    fn receive_after(
        &self,
        event: &AtomicU64,
        from: Address,
        to: &mut SimPinned,
        range: Range<usize>,
    ) -> Result<()> {
        to.wait()?;
        let mut sim = lock(&self.sim);
        if !self.makes(Mistake::EventIgnored) {
            sim.run_until(event.load(Ordering::Relaxed))?;
        }
        let bytes = sim.read(from, range.len()).map_err(msg)?;
        lock(&to.shared)[range.clone()].copy_from_slice(&bytes);
        to.received.push(range);
        Ok(())
    }

    fn record(&self, event: &AtomicU64) -> Result<()> {
        event.store(lock(&self.sim).push(Work::Event), Ordering::Relaxed);
        Ok(())
    }

    /// A piece of work takes a nanosecond.
    fn elapsed_ns(&self, from: &AtomicU64, to: &AtomicU64) -> Result<u64> {
        let [from, to] = [from, to].map(|event| event.load(Ordering::Relaxed));
        lock(&self.sim).run_until(to)?;
        Ok(to - from)
    }
}
