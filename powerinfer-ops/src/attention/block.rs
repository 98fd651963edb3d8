//! The queries of a block, all of one key-value head, over the positions of a chunk.
//!
//! The plain form, for one query: all scores, their softmax, the weighted sum of the values. Page by
//! page it is the same sum: with `m` the largest score so far, [`Softmax`] and the sums hold `Σ
//! e^(score − m)` and `Σ e^(score − m) · value`, and when a page raises `m` both are scaled by
//! `e^(old m − new m)`. A chunk of pages is computed so on its own and then added to those before
//! it. Where pages and chunks begin and end depends on the position alone, so a query gets the
//! same bits whichever others are computed beside it, and by however many threads.
//!
//! Scores are computed for a whole group of columns, also for positions that a query does not see;
//! values are added for those only that it sees, in their order.

use std::ops::Range;

use super::softmax::Softmax;
use super::{KvDtype, KvPages, PAGE_LEN, Pass, alibi_bias};
use crate::cpu::attention_rows::{AddRows, COLUMNS, Panel, SPAN, TILE_QUERIES, Weights};

/// Positions that are computed on their own before they are added to those before: what one task
/// does at least when a query is cut into several. It belongs to the order of summation.
pub(super) const CHUNK_LEN: usize = 512;

const _: () = assert!(CHUNK_LEN.is_multiple_of(PAGE_LEN));

/// Some queries of one key-value head: query `index` is of token `index / group`, head
/// `kv_head · group + index % group`.
pub(super) struct Block<'a, P> {
    pass: &'a Pass<'a, P>,
    kv_head: usize,
    indices: Range<usize>,
    /// Elements of a query in the sums, and from one value of a page to the next.
    stride: usize,
    /// `[⌈d_head / SPAN⌉, indices]`
    queries: Vec<Weights>,
}

/// What some positions come to for some queries.
pub(super) struct Partial<'a> {
    /// `[n_queries, stride]`
    pub(super) sums: &'a mut [f32],
    /// `[n_queries]`
    pub(super) softmax: &'a mut [Softmax],
}

impl<'a, P: KvPages> Block<'a, P> {
    pub(super) fn new(pass: &'a Pass<'a, P>, kv_head: usize, indices: Range<usize>) -> Self {
        let (d_head, n) = (pass.shape.d_head, indices.len());
        let stride = pass.pages.page(0).layout().padded();
        let queries = vec![[0.0; SPAN]; d_head.div_ceil(SPAN) * n];
        let mut block = Self { pass, kv_head, indices, stride, queries };
        for (at, index) in block.indices.clone().enumerate() {
            let row = index / block.group() * pass.shape.n_heads + block.head(index);
            let query = &pass.queries[row * d_head..][..d_head];
            for (part, values) in query.chunks(SPAN).enumerate() {
                block.queries[part * n + at][..values.len()].copy_from_slice(values);
            }
        }
        block
    }

    fn group(&self) -> usize {
        self.pass.shape.n_heads / self.pass.shape.n_kv_heads
    }

    fn head(&self, index: usize) -> usize {
        self.kv_head * self.group() + index % self.group()
    }

    /// The positions that a query sees.
    fn sight(&self, index: usize) -> Range<usize> {
        self.pass.shape.sight(index / self.group())
    }

    /// The positions that some query of the block sees.
    fn positions(&self) -> Range<usize> {
        // no query sees further back, or further on, than the ones before or after it
        self.sight(self.indices.start).start..self.sight(self.indices.end - 1).end
    }

    /// All positions that the block sees.
    pub(super) fn chunks(&self, total: &mut Partial<'_>) {
        let seen = self.positions();
        let mut chunks = seen.start / CHUNK_LEN..seen.end.div_ceil(CHUNK_LEN);
        if let Some(first) = chunks.next() {
            self.chunk(first, total);
        }
        if chunks.is_empty() {
            return;
        }
        let mut sums = vec![0.0; total.sums.len()];
        let mut softmax = vec![Softmax::EMPTY; total.softmax.len()];
        for chunk in chunks {
            self.chunk(chunk, &mut Partial { sums: &mut sums, softmax: &mut softmax });
            let totals = total.softmax.iter_mut().zip(total.sums.chunks_exact_mut(self.stride));
            let parts = softmax.iter().zip(sums.chunks_exact(self.stride));
            for ((total, total_sums), (part, sums)) in totals.zip(parts) {
                total.merge(total_sums, *part, sums);
            }
        }
    }

    /// All positions of a chunk, from nothing.
    pub(super) fn chunk(&self, chunk: usize, partial: &mut Partial<'_>) {
        partial.softmax.fill(Softmax::EMPTY);
        partial.sums.fill(0.0);
        let of_chunk = chunk * CHUNK_LEN..(chunk + 1) * CHUNK_LEN;
        let seen = intersection(&self.positions(), &of_chunk);
        let pages = seen.start / PAGE_LEN..seen.end.div_ceil(PAGE_LEN);
        for page in pages.clone() {
            let next = Some(page + 1).filter(|next| pages.contains(next));
            let mut page = Page::new(self, page, next);
            let n = self.indices.len();
            for first in (0..n).step_by(TILE_QUERIES) {
                let tile = first..n.min(first + TILE_QUERIES);
                let sums = &mut partial.sums[tile.start * self.stride..tile.end * self.stride];
                let softmax = &mut partial.softmax[tile.clone()];
                self.page(&page, tile, &mut Partial { sums, softmax });
                // the first tile has brought them
                (page.values_ahead, page.keys_ahead) = (&[], &[]);
            }
        }
    }

    /// Adds the positions of a page for a tile of queries, counted within the block.
    fn page(&self, page: &Page<'_>, tile: Range<usize>, partial: &mut Partial<'_>) {
        let of_page = page.start..page.start + PAGE_LEN;
        let mut seen: [Range<usize>; TILE_QUERIES] = [const { 0..0 }; TILE_QUERIES];
        for (seen, at) in seen.iter_mut().zip(tile.clone()) {
            let sight = intersection(&self.sight(self.indices.start + at), &of_page);
            *seen = sight.start - page.start..sight.end - page.start;
        }
        let seen = &mut seen[..tile.len()];
        // as of a block, the first query sees the furthest back and the last the furthest on
        let columns = seen[0].start..seen[seen.len() - 1].end;
        if columns.start >= columns.end {
            return;
        }
        let mut scores = [[0.0; SPAN]; TILE_QUERIES];
        let scores = &mut scores[..tile.len()];
        self.scores(page, tile.clone(), columns, scores);
        for (at, query_scores) in scores.iter_mut().enumerate() {
            let index = self.indices.start + tile.start + at;
            let sums = &mut partial.sums[at * self.stride..][..self.stride];
            let partial = (sums, &mut partial.softmax[at]);
            self.weigh(index, page.start, &mut seen[at], query_scores, partial);
        }
        let (stride, mut first) = (self.stride, 0);
        for run in seen.chunk_by(|a, b| a == b) {
            let queries = first..first + run.len();
            let (rows, columns, ahead) = (run[0].clone(), 0..stride, page.keys_ahead);
            let panel = Panel { bytes: page.values, stride, rows, columns, ahead };
            let sums = &mut partial.sums[queries.start * stride..queries.end * stride];
            (page.add)(&scores[queries.clone()], panel, sums);
            first = queries.end;
        }
    }

    /// `scores[q][p] = query[q] · key[p]` for at least the positions `columns` of a page.
    fn scores(
        &self,
        page: &Page<'_>,
        tile: Range<usize>,
        columns: Range<usize>,
        scores: &mut [Weights],
    ) {
        let part_bytes = page.keys.len() / self.pass.shape.d_head * SPAN;
        let columns = columns.start / COLUMNS * COLUMNS..columns.end.next_multiple_of(COLUMNS);
        let mut values = page.values_ahead.chunks(part_bytes);
        for (part, bytes) in page.keys.chunks(part_bytes).enumerate() {
            let rows = 0..SPAN.min(self.pass.shape.d_head - part * SPAN);
            let first = part * self.indices.len();
            let queries = &self.queries[first + tile.start..first + tile.end];
            let (columns, ahead) = (columns.clone(), values.next().unwrap_or(&[]));
            let panel = Panel { bytes, stride: PAGE_LEN, rows, columns, ahead };
            (page.add)(queries, panel, scores.as_flattened_mut());
        }
    }

    /// Turns the scores of a query into weights of the values of a page that begins at position
    /// `start`. Of `seen`, which counts within the page, nothing is left if no position has any
    /// weight.
    fn weigh(
        &self,
        index: usize,
        start: usize,
        seen: &mut Range<usize>,
        scores: &mut Weights,
        (sums, softmax): (&mut [f32], &mut Softmax),
    ) {
        if seen.start >= seen.end {
            return;
        }
        if let Some(slopes) = self.pass.shape.alibi_slopes {
            let slope = slopes[self.head(index)];
            for position in seen.clone() {
                scores[position] += alibi_bias(slope, start + position);
            }
        }
        // a NaN is no maximum, whatever the scale, and −∞ no weight
        let row_ops = self.pass.row_ops;
        scores[..seen.start].fill(f32::NAN);
        scores[seen.end..].fill(f32::NAN);
        let max = (row_ops.scale_and_max)(scores, self.pass.shape.scale);
        scores[..seen.start].fill(f32::NEG_INFINITY);
        scores[seen.end..].fill(f32::NEG_INFINITY);
        if max == f32::NEG_INFINITY
            && softmax.max == f32::NEG_INFINITY
            && !scores.iter().any(|score| score.is_nan())
        {
            // −∞ − (−∞) would make a NaN of positions that only count for nothing
            *seen = 0..0;
            return;
        }
        if let Some(shrink) = softmax.raise(max) {
            sums.iter_mut().for_each(|sum| *sum *= shrink);
        }
        softmax.total += (row_ops.exp_and_sum)(scores, softmax.max);
    }
}

/// A page, as a block reads it.
struct Page<'a> {
    /// Its first position.
    start: usize,
    keys: &'a [u8],
    values: &'a [u8],
    add: AddRows,
    /// What to bring into the cache while keys are read: the values.
    values_ahead: &'a [u8],
    /// What to bring into the cache while values are read: the keys of the next page.
    keys_ahead: &'a [u8],
}

impl<'a> Page<'a> {
    fn new<P: KvPages>(block: &Block<'a, P>, index: usize, next: Option<usize>) -> Self {
        let page = block.pass.pages.page(index);
        let row_ops = block.pass.row_ops;
        let add = match page.layout().dtype {
            KvDtype::F32 => row_ops.add_f32,
            KvDtype::F16 => row_ops.add_f16,
        };
        let keys_ahead =
            next.map_or(&[][..], |next| block.pass.pages.page(next).keys(block.kv_head));
        let (keys, values) = (page.keys(block.kv_head), page.values(block.kv_head));
        Self { start: index * PAGE_LEN, keys, values, add, values_ahead: values, keys_ahead }
    }
}

/// What is in both; empty at the beginning of `within` or after if nothing is.
fn intersection(range: &Range<usize>, within: &Range<usize>) -> Range<usize> {
    let start = range.start.clamp(within.start, within.end);
    start..range.end.clamp(start, within.end)
}
