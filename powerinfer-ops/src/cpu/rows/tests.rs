//! Every kernel table against the formats' definitions, and the laws that results rest on.

use super::*;
use crate::cpu::Products;
use crate::cpu::activations::{Activations, block_rows};
use crate::cpu::panel::{self, PanelScratch};
use crate::cpu::product::InputScratch;
use crate::cpu::weighted_sum;
use crate::cpu::{PANEL_ROWS, int8};
use crate::error::OpError;
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

/// All rows times all tokens.
fn matvec(kernels: RowKernels, w: &NeuronMatrix, x: &[f32], out: &mut [f32]) {
    let mut scratch = InputScratch::default();
    let x = Inputs::new(kernels, &[w.format()], w.d_model(), x, &mut scratch);
    super::matvec(kernels, w, x, out);
}

/// Some rows times a token.
fn matvec_picked(kernels: RowKernels, w: &NeuronMatrix, ids: &[u32], x: &[f32], out: &mut [f32]) {
    let mut scratch = InputScratch::default();
    let x = Inputs::new(kernels, &[w.format()], w.d_model(), x, &mut scratch);
    super::matvec_picked(kernels, w, ids, x, out);
}

/// The weighted sum of all rows, zero or not, for one token.
fn axpy_all(kernels: RowKernels, w: &NeuronMatrix, scales: &[f32], y: &mut [f32]) {
    let ids: Vec<u32> = (0..w.n_neurons() as u32).collect();
    axpy_picked(kernels, w, (&ids, scales), y);
}

/// Weighted sums for many tokens, of all rows or of those whose scale is not zero.
fn axpy(kernels: RowKernels, w: &NeuronMatrix, scales: &[f32], skip: bool, y: &mut [f32]) {
    let n = w.n_neurons();
    if n == 0 {
        return;
    }
    let mut h = Activations::default();
    h.resize(n, scales.len() / n);
    h.par_blocks_mut().for_each(|(block, (values, masks))| {
        for (t, (values, mask)) in values.iter_mut().zip(masks).enumerate() {
            (*values, *mask) = ([0.0; PANEL_ROWS], 0);
            for (r, row) in block_rows(n, block).enumerate() {
                values[r] = scales[t * n + row];
                *mask |= u64::from(!skip || values[r] != 0.0) << r;
            }
        }
    });
    weighted_sum::axpy(kernels, w, &mut h, y);
}

/// `x` as the products of a format take it: as it is, or rounded to eight bits.
fn taken(kernels: RowKernels, format: WeightFormat, x: &[f32]) -> Vec<f32> {
    if matches!(kernels.primitives(format).products, Products::F32(_)) {
        return x.to_vec();
    }
    let mut groups = vec![bytemuck::Zeroable::zeroed(); int8::n_groups(x.len())];
    (kernels.table().quantize)(x, &mut groups);
    let blocks = (0..x.len() / int8::BLOCK).map(|b| (&groups[b / int8::BLOCKS], b % int8::BLOCKS));
    let block = |(group, b): (&int8::InputGroup, usize)| -> Vec<f32> {
        group.block_numbers(b).map(|n| f32::from(n) * group.block_scale(b)).collect()
    };
    blocks.flat_map(block).collect()
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
            for (n, n_tokens) in [(1, 1), (5, 1), (4, 4), (7, 6), (9, 3), (50, 21)] {
                let w = matrix(format, n, d, d as u64);
                let x = Seeded::new(1).normal(n_tokens * d);
                let mut out = vec![f32::NAN; n_tokens * n];
                matvec(kernels, &w, &x, &mut out);
                for t in 0..n_tokens {
                    let x = taken(kernels, format, &x[t * d..][..d]);
                    for row in 0..n {
                        let (expected, bound) = product(&w, row, &x);
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
fn rounding_to_eight_bits_is_the_same_in_every_table() {
    let x = Seeded::new(11).normal(544);
    let scalar = taken(RowKernels::available()[0], WeightFormat::Q8_0, &x);
    for kernels in RowKernels::available() {
        assert_eq!(taken(kernels, WeightFormat::Q8_0, &x), scalar, "{kernels:?}");
    }
}

#[test]
fn rounding_to_eight_bits_costs_at_most_the_bound() {
    for (format, kernels) in cases() {
        if matches!(kernels.primitives(format).products, Products::F32(_)) {
            continue;
        }
        for d in lengths(format) {
            let (w, x) = (matrix(format, 9, d, 12), Seeded::new(13).normal(d));
            let mut out = [0.0; 9];
            matvec(kernels, &w, &x, &mut out);
            for (row, found) in out.into_iter().enumerate() {
                let mut values = vec![0.0; d];
                w.row_to_f32(row, &mut values);
                let (expected, rounding) = product(&w, row, &x);
                let blocks = values.chunks(int8::BLOCK).zip(x.chunks(int8::BLOCK));
                let bound: f32 = blocks
                    .map(|(w, x)| {
                        let largest = x.iter().fold(0f32, |a, b| a.max(b.abs()));
                        largest / 254.0 * w.iter().map(|w| w.abs()).sum::<f32>()
                    })
                    .sum();
                let error = (f64::from(found) - expected).abs();
                assert!(error <= 1.0001 * f64::from(bound) + rounding, "{format} {kernels:?} {d}");
            }
        }
    }
}

#[test]
fn a_rounded_scale_times_that_of_a_block_is_exact() {
    let mut seeded = Seeded::new(12);
    for (scale, of_block) in seeded.normal(2000).into_iter().zip(Seeded::new(13).normal(2000)) {
        let of_block = half::f16::from_f32(of_block).to_f32();
        for format in [WeightFormat::Q8_0, WeightFormat::Q4_0] {
            let rounded = format.round_scale(scale);
            let product = f64::from(rounded) * f64::from(of_block);
            assert_eq!(f64::from(rounded * of_block), product, "{scale} {of_block}");
            assert!((rounded - scale).abs() <= scale.abs() / (1 << 13) as f32, "{scale} {rounded}");
        }
        assert_eq!(WeightFormat::F16.round_scale(scale), scale);
    }
    let rounded = [0.0, f32::MIN_POSITIVE, 1e-45, -1.5].map(|s| WeightFormat::Q8_0.round_scale(s));
    assert_eq!(rounded, [0.0, f32::MIN_POSITIVE, 1e-45, -1.5]);
    for broken in [f32::NAN, f32::INFINITY, f32::MAX] {
        assert!(WeightFormat::Q8_0.round_scale(broken).is_nan(), "{broken}");
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
                axpy(kernels, &w, &scales, false, &mut y);
                let mut rows = vec![0.0; n * d];
                for (row, values) in rows.chunks_exact_mut(d).enumerate() {
                    w.row_to_f32(row, values);
                }
                for t in 0..n_tokens {
                    let scales = &scales[t * n..][..n];
                    let scales: Vec<f32> = scales.iter().map(|&s| format.round_scale(s)).collect();
                    for c in 0..d {
                        let column: Vec<f32> = (0..n).map(|row| rows[row * d + c]).collect();
                        let terms = column.iter().zip(&scales);
                        let expected: f64 = terms.map(|(w, s)| f64::from(*w) * f64::from(*s)).sum();
                        let found = f64::from(y[t * d + c]);
                        assert!(
                            (found - expected).abs() <= f64::from(dot_bound(&column, &scales)),
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
fn a_block_has_the_same_bits_whatever_is_picked_of_it() {
    for (format, kernels) in cases() {
        for (d, n) in [(96usize, 64), (544, 37)] {
            let (d, n_tokens) = (d.next_multiple_of(format.block_len()), 9);
            let w = matrix(format, n, d, 14);
            let x = Seeded::new(15).normal(n_tokens * d);
            let mut expected = vec![0.0; n_tokens * n];
            matvec(kernels, &w, &x, &mut expected);
            let mut scratch = InputScratch::default();
            let inputs = Inputs::new(kernels, &[format], d, &x, &mut scratch);
            for density in [0.0, 0.1, 0.7, 1.0] {
                let mut random = Seeded::new(16);
                let mask = |_| (0..n).fold(0, |m, r| m | u64::from(random.chance(density)) << r);
                let masks: Vec<u64> = (0..n_tokens).map(mask).collect();
                let mut found = vec![f32::NAN; n_tokens * n];
                panel::block_products(
                    &mut PanelScratch::default(),
                    kernels,
                    (&w, 0),
                    (inputs, &masks),
                    |t, r, products| found[t * n + r..][..products.len()].copy_from_slice(products),
                );
                for t in 0..n_tokens {
                    for r in 0..n {
                        let (found, expected) = (found[t * n + r], expected[t * n + r]);
                        // what nobody asked for may have been computed all the same
                        if masks[t] >> r & 1 == 1 || !found.is_nan() {
                            assert_eq!(found, expected, "{format} {kernels:?} {density}");
                        }
                    }
                }
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
            axpy(kernels, &w, &scales, true, &mut together);
            let mut dense = vec![0.0; n_tokens * d];
            axpy(kernels, &w, &scales, false, &mut dense);
            assert_eq!(together, dense, "{format} {kernels:?} d {d}");
            for t in 0..n_tokens {
                let scales = &scales[t * n..][..n];
                let mut alone = vec![0.0; d];
                axpy_all(kernels, &w, scales, &mut alone);
                let ids: Vec<u32> =
                    (0..n as u32).filter(|&id| scales[id as usize] != 0.0).collect();
                let picked_scales: Vec<f32> = ids.iter().map(|&id| scales[id as usize]).collect();
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
                    axpy(RowKernels::best(), &w, &h, true, &mut y);
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
        axpy_all(kernels, &none, &[], &mut y);
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
            (kernels.primitives(format).decode)(w.row(0), &mut found);
            assert_eq!(expected, found, "{format} {kernels:?} d {d}");
        }
    }
}

/// Without it the other tests would compare the scalar table with itself.
#[cfg(target_arch = "aarch64")]
#[test]
fn every_arm_cpu_of_64_bits_has_the_neon_kernels() {
    assert_eq!(RowKernels::best().name(), "neon");
}

#[test]
fn every_half_decodes_to_its_bits_in_every_table() {
    let halves: Vec<u16> = (0..=u16::MAX).collect();
    for kernels in RowKernels::available() {
        let mut found = vec![0.0; halves.len()];
        let decode = kernels.primitives(WeightFormat::F16).decode;
        decode(bytemuck::cast_slice(&halves), &mut found);
        for (&half, found) in halves.iter().zip(found) {
            let expected = half::f16::from_bits(half).to_f32();
            assert_eq!(found.to_bits(), expected.to_bits(), "{kernels:?} {half:#x}");
        }
    }
}

#[test]
fn the_largest_whole_numbers_are_multiplied_exactly() {
    // one and a half groups, and numbers that no encoder writes
    let (n, d) = (3, 192);
    let block = [&half::f16::ONE.to_le_bytes()[..], &[i8::MIN as u8; 32]].concat();
    let w = NeuronMatrix::try_from_rows(WeightFormat::Q8_0, n, d, |_, row| {
        row.copy_from_slice(&block.repeat(d / 32));
        Ok::<_, OpError>(())
    });
    let w = w.unwrap();
    for kernels in RowKernels::available() {
        for n_tokens in [1, 7] {
            for x in [127.0, -127.0] {
                let mut out = vec![0.0; n_tokens * n];
                matvec(kernels, &w, &vec![x; n_tokens * d], &mut out);
                assert_eq!(out, vec![-128.0 * x * d as f32; n_tokens * n], "{kernels:?}");
            }
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

#[test]
fn rows_at_odd_addresses_and_in_another_order_give_the_same_bits() {
    for (format, kernels) in cases() {
        for d in lengths(format) {
            let (n, n_tokens) = (70, 5);
            let w = matrix(format, n, d, 17);
            let order: Vec<u32> = (0..n as u32).map(|row| (row * 3 + 1) % n as u32).collect();
            for first in [1, 3] {
                let mut bytes = vec![0xA5; first];
                let mut places: Vec<usize> = (0..n).collect();
                places.sort_by_key(|&row| order[row]);
                places.into_iter().for_each(|row| bytes.extend_from_slice(w.row(row)));
                let range = first..bytes.len();
                let bytes = crate::SharedBytes::new(std::sync::Arc::new(bytes), range);
                let order = Some(order.clone().into());
                let odd = NeuronMatrix::from_shared(format, [n, d], bytes, order).unwrap();
                let x = Seeded::new(18).normal(n_tokens * d);
                let scales = Seeded::new(19).normal(n_tokens * n);
                let run = |w: &NeuronMatrix| {
                    let mut products = vec![0.0; n_tokens * n];
                    matvec(kernels, w, &x, &mut products);
                    let mut sums = vec![0.0; n_tokens * d];
                    axpy(kernels, w, &scales, false, &mut sums);
                    for ids in [vec![], vec![0, 5, 6, 7, 69], (0..n as u32).collect()] {
                        let mut picked = vec![0.0; ids.len()];
                        matvec_picked(kernels, w, &ids, &x[..d], &mut picked);
                        products.extend(picked);
                        let mut sum = vec![0.0; d];
                        axpy_picked(kernels, w, (&ids, &scales[..ids.len()]), &mut sum);
                        sums.extend(sum);
                    }
                    (products, sums)
                };
                assert!(run(&odd) == run(&w), "{format} {kernels:?} d {d} at {first}");
            }
        }
    }
}
