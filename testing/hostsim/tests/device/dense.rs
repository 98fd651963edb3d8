//! The cases of dense parts.

use std::sync::Arc;

use hostsim::SimDevice;
use powerinfer_ops::{FastDevice, StandIn, StandInOptions};

use crate::dense_cases::{
    a_budget_is_kept, a_network_in_a_slot_is_that_of_the_host, kinds,
    parts_are_for_their_own_device, passes_are_the_cpu_s, sequences_are_cut_and_copied,
    sessions_do_not_disturb_each_other, slots_are_what_was_written, what_does_not_fit_is_refused,
};
use crate::dense_model::Kind;
use crate::network::check;

#[test]
fn passes_are_the_cpu_s_in_every_kind_of_model() {
    for (order, kind) in kinds().into_iter().enumerate() {
        check(order as u64, |device| passes_are_the_cpu_s(device, kind, &[19, 1, 3]));
    }
}

#[test]
fn long_passes_are_the_cpu_s() {
    for at in [6, 7] {
        let kind = Kind { heads: [2, 1, 4], hot: 0.1, ..kinds()[at] };
        check(0, |device| passes_are_the_cpu_s(device, kind, &[250, 1, 20]));
    }
}

#[test]
fn sequences_are_cut_and_copied_in_every_type_of_cache() {
    for at in [0, 5, 8] {
        check(1, |device| sequences_are_cut_and_copied(device, kinds()[at]));
    }
}

#[test]
fn slots_are_what_was_written_under_way() {
    for order in crate::ORDERS {
        check(order, |device| slots_are_what_was_written(device, kinds()[0]));
    }
}

#[test]
fn a_budget_is_kept_and_what_a_planner_leaves_is_enough() {
    let open = |budget| Arc::new(SimDevice::new(budget, 0)) as Arc<dyn FastDevice>;
    a_budget_is_kept(&open, kinds()[0]);
    a_budget_is_kept(&open, kinds()[5]);
}

#[test]
fn parts_are_refused_by_another_device_s_sequence() {
    parts_are_for_their_own_device(&SimDevice::new(1 << 30, 0), &SimDevice::new(1 << 30, 0));
}

#[test]
fn what_does_not_fit_a_sequence_is_refused() {
    check(0, what_does_not_fit_is_refused);
}

#[test]
fn a_network_in_a_slot_is_that_of_the_host_in_every_mode() {
    check(1, |device| a_network_in_a_slot_is_that_of_the_host(device, [150, 96]));
}

#[test]
fn sessions_on_their_own_threads_do_not_disturb_each_other() {
    check(0, |device| sessions_do_not_disturb_each_other(device, kinds()[0]));
    check(0, |device| sessions_do_not_disturb_each_other(device, kinds()[3]));
}

/// The same cases hold the stand-in to the same results.
#[test]
fn the_stand_in_passes_the_cases_of_a_gpu() {
    let open = |budget| -> Arc<dyn FastDevice> {
        Arc::new(StandIn::new(StandInOptions::new(budget)).unwrap())
    };
    let device = open(1 << 30);
    for kind in kinds() {
        passes_are_the_cpu_s(device.as_ref(), kind, &[19, 1, 3]);
        passes_are_the_cpu_s(device.as_ref(), kind, &[250, 1, 20]);
        sequences_are_cut_and_copied(device.as_ref(), kind);
        sessions_do_not_disturb_each_other(device.as_ref(), kind);
        slots_are_what_was_written(device.as_ref(), kind);
        a_budget_is_kept(&open, kind);
    }
    a_network_in_a_slot_is_that_of_the_host(device.as_ref(), [150, 96]);
    parts_are_for_their_own_device(device.as_ref(), open(1 << 30).as_ref());
    what_does_not_fit_is_refused(device.as_ref());
}
