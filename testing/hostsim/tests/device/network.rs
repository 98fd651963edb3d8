//! The cases of networks.

use std::sync::Arc;

use hostsim::SimDevice;
use powerinfer_ops::FastDevice;

use crate::{ORDERS, cases};

const SIZE: cases::Size = [150, 96];

/// Runs a case on a device, in which nothing is allocated in the end that it does not know of.
pub(crate) fn check(order: u64, case: impl Fn(&dyn FastDevice)) {
    let device = SimDevice::new(1 << 30, order);
    case(&device);
    let memory = device.memory();
    assert_eq!(device.allocated_bytes().unwrap(), memory.held_bytes);
    assert!(memory.peak_bytes <= memory.budget_bytes);
}

#[test]
fn networks_are_the_cpu_s() {
    check(3, |device| cases::networks_are_the_cpu_s(device, [75, 96]));
}

#[test]
fn many_tokens_are_the_cpu_s() {
    check(2, |device| cases::many_tokens_are_the_cpu_s(device, [75, 96]));
}

#[test]
fn parts_of_a_network_on_both_sides_add_up_to_the_whole() {
    for order in ORDERS {
        check(order, |device| cases::parts_add_up_to_the_whole(device, SIZE));
    }
}

#[test]
fn a_low_bit_copy_picks_what_it_picks_on_the_cpu() {
    for order in ORDERS {
        check(order, |device| {
            cases::a_low_bit_copy_picks_what_it_picks_on_the_cpu(device, SIZE);
        });
    }
}

#[test]
fn a_trained_predictor_picks_what_it_picks_on_the_cpu() {
    for order in ORDERS {
        check(order, |device| {
            cases::a_trained_predictor_picks_what_it_picks_on_the_cpu(device, SIZE);
        });
    }
}

#[test]
fn memory_is_given_back_and_a_budget_is_kept() {
    let open = |budget| Arc::new(SimDevice::new(budget, 0)) as Arc<dyn FastDevice>;
    cases::memory_is_given_back_and_a_budget_is_kept(&open, SIZE);
}

#[test]
fn work_that_is_given_up_disturbs_nobody() {
    check(0, |device| cases::work_that_is_given_up_disturbs_nobody(device, SIZE));
}

#[test]
fn work_is_waited_for_in_any_order() {
    for order in ORDERS {
        check(order, |device| cases::work_is_waited_for_in_any_order(device, SIZE));
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    check(0, |device| cases::what_does_not_fit_is_refused(device, SIZE));
}
