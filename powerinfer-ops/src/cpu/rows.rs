//! Loops over tokens and rows, cut into tasks for the current thread pool. Safe code.
//!
//! Where the cuts lie never changes a bit. A dot product is one sum in the order that the kernel
//! table fixes. A weighted sum of rows adds up each chunk of `CHUNK_ROWS` rows on its own and then
//! the chunks in order; a row that is left out would have added zero.
//!
//! # What was measured
//!
//! One thread of an AMD EPYC (Zen 5), matrices of 1 GiB in huge pages, a stream of plain loads at
//! 40 GB/s. Rows of f16 one after the other, two accumulators each, the row 8 KiB further on
//! asked for meanwhile: 39 GB/s. Rows of quantised formats four at once: 34 to 38 (Q8_0) and 20
//! (Q4_0, bound by unpacking). A tenth of the rows, scattered: 24 GB/s for rows of 1, 2, 4 and
//! 8 KiB alike, so it is neither pages nor addresses but the number of lines that one core can
//! wait for; a stream is faster because the hardware runs ahead of it.
//!
//! Tried and dropped:
//! - four rows of f16 at once, one accumulator each: 30 GB/s, the hardware loses track of the
//!   stream; without asking ahead 22;
//! - asking into L2 (T1) or past the caches (NTA) instead of L1: the same or a little less;
//! - asking for every second or fourth line, or for the first two of a row, and leaving the rest to
//!   the hardware: half;
//! - asking for the first lines of eight rows at once, to translate their addresses side by side:
//!   no gain scattered, a loss in streams;
//! - 4 to 256 neighbouring lines of each row at a time: no gain;
//! - cutting the columns of a weighted sum between threads, which needs no sums of chunks: each
//!   thread sees half rows, two thirds of the speed.

use rayon::prelude::*;

use super::{GROUP, PANEL, RowKernels, RowPrimitives, TILE_ROWS, TILE_TOKENS};
use crate::matrix::NeuronMatrix;

/// Weights worth a task of their own: handing one to another thread costs a few microseconds,
/// reading this much takes about as long.
const TASK_BYTES: usize = 64 << 10;
/// Tasks a thread: enough to even out a thread that is held up.
const TASKS_PER_THREAD: usize = 4;
/// Bytes of rows that stay in the L2 cache while all tokens pass over them.
const ROW_BLOCK_BYTES: usize = 128 << 10;
/// How far ahead rows are asked for: two small pages, so far that the hardware's own stream
/// detection does not interfere.
const AHEAD_BYTES: usize = 8 << 10;
/// Rows whose weighted sum is taken on its own before it is added to the others: what one task
/// does, and what is decoded at once for many tokens (64 KiB of f32 a panel). It belongs to the
/// order of summation, so it is the same for every number of threads and tokens.
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

/// `out[t, i] = w[i] · x[t]` for all rows: `x` is `[n_tokens, d_model]`, `out`
/// `[n_tokens, n_neurons]`.
pub(crate) fn matvec(kernels: RowKernels, w: &NeuronMatrix, x: &[f32], out: &mut [f32]) {
    let (n_rows, d_model) = (w.n_neurons(), w.d_model());
    if n_rows == 0 || out.is_empty() {
        return;
    }
    let n_tokens = out.len() / n_rows;
    assert_eq!((x.len(), out.len()), (n_tokens * d_model, n_tokens * n_rows), "shapes agree");
    let row_ops = kernels.primitives(w.format());
    if n_tokens == 1 {
        let rows_per_task = piece(n_rows, n_tasks(w.size_bytes()));
        for_each_chunk(out, rows_per_task, |task, out| {
            let first = task * rows_per_task;
            dot_rows(row_ops, |i| w.row(first + i), x, out);
        });
    } else {
        matmul(row_ops, w, x, out);
    }
}

/// `out[k] = w[ids[k]] · x` for one token.
pub(crate) fn matvec_picked(
    kernels: RowKernels,
    w: &NeuronMatrix,
    ids: &[u32],
    x: &[f32],
    out: &mut [f32],
) {
    assert_eq!((x.len(), out.len()), (w.d_model(), ids.len()), "shapes agree");
    let row_ops = kernels.primitives(w.format());
    let rows_per_task = piece(ids.len(), n_tasks(ids.len() * w.row_bytes()));
    for_each_chunk(out, rows_per_task, |task, out| {
        let ids = &ids[task * rows_per_task..];
        dot_rows(row_ops, |i| w.row(ids[i] as usize), x, out);
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

/// `y[t] += Σ_i scales[t, i] · w[i]` in order of `i`, over all rows: `scales` is
/// `[n_tokens, n_neurons]`, `y` `[n_tokens, d_model]`.
pub(crate) fn axpy(kernels: RowKernels, w: &NeuronMatrix, scales: &[f32], y: &mut [f32]) {
    let (n_rows, d_model) = (w.n_neurons(), w.d_model());
    if n_rows == 0 || y.is_empty() {
        return;
    }
    let n_tokens = y.len() / d_model;
    assert_eq!((scales.len(), y.len()), (n_tokens * n_rows, n_tokens * d_model), "shapes agree");
    if n_tokens == 1 {
        axpy_rows(kernels, w, &|row| row, scales, &|row| row, y);
        return;
    }
    // Many tokens: a panel of columns is decoded into the cache and all tokens pass over it.
    let row_ops = kernels.primitives(w.format());
    let panels = split_columns(y, d_model, PANEL);
    panels.into_par_iter().enumerate().for_each_init(
        Vec::new,
        |panel: &mut Vec<f32>, (at, mut ys)| {
            let n_columns = ys[0].len();
            for first in (0..n_rows).step_by(CHUNK_ROWS) {
                let rows = first..n_rows.min(first + CHUNK_ROWS);
                panel.clear();
                panel.resize(rows.len() * PANEL, 0.0);
                for (row, panel) in rows.clone().zip(panel.chunks_exact_mut(PANEL)) {
                    (row_ops.decode)(w.row(row), at * PANEL, &mut panel[..n_columns]);
                }
                for (group, ys) in ys.chunks_mut(TILE_TOKENS).enumerate() {
                    // a short last group repeats its last token, whose copy is thrown away
                    let token = |t: usize| group * TILE_TOKENS + t.min(ys.len() - 1);
                    let scales: [&[f32]; TILE_TOKENS] =
                        std::array::from_fn(|t| &scales[token(t) * n_rows..][rows.clone()]);
                    let mut tile = [[0.0; PANEL]; TILE_TOKENS];
                    (kernels.table().axpy_tile)(scales, panel, &mut tile);
                    for (tile, y) in tile.iter().zip(ys.iter_mut()) {
                        add(y, &tile[..n_columns]);
                    }
                }
            }
        },
    );
}

/// Dot products of the rows `row(0)`, `row(1)`, … with `x`.
pub(crate) fn dot_rows<'a>(
    row_ops: &RowPrimitives,
    row: impl Fn(usize) -> &'a [u8],
    x: &[f32],
    out: &mut [f32],
) {
    let Some(last) = out.len().checked_sub(1) else { return };
    let distance = rows_ahead(row_ops, row(0).len());
    let ahead = |k: usize| row((k + distance).min(last));
    let n_grouped = if row_ops.grouped { out.len() / GROUP * GROUP } else { 0 };
    let (grouped, rest) = out.split_at_mut(n_grouped);
    for (group, out) in grouped.as_chunks_mut::<GROUP>().0.iter_mut().enumerate() {
        let at = group * GROUP;
        let rows = std::array::from_fn(|r| row(at + r));
        *out = (row_ops.dot_group)(rows, std::array::from_fn(|r| ahead(at + r)), x);
    }
    for (k, out) in (n_grouped..).zip(rest) {
        *out = (row_ops.dot)(row(k), ahead(k), x);
    }
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
    let row_ops = kernels.primitives(w.format());
    let sum_chunk = |chunk: usize, sum: &mut [f32]| {
        let end = start_of((chunk + 1) * CHUNK_ROWS).min(scales.len());
        let entries = start_of(chunk * CHUNK_ROWS)..end;
        sum.fill(0.0);
        let first = entries.start;
        axpy_entries(row_ops, |k| w.row(row(first + k)), &scales[entries], sum);
    };
    let n_chunks = w.n_neurons().div_ceil(CHUNK_ROWS);
    let d_model = y.len();
    if n_tasks(scales.len() * w.row_bytes()) == 1 {
        let mut sum = vec![0.0; d_model];
        for chunk in 0..n_chunks {
            sum_chunk(chunk, &mut sum);
            add(y, &sum);
        }
    } else {
        let mut sums = vec![0.0; n_chunks * d_model];
        sums.par_chunks_exact_mut(d_model)
            .enumerate()
            .for_each(|(chunk, sum)| sum_chunk(chunk, sum));
        sums.chunks_exact(d_model).for_each(|sum| add(y, sum));
    }
}

/// `sum += Σ_k scales[k] · row(k)` in order of `k`.
pub(crate) fn axpy_entries<'a>(
    row_ops: &RowPrimitives,
    row: impl Fn(usize) -> &'a [u8],
    scales: &[f32],
    sum: &mut [f32],
) {
    let Some(last) = scales.len().checked_sub(1) else { return };
    let distance = rows_ahead(row_ops, row(0).len());
    let ahead = |k: usize| row((k + distance).min(last));
    let n_grouped = if row_ops.grouped { scales.len() / GROUP * GROUP } else { 0 };
    let (grouped, rest) = scales.split_at(n_grouped);
    for (group, scales) in grouped.as_chunks::<GROUP>().0.iter().enumerate() {
        let at = group * GROUP;
        let rows = std::array::from_fn(|r| row(at + r));
        (row_ops.axpy_group)(*scales, rows, std::array::from_fn(|r| ahead(at + r)), sum);
    }
    for (k, &scale) in (n_grouped..).zip(rest) {
        (row_ops.axpy)(scale, row(k), ahead(k), sum);
    }
}

/// How many rows ahead to ask for.
fn rows_ahead(row_ops: &RowPrimitives, row_bytes: usize) -> usize {
    (AHEAD_BYTES / row_bytes.max(1)).max(if row_ops.grouped { GROUP } else { 1 })
}

/// `y += sum`
pub(crate) fn add(y: &mut [f32], sum: &[f32]) {
    y.iter_mut().zip(sum).for_each(|(y, sum)| *y += sum);
}

/// [`matvec`] for many tokens: a block of rows stays in the cache while all tokens pass over it.
fn matmul(row_ops: &RowPrimitives, w: &NeuronMatrix, x: &[f32], out: &mut [f32]) {
    let d_model = w.d_model();
    let rows_per_block =
        (ROW_BLOCK_BYTES / w.row_bytes().max(1)).clamp(4, 64) / TILE_ROWS * TILE_ROWS;
    let blocks = split_columns(out, w.n_neurons(), rows_per_block);
    let token = |t: usize| &x[t * d_model..][..d_model];
    blocks.into_par_iter().enumerate().for_each(|(block, mut outs)| {
        let first = block * rows_per_block;
        let n_rows = outs[0].len();
        let (n_tiled, n_tiled_rows) =
            (outs.len() / TILE_TOKENS * TILE_TOKENS, n_rows / TILE_ROWS * TILE_ROWS);
        for (group, outs) in outs[..n_tiled].chunks_exact_mut(TILE_TOKENS).enumerate() {
            let xs: [&[f32]; TILE_TOKENS] = std::array::from_fn(|t| token(group * TILE_TOKENS + t));
            for at in (0..n_tiled_rows).step_by(TILE_ROWS) {
                let rows = std::array::from_fn(|r| w.row(first + at + r));
                let tile = (row_ops.dot_tile)(rows, xs);
                for (out, tile) in outs.iter_mut().zip(tile) {
                    out[at..at + TILE_ROWS].copy_from_slice(&tile);
                }
            }
            for (out, x) in outs.iter_mut().zip(xs) {
                dot_rows(row_ops, |i| w.row(first + n_tiled_rows + i), x, &mut out[n_tiled_rows..]);
            }
        }
        for (t, out) in outs[n_tiled..].iter_mut().enumerate() {
            dot_rows(row_ops, |i| w.row(first + i), token(n_tiled + t), out);
        }
    });
}

/// Cuts `[n_tokens, n_columns]` into blocks of columns, each with one slice a token.
fn split_columns(
    values: &mut [f32],
    n_columns: usize,
    columns_per_block: usize,
) -> Vec<Vec<&mut [f32]>> {
    let n_tokens = values.len() / n_columns;
    let n_blocks = n_columns.div_ceil(columns_per_block);
    let mut blocks: Vec<_> = (0..n_blocks).map(|_| Vec::with_capacity(n_tokens)).collect();
    for row in values.chunks_exact_mut(n_columns) {
        for (block, piece) in blocks.iter_mut().zip(row.chunks_mut(columns_per_block)) {
            block.push(piece);
        }
    }
    blocks
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
mod tests {
    use super::*;
    use crate::format::WeightFormat;
    use crate::threads::ThreadPool;
    use std::num::NonZeroUsize;
    use testing::Seeded;
    use testing::tolerance::dot_bound;

    /// Lengths around every vector width, and odd ones.
    const LENGTHS: [usize; 19] =
        [1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 200, 256, 768];

    /// Those that rows of a format can have.
    fn lengths(format: WeightFormat) -> impl Iterator<Item = usize> {
        LENGTHS.into_iter().filter(move |d| d.is_multiple_of(format.block_len()))
    }

    /// Every format with every table that this CPU runs.
    fn cases() -> impl Iterator<Item = (WeightFormat, RowKernels)> {
        let tables = RowKernels::available();
        WeightFormat::ALL
            .into_iter()
            .flat_map(move |format| tables.clone().into_iter().map(move |table| (format, table)))
    }

    fn matrix(format: WeightFormat, n: usize, d: usize, seed: u64) -> NeuronMatrix {
        let values = Seeded::new(seed).normal(n * d);
        NeuronMatrix::from_f32(format, n, d, &values).unwrap()
    }

    /// `Σ w·x` in f64 and the bound of its f32 error.
    fn product(w: &NeuronMatrix, row: usize, x: &[f32]) -> (f64, f64) {
        let mut values = vec![0.0; w.d_model()];
        w.row_to_f32(row, &mut values);
        let sum = values.iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum();
        (sum, f64::from(dot_bound(&values, x)))
    }

    #[test]
    fn every_table_computes_the_product_of_every_row() {
        for (format, kernels) in cases() {
            for d in lengths(format) {
                for (n, n_tokens) in [(1, 1), (5, 1), (4, 4), (7, 6), (9, 3)] {
                    let w = matrix(format, n, d, d as u64);
                    let x = Seeded::new(1).normal(n_tokens * d);
                    let mut out = vec![f32::NAN; n_tokens * n];
                    matvec(kernels, &w, &x, &mut out);
                    for t in 0..n_tokens {
                        for row in 0..n {
                            let (expected, bound) = product(&w, row, &x[t * d..][..d]);
                            let found = f64::from(out[t * n + row]);
                            assert!(
                                (found - expected).abs() <= bound,
                                "{format} {kernels:?} d {d} row {row} token {t}: {found} {expected}"
                            );
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn every_table_adds_up_every_column() {
        for (format, kernels) in cases() {
            for d in lengths(format) {
                for (n, n_tokens) in [(1, 1), (6, 1), (13, 5), (600, 6)] {
                    let w = matrix(format, n, d, d as u64);
                    let scales = Seeded::new(2).normal(n_tokens * n);
                    let mut y = vec![0.0; n_tokens * d];
                    axpy(kernels, &w, &scales, &mut y);
                    let mut rows = vec![0.0; n * d];
                    for (row, values) in rows.chunks_exact_mut(d).enumerate() {
                        w.row_to_f32(row, values);
                    }
                    for t in 0..n_tokens {
                        let scales = &scales[t * n..][..n];
                        for c in 0..d {
                            let column: Vec<f32> = (0..n).map(|row| rows[row * d + c]).collect();
                            let terms = column.iter().zip(scales);
                            let expected: f64 =
                                terms.map(|(w, s)| f64::from(*w) * f64::from(*s)).sum();
                            let found = f64::from(y[t * d + c]);
                            assert!(
                                (found - expected).abs() <= f64::from(dot_bound(&column, scales)),
                                "{format} {kernels:?} d {d} column {c}: {found} {expected}"
                            );
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn a_product_has_the_same_bits_alone_picked_and_among_other_tokens() {
        for (format, kernels) in cases() {
            for d in lengths(format) {
                let (n, n_tokens) = (11, 7);
                let w = matrix(format, n, d, 3);
                let x = Seeded::new(4).normal(n_tokens * d);
                let mut together = vec![0.0; n_tokens * n];
                matvec(kernels, &w, &x, &mut together);
                for t in 0..n_tokens {
                    let x = &x[t * d..][..d];
                    let mut alone = vec![0.0; n];
                    matvec(kernels, &w, x, &mut alone);
                    assert_eq!(alone, together[t * n..][..n], "{format} {kernels:?} d {d}");
                    let ids = [0, 1, 2, 4, 7, 10];
                    let mut picked = [0.0; 6];
                    matvec_picked(kernels, &w, &ids, x, &mut picked);
                    assert_eq!(picked, ids.map(|id| alone[id as usize]), "{format} {kernels:?}");
                }
            }
        }
    }

    #[test]
    fn a_column_has_the_same_bits_whether_zeros_are_skipped_and_among_other_tokens() {
        for (format, kernels) in cases() {
            for d in lengths(format) {
                let (n, n_tokens) = (700, 5);
                let w = matrix(format, n, d, 5);
                let mut random = Seeded::new(6);
                let scales: Vec<f32> = (0..n_tokens * n)
                    .map(|_| if random.chance(0.8) { 0.0 } else { random.normal(1)[0] })
                    .collect();
                let mut together = vec![0.0; n_tokens * d];
                axpy(kernels, &w, &scales, &mut together);
                for t in 0..n_tokens {
                    let scales = &scales[t * n..][..n];
                    let mut alone = vec![0.0; d];
                    axpy(kernels, &w, scales, &mut alone);
                    let ids: Vec<u32> =
                        (0..n as u32).filter(|&id| scales[id as usize] != 0.0).collect();
                    let picked_scales: Vec<f32> =
                        ids.iter().map(|&id| scales[id as usize]).collect();
                    let mut picked = vec![0.0; d];
                    axpy_picked(kernels, &w, (&ids, &picked_scales), &mut picked);
                    assert_eq!(alone, together[t * d..][..d], "{format} {kernels:?} d {d}");
                    assert_eq!(alone, picked, "{format} {kernels:?} d {d}");
                }
            }
        }
    }

    #[test]
    fn threads_do_not_change_a_bit() {
        for format in WeightFormat::ALL {
            let (n, d) = (
                1000,
                if format.block_len() == 1 {
                    513
                } else {
                    544usize.next_multiple_of(format.block_len())
                },
            );
            let w = matrix(format, n, d, 7);
            for n_tokens in [1, 9] {
                let x = Seeded::new(8).normal(n_tokens * d);
                let run = |threads| {
                    ThreadPool::new(NonZeroUsize::new(threads)).unwrap().install(|| {
                        let mut h = vec![0.0; n_tokens * n];
                        matvec(RowKernels::best(), &w, &x, &mut h);
                        let mut y = vec![0.0; n_tokens * d];
                        axpy(RowKernels::best(), &w, &h, &mut y);
                        (h, y)
                    })
                };
                let one = run(1);
                for threads in 2..=4 {
                    assert!(one == run(threads), "{format} {n_tokens} tokens, {threads} threads");
                }
            }
        }
    }

    #[test]
    fn empty_lists_and_empty_matrices_do_nothing() {
        for (format, kernels) in cases() {
            let w = matrix(format, 3, 256, 9);
            matvec_picked(kernels, &w, &[], &[1.0; 256], &mut []);
            let mut y = [7.0; 256];
            axpy_picked(kernels, &w, (&[], &[]), &mut y);
            assert_eq!(y, [7.0; 256]);
            let none = matrix(format, 0, 256, 9);
            matvec(kernels, &none, &[], &mut []);
            axpy(kernels, &none, &[], &mut y);
            assert_eq!(y, [7.0; 256]);
        }
    }

    #[test]
    fn decoding_is_exact_in_every_table() {
        for (format, kernels) in cases() {
            for d in lengths(format) {
                let w = matrix(format, 1, d, 10);
                let (mut expected, mut found) = (vec![0.0; d], vec![0.0; d]);
                w.row_to_f32(0, &mut expected);
                (kernels.primitives(format).decode)(w.row(0), 0, &mut found);
                assert_eq!(expected, found, "{format} {kernels:?} d {d}");
                for (panel, found) in found.chunks_mut(PANEL).enumerate() {
                    found.fill(f32::NAN);
                    (kernels.primitives(format).decode)(w.row(0), panel * PANEL, found);
                }
                assert_eq!(expected, found, "{format} {kernels:?} d {d} by panels");
            }
        }
    }

    #[test]
    fn folding_reads_every_byte_in_every_table() {
        for n in [0, 8, 64, 504, 1024, 4104] {
            let bytes: Vec<u64> = (0..n / 8).map(|i| 0x9E37_79B9 * (i as u64 + 1)).collect();
            let expected = bytes.iter().fold(0, |a, b| a ^ b);
            for kernels in RowKernels::available() {
                let found = (kernels.table().fold)(bytemuck::cast_slice(&bytes));
                assert_eq!(found, expected, "{kernels:?} {n} bytes");
            }
        }
    }
}
