//! Whole models with some or all of their parts on the device: they write what they write on the CPU alone.

use std::sync::Arc;

use hostsim::SimDevice;
use powerinfer_core::{CausalLm, ModelInfo, Placement, Sparsity, Step};
use powerinfer_models::{LoadOptions, PredictorOptions, PredictorSource, load};
use powerinfer_ops::attention::KvDtype;
use powerinfer_ops::{FastDevice, LowBitFormat, NeuronIds, StandIn, StandInOptions};
use testing::tolerance::max_distance;
use testing::{Fixture, Seeded, assert_same_bits};

/// How far logits may lie from those of the CPU alone.
const BOUND: f64 = 1e-4;
/// Likewise where keys and values are rounded to f16, one of which may fall to the other side.
const HALF_BOUND: f64 = 2e-3;
/// Tokens that are written.
const N_WRITTEN: usize = 3;
const MAX_BYTES: u64 = 1 << 20;

fn options(sparse: bool) -> LoadOptions {
    let options = LoadOptions::default().with_pytorch(MAX_BYTES);
    if !sparse {
        return options;
    }
    // no layer is to be without its predictor, however bad it is on a random model
    let bits = PredictorSource::Quantized(Some(LowBitFormat::Bits3));
    options.with_predictor(PredictorOptions::new(bits).with_floor(0.0))
}

fn load_as(fixture: &Fixture, options: &LoadOptions) -> Box<dyn CausalLm> {
    load(&fixture.model_dir, options).unwrap_or_else(|error| panic!("{}: {error}", fixture.name))
}

/// Where parts lie, by name.
pub(crate) fn placements(info: &ModelInfo) -> [(&'static str, Placement); 3] {
    let of = |share: f32| {
        let mut random = Seeded::new(3);
        let mut layer = |_| NeuronIds::from_sorted(random.ids(info.d_ff, share)).unwrap();
        Placement::new((0..info.n_layers).map(&mut layer).collect(), info.d_ff).unwrap()
    };
    let last = (0..info.n_layers).map(|layer| layer + 1 == info.n_layers).collect();
    let mixed = of(0.6).with_fast_attention(last).unwrap().with_fast_head(true);
    let whole = Placement::all_fast(info.n_layers, info.d_ff);
    [("neurons", of(0.3)), ("a layer and the head", mixed), ("everything", whole)]
}

/// Greedy tokens, the logits that each was chosen from, and what the last step did.
fn write(model: &dyn CausalLm, prompt: &[u32], mode: Sparsity) -> (Vec<u32>, Vec<f32>, Step) {
    let (mut cache, mut step) = (model.new_cache(), Step::default());
    step.sparsity = Some(mode);
    let (mut next, mut ids, mut logits) = (prompt.to_vec(), Vec::new(), Vec::new());
    for _ in 0..N_WRITTEN {
        model.forward(&next, &mut cache, &mut step).unwrap();
        let best = step.logits.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).unwrap().0;
        next = vec![u32::try_from(best).unwrap()];
        ids.push(next[0]);
        logits.extend_from_slice(&step.logits);
    }
    (ids, logits, step)
}

/// The modes that a loaded model has.
fn modes(model: &dyn CausalLm) -> &'static [Sparsity] {
    match model.info().sparsity {
        Sparsity::Predicted => &[Sparsity::Dense, Sparsity::Exact, Sparsity::Predicted],
        Sparsity::Exact => &[Sparsity::Dense, Sparsity::Exact],
        _ => &[Sparsity::Dense],
    }
}

#[test]
fn any_part_of_a_model_may_lie_on_the_device() {
    let mut predicted = 0;
    for (at, fixture) in Fixture::micros("").iter().enumerate() {
        let plain = load_as(fixture, &options(false));
        let kv = if at % 2 == 0 { KvDtype::F32 } else { KvDtype::F16 };
        let options = options(plain.info().sparsity == Sparsity::Exact).with_kv_dtype(kv);
        let whole = load_as(fixture, &options);
        let prompt = &fixture.golden().prompts[0].input_ids;
        let prompt = &prompt[..prompt.len().min(19)];
        for (name, placement) in placements(whole.info()) {
            let device = Arc::new(SimDevice::new(1 << 30, at as u64));
            let options = options.clone().with_placement(placement);
            let split = load_as(fixture, &options.with_fast_device(device.clone()));
            assert!(split.info().fast_bytes > 0);
            assert_eq!(device.n_dense_parts() > 0, name != "neurons", "{} {name}", fixture.name);
            let bound = if kv == KvDtype::F16 { HALF_BOUND } else { BOUND };
            for &mode in modes(&*whole) {
                // a key that rounds to the other side costs more here; how much is a law of dense_parts.rs
                if mode == Sparsity::Predicted && bound > BOUND {
                    continue;
                }
                let about = format!("{} {mode}, {name} there", fixture.name);
                let (ids, logits, step) = write(&*whole, prompt, mode);
                let (split_ids, split_logits, split_step) = write(&*split, prompt, mode);
                let distance = max_distance(&split_logits, &logits);
                assert!(distance <= bound, "{about}: {distance}");
                assert_eq!(split_ids, ids, "{about}");
                let (stats, whole) = (&split_step.stats, &step.stats);
                assert_eq!(stats.picked_per_layer, whole.picked_per_layer, "{about}");
                assert_eq!(stats.fired_per_layer, whole.fired_per_layer, "{about}");
                predicted += usize::from(mode == Sparsity::Predicted);
            }
            let loaded = device.allocated_bytes().unwrap();
            assert_eq!(loaded, device.memory().held_bytes);
        }
    }
    assert!(predicted > 20, "only {predicted} runs were predicted");
}

/// Of trained predictors both layers are held, and a device picks what the CPU would.
#[test]
fn trained_predictors_run_where_their_neurons_lie() {
    let mut n_runs = 0;
    for fixture in Fixture::micros("") {
        if load_as(&fixture, &options(false)).info().sparsity != Sparsity::Exact {
            continue;
        }
        let source = PredictorSource::Random { rank: 32, density: 0.3 };
        let options = options(false).with_predictor(PredictorOptions::new(source));
        let whole = load_as(&fixture, &options);
        let prompt = &fixture.golden().prompts[0].input_ids;
        let prompt = &prompt[..prompt.len().min(19)];
        if whole.info().sparsity != Sparsity::Predicted {
            continue;
        }
        let (ids, logits, step) = write(&*whole, prompt, Sparsity::Predicted);
        for (name, placement) in placements(whole.info()) {
            let stand_in = StandIn::new(StandInOptions::new(u64::MAX)).unwrap();
            let devices: [Arc<dyn FastDevice>; 2] =
                [Arc::new(SimDevice::new(1 << 30, 0)), Arc::new(stand_in)];
            for device in devices {
                let about = format!("{}, {name} on {}", fixture.name, device.name());
                let options = options.clone().with_placement(placement.clone());
                let split = load_as(&fixture, &options.with_fast_device(device));
                let notes = &split.info().notes;
                assert!(!notes.iter().any(|note| note.contains("predictors of")), "{notes:?}");
                let (split_ids, split_logits, split_step) =
                    write(&*split, prompt, Sparsity::Predicted);
                let distance = max_distance(&split_logits, &logits);
                assert!(distance <= BOUND, "{about}: {distance}");
                assert_eq!(split_ids, ids, "{about}");
                let (stats, whole) = (&split_step.stats, &step.stats);
                assert_eq!(stats.picked_per_layer, whole.picked_per_layer, "{about}");
                assert_eq!(stats.fired_per_layer, whole.fired_per_layer, "{about}");
                n_runs += 1;
            }
        }
    }
    assert!(n_runs > 20, "only {n_runs} runs");
}

/// A prompt that is longer than what runs together, whole and cut in several ways.
#[test]
fn a_long_prompt_gives_the_same_bits_however_it_is_cut() {
    const LENGTH: usize = 300;
    let fixture = Fixture::micro("llama-rope-llama3-long");
    let whole = load_as(&fixture, &options(false));
    let info = whole.info();
    let mut random = Seeded::new(7);
    let prompt: Vec<u32> =
        (0..LENGTH).map(|_| u32::try_from(random.below(info.vocab_size)).unwrap()).collect();
    let logits = |model: &dyn CausalLm, cuts: &[usize]| {
        let (mut cache, mut step, mut left) = (model.new_cache(), Step::default(), &prompt[..]);
        for &cut in cuts {
            let (piece, rest) = left.split_at(cut);
            model.forward(piece, &mut cache, &mut step).unwrap();
            left = rest;
        }
        assert!(left.is_empty());
        step.logits
    };
    let expected = logits(&*whole, &[LENGTH]);
    let [_, mixed, everything] = placements(info);
    for ((name, placement), cuts) in
        [(mixed, &[129, 171][..]), (everything, &[9, 1, 8, 31, 32, 128, 90, 1])]
    {
        let device = Arc::new(SimDevice::new(1 << 30, 2));
        let options = options(false).with_placement(placement);
        let split = load_as(&fixture, &options.with_fast_device(device));
        let found = logits(&*split, &[LENGTH]);
        let distance = max_distance(&found, &expected);
        assert!(distance <= BOUND, "{name} there: {distance}");
        assert_same_bits(&logits(&*split, cuts), &found, format!("{name} there, {cuts:?}"));
    }
}
