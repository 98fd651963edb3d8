//! Each promise that a backend breaks is missed by one of the cases. Cases that could not fail would
//! prove nothing.

use std::panic::{AssertUnwindSafe, catch_unwind};

use hostsim::{Mistake, SimDevice};
use powerinfer_ops::FastDevice;

use crate::cases;
use crate::dense_cases::{kinds, passes_are_the_cpu_s, slots_are_what_was_written};

const SIZE: cases::Size = [150, 96];

/// Whether a case passes on a device with a fault.
fn passes(mistake: Option<Mistake>, case: impl Fn(&dyn FastDevice)) -> bool {
    let sound = || SimDevice::new(1 << 30, 0);
    let device = mistake.map_or_else(sound, |mistake| SimDevice::mistaken(1 << 30, mistake));
    let passed = catch_unwind(AssertUnwindSafe(|| case(&device))).is_ok();
    passed && device.allocated_bytes().is_ok()
}

#[test]
fn every_broken_promise_of_a_backend_is_seen() {
    let any_order = |device: &dyn FastDevice| cases::work_is_waited_for_in_any_order(device, SIZE);
    let given_up =
        |device: &dyn FastDevice| cases::work_that_is_given_up_disturbs_nobody(device, SIZE);
    let slots = |device: &dyn FastDevice| slots_are_what_was_written(device, kinds()[0]);
    let whole = |device: &dyn FastDevice| passes_are_the_cpu_s(device, kinds()[0], &[2, 1]);
    assert!(passes(None, any_order) && passes(None, whole));
    assert!(passes(None, given_up) && passes(None, slots));
    for mistake in Mistake::ALL {
        let passed = match mistake {
            Mistake::FreedUnderWay => passes(Some(mistake), given_up),
            Mistake::AnswerTooEarly | Mistake::CopiedOutOfTurn => passes(Some(mistake), any_order),
            Mistake::OverwrittenUnderWay => passes(Some(mistake), slots),
            Mistake::EventIgnored => passes(Some(mistake), whole),
        };
        assert!(!passed, "{mistake:?} passes");
    }
}
