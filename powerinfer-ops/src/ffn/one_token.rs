//! One token in one parallel region: a chunk of neurons goes from gate to down in one task.
//!
//! The naive form makes a pass over the gate, a list of what fires, a pass over up and one over
//! down, and waits for all threads between them. But a neuron needs no other neuron until the
//! outputs are summed. So a task takes a chunk of neurons, computes their gate products, lists
//! those that fire, their up products, and the weighted sum of their down rows; the sums of the
//! chunks are added in order at the end, as [`rows`] promises. A decode step of llama-1b spends
//! two waits a layer less that way.

use std::ops::Range;

use rayon::prelude::*;

use super::{FfnCounts, FfnWeights, Run};
use crate::cpu::RowKernels;
use crate::cpu::rows::{self, CHUNK_ROWS};
use crate::matrix::NeuronMatrix;

/// Where the neurons of a token come from.
#[derive(Clone, Copy)]
pub(super) enum Candidates<'a> {
    /// All, and all run to the end.
    All,
    /// All; those that fire run to the end.
    Firing,
    /// These ascending ids; those that fire run to the end.
    Picked(&'a [u32]),
    /// All, with their activations given; those that fire run to the end.
    Activated(&'a [f32]),
}

/// Scratch of a decode step.
#[derive(Debug, Default)]
pub(crate) struct StepScratch {
    chunks: Vec<Chunk>,
    /// Weighted sums of down rows, `[n_chunks, d_model]`.
    sums: Vec<f32>,
}

impl StepScratch {
    pub(crate) fn size_bytes(&self) -> usize {
        self.chunks.capacity() * size_of::<Chunk>() + self.sums.capacity() * size_of::<f32>()
    }
}

/// Scratch of a task.
#[derive(Debug, Clone)]
struct Chunk {
    /// Neurons that are still in the running.
    ids: [u32; CHUNK_ROWS],
    /// Their gate products, then activations.
    h: [f32; CHUNK_ROWS],
    /// Their up products.
    up: [f32; CHUNK_ROWS],
    counts: FfnCounts,
}

impl Default for Chunk {
    fn default() -> Self {
        Self {
            ids: [0; CHUNK_ROWS],
            h: [0.0; CHUNK_ROWS],
            up: [0.0; CHUNK_ROWS],
            counts: FfnCounts::default(),
        }
    }
}

impl Run<'_> {
    /// Adds the output for token `t` to its part of `y`.
    pub(super) fn one_token(
        &self,
        t: usize,
        candidates: Candidates<'_>,
        scratch: &mut StepScratch,
        y: &mut [f32],
    ) -> FfnCounts {
        let (weights, kernels) = (self.weights, self.kernels);
        let (x, y) = (&self.x[self.token(t)], &mut y[self.token(t)]);
        let n_chunks = weights.n_neurons().div_ceil(CHUNK_ROWS);
        let StepScratch { chunks, sums } = scratch;
        let run = |index: usize, chunk: &mut Chunk, sum: &mut [f32]| {
            let rows = index * CHUNK_ROWS..weights.n_neurons().min((index + 1) * CHUNK_ROWS);
            chunk.run(weights, kernels, candidates, rows, x, sum);
        };
        let mut counts = FfnCounts::default();
        if n_chunks == 0 {
            return counts;
        }
        if rows::n_tasks(candidates.bytes_at_least(weights)) == 1 {
            chunks.resize_with(chunks.len().max(1), Chunk::default);
            sums.resize(sums.len().max(y.len()), 0.0);
            let (chunk, sum) = (&mut chunks[0], &mut sums[..y.len()]);
            for index in 0..n_chunks {
                run(index, chunk, sum);
                counts.add(chunk.counts);
                rows::add(y, sum);
            }
            return counts;
        }
        chunks.resize_with(chunks.len().max(n_chunks), Chunk::default);
        sums.resize(sums.len().max(n_chunks * y.len()), 0.0);
        let (chunks, sums) = (&mut chunks[..n_chunks], &mut sums[..n_chunks * y.len()]);
        let tasks = chunks.par_iter_mut().zip(sums.par_chunks_exact_mut(y.len()));
        tasks.enumerate().for_each(|(index, (chunk, sum))| run(index, chunk, sum));
        for (chunk, sum) in chunks.iter().zip(sums.chunks_exact(y.len())) {
            counts.add(chunk.counts);
            rows::add(y, sum);
        }
        counts
    }
}

impl Candidates<'_> {
    /// Bytes that are read for sure.
    fn bytes_at_least(self, weights: &FfnWeights) -> usize {
        match self {
            Self::All => weights.size_bytes(),
            Self::Firing => weights.gate.size_bytes(),
            Self::Picked(ids) => ids.len() * weights.gate.row_bytes(),
            Self::Activated(h) => {
                h.iter().filter(|&&h| h != 0.0).count() * weights.down.row_bytes()
            }
        }
    }
}

impl Chunk {
    /// The weighted sum of the down rows of the neurons `rows` that are candidates.
    fn run(
        &mut self,
        weights: &FfnWeights,
        kernels: RowKernels,
        candidates: Candidates<'_>,
        rows: Range<usize>,
        x: &[f32],
        sum: &mut [f32],
    ) {
        let n_candidates = self.start(weights, kernels, candidates, rows, x);
        let fired = self.h[..n_candidates].iter().filter(|&&h| h != 0.0).count();
        let keep_all = matches!(candidates, Candidates::All);
        let n = if keep_all { n_candidates } else { self.keep_firing(n_candidates) };
        let mut ran = n;
        if let Some(matrix) = &weights.up {
            let ids = &self.ids[..n];
            let row_ops = kernels.primitives(matrix.format());
            rows::dot_rows(row_ops, |k| matrix.row(ids[k] as usize), x, &mut self.up[..n]);
            for k in 0..n {
                self.h[k] = weights.gated(self.ids[k] as usize, self.h[k], self.up[k]);
            }
            ran = if keep_all { n } else { self.keep_firing(n) };
        }
        let (ids, down) = (&self.ids[..ran], &weights.down);
        let row_ops = kernels.primitives(down.format());
        sum.fill(0.0);
        rows::axpy_entries(row_ops, |k| down.row(ids[k] as usize), &self.h[..ran], sum);
        let gate_is_given = matches!(candidates, Candidates::Activated(_));
        let gate_bytes = if gate_is_given { 0 } else { n_candidates * weights.gate.row_bytes() };
        let up_bytes = n * weights.up.as_ref().map_or(0, NeuronMatrix::row_bytes);
        self.counts = FfnCounts {
            fired: fired as u64,
            ran: ran as u64,
            bytes: (gate_bytes + up_bytes + ran * down.row_bytes()) as u64,
        };
    }

    /// Fills `ids` and `h` with the candidates among `rows` and their activations; returns how
    /// many there are.
    fn start(
        &mut self,
        weights: &FfnWeights,
        kernels: RowKernels,
        candidates: Candidates<'_>,
        rows: Range<usize>,
        x: &[f32],
    ) -> usize {
        let len = match candidates {
            Candidates::Picked(ids) => {
                let start = ids.partition_point(|&id| (id as usize) < rows.start);
                let end = ids.partition_point(|&id| (id as usize) < rows.end);
                self.ids[..end - start].copy_from_slice(&ids[start..end]);
                end - start
            }
            _ => {
                // ids are u32: a matrix has no more rows
                self.ids.iter_mut().zip(rows.clone()).for_each(|(id, row)| *id = row as u32);
                rows.len()
            }
        };
        if let Candidates::Activated(h) = candidates {
            self.h[..len].copy_from_slice(&h[rows]);
            return len;
        }
        let (ids, h) = (&self.ids[..len], &mut self.h[..len]);
        let row_ops = kernels.primitives(weights.gate.format());
        rows::dot_rows(row_ops, |k| weights.gate.row(ids[k] as usize), x, h);
        for (h, &id) in h.iter_mut().zip(ids) {
            *h = weights.activate(id as usize, *h);
        }
        len
    }

    /// Drops those of the first `n` neurons whose `h` is zero; returns how many are left.
    fn keep_firing(&mut self, n: usize) -> usize {
        let mut kept = 0;
        for k in 0..n {
            (self.ids[kept], self.h[kept]) = (self.ids[k], self.h[k]);
            // no branch: which neurons fire cannot be foreseen
            kept += usize::from(self.h[k] != 0.0);
        }
        kept
    }
}
