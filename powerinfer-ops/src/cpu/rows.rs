//! Loops over the rows that one token needs, cut into tasks for the current thread pool. Safe code.
//! Many tokens have loops of their own in [`panel`].
//!
//! Where the cuts lie never changes a bit. A dot product is one sum in the order that the kernel
//! table fixes. A weighted sum of rows adds up each chunk of `CHUNK_ROWS` rows on its own and then
//! the chunks in order; a row that is left out would have added zero.
//!
//! # What was measured
//!
//! One thread of an AMD EPYC (Zen 5), matrices of 1 GiB in huge pages, a stream of plain loads at
//! 40 GB/s. Rows of f16 one after the other, two accumulators each, the row 8 KiB further on
//! asked for meanwhile: 39 GB/s. Products of whole numbers, row by row: 37 (Q8_0) and 38 (Q4_0); in
//! f32, four rows at once, Q4_0 reached 20. Weighted sums: 33 (Q8_0) and 27 (Q4_0, bound by
//! unpacking).
//!
//! A tenth of the rows of 4096 values, scattered, is taken four rows at once: products f32 37, f16 29, Q8_0
//! 24, Q4_0 23 GB/s, weighted sums 35, 27, 21 and 17. One by one f16 gives 23: it is the lines that one
//! core can wait for, and the more is computed between loads the fewer they are. Loads alone get 31 to
//! 35, a stream 40, because the hardware runs ahead of it. Rows of a group are asked for 2 KiB ahead of
//! their use, in their own row and then in the next group's. A whole row of f16 ahead does not fit into
//! L1 beside the token (24), half a KiB is too late (26). Rows of less than 4 KiB are asked for whole.
//! The last rows of a phase ask for the first of the next one (gate, up, down, the next chunk): a tenth
//! of the time of a sparse network.
//!
//! Tried and dropped:
//! - four rows at once in a stream, of which the hardware loses track: f16 30, Q8_0 28, Q4_0 27 GB/s;
//! - two or three scattered rows at once 25 to 28 for f16, six or eight 26 to 27;
//! - products of whole numbers with a fixed number of lines asked for a turn, as those of f32: no gain;
//! - the scales of four rows of Q4_0 converted and multiplied together, spread by permutations: 63 for 72
//!   out of the L1 cache; numbers by whole registers there 85, but 2 to 4 % less over scattered rows;
//! - lines of scattered rows asked for in descending, even-odd, strided or random order, so that the
//!   hardware does not run on behind their ends: the same or up to a third less;
//! - Q8_0 by whole registers and permutations, as Q4_0 alone is: 34 for 37 in a stream;
//! - asking into L2 four to sixteen rows ahead, alone or with L1 near the use: no more than 28 for f16;
//! - rows of Q4_0 asked for 16 KiB ahead: products 21 for 23, weighted sums 11 for 13;
//! - asking into L2 (T1) or past the caches (NTA) instead of L1: the same or a little less;
//! - asking for every second or fourth line, or for the first two of a row, and leaving the rest to
//!   the hardware: half;
//! - asking for the first lines of eight rows at once, to translate their addresses side by side:
//!   no gain scattered, a loss in streams;
//! - 4 to 256 neighbouring lines of each row at a time: no gain;
//! - Q4_0 in weighted sums (out of the L1 cache, four rows): through signed bytes 14 for 18; block by
//!   block with a table of sixteen scaled values each 22, with both halves of a block before any store
//!   26; four blocks in one register, bytes put in order first, 27. What is done now, numbers by shifts
//!   and sums in an order of their own until the end of a chunk, gives 33, because rounding activations
//!   to 13 bits lets one multiplication serve four blocks; with a multiplication for each value it was no
//!   better than block by block;
//! - numbers of Q4_0 two at a time, out of a table of sixteen-bit words: four shifts instead of eight, one
//!   look-up for two, and no gain out of the L1 cache (34 for 33) or scattered;
//! - numbers and scales of a row apart, so that registers are whole lines (a sketch, not these operators):
//!   out of the L1 cache products of Q4_0 121 for 66 and Q8_0 266 for 78, scattered 30.6 for 28.7 and
//!   30 for 29, sums of Q8_0 31 for 33. That sketch without chunks reached 28 to 33 GB/s with today's
//!   layout: what was missing were the changes from one matrix to the next, see `ffn::one_token`;
//! - chunks of 512 rows for 256: 1 to 3 % on one thread, half as many pieces for many threads;
//! - cutting the columns of a weighted sum between threads, which needs no sums of chunks: each
//!   thread sees half rows, two thirds of the speed.

use rayon::prelude::*;

use super::product::{Inputs, ProductInput, for_products};
use super::{GROUP, Grouping, PANEL, ProductBodies, RowKernels, RowPrimitives, Rows, panel};
use crate::bytes::LINE_BYTES;
use crate::format::WeightFormat;
use crate::matrix::NeuronMatrix;

/// Weights worth a task of their own: handing one to another thread costs a few microseconds,
/// reading this much takes about as long.
const TASK_BYTES: usize = 64 << 10;
/// Tasks a thread: enough to even out a thread that is held up.
const TASKS_PER_THREAD: usize = 4;
/// How far ahead rows are asked for: two small pages, so far that the hardware's own stream
/// detection does not interfere.
pub(super) const AHEAD_BYTES: usize = 8 << 10;
/// Rows that are longer are taken in groups also where they follow each other, in formats whose loops
/// are short: with 32 KiB of a token and of the row in an L1 cache of 48, rows of 8192 values one by one
/// took f16 down from 40 to 24 GB/s and f32 to 31, and groups bf16 up to 33, f16 to 27 and f32 to 40.
const LONG_BYTES: usize = 12 << 10;
/// Rows whose weighted sum is taken on its own before it is added to the others: the least that one
/// task does. It belongs to the order of summation, so it is the same for every number of threads and
/// tokens.
pub(crate) const CHUNK_ROWS: usize = 256;

/// Into how many tasks to cut work that reads `bytes` of weights.
pub(crate) fn n_tasks(bytes: usize) -> usize {
    let threads = rayon::current_num_threads();
    if threads == 1 { 1 } else { (bytes / TASK_BYTES).clamp(1, threads * TASKS_PER_THREAD) }
}

/// The length of each of `n_tasks` pieces of `len`.
fn piece(len: usize, n_tasks: usize) -> usize {
    len.div_ceil(n_tasks).max(1)
}

/// `out[t, i] = w[i] · x[t]` for all rows: `out` is `[n_tokens, n_neurons]`.
pub(crate) fn matvec(kernels: RowKernels, w: &NeuronMatrix, x: Inputs<'_>, out: &mut [f32]) {
    let n_rows = w.n_neurons();
    if out.is_empty() {
        return;
    }
    assert_eq!((x.d_model(), out.len()), (w.d_model(), x.n_tokens() * n_rows), "shapes agree");
    let row_ops = kernels.primitives(w.format());
    if x.n_tokens() == 1 {
        let rows_per_task = piece(n_rows, n_tasks(w.size_bytes()));
        for_each_chunk(out, rows_per_task, |task, out| {
            let first = task * rows_per_task;
            dot_rows(row_ops, |i| w.row((first + i).min(n_rows - 1)), x, out);
        });
    } else {
        panel::matmul(kernels, w, x, out);
    }
}

/// `out[i] = w[i] · x` for one token and each of several matrices, with one call for threads.
pub(crate) fn matvecs(
    kernels: RowKernels,
    products: Vec<(&NeuronMatrix, &mut [f32])>,
    x: Inputs<'_>,
) {
    let bytes: usize = products.iter().map(|(w, _)| w.size_bytes()).sum();
    let bytes_per_task = bytes.div_ceil(n_tasks(bytes));
    let mut tasks = Vec::new();
    for (w, out) in products {
        assert_eq!((x.d_model(), out.len()), (w.d_model(), w.n_neurons()), "shapes agree");
        let rows_per_task = (bytes_per_task / w.row_bytes().max(1)).max(1);
        for (task, out) in out.chunks_mut(rows_per_task).enumerate() {
            tasks.push((w, task * rows_per_task, out));
        }
    }
    let run = |(w, first, out): (&NeuronMatrix, usize, &mut [f32])| {
        let row = |i: usize| w.row((first + i).min(w.n_neurons() - 1));
        dot_rows(kernels.primitives(w.format()), row, x, out);
    };
    if rayon::current_num_threads() == 1 {
        tasks.into_iter().for_each(run);
    } else {
        tasks.into_par_iter().for_each(run);
    }
}

/// `out[k] = w[ids[k]] · x` for one token.
pub(crate) fn matvec_picked(
    kernels: RowKernels,
    w: &NeuronMatrix,
    ids: &[u32],
    x: Inputs<'_>,
    out: &mut [f32],
) {
    assert_eq!((x.d_model(), out.len()), (w.d_model(), ids.len()), "shapes agree");
    let row_ops = kernels.primitives(w.format());
    let rows_per_task = piece(ids.len(), n_tasks(ids.len() * w.row_bytes()));
    for_each_chunk(out, rows_per_task, |task, out| {
        let ids = &ids[task * rows_per_task..];
        dot_rows(row_ops, |i| w.row(ids[i.min(ids.len() - 1)] as usize), x, out);
    });
}

/// `y += Σ_k scales[k] · w[ids[k]]` in order of `k` for one token; `ids` ascend.
pub(crate) fn axpy_picked(
    kernels: RowKernels,
    w: &NeuronMatrix,
    (ids, scales): (&[u32], &[f32]),
    y: &mut [f32],
) {
    assert_eq!((scales.len(), y.len()), (ids.len(), w.d_model()), "shapes agree");
    let start_of = |row: usize| ids.partition_point(|&id| (id as usize) < row);
    axpy_rows(kernels, w, &|k| ids[k] as usize, scales, &start_of, y);
}

/// Dot products of the rows `row(0)`, `row(1)`, … with one token. Rows behind the last of them are asked
/// for: what comes next, or any rows.
pub(crate) fn dot_rows<'a>(
    row_ops: &RowPrimitives,
    row: impl Fn(usize) -> &'a [u8],
    x: Inputs<'_>,
    out: &mut [f32],
) {
    for_products!(row_ops, bodies => dot_rows_with(bodies, row, ProductInput::of(&x), out));
}

/// [`dot_rows`] in one form of values.
fn dot_rows_with<'a, X: ProductInput>(
    bodies: &ProductBodies<X, X::Unpacked>,
    row: impl Fn(usize) -> &'a [u8],
    x: &[X],
    out: &mut [f32],
) {
    if out.is_empty() {
        return;
    }
    let alone = rows_ahead(1, row(0).len());
    let grouped = rows_ahead(GROUP, row(0).len());
    let group_at = |at: usize| -> Rows<'a> { std::array::from_fn(|r| row(at + r)) };
    let in_groups = bodies.grouping != Grouping::Never;
    let (groups, rest) = out.split_at_mut(if in_groups { out.len() / GROUP * GROUP } else { 0 });
    let n_grouped = groups.len();
    for (group, out) in groups.as_chunks_mut::<GROUP>().0.iter_mut().enumerate() {
        let at = group * GROUP;
        let rows = group_at(at);
        if takes_group(bodies.grouping, &rows) {
            *out = (bodies.dot_group)(rows, group_at(at + grouped), x);
        } else {
            for (r, out) in out.iter_mut().enumerate() {
                *out = (bodies.dot)(rows[r], row(at + r + alone), x);
            }
        }
    }
    let few = rest.len();
    let rows: Rows<'_> = std::array::from_fn(|r| row(n_grouped + r.min(few.saturating_sub(1))));
    if n_grouped > 0 && few > 1 && takes_group(bodies.grouping, &rows) {
        // some of them twice, which costs less than to wait for each
        let products = (bodies.dot_group)(rows, group_at(n_grouped + few), x);
        rest.copy_from_slice(&products[..few]);
    } else {
        for (k, out) in (n_grouped..).zip(rest) {
            *out = (bodies.dot)(row(k), row(k + alone), x);
        }
    }
}

/// Whether to take the rows of a group at once.
fn takes_group(grouping: Grouping, rows: &Rows<'_>) -> bool {
    match grouping {
        Grouping::Never => false,
        Grouping::Scattered => !is_stream(rows),
        Grouping::ScatteredOrLong => rows[0].len() > LONG_BYTES || !is_stream(rows),
        Grouping::Always => true,
    }
}

/// Whether the rows of a group lie one after the other.
fn is_stream(rows: &Rows<'_>) -> bool {
    let starts = rows.map(|row| row.as_ptr().addr());
    // rows are padded to lines, and those of a file may lie in any order
    starts[GROUP - 1].wrapping_sub(starts[0]) < GROUP * (rows[0].len() + LINE_BYTES)
}

/// [`axpy_picked`] over any ascending list of rows: entry `k` is row `row(k)`, and the entries of
/// the rows from `r` on begin at `start_of(r)`.
fn axpy_rows(
    kernels: RowKernels,
    w: &NeuronMatrix,
    row: &(impl Fn(usize) -> usize + Sync),
    scales: &[f32],
    start_of: &(impl Fn(usize) -> usize + Sync),
    y: &mut [f32],
) {
    let sum_chunk = |chunk: usize, sum: &mut [f32]| {
        let end = start_of((chunk + 1) * CHUNK_ROWS).min(scales.len());
        let entries = start_of(chunk * CHUNK_ROWS)..end;
        let (first, last) = (entries.start, scales.len().saturating_sub(1));
        let row = |k: usize| w.row(row((first + k).min(last)));
        weighted_sum((kernels, w.format()), row, &scales[entries], sum);
    };
    let n_chunks = w.n_neurons().div_ceil(CHUNK_ROWS);
    let d_model = y.len();
    if n_tasks(scales.len() * w.row_bytes()) == 1 {
        let mut sum = vec![0.0; d_model];
        for chunk in 0..n_chunks {
            sum_chunk(chunk, &mut sum);
            add_sums((kernels, w.format()), &sum, y);
        }
    } else {
        let mut sums = vec![0.0; n_chunks * d_model];
        sums.par_chunks_exact_mut(d_model)
            .enumerate()
            .for_each(|(chunk, sum)| sum_chunk(chunk, sum));
        add_sums((kernels, w.format()), &sums, y);
    }
}

/// `y += sums[0]`, `y += sums[1]`, … of the sums that [`weighted_sum`] made of rows of `format`:
/// `[n_chunks, d_model]`.
pub(crate) fn add_sums((kernels, format): (RowKernels, WeightFormat), sums: &[f32], y: &mut [f32]) {
    let settle = kernels.primitives(format).settle;
    let d_model = y.len();
    let columns = piece(d_model, n_tasks(size_of_val(sums))).next_multiple_of(PANEL);
    for_each_chunk(y, columns, |task, y| {
        for sum in sums.chunks_exact(d_model) {
            settle(&sum[task * columns..][..y.len()], y);
        }
    });
}

/// `sum = Σ_k scales[k] · row(k)` in order of `k`, in an order of values that [`add_sums`] undoes, with
/// rows of `format`, whose scales are rounded
/// by [`round_scale`](WeightFormat::round_scale). Rows behind the last of them are asked for, as by
/// [`dot_rows`].
pub(crate) fn weighted_sum<'a>(
    (kernels, format): (RowKernels, WeightFormat),
    row: impl Fn(usize) -> &'a [u8],
    scales: &[f32],
    sum: &mut [f32],
) {
    sum.fill(0.0);
    if scales.is_empty() {
        return;
    }
    let row_ops = kernels.primitives(format);
    let alone = rows_ahead(1, row(0).len());
    let grouped = rows_ahead(GROUP, row(0).len());
    let group_at = |at: usize| -> Rows<'a> { std::array::from_fn(|r| row(at + r)) };
    let in_groups = row_ops.grouping != Grouping::Never;
    let (groups, rest) = scales.split_at(if in_groups { scales.len() / GROUP * GROUP } else { 0 });
    for (group, scales) in groups.as_chunks::<GROUP>().0.iter().enumerate() {
        let at = group * GROUP;
        let rows = group_at(at);
        let scales = scales.map(|scale| format.round_scale(scale));
        if takes_group(row_ops.grouping, &rows) {
            (row_ops.axpy_group)(scales, rows, group_at(at + grouped), sum);
        } else {
            for (r, scale) in scales.into_iter().enumerate() {
                (row_ops.axpy)(scale, rows[r], row(at + r + alone), sum);
            }
        }
    }
    for (k, &scale) in (groups.len()..).zip(rest) {
        (row_ops.axpy)(format.round_scale(scale), row(k), row(k + alone), sum);
    }
}

/// How many rows ahead to ask for, where `taken` are taken at once.
fn rows_ahead(taken: usize, row_bytes: usize) -> usize {
    (AHEAD_BYTES / row_bytes.max(1)).max(taken)
}

/// `y += sum`
pub(crate) fn add(y: &mut [f32], sum: &[f32]) {
    y.iter_mut().zip(sum).for_each(|(y, sum)| *y += sum);
}

/// Runs `work` over chunks of `out`, on this thread if there is only one.
fn for_each_chunk(out: &mut [f32], len: usize, work: impl Fn(usize, &mut [f32]) + Sync) {
    if out.len() <= len {
        if !out.is_empty() {
            work(0, out);
        }
    } else {
        out.par_chunks_mut(len).enumerate().for_each(|(index, chunk)| work(index, chunk));
    }
}

#[cfg(test)]
mod tests;
