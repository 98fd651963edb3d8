//! Weighted sums of rows for many tokens, as in the down projection of a prompt. Safe code.
//!
//! Some columns of a chunk of [`CHUNK_ROWS`] rows are decoded into memory that stays in the L2 cache,
//! and all tokens pass over them: four at a time where most neurons fire, else one by one and
//! over the rows that fire for it. Either way the sums are those of [`rows`](super::rows).

use std::ops::Range;

use rayon::prelude::*;

use super::activations::{Activations, any, block_rows};
use super::panel::{ROWS_AHEAD, split_columns};
use super::rows::{CHUNK_ROWS, add};
use super::{PANEL, PANEL_ROWS, PanelTile, RowKernels, TILE_TOKENS};
use crate::bytes::AlignedScratch;
use crate::matrix::NeuronMatrix;

/// Rows to sum up, as a share of all, from which on taking four tokens at once is faster.
const SUMMED_SHARE: f64 = 0.4;
/// Rows of a panel, as a share of all, from which on all are decoded.
const DECODED_SHARE: f64 = 0.75;
/// Tasks a thread.
const TASKS_PER_THREAD: usize = 4;

/// `y[t] += Σ_i h[t, i] · w[i]` in order of `i`: `y` is `[n_tokens, d_model]`. The activations are rounded
/// by [`round_scale`](crate::format::WeightFormat::round_scale).
pub(crate) fn axpy(kernels: RowKernels, w: &NeuronMatrix, h: &mut Activations, y: &mut [f32]) {
    if y.is_empty() {
        return;
    }
    h.round_for(w.format());
    let h = &*h;
    let d_model = w.d_model();
    let panels = split_columns(y, d_model, PANEL);
    let n_tasks = rayon::current_num_threads() * TASKS_PER_THREAD;
    let cuts = n_tasks.div_ceil(panels.len());
    let tokens_per_task = h.n_tokens.div_ceil(cuts).next_multiple_of(TILE_TOKENS);
    let mut tasks = Vec::new();
    for (panel, mut ys) in panels.into_iter().enumerate() {
        let mut first = 0;
        while !ys.is_empty() {
            let rest = ys.split_off(tokens_per_task.min(ys.len()));
            tasks.push(SumTask { kernels, w, h, panel, first, ys });
            (first, ys) = (first + tokens_per_task, rest);
        }
    }
    tasks.into_par_iter().for_each_init(AlignedScratch::default, |scratch, task| task.run(scratch));
}

/// The weighted sums of some columns for some tokens.
struct SumTask<'a> {
    kernels: RowKernels,
    w: &'a NeuronMatrix,
    h: &'a Activations,
    panel: usize,
    /// The first token.
    first: usize,
    /// The columns of each token.
    ys: Vec<&'a mut [f32]>,
}

impl SumTask<'_> {
    fn run(mut self, scratch: &mut AlignedScratch) {
        let n_rows = self.w.n_neurons();
        let scratch = scratch.values(CHUNK_ROWS * PANEL);
        for first in (0..n_rows).step_by(CHUNK_ROWS) {
            let blocks = first / PANEL_ROWS..n_rows.min(first + CHUNK_ROWS).div_ceil(PANEL_ROWS);
            let mut whole = [false; CHUNK_ROWS / PANEL_ROWS];
            let panels = scratch.chunks_exact_mut(PANEL_ROWS * PANEL);
            for ((block, panel), whole) in blocks.clone().zip(panels).zip(&mut whole) {
                *whole = self.decode(block, panel);
            }
            for at in (0..self.ys.len()).step_by(TILE_TOKENS) {
                self.sum(at, blocks.clone(), (scratch, whole));
            }
        }
    }

    /// Decodes the columns of those rows of a block that some token needs; returns whether these
    /// are all rows of the panel.
    fn decode(&self, block: usize, panel: &mut [f32]) -> bool {
        let (w, n_columns) = (self.w, self.ys[0].len());
        let format = w.format();
        // a panel is whole blocks of every format, and so is a whole row
        let bytes_of = |column: usize| column / format.block_len() * format.block_bytes();
        let bytes = bytes_of(self.panel * PANEL)..bytes_of(self.panel * PANEL + n_columns);
        let decode = self.kernels.primitives(format).decode;
        let prefetch = self.kernels.table().prefetch;
        let mut needed = any(&self.h.block(block).1[self.first..][..self.ys.len()]);
        if f64::from(needed.count_ones()) > DECODED_SHARE * PANEL_ROWS as f64 {
            needed = u64::MAX;
        }
        let rows = block_rows(w.n_neurons(), block);
        let whole = rows.len() == PANEL_ROWS && needed == u64::MAX;
        for (r, row) in rows.enumerate() {
            if needed >> r & 1 == 1 {
                prefetch(&w.row((row + ROWS_AHEAD).min(w.n_neurons() - 1))[bytes.clone()]);
                decode(&w.row(row)[bytes.clone()], &mut panel[r * PANEL..][..n_columns]);
            }
        }
        whole
    }

    /// Adds the sums over a chunk of rows to a tile of tokens, the first of which is `at`.
    fn sum(
        &mut self,
        at: usize,
        blocks: Range<usize>,
        (panels, whole): (&[f32], [bool; CHUNK_ROWS / PANEL_ROWS]),
    ) {
        let n_columns = self.ys[0].len();
        let table = self.kernels.table();
        let ys = &mut self.ys[at..];
        let n = ys.len().min(TILE_TOKENS);
        let mut sums = PanelTile::default();
        let panels = panels.chunks_exact(PANEL_ROWS * PANEL).zip(whole);
        for (block, (panel, whole)) in blocks.zip(panels) {
            let (values, masks) = self.h.block(block);
            let first = self.first + at;
            let (values, masks) = (&values[first..][..n], &masks[first..][..n]);
            let n_summed: u32 = masks.iter().map(|mask| mask.count_ones()).sum();
            let many = f64::from(n_summed) > SUMMED_SHARE * (n * PANEL_ROWS) as f64;
            if many && whole && n == TILE_TOKENS {
                let values = std::array::from_fn(|t| &values[t]);
                (table.axpy_tile)(values, panel, &mut sums);
            } else {
                for ((values, &mask), sum) in values.iter().zip(masks).zip(&mut sums.0) {
                    (table.axpy_picked)(values, mask, panel, sum);
                }
            }
        }
        for (y, sum) in ys.iter_mut().zip(&sums.0) {
            add(y, &sum[..n_columns]);
        }
    }
}
