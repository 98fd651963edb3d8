//! The primitives of attention: one product that serves scores and weighted values alike, and the
//! exponentials between them.
//!
//! With keys stored transposed, `[d_head, positions]`, the scores of a query are a weighted sum of
//! rows: `scores[p] = Σ_i query[i] · key[i][p]`. Its output is one, too:
//! `y[c] = Σ_p weight[p] · value[p][c]`. Neither needs a sum across the lanes of a register, and each
//! element is one sum in the order of the rows, however many queries share the loads.

#[cfg(target_arch = "aarch64")]
mod neon;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod simd;
#[cfg(target_arch = "x86_64")]
mod x86;

use std::ops::Range;

#[cfg(target_arch = "aarch64")]
pub(super) use neon::NEON;
#[cfg(target_arch = "x86_64")]
pub(super) use x86::{AVX2, AVX512};

/// Queries that share each loaded key and value.
pub(crate) const TILE_QUERIES: usize = 8;
/// Rows of a panel at most, and with that weights of a query.
pub(crate) const SPAN: usize = 64;
/// Panel rows and the columns taken of them are a multiple of this long.
pub(crate) const COLUMNS: usize = 16;

/// Some weights of each query of a tile.
pub(crate) type Weights = [f32; SPAN];

/// Some rows and columns of a matrix that lies row by row.
#[derive(Debug, Clone)]
pub(crate) struct Panel<'a> {
    /// `[at least rows.end, stride]` elements.
    pub(crate) bytes: &'a [u8],
    /// Elements of a row, those left out included.
    pub(crate) stride: usize,
    pub(crate) rows: Range<usize>,
    /// A multiple of [`COLUMNS`], both.
    pub(crate) columns: Range<usize>,
    /// What is read next, brought into the cache on the way.
    pub(crate) ahead: &'a [u8],
}

/// `ys[q][c] += Σ_r weights[q][r] · panel[r][c]` in the order of the rows, with `ys` `[n_queries,
/// stride]`; at most [`TILE_QUERIES`] queries.
pub(crate) type AddRows = fn(weights: &[Weights], panel: Panel<'_>, ys: &mut [f32]);

/// One instruction set's bodies.
pub(crate) struct AttentionRows {
    /// Over a panel of f32.
    pub(crate) add_f32: AddRows,
    /// Over a panel of f16.
    pub(crate) add_f16: AddRows,
    /// Multiplies scores and gives the largest, −∞ if all are NaN.
    pub(crate) scale_and_max: fn(scores: &mut Weights, scale: f32) -> f32,
    /// `scores[p] = e^(scores[p] − max)`, where none exceeds `max`; gives their sum.
    pub(crate) exp_and_sum: fn(scores: &mut Weights, max: f32) -> f32,
}

/// The definition.
pub(super) static SCALAR: AttentionRows = AttentionRows {
    add_f32: |weights, panel, ys| add_rows(weights, &panel, ys, 4, f32_at),
    add_f16: |weights, panel, ys| add_rows(weights, &panel, ys, 2, f16_at),
    scale_and_max: |scores, scale| {
        scores.iter_mut().for_each(|score| *score *= scale);
        scores.iter().copied().fold(f32::NEG_INFINITY, f32::max)
    },
    exp_and_sum: |scores, max| {
        scores.iter_mut().for_each(|score| *score = (*score - max).exp());
        scores.iter().sum()
    },
};

impl Panel<'_> {
    /// What every body relies on.
    fn check(&self, weights: &[Weights], ys: &[f32], element_bytes: usize) {
        let Self { bytes, stride, rows, columns, .. } = self;
        assert!(weights.len() <= TILE_QUERIES, "no more queries than a tile");
        assert!(rows.start <= rows.end && rows.end <= SPAN, "no more rows than weights");
        assert!(columns.start <= columns.end && columns.end <= *stride, "columns of a row");
        assert!(
            columns.start.is_multiple_of(COLUMNS) && columns.end.is_multiple_of(COLUMNS),
            "whole groups of columns"
        );
        assert!(bytes.len() >= rows.end * stride * element_bytes, "the panel has its rows");
        assert!(ys.len() >= weights.len() * stride, "one output row a query");
    }
}

fn add_rows(
    weights: &[Weights],
    panel: &Panel<'_>,
    ys: &mut [f32],
    element_bytes: usize,
    at: fn(&[u8], usize) -> f32,
) {
    panel.check(weights, ys, element_bytes);
    for (weights, y) in weights.iter().zip(ys.chunks_exact_mut(panel.stride.max(1))) {
        for row in panel.rows.clone() {
            for column in panel.columns.clone() {
                y[column] += weights[row] * at(panel.bytes, row * panel.stride + column);
            }
        }
    }
}

fn f32_at(bytes: &[u8], index: usize) -> f32 {
    let (elements, _) = bytes.as_chunks::<4>();
    f32::from_ne_bytes(elements[index])
}

fn f16_at(bytes: &[u8], index: usize) -> f32 {
    let (elements, _) = bytes.as_chunks::<2>();
    half::f16::from_ne_bytes(elements[index]).to_f32()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::RowKernels;
    use testing::Seeded;

    /// A panel of f16 values, in both types.
    fn panel(n_rows: usize, stride: usize) -> (Vec<u8>, Vec<u8>) {
        let halves: Vec<half::f16> =
            Seeded::new(7).normal(n_rows * stride).into_iter().map(half::f16::from_f32).collect();
        let floats: Vec<f32> = halves.iter().map(|half| half.to_f32()).collect();
        (bytemuck::cast_slice(&floats).to_vec(), bytemuck::cast_slice(&halves).to_vec())
    }

    #[test]
    fn every_table_adds_the_rows_in_either_type_alone_and_in_tiles() {
        let stride = 80;
        let (floats, halves) = panel(SPAN, stride);
        let values = Seeded::new(8).normal(TILE_QUERIES * SPAN);
        let (weights, _) = values.as_chunks::<SPAN>();
        for kernels in RowKernels::available() {
            let rows_ops = kernels.table().attention;
            for (rows, columns) in
                [(0..SPAN, 0..80), (3..4, 16..32), (5..64, 16..80), (9..9, 0..16)]
            {
                for n in 0..=TILE_QUERIES {
                    let run = |bytes: &[u8], add: AddRows, weights: &[Weights]| {
                        let mut ys = vec![0.5; weights.len() * stride];
                        let (rows, columns) = (rows.clone(), columns.clone());
                        add(weights, Panel { bytes, stride, rows, columns, ahead: &[] }, &mut ys);
                        ys
                    };
                    let found = run(&floats, rows_ops.add_f32, &weights[..n]);
                    assert_eq!(found, run(&halves, rows_ops.add_f16, &weights[..n]));
                    for (q, y) in found.chunks_exact(stride).enumerate() {
                        assert_eq!(y, run(&floats, rows_ops.add_f32, &weights[q..=q]));
                        let truth = run(&floats, SCALAR.add_f32, &weights[q..=q]);
                        for (found, expected) in y.iter().zip(truth) {
                            assert!(
                                (found - expected).abs() < 1e-4,
                                "{} {found} {expected}",
                                kernels.name()
                            );
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn every_table_has_the_exponential_with_its_limits() {
        let below = |i: usize| -(i as f32) * 1.45;
        let mut scores: Weights = std::array::from_fn(below);
        (scores[5], scores[6]) = (f32::NEG_INFINITY, -1e30);
        for kernels in RowKernels::available() {
            let (rows_ops, mut found) = (kernels.table().attention, scores);
            assert_eq!((rows_ops.scale_and_max)(&mut found, 0.5), 0.0);
            assert_eq!(found[2], scores[2] * 0.5);
            let mut found = scores;
            let sum = (rows_ops.exp_and_sum)(&mut found, 0.0);
            for (&x, &e) in scores.iter().zip(&found) {
                let truth = f64::from(x).exp();
                assert!((f64::from(e) - truth).abs() <= 3e-7 * truth + 2e-38, "{x}: {e} {truth}");
            }
            assert_eq!((found[0], found[5], found[6]), (1.0, 0.0, 0.0));
            let total: f64 = found.iter().copied().map(f64::from).sum();
            assert!((f64::from(sum) - total).abs() < 1e-6, "{} {sum} {total}", kernels.name());
        }
    }

    #[test]
    fn a_nan_is_no_maximum_and_stays_a_nan() {
        for kernels in RowKernels::available() {
            let rows_ops = kernels.table().attention;
            for at in [0, 15, 40, 63] {
                let mut scores = [1.0; SPAN];
                scores[at] = f32::NAN;
                assert_eq!((rows_ops.scale_and_max)(&mut scores, 2.0), 2.0);
                assert!((rows_ops.exp_and_sum)(&mut scores, 2.0).is_nan());
                assert!(scores[at].is_nan() && scores[at ^ 1] == 1.0);
            }
            assert_eq!((rows_ops.scale_and_max)(&mut [f32::NAN; SPAN], 1.0), f32::NEG_INFINITY);
        }
    }
}
