//! What goes to the GPU and comes back: pinned buffers that are reused.

use candle_core::cuda_backend::cudarc::driver::CudaEvent;

use super::device::TOKENS_AT_ONCE;
use super::ffn_steps::{FfnScratch, N_COUNTS};
use super::picks::{norm, union_of};
use super::stream::{HostMemory, Stream};
use crate::mask::NeuronIds;

/// Buffers of a piece of work, and when it began and ended on the device.
#[derive(Debug)]
pub(super) struct Exchange {
    /// `[n_tokens, d_model]` f32.
    x: HostMemory,
    /// `[n_tokens]` f32: their norms, where a predictor asks for them.
    norms: HostMemory,
    /// `[n_tokens, d_model]` f32.
    pub(super) y: HostMemory,
    /// Counts of the lists of each group of tokens, [`N_COUNTS`] u32 each.
    pub(super) counts: HostMemory,
    /// What each group picks: the number of ids, the ids, and the mask.
    picks: HostMemory,
    union: Vec<u32>,
    began: CudaEvent,
    ended: CudaEvent,
}

/// Where the picks of a group lie, in bytes.
#[derive(Debug, Clone, Copy)]
pub(super) struct PicksPlace {
    at: usize,
    n_ids: usize,
    n_mask: usize,
}

impl Exchange {
    pub(super) fn new(stream: &Stream) -> candle_core::Result<Self> {
        let [x, norms, y, counts, picks] = [(); 5].map(|()| stream.host_memory(0));
        let (x, norms, y, counts, picks) = (x?, norms?, y?, counts?, picks?);
        let (began, ended, union) = (stream.timer()?, stream.timer()?, Vec::new());
        Ok(Self { x, norms, y, counts, picks, union, began, ended })
    }

    /// Takes a copy of `x`, makes room for the answer, and notes when the device begins.
    pub(super) fn begin(
        &mut self,
        stream: &Stream,
        x: &[f32],
        d_model: usize,
    ) -> candle_core::Result<()> {
        let n_groups = (x.len() / d_model.max(1)).div_ceil(TOKENS_AT_ONCE);
        grow(stream, &mut self.x, size_of_val(x))?;
        grow(stream, &mut self.y, size_of_val(x))?;
        grow(stream, &mut self.counts, n_groups * N_COUNTS * 4)?;
        self.x.bytes_mut()?[..size_of_val(x)].copy_from_slice(bytemuck::cast_slice(x));
        stream.record(&self.began)
    }

    /// Takes the norms of the tokens.
    pub(super) fn write_norms(
        &mut self,
        stream: &Stream,
        x: &[f32],
        d_model: usize,
    ) -> candle_core::Result<()> {
        let n_bytes = x.len() / d_model * 4;
        grow(stream, &mut self.norms, n_bytes)?;
        let norms: &mut [f32] = bytemuck::cast_slice_mut(&mut self.norms.bytes_mut()?[..n_bytes]);
        norms.iter_mut().zip(x.chunks_exact(d_model)).for_each(|(to, x)| *to = norm(x));
        Ok(())
    }

    /// Sends the norms of the tokens from `first` on.
    pub(super) fn send_norms(
        &self,
        stream: &Stream,
        [first, n_tokens]: [usize; 2],
        scratch: &FfnScratch,
    ) -> candle_core::Result<()> {
        stream.send(&self.norms, first * 4..(first + n_tokens) * 4, scratch.numbers.norms)
    }

    /// Writes the picks of all groups, before the first of them is sent.
    pub(super) fn write_picks(
        &mut self,
        stream: &Stream,
        picks: &[NeuronIds],
        n_neurons: usize,
    ) -> candle_core::Result<Vec<PicksPlace>> {
        let mask_len = |n_tokens: usize| if n_tokens == 1 { 0 } else { n_tokens * n_neurons };
        let bytes = |n_tokens: usize| (1 + n_neurons + mask_len(n_tokens)) * 4;
        let groups = || picks.chunks(TOKENS_AT_ONCE);
        grow(stream, &mut self.picks, groups().map(|group| bytes(group.len())).sum())?;
        let (memory, union) = (self.picks.bytes_mut()?, &mut self.union);
        let mut at = 0;
        let mut places = Vec::with_capacity(picks.len().div_ceil(TOKENS_AT_ONCE));
        for group in groups() {
            let place = &mut memory[at..at + bytes(group.len())];
            let (head, mask) = place.split_at_mut((1 + n_neurons) * 4);
            let lists = group.iter().map(NeuronIds::as_slice);
            union_of(lists, union, bytemuck::cast_slice_mut(mask), n_neurons);
            head[..4].copy_from_slice(&(union.len() as u32).to_le_bytes());
            head[4..][..union.len() * 4].copy_from_slice(bytemuck::cast_slice(union));
            places.push(PicksPlace { at, n_ids: union.len(), n_mask: mask_len(group.len()) });
            at += bytes(group.len());
        }
        Ok(places)
    }

    /// Sends what the tokens from `first` on need.
    pub(super) fn send(
        &self,
        stream: &Stream,
        [first, n_tokens, d_model]: [usize; 3],
        scratch: &FfnScratch,
    ) -> candle_core::Result<()> {
        let range = first * d_model * 4..(first + n_tokens) * d_model * 4;
        stream.send(&self.x, range, scratch.x)
    }

    /// Sends the picks of a group.
    pub(super) fn send_picks(
        &self,
        stream: &Stream,
        PicksPlace { at, n_ids, n_mask }: PicksPlace,
        n_neurons: usize,
        scratch: &FfnScratch,
    ) -> candle_core::Result<()> {
        let picked = &scratch.picked;
        stream.send(&self.picks, at..at + 4, picked.counts)?;
        let ids = at + 4;
        if n_ids > 0 {
            stream.send(&self.picks, ids..ids + n_ids * 4, picked.ids)?;
        }
        if n_mask > 0 {
            let mask = ids + n_neurons * 4;
            stream.send(&self.picks, mask..mask + n_mask * 4, picked.values)?;
        }
        Ok(())
    }

    /// Fetches the outputs and counts of the tokens from `first` on.
    pub(super) fn receive(
        &mut self,
        stream: &Stream,
        [first, n_tokens, d_model]: [usize; 3],
        scratch: &FfnScratch,
    ) -> candle_core::Result<()> {
        let range = first * d_model * 4..(first + n_tokens) * d_model * 4;
        stream.receive(scratch.y, &mut self.y, range)?;
        let group = first / TOKENS_AT_ONCE * N_COUNTS * 4;
        stream.receive(scratch.counts, &mut self.counts, group..group + N_COUNTS * 4)
    }

    /// Notes when the device ends.
    pub(super) fn end(&self, stream: &Stream) -> candle_core::Result<()> {
        stream.record(&self.ended)
    }

    /// Waits for the answer and adds it to `y`.
    pub(super) fn add_to(&self, y: &mut [f32]) -> candle_core::Result<()> {
        let bytes = &self.y.bytes()?[..size_of_val(y)];
        crate::cpu::rows::add(y, bytemuck::cast_slice(bytes));
        Ok(())
    }

    /// The counts of each group, after the answer is there.
    pub(super) fn groups(&self, n_groups: usize) -> candle_core::Result<Vec<[u32; N_COUNTS]>> {
        let bytes = &self.counts.bytes()?[..n_groups * N_COUNTS * 4];
        let counts = bytemuck::cast_slice::<u8, u32>(bytes).as_chunks::<N_COUNTS>().0;
        Ok(counts.to_vec())
    }

    /// How long the device took, in nanoseconds.
    pub(super) fn busy_ns(&self) -> u64 {
        let ms = self.began.elapsed_ms(&self.ended).unwrap_or(0.0);
        (f64::from(ms) * 1e6) as u64
    }
}

/// Makes host memory at least so large.
fn grow(stream: &Stream, memory: &mut HostMemory, bytes: usize) -> candle_core::Result<()> {
    if memory.len() < bytes {
        *memory = stream.host_memory(bytes.next_power_of_two())?;
    }
    Ok(())
}
