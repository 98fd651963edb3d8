//! A fast device that fails in the middle of a model, wherever that is: an error, and a context that is what
//! it was before the pass.
#![allow(clippy::unwrap_used, reason = "helper functions of tests")]

#[path = "support/failing.rs"]
mod failing;
#[path = "support/run.rs"]
mod run;

use std::sync::Arc;

use failing::{Failing, Switch};
use powerinfer_core::{
    CausalLm, Error as CoreError, KvCache, Result, Sparsity, Step, WantedLogits,
};
use powerinfer_models::load;
use powerinfer_ops::{FastDevice, OpError, StandIn, StandInOptions};
use run::{options, placement, pool, random_tokens};
use testing::{Fixture, assert_same_bits};

/// Tokens of the passes: one before the failure, the one that fails, and one after it.
const PASSES: [usize; 3] = [5, 3, 1];

/// A model of which parts lie on a device that fails when it is told to.
struct Split {
    model: Box<dyn CausalLm>,
    device: Arc<StandIn>,
    switch: Arc<Switch>,
    tokens: Vec<u32>,
    mode: Sparsity,
}

impl Split {
    fn new(fixture: &Fixture, nth: usize, done: bool) -> Self {
        let options = options(fixture);
        let info = load(&fixture.model_dir, &options).unwrap().info().clone();
        let device = Arc::new(StandIn::new(StandInOptions::new(u64::MAX)).unwrap());
        let switch = Switch::new(done);
        let failing = Failing { inner: Arc::clone(&device), switch: Arc::clone(&switch) };
        let failing: Arc<dyn FastDevice> = Arc::new(failing);
        let options =
            options.with_placement(placement(&info, 0.4, nth, nth > 0)).with_fast_device(failing);
        let model = load(&fixture.model_dir, &options).unwrap();
        let tokens = random_tokens(&*model, PASSES.iter().sum(), 3);
        Self { model, device, switch, tokens, mode: info.sparsity }
    }

    /// The logits of a pass, which begins where the cache ends.
    fn pass(&self, cache: &mut KvCache, n_tokens: usize) -> Result<Vec<f32>> {
        let (wanted, sparsity) = (WantedLogits::All, Some(self.mode));
        let mut step = Step { wanted, sparsity, ..Step::default() };
        let tokens = &self.tokens[cache.len()..][..n_tokens];
        pool(2).install(|| self.model.forward(tokens, cache, &mut step))?;
        Ok(step.logits)
    }

    /// The logits of all passes, and the number of steps of each.
    fn undisturbed(&self) -> ([Vec<f32>; 3], [usize; 3]) {
        let mut cache = self.model.new_cache();
        let mut n_steps = [0; 3];
        let logits = [0, 1, 2].map(|at| {
            let before = self.switch.n_steps();
            let logits = self.pass(&mut cache, PASSES[at]).unwrap();
            n_steps[at] = self.switch.n_steps() - before;
            logits
        });
        (logits, n_steps)
    }
}

fn assert_failed(found: Result<Vec<f32>>, about: &str) {
    let error = found.expect_err(about);
    let failed = matches!(&error, CoreError::Op(OpError::DeviceFailed { device, .. }) if device == "failing");
    assert!(failed, "{about}: {error}");
    assert!(error.to_string().contains("failing"), "{about}: {error}");
}

fn fixtures() -> Vec<Fixture> {
    let all = Fixture::micros("");
    assert!(all.len() > 10);
    all
}

/// Wherever a pass fails, before or behind what a step does: the next one over the same tokens gives the bits of
/// one that never failed, and so does what follows, in the context and in a copy of it.
#[test]
fn a_step_that_fails_leaves_the_context_as_it_was() {
    let mut n_failures = 0;
    for (fixture, done) in fixtures().iter().flat_map(|fixture| [(fixture, false), (fixture, true)])
    {
        for nth in [0, 1, 2] {
            let split = Split::new(fixture, nth, done);
            let (expected, n_steps) = split.undisturbed();
            for at in 0..n_steps[1] {
                let about = format!("{} {nth} {done}, step {at} of {}", fixture.name, n_steps[1]);
                let mut cache = split.model.new_cache();
                assert_same_bits(&split.pass(&mut cache, PASSES[0]).unwrap(), &expected[0], &about);
                split.switch.fail(at..at + 1);
                assert_failed(split.pass(&mut cache, PASSES[1]), &about);
                assert_eq!(cache.len(), PASSES[0], "{about}");
                for mut cache in [cache.clone(), cache] {
                    for pass in 1..3 {
                        let found = split.pass(&mut cache, PASSES[pass]).unwrap();
                        assert_same_bits(&found, &expected[pass], &about);
                    }
                }
                n_failures += 1;
            }
        }
    }
    assert!(n_failures > 1000, "only {n_failures} failures");
}

/// A device that is gone for good: every pass says so, contexts can be cut, copied, cleared and dropped, and what
/// they took of the device's memory is given back.
#[test]
fn a_device_that_is_gone_fails_every_pass() {
    for (fixture, nth) in Fixture::trained().iter().flat_map(|fixture| [(fixture, 0), (fixture, 2)])
    {
        let split = Split::new(fixture, nth, false);
        let (expected, n_steps) = split.undisturbed();
        let loaded = split.device.memory().held_bytes;
        for at in (0..n_steps[1]).step_by(5) {
            let about = format!("{} {nth}, from step {at} on", fixture.name);
            let mut cache = split.model.new_cache();
            let _ = split.pass(&mut cache, PASSES[0]).unwrap();
            split.switch.fail(at..usize::MAX);
            for len in [5, 5, 3, 1] {
                assert_failed(split.pass(&mut cache, PASSES[1]), &about);
                assert!(cache.len() <= PASSES[0], "{about}");
                assert_failed(split.pass(&mut cache.clone(), PASSES[1]), &about);
                cache.truncate(len);
            }
            cache.clear();
            assert_failed(split.pass(&mut cache, PASSES[1]), &about);
            assert_failed(split.pass(&mut split.model.new_cache(), PASSES[0]), &about);
            // back again: the same context, cleared, and its first pass
            split.switch.fail(0..0);
            cache.clear();
            assert_same_bits(&split.pass(&mut cache, PASSES[0]).unwrap(), &expected[0], &about);
            drop(cache);
            assert_eq!(split.device.memory().held_bytes, loaded, "{about}");
        }
    }
}
