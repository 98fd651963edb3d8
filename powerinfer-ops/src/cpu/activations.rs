//! Activations of many tokens and which of them matter.

use std::ops::Range;

use rayon::prelude::*;

use super::PANEL_ROWS;
use crate::ffn::Neurons;
use crate::format::WeightFormat;

/// Activations of many tokens, in blocks of [`PANEL_ROWS`] neurons.
#[derive(Debug, Default)]
pub(crate) struct Activations {
    pub(super) n_tokens: usize,
    /// `[n_blocks, n_tokens]`, a value for each neuron of the block, zero where it does not count.
    values: Vec<[f32; PANEL_ROWS]>,
    /// `[n_blocks, n_tokens]`, a bit for each neuron of the block whose value counts.
    masks: Vec<u64>,
}

impl Activations {
    /// Makes room; what was there before does not matter.
    pub(crate) fn resize(&mut self, n_neurons: usize, n_tokens: usize) {
        let len = n_neurons.div_ceil(PANEL_ROWS) * n_tokens;
        self.n_tokens = n_tokens;
        self.values.resize(len, [0.0; PANEL_ROWS]);
        self.masks.resize(len, 0);
    }

    /// Picks the neurons that are to be computed.
    pub(crate) fn pick(&mut self, n_neurons: usize, neurons: Neurons<'_>) {
        let Neurons::FiringOf(picks) = neurons else {
            for (block, masks) in self.masks.chunks_exact_mut(self.n_tokens.max(1)).enumerate() {
                let n = block_rows(n_neurons, block).len();
                masks.fill(u64::MAX >> (PANEL_ROWS - n));
            }
            return;
        };
        self.masks.fill(0);
        for (t, picks) in picks.iter().enumerate() {
            for &id in picks.as_slice() {
                let (block, r) = (id as usize / PANEL_ROWS, id as usize % PANEL_ROWS);
                self.masks[block * self.n_tokens + t] |= 1 << r;
            }
        }
    }

    /// Each block of neurons with its index, values and masks by token, to be filled in.
    pub(crate) fn par_blocks_mut(
        &mut self,
    ) -> impl IndexedParallelIterator<Item = (usize, (&mut [[f32; PANEL_ROWS]], &mut [u64]))> {
        let values = self.values.par_chunks_exact_mut(self.n_tokens);
        values.zip(self.masks.par_chunks_exact_mut(self.n_tokens)).enumerate()
    }

    /// Rounds the values as weighted sums of rows of `format` do.
    pub(super) fn round_for(&mut self, format: WeightFormat) {
        if format.rounds_scales() {
            self.values.par_iter_mut().for_each(|values| {
                *values = values.map(|value| format.round_scale(value));
            });
        }
    }

    /// Values and masks of a block, by token.
    pub(super) fn block(&self, block: usize) -> (&[[f32; PANEL_ROWS]], &[u64]) {
        let tokens = block * self.n_tokens..(block + 1) * self.n_tokens;
        (&self.values[tokens.clone()], &self.masks[tokens])
    }

    /// Neurons whose value counts, summed over tokens.
    pub(crate) fn count(&self) -> u64 {
        self.masks.iter().map(|mask| u64::from(mask.count_ones())).sum()
    }

    /// Neurons whose value counts for any token.
    pub(crate) fn count_rows(&self) -> u64 {
        let blocks = self.masks.chunks_exact(self.n_tokens.max(1));
        blocks.map(|masks| u64::from(any(masks).count_ones())).sum()
    }

    /// Bytes for so many neurons and tokens.
    pub(crate) fn bytes_at_most(n_neurons: usize, n_tokens: usize) -> usize {
        let of_block = size_of::<[f32; PANEL_ROWS]>() + size_of::<u64>();
        n_neurons.div_ceil(PANEL_ROWS) * n_tokens * of_block
    }

    pub(crate) fn size_bytes(&self) -> usize {
        self.values.capacity() * size_of::<[f32; PANEL_ROWS]>()
            + self.masks.capacity() * size_of::<u64>()
    }
}

/// The neurons that count for any of the tokens.
pub(crate) fn any(masks: &[u64]) -> u64 {
    masks.iter().fold(0, |any, mask| any | mask)
}

/// The neurons of a block.
pub(crate) fn block_rows(n_neurons: usize, block: usize) -> Range<usize> {
    block * PANEL_ROWS..n_neurons.min((block + 1) * PANEL_ROWS)
}
