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

/// The slopes of ALiBi (Press et al., "Train Short, Test Long") as Falcon has them: a geometric
/// sequence over the largest power of two of heads, and for the heads beyond it every other
/// member of the sequence that is twice as dense. Rounded to bf16.
///
/// # Examples
/// ```
/// use powerinfer_ops::attention::alibi_slopes;
/// assert_eq!(alibi_slopes(8)[..3], [0.5, 0.25, 0.125]);
/// assert_eq!(alibi_slopes(6).len(), 6);
/// assert!(alibi_slopes(0).is_empty());
/// ```
#[must_use]
pub fn alibi_slopes(n_heads: usize) -> Vec<f32> {
    let whole = n_heads.checked_ilog2().map_or(0, |log2| 1usize << log2);
    let slope = |step: usize, n: usize| (-8.0 * step as f64 / n as f64).exp2();
    let regular = (1..=whole).map(|head| slope(head, whole));
    let between = (0..n_heads - whole).map(|head| slope(2 * head + 1, 2 * whole));
    regular.chain(between).map(|slope| to_bf16(slope as f32)).collect()
}

/// What ALiBi adds to a score: slope times position of the key, in the arithmetic that Falcon was
/// trained in, where position and product are bf16 numbers.
#[must_use]
pub fn alibi_bias(slope: f32, position: usize) -> f32 {
    to_bf16(slope * to_bf16(position as f32))
}

fn to_bf16(x: f32) -> f32 {
    half::bf16::from_f32(x).to_f32()
}

/// Attends from each query to its own position and those before it, or to the last
/// [`window`](AttentionShape::window) of these. A query none of whose scores is above −∞ gets
/// zeros.
///
/// One pass over the pages per query and head with a running maximum (softmax in f32), so a query
/// gets the same bits whether it comes alone or among others, at any thread count.
///
/// # Shapes
/// `queries` `[n_tokens, n_heads · d_head]` f32, at positions `first_position ..` · `pages` keys and
/// values up to the last query's position · result like `queries`.
/// # Errors
/// [`OpError::Shape`] if the heads do not divide, a page has another size, the window is empty or
/// there is not one slope a head, and as [`linear`](crate::linear) for `queries`.
pub fn causal_attention(
    queries: &Tensor,
    pages: &impl KvPages,
    shape: AttentionShape<'_>,
) -> Result<Tensor, OpError> {
    const OP: &str = "causal_attention";
    let AttentionShape { n_heads, n_kv_heads, d_head, .. } = shape;
    if n_kv_heads == 0 || !n_heads.is_multiple_of(n_kv_heads) || d_head == 0 {
        let (expected, found) = (vec![n_heads, n_heads, 1], vec![n_heads, n_kv_heads, d_head]);
        return Err(OpError::Shape { op: OP, what: "heads", expected, found });
    }
    if shape.window == Some(0) {
        return Err(OpError::Shape { op: OP, what: "window", expected: vec![1], found: vec![0] });
    }
    if let Some(slopes) = shape.alibi_slopes.filter(|slopes| slopes.len() != n_heads) {
        let (expected, found) = (vec![n_heads], vec![slopes.len()]);
        return Err(OpError::Shape { op: OP, what: "alibi slopes", expected, found });
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
            let (position, head) = (shape.first_position + index / n_heads, index % n_heads);
            let sight = Sight {
                first: shape.window.map_or(0, |window| (position + 1).saturating_sub(window)),
                last: position,
                kv_head: head / (n_heads / n_kv_heads),
                scale: shape.scale,
                slope: shape.alibi_slopes.map(|slopes| slopes[head]),
            };
            attend(row_ops, query, pages, sight, out);
        };
        if values.len() * n_positions < TASK_PRODUCTS {
            out.chunks_exact_mut(d_head).enumerate().for_each(|(i, out)| one(i, out));
        } else {
            out.par_chunks_exact_mut(d_head).enumerate().for_each(|(i, out)| one(i, out));
        }
        Ok(Tensor::from_vec(out, queries.shape(), &Device::Cpu)?)
    })
}

/// What one query and head sees, and how.
#[derive(Clone, Copy)]
struct Sight {
    first: usize,
    last: usize,
    kv_head: usize,
    scale: f32,
    slope: Option<f32>,
}

/// One query and head: `out = Σ_p softmax(scale · (query · key[p] + bias[p])) · value[p]`.
///
/// The plain form needs all scores before the first value. Page by page it is the same sum: with
/// `m` the maximum so far, `out` and `total` hold `Σ e^(score − m) · value` and `Σ e^(score − m)`,
/// and when a page raises `m` both are scaled by `e^(old m − new m)`. Where the pages begin and end
/// depends on the position alone, and so do the bits of the sum.
fn attend(
    row_ops: &RowPrimitives,
    query: &[f32],
    pages: &impl KvPages,
    sight: Sight,
    out: &mut [f32],
) {
    let d_head = query.len();
    let (mut max, mut total) = (f32::NEG_INFINITY, 0.0f32);
    for index in sight.first / PAGE_LEN..=sight.last / PAGE_LEN {
        let page_start = index * PAGE_LEN;
        let begin = sight.first.saturating_sub(page_start);
        let end = (sight.last + 1 - page_start).min(PAGE_LEN);
        let (keys, values) = pages.page(index);
        let head = sight.kv_head * PAGE_LEN * d_head..;
        let (keys, values) = (&keys[head.clone()], &values[head]);
        let row = |rows, p: usize| -> &[u8] {
            bytemuck::cast_slice(&<[f32]>::as_ref(rows)[p * d_head..][..d_head])
        };
        let mut scores = [0.0; PAGE_LEN];
        let scores = &mut scores[begin..end];
        for (p, score) in (begin..end).zip(scores.iter_mut()) {
            *score = (RowKernels::best().f32_products().dot)(row(keys, p), row(keys, p), query);
            if let Some(slope) = sight.slope {
                *score += alibi_bias(slope, page_start + p);
            }
            *score *= sight.scale;
        }
        let page_max = scores.iter().fold(max, |max, &score| max.max(score));
        if page_max == f32::NEG_INFINITY && scores.iter().all(|score| !score.is_nan()) {
            // −∞ − (−∞) would make a NaN of positions that only count for nothing
            continue;
        }
        if page_max > max {
            let shrink = (max - page_max).exp();
            total *= shrink;
            out.iter_mut().for_each(|out| *out *= shrink);
            max = page_max;
        }
        for score in scores.iter_mut() {
            *score = (*score - max).exp();
            total += *score;
        }
        for (p, &score) in (begin..end).zip(scores.iter()) {
            (row_ops.axpy)(score, row(values, p), row(values, p), out);
        }
    }
    if total != 0.0 {
        out.iter_mut().for_each(|out| *out /= total);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Keys of one value a head and values that count up.
    struct Pages(Vec<(Vec<f32>, Vec<f32>)>);

    impl Pages {
        fn new(key: f32, n_positions: usize) -> Self {
            let page = |index: usize| {
                let values = (0..PAGE_LEN).map(|p| (index * PAGE_LEN + p) as f32).collect();
                (vec![key; PAGE_LEN], values)
            };
            Self((0..n_positions.div_ceil(PAGE_LEN)).map(page).collect())
        }
    }

    impl KvPages for Pages {
        fn page(&self, index: usize) -> (&[f32], &[f32]) {
            (&self.0[index].0, &self.0[index].1)
        }
    }

    fn shape(first_position: usize) -> AttentionShape<'static> {
        AttentionShape {
            n_heads: 1,
            n_kv_heads: 1,
            d_head: 1,
            scale: 1.0,
            first_position,
            window: None,
            alibi_slopes: None,
        }
    }

    fn attended(key: f32, shape: AttentionShape<'_>) -> f32 {
        let query = Tensor::from_vec(vec![1.0f32], (1, 1), &Device::Cpu).unwrap();
        let pages = Pages::new(key, shape.first_position + 1);
        causal_attention(&query, &pages, shape).unwrap().to_vec2::<f32>().unwrap()[0][0]
    }

    #[test]
    fn a_window_sees_its_own_position_and_those_just_before_it() {
        for (position, window, mean) in [
            (0, 5, 0.0),
            (9, 1, 9.0),
            (9, 3, 8.0),
            (200, 4, 198.5),
            (129, 65, 97.0),
            (70, 500, 35.0),
        ] {
            let found = attended(0.0, AttentionShape { window: Some(window), ..shape(position) });
            assert!((found - mean).abs() < 1e-3, "{position} {window}: {found}");
        }
    }

    #[test]
    fn a_query_that_sees_nothing_gets_zeros_and_a_nan_stays_one() {
        assert_eq!(attended(f32::NEG_INFINITY, shape(100)), 0.0);
        assert!(attended(f32::NAN, shape(100)).is_nan());
    }

    #[test]
    fn slopes_follow_the_definition() {
        assert_eq!(alibi_slopes(4), [0.25, 0.0625, 0.015_625, 0.003_906_25]);
        let six = alibi_slopes(6);
        assert_eq!(six[..4], alibi_slopes(4)[..]);
        assert_eq!(six[4..], [0.5, 0.125]);
        // 2^(-1/4) has no short binary form
        assert_eq!(alibi_slopes(32)[0], 0.839_843_75);
    }

    #[test]
    fn alibi_is_rounded_to_bf16_and_favours_late_keys() {
        assert_eq!(alibi_bias(0.25, 12), 3.0);
        assert_eq!(alibi_bias(0.839_843_75, 3), 2.515_625);
        let slopes = alibi_slopes(1);
        let biased = AttentionShape { alibi_slopes: Some(&slopes), ..shape(300) };
        assert!(attended(0.0, biased) > attended(0.0, shape(300)));
    }

    #[test]
    fn an_empty_window_and_missing_slopes_are_errors() {
        let query = Tensor::from_vec(vec![1.0f32], (1, 1), &Device::Cpu).unwrap();
        for shape in [
            AttentionShape { window: Some(0), ..shape(0) },
            AttentionShape { alibi_slopes: Some(&[]), ..shape(0) },
        ] {
            let error = causal_attention(&query, &Pages::new(0.0, 1), shape).unwrap_err();
            assert!(matches!(error, OpError::Shape { .. }), "{error}");
        }
    }
}
