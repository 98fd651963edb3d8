//! Weighted sums of rows: `sparse_axpy.cu`, over lists that `compact.cu` makes.

use hostsim::queue::Address;
use hostsim::row_layout::RowLayout;
use hostsim::steps::{Addends, Parts, Rows, Values, axpy};
use hostsim::{HostBuffer, HostQueue};
use testing::tolerance::weighted_sum_bounds;
use testing::{Seeded, assert_close, assert_same_bits};

use crate::device::{ORDERS, Weights, lists, widths};
use crate::list::{Listed, compacted};

/// The sums over the rows that any token has a scale for, or over all, and of `add`.
pub(crate) fn sums(
    queue: &HostQueue,
    weights: &Weights,
    (scales, n_tokens): (&[f32], usize),
    listed: bool,
    add: Option<&[f32]>,
) -> Result<Vec<f32>, String> {
    let (n, d) = (weights.host.n_neurons(), weights.host.d_model());
    let all = HostBuffer::of_f32(scales);
    let list: Option<Listed> =
        if listed { Some(compacted(queue, (scales, n_tokens, n), None)?) } else { None };
    let values = |address| Values { address, stride: n, by_row: false };
    let addends = match &list {
        Some(list) => Addends {
            rows: list.list().rows(),
            starts: list.starts.address(),
            scales: values(list.values.address()),
            n_tokens,
        },
        None => Addends {
            rows: Rows::All,
            starts: Address::NULL,
            scales: values(all.address()),
            n_tokens,
        },
    };
    let parts = HostBuffer::new(Parts::of(n).sums_bytes(n_tokens, d));
    let out = HostBuffer::new(n_tokens * d * 4);
    let add = add.map(HostBuffer::of_f32);
    let add = add.as_ref().map_or(Address::NULL, HostBuffer::address);
    axpy(queue, &weights.rows(), &addends, parts.address(), [add, out.address()])
        .map_err(|error| error.to_string())?;
    if out.is_overrun() || parts.is_overrun() {
        return Err("written beyond a buffer".to_owned());
    }
    Ok(out.to_f32())
}

/// Scales `[n_tokens, n]` that are zero but for one token's list each.
pub(crate) fn scales(n: usize, n_tokens: usize, seed: u64) -> Vec<f32> {
    let lists = lists(n, seed);
    let mut scales = vec![0.0; n_tokens * n];
    for t in 0..n_tokens {
        let values = Seeded::new(seed + t as u64).normal(n);
        for &id in &lists[(t + 2) % 4] {
            scales[t * n + id as usize] = values[id as usize];
        }
    }
    scales
}

/// The definition, and how far from it rounding may lead.
pub(crate) fn expected(weights: &Weights, scales: &[f32], n_tokens: usize) -> (Vec<f32>, Vec<f32>) {
    let (n, d) = (weights.host.n_neurons(), weights.host.d_model());
    let rows: Vec<f32> = (0..n).flat_map(|row| weights.row(row)).collect();
    let (mut sums, mut bounds) = (vec![0f64; n_tokens * d], Vec::new());
    for (t, sums) in sums.chunks_exact_mut(d).enumerate() {
        let format = weights.host.format();
        let scales = scales[t * n..][..n].iter().map(|&scale| format.round_scale(scale));
        let scales: Vec<f32> = scales.collect();
        for (scale, row) in scales.iter().zip(rows.chunks_exact(d)) {
            for (sum, value) in sums.iter_mut().zip(row) {
                *sum += f64::from(*scale) * f64::from(*value);
            }
        }
        bounds.extend(weighted_sum_bounds(&scales, &rows, d));
    }
    (sums.into_iter().map(|sum| sum as f32).collect(), bounds)
}

#[test]
fn sums_are_the_definition_s_over_every_format_width_list_and_order() {
    for format in RowLayout::FORMATS {
        for (at, d) in widths(format).into_iter().enumerate() {
            let (n, n_tokens) = ([1, 37, 130, 64][at % 4], [1, 1, 3, 5][at % 4]);
            let weights = Weights::random(format, n, d, at as u64);
            let scales = scales(n, n_tokens, 7 + at as u64);
            let (expected, bounds) = expected(&weights, &scales, n_tokens);
            for order in ORDERS {
                let what = format!("{format}, {n} × {d}, order {order}");
                let queue = HostQueue::new(order);
                let listed = sums(&queue, &weights, (&scales, n_tokens), true, None).unwrap();
                assert_close(&listed, &expected, &bounds, &what);
                // leaving a neuron out changes no bit
                let all = sums(&queue, &weights, (&scales, n_tokens), false, None).unwrap();
                assert_same_bits(&listed, &all, &what);
            }
        }
    }
}

#[test]
fn a_token_s_sum_has_the_same_bits_alone_and_among_others() {
    for format in RowLayout::FORMATS {
        let (n, d) = (200, 96);
        let weights = Weights::random(format, n, d, 1);
        let scales = scales(n, 6, 2);
        let queue = HostQueue::new(0);
        let together = sums(&queue, &weights, (&scales, 6), true, None).unwrap();
        for t in 0..6 {
            let alone = sums(&queue, &weights, (&scales[t * n..][..n], 1), true, None).unwrap();
            assert_same_bits(&alone, &together[t * d..][..d], format!("{format}, token {t}"));
        }
    }
}

#[test]
fn what_is_to_be_added_is_and_no_rows_add_nothing() {
    for n in [0, 5] {
        let weights = Weights::random(RowLayout::FORMATS[1], n, 9, 1);
        let add = Seeded::new(2).normal(9);
        let queue = HostQueue::new(0);
        let found = sums(&queue, &weights, (&vec![0.0; n], 1), false, Some(&add)).unwrap();
        assert_same_bits(&found, &add, "nothing fires");
    }
}
