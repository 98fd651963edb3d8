//! What fitting promises, on rules that are known.

use std::num::NonZeroUsize;

use powerinfer_ops::{Activation, FfnWeights, NeuronMatrix, ThreadPool, WeightFormat};
use testing::Seeded;

use super::*;
use crate::error::Error;
use crate::{LowRankGate, MlpForm, MlpWeights, SecondMoment};

const D_MODEL: usize = 48;
const D_FF: usize = 96;
const RULE_RANK: usize = 6;

/// Neurons that fire by a rule of low rank: `x · u · v > 1.2`, which is one in nine.
struct Rule {
    gate: Vec<f32>,
    random: Seeded,
}

impl Rule {
    fn new() -> Self {
        let mut random = Seeded::new(11);
        let (u, v) = (random.normal(D_FF * RULE_RANK), random.normal(RULE_RANK * D_MODEL));
        let scale = 1.0 / ((RULE_RANK * D_MODEL) as f32).sqrt();
        let gate = (0..D_FF * D_MODEL).map(|at| {
            let (row, column) = (at / D_MODEL, at % D_MODEL);
            let products = (0..RULE_RANK).map(|k| u[row * RULE_RANK + k] * v[k * D_MODEL + column]);
            scale * products.sum::<f32>()
        });
        Self { gate: gate.collect(), random }
    }

    /// What happens over so many tokens that nobody saw before.
    fn samples(&mut self, n_tokens: usize) -> FfnSamples {
        let mut samples = FfnSamples::new(D_MODEL, D_FF, n_tokens);
        for _ in 0..n_tokens {
            let x = self.random.normal(D_MODEL);
            let product = |row: &[f32]| row.iter().zip(&x).map(|(w, x)| w * x).sum::<f32>();
            let rows = self.gate.chunks_exact(D_MODEL);
            let activations: Vec<f32> = rows.map(|row| (product(row) - 1.2).max(0.0)).collect();
            samples.push(&x, &activations).unwrap();
        }
        samples
    }
}

/// Random weights, of rank 8 with a unit for the biases, or of rank 64 in the original's form.
fn start(form: MlpForm, samples: &FfnSamples) -> MlpWeights {
    let rank = if form == MlpForm::LOW_RANK { 8 } else { 64 };
    let mut weights = MlpWeights::random(samples, rank, 5);
    weights.form = form;
    if form == MlpForm::LOW_RANK {
        weights.fc1[7 * D_MODEL..].fill(0.0);
        weights.bias = Some(vec![0., 0., 0., 0., 0., 0., 0., 1.]);
    }
    weights
}

fn options() -> FitOptions {
    FitOptions { batch: 128, n_steps: 16 * 30, seed: 9, ..FitOptions::default() }
}

#[test]
fn a_rule_of_low_rank_is_learnt_from_nothing() {
    let mut rule = Rule::new();
    let (seen, unseen) = (rule.samples(2048), rule.samples(512));
    // the original's form has no biases
    for (form, at_most) in [(MlpForm::LOW_RANK, 1.3), (MlpForm::ORIGINAL, 3.0)] {
        let first = start(form, &seen);
        let mut fit = LayerFit::new(first.clone(), options()).unwrap();
        let losses: Vec<f64> = (0..30).map(|_| fit.learn(&seen).unwrap()).collect();
        assert!(losses[29] < 0.7 * losses[0], "{losses:?}");
        let listed = |weights: &MlpWeights| {
            let mut weights = weights.clone();
            let counts = weights.set_threshold(&unseen, &PredictionTarget::default()).unwrap();
            assert!(counts.recall_mass() >= 0.97);
            counts.picked as f64 / counts.fired as f64
        };
        let (before, after) = (listed(&first), listed(fit.weights()));
        assert!(after < at_most && before > 2.0 * after, "{form:?}: {before} to {after}");
    }
}

#[test]
fn factors_of_a_gate_of_low_rank_are_the_gate() {
    let mut rule = Rule::new();
    let unseen = rule.samples(256);
    let gate = NeuronMatrix::from_f32(WeightFormat::F32, D_FF, D_MODEL, &rule.gate).unwrap();
    let relu = Activation::FatRelu { threshold: 1.2 };
    let weights = FfnWeights::new(gate.clone(), None, gate, relu).unwrap();
    let mut moment = SecondMoment::new(D_MODEL);
    moment.add(rule.samples(400).inputs()).unwrap();
    let factors = LowRankGate::new(&weights, &moment, 2 * RULE_RANK, 1).unwrap();
    // one unit more is that of the biases
    let listed = |rank: usize| {
        let mut weights = factors.weights(rank).unwrap();
        let target = PredictionTarget { recall_mass: 0.9999, ..PredictionTarget::default() };
        let counts = weights.set_threshold(&unseen, &target).unwrap();
        counts.picked as f64 / counts.fired as f64
    };
    assert!(listed(RULE_RANK + 1) < 1.05, "{}", listed(RULE_RANK + 1));
    assert!(listed(RULE_RANK - 1) > 1.3, "{}", listed(RULE_RANK - 1));
    assert!(matches!(factors.weights(0), Err(Error::Rank { .. })));
    assert!(matches!(factors.weights(2 * RULE_RANK + 2), Err(Error::Rank { .. })));
    let gate = weights.gate;
    let dense = FfnWeights::new(gate.clone(), None, gate, Activation::Silu).unwrap();
    assert!(LowRankGate::new(&dense, &moment, 3, 1).is_err());
}

#[test]
fn the_same_seed_gives_the_same_bits_at_any_number_of_threads() {
    let samples = Rule::new().samples(1024);
    let fit = |threads: usize, seed: u64| {
        let pool = ThreadPool::new(NonZeroUsize::new(threads)).unwrap();
        pool.install(|| {
            let options = FitOptions { seed, ..options() };
            let mut fit = LayerFit::new(start(MlpForm::LOW_RANK, &samples), options).unwrap();
            (0..5).for_each(|_| {
                fit.learn(&samples).unwrap();
            });
            fit
        })
    };
    let first = fit(2, 1);
    assert_eq!(fit(2, 1), first);
    assert_eq!(fit(1, 1), first);
    assert_eq!(fit(3, 1), first);
    assert_ne!(fit(2, 2).weights(), first.weights());
}

#[test]
fn going_on_from_a_state_is_not_having_stopped() {
    let samples = Rule::new().samples(1024);
    let begin = || LayerFit::new(start(MlpForm::LOW_RANK, &samples), options()).unwrap();
    let mut whole = begin();
    (0..3).for_each(|_| {
        whole.learn(&samples).unwrap();
    });
    let state: Vec<(&str, Vec<f32>)> =
        whole.state().into_iter().map(|(name, values)| (name, values.to_vec())).collect();
    let mut resumed = begin();
    resumed
        .restore(whole.n_steps(), |name, values| {
            let (_, kept) = state.iter().find(|(own, _)| *own == name).unwrap();
            values.copy_from_slice(kept);
            Ok::<(), Error>(())
        })
        .unwrap();
    assert_eq!(resumed, whole);
    (0..3).for_each(|_| {
        whole.learn(&samples).unwrap();
    });
    (0..3).for_each(|_| {
        resumed.learn(&samples).unwrap();
    });
    assert_eq!(resumed, whole);

    let broken = begin().restore(1, |_, values| {
        values.fill(f32::NAN);
        Ok::<(), Error>(())
    });
    assert!(matches!(broken, Err(Error::NotFinite { what: "fc1.weight", row: 0 })));
}

#[test]
fn a_threshold_is_the_highest_that_reaches_the_target() {
    let mut rule = Rule::new();
    let samples = rule.samples(300);
    let mut weights = start(MlpForm::LOW_RANK, &samples);
    for recall_mass in [0.5, 0.9, 0.97, 1.0] {
        let target = PredictionTarget { recall_mass, ..PredictionTarget::default() };
        let counts = weights.set_threshold(&samples, &target).unwrap();
        assert!(counts.recall_mass() >= recall_mass - 1e-12);
        assert_eq!(weights.count(&samples).unwrap(), counts);
        let threshold = weights.threshold;
        weights.threshold = threshold.next_up();
        assert!(weights.count(&samples).unwrap().recall_mass() < recall_mass);
    }
    let target = PredictionTarget { recall_mass: 1.0, max_density: 0.25 };
    let counts = weights.set_threshold(&samples, &target).unwrap();
    assert!((0.24..=0.25).contains(&counts.picked_density()), "{counts:?}");
}

#[test]
fn what_is_no_number_or_of_another_layer_is_refused() {
    let mut samples = FfnSamples::new(2, 3, 10);
    let error = samples.push(&[1.0, 2.0, 1.0, f32::INFINITY], &[0.0; 6]).unwrap_err();
    assert!(matches!(error, Error::NotFinite { what: "input", row: 1 }));
    let error = samples.push(&[1.0, 2.0], &[0.0, f32::NAN, 0.0]).unwrap_err();
    assert!(matches!(error, Error::NotFinite { what: "activation", row: 0 }));
    assert_eq!(samples.n_tokens(), 1, "the token before the broken one is there");
    assert!(samples.push(&[1.0, 2.0], &[0.0; 2]).is_err());
    assert!(samples.push(&[1.0, 2.0, 3.0], &[0.0; 3]).is_err());

    let mut moment = SecondMoment::new(2);
    assert!(matches!(
        moment.add(&[1.0, f32::NAN]),
        Err(Error::NotFinite { what: "input", row: 0 })
    ));

    let weights = start(MlpForm::LOW_RANK, &Rule::new().samples(4));
    assert!(weights.count(&samples).is_err());
    let mut loud = weights.clone();
    loud.fc2[3] = f32::NAN;
    assert!(LayerFit::new(loud, options()).is_err());
    let nothing = FfnSamples::new(D_MODEL, D_FF, 10);
    let mut fit = LayerFit::new(weights.clone(), options()).unwrap();
    assert!(matches!(fit.learn(&nothing), Err(Error::NoSamples)));
    let target = PredictionTarget::default();
    assert!(matches!(weights.clone().set_threshold(&nothing, &target), Err(Error::NoSamples)));
}

#[test]
fn memory_is_bounded_by_the_capacity() {
    let mut rule = Rule::new();
    let more = rule.samples(100);
    let mut samples = FfnSamples::new(D_MODEL, D_FF, 64);
    let activations = vec![1.0; D_FF * 100];
    assert_eq!(samples.push(more.inputs(), &activations).unwrap(), 64);
    assert!(samples.is_full());
    let full = samples.size_bytes();
    for _ in 0..5 {
        assert_eq!(samples.push(more.inputs(), &activations).unwrap(), 0);
        samples.clear();
        samples.push(more.inputs(), &activations).unwrap();
        assert_eq!(samples.size_bytes(), full);
    }
}
