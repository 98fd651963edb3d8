//! Who watches a model of which parts lie on a fast device sees what there is to see on the CPU alone.
#![allow(clippy::unwrap_used, reason = "helper functions of tests")]

#[path = "support/run.rs"]
mod run;

use std::ops::ControlFlow;
use std::sync::Arc;

use powerinfer_core::{
    ActivationProfile, CausalLm, FfnObserver, FfnSeen, ModelInfo, Placement, Result, Sparsity,
};
use powerinfer_models::{
    Error, LoadOptions, TrainMethod, TrainOptions, calibrate, load, train_predictor,
};
use powerinfer_ops::{StandIn, StandInOptions};
use run::{MAX_BYTES, placement, pool, random_tokens};
use testing::Fixture;
use testing::tolerance::max_distance;

/// How far values may lie from those of the CPU alone, of the largest of them.
const BOUND: f64 = 1e-5;
/// Tokens of a window: several go through a layer together, and the last window is shorter.
const CONTEXT: usize = 17;

fn load_plain(fixture: &Fixture, placement: Option<Placement>) -> Box<dyn CausalLm> {
    let mut options = LoadOptions::default().with_pytorch(MAX_BYTES);
    if let Some(placement) = placement {
        let device = Arc::new(StandIn::new(StandInOptions::new(u64::MAX)).unwrap());
        options = options.with_placement(placement).with_fast_device(device);
    }
    load(&fixture.model_dir, &options).unwrap_or_else(|error| panic!("{}: {error}", fixture.name))
}

/// Models with parts on a device, and what parts.
fn splits(fixture: &Fixture, info: &ModelInfo) -> Vec<(String, Box<dyn CausalLm>)> {
    [(0.4, 0), (0.0, 1), (0.4, 1), (0.4, 2), (1.0, 1)]
        .map(|(share, nth)| {
            let about = format!("{}, {share} of the neurons, attention {nth}", fixture.name);
            (about, load_plain(fixture, Some(placement(info, share, nth, nth == 1))))
        })
        .into()
}

fn watch<O: FfnObserver + 'static>(model: &dyn CausalLm, tokens: &[u32], observer: O) -> O {
    let go_on = |_: &O, _| ControlFlow::Continue(());
    pool(2).install(|| calibrate(model, tokens, CONTEXT, observer, go_on)).unwrap()
}

fn assert_near(found: &[f32], expected: &[f32], about: &str) {
    let largest = expected.iter().fold(1e-3f32, |largest, value| largest.max(value.abs()));
    let distance = max_distance(found, expected) / f64::from(largest);
    assert!(distance <= BOUND, "{about}: {distance}");
}

#[test]
fn profiles_count_what_fires_wherever_parts_lie() {
    let mut n_fired = 0;
    for fixture in Fixture::all("") {
        let whole = load_plain(&fixture, None);
        let info = whole.info();
        if info.sparsity == Sparsity::Dense {
            continue;
        }
        let tokens = random_tokens(&*whole, 2 * CONTEXT + 5, 3);
        let profile = |model: &dyn CausalLm| {
            watch(model, &tokens, ActivationProfile::new(info, true).unwrap())
        };
        let expected = profile(&*whole);
        for (about, split) in splits(&fixture, info) {
            let found = profile(&*split);
            assert_eq!(found.n_tokens(), tokens.len() as u64, "{about}");
            for layer in 0..info.n_layers {
                assert_eq!(found.counts(layer), expected.counts(layer), "{about}, layer {layer}");
                let [found, expected] =
                    [&found, &expected].map(|profile| profile.impact(layer).unwrap());
                assert_near(&found, &expected, &about);
                n_fired += u64::from(expected.iter().any(|impact| *impact > 0.0));
            }
        }
    }
    assert!(n_fired > 100, "neurons of only {n_fired} layers fired");
}

/// Keeps all that it sees.
#[derive(Debug, Default)]
struct Everything {
    layers: Vec<usize>,
    /// Residual streams, inputs, activations and norms, one after the other.
    seen: [Vec<f32>; 4],
}

impl FfnObserver for Everything {
    fn observe(&mut self, seen: &FfnSeen<'_>) -> Result<()> {
        self.layers.push(seen.layer);
        for (to, tensor) in self.seen.iter_mut().zip([seen.residual, seen.normed]) {
            to.extend(tensor.flatten_all()?.to_vec1::<f32>()?);
        }
        self.seen[2].extend(seen.activations);
        self.seen[3].extend(seen.down_norms);
        Ok(())
    }
}

#[test]
fn an_observer_sees_the_inputs_and_outputs_of_every_layer_in_order() {
    for fixture in Fixture::micros("") {
        let whole = load_plain(&fixture, None);
        let tokens = random_tokens(&*whole, CONTEXT, 3);
        let expected = watch(&*whole, &tokens, Everything::default());
        assert_eq!(expected.layers, (0..whole.info().n_layers).collect::<Vec<_>>());
        for (about, split) in splits(&fixture, whole.info()) {
            let found = watch(&*split, &tokens, Everything::default());
            assert_eq!(found.layers, expected.layers, "{about}");
            for (found, expected) in found.seen.iter().zip(&expected.seen) {
                assert_near(found, expected, &about);
            }
        }
    }
}

#[test]
fn a_predictor_is_not_fitted_to_a_model_in_two_places() {
    let fixture = Fixture::demo();
    let info = load_plain(&fixture, None).info().clone();
    let tokens: Vec<u32> = (0..400).map(|i| i * 7 % 250).collect();
    let mut options = TrainOptions::new(TrainMethod::Svd);
    (options.context, options.held_out, options.survey) = (32, 64, 128);
    let fit = |share| {
        let model = load_plain(&fixture, Some(placement(&info, share, 1, true)));
        let go_on = &mut |_: &_| ControlFlow::Continue(());
        pool(2).install(|| train_predictor(&*model, &tokens, &options, go_on))
    };
    let refused = fit(0.4).unwrap_err();
    assert!(matches!(refused, Error::Training { .. }), "{refused}");
    assert!(refused.to_string().contains("hot and cold"), "{refused}");
    // of this one all neurons are the host's
    let made = fit(0.0).unwrap();
    assert_eq!(made.counts.len(), info.n_layers);
}
