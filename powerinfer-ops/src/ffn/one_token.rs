//! One token in one parallel region: a stretch of neurons, some chunks, goes from gate to down in one
//! task.
//!
//! The naive form makes a pass over the gate, a list of what fires, a pass over up and one over
//! down, and waits for all threads between them. But a neuron needs no other neuron until the
//! outputs are summed. So a task takes a stretch of neurons, computes their gate products, lists
//! those that fire, their up products, and the weighted sums of their down rows, one a chunk; the sums
//! of the chunks are added in order at the end, as [`rows`] promises. A decode step of llama-1b spends
//! two waits a layer less that way.
//!
//! Each change from one matrix to the next costs about half a microsecond, in which few lines are on
//! their way: with a tenth of the neurons of 4096 x 11008 picked and a stretch of one chunk that was a
//! fifth of the time. So a stretch is as long as the threads still find work, and the last ones of a
//! network are short. How long they are changes no bit, as the sums are those of chunks.
//!
//! Where most neurons of a stretch are picked or fire ([`READ_ALL_SHARE`]), all its rows are
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

/// Wanted neurons of a stretch, as a share of all, from which on all rows are read.
const READ_ALL_SHARE: f64 = 0.65;

/// Chunks of the longest stretch: what is listed for them stays in the L1 cache beside the token.
const MOST_CHUNKS: usize = 4;

/// Scratch of a decode step.
#[derive(Debug, Default)]
pub(crate) struct StepScratch {
    /// Neurons that are still in the running, `[n_chunks, CHUNK_ROWS]`, those of a stretch side by side.
    ids: Vec<u32>,
    /// Their gate products, then activations.
    h: Vec<f32>,
    /// Their up products.
    up: Vec<f32>,
    /// Weighted sums of down rows, `[n_chunks, d_model]`.
    sums: Vec<f32>,
}

impl StepScratch {
    /// Bytes for so many neurons.
    pub(crate) fn bytes_at_most(n_neurons: usize, d_model: usize) -> usize {
        let n_chunks = n_neurons.div_ceil(CHUNK_ROWS);
        let n_listed = n_chunks.max(MOST_CHUNKS) * CHUNK_ROWS;
        n_listed * (size_of::<u32>() + 2 * size_of::<f32>()) + n_chunks * d_model * size_of::<f32>()
    }

    pub(crate) fn size_bytes(&self) -> usize {
        let floats = self.h.capacity() + self.up.capacity() + self.sums.capacity();
        self.ids.capacity() * size_of::<u32>() + floats * size_of::<f32>()
    }

    /// Room for lists of the neurons of `n_listed` chunks at once and for `n_sums` values.
    fn grow(&mut self, n_listed: usize, n_sums: usize) {
        let n_listed = self.ids.len().max(n_listed * CHUNK_ROWS);
        self.ids.resize(n_listed, 0);
        self.h.resize(n_listed, 0.0);
        self.up.resize(n_listed, 0.0);
        self.sums.resize(self.sums.len().max(n_sums), 0.0);
    }
}

/// Some chunks that follow each other, and the scratch for them.
struct Stretch<'a> {
    rows: Range<usize>,
    ids: &'a mut [u32],
    h: &'a mut [f32],
    up: &'a mut [f32],
}

/// What a stretch comes to before its down rows are read.
struct Fired<'a> {
    /// How many neurons' down rows are read.
    n_down: usize,
    /// The first gates behind the stretch, as far as they are known.
    after: &'a [u32],
    counts: FfnCounts,
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
        let bytes = neurons.predictor_bytes() as u64;
        let mut counts = FfnCounts { bytes, ..FfnCounts::default() };
        let (n_neurons, d_model) = (weights.n_neurons(), y.len());
        let n_chunks = n_neurons.div_ceil(CHUNK_ROWS);
        if n_chunks == 0 || d_model == 0 {
            return counts;
        }
        let format = (self.kernels, weights.down.format());
        if rows::n_tasks(bytes_at_least(neurons, weights)) == 1 {
            scratch.grow(MOST_CHUNKS, d_model);
            let StepScratch { ids, h, up, sums } = scratch;
            let sum = &mut sums[..d_model];
            for first in (0..n_neurons).step_by(MOST_CHUNKS * CHUNK_ROWS) {
                let rows = first..n_neurons.min(first + MOST_CHUNKS * CHUNK_ROWS);
                let mut stretch = Stretch { rows, ids: &mut *ids, h: &mut *h, up: &mut *up };
                let mut after = [0; GROUP];
                let fired = stretch.fire(self, (neurons, seen), &mut after);
                counts.add(fired.counts);
                for entries in stretch.chunks(fired.n_down) {
                    stretch.weighted_sum(self, (&fired, entries), sum);
                    rows::add_sums(format, sum, y);
                }
            }
            return counts;
        }
        scratch.grow(n_chunks, n_chunks * d_model);
        let StepScratch { ids, h, up, sums } = scratch;
        let sums = &mut sums[..n_chunks * d_model];
        let tasks = stretches(n_neurons, rayon::current_num_threads()).scan(
            (&mut ids[..], &mut h[..], &mut up[..], &mut sums[..]),
            |(ids, h, up, sums), rows| {
                let n_chunks = rows.len().div_ceil(CHUNK_ROWS);
                let n = n_chunks * CHUNK_ROWS;
                let ids = ids.split_off_mut(..n)?;
                let (h, up) = (h.split_off_mut(..n)?, up.split_off_mut(..n)?);
                Some((Stretch { rows, ids, h, up }, sums.split_off_mut(..n_chunks * d_model)?))
            },
        );
        // the longest stretches come first, and a thread takes the next one when it is done
        let of_tasks = tasks.par_bridge().map(|(mut stretch, sums)| {
            let mut after = [0; GROUP];
            let fired = stretch.fire(self, (neurons, seen), &mut after);
            let chunks = stretch.chunks(fired.n_down);
            for (entries, sum) in chunks.zip(sums.chunks_exact_mut(d_model)) {
                stretch.weighted_sum(self, (&fired, entries), sum);
            }
            fired.counts
        });
        counts.add(of_tasks.reduce(FfnCounts::default, FfnCounts::sum));
        rows::add_sums(format, sums, y);
        counts.predictor_ns /= rayon::current_num_threads() as u64;
        counts
    }
}

/// The neurons of the stretches that threads share: each takes half of its part of what is left, as
/// whole chunks.
fn stretches(n_neurons: usize, n_threads: usize) -> impl Iterator<Item = Range<usize>> {
    let mut first = 0;
    std::iter::from_fn(move || {
        let n_chunks = (n_neurons - first).div_ceil(CHUNK_ROWS);
        let n_taken = (n_chunks / (2 * n_threads)).clamp(1, MOST_CHUNKS);
        let rows = first..n_neurons.min(first + n_taken * CHUNK_ROWS);
        first = rows.end;
        (!rows.is_empty()).then_some(rows)
    })
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

/// Whether so many rows of a stretch are wanted that all `n_rows` are read.
fn most_of(n_wanted: usize, n_rows: usize) -> bool {
    n_wanted as f64 > READ_ALL_SHARE * n_rows as f64
}

impl Stretch<'_> {
    /// Finds the neurons that fire and their activations; `after` lends memory for the gates behind.
    fn fire<'a>(
        &mut self,
        run: &Run<'_>,
        (neurons, seen): (Neurons<'a>, Seen<'_>),
        after: &'a mut [u32; GROUP],
    ) -> Fired<'a> {
        let weights = run.weights;
        let n_rows = self.rows.len();
        let (listed, after) = match listed(neurons, &self.rows) {
            Some((ids, after)) => (Some(ids), after),
            None => (None, first_after(neurons, self.rows.end, weights.n_neurons(), after)),
        };
        let mut counts = FfnCounts::default();
        let n_candidates = self.start(run, (neurons, listed), seen, &mut counts);
        let fired = self.n_firing(n_candidates);
        let read_all = n_candidates == n_rows && most_of(fired, n_rows);
        let keep_all = matches!(neurons, Neurons::All) || read_all;
        let n = if keep_all { n_candidates } else { self.keep_firing(n_candidates) };
        let mut n_down = n;
        if let Some(matrix) = &weights.up {
            let ids = &self.ids[..n];
            let row_ops = run.kernels.primitives(matrix.format());
            let row = |k| row_of([matrix, &weights.down], [ids, ids], k);
            rows::dot_rows(row_ops, row, run.x, &mut self.up[..n]);
            for k in 0..n {
                self.h[k] = weights.gated(self.ids[k] as usize, self.h[k], self.up[k]);
            }
            n_down = if keep_all { n } else { self.keep_firing(n) };
        }
        let ran = if matches!(neurons, Neurons::All) { n_down } else { self.n_firing(n_down) };
        let up_bytes = n * weights.up.as_ref().map_or(0, NeuronMatrix::row_bytes);
        let gate_bytes = n_candidates * weights.gate.row_bytes();
        counts.fired = fired as u64;
        counts.ran = ran as u64;
        counts.bytes = (gate_bytes + up_bytes + n_down * weights.down.row_bytes()) as u64;
        Fired { n_down, after, counts }
    }

    /// Which of the first `n_down` neurons belong to each chunk.
    fn chunks(&self, n_down: usize) -> impl Iterator<Item = Range<usize>> + use<> {
        let n_chunks = self.rows.len().div_ceil(CHUNK_ROWS);
        let mut ends = [n_down; MOST_CHUNKS];
        for (chunk, end) in ends[..n_chunks - 1].iter_mut().enumerate() {
            let next = self.rows.start + (chunk + 1) * CHUNK_ROWS;
            *end = self.ids[..n_down].partition_point(|&id| (id as usize) < next);
        }
        (0..n_chunks).map(move |chunk| if chunk == 0 { 0 } else { ends[chunk - 1] }..ends[chunk])
    }

    /// The weighted sum of the down rows of some `entries`.
    fn weighted_sum(
        &self,
        run: &Run<'_>,
        (fired, entries): (&Fired<'_>, Range<usize>),
        sum: &mut [f32],
    ) {
        let (weights, h) = (run.weights, &self.h[entries.clone()]);
        let (ids, down) = (&self.ids[entries.start..fired.n_down], &weights.down);
        let row = |k| row_of([down, &weights.gate], [ids, fired.after], k);
        rows::weighted_sum((run.kernels, down.format()), row, h, sum);
    }

    /// Fills `ids` and `h` with the candidates and their activations, counts those that were picked, and
    /// returns how many there are: more if it is faster to take all, then those that were not picked
    /// do not fire.
    fn start(
        &mut self,
        run: &Run<'_>,
        neurons: (Neurons<'_>, Option<&[u32]>),
        seen: Seen<'_>,
        counts: &mut FfnCounts,
    ) -> usize {
        let rows = self.rows.clone();
        let picked = self.pick(run, neurons, seen, counts);
        counts.picked = picked as u64;
        let all = picked < rows.len() && most_of(picked, rows.len());
        let mut left_out = [false; MOST_CHUNKS * CHUNK_ROWS];
        if all {
            left_out.fill(true);
            for &id in &self.ids[..picked] {
                left_out[id as usize - rows.start] = false;
            }
            self.list();
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
        len
    }

    /// Fills `ids` with the candidates, which may be listed; returns how many there are.
    fn pick(
        &mut self,
        run: &Run<'_>,
        (neurons, listed): (Neurons<'_>, Option<&[u32]>),
        seen: Seen<'_>,
        counts: &mut FfnCounts,
    ) -> usize {
        let rows = self.rows.clone();
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
                estimate.pick_groups(best, groups, (input, margin), self.ids)
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
                self.list();
                return rows.len();
            }
        };
        counts.predictor_ns = nanoseconds(began);
        len
    }

    /// Lists all neurons.
    fn list(&mut self) {
        let rows = self.rows.clone();
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

#[cfg(test)]
mod tests;
