//! Which predictor a layer gets is chosen by its weights, as they are held, and by nothing else: whatever
//! part of a model lies on a fast device, the same layers predict from the same copies of their gates, the
//! others run exactly, and the logits are those of the CPU alone.
#![allow(clippy::unwrap_used, reason = "helper functions of tests")]

#[path = "support/run.rs"]
mod run;

use std::path::Path;
use std::sync::Arc;

use powerinfer_core::{
    ActivationProfile, CausalLm, Hardware, Holding, ModelInfo, Offload, Placement, Plan,
    PlanRequest, Sparsity, Step, WantedLogits, plan,
};
use powerinfer_models::{LoadOptions, PredictorOptions, PredictorSource, load, model_sizes};
use powerinfer_ops::{FastDevice, NeuronIds, StandIn, StandInOptions, WeightFormat};
use run::{MAX_BYTES, modes, pool};
use testing::tolerance::max_distance;
use testing::{Fixture, Seeded};

/// How far logits may lie from those of the CPU alone.
const BOUND: f64 = 1e-4;

fn stand_in(budget_bytes: u64) -> Arc<dyn FastDevice> {
    Arc::new(StandIn::new(StandInOptions::new(budget_bytes)).unwrap())
}

/// Fixtures that fire for some neurons only.
fn sparse_fixtures() -> impl Iterator<Item = Fixture> {
    Fixture::all("").into_iter().filter(|fixture| modes(fixture).contains(&Sparsity::Exact))
}

fn automatic(dtype: Option<WeightFormat>) -> LoadOptions {
    LoadOptions::default()
        .with_pytorch(MAX_BYTES)
        .with_dtype(dtype)
        .with_predictor(PredictorOptions::default())
}

fn loaded(dir: &Path, options: &LoadOptions) -> Box<dyn CausalLm> {
    load(dir, options).unwrap_or_else(|error| panic!("{}: {error}", dir.display()))
}

/// What the notes say about predictors, layer by layer.
fn choices(info: &ModelInfo) -> Vec<&str> {
    let said = |note: &&str| note.contains("predict from") || note.contains("run exactly");
    info.notes.iter().map(String::as_str).filter(said).collect()
}

/// Logits of a prompt and of two tokens after it, and the statistics.
fn write(model: &dyn CausalLm, prompt: &[u32]) -> (Vec<f32>, Step) {
    let (mut cache, mut logits) = (model.new_cache(), Vec::new());
    let mut step = Step { wanted: WantedLogits::All, ..Step::default() };
    for tokens in [prompt, &prompt[..1], &prompt[1..2]] {
        pool(2).install(|| model.forward(tokens, &mut cache, &mut step)).unwrap();
        logits.extend_from_slice(&step.logits);
    }
    (logits, step)
}

fn assert_same(about: &str, whole: &dyn CausalLm, split: &dyn CausalLm, prompt: &[u32]) {
    let (expected, found) = (whole.info(), split.info());
    assert_eq!(found.fast_device.as_deref(), Some("stand-in"), "{about}");
    assert_eq!(choices(found), choices(expected), "{about}");
    assert_eq!(found.predictor, expected.predictor, "{about}");
    assert_eq!(found.sparsity, expected.sparsity, "{about}");
    assert_eq!(found.weight_bytes, expected.weight_bytes, "{about}");
    let [(expected, whole), (found, split)] = [whole, split].map(|model| write(model, prompt));
    let distance = max_distance(&found, &expected);
    assert!(distance <= BOUND, "{about}: {distance}");
    assert_eq!(split.stats.picked_per_layer, whole.stats.picked_per_layer, "{about}");
    assert_eq!(split.stats.fired_per_layer, whole.stats.fired_per_layer, "{about}");
}

/// A random part of every layer's neurons, attention of every second layer, and the head.
fn placement(info: &ModelInfo, share: f32, seed: u64) -> Placement {
    let mut random = Seeded::new(seed);
    let hot =
        (0..info.n_layers).map(|_| NeuronIds::from_sorted(random.ids(info.d_ff, share)).unwrap());
    let attention = (0..info.n_layers).map(|layer| (layer as u64 + seed).is_multiple_of(2));
    Placement::new(hot.collect(), info.d_ff)
        .unwrap()
        .with_fast_attention(attention.collect())
        .unwrap()
        .with_fast_head(seed.is_multiple_of(2))
}

/// A plan that puts about half of the neurons on a device.
fn half(dir: &Path, options: &LoadOptions, info: &ModelInfo) -> Plan {
    let sizes = model_sizes(dir, options).unwrap();
    let mut profile = ActivationProfile::new(info, false).unwrap();
    for layer in 0..info.n_layers {
        let fired = Seeded::new(layer as u64).uniform(info.d_ff, 0.0, 1.0);
        profile.record(layer, &fired, &fired).unwrap();
    }
    profile.add_tokens(1);
    let layers = sizes.layers.iter().map(|layer| layer.neuron_bytes());
    let budget = layers.sum::<u64>() * info.d_ff as u64 / 2;
    let hardware = Hardware::preset(Hardware::PRESETS[0]).unwrap();
    plan(&PlanRequest::new(&sizes, &profile, &hardware, budget).with_sync_rule(false)).unwrap()
}

#[test]
fn every_placement_gets_the_predictors_of_the_whole_model() {
    let mut predicted = 0;
    for fixture in sparse_fixtures() {
        let (dir, options) = (fixture.model_dir.as_path(), automatic(Some(WeightFormat::F32)));
        let whole = loaded(dir, &options);
        let (info, prompt) = (whole.info(), run::random_tokens(&*whole, 6, 3));
        let prompt = prompt.as_slice();
        predicted += usize::from(info.sparsity == Sparsity::Predicted);
        let roomy = || options.clone().with_fast_device(stand_in(u64::MAX));
        for offload in Offload::ALL {
            let split = loaded(dir, &roomy().with_offload(offload));
            assert_same(&format!("{} {offload}", fixture.name), &*whole, &*split, prompt);
        }
        for (seed, share) in [0.0, 0.3, 0.6, 1.0].into_iter().enumerate() {
            let split = loaded(dir, &roomy().with_placement(placement(info, share, seed as u64)));
            assert_same(&format!("{} {share}", fixture.name), &*whole, &*split, prompt);
        }
        let split = loaded(dir, &roomy().with_plan(half(dir, &options, info)));
        assert_same(&format!("{} plan", fixture.name), &*whole, &*split, prompt);
        for budget in [0, 100_000, 1_000_000] {
            let device = stand_in(budget);
            let split = loaded(dir, &options.clone().with_fast_device(device));
            assert_same(&format!("{} {budget}", fixture.name), &*whole, &*split, prompt);
        }
        // without a device both parts are the CPU's
        let parted = loaded(dir, &options.clone().with_placement(placement(info, 0.5, 1)));
        assert_eq!(choices(parted.info()), choices(info), "{}", fixture.name);
        assert_eq!(parted.info().sparsity, info.sparsity, "{}", fixture.name);
    }
    assert!(predicted >= 3, "only {predicted} models predict");
}

#[test]
fn layers_that_are_to_run_exactly_do_so_under_a_split() {
    let mut exact = 0;
    for (fixture, dtype) in Fixture::trained()
        .into_iter()
        .flat_map(|fixture| WeightFormat::ALL.map(|dtype| (fixture.clone(), dtype)))
    {
        let (dir, options) = (fixture.model_dir.as_path(), automatic(Some(dtype)));
        let whole = loaded(dir, &options);
        for share in [0.4, 1.0] {
            let placed = options.clone().with_placement(placement(whole.info(), share, 3));
            let split = loaded(dir, &placed.with_fast_device(stand_in(u64::MAX)));
            let about = format!("{} {dtype} {share}", fixture.name);
            assert_eq!(choices(split.info()), choices(whole.info()), "{about}");
            assert_eq!(split.info().sparsity, whole.info().sparsity, "{about}");
            assert_eq!(split.info().predictor, whole.info().predictor, "{about}");
            exact += usize::from(split.info().sparsity == Sparsity::Exact);
        }
    }
    assert!(exact > 0, "in q4_0 no copy pays");
}

#[test]
fn predictors_that_are_given_are_kept_or_dropped_alike() {
    for fixture in Fixture::trained() {
        let dir = fixture.model_dir.as_path();
        let bits = PredictorSource::Quantized(Some(powerinfer_ops::LowBitFormat::Bits2));
        // a floor that some layers reach and some do not
        for floor in [0.5, 0.97, 0.985, 0.99] {
            let predictor = PredictorOptions::new(bits.clone()).with_floor(floor).with_shift(-0.4);
            let options = LoadOptions::default().with_predictor(predictor);
            let whole = loaded(dir, &options);
            let placed = options.clone().with_placement(placement(whole.info(), 0.5, 2));
            let split = loaded(dir, &placed.with_fast_device(stand_in(u64::MAX)));
            assert_eq!(choices(split.info()), choices(whole.info()), "{} {floor}", fixture.name);
        }
    }
}

/// A mapped file whose down projections lie by output is not predicted on the CPU, and so not on a device.
#[test]
fn what_is_mapped_is_predicted_nowhere_or_everywhere() {
    let fixture = Fixture::demo();
    let options = automatic(None).with_holding(Holding::Mapped);
    let whole = loaded(&fixture.model_dir, &options);
    let placed = options.clone().with_placement(placement(whole.info(), 0.5, 2));
    let split = loaded(&fixture.model_dir, &placed.with_fast_device(stand_in(u64::MAX)));
    assert_eq!(split.info().sparsity, whole.info().sparsity);
    assert_eq!(split.info().predictor, whole.info().predictor);
    assert!(split.info().notes.iter().any(|note| note.contains("not predicted")));
}
