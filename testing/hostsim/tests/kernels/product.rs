//! Products of rows: `sparse_matvec.cu` and `quantize.cu`.

use candle_core::{Device, Tensor};
use hostsim::queue::Address;
use hostsim::row_layout::RowLayout;
use hostsim::steps::{
    Addends, DeviceInput, Finish, Parts, Rows, Then, Values, axpy, matvec, quantize,
};
use hostsim::{HostBuffer, HostQueue};
use powerinfer_ops::{Activation, WeightFormat, linear};
use testing::tolerance::dot_bound;
use testing::{Seeded, assert_close, assert_same_bits};

use crate::device::{Ids, ORDERS, Tokens, Weights, assert_within, lists, widths};

/// A matrix, tokens and a list.
pub(crate) struct Case {
    pub(crate) weights: Weights,
    pub(crate) x: Tokens,
    pub(crate) ids: Option<Vec<u32>>,
}

impl Case {
    /// What the kernels give, `[n_tokens, n listed]`.
    pub(crate) fn run(&self, queue: &HostQueue, finish: Finish) -> Result<Vec<f32>, String> {
        let n = self.weights.host.n_neurons();
        let input = self.x.input();
        if self.weights.rows().layout.takes_numbers() {
            quantize(queue, &input, Address::NULL).map_err(|error| error.to_string())?;
        }
        let device_ids = self.ids.as_deref().map(Ids::of);
        let rows = device_ids.as_ref().map_or(Rows::All, |list| {
            let (ids, count) = list.addresses();
            Rows::Listed { ids, count }
        });
        let out = HostBuffer::new(input.n_tokens * n * 4);
        matvec(
            queue,
            &self.weights.rows(),
            rows,
            &input,
            finish,
            Values { address: out.address(), stride: n, by_row: false },
        )
        .map_err(|error| error.to_string())?;
        if out.is_overrun() || self.x.buffers.iter().any(HostBuffer::is_overrun) {
            return Err("written beyond a buffer".to_owned());
        }
        let len = self.ids.as_ref().map_or(n, Vec::len);
        let out = out.to_f32();
        let unwritten = out.chunks(n.max(1)).flat_map(|row| &row[len..]);
        if unwritten.into_iter().any(|value| !value.is_nan()) {
            return Err("written beyond the list".to_owned());
        }
        Ok(out.chunks(n.max(1)).flat_map(|row| row[..len].to_vec()).collect())
    }

    /// What the CPU's operator gives, and how far from it rounding may lead.
    pub(crate) fn expected(&self) -> (Vec<f32>, Vec<f32>) {
        let (n, d) = (self.weights.host.n_neurons(), self.weights.host.d_model());
        let n_tokens = self.x.input().n_tokens;
        let x = Tensor::from_slice(&self.x.values, (n_tokens, d), &Device::Cpu).unwrap();
        let all: Vec<f32> =
            linear(&self.weights.host, None, &x).unwrap().flatten_all().unwrap().to_vec1().unwrap();
        let all_ids: Vec<u32> = (0..u32::try_from(n).unwrap()).collect();
        let ids = self.ids.as_ref().unwrap_or(&all_ids);
        let places = (0..n_tokens).flat_map(|t| ids.iter().map(move |&id| (t, id as usize)));
        places
            .map(|(t, id)| (all[t * n + id], dot_bound(&self.weights.row(id), self.x.token(t))))
            .unzip()
    }
}

#[test]
fn products_are_the_cpu_s_over_every_format_width_list_and_order() {
    for format in RowLayout::FORMATS {
        for (at, d) in widths(format).into_iter().enumerate() {
            let n = [1, 2, 37, 13][at % 4];
            for (list, ids) in lists(n, 5).into_iter().enumerate() {
                let seed = d as u64;
                let case = Case {
                    weights: Weights::random(format, n, d, seed),
                    x: Tokens::random([1, 2, 4, 7][list], d, seed + 1),
                    ids: Some(ids),
                };
                let (expected, bounds) = case.expected();
                let mut first: Option<Vec<f32>> = None;
                for order in ORDERS {
                    let what = format!("{format}, {n} × {d}, list {list}, order {order}");
                    let found = case.run(&HostQueue::new(order), Finish::NOTHING).unwrap();
                    assert_close(&found, &expected, &bounds, &what);
                    assert_same_bits(first.get_or_insert(found.clone()), &found, &what);
                }
            }
        }
    }
}

#[test]
fn a_product_has_the_same_bits_alone_and_among_others() {
    for format in RowLayout::FORMATS {
        let (n, d) = (9, 544);
        let weights = Weights::random(format, n, d, 3);
        let together = Case { weights, x: Tokens::random(6, d, 4), ids: None };
        let all = together.run(&HostQueue::new(0), Finish::NOTHING).unwrap();
        for t in 0..6 {
            let x = Tokens::of(together.x.token(t).to_vec(), 1, d);
            let weights = Weights::of(together.weights.host.clone());
            let alone = Case { weights, x, ids: Some(vec![2, 5]) };
            let found = alone.run(&HostQueue::new(0), Finish::NOTHING).unwrap();
            assert_same_bits(&found, &[all[t * n + 2], all[t * n + 5]], format!("{format}"));
        }
    }
}

#[test]
fn tokens_may_begin_at_any_float() {
    let (n, d) = (5, 64);
    let weights = Weights::random(WeightFormat::F16, n, d, 1);
    let values = Seeded::new(2).normal(1 + d);
    let (there, out) = (HostBuffer::of_f32(&values), HostBuffer::new(n * 4));
    let x = Tokens::of(values[1..].to_vec(), 1, d);
    let shifted = DeviceInput { values: there.address().offset(4), ..x.input() };
    let to = Values { address: out.address(), stride: n, by_row: false };
    matvec(&HostQueue::new(0), &weights.rows(), Rows::All, &shifted, Finish::NOTHING, to).unwrap();
    let case = Case { weights, x, ids: None };
    assert_same_bits(&out.to_f32(), &case.run(&HostQueue::new(0), Finish::NOTHING).unwrap(), "x");
}

#[test]
fn more_rows_than_there_are_warps_are_all_computed() {
    let (n, d) = (9000, 1);
    let case = Case {
        weights: Weights::random(WeightFormat::F32, n, d, 1),
        x: Tokens::of(vec![1.0], 1, 1),
        ids: None,
    };
    let found = case.run(&HostQueue::new(0), Finish::NOTHING).unwrap();
    assert_same_bits(&found, &case.expected().0, "ones");
}

#[test]
fn a_product_is_finished_with_bias_activation_and_factor() {
    let (n, d) = (40, 8);
    let weights = Weights::random(WeightFormat::F16, n, d, 1);
    let case = Case { weights, x: Tokens::random(2, d, 2), ids: None };
    let (products, _) = case.expected();
    let bias = Seeded::new(3).normal(n);
    let mut factor = Seeded::new(4).normal(2 * n);
    (factor[0], factor[n]) = (0.0, f32::NAN);
    let (bias_buffer, factor_buffer) = (HostBuffer::of_f32(&bias), HostBuffer::of_f32(&factor));
    let functions = [
        (Then::Nothing, None),
        (Then::Activation(Activation::Relu), Some(Activation::Relu)),
        (
            Then::Activation(Activation::FatRelu { threshold: 0.5 }),
            Some(Activation::FatRelu { threshold: 0.5 }),
        ),
        (Then::Activation(Activation::Silu), Some(Activation::Silu)),
        (Then::Activation(Activation::Gelu), Some(Activation::Gelu)),
    ];
    for (then, activation) in functions {
        let finish = Finish { bias: bias_buffer.address(), then, factor: factor_buffer.address() };
        let found = case.run(&HostQueue::new(0), finish).unwrap();
        for (i, found) in found.into_iter().enumerate() {
            let value = products[i] + bias[i % n];
            let value = activation.map_or(value, |activation| activation.apply(value));
            let expected = if factor[i] == 0.0 { 0.0 } else { factor[i] * value };
            // silu and gelu of the CPU are candle's approximations
            let near = (found - expected).abs() <= 2e-5 * (1.0 + expected.abs());
            assert!(
                near || (found.is_nan() && expected.is_nan()),
                "{then:?} {i}: {found} {expected}"
            );
        }
    }
}

/// Numbers, scales, sums and norms of some tokens.
pub(crate) fn quantized(queue: &HostQueue, x: &Tokens) -> Result<[Vec<f32>; 3], String> {
    quantize(queue, &x.input(), x.input().numbers.norms).map_err(|error| error.to_string())?;
    assert_within(&x.buffers.each_ref());
    let numbers = x.buffers[1].bytes().into_iter().map(|byte| f32::from(byte as i8)).collect();
    Ok([numbers, x.buffers[2].to_f32(), x.buffers[3].to_f32()])
}

#[test]
fn tokens_are_rounded_to_the_nearest_of_255_levels() {
    for d in [1, 31, 32, 33, 100, 4544] {
        let x = Tokens::random(3, d, d as u64);
        for order in ORDERS {
            let [numbers, scales, norms] = quantized(&HostQueue::new(order), &x).unwrap();
            let width = numbers.len() / 3;
            for (t, values) in x.values.chunks(d).enumerate() {
                let square: f64 = values.iter().map(|&v| f64::from(v).powi(2)).sum();
                assert!((f64::from(norms[t]) - square.sqrt()).abs() <= 1e-5 * square.sqrt());
                for block in 0..width / 32 {
                    let numbers = &numbers[t * width + block * 32..][..32];
                    let at = 2 * (t * width / 32 + block);
                    assert_eq!(numbers.iter().sum::<f32>(), scales[at + 1], "sum of a block");
                    let values = values.chunks(32).nth(block).unwrap_or_default();
                    let largest = values.iter().fold(0f32, |most, v| most.max(v.abs()));
                    assert_eq!(scales[at], largest / 127.0);
                    for (i, number) in numbers.iter().enumerate() {
                        let value = values.get(i).copied().unwrap_or(0.0);
                        let off = (number * scales[at] - value).abs();
                        assert!(off <= largest / 254.0 * 1.0001, "{value} {number}");
                    }
                }
            }
        }
    }
}

#[test]
fn what_is_not_finite_shows_in_the_scale_and_next_to_nothing_is_zero() {
    let mut values = vec![1.0; 96];
    (values[40], values[70]) = (f32::INFINITY, -2.5);
    values[64..].iter_mut().for_each(|value| *value *= 1e-37);
    let x = Tokens::of(values, 1, 96);
    let [numbers, scales, _] = quantized(&HostQueue::new(0), &x).unwrap();
    assert_eq!((scales[0], scales[1]), (1.0 / 127.0, 32.0 * 127.0));
    assert!(scales[2].is_nan());
    assert_eq!(scales[4], 0.0);
    assert!(numbers[64..].iter().all(|&number| number == 0.0));
}

#[test]
fn products_and_scales_may_lie_in_the_places_of_their_rows() {
    let (n, d, ids) = (40, 33, vec![1u32, 7, 39]);
    let weights = Weights::random(WeightFormat::BF16, n, d, 1);
    let (x, list, queue) = (Tokens::random(1, d, 2), Ids::of(&ids), HostQueue::new(0));
    let (address, count) = list.addresses();
    let rows = Rows::Listed { ids: address, count };
    let all = HostBuffer::new(n * 4);
    let by_row = Values { address: all.address(), stride: n, by_row: true };
    matvec(&queue, &weights.rows(), rows, &x.input(), Finish::NOTHING, by_row).unwrap();
    let found = all.to_f32();
    let case = Case { weights, x, ids: Some(ids.clone()) };
    let expected = case.run(&queue, Finish::NOTHING).unwrap();
    for (place, &id) in ids.iter().enumerate() {
        assert_eq!(found[id as usize].to_bits(), expected[place].to_bits());
    }
    assert_eq!(found.iter().filter(|value| !value.is_nan()).count(), ids.len());

    let parts = Parts::of(n);
    let starts: Vec<u32> = (0..=parts.n)
        .map(|part| ids.partition_point(|&id| (id as usize) < part * parts.len) as u32)
        .collect();
    let starts = HostBuffer::of_u32(&starts);
    let sum = |scales: Values| {
        let addends = Addends { rows, starts: starts.address(), scales, n_tokens: 1 };
        let memory = [parts.sums_bytes(1, d), d * 4].map(HostBuffer::new);
        let to = [Address::NULL, memory[1].address()];
        axpy(&queue, &case.weights.rows(), &addends, memory[0].address(), to).unwrap();
        memory[1].to_f32()
    };
    let listed = HostBuffer::of_f32(&expected);
    let by_place = Values { address: listed.address(), stride: ids.len(), by_row: false };
    assert_same_bits(&sum(by_row), &sum(by_place), "sums");
}
