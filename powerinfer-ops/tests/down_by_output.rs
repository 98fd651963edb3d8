//! A down projection stored by output is the same network, to the bit in every mode.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

use candle_core::{Device, Tensor};
use powerinfer_ops::{
    Activation, FfnCounts, FfnWeights, NeuronIds, NeuronMatrix, Neurons, OpError, WeightFormat,
    Workspace, ffn,
};
use proptest::prelude::*;
use testing::{Seeded, assert_same_bits};

fn matrix(format: WeightFormat, n: usize, d: usize, seed: u64) -> NeuronMatrix {
    NeuronMatrix::from_f32(format, n, d, &Seeded::new(seed).normal(n * d)).unwrap()
}

fn run(weights: &FfnWeights, neurons: Neurons<'_>, x: &Tensor) -> (Vec<f32>, FfnCounts) {
    let (y, counts) = ffn(weights, neurons, x, &mut Workspace::default()).unwrap();
    (y.flatten_all().unwrap().to_vec1().unwrap(), counts)
}

/// Its transpose, in f32.
fn turned(matrix: &NeuronMatrix) -> NeuronMatrix {
    let (n, d) = (matrix.n_neurons(), matrix.d_model());
    let mut rows = vec![0.0; n * d];
    rows.chunks_exact_mut(d).enumerate().for_each(|(i, row)| matrix.row_to_f32(i, row));
    let columns: Vec<f32> = (0..n * d).map(|at| rows[at % n * d + at / n]).collect();
    NeuronMatrix::from_f32(WeightFormat::F32, d, n, &columns).unwrap()
}

proptest! {
    #[test]
    fn every_mode_and_cut_gives_the_same_bits(
        format in 0..WeightFormat::ALL.len(), n_blocks in 1usize..10, n_tokens in 1usize..7,
        gated: bool, shift in -2f32..1.0, seed: u64,
    ) {
        let format = WeightFormat::ALL[format];
        let (n, d) = (n_blocks * format.block_len().max(7), format.block_len().max(24));
        let up = gated.then(|| matrix(format, n, d, seed ^ 1));
        let (gate, down) = (matrix(format, n, d, seed ^ 2), matrix(format, d, n, seed ^ 3));
        let by_neuron =
            FfnWeights::new(gate.clone(), up.clone(), turned(&down), Activation::Relu).unwrap();
        let weights = FfnWeights::with_down_by_output(gate, up, down, Activation::Relu).unwrap();
        let biases = || (Some(vec![shift * 5.0; n]), gated.then(|| vec![0.5; n]));
        let (gate_bias, up_bias) = biases();
        let weights = weights.with_biases(gate_bias.clone(), up_bias.clone()).unwrap();
        let by_neuron = by_neuron.with_biases(gate_bias, up_bias).unwrap();

        let x = Seeded::new(seed ^ 4).normal(n_tokens * d);
        let x = Tensor::from_vec(x, (n_tokens, d), &Device::Cpu).unwrap();
        let (all, dense) = run(&weights, Neurons::All, &x);
        let (firing, exact) = run(&weights, Neurons::Firing, &x);
        assert_same_bits(&firing, &all, "firing");
        prop_assert_eq!((exact.fired, exact.ran), (dense.fired, dense.ran));
        prop_assert_eq!(dense.ran, (n * n_tokens) as u64);
        prop_assert!(exact.bytes <= dense.bytes);
        for t in 0..n_tokens {
            let (alone, _) = run(&weights, Neurons::Firing, &x.narrow(0, t, 1).unwrap());
            assert_same_bits(&alone, &all[t * d..][..d], "alone");
        }
        let (expected, counts) = run(&by_neuron, Neurons::Firing, &x);
        prop_assert_eq!(counts.fired, exact.fired);
        let largest = expected.iter().fold(1f32, |largest, y| largest.max(y.abs()));
        for (found, expected) in all.iter().zip(expected) {
            // products with these round activations to eight bits
            let rounds = format.block_len() > 1 && format != WeightFormat::Q6_K;
            let bound = if rounds { 0.05 } else { 1e-5 * n as f32 };
            prop_assert!((found - expected).abs() <= bound * largest, "{format}");
        }
    }
}

#[test]
fn few_firing_neurons_read_few_rows_of_up() {
    let (n, d) = (64, 32);
    let m = |n, d, seed| matrix(WeightFormat::F32, n, d, seed);
    let weights =
        FfnWeights::with_down_by_output(m(n, d, 1), Some(m(n, d, 2)), m(d, n, 3), Activation::Relu);
    // one neuron fires
    let mut bias = vec![-1e6; n];
    bias[5] = 1e6;
    let weights = weights.unwrap().with_biases(Some(bias), None).unwrap();
    let x = Tensor::ones((1, d), candle_core::DType::F32, &Device::Cpu).unwrap();
    let (_, counts) = run(&weights, Neurons::Firing, &x);
    let row = d * 4;
    assert_eq!(counts.bytes, (n * row + row + d * n * 4) as u64);
    assert_eq!(counts.fired, 1);
}

#[test]
fn neurons_cannot_be_picked() {
    let m = |n, d| matrix(WeightFormat::F32, n, d, 1);
    let weights =
        FfnWeights::with_down_by_output(m(6, 4), None, m(4, 6), Activation::Relu).unwrap();
    let ids = NeuronIds::from_sorted(vec![1]).unwrap();
    assert!(matches!(weights.pick(&ids), Err(OpError::DownByOutput { .. })));
    let x = Tensor::ones((1, 4), candle_core::DType::F32, &Device::Cpu).unwrap();
    let found = ffn(&weights, Neurons::FiringOf(&[ids]), &x, &mut Workspace::default());
    assert!(matches!(found, Err(OpError::DownByOutput { .. })));
    let wrong = FfnWeights::with_down_by_output(m(6, 4), None, m(6, 4), Activation::Relu);
    assert!(matches!(wrong, Err(OpError::Shape { what: "down", .. })));
}
