//! What a user of the operators may rely on, through the public interface.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::ops::Range;

use candle_core::{DType, Device, Tensor};
use powerinfer_ops::attention::{
    AttentionShape, KvDtype, KvLayout, KvPage, KvPages, PAGE_LEN, causal_attention,
};
use powerinfer_ops::{
    Activation, ActivationMask, FfnWeights, GateEstimate, LowBitFormat, NeuronIds, NeuronMatrix,
    NeuronScores, Neurons, OpError, WeightFormat, Workspace, ffn, ffn_activations, linear,
    sparse_axpy, sparse_matvec,
};
use proptest::prelude::*;
use testing::tolerance::dot_bound;
use testing::{Seeded, assert_same_bits};

fn matrix(format: WeightFormat, n: usize, d: usize, seed: u64) -> NeuronMatrix {
    NeuronMatrix::from_f32(format, n, d, &Seeded::new(seed).normal(n * d)).unwrap()
}

fn tensor(n_tokens: usize, d: usize, seed: u64) -> Tensor {
    Tensor::from_vec(Seeded::new(seed).normal(n_tokens * d), (n_tokens, d), &Device::Cpu).unwrap()
}

fn values(tensor: &Tensor) -> Vec<f32> {
    tensor.flatten_all().unwrap().to_vec1().unwrap()
}

fn random_mask(n_tokens: usize, n: usize, density: f32, seed: u64) -> ActivationMask {
    let mut random = Seeded::new(seed);
    let ids: Vec<NeuronIds> =
        (0..n_tokens).map(|_| NeuronIds::from_sorted(random.ids(n, density)).unwrap()).collect();
    ActivationMask::from_ids(&ids, n).unwrap()
}

fn any_format() -> impl Strategy<Value = WeightFormat> {
    prop::sample::select(WeightFormat::ALL.to_vec())
}

/// A format and a width that its rows can have.
fn format_and_width() -> impl Strategy<Value = (WeightFormat, usize)> {
    (any_format(), 1usize..90)
        .prop_map(|(format, d)| (format, d.next_multiple_of(format.block_len())))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn sparse_matvec_is_the_dense_product_where_the_mask_is_set_and_zero_elsewhere(
        (format, d) in format_and_width(), n in 1usize..90, n_tokens in 1usize..6,
        density in 0f32..1.0, seed: u64,
    ) {
        let (w, x) = (matrix(format, n, d, seed), tensor(n_tokens, d, seed ^ 1));
        let mask = random_mask(n_tokens, n, density, seed ^ 2);
        let dense = values(&linear(&w, None, &x).unwrap());
        let sparse = values(&sparse_matvec(&w, &mask, &x).unwrap());
        for (i, (sparse, dense)) in sparse.iter().zip(&dense).enumerate() {
            let expected = if mask.get(i / n, i % n) { *dense } else { 0.0 };
            prop_assert_eq!(sparse.to_bits(), expected.to_bits());
        }
    }

    #[test]
    fn sparse_axpy_is_the_sum_of_the_picked_rows(
        (format, d) in format_and_width(), n in 1usize..90, n_tokens in 1usize..6,
        density in 0f32..1.0, seed: u64,
    ) {
        let (w, h) = (matrix(format, n, d, seed), tensor(n_tokens, n, seed ^ 1));
        let mask = random_mask(n_tokens, n, density, seed ^ 2);
        let found = values(&sparse_axpy(&w, &mask, &h).unwrap());
        let h = values(&h);
        let mut rows = vec![0.0; n * d];
        rows.chunks_exact_mut(d).enumerate().for_each(|(i, row)| w.row_to_f32(i, row));
        for t in 0..n_tokens {
            let ids = mask.ids(t);
            for c in 0..d {
                let pick = |values: &dyn Fn(usize) -> f32| -> Vec<f32> {
                    ids.as_slice().iter().map(|&id| values(id as usize)).collect()
                };
                let (column, scales) = (pick(&|i| rows[i * d + c]), pick(&|i| h[t * n + i]));
                let products = column.iter().zip(&scales).map(|(w, h)| f64::from(*w) * f64::from(*h));
                let expected: f64 = products.sum();
                let found = f64::from(found[t * d + c]);
                let mut bound = f64::from(dot_bound(&column, &scales));
                if matches!(format, WeightFormat::Q8_0 | WeightFormat::Q4_0) {
                    // scales are rounded to 13 bits
                    let terms = column.iter().zip(&scales).map(|(w, h)| f64::from((w * h).abs()));
                    bound += terms.sum::<f64>() / f64::from(1 << 13);
                }
                prop_assert!((found - expected).abs() <= bound, "{found} {expected}");
            }
        }
    }

    #[test]
    fn a_network_of_all_firing_or_rightly_picked_neurons_gives_the_same_bits(
        (format, d) in format_and_width(), n in 1usize..120, n_tokens in 1usize..7,
        gated: bool, biased: bool, drelu: bool, shift in -2f32..2.0, seed: u64,
    ) {
        let mut weights = network(format, n, d, (gated, biased, shift), seed);
        weights = weights.with_up_activation(drelu.then_some(Activation::Relu));
        let x = tensor(n_tokens, d, seed ^ 9);
        let mut workspace = Workspace::default();
        let mut run = |neurons: Neurons<'_>, x: &Tensor| {
            let (y, counts) = ffn(&weights, neurons, x, &mut workspace).unwrap();
            (values(&y), counts)
        };
        let (all, dense_counts) = run(Neurons::All, &x);
        let (firing, counts) = run(Neurons::Firing, &x);
        assert_same_bits(&firing, &all, "firing");
        prop_assert_eq!(counts.fired, dense_counts.fired);
        prop_assert_eq!(dense_counts.ran, (n * n_tokens) as u64);
        prop_assert!(counts.ran <= counts.fired && (gated && drelu || counts.ran == counts.fired));
        // everything picked
        let picks = vec![NeuronIds::all(n); n_tokens];
        let (picked, picked_counts) = run(Neurons::FiringOf(&picks), &x);
        assert_same_bits(&picked, &all, "all picked");
        prop_assert_eq!(picked_counts.fired, counts.fired);
        // one token at a time
        for t in 0..n_tokens {
            let (alone, _) = run(Neurons::Firing, &x.narrow(0, t, 1).unwrap());
            assert_same_bits(&alone, &all[t * d..][..d], "alone");
        }
        // nothing picked
        let (nothing, counts) = run(Neurons::FiringOf(&vec![NeuronIds::new(); n_tokens]), &x);
        prop_assert!(nothing.iter().all(|&y| y == 0.0) && counts.fired == 0);
    }

    #[test]
    fn a_predictor_run_with_the_network_gives_the_bits_of_its_list_however_tokens_are_grouped(
        (format, d) in format_and_width(), n in 1usize..600, n_tokens in 1usize..7,
        bits in 0usize..3, margin in -1f32..2.0, shift in -2f32..2.0, seed: u64,
    ) {
        let weights = network(format, n, d, (true, true, shift), seed);
        let x = tensor(n_tokens, d, seed ^ 9);
        let mut workspace = Workspace::default();
        let mut run = |neurons: Neurons<'_>, x: &Tensor| {
            let (y, counts) = ffn(&weights, neurons, x, &mut workspace).unwrap();
            (values(&y), counts)
        };
        let estimate = GateEstimate::new(
            LowBitFormat::ALL[bits], &weights.gate, weights.gate_bias.as_deref(), weights.activation,
        ).unwrap();
        let mut picks = Vec::new();
        estimate.pick(&values(&x), margin, &mut picks);
        let (scores, hidden) = (matrix(format, n, d, seed ^ 4), values(&tensor(n_tokens, d, seed ^ 5)));
        let scored = |t: std::ops::Range<usize>| Neurons::Scored(NeuronScores {
            rows: &scores, hidden: &hidden[t.start * d..t.end * d], threshold: margin,
        });
        let products = values(&linear(&scores, None, &tensor(n_tokens, d, seed ^ 5)).unwrap());
        let score_picks: Vec<NeuronIds> = products.chunks(n).map(|scores| {
            let ids = (0..n as u32).filter(|&id| scores[id as usize] >= margin);
            NeuronIds::from_sorted(ids.collect()).unwrap()
        }).collect();
        for (picks, whole) in [
            (&picks, run(Neurons::Estimated(&estimate, margin), &x)),
            (&score_picks, run(scored(0..n_tokens), &x)),
        ] {
            let (listed, counts) = run(Neurons::FiringOf(picks), &x);
            assert_same_bits(&whole.0, &listed, "its list");
            prop_assert_eq!(whole.1.picked, picks.iter().map(|ids| ids.len() as u64).sum::<u64>());
            prop_assert_eq!((whole.1.fired, whole.1.ran), (counts.fired, counts.ran));
        }
        for t in 0..n_tokens {
            let x_t = x.narrow(0, t, 1).unwrap();
            for (neurons, of_all) in
                [(Neurons::Estimated(&estimate, margin), &picks), (scored(t..t + 1), &score_picks)]
            {
                let (alone, counts) = run(neurons, &x_t);
                let (listed, _) = run(Neurons::FiringOf(&of_all[t..=t]), &x_t);
                assert_same_bits(&alone, &listed, "alone");
                prop_assert_eq!(counts.picked, of_all[t].len() as u64);
            }
        }
    }

    #[test]
    fn activations_are_zero_for_what_does_not_run_and_give_the_output(
        n in 1usize..120, n_tokens in 1usize..4, shift in -2f32..2.0, seed: u64,
    ) {
        let d = 40;
        let weights = network(WeightFormat::F32, n, d, (true, true, shift), seed);
        let x = tensor(n_tokens, d, seed ^ 9);
        let mut h = vec![7.0; 3];
        ffn_activations(&weights, &x, &mut h).unwrap();
        let (y, counts) = ffn(&weights, Neurons::Firing, &x, &mut Workspace::default()).unwrap();
        prop_assert_eq!(h.iter().filter(|&&h| h != 0.0).count() as u64, counts.ran);
        let h = Tensor::from_vec(h, (n_tokens, n), &Device::Cpu).unwrap();
        let mask = random_mask(n_tokens, n, 1.0, seed);
        let again = sparse_axpy(&weights.down, &mask, &h).unwrap();
        assert_same_bits(&values(&again), &values(&y), "down");
    }

    #[test]
    fn the_two_sides_of_any_partition_add_up_to_the_whole(
        (format, d) in format_and_width(), n in 1usize..120, n_tokens in 1usize..7,
        share in 0f32..1.0, seed: u64,
    ) {
        let weights = network(format, n, d, (true, true, 0.0), seed);
        let x = tensor(n_tokens, d, seed ^ 9);
        let hot = NeuronIds::from_sorted(Seeded::new(seed).ids(n, share)).unwrap();
        let cold = (0..n as u32).filter(|id| !hot.as_slice().contains(id)).collect();
        let cold = NeuronIds::from_sorted(cold).unwrap();
        for neurons in [Neurons::All, Neurons::Firing] {
            let run = |weights: &FfnWeights| {
                let (y, counts) = ffn(weights, neurons, &x, &mut Workspace::default()).unwrap();
                (values(&y), counts.fired)
            };
            let (whole, fired) = run(&weights);
            let (one, one_fired) = run(&weights.pick(&hot).unwrap());
            let (other, other_fired) = run(&weights.pick(&cold).unwrap());
            prop_assert_eq!(fired, one_fired + other_fired);
            for ((whole, one), other) in whole.iter().zip(one).zip(other) {
                let bound = 1e-5 * n as f32 * (1.0 + one.abs().max(other.abs()));
                prop_assert!((whole - (one + other)).abs() <= bound, "{whole} {one} {other}");
            }
        }
    }

    #[test]
    fn attention_is_its_definition(
        n_kv_heads in 1usize..4, group in 1usize..10, d_head in 1usize..70, dtype in kv_dtype(),
        n_before in 0usize..1100, n_tokens in 1usize..70, window in window(), seed: u64,
    ) {
        let n_heads = n_kv_heads * group;
        let n_positions = n_before + n_tokens;
        let pages = Pages::random(n_positions, KvLayout { n_kv_heads, d_head, dtype }, seed);
        let queries = tensor(n_tokens, n_heads * d_head, seed ^ 1);
        let scale = 1.0 / (d_head as f32).sqrt();
        let mut workspace = Workspace::default();
        let mut attend = |queries: &Tensor, first_position| {
            let shape = AttentionShape {
                n_heads,
                n_kv_heads,
                d_head,
                scale,
                first_position,
                window,
                alibi_slopes: None,
            };
            values(&causal_attention(queries, &pages, shape, &mut workspace).unwrap())
        };
        let found = attend(&queries, n_before);
        let q = values(&queries);
        for t in (0..n_tokens).step_by(5) {
            let end = n_before + t + 1;
            let seen = window.map_or(0, |window| end.saturating_sub(window))..end;
            for head in 0..n_heads {
                let at = (t * n_heads + head) * d_head;
                let expected = pages.attend(&q[at..][..d_head], head / group, seen.clone(), scale);
                for (found, expected) in found[at..][..d_head].iter().zip(expected) {
                    prop_assert!((f64::from(*found) - expected).abs() < 1e-5, "{found} {expected}");
                }
            }
            let alone = attend(&queries.narrow(0, t, 1).unwrap(), n_before + t);
            let width = n_heads * d_head;
            assert_same_bits(&alone, &found[t * width..][..width], "a query alone");
        }
    }
}

fn kv_dtype() -> impl Strategy<Value = KvDtype> {
    prop_oneof![Just(KvDtype::F32), Just(KvDtype::F16)]
}

fn window() -> impl Strategy<Value = Option<usize>> {
    prop_oneof![Just(None), (1usize..700).prop_map(Some)]
}

fn network(
    format: WeightFormat,
    n: usize,
    d: usize,
    (gated, biased, shift): (bool, bool, f32),
    seed: u64,
) -> FfnWeights {
    let up = gated.then(|| matrix(format, n, d, seed ^ 4));
    let (gate, down) = (matrix(format, n, d, seed ^ 3), matrix(format, n, d, seed ^ 5));
    let weights = FfnWeights::new(gate, up, down, Activation::Relu).unwrap();
    if !biased {
        return weights;
    }
    let gate_bias = Seeded::new(seed ^ 6).normal(n).iter().map(|bias| bias + shift).collect();
    let up_bias = gated.then(|| Seeded::new(seed ^ 7).normal(n));
    weights.with_biases(Some(gate_bias), up_bias).unwrap()
}

/// Keys and values in pages, and plain attention over them.
struct Pages(Vec<KvPage>);

impl Pages {
    fn random(n_positions: usize, layout: KvLayout, seed: u64) -> Self {
        let len = PAGE_LEN * layout.n_kv_heads * layout.d_head;
        let mut random = Seeded::new(seed ^ 2);
        let page = |_| {
            let mut page = KvPage::zeroed(layout).unwrap();
            page.write(0, &random.normal(len), &random.normal(len)).unwrap();
            page
        };
        Self((0..n_positions.div_ceil(PAGE_LEN)).map(page).collect())
    }

    fn attend(&self, query: &[f32], kv_head: usize, seen: Range<usize>, scale: f32) -> Vec<f64> {
        let (mut sums, mut total) = (vec![0.0; query.len()], 0.0);
        for p in seen {
            let page = &self.0[p / PAGE_LEN];
            let key = page.key(kv_head, p % PAGE_LEN);
            let products = key.iter().zip(query).map(|(k, q)| f64::from(*k) * f64::from(*q));
            let weight = (products.sum::<f64>() * f64::from(scale)).exp();
            for (sum, value) in sums.iter_mut().zip(page.value(kv_head, p % PAGE_LEN)) {
                *sum += weight * f64::from(value);
            }
            total += weight;
        }
        sums.iter().map(|sum| sum / total).collect()
    }
}

impl KvPages for Pages {
    fn page(&self, index: usize) -> &KvPage {
        &self.0[index]
    }
}

#[test]
fn wrong_operands_are_named() {
    let w = matrix(WeightFormat::F32, 4, 6, 1);
    let mask = ActivationMask::new(2, 4);
    let x = tensor(2, 6, 2);
    let wide = tensor(2, 7, 2);
    assert!(matches!(
        sparse_matvec(&w, &mask, &wide),
        Err(OpError::Shape { op: "sparse_matvec", what: "x", .. })
    ));
    assert!(matches!(
        sparse_matvec(&w, &ActivationMask::new(3, 4), &x),
        Err(OpError::Shape { op: "sparse_matvec", what: "mask", .. })
    ));
    assert!(matches!(
        sparse_axpy(&w, &mask, &x),
        Err(OpError::Shape { op: "sparse_axpy", what: "h", .. })
    ));
    assert!(matches!(
        linear(&w, None, &x.to_dtype(DType::F64).unwrap()),
        Err(OpError::Dtype { op: "linear", what: "x", found: DType::F64, .. })
    ));
    assert!(matches!(
        linear(&w, Some(&[0.0; 3]), &x),
        Err(OpError::Shape { op: "linear", what: "bias", .. })
    ));
    let strided = tensor(6, 2, 3).t().unwrap();
    assert!(matches!(linear(&w, None, &strided), Err(OpError::NotContiguous { what: "x", .. })));
    assert!(matches!(
        linear(&w, None, &x.reshape((1, 2, 6)).unwrap()),
        Err(OpError::Shape { what: "x", .. })
    ));
}

#[test]
fn a_window_into_a_larger_tensor_is_read_where_it_lies() {
    let w = matrix(WeightFormat::F16, 5, 6, 1);
    let x = tensor(4, 6, 2);
    let whole = values(&linear(&w, None, &x).unwrap());
    let window = values(&linear(&w, None, &x.narrow(0, 1, 2).unwrap()).unwrap());
    assert_same_bits(&window, &whole[5..15], "rows 1 and 2");
}

#[test]
fn a_custom_op_applied_by_hand_checks_as_well() {
    let op = powerinfer_ops::SparseMatvec {
        weights: matrix(WeightFormat::F32, 4, 6, 1),
        mask: ActivationMask::new(2, 4),
    };
    assert!(tensor(2, 6, 1).apply_op1_no_bwd(&op).is_ok());
    assert!(tensor(3, 6, 1).apply_op1_no_bwd(&op).is_err());
    assert!(tensor(2, 5, 1).apply_op1_no_bwd(&op).is_err());
    assert!(tensor(6, 2, 1).t().unwrap().apply_op1_no_bwd(&op).is_err());
}

#[test]
fn neurons_are_not_skipped_where_every_one_fires() {
    let m = |seed| matrix(WeightFormat::F32, 4, 6, seed);
    let weights = FfnWeights::new(m(1), Some(m(2)), m(3), Activation::Silu).unwrap();
    let x = tensor(1, 6, 4);
    let mut workspace = Workspace::default();
    assert!(ffn(&weights, Neurons::All, &x, &mut workspace).is_ok());
    assert!(matches!(
        ffn(&weights, Neurons::Firing, &x, &mut workspace),
        Err(OpError::NotSparse { activation: "silu" })
    ));
}

#[test]
fn a_network_is_checked_when_it_is_made_and_when_it_is_given_ids() {
    let m = |n, seed| matrix(WeightFormat::F32, n, 6, seed);
    assert!(matches!(
        FfnWeights::new(m(4, 1), Some(m(5, 2)), m(4, 3), Activation::Relu),
        Err(OpError::Shape { what: "up", .. })
    ));
    assert!(matches!(
        FfnWeights::new(m(4, 1), None, m(5, 3), Activation::Relu),
        Err(OpError::Shape { what: "down", .. })
    ));
    let weights = FfnWeights::new(m(4, 1), None, m(4, 3), Activation::Relu).unwrap();
    assert!(weights.clone().with_biases(Some(vec![0.0; 5]), None).is_err());
    let beyond = [NeuronIds::from_sorted(vec![4]).unwrap()];
    let run = |picks: &[NeuronIds]| {
        ffn(&weights, Neurons::FiringOf(picks), &tensor(1, 6, 4), &mut Workspace::default())
    };
    assert!(matches!(run(&beyond), Err(OpError::IdOutOfRange { id: 4, n_rows: 4, .. })));
    assert!(matches!(run(&[]), Err(OpError::Shape { what: "lists of ids", .. })));
}

#[test]
fn a_side_without_neurons_adds_nothing() {
    let weights = network(WeightFormat::F16, 5, 7, (true, true, 0.0), 1);
    let none = weights.pick(&NeuronIds::new()).unwrap();
    for n_tokens in [1, 3] {
        let x = tensor(n_tokens, 7, 2);
        let picks = vec![NeuronIds::new(); n_tokens];
        for neurons in [Neurons::All, Neurons::Firing, Neurons::FiringOf(&picks)] {
            let (y, counts) = ffn(&none, neurons, &x, &mut Workspace::default()).unwrap();
            assert_same_bits(&values(&y), &vec![0.0; n_tokens * 7], "nothing");
            assert_eq!((counts.fired, counts.ran, counts.bytes), (0, 0, 0));
        }
        let no_rows = matrix(WeightFormat::F32, 0, 7, 3);
        assert_eq!(linear(&no_rows, Some(&[]), &x).unwrap().dims(), [n_tokens, 0]);
    }
}

#[test]
fn a_nan_is_not_taken_for_a_neuron_that_does_not_fire() {
    let weights = network(WeightFormat::F32, 8, 4, (true, false, 0.0), 1);
    let x = Tensor::new(&[[1f32, f32::NAN, 0.0, 2.0]], &Device::Cpu).unwrap();
    for neurons in [Neurons::All, Neurons::Firing] {
        let (y, _) = ffn(&weights, neurons, &x, &mut Workspace::default()).unwrap();
        assert!(values(&y).iter().all(|y| y.is_nan()));
    }
}

#[test]
fn attention_refuses_heads_and_pages_that_do_not_fit() {
    let layout = KvLayout { n_kv_heads: 2, d_head: 4, dtype: KvDtype::F32 };
    let pages = Pages::random(1, layout, 1);
    let attend = |n_heads, n_kv_heads, d_head, width| {
        let shape = AttentionShape {
            n_heads,
            n_kv_heads,
            d_head,
            scale: 1.0,
            first_position: 0,
            window: None,
            alibi_slopes: None,
        };
        causal_attention(&tensor(1, width, 1), &pages, shape, &mut Workspace::default())
    };
    assert!(attend(4, 2, 4, 16).is_ok());
    assert!(matches!(attend(3, 2, 4, 12), Err(OpError::Shape { what: "heads", .. })));
    assert!(matches!(attend(4, 0, 4, 16), Err(OpError::Shape { what: "heads", .. })));
    assert!(matches!(attend(4, 4, 4, 16), Err(OpError::Shape { what: "a page of the cache", .. })));
    assert!(matches!(attend(4, 2, 8, 32), Err(OpError::Shape { what: "a page of the cache", .. })));
    assert!(matches!(attend(4, 2, 4, 15), Err(OpError::Shape { what: "queries", .. })));
}

#[test]
fn a_page_holds_what_was_written_rounded_to_its_type_and_refuses_the_rest() {
    for dtype in KvDtype::ALL {
        for (n_kv_heads, d_head) in [(1, 1), (3, 16), (2, 17), (1, 64), (2, 70)] {
            let layout = KvLayout { n_kv_heads, d_head, dtype };
            let (mut page, width) = (KvPage::zeroed(layout).unwrap(), n_kv_heads * d_head);
            let (keys, values) =
                (Seeded::new(1).normal(9 * width), Seeded::new(2).normal(9 * width));
            page.write(50, &keys, &values).unwrap();
            page.write(63, &keys[..width], &values[..width]).unwrap();
            let round = |x: &f32| match dtype {
                KvDtype::F16 => half::f16::from_f32(*x).to_f32(),
                _ => *x,
            };
            for (position, from) in (50..59).zip(0..9).chain([(63, 0)]) {
                for head in 0..n_kv_heads {
                    let of = |rows: &[f32]| -> Vec<f32> {
                        rows[from * width + head * d_head..][..d_head].iter().map(round).collect()
                    };
                    assert_eq!(page.key(head, position), of(&keys));
                    assert_eq!(page.value(head, position), of(&values));
                }
            }
            assert!(page.key(0, 49).iter().chain(&page.value(0, 59)).all(|&x| x == 0.0));
            let too_far = page.write(56, &keys, &values);
            assert!(matches!(too_far, Err(OpError::Shape { op: "KvPage::write", .. })));
            assert!(page.write(usize::MAX, &keys, &values).is_err());
            let unequal = page.write(0, &keys, &values[..width]);
            assert!(matches!(unequal, Err(OpError::Shape { what: "values", .. })));
            assert!(width == 1 || page.write(0, &keys[1..], &values[1..]).is_err());
        }
    }
}

#[test]
fn a_page_beyond_the_address_space_is_an_error() {
    for (n_kv_heads, d_head) in [(usize::MAX, 2), (2, usize::MAX), (1 << 30, 1 << 30)] {
        let layout = KvLayout { n_kv_heads, d_head, dtype: KvDtype::F16 };
        assert!(matches!(KvPage::zeroed(layout), Err(OpError::Allocation { .. })));
    }
}
