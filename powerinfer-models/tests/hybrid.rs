//! The laws of hybrid execution: whatever part of the neurons lies on a fast device, the logits are
//! those of the CPU alone, in every mode and at any number of threads; the budget holds; and a
//! device that fails is an error.
#![allow(clippy::unwrap_used, reason = "helper functions of tests")]

#[path = "support/run.rs"]
mod run;

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use powerinfer_core::{
    ActivationProfile, CausalLm, Error as CoreError, Hardware, Placement, PlanRequest, Sparsity,
    Step, plan,
};
use powerinfer_models::{Error, LoadOptions, PredictorOptions, PredictorSource, load, model_sizes};
use powerinfer_ops::{
    DeviceMemory, FastDevice, FfnWeights, HeldFfn, HeldNeurons, HeldRun, HotRows, LowBitFormat,
    NeuronIds, OpError, PendingFfn, StandIn, StandInOptions, ThreadPool,
};
use run::{MAX_BYTES, modes, pool};
use testing::tolerance::max_distance;
use testing::{Fixture, Seeded};

/// Shares of the neurons that are hot.
const SHARES: [f32; 7] = [0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0];
/// How far logits may lie from those of the CPU alone.
const BOUND: f64 = 1e-4;
/// Tokens that are written.
const N_WRITTEN: usize = 4;

fn stand_in(budget_bytes: u64) -> Arc<StandIn> {
    Arc::new(StandIn::new(StandInOptions::new(budget_bytes)).unwrap())
}

fn options(fixture: &Fixture) -> LoadOptions {
    let options = LoadOptions::default().with_pytorch(MAX_BYTES);
    if !modes(fixture).contains(&Sparsity::Exact) {
        return options;
    }
    // no layer is to be without its predictor, however bad it is on a random model
    let bits = PredictorSource::Quantized(Some(LowBitFormat::Bits3));
    options.with_predictor(PredictorOptions::new(bits).with_floor(0.0))
}

fn load_as(fixture: &Fixture, options: &LoadOptions) -> Box<dyn CausalLm> {
    load(&fixture.model_dir, options).unwrap_or_else(|error| panic!("{}: {error}", fixture.name))
}

/// A random part of every layer.
fn placement(info: &powerinfer_core::ModelInfo, share: f32, seed: u64) -> Placement {
    let mut random = Seeded::new(seed);
    let mut layer = |_| NeuronIds::from_sorted(random.ids(info.d_ff, share)).unwrap();
    Placement::new((0..info.n_layers).map(&mut layer).collect(), info.d_ff).unwrap()
}

/// Greedy tokens, and the logits that each was chosen from.
fn write(
    model: &dyn CausalLm,
    prompt: &[u32],
    mode: Sparsity,
    pool: &ThreadPool,
) -> (Vec<u32>, Vec<f32>, Step) {
    let (mut cache, mut step) = (model.new_cache(), Step::default());
    step.sparsity = Some(mode);
    let (mut next, mut ids, mut logits) = (prompt.to_vec(), Vec::new(), Vec::new());
    for _ in 0..N_WRITTEN {
        pool.install(|| model.forward(&next, &mut cache, &mut step)).unwrap();
        let best = step.logits.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).unwrap().0;
        next = vec![u32::try_from(best).unwrap()];
        ids.push(next[0]);
        logits.extend_from_slice(&step.logits);
    }
    (ids, logits, step)
}

/// What the CPU alone gives in each mode that the loaded model has.
fn on_the_cpu(model: &dyn CausalLm, prompt: &[u32]) -> Vec<(Sparsity, Vec<u32>, Vec<f32>, Step)> {
    let modes: &[Sparsity] = match model.info().sparsity {
        Sparsity::Predicted => &[Sparsity::Dense, Sparsity::Exact, Sparsity::Predicted],
        Sparsity::Exact => &[Sparsity::Dense, Sparsity::Exact],
        _ => &[Sparsity::Dense],
    };
    let run = |&mode: &Sparsity| {
        let (ids, logits, step) = write(model, prompt, mode, &pool(2));
        (mode, ids, logits, step)
    };
    modes.iter().map(run).collect()
}

/// Fails unless the split model writes what the CPU alone wrote, at any number of threads; returns how
/// often it was predicted.
fn assert_same(
    about: &str,
    split: &dyn CausalLm,
    prompt: &[u32],
    expected: &[(Sparsity, Vec<u32>, Vec<f32>, Step)],
) -> usize {
    let mut predicted = 0;
    for (mode, ids, logits, step) in expected {
        for pool in [1, 2, 4].map(pool) {
            let (split_ids, split_logits, split_step) = write(split, prompt, *mode, &pool);
            let distance = max_distance(&split_logits, logits);
            assert!(distance <= BOUND, "{about} {mode}: {distance}");
            assert_eq!(&split_ids, ids, "{about} {mode}");
            let (stats, whole) = (&split_step.stats, &step.stats);
            assert_eq!(stats.neurons_per_layer, whole.neurons_per_layer);
            assert_eq!(stats.picked_per_layer, whole.picked_per_layer, "{about} {mode}");
            assert_eq!(stats.fired_per_layer, whole.fired_per_layer, "{about} {mode}");
            assert_eq!(stats.split.layers == 0, split.info().fast_bytes == 0);
            predicted += usize::from(*mode == Sparsity::Predicted);
        }
    }
    predicted
}

#[test]
fn any_part_of_the_neurons_may_lie_on_a_fast_device() {
    let mut predicted = 0;
    for fixture in Fixture::all("") {
        let options = options(&fixture);
        let whole = load_as(&fixture, &options);
        let prompt = &fixture.golden().prompts[0].input_ids;
        let expected = on_the_cpu(&*whole, prompt);
        for (seed, share) in SHARES.into_iter().enumerate() {
            let threads = NonZeroUsize::new(1 + seed % 2).unwrap();
            let device = StandInOptions::new(u64::MAX).with_threads(threads);
            let device = Arc::new(StandIn::new(device).unwrap());
            let placement = placement(whole.info(), share, seed as u64);
            let options = options.clone().with_placement(placement);
            let split = load_as(&fixture, &options.with_fast_device(device));
            assert_eq!(split.info().fast_device.as_deref(), Some("stand-in"));
            assert_eq!(split.info().sparsity, whole.info().sparsity);
            assert_eq!(split.info().fast_bytes == 0, share == 0.0);
            let about = format!("{} {share}", fixture.name);
            predicted += assert_same(&about, &*split, prompt, &expected);
        }
    }
    assert!(predicted > 100, "only {predicted} runs were predicted");
}

#[test]
fn any_budget_is_kept_and_changes_no_logits() {
    for fixture in Fixture::all("") {
        let options = options(&fixture);
        let whole = load_as(&fixture, &options);
        let prompt = &fixture.golden().prompts[0].input_ids;
        let expected = on_the_cpu(&*whole, prompt);
        let info = whole.info();
        let sizes = model_sizes(&fixture.model_dir, &options).unwrap();
        let layers = sizes.layers.iter().map(|layer| layer.neuron_bytes());
        let ffn_bytes = layers.sum::<u64>() * info.d_ff as u64;
        let mut before = 0;
        for percent in [0, 10, 25, 50, 75, 90, 100] {
            let workspace = stand_in(0).workspace_bytes(info.d_ff, info.d_model, 0);
            let budget = workspace * u64::from(percent > 0) + ffn_bytes * percent / 100;
            let device = stand_in(budget);
            let options = options.clone().with_fast_device(device.clone());
            let split = load_as(&fixture, &options);
            let memory = device.memory();
            assert!(memory.peak_bytes <= budget, "{} {percent}", fixture.name);
            assert_eq!(memory.held_bytes, memory.peak_bytes);
            assert!(split.info().fast_bytes >= before, "more room, more neurons");
            before = split.info().fast_bytes;
            assert_eq!(split.info().sparsity, info.sparsity);
            let about = format!("{} {percent} %", fixture.name);
            assert_same(&about, &*split, prompt, &expected);
        }
        assert!(before > 0, "{}", fixture.name);
    }
}

#[test]
fn the_profile_beside_a_model_says_which_neurons_are_hot() {
    let fixture = Fixture::demo();
    let sizes = model_sizes(&fixture.model_dir, &LoadOptions::default()).unwrap();
    let ffn_bytes: u64 = sizes.layers.iter().map(|layer| 1024 * layer.neuron_bytes()).sum();
    let workspace = stand_in(0).workspace_bytes(1024, sizes.model.d_model, 0);
    let budget = workspace + ffn_bytes / 4;
    let prompt = &fixture.golden().prompts[0].input_ids;
    let hit_rate = |options: LoadOptions| {
        let split = load_as(&fixture, &options.with_fast_device(stand_in(budget)));
        let (.., step) = write(&*split, prompt, Sparsity::Exact, &pool(1));
        (step.stats.split.hit_rate(), split.info().notes.clone())
    };
    let (by_profile, notes) = hit_rate(LoadOptions::default());
    let said = "stand-in has 24.0 % of the neurons, the CPU the embeddings and the rest";
    assert_eq!(notes, [said]);
    let profile = fixture.model_dir.join("activation_counts.safetensors");
    let profile = ActivationProfile::load(&profile).unwrap();
    let (by_hand, _) = hit_rate(LoadOptions::default().with_profile(profile.clone()));
    assert_eq!(by_hand, by_profile);
    assert!(by_profile > 0.5, "a quarter of the neurons makes {by_profile} of the activations");

    // a model without one says so, and a profile of another model is refused
    let opt = Fixture::trained().remove(1);
    let device = || stand_in(u64::MAX);
    let model = load_as(&opt, &LoadOptions::default().with_fast_device(device()));
    assert!(model.info().notes.iter().any(|note| note.starts_with("no profile beside")));
    let foreign = LoadOptions::default().with_profile(profile).with_fast_device(device());
    let refused = load(&opt.model_dir, &foreign).unwrap_err();
    assert!(matches!(refused, Error::Core(CoreError::ProfileMismatch { .. })), "{refused}");
}

#[test]
fn a_plan_out_of_a_file_is_that_of_its_model_and_fits_the_device() {
    let fixture = Fixture::demo();
    let sizes = model_sizes(&fixture.model_dir, &LoadOptions::default()).unwrap();
    let profile = fixture.model_dir.join("activation_counts.safetensors");
    let profile = ActivationProfile::load(&profile).unwrap();
    let hardware = Hardware::preset("rtx-4090").unwrap();
    let workspace = stand_in(0).workspace_bytes(1024, sizes.model.d_model, 0);
    let request = PlanRequest::new(&sizes, &profile, &hardware, workspace + (2 << 20))
        .with_workspace_bytes(workspace)
        .with_sync_rule(false);
    let made = plan(&request).unwrap();
    let with_plan = |fixture: &Fixture, budget| {
        let options = LoadOptions::default().with_plan(made.clone());
        load(&fixture.model_dir, &options.with_fast_device(stand_in(budget)))
    };
    let split = with_plan(&fixture, made.bytes_fast).unwrap();
    let hot: usize = made.hot_neurons_per_layer().iter().sum();
    assert!(hot > 1000);
    let whole = load_as(&fixture, &LoadOptions::default());
    let prompt = &fixture.golden().prompts[0].input_ids;
    assert_same("a plan", &*split, prompt, &on_the_cpu(&*whole, prompt));

    let refused = with_plan(&fixture, made.bytes_fast - 1).unwrap_err();
    assert!(matches!(refused, Error::Core(CoreError::PlanOverBudget { .. })), "{refused}");
    let refused = with_plan(&Fixture::trained()[1], u64::MAX).unwrap_err();
    assert!(matches!(refused, Error::Core(CoreError::PlanMismatch { .. })), "{refused}");
}

/// A device that holds no predictors, and that fails from some piece of work on.
#[derive(Debug)]
struct Faulty {
    inner: Arc<StandIn>,
    left: Arc<AtomicUsize>,
}

#[derive(Debug)]
struct FaultyFfn(Box<dyn HeldFfn>, Arc<AtomicUsize>);

#[derive(Debug)]
struct FaultyWork(Box<dyn PendingFfn>);

impl FastDevice for Faulty {
    fn name(&self) -> &str {
        "faulty"
    }
    fn memory(&self) -> DeviceMemory {
        self.inner.memory()
    }
    fn workspace_bytes(&self, n_neurons: usize, d_model: usize, rank: usize) -> u64 {
        self.inner.workspace_bytes(n_neurons, d_model, rank)
    }
    fn hold(&self, rows: HotRows<'_>) -> Result<Box<dyn HeldFfn>, OpError> {
        let held = self.inner.hold(rows)?;
        Ok(Box::new(FaultyFfn(held, Arc::clone(&self.left))))
    }
}

impl HeldFfn for FaultyFfn {
    fn n_neurons(&self) -> usize {
        self.0.n_neurons()
    }
    fn d_model(&self) -> usize {
        self.0.d_model()
    }
    fn size_bytes(&self) -> u64 {
        self.0.size_bytes()
    }
    fn start(&self, neurons: HeldNeurons<'_>, x: &[f32]) -> Result<Box<dyn PendingFfn>, OpError> {
        let pending = self.0.start(neurons, x)?;
        let left = self.1.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |n| n.checked_sub(1));
        match left {
            Ok(_) => Ok(pending),
            Err(_) => Ok(Box::new(FaultyWork(pending))),
        }
    }
    fn read_back(&self) -> Result<FfnWeights, OpError> {
        self.0.read_back()
    }
}

impl PendingFfn for FaultyWork {
    fn wait(self: Box<Self>, y: &mut [f32]) -> Result<HeldRun, OpError> {
        let _ = self.0.wait(&mut y.to_vec())?;
        Err(OpError::DeviceFailed { device: "faulty".into(), source: "unplugged".into() })
    }
}

fn faulty(works_for: usize) -> Faulty {
    Faulty { inner: stand_in(u64::MAX), left: Arc::new(works_for.into()) }
}

#[test]
fn a_device_without_predictors_gets_lists_of_what_is_picked() {
    for fixture in Fixture::trained() {
        let options = options(&fixture);
        let whole = load_as(&fixture, &options);
        let prompt = &fixture.golden().prompts[0].input_ids;
        let options = options.with_placement(placement(whole.info(), 0.4, 5));
        let device: Arc<dyn FastDevice> = Arc::new(faulty(usize::MAX));
        let split = load_as(&fixture, &options.with_fast_device(device));
        let [expected, found] =
            [&whole, &split].map(|model| write(&**model, prompt, Sparsity::Predicted, &pool(2)));
        assert_eq!(found.0, expected.0);
        assert!(max_distance(&found.1, &expected.1) <= BOUND);
        assert_eq!(found.2.stats.picked_per_layer, expected.2.stats.picked_per_layer);
    }
}

#[test]
fn what_neurons_give_is_seen_wherever_they_lie() {
    let fixture = Fixture::demo();
    let options = options(&fixture);
    let whole = load_as(&fixture, &options);
    let options = options.with_placement(placement(whole.info(), 0.5, 5));
    let split = load_as(&fixture, &options.with_fast_device(stand_in(u64::MAX)));
    let [expected, found] = [&whole, &split].map(|model| {
        let (mut cache, mut step) = (model.new_cache(), Step::default());
        step.measure_prediction = true;
        model.forward(&[1, 5, 9, 200], &mut cache, &mut step).unwrap();
        step.stats.prediction().unwrap()
    });
    assert_eq!(
        (found.picked, found.fired, found.hits),
        (expected.picked, expected.fired, expected.hits)
    );
    assert!((found.mass - expected.mass).abs() < 1e-3 * expected.mass);
}

#[test]
fn a_device_that_fails_midway_fails_the_pass_and_leaves_the_context() {
    let fixture = Fixture::demo();
    let whole = load_as(&fixture, &LoadOptions::default());
    let n_layers = whole.info().n_layers;
    let options = LoadOptions::default().with_placement(placement(whole.info(), 0.5, 5));
    // the second pass fails in its third layer
    let device: Arc<dyn FastDevice> = Arc::new(faulty(n_layers + 2));
    let split = load_as(&fixture, &options.with_fast_device(device));
    let (mut cache, mut step) = (split.new_cache(), Step::default());
    split.forward(&[1, 5], &mut cache, &mut step).unwrap();
    for _ in 0..2 {
        let error = split.forward(&[9], &mut cache, &mut step).unwrap_err();
        assert!(
            matches!(&error, CoreError::Op(OpError::DeviceFailed { device, .. }) if device == "faulty"),
            "{error}"
        );
        assert_eq!(cache.len(), 2);
    }
}

#[test]
fn a_budget_that_is_too_small_is_refused_and_memory_comes_back() {
    let fixture = Fixture::demo();
    let info = load_as(&fixture, &LoadOptions::default()).info().clone();
    let options = LoadOptions::default().with_placement(placement(&info, 0.5, 5));
    let device = stand_in(u64::MAX);
    let model = load_as(&fixture, &options.clone().with_fast_device(device.clone()));
    let DeviceMemory { held_bytes, peak_bytes, .. } = device.memory();
    let reserved = held_bytes - model.info().fast_bytes;
    assert!(reserved <= device.workspace_bytes(info.d_ff, info.d_model, 0));
    assert_eq!(peak_bytes, held_bytes, "loading takes no more than what stays");
    drop(model);
    assert_eq!(device.memory().held_bytes, reserved);

    let small = stand_in(held_bytes - 1);
    let refused = load(&fixture.model_dir, &options.clone().with_fast_device(small.clone()));
    let Err(Error::Core(CoreError::Op(OpError::DeviceBudget { budget_bytes, .. }))) = refused
    else {
        panic!("{refused:?}");
    };
    assert_eq!(budget_bytes, held_bytes - 1);
    assert!(small.memory().held_bytes <= reserved, "what was held is given back");
    assert!(small.memory().peak_bytes <= budget_bytes);
    let exact = stand_in(held_bytes);
    let _ = load_as(&fixture, &options.with_fast_device(exact));
}

#[test]
fn predictors_that_do_not_fit_the_device_stay_on_the_cpu() {
    let fixture = Fixture::demo();
    let info = load_as(&fixture, &LoadOptions::default()).info().clone();
    let placed = LoadOptions::default().with_placement(placement(&info, 0.5, 5));
    let rows = stand_in(u64::MAX);
    let without = load_as(&fixture, &placed.clone().with_fast_device(rows.clone()));
    // room for all rows and for the predictors of some layers
    let budget = rows.memory().held_bytes + 200_000;
    let bits = PredictorSource::Quantized(Some(LowBitFormat::Bits3));
    let predictor = PredictorOptions::new(bits).with_floor(0.0);
    let device = stand_in(budget);
    let options = placed.with_predictor(predictor);
    let split = load_as(&fixture, &options.clone().with_fast_device(device.clone()));
    assert!(device.memory().peak_bytes <= budget);
    assert!(split.info().fast_bytes > without.info().fast_bytes);
    let note = "the CPU runs the predictors of 3 of 6 layers for stand-in";
    assert!(split.info().notes.iter().any(|found| found == note), "{:?}", split.info().notes);
    let roomy = load_as(&fixture, &options.with_fast_device(stand_in(u64::MAX)));
    let prompt = &fixture.golden().prompts[0].input_ids;
    let [expected, found] =
        [&roomy, &split].map(|model| write(&**model, prompt, Sparsity::Predicted, &pool(1)));
    assert_eq!((found.0, found.1), (expected.0, expected.1));
}
