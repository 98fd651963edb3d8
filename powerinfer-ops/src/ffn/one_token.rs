//! One token in one parallel region: a chunk of neurons goes from gate to down in one task.
//!
//! The naive form makes a pass over the gate, a list of what fires, a pass over up and one over
//! down, and waits for all threads between them. But a neuron needs no other neuron until the
//! outputs are summed. So a task takes a chunk of neurons, computes their gate products, lists
//! those that fire, their up products, and the weighted sum of their down rows; the sums of the
//! chunks are added in order at the end, as [`rows`] promises. A decode step of llama-1b spends
//! two waits a layer less that way.
//!
//! Where most neurons of a chunk are picked or fire ([`READ_ALL_SHARE`]), all rows of the chunk are
//! read and those that are not wanted count as zero: a stream of all is faster than most of them in
//! pieces. It adds zeros to sums, which changes no bit.
//!
//! Asking for gate, up and down rows as soon as they are known to be needed, while others are
//! multiplied, was tried: a tenth to a third slower.

use std::ops::Range;
use std::time::Instant;

use rayon::prelude::*;

use super::predictor::{Seen, nanoseconds};
use super::{FfnCounts, FfnWeights, Neurons, Run};
use crate::cpu::GROUP;
use crate::cpu::low_bit::{GROUP_ROWS, LowBitKernels};
use crate::cpu::rows::{self, CHUNK_ROWS};
use crate::matrix::NeuronMatrix;

/// Wanted neurons of a chunk, as a share of all, from which on all rows are read.
const READ_ALL_SHARE: f64 = 0.65;

/// Scratch of a decode step.
#[derive(Debug, Default)]
pub(crate) struct StepScratch {
    chunks: Vec<Chunk>,
    /// Weighted sums of down rows, `[n_chunks, d_model]`.
    sums: Vec<f32>,
}

impl StepScratch {
    /// Bytes for so many neurons.
    pub(crate) fn bytes_at_most(n_neurons: usize, d_model: usize) -> usize {
        let n_chunks = n_neurons.div_ceil(CHUNK_ROWS);
        n_chunks * (size_of::<Chunk>() + d_model * size_of::<f32>())
    }

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
    /// Time that picking them took.
    predictor_ns: u64,
    counts: FfnCounts,
}

impl Default for Chunk {
    fn default() -> Self {
        Self {
            ids: [0; CHUNK_ROWS],
            h: [0.0; CHUNK_ROWS],
            up: [0.0; CHUNK_ROWS],
            predictor_ns: 0,
            counts: FfnCounts::default(),
        }
    }
}

impl Run<'_> {
    /// Adds the output for the only token to `y`.
    pub(super) fn one_token(
        &self,
        neurons: Neurons<'_>,
        seen: Seen<'_>,
        scratch: &mut StepScratch,
        y: &mut [f32],
    ) -> FfnCounts {
        let weights = self.weights;
        let n_chunks = weights.n_neurons().div_ceil(CHUNK_ROWS);
        let StepScratch { chunks, sums } = scratch;
        let run = |index: usize, chunk: &mut Chunk, sum: &mut [f32]| {
            let rows = index * CHUNK_ROWS..weights.n_neurons().min((index + 1) * CHUNK_ROWS);
            chunk.run(self, (neurons, seen), rows, sum);
        };
        let bytes = neurons.predictor_bytes() as u64;
        let mut counts = FfnCounts { bytes, ..FfnCounts::default() };
        if n_chunks == 0 {
            return counts;
        }
        if rows::n_tasks(bytes_at_least(neurons, weights)) == 1 {
            chunks.resize_with(chunks.len().max(1), Chunk::default);
            sums.resize(sums.len().max(y.len()), 0.0);
            let (chunk, sum) = (&mut chunks[0], &mut sums[..y.len()]);
            for index in 0..n_chunks {
                run(index, chunk, sum);
                counts.add(chunk.counts);
                rows::add_sums((self.kernels, weights.down.format()), sum, y);
            }
            return counts;
        }
        chunks.resize_with(chunks.len().max(n_chunks), Chunk::default);
        sums.resize(sums.len().max(n_chunks * y.len()), 0.0);
        let (chunks, sums) = (&mut chunks[..n_chunks], &mut sums[..n_chunks * y.len()]);
        let tasks = chunks.par_iter_mut().zip(sums.par_chunks_exact_mut(y.len()));
        tasks.enumerate().for_each(|(index, (chunk, sum))| run(index, chunk, sum));
        for chunk in chunks.iter() {
            counts.add(chunk.counts);
        }
        rows::add_sums((self.kernels, weights.down.format()), sums, y);
        counts.predictor_ns /= rayon::current_num_threads() as u64;
        counts
    }
}

/// The row of the neuron `ids[0][k]` of the first matrix, and behind its last one those of the second:
/// what is asked for while the first ones are read. Where there is nothing to ask for, the last row
/// again.
fn row_of<'a>(
    [matrix, next]: [&'a NeuronMatrix; 2],
    [ids, next_ids]: [&[u32]; 2],
    k: usize,
) -> &'a [u8] {
    match (ids.get(k), next_ids.get(k.saturating_sub(ids.len()))) {
        (Some(&id), _) => matrix.row(id as usize),
        (None, Some(&id)) => next.row(id as usize),
        (None, None) => matrix.row(ids[ids.len() - 1] as usize),
    }
}

/// Of a list of neurons those among `rows`, and those behind them.
fn listed<'a>(neurons: Neurons<'a>, rows: &Range<usize>) -> Option<(&'a [u32], &'a [u32])> {
    let Neurons::FiringOf([picks]) = neurons else {
        return None;
    };
    let ids = picks.as_slice();
    let from = &ids[ids.partition_point(|&id| (id as usize) < rows.start)..];
    let few = &from[..from.len().min(rows.len())];
    Some(from.split_at(few.partition_point(|&id| (id as usize) < rows.end)))
}

/// The first neurons from `end` on whose gates are read, as far as that is known before a predictor
/// runs and they are not listed; `consecutive` lends the memory for them.
fn first_after<'a>(
    neurons: Neurons<'_>,
    end: usize,
    n_neurons: usize,
    consecutive: &'a mut [u32; GROUP],
) -> &'a [u32] {
    match neurons {
        Neurons::All | Neurons::Firing => {
            consecutive.iter_mut().zip(end..).for_each(|(id, row)| *id = row as u32);
            &consecutive[..GROUP.min(n_neurons - end)]
        }
        Neurons::FiringOf(_) | Neurons::Estimated(..) | Neurons::Scored(_) => &[],
    }
}

/// Bytes that are read for sure.
fn bytes_at_least(neurons: Neurons<'_>, weights: &FfnWeights) -> usize {
    match neurons {
        Neurons::All => weights.size_bytes(),
        Neurons::Firing => weights.gate.size_bytes(),
        Neurons::FiringOf(picks) => picks[0].len() * weights.gate.row_bytes(),
        Neurons::Estimated(..) | Neurons::Scored(_) => neurons.predictor_bytes(),
    }
}

/// Whether so many rows of a chunk are wanted that all `n_rows` are read.
fn most_of(n_wanted: usize, n_rows: usize) -> bool {
    n_wanted as f64 > READ_ALL_SHARE * n_rows as f64
}

impl Chunk {
    /// The weighted sum of the down rows of the neurons `rows` that are candidates.
    fn run(
        &mut self,
        run: &Run<'_>,
        (neurons, seen): (Neurons<'_>, Seen<'_>),
        rows: Range<usize>,
        sum: &mut [f32],
    ) {
        let (weights, kernels) = (run.weights, run.kernels);
        let n_rows = rows.len();
        let mut consecutive = [0; GROUP];
        let listed = listed(neurons, &rows);
        let after = match listed {
            Some((_, after)) => after,
            None => first_after(neurons, rows.end, weights.n_neurons(), &mut consecutive),
        };
        let listed = listed.map(|(ids, _)| ids);
        let (picked, n_candidates) = self.start(run, (neurons, listed), seen, rows);
        let fired = self.n_firing(n_candidates);
        let read_all = n_candidates == n_rows && most_of(fired, n_rows);
        let keep_all = matches!(neurons, Neurons::All) || read_all;
        let n = if keep_all { n_candidates } else { self.keep_firing(n_candidates) };
        let mut n_down = n;
        if let Some(matrix) = &weights.up {
            let ids = &self.ids[..n];
            let row_ops = kernels.primitives(matrix.format());
            let row = |k| row_of([matrix, &weights.down], [ids, ids], k);
            rows::dot_rows(row_ops, row, run.x, &mut self.up[..n]);
            for k in 0..n {
                self.h[k] = weights.gated(self.ids[k] as usize, self.h[k], self.up[k]);
            }
            n_down = if keep_all { n } else { self.keep_firing(n) };
        }
        let (ids, down) = (&self.ids[..n_down], &weights.down);
        let row = |k| row_of([down, &weights.gate], [ids, after], k);
        rows::weighted_sum((kernels, down.format()), row, &self.h[..n_down], sum);
        let up_bytes = n * weights.up.as_ref().map_or(0, NeuronMatrix::row_bytes);
        let bytes = n_candidates * weights.gate.row_bytes() + up_bytes + n_down * down.row_bytes();
        let ran = if matches!(neurons, Neurons::All) { n_down } else { self.n_firing(n_down) };
        self.counts = FfnCounts {
            fired: fired as u64,
            ran: ran as u64,
            bytes: bytes as u64,
            picked: picked as u64,
            predictor_ns: self.predictor_ns,
        };
    }

    /// Fills `ids` and `h` with the candidates among `rows` and their activations; returns how many
    /// were picked and how many there are: more if it is faster to take all, then those that were
    /// not picked do not fire.
    fn start(
        &mut self,
        run: &Run<'_>,
        neurons: (Neurons<'_>, Option<&[u32]>),
        seen: Seen<'_>,
        rows: Range<usize>,
    ) -> (usize, usize) {
        let picked = self.pick(run, neurons, seen, rows.clone());
        let all = picked < rows.len() && most_of(picked, rows.len());
        let mut left_out = [false; CHUNK_ROWS];
        if all {
            left_out.fill(true);
            for &id in &self.ids[..picked] {
                left_out[id as usize - rows.start] = false;
            }
            self.list(rows.clone());
        }
        let len = if all { rows.len() } else { picked };
        let (ids, h) = (&self.ids[..len], &mut self.h[..len]);
        let gate = &run.weights.gate;
        let row_ops = run.kernels.primitives(gate.format());
        let next = run.weights.up.as_ref().unwrap_or(&run.weights.down);
        // of all gates few fire, and not the first ones
        let next = if picked < rows.len() && !all { (next, ids) } else { (gate, &[][..]) };
        let row = |k| row_of([gate, next.0], [ids, next.1], k);
        rows::dot_rows(row_ops, row, run.x, h);
        for ((h, &id), left_out) in h.iter_mut().zip(ids).zip(left_out) {
            *h = if left_out { 0.0 } else { run.weights.activate(id as usize, *h) };
        }
        (picked, len)
    }

    /// Fills `ids` with the candidates among `rows`, which may be listed; returns how many there are.
    fn pick(
        &mut self,
        run: &Run<'_>,
        (neurons, listed): (Neurons<'_>, Option<&[u32]>),
        seen: Seen<'_>,
        rows: Range<usize>,
    ) -> usize {
        self.predictor_ns = 0;
        if let Some(ids) = listed {
            self.ids[..ids.len()].copy_from_slice(ids);
            return ids.len();
        }
        let began = Instant::now();
        let len = match (neurons, seen) {
            (Neurons::Estimated(estimate, margin), Seen::LowBit(input)) => {
                // a chunk is whole groups
                let groups = rows.start / GROUP_ROWS..rows.end.div_ceil(GROUP_ROWS);
                let best = LowBitKernels::best();
                estimate.pick_groups(best, groups, (input, margin), &mut self.ids)
            }
            (Neurons::Scored(scores), Seen::Hidden(hidden)) => {
                let row_ops = run.kernels.primitives(scores.rows.format());
                let row = |k: usize| scores.rows.row((rows.start + k).min(rows.end - 1));
                rows::dot_rows(row_ops, row, hidden, &mut self.h[..rows.len()]);
                let mut len = 0;
                for (k, row) in rows.enumerate() {
                    self.ids[len] = row as u32;
                    len += usize::from(scores.reaches(self.h[k]));
                }
                len
            }
            _ => {
                self.list(rows.clone());
                return rows.len();
            }
        };
        self.predictor_ns = nanoseconds(began);
        len
    }

    /// Lists all of `rows`.
    fn list(&mut self, rows: Range<usize>) {
        // ids are u32: a matrix has no more rows
        self.ids.iter_mut().zip(rows).for_each(|(id, row)| *id = row as u32);
    }

    /// How many of the first `n` neurons fire.
    fn n_firing(&self, n: usize) -> usize {
        self.h[..n].iter().filter(|&&h| h != 0.0).count()
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
