//! Predictors of two layers in models of which parts lie on a fast device: the same neurons run, and the logits are
//! those of the CPU alone.
#![allow(clippy::unwrap_used, reason = "helper functions of tests")]

#[path = "support/run.rs"]
mod run;

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;

use powerinfer_core::{CausalLm, Sparsity, Step, StepStats, WantedLogits};
use powerinfer_models::{
    LoadOptions, PredictorOptions, PredictorSource, TrainMethod, TrainOptions, load,
    train_predictor,
};
use powerinfer_ops::{StandIn, StandInOptions, WeightFormat};
use run::{MAX_BYTES, modes, placement, pool, random_tokens};
use testing::tolerance::max_distance;
use testing::{Fixture, assert_same_bits};

/// How far logits may lie from those of the CPU alone.
const BOUND: f64 = 1e-4;

fn options(predictor: PredictorSource) -> LoadOptions {
    let predictor = PredictorOptions::new(predictor).with_floor(0.0);
    LoadOptions::default().with_pytorch(MAX_BYTES).with_predictor(predictor)
}

/// Logits and counts of a predicted run in pieces.
fn write(model: &dyn CausalLm, tokens: &[u32], pieces: &[usize]) -> (Vec<f32>, StepStats) {
    let (wanted, sparsity) = (WantedLogits::All, Some(Sparsity::Predicted));
    let mut step = Step { wanted, sparsity, ..Step::default() };
    let (mut cache, mut logits, mut done) = (model.new_cache(), Vec::new(), 0);
    for &piece in pieces {
        let tokens = &tokens[done..done + piece];
        pool(2).install(|| model.forward(tokens, &mut cache, &mut step)).unwrap();
        logits.extend_from_slice(&step.logits);
        done += piece;
    }
    (logits, step.stats)
}

/// Fails unless a model with that predictor runs the same wherever its parts lie. Returns how many neurons were
/// picked and how many there were.
fn check(fixture: &Fixture, options: &LoadOptions) -> [u64; 2] {
    let load_as = |options: &LoadOptions| load(&fixture.model_dir, options).unwrap();
    let whole = load_as(options);
    let info = whole.info();
    assert_eq!(info.sparsity, Sparsity::Predicted, "{}", fixture.name);
    let tokens = random_tokens(&*whole, 23, 5);
    let (expected, whole_stats) = write(&*whole, &tokens, &[23]);
    for share in [0.0, 0.4, 1.0] {
        let placed = |nth| {
            let device = Arc::new(StandIn::new(StandInOptions::new(u64::MAX)).unwrap());
            let options = options.clone().with_placement(placement(info, share, nth, nth == 1));
            load_as(&options.with_fast_device(device))
        };
        // dense parts change no bit, hot neurons the order of sums
        let (on_the_host, _) = write(&*placed(0), &tokens, &[23]);
        let distance = max_distance(&on_the_host, &expected);
        assert!(distance <= BOUND, "{} {share}: {distance}", fixture.name);
        for nth in [1, 2] {
            let split = placed(nth);
            for pieces in [&[23][..], &[18, 1, 4]] {
                let about = format!("{} {share}, attention {nth}, {pieces:?}", fixture.name);
                let (found, stats) = write(&*split, &tokens, pieces);
                assert_same_bits(&found, &on_the_host, &about);
                assert_eq!(stats.picked_per_layer, whole_stats.picked_per_layer, "{about}");
                assert_eq!(stats.fired_per_layer, whole_stats.fired_per_layer, "{about}");
            }
        }
    }
    let picked = whole_stats.picked_per_layer.iter().sum();
    [picked, (info.n_layers * info.d_ff * tokens.len()) as u64]
}

#[test]
fn a_predictor_of_two_layers_picks_the_same_wherever_parts_lie() {
    let mut n_models = 0;
    for fixture in Fixture::micros("").iter().filter(|model| modes(model).len() > 1) {
        let random = PredictorSource::Random { rank: 8, density: 0.3 };
        let [picked, all] = check(fixture, &options(random));
        assert!(picked > all / 20 && picked < all * 3 / 4, "{}: {picked} of {all}", fixture.name);
        n_models += 1;
    }
    assert!(n_models > 5);
}

/// One that was fitted, as files hold it.
fn fitted(folder: &Path, method: TrainMethod) -> PredictorSource {
    let model = load(&Fixture::demo().model_dir, &LoadOptions::default()).unwrap();
    let tokens: Vec<u32> = (0..3000).map(|i| i * 7 % 250).collect();
    let mut options = TrainOptions::new(method);
    (options.context, options.held_out, options.survey) = (64, 256, 512);
    (options.piece, options.batch, options.measure_every) = (512, 64, 1);
    let go_on = &mut |_: &_| ControlFlow::Continue(());
    let made = pool(2).install(|| train_predictor(&*model, &tokens, &options, go_on)).unwrap();
    let path = folder.join(method.name());
    made.predictor.save(&path).unwrap();
    PredictorSource::File(path)
}

#[test]
fn fitted_predictors_pick_the_same_wherever_parts_lie() {
    let folder = tempfile::tempdir().unwrap();
    for method in [TrainMethod::Svd, TrainMethod::Trained] {
        let source = fitted(folder.path(), method);
        for dtype in [None, Some(WeightFormat::Q8_0)] {
            let predictor = PredictorOptions::new(source.clone()).with_floor(0.0).with_dtype(dtype);
            let [picked, all] =
                check(&Fixture::demo(), &LoadOptions::default().with_predictor(predictor));
            assert!(picked > 0 && picked < all, "{picked} of {all}");
        }
    }
}
