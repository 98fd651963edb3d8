//! What needs a GPU: ignored, and run by `testing/cuda/device.sh`. The same cases
//! run without a GPU in `testing/hostsim`.

#![allow(clippy::unwrap_used, reason = "tests")]

mod cases;
mod dense_cases;
mod dense_model;
mod sweep;

use std::sync::Arc;

use candle_core::{Device, Tensor};

use super::row_layout;
use crate::{ActivationMask, FastDevice, NeuronIds, linear, open_cuda, sparse_axpy, sparse_matvec};
use cases::{bound, matrix};
use row_layout::RowLayout;
use testing::{Seeded, assert_close};

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

const SIZE: cases::Size = [1500, 1056];

#[test]
#[ignore = "needs a GPU"]
fn networks_are_the_cpu_s() {
    cases::networks_are_the_cpu_s(gpu().as_ref(), SIZE);
}

#[test]
#[ignore = "needs a GPU"]
fn many_tokens_are_the_cpu_s() {
    cases::many_tokens_are_the_cpu_s(gpu().as_ref(), SIZE);
}

#[test]
#[ignore = "needs a GPU"]
fn parts_of_a_network_on_both_sides_add_up_to_the_whole() {
    cases::parts_add_up_to_the_whole(gpu().as_ref(), SIZE);
}

#[test]
#[ignore = "needs a GPU"]
fn a_low_bit_copy_picks_what_it_picks_on_the_cpu() {
    cases::a_low_bit_copy_picks_what_it_picks_on_the_cpu(gpu().as_ref(), SIZE);
}

#[test]
#[ignore = "needs a GPU"]
fn a_trained_predictor_picks_what_it_picks_on_the_cpu() {
    cases::a_trained_predictor_picks_what_it_picks_on_the_cpu(gpu().as_ref(), SIZE);
}

#[test]
#[ignore = "needs a GPU"]
fn memory_is_given_back_and_a_budget_is_kept() {
    let open = |budget| open_cuda(0, Some(budget)).unwrap();
    cases::memory_is_given_back_and_a_budget_is_kept(&open, SIZE);
}

#[test]
#[ignore = "needs a GPU"]
fn work_that_is_given_up_disturbs_nobody() {
    cases::work_that_is_given_up_disturbs_nobody(gpu().as_ref(), SIZE);
}

#[test]
#[ignore = "needs a GPU"]
fn work_is_waited_for_in_any_order() {
    cases::work_is_waited_for_in_any_order(gpu().as_ref(), SIZE);
}

#[test]
#[ignore = "needs a GPU"]
fn what_does_not_fit_is_refused() {
    cases::what_does_not_fit_is_refused(gpu().as_ref(), SIZE);
}

#[test]
#[ignore = "needs a GPU"]
fn passes_are_the_cpu_s_in_every_kind_of_model() {
    let device = gpu();
    for kind in dense_cases::kinds() {
        dense_cases::passes_are_the_cpu_s(device.as_ref(), kind, &[300, 1, 3, 40]);
    }
}

#[test]
#[ignore = "needs a GPU"]
fn sequences_are_cut_and_copied() {
    let device = gpu();
    for kind in dense_cases::kinds() {
        dense_cases::sequences_are_cut_and_copied(device.as_ref(), kind);
    }
}

#[test]
#[ignore = "needs a GPU"]
fn sessions_do_not_disturb_each_other() {
    dense_cases::sessions_do_not_disturb_each_other(gpu().as_ref(), dense_cases::kinds()[0]);
}

#[test]
#[ignore = "needs a GPU"]
fn slots_are_what_was_written() {
    dense_cases::slots_are_what_was_written(gpu().as_ref(), dense_cases::kinds()[0]);
}

#[test]
#[ignore = "needs a GPU"]
fn a_network_in_a_slot_is_that_of_the_host() {
    dense_cases::a_network_in_a_slot_is_that_of_the_host(gpu().as_ref(), SIZE);
}

#[test]
#[ignore = "needs a GPU"]
fn a_budget_is_kept_by_sequences() {
    let open = |budget| open_cuda(0, Some(budget)).unwrap();
    dense_cases::a_budget_is_kept(&open, dense_cases::kinds()[0]);
}

#[test]
#[ignore = "needs a GPU"]
fn parts_are_for_their_own_device() {
    dense_cases::parts_are_for_their_own_device(gpu().as_ref(), gpu().as_ref());
    dense_cases::what_does_not_fit_is_refused(gpu().as_ref());
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
