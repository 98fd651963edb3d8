//! What a device offers beside kernels: memory, copies and time.
//!
//! A GPU is one (`stream.rs`), and so is a CPU that runs the same kernels later than it was asked to
//! (`testing/hostsim`), so that all above this file is tested without a GPU.

use std::fmt;
use std::ops::Range;

use candle_core::Result;

use super::queue::{Address, Queue};

/// A queue with memory. Copies and events are appended like kernels: nothing has happened when a
/// method returns, unless it says that it waits.
pub(crate) trait Backend:
    Queue<Error = candle_core::Error> + fmt::Debug + Send + Sync + 'static
{
    /// Memory of the device.
    type Block: Block;
    /// Memory of the host that copies go to and from without the CPU's help.
    type Pinned: Pinned;
    /// A place in the queue.
    type Event: fmt::Debug + Send + Sync;

    /// Memory of the device that nobody has written, at a multiple of 256 bytes. It is freed behind
    /// all that was appended before it was dropped.
    fn block(&self, n_bytes: usize) -> Result<Self::Block>;

    /// Memory of the host, full of zeros.
    fn pinned(&self, n_bytes: usize) -> Result<Self::Pinned>;

    /// An event, which has not happened.
    fn event(&self) -> Result<Self::Event>;

    /// Copies bytes to the device and waits until they are there.
    fn upload(&self, bytes: &[u8], to: Address) -> Result<()>;

    /// Copies bytes from the device and waits until they are here.
    fn download(&self, from: Address, bytes: &mut [u8]) -> Result<()>;

    /// Appends a copy to the device.
    fn send(&self, from: &Self::Pinned, range: Range<usize>, to: Address) -> Result<()>;

    /// Appends a copy from the device.
    fn receive(&self, from: Address, to: &mut Self::Pinned, range: Range<usize>) -> Result<()>;

    /// Copies from the device beside the queue, as soon as an event that was recorded has happened:
    /// what was appended after it is not waited for, and must not write there before this copy has been
    /// waited for.
    fn receive_after(
        &self,
        event: &Self::Event,
        from: Address,
        to: &mut Self::Pinned,
        range: Range<usize>,
    ) -> Result<()>;

    /// Appends an event.
    fn record(&self, event: &Self::Event) -> Result<()>;

    /// Time from one event to another, in nanoseconds. Waits for both.
    fn elapsed_ns(&self, from: &Self::Event, to: &Self::Event) -> Result<u64>;
}

/// Memory of a device.
pub(crate) trait Block: fmt::Debug + Send + Sync {
    /// Where it begins.
    fn address(&self) -> Address;

    /// Its length.
    fn n_bytes(&self) -> usize;
}

/// Memory of the host. Both methods wait for the copies to and from it, and for nothing else.
pub(crate) trait Pinned: fmt::Debug + Send + Sync {
    /// Its length.
    fn n_bytes(&self) -> usize;

    /// What it holds.
    fn bytes(&mut self) -> Result<&[u8]>;

    /// Likewise, to be written.
    fn bytes_mut(&mut self) -> Result<&mut [u8]>;
}

/// Makes host memory at least so large; what it held is lost.
pub(crate) fn grow<B: Backend>(backend: &B, memory: &mut B::Pinned, n_bytes: usize) -> Result<()> {
    if memory.n_bytes() < n_bytes {
        *memory = backend.pinned(n_bytes.next_power_of_two())?;
    }
    Ok(())
}
