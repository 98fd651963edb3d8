//! Causal attention over a key-value cache that is kept in pages.
//!
//! The naive loop takes each query head by itself: the dot product with each key, the softmax, the
//! weighted sum of the values, every key and value read again for each of the query heads that share
//! it. Here the queries of a key-value head are taken in tiles that share each loaded key and value,
//! in decode (the heads of a group) as in prefill (those of many tokens), one pass over the pages
//! with a running softmax; `block.rs` says why the bits are the same, and `cpu/attention_rows.rs`
//! what is done with a page.
//!
//! Work is cut by key-value head and block of queries, and where these are few, as in decode, by chunks
//! of positions, too. The chunks are summed on their own in either case, so that the cut changes no
//! bit.
//!
//! Measured on a shared Zen 4, a layer of llama-1b (32 heads on 4, 64 values each), one token over 2048
//! in the cache, two threads: 70 µs in f16 and 90 µs in f32, which is about what the products take;
//! candle's products over keys and values repeated for each head took 1.3 ms. In one thread 125 µs in
//! f16, and 310 µs without bringing keys and values into the cache ahead of their use: pages lie
//! apart, so that the hardware's own prefetch starts anew in each. Tiles of four queries by four
//! registers were as fast as those of eight by two.

mod alibi;
mod block;
mod page;
mod softmax;

use std::ops::Range;

use candle_core::{Device, Tensor};
use rayon::prelude::*;

pub use alibi::{alibi_bias, alibi_slopes};
pub use page::{KvDtype, KvLayout, KvPage, PAGE_LEN};

use crate::check::check_heads;
use crate::cpu::RowKernels;
use crate::cpu::attention_rows::{AttentionRows, COLUMNS, TILE_QUERIES};
use crate::error::OpError;
use crate::tensor::with_rows;
use crate::workspace::Workspace;
use block::{Block, CHUNK_LEN, Partial};
pub(crate) use softmax::Softmax;

/// Queries at most that a task takes through the pages together: their sums stay in the second-level
/// cache, and what of the key-value cache is in the third is read for eight tiles at once.
const BLOCK_QUERIES: usize = 64;
/// Products worth a parallel region: about twenty microseconds of them.
const PARALLEL_PRODUCTS: usize = 1 << 20;
/// Tokens whose results a task writes at least.
const TASK_TOKENS: usize = 16;
/// From so many blocks on they are enough to keep threads busy, whole.
const MANY_BLOCKS: usize = 64;

/// Keys and values of one layer, page by page.
pub trait KvPages: Sync {
    /// Keys and values of the positions `index * PAGE_LEN ..`.
    fn page(&self, index: usize) -> &KvPage;
}

/// The shape of an attention layer, where its queries stand and what each of them sees.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionShape<'a> {
    /// Query heads.
    pub n_heads: usize,
    /// Key and value heads; each serves `n_heads / n_kv_heads` query heads.
    pub n_kv_heads: usize,
    /// Values in a head.
    pub d_head: usize,
    /// What products of queries and keys are multiplied with, usually `1 / √d_head`.
    pub scale: f32,
    /// Position of the first query; the cache holds it and all before it.
    pub first_position: usize,
    /// How many positions a query sees, its own the last of them; `None` for all before it.
    pub window: Option<usize>,
    /// `[n_heads]`: what is added to the product of a query and the key at position `p`, before
    /// the two are scaled, is [`alibi_bias`]`(slope, p)`.
    pub alibi_slopes: Option<&'a [f32]>,
}

impl AttentionShape<'_> {
    /// The positions that the queries of a token see.
    fn sight(&self, token: usize) -> Range<usize> {
        let end = self.first_position + token + 1;
        self.window.map_or(0, |window| end.saturating_sub(window))..end
    }

    fn check(&self, op: &'static str) -> Result<(), OpError> {
        let heads = [self.n_heads, self.n_kv_heads, self.d_head];
        check_heads(op, heads, self.window, self.alibi_slopes)
    }

    fn check_pages(
        &self,
        op: &'static str,
        pages: &impl KvPages,
        n_pages: usize,
    ) -> Result<(), OpError> {
        let Self { n_kv_heads, d_head, .. } = *self;
        for index in 0..n_pages {
            let layout = pages.page(index).layout();
            if (layout.n_kv_heads, layout.d_head) != (n_kv_heads, d_head) {
                let expected = vec![n_kv_heads, d_head];
                let found = vec![layout.n_kv_heads, layout.d_head];
                return Err(OpError::Shape { op, what: "a page of the cache", expected, found });
            }
        }
        Ok(())
    }
}

/// Scratch of an attention layer.
#[derive(Debug, Default)]
pub(crate) struct AttentionScratch {
    /// `[n_kv_heads, n_chunks, n_queries, padded d_head]`
    sums: Vec<f32>,
    /// `[n_kv_heads, n_chunks, n_queries]`
    softmax: Vec<Softmax>,
}

impl AttentionScratch {
    /// An upper bound of what `n_tokens` tokens take for each of the parts that positions are cut into.
    pub(crate) fn part_bytes(n_heads: usize, d_head: usize, n_tokens: usize) -> usize {
        let of_query = d_head.next_multiple_of(COLUMNS) * size_of::<f32>() + size_of::<Softmax>();
        n_heads.saturating_mul(n_tokens).saturating_mul(of_query)
    }

    /// Parts at most that so many positions are cut into.
    pub(crate) fn parts_at_most(n_positions: usize) -> usize {
        // a window may begin anywhere in a chunk
        n_positions.div_ceil(CHUNK_LEN) + 1
    }

    pub(crate) fn size_bytes(&self) -> usize {
        self.sums.capacity() * size_of::<f32>() + self.softmax.capacity() * size_of::<Softmax>()
    }
}

/// Attends from each query to its own position and those before it, or to the last
/// [`window`](AttentionShape::window) of these. A query none of whose scores is above −∞ gets
/// zeros.
///
/// One pass over the pages per key-value head and block of queries with a running softmax in f32;
/// a query gets the same bits whether it comes alone or among others, at any thread count.
///
/// # Shapes
/// `queries` `[n_tokens, n_heads · d_head]` f32, at positions `first_position ..` · `pages` keys and
/// values up to the last query's position · result like `queries`.
/// # Cost
/// Reads the seen positions of the cache once for eight queries of a key-value head.
/// # Errors
/// [`OpError::Shape`] if the heads do not divide, a page has another layout, the window is empty or
/// there is not one slope a head, and as [`linear`](crate::linear) for `queries`.
pub fn causal_attention(
    queries: &Tensor,
    pages: &impl KvPages,
    shape: AttentionShape<'_>,
    workspace: &mut Workspace,
) -> Result<Tensor, OpError> {
    let kernels = RowKernels::best().table().attention;
    attend(kernels, queries, pages, shape, workspace)
}

fn attend(
    row_ops: &'static AttentionRows,
    queries: &Tensor,
    pages: &impl KvPages,
    shape: AttentionShape<'_>,
    workspace: &mut Workspace,
) -> Result<Tensor, OpError> {
    const OP: &str = "causal_attention";
    shape.check(OP)?;
    with_rows(OP, "queries", queries, shape.n_heads * shape.d_head, |values| {
        let n_tokens = values.len() / (shape.n_heads * shape.d_head);
        let mut out = vec![0.0; values.len()];
        if n_tokens > 0 {
            let n_positions = shape.first_position + n_tokens;
            shape.check_pages(OP, pages, n_positions.div_ceil(PAGE_LEN))?;
            let pass = Pass { row_ops, shape, pages, queries: values, n_tokens };
            pass.run(&mut workspace.attention, &mut out);
        }
        Ok(Tensor::from_vec(out, queries.shape(), &Device::Cpu)?)
    })
}

/// [`causal_attention`] on slices, of a shape and pages that were checked; at least one token.
pub(crate) fn attend_rows(
    queries: &[f32],
    pages: &impl KvPages,
    shape: AttentionShape<'_>,
    scratch: &mut AttentionScratch,
    out: &mut [f32],
) {
    let row_ops = RowKernels::best().table().attention;
    let n_tokens = queries.len() / (shape.n_heads * shape.d_head);
    Pass { row_ops, shape, pages, queries, n_tokens }.run(scratch, out);
}

/// The queries of some tokens over a cache.
struct Pass<'a, P> {
    row_ops: &'static AttentionRows,
    shape: AttentionShape<'a>,
    pages: &'a P,
    /// `[n_tokens, n_heads · d_head]`
    queries: &'a [f32],
    /// At least one.
    n_tokens: usize,
}

/// How the work of a pass is cut.
#[derive(Debug, Clone, Copy)]
struct Cut {
    /// Queries of a key-value head.
    n_queries: usize,
    /// Queries of a block.
    n_block: usize,
    /// Elements of a query in the sums.
    stride: usize,
    /// Chunks that are tasks of their own; `None` if a task takes a block through all of them.
    chunks: Option<(usize, usize)>,
    parallel: bool,
}

impl<P: KvPages> Pass<'_, P> {
    fn run(&self, scratch: &mut AttentionScratch, out: &mut [f32]) {
        let cut = self.cut();
        let Cut { n_queries, stride, .. } = cut;
        let n_parts = cut.chunks.map_or(1, |(first, end)| end - first);
        let n = self.shape.n_kv_heads * n_parts * n_queries;
        scratch.sums.resize(scratch.sums.len().max(n * stride), 0.0);
        scratch.softmax.resize(scratch.softmax.len().max(n), Softmax::EMPTY);
        let (sums, softmax) = (&mut scratch.sums[..n * stride], &mut scratch.softmax[..n]);
        self.sum(cut, n_parts, sums, softmax);
        let heads = sums.chunks_exact_mut(n_parts * n_queries * stride);
        for (sums, softmax) in heads.zip(softmax.chunks_exact_mut(n_parts * n_queries)) {
            merge_parts(n_queries, stride, sums, softmax);
        }
        self.write(cut, n_parts, (sums, softmax), out);
    }

    fn cut(&self) -> Cut {
        let shape = self.shape;
        let n_queries = self.n_tokens * (shape.n_heads / shape.n_kv_heads);
        let stride = self.pages.page(0).layout().padded();
        let all = shape.sight(0).start..shape.sight(self.n_tokens - 1).end;
        let parallel = self.queries.len() * all.len() >= PARALLEL_PRODUCTS / 2;
        let n_blocks = n_queries.div_ceil(BLOCK_QUERIES);
        // of one size, as whole tiles: those of 71 heads are 40 and 31, not 64 and 7
        let n_block = n_queries.div_ceil(n_blocks).next_multiple_of(TILE_QUERIES);
        let chunks = (all.start / CHUNK_LEN, all.end.div_ceil(CHUNK_LEN));
        let chunks = (parallel && shape.n_kv_heads * n_blocks < MANY_BLOCKS).then_some(chunks);
        Cut { n_queries, n_block, stride, chunks, parallel }
    }

    /// Fills `sums` and `softmax`, part by part.
    fn sum(&self, cut: Cut, n_parts: usize, sums: &mut [f32], softmax: &mut [Softmax]) {
        let Cut { n_queries, n_block, stride, chunks, parallel } = cut;
        let at_once = if parallel { 1 } else { usize::MAX };
        let parts = sums.par_chunks_exact_mut(n_queries * stride);
        let parts = parts.zip(softmax.par_chunks_exact_mut(n_queries)).enumerate();
        parts.with_min_len(at_once).for_each(|(index, (sums, softmax))| {
            let (kv_head, part) = (index / n_parts, index % n_parts);
            let blocks = sums.par_chunks_mut(n_block * stride);
            let blocks = blocks.zip(softmax.par_chunks_mut(n_block)).enumerate();
            blocks.with_min_len(at_once).for_each(|(block, (sums, softmax))| {
                let first = block * n_block;
                let indices = first..first + softmax.len();
                let block = Block::new(self, kv_head, indices);
                let mut partial = Partial { sums, softmax };
                match chunks {
                    Some((first, _)) => block.chunk(first + part, &mut partial),
                    None => block.chunks(&mut partial),
                }
            });
        });
    }

    /// Writes what the sums come to.
    fn write(
        &self,
        cut: Cut,
        n_parts: usize,
        (sums, softmax): (&[f32], &[Softmax]),
        out: &mut [f32],
    ) {
        let AttentionShape { n_heads, n_kv_heads, d_head, .. } = self.shape;
        let group = n_heads / n_kv_heads;
        let at_once = if cut.parallel { 1 } else { usize::MAX };
        let tokens = out.par_chunks_exact_mut(n_heads * d_head).enumerate();
        tokens.with_min_len(at_once.max(TASK_TOKENS)).for_each(|(token, out)| {
            for (head, out) in out.chunks_exact_mut(d_head).enumerate() {
                let query = token * group + head % group;
                let at = head / group * n_parts * cut.n_queries + query;
                softmax[at].mean(&sums[at * cut.stride..][..d_head], out);
            }
        });
    }
}

/// Adds the parts of a key-value head, in order, into the first.
fn merge_parts(n_queries: usize, stride: usize, sums: &mut [f32], softmax: &mut [Softmax]) {
    let (total_sums, sums) = sums.split_at_mut(n_queries * stride);
    let (total, softmax) = softmax.split_at_mut(n_queries);
    let parts = sums.chunks_exact(n_queries * stride).zip(softmax.chunks_exact(n_queries));
    for (sums, softmax) in parts {
        let totals = total.iter_mut().zip(total_sums.chunks_exact_mut(stride));
        for ((total, total_sums), (part, sums)) in
            totals.zip(softmax.iter().zip(sums.chunks_exact(stride)))
        {
            total.merge(total_sums, *part, sums);
        }
    }
}

#[cfg(test)]
mod tests;
