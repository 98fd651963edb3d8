//! Whole models on a device that is lost under way.

use std::sync::Arc;

use hostsim::{Limits, SimDevice};
use powerinfer_core::{CausalLm, Error, KvCache, Step};
use powerinfer_models::{Error as LoadError, LoadOptions, load};
use powerinfer_ops::{FastDevice, OpError};
use testing::Fixture;

use crate::model::placements;

/// Tokens of the passes.
const PASSES: [usize; 3] = [18, 1, 2];

fn passes(model: &dyn CausalLm, cache: &mut KvCache) -> Result<(), Error> {
    let mut step = Step::default();
    for n_tokens in PASSES {
        let tokens: Vec<u32> = (1..).take(n_tokens).collect();
        let len = cache.len();
        let done = model.forward(&tokens, cache, &mut step);
        assert_eq!(cache.len() - len, if done.is_ok() { n_tokens } else { 0 });
        done?;
    }
    Ok(())
}

fn is_lost(error: &Error) -> bool {
    matches!(error, Error::Op(OpError::DeviceFailed { device, .. }) if device == "shim")
}

/// Whether all passes were done before the device was lost after so many pieces of work; else that is what
/// every pass says from then on, and nothing of a context is left.
fn is_done(fixture: &Fixture, options: &LoadOptions, n_work: u64) -> bool {
    let about = format!("{} after {n_work}", fixture.name);
    let device = Arc::new(SimDevice::limited(1 << 30, Limits { n_work, ..Limits::NONE }));
    let options = options.clone().with_fast_device(device.clone());
    let model = match load(&fixture.model_dir, &options) {
        Ok(model) => model,
        // before it was loaded
        Err(LoadError::Core(error)) if is_lost(&error) => return false,
        Err(error) => panic!("{about}: {error}"),
    };
    let loaded = device.memory().held_bytes;
    let mut cache = model.new_cache();
    let Err(error) = passes(&*model, &mut cache) else { return true };
    assert!(is_lost(&error), "{about}: {error}");
    for mut cache in [cache.clone(), cache, model.new_cache()] {
        let error = passes(&*model, &mut cache).unwrap_err();
        assert!(is_lost(&error), "{about}: {error}");
        cache.truncate(1);
        cache.clear();
        let error = passes(&*model, &mut cache).unwrap_err();
        assert!(is_lost(&error), "{about}: {error}");
    }
    // scratch memory has grown with the context and stays
    let held = device.memory().held_bytes;
    assert!(held >= loaded && held == device.live_bytes(), "{about}: {held}");
    drop(model);
    assert_eq!(device.memory().held_bytes, device.live_bytes(), "{about}");
    false
}

#[test]
fn a_model_says_that_its_device_is_lost_wherever_it_happens() {
    for name in ["opt-350m-postln", "llama-rope-llama3", "falcon-40b-gqa"] {
        let fixture = Fixture::micro(name);
        let plain = load(&fixture.model_dir, &LoadOptions::default()).unwrap();
        for (where_parts_lie, placement) in placements(plain.info()) {
            let options = LoadOptions::default().with_placement(placement);
            let mut n_work = 0;
            while !is_done(&fixture, &options, n_work) {
                n_work += 1 + n_work / 3;
            }
            assert!(n_work > 50, "{name}, {where_parts_lie}: all is done after {n_work}");
        }
    }
}
