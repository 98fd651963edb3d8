//! What goes to the device and comes back: pinned buffers that are reused.

use candle_core::Result;

use super::backend::{Backend, Pinned, grow};
use super::device::TOKENS_AT_ONCE;
use super::ffn_steps::{FfnScratch, N_COUNTS};
use super::picks::{norm, union_by_row, union_of};
use super::queue::Address;
use super::tiled_steps::MANY_TOKENS;
use crate::NeuronIds;

/// Buffers of a piece of work, and when it began and ended on the device.
#[derive(Debug)]
pub(crate) struct Exchange<B: Backend> {
    /// `[n_tokens, d_model]` f32.
    x: B::Pinned,
    /// What a predictor takes beside them: norms `[n_tokens]`, or the residual stream
    /// `[n_tokens, d_model]`, f32.
    beside: B::Pinned,
    /// `[n_tokens, d_model]` f32.
    y: B::Pinned,
    /// Counts of the lists of each group of tokens, [`N_COUNTS`] u32 each.
    counts: B::Pinned,
    /// What each group picks: the number of ids, the ids, and the mask.
    picks: B::Pinned,
    union: Vec<u32>,
    began: B::Event,
    ended: B::Event,
}

/// Where the picks of a group lie, in bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PicksPlace {
    at: usize,
    n_ids: usize,
    n_mask: usize,
}

impl<B: Backend> Exchange<B> {
    pub(crate) fn new(backend: &B) -> Result<Self> {
        let [x, beside, y, counts, picks] = [(); 5].map(|()| backend.pinned(0));
        let (x, beside, y, counts, picks) = (x?, beside?, y?, counts?, picks?);
        let (began, ended, union) = (backend.event()?, backend.event()?, Vec::new());
        Ok(Self { x, beside, y, counts, picks, union, began, ended })
    }

    /// Takes a copy of `x`, makes room for the answer, and notes when the device begins.
    pub(crate) fn begin(&mut self, backend: &B, x: &[f32], d_model: usize) -> Result<()> {
        let n_groups = (x.len() / d_model.max(1)).div_ceil(TOKENS_AT_ONCE);
        grow(backend, &mut self.x, size_of_val(x))?;
        grow(backend, &mut self.y, size_of_val(x))?;
        grow(backend, &mut self.counts, n_groups * N_COUNTS * 4)?;
        self.x.bytes_mut()?[..size_of_val(x)].copy_from_slice(bytemuck::cast_slice(x));
        backend.record(&self.began)
    }

    /// Likewise, for tokens that are on the device and whose outputs stay there.
    pub(crate) fn begin_there(&mut self, backend: &B, n_tokens: usize) -> Result<()> {
        let n_groups = n_tokens.div_ceil(TOKENS_AT_ONCE);
        grow(backend, &mut self.counts, n_groups * N_COUNTS * 4)?;
        backend.record(&self.began)
    }

    /// Takes the norms of the tokens.
    pub(crate) fn write_norms(&mut self, backend: &B, x: &[f32], d_model: usize) -> Result<()> {
        let n_bytes = x.len() / d_model.max(1) * 4;
        grow(backend, &mut self.beside, n_bytes)?;
        let norms: &mut [f32] = bytemuck::cast_slice_mut(&mut self.beside.bytes_mut()?[..n_bytes]);
        norms.iter_mut().zip(x.chunks_exact(d_model.max(1))).for_each(|(to, x)| *to = norm(x));
        Ok(())
    }

    /// Takes a copy of the residual stream.
    pub(crate) fn write_residual(&mut self, backend: &B, residual: &[f32]) -> Result<()> {
        grow(backend, &mut self.beside, size_of_val(residual))?;
        let bytes: &[u8] = bytemuck::cast_slice(residual);
        self.beside.bytes_mut()?[..bytes.len()].copy_from_slice(bytes);
        Ok(())
    }

    /// Sends what a predictor takes of the tokens from `first` on, of `width` values.
    pub(crate) fn send_beside(
        &self,
        backend: &B,
        [first, n_tokens, width]: [usize; 3],
        to: Address,
    ) -> Result<()> {
        backend.send(&self.beside, first * width * 4..(first + n_tokens) * width * 4, to)
    }

    /// Writes the picks of all groups, before the first of them is sent.
    pub(crate) fn write_picks(
        &mut self,
        backend: &B,
        picks: &[NeuronIds],
        n_neurons: usize,
    ) -> Result<Vec<PicksPlace>> {
        let mask_len = |n_tokens: usize| if n_tokens == 1 { 0 } else { n_tokens * n_neurons };
        let bytes = |n_tokens: usize| (1 + n_neurons + mask_len(n_tokens)) * 4;
        let groups = || picks.chunks(TOKENS_AT_ONCE);
        grow(backend, &mut self.picks, groups().map(|group| bytes(group.len())).sum())?;
        let (memory, union) = (self.picks.bytes_mut()?, &mut self.union);
        let mut at = 0;
        let mut places = Vec::with_capacity(picks.len().div_ceil(TOKENS_AT_ONCE));
        for group in groups() {
            let place = &mut memory[at..at + bytes(group.len())];
            let (head, mask) = place.split_at_mut((1 + n_neurons) * 4);
            let lists = group.iter().map(NeuronIds::as_slice);
            let mask = bytemuck::cast_slice_mut(mask);
            if group.len() >= MANY_TOKENS {
                union_by_row(lists, union, mask, n_neurons);
            } else {
                union_of(lists, union, mask, n_neurons);
            }
            head[..4].copy_from_slice(&(union.len() as u32).to_le_bytes());
            head[4..][..union.len() * 4].copy_from_slice(bytemuck::cast_slice(union));
            places.push(PicksPlace { at, n_ids: union.len(), n_mask: mask_len(group.len()) });
            at += bytes(group.len());
        }
        Ok(places)
    }

    /// Sends what the tokens from `first` on need.
    pub(crate) fn send(
        &self,
        backend: &B,
        [first, n_tokens, d_model]: [usize; 3],
        scratch: &FfnScratch,
    ) -> Result<()> {
        let range = first * d_model * 4..(first + n_tokens) * d_model * 4;
        backend.send(&self.x, range, scratch.x)
    }

    /// Sends the picks of a group.
    pub(crate) fn send_picks(
        &self,
        backend: &B,
        PicksPlace { at, n_ids, n_mask }: PicksPlace,
        n_neurons: usize,
        scratch: &FfnScratch,
    ) -> Result<()> {
        let picked = &scratch.picked;
        backend.send(&self.picks, at..at + 4, picked.counts)?;
        let ids = at + 4;
        if n_ids > 0 {
            backend.send(&self.picks, ids..ids + n_ids * 4, picked.ids)?;
        }
        if n_mask > 0 {
            let mask = ids + n_neurons * 4;
            backend.send(&self.picks, mask..mask + n_mask * 4, picked.values)?;
        }
        Ok(())
    }

    /// Fetches the outputs of the tokens from `first` on.
    pub(crate) fn receive(
        &mut self,
        backend: &B,
        [first, n_tokens, d_model]: [usize; 3],
        scratch: &FfnScratch,
    ) -> Result<()> {
        let range = first * d_model * 4..(first + n_tokens) * d_model * 4;
        backend.receive(scratch.y, &mut self.y, range)
    }

    /// Fetches the counts of a group.
    pub(crate) fn receive_counts(
        &mut self,
        backend: &B,
        group: usize,
        scratch: &FfnScratch,
    ) -> Result<()> {
        let at = group * N_COUNTS * 4;
        backend.receive(scratch.counts, &mut self.counts, at..at + N_COUNTS * 4)
    }

    /// Notes when the device ends.
    pub(crate) fn end(&self, backend: &B) -> Result<()> {
        backend.record(&self.ended)
    }

    /// Waits for the answer and adds it to `y`.
    pub(crate) fn add_to(&mut self, y: &mut [f32]) -> Result<()> {
        let sum: &[f32] = bytemuck::cast_slice(&self.y.bytes()?[..size_of_val(y)]);
        y.iter_mut().zip(sum).for_each(|(y, sum)| *y += sum);
        Ok(())
    }

    /// Waits for the counts of each group.
    pub(crate) fn groups(&mut self, n_groups: usize) -> Result<Vec<[u32; N_COUNTS]>> {
        let bytes = &self.counts.bytes()?[..n_groups * N_COUNTS * 4];
        let count = |bytes: &[u8; 4]| u32::from_le_bytes(*bytes);
        let counts: Vec<u32> = bytes.as_chunks().0.iter().map(count).collect();
        Ok(counts.as_chunks().0.to_vec())
    }

    /// How long the device took, in nanoseconds.
    pub(crate) fn busy_ns(&self, backend: &B) -> u64 {
        backend.elapsed_ns(&self.began, &self.ended).unwrap_or(0)
    }
}
