//! What needs a GPU: ignored, and run by `testing/cuda/device.sh`. Results are held to the CPU's; the
//! same kernels are held to it without a GPU by `testing/hostsim`.

#![allow(clippy::unwrap_used, reason = "tests")]

mod sweep;

use std::sync::Arc;

use candle_core::{Device, Tensor};

use super::row_layout::RowLayout;
use crate::fast_device::{FastDevice, HeldFfn, HeldNeurons, HotRows, RowPredictor, open_cuda};
use crate::{
    Activation, ActivationMask, FfnCounts, FfnWeights, GateEstimate, LowBitFormat, NeuronIds,
    NeuronMatrix, Neurons, WeightFormat, Workspace, ffn, linear, sparse_axpy, sparse_matvec,
};
use testing::{Seeded, assert_close, assert_same_bits};

const BUDGET: u64 = 8 << 30;

fn gpu() -> Arc<dyn FastDevice> {
    open_cuda(0, Some(BUDGET)).unwrap()
}

/// Whether there is a GPU: the first thing that `device.sh` asks.
#[test]
#[ignore = "needs a GPU"]
fn device_is_there() {
    match open_cuda(0, None) {
        Ok(device) => {
            let free = device.memory().budget_bytes;
            println!("{{\"device\":\"{}\",\"free_bytes\":{free}}}", device.describe());
        }
        Err(error) => panic!("no GPU: {:?}", std::error::Error::source(&error)),
    }
}

fn matrix(format: WeightFormat, n: usize, d: usize, seed: u64) -> NeuronMatrix {
    NeuronMatrix::from_f32(format, n, d, &Seeded::new(seed).normal(n * d)).unwrap()
}

fn network(format: WeightFormat, [n, d]: [usize; 2], gated: bool, drelu: bool) -> FfnWeights {
    let up = gated.then(|| matrix(format, n, d, 2));
    FfnWeights::new(matrix(format, n, d, 1), up, matrix(format, n, d, 3), Activation::Relu)
        .unwrap()
        .with_biases(Some(Seeded::new(4).normal(n)), None)
        .unwrap()
        .with_up_activation(drelu.then_some(Activation::Relu))
}

fn on_cpu(weights: &FfnWeights, neurons: Neurons<'_>, x: &[f32]) -> (Vec<f32>, FfnCounts) {
    let x = Tensor::from_slice(x, (x.len() / weights.d_model(), weights.d_model()), &Device::Cpu);
    let (y, counts) = ffn(weights, neurons, &x.unwrap(), &mut Workspace::default()).unwrap();
    (y.flatten_all().unwrap().to_vec1().unwrap(), counts)
}

fn on_gpu(held: &dyn HeldFfn, neurons: HeldNeurons<'_>, x: &[f32]) -> (Vec<f32>, FfnCounts) {
    let mut y = vec![0.0; x.len()];
    let run = held.start(neurons, x).unwrap().wait(&mut y).unwrap();
    (y, run.counts)
}

fn bound(expected: &[f32]) -> f32 {
    let square: f32 = expected.iter().map(|y| y * y).sum();
    1e-4 * (square / expected.len().max(1) as f32).sqrt() + f32::MIN_POSITIVE
}

#[test]
#[ignore = "needs a GPU"]
fn networks_are_the_cpu_s() {
    let device = gpu();
    for format in RowLayout::FORMATS {
        for (gated, drelu) in [(true, false), (true, true), (false, false)] {
            let [n, d] = [1500, 1056];
            let weights = network(format, [n, d], gated, drelu);
            let ids = NeuronIds::from_sorted(Seeded::new(5).ids(n, 0.6)).unwrap();
            let picked = weights.pick(&ids).unwrap();
            let rows = HotRows { weights: &weights, ids: &ids, density: None };
            let held = device.hold(rows).unwrap();
            for n_tokens in [1, 3, 40] {
                let what = format!("{format}, gated {gated}, {n_tokens} tokens");
                let x = Seeded::new(6).normal(n_tokens * d);
                let (expected, counts) = on_cpu(&picked, Neurons::Firing, &x);
                let (firing, found) = on_gpu(held.as_ref(), HeldNeurons::Firing, &x);
                assert_close(&firing, &expected, bound(&expected), &what);
                assert_eq!(found.fired, counts.fired, "{what}");
                let (all, _) = on_gpu(held.as_ref(), HeldNeurons::All, &x);
                assert_same_bits(&firing, &all, &what);
                let picks: Vec<NeuronIds> = (0..n_tokens)
                    .map(|t| {
                        let ids = Seeded::new(t as u64).ids(ids.len(), 0.1);
                        NeuronIds::from_sorted(ids).unwrap()
                    })
                    .collect();
                let (expected, counts) = on_cpu(&picked, Neurons::FiringOf(&picks), &x);
                let (some, found) = on_gpu(held.as_ref(), HeldNeurons::FiringOf(&picks), &x);
                assert_close(&some, &expected, bound(&expected), &what);
                assert_eq!((found.fired, found.picked), (counts.fired, counts.picked), "{what}");
            }
            let back = held.read_back().unwrap();
            for row in [0, ids.len() - 1] {
                assert_eq!(back.gate.row(row), picked.gate.row(row));
                assert_eq!(back.down.row(row), picked.down.row(row));
            }
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn parts_of_a_network_on_both_sides_add_up_to_the_whole() {
    let device = gpu();
    let weights = network(WeightFormat::F16, [2000, 512], true, false);
    let x = Seeded::new(8).normal(512);
    let (expected, _) = on_cpu(&weights, Neurons::Firing, &x);
    for share in [0.0, 0.17, 1.0] {
        let hot = Seeded::new(9).ids(2000, share);
        let cold: Vec<u32> = (0..2000).filter(|id| !hot.contains(id)).collect();
        let (hot, cold) =
            (NeuronIds::from_sorted(hot).unwrap(), NeuronIds::from_sorted(cold).unwrap());
        let held = device.hold(HotRows { weights: &weights, ids: &hot, density: None }).unwrap();
        let pending = held.start(HeldNeurons::Firing, &x).unwrap();
        let (mut y, _) = on_cpu(&weights.pick(&cold).unwrap(), Neurons::Firing, &x);
        pending.wait(&mut y).unwrap();
        assert_close(&y, &expected, bound(&expected), format!("{share} hot"));
    }
}

#[test]
#[ignore = "needs a GPU"]
fn a_low_bit_copy_picks_what_it_picks_on_the_cpu() {
    let device = gpu();
    let weights = network(WeightFormat::F16, [1500, 1056], true, false);
    let ids = NeuronIds::all(1500);
    for format in LowBitFormat::ALL {
        let held = device.hold(HotRows { weights: &weights, ids: &ids, density: None }).unwrap();
        let bias = weights.gate_bias.as_deref();
        let estimate = GateEstimate::new(format, &weights.gate, bias, Activation::Relu).unwrap();
        assert!(held.hold_predictor(RowPredictor::Estimated(&estimate, 0.3)).unwrap());
        for n_tokens in [1, 3, 40] {
            let x = Seeded::new(6).normal(n_tokens * 1056);
            let (expected, counts) = on_cpu(&weights, Neurons::Estimated(&estimate, 0.3), &x);
            let (found, run) = on_gpu(held.as_ref(), HeldNeurons::Predicted(&[]), &x);
            assert_close(&found, &expected, bound(&expected), format!("{format} bits"));
            assert_eq!((run.picked, run.fired), (counts.picked, counts.fired), "{format} bits");
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn memory_is_given_back_and_a_budget_is_kept() {
    let device = gpu();
    let weights = network(WeightFormat::Q4_0, [512, 512], true, false);
    let ids = NeuronIds::all(512);
    let held = device.hold(HotRows { weights: &weights, ids: &ids, density: None }).unwrap();
    let (with, rows) = (device.memory().held_bytes, held.size_bytes());
    drop(held);
    assert_eq!(device.memory().held_bytes, with - rows);
    let small = open_cuda(0, Some(1 << 20)).unwrap();
    let rows = HotRows { weights: &weights, ids: &ids, density: None };
    assert!(matches!(small.hold(rows), Err(crate::OpError::DeviceBudget { .. })));
    assert_eq!(small.memory().held_bytes, 0);
}

#[test]
#[ignore = "needs a GPU"]
fn work_that_is_given_up_disturbs_nobody() {
    let device = gpu();
    let weights = network(WeightFormat::F16, [700, 256], true, false);
    let ids = NeuronIds::all(700);
    let held = device.hold(HotRows { weights: &weights, ids: &ids, density: None }).unwrap();
    let x = Seeded::new(1).normal(256);
    let (expected, _) = on_gpu(held.as_ref(), HeldNeurons::Firing, &x);
    for _ in 0..10 {
        drop(held.start(HeldNeurons::All, &Seeded::new(2).normal(256 * 40)).unwrap());
    }
    let (again, _) = on_gpu(held.as_ref(), HeldNeurons::Firing, &x);
    assert_same_bits(&again, &expected, "the same input");
    let pending = held.start(HeldNeurons::Firing, &x).unwrap();
    drop(held);
    let mut y = vec![0.0; 256];
    let _ = pending.wait(&mut y).unwrap();
    assert_same_bits(&y, &expected, "rows that were given up under way");
}

#[test]
#[ignore = "needs a GPU"]
fn operators_on_gpu_tensors_are_the_cpu_s() {
    let device = Device::new_cuda(0).unwrap();
    for format in RowLayout::FORMATS {
        let (n, d) = (300, 544);
        let w = matrix(format, n, d, 1);
        let ids: Vec<NeuronIds> =
            (0..3).map(|t| NeuronIds::from_sorted(Seeded::new(t).ids(n, 0.2)).unwrap()).collect();
        let mask = ActivationMask::from_ids(&ids, n).unwrap();
        let tensor = |columns: usize| {
            Tensor::from_vec(Seeded::new(7).normal(3 * columns), (3, columns), &Device::Cpu)
                .unwrap()
        };
        let (x, h, bias) = (tensor(d), tensor(n), Seeded::new(3).normal(n));
        let there = |t: &Tensor| t.to_device(&device).unwrap();
        let values = |t: Tensor| -> Vec<f32> { t.flatten_all().unwrap().to_vec1().unwrap() };
        let pairs = [
            (sparse_matvec(&w, &mask, &x), sparse_matvec(&w, &mask, &there(&x))),
            (sparse_axpy(&w, &mask, &h), sparse_axpy(&w, &mask, &there(&h))),
            (linear(&w, Some(&bias), &x), linear(&w, Some(&bias), &there(&x))),
        ];
        for (expected, found) in pairs {
            let (expected, found) = (values(expected.unwrap()), values(found.unwrap()));
            assert_close(&found, &expected, bound(&expected), format!("{format}"));
        }
    }
}
