//! Causal attention over a key-value cache that is kept in pages.

use candle_core::{Device, Tensor};
use rayon::prelude::*;

use crate::cpu::{RowKernels, RowPrimitives};
use crate::error::OpError;
use crate::format::WeightFormat;
use crate::tensor::with_rows;

/// Positions in a page of a key-value cache.
pub const PAGE_LEN: usize = 64;

/// Products worth handing to another thread: about ten microseconds of them.
const TASK_PRODUCTS: usize = 64 << 10;

/// Keys and values of one layer, page by page.
pub trait KvPages: Sync {
    /// Keys and values of the positions `index * PAGE_LEN ..`, each
    /// `[n_kv_heads, PAGE_LEN, d_head]` f32.
    fn page(&self, index: usize) -> (&[f32], &[f32]);
}

/// The shape of an attention layer and where its queries stand.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionShape {
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
}

/// Attends from each query to its own position and all before it.
///
/// One pass over the pages per query and head with a running maximum (softmax in f32), so a query
/// gets the same bits whether it comes alone or among others, at any thread count.
///
/// # Shapes
/// `queries` `[n_tokens, n_heads · d_head]` f32, at positions `first_position ..` · `pages` keys and
/// values up to the last query's position · result like `queries`.
/// # Errors
/// [`OpError::Shape`] if the heads do not divide or a page has another size, and as
/// [`linear`](crate::linear) for `queries`.
pub fn causal_attention(
    queries: &Tensor,
    pages: &impl KvPages,
    shape: AttentionShape,
) -> Result<Tensor, OpError> {
    const OP: &str = "causal_attention";
    let AttentionShape { n_heads, n_kv_heads, d_head, .. } = shape;
    if n_kv_heads == 0 || !n_heads.is_multiple_of(n_kv_heads) || d_head == 0 {
        let (expected, found) = (vec![n_heads, n_heads, 1], vec![n_heads, n_kv_heads, d_head]);
        return Err(OpError::Shape { op: OP, what: "heads", expected, found });
    }
    with_rows(OP, "queries", queries, n_heads * d_head, |values| {
        let n_positions = shape.first_position + values.len() / (n_heads * d_head);
        for index in 0..n_positions.div_ceil(PAGE_LEN) {
            let (keys, page_values) = pages.page(index);
            for (what, page) in [("a page of keys", keys), ("a page of values", page_values)] {
                if page.len() != n_kv_heads * PAGE_LEN * d_head {
                    let expected = vec![n_kv_heads, PAGE_LEN, d_head];
                    return Err(OpError::Shape { op: OP, what, expected, found: vec![page.len()] });
                }
            }
        }
        let mut out = vec![0.0; values.len()];
        let row_ops = RowKernels::best().primitives(WeightFormat::F32);
        let one = |index: usize, out: &mut [f32]| {
            let query = &values[index * d_head..][..d_head];
            let position = shape.first_position + index / n_heads;
            let kv_head = index % n_heads / (n_heads / n_kv_heads);
            attend(row_ops, query, pages, (position, kv_head, shape.scale), out);
        };
        if values.len() * n_positions < TASK_PRODUCTS {
            out.chunks_exact_mut(d_head).enumerate().for_each(|(i, out)| one(i, out));
        } else {
            out.par_chunks_exact_mut(d_head).enumerate().for_each(|(i, out)| one(i, out));
        }
        Ok(Tensor::from_vec(out, queries.shape(), &Device::Cpu)?)
    })
}

/// One query and head: `out = Σ_p softmax(scale · query · key[p]) · value[p]`.
///
/// The plain form needs all scores before the first value. Page by page it is the same sum: with
/// `m` the maximum so far, `out` and `total` hold `Σ e^(score − m) · value` and `Σ e^(score − m)`,
/// and when a page raises `m` both are scaled by `e^(old m − new m)`.
fn attend(
    row_ops: &RowPrimitives,
    query: &[f32],
    pages: &impl KvPages,
    (position, kv_head, scale): (usize, usize, f32),
    out: &mut [f32],
) {
    let d_head = query.len();
    let (mut max, mut total) = (f32::NEG_INFINITY, 0.0f32);
    for index in 0..=position / PAGE_LEN {
        let n = (position + 1 - index * PAGE_LEN).min(PAGE_LEN);
        let (keys, values) = pages.page(index);
        let head = kv_head * PAGE_LEN * d_head..;
        let (keys, values) = (&keys[head.clone()], &values[head]);
        let row = |rows, p: usize| -> &[u8] {
            bytemuck::cast_slice(&<[f32]>::as_ref(rows)[p * d_head..][..d_head])
        };
        let mut scores = [0.0; PAGE_LEN];
        for (p, score) in scores[..n].iter_mut().enumerate() {
            *score = (row_ops.dot)(row(keys, p), row(keys, p), query);
        }
        let scores = &mut scores[..n];
        let page_max = scores.iter().fold(max, |max, &score| max.max(score * scale));
        if page_max > max {
            let shrink = (max - page_max).exp();
            total *= shrink;
            out.iter_mut().for_each(|out| *out *= shrink);
            max = page_max;
        }
        for score in scores.iter_mut() {
            *score = (*score * scale - max).exp();
            total += *score;
        }
        for (p, &score) in scores.iter().enumerate() {
            (row_ops.axpy)(score, row(values, p), row(values, p), out);
        }
    }
    out.iter_mut().for_each(|out| *out /= total);
}
