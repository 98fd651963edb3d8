use super::*;
use crate::activation::Activation;
use crate::fast_device::{DensePart, HeldNeurons, MlpLayers, RowPredictor};
use crate::ffn::{FfnWeights, NeuronScores, Neurons, ffn_into};
use crate::format::WeightFormat;
use crate::format::low_bit::LowBitFormat;
use crate::gate_estimate::GateEstimate;
use crate::mask::NeuronIds;
use crate::matrix::NeuronMatrix;
use crate::sparse_matvec::project;
use crate::workspace::Workspace;
use testing::Seeded;

/// What is to happen to the thread.
#[derive(Debug, Clone, Copy)]
pub(super) enum Fault {
    Panic,
    Death,
}

/// Does as a planted fault says.
pub(super) fn strike(fault: Option<Fault>) {
    assert!(!matches!(fault, Some(Fault::Panic)), "planted");
}

const N: usize = 700;
const D: usize = 64;

fn matrix(format: WeightFormat, n: usize, d: usize, seed: u64) -> NeuronMatrix {
    NeuronMatrix::from_f32(format, n, d, &Seeded::new(seed).normal(n * d)).unwrap()
}

fn weights(format: WeightFormat) -> FfnWeights {
    let m = |seed| matrix(format, N, D, seed);
    FfnWeights::new(m(1), Some(m(2)), m(3), Activation::Relu)
        .unwrap()
        .with_biases(Some(Seeded::new(4).normal(N)), Some(Seeded::new(5).normal(N)))
        .unwrap()
}

fn device(threads: usize) -> StandIn {
    let threads = NonZeroUsize::new(threads).unwrap();
    StandIn::new(StandInOptions::new(1 << 30).with_threads(threads)).unwrap()
}

fn hot(share: f32) -> NeuronIds {
    NeuronIds::from_sorted(Seeded::new(6).ids(N, share)).unwrap()
}

/// What lies between the layers of a predictor on the CPU.
fn hidden(layers: &MlpLayers<'_>, x: &[f32]) -> Vec<f32> {
    let mut hidden = vec![0.0; x.len() / D * layers.rank()];
    project(layers.first.weights, x, &mut hidden);
    crate::residual::add_to_rows(&mut hidden, layers.first.bias.unwrap_or_default());
    let apply = |value: f32| layers.activation.map_or(value, |function| function.apply(value));
    hidden.into_iter().map(apply).collect()
}

/// What the CPU makes of the same rows.
fn on_the_cpu(weights: &FfnWeights, neurons: Neurons<'_>, x: &[f32]) -> (Vec<f32>, u64) {
    let mut y = vec![0.0; x.len()];
    let counts = ffn_into(weights, neurons, x, &mut Workspace::default(), &mut y).unwrap();
    (y, counts.fired)
}

#[test]
fn every_kind_of_work_gives_what_the_cpu_gives() {
    for (format, threads) in [WeightFormat::F32, WeightFormat::F16, WeightFormat::Q8_0]
        .into_iter()
        .flat_map(|format| [(format, 1), (format, 3)])
    {
        let (weights, ids) = (weights(format), hot(0.4));
        let here = weights.pick(&ids).unwrap();
        let gate = GateEstimate::new(LowBitFormat::Bits3, &here.gate, None, Activation::Relu);
        let gate = gate.unwrap();
        let (fc1, fc2) = (matrix(format, 32, D, 11), matrix(format, ids.len(), 32, 9));
        let bias = Seeded::new(12).normal(32);
        let original = MlpLayers {
            first: DensePart { weights: &fc1, bias: Some(&bias) },
            reads_residual: true,
            activation: Some(Activation::Relu),
            rows: &fc2,
            threshold: 1.0,
        };
        let first = DensePart { weights: &fc1, bias: None };
        let low_rank = MlpLayers { first, reads_residual: false, activation: None, ..original };
        let device = device(threads);
        for n_tokens in [0, 1, 3, 31, 32, 33, 70] {
            let x = Seeded::new(7).normal(n_tokens * D);
            let residual = Seeded::new(8).normal(n_tokens * D);
            let hidden = [hidden(&original, &residual), hidden(&low_rank, &x)];
            let mut random = Seeded::new(10);
            let mut list = || NeuronIds::from_sorted(random.ids(ids.len(), 0.3)).unwrap();
            let picks: Vec<NeuronIds> = (0..n_tokens).map(|_| list()).collect();
            let estimated = RowPredictor::Estimated(&gate, 0.5);
            let [original, low_rank] = [original, low_rank].map(RowPredictor::Scored);
            let scored =
                |hidden| Neurons::Scored(NeuronScores { rows: &fc2, hidden, threshold: 1.0 });
            for (predictor, asked, same) in [
                (None, HeldNeurons::All, Neurons::All),
                (None, HeldNeurons::Firing, Neurons::Firing),
                (None, HeldNeurons::FiringOf(&picks), Neurons::FiringOf(&picks)),
                (Some(estimated), HeldNeurons::Predicted(&[]), Neurons::Estimated(&gate, 0.5)),
                (Some(original), HeldNeurons::Predicted(&residual), scored(&hidden[0])),
                (Some(low_rank), HeldNeurons::Predicted(&[]), scored(&hidden[1])),
            ] {
                for density in [None, Some(0.9)] {
                    let hot = HotRows { weights: &weights, ids: &ids, density };
                    let held = device.hold(hot).unwrap();
                    let without = held.size_bytes();
                    if let Some(predictor) = predictor {
                        assert!(held.hold_predictor(predictor).unwrap());
                        assert!(held.has_predictor() && held.size_bytes() > without);
                    }
                    let mut y = vec![0.0; x.len()];
                    let run = held.start(asked, &x).unwrap().wait(&mut y).unwrap();
                    let (expected, fired) = on_the_cpu(&here, same, &x);
                    assert_eq!(y, expected, "{format} {n_tokens} {asked:?}");
                    assert_eq!(run.counts.fired, fired);
                }
            }
            assert!(device.scratch_bytes() <= device.shared.ledger().scratch.bytes());
        }
    }
}

#[test]
fn work_is_added_in_any_order_of_waiting_and_may_be_given_up() {
    let (weights, ids) = (weights(WeightFormat::F32), hot(0.5));
    let device = device(1);
    let hot = HotRows { weights: &weights, ids: &ids, density: None };
    let held = device.hold(hot).unwrap();
    let here = weights.pick(&ids).unwrap();
    let xs: Vec<Vec<f32>> = (0..6).map(|seed| Seeded::new(20 + seed).normal(2 * D)).collect();
    let mut pending: Vec<_> =
        xs.iter().map(|x| Some(held.start(HeldNeurons::Firing, x).unwrap())).collect();
    drop(pending[2].take());
    for at in [5, 0, 4, 1, 3] {
        let mut y = vec![1.0; 2 * D];
        let _ = pending[at].take().unwrap().wait(&mut y).unwrap();
        let (expected, _) = on_the_cpu(&here, Neurons::Firing, &xs[at]);
        let expected: Vec<f32> = expected.iter().map(|y| 1.0 + y).collect();
        assert_eq!(y, expected);
    }
}

#[test]
fn the_budget_holds_and_memory_comes_back() {
    let (weights, ids) = (weights(WeightFormat::F16), hot(0.5));
    let hot = HotRows { weights: &weights, ids: &ids, density: None };
    let needed = {
        let device = device(1);
        let held = device.hold(hot).unwrap();
        let memory = device.memory();
        let scratch = device.shared.ledger().scratch.bytes();
        assert_eq!(memory.held_bytes, held.size_bytes() + scratch);
        assert_eq!(device.workspace_bytes(ids.len(), D, 0), scratch);
        let copied = held.read_back().unwrap();
        let rows = copied.gate.n_neurons() * (3 * copied.gate.row_bytes() + 2 * size_of::<f32>());
        assert_eq!(held.size_bytes(), rows as u64, "rows of whole lines have no padding");
        memory.held_bytes
    };
    let device = StandIn::new(StandInOptions::new(needed)).unwrap();
    let held = device.hold(hot).unwrap();
    let full = device.memory();
    let error = device.hold(hot).unwrap_err();
    assert!(
        matches!(&error, OpError::DeviceBudget { asked_bytes, held_bytes, budget_bytes, .. }
            if *asked_bytes == held.size_bytes() && *held_bytes == needed && *budget_bytes == needed),
        "{error}"
    );
    assert_eq!(device.memory(), full, "nothing is held of what did not fit");
    // work in the queue keeps the rows until it is done
    let pending = held.start(HeldNeurons::All, &vec![0.5; D]).unwrap();
    drop(held);
    let _ = pending.wait(&mut [0.0; D]).unwrap();
    assert_eq!(device.memory().held_bytes, device.shared.ledger().scratch.bytes());
    assert!(device.hold(hot).is_ok());
    assert_eq!(device.memory().peak_bytes, needed);
    let small = StandIn::new(StandInOptions::new(needed - 1)).unwrap();
    assert!(small.hold(hot).is_err());
    assert_eq!(small.memory().held_bytes, 0);
}

#[test]
fn a_panic_and_a_death_are_errors_for_all_who_wait_and_all_who_come_later() {
    for fault in [Fault::Panic, Fault::Death] {
        let (weights, ids) = (weights(WeightFormat::F32), hot(0.2));
        let device = device(2);
        let hot = HotRows { weights: &weights, ids: &ids, density: None };
        let rows = Arc::new(HeldRows::copy(&device.shared, hot).unwrap());
        let good = StandInFfn::new(Arc::clone(&rows));
        let bad = StandInFfn { rows, fault: Some(fault) };
        let x = vec![0.5; D];
        let before = good.start(HeldNeurons::All, &x).unwrap();
        let struck = bad.start(HeldNeurons::All, &x).unwrap();
        // the thread may be gone already
        let after = good.start(HeldNeurons::All, &x);
        let mut y = vec![0.0; D];
        let _ = before.wait(&mut y).unwrap();
        let sum = y.clone();
        let source = |error: OpError| match error {
            OpError::DeviceFailed { device, source } => {
                assert_eq!(device, "stand-in");
                source.to_string()
            }
            other => panic!("{other}"),
        };
        let said = source(struck.wait(&mut y).unwrap_err());
        match fault {
            Fault::Panic => assert_eq!(said, "its thread panicked: planted"),
            Fault::Death => assert_eq!(said, "its thread is gone"),
        }
        let after = after.and_then(|after| after.wait(&mut y));
        assert_eq!(source(after.unwrap_err()), "its thread is gone");
        // the queue learns of it when the thread has ended
        let later = loop {
            match good.start(HeldNeurons::All, &x) {
                Ok(pending) => assert!(pending.wait(&mut y).is_err()),
                Err(error) => break error,
            }
        };
        assert_eq!(source(later), "its thread is gone");
        assert_eq!(y, sum, "a failure leaves the output as it was");
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    let device = device(1);
    let (weights, ids) = (weights(WeightFormat::F32), hot(0.2));
    let hold = |weights: &FfnWeights, ids: &NeuronIds| {
        device.hold(HotRows { weights, ids, density: None })
    };
    let beyond = NeuronIds::from_sorted(vec![N as u32]).unwrap();
    assert!(matches!(hold(&weights, &beyond), Err(OpError::IdOutOfRange { .. })));
    let m = || matrix(WeightFormat::F32, N, D, 1);
    let by_output = matrix(WeightFormat::F32, D, N, 1);
    let by_output =
        FfnWeights::with_down_by_output(m(), None, by_output, Activation::Relu).unwrap();
    assert!(matches!(hold(&by_output, &ids), Err(OpError::DownByOutput { .. })));
    let scratch = device.shared.ledger().scratch.bytes();
    assert_eq!(device.memory().held_bytes, scratch, "nothing is held of what was refused");

    let held = hold(&weights, &ids).unwrap();
    let x = vec![0.0; 2 * D];
    let start = |neurons: HeldNeurons<'_>, x: &[f32]| held.start(neurons, x).map(drop);
    assert!(matches!(start(HeldNeurons::All, &x[1..]), Err(OpError::Shape { what: "x", .. })));
    let lists = [NeuronIds::new()];
    let too_few = start(HeldNeurons::FiringOf(&lists), &x);
    assert!(matches!(too_few, Err(OpError::Shape { what: "lists of ids", .. })));
    let lists = [NeuronIds::new(), NeuronIds::all(ids.len() + 1)];
    let beyond = start(HeldNeurons::FiringOf(&lists), &x);
    assert!(matches!(beyond, Err(OpError::IdOutOfRange { .. })));
    let predicted = start(HeldNeurons::Predicted(&[]), &x);
    assert!(matches!(predicted, Err(OpError::NoHeldPredictor { .. })));
    let layers = |[n, rank, d, bias]: [usize; 4]| {
        let m = |n, d| matrix(WeightFormat::F32, n, d, 1);
        let (fc1, fc2, bias) = (m(rank, d), m(n, 8), vec![0.0; bias]);
        held.hold_predictor(RowPredictor::Scored(MlpLayers {
            first: DensePart { weights: &fc1, bias: Some(&bias) },
            reads_residual: true,
            activation: None,
            rows: &fc2,
            threshold: 0.0,
        }))
    };
    let n = ids.len();
    for (wrong, what) in [
        ([n + 1, 8, D, 8], "the predictor's rows"),
        ([n, 9, D, 9], "the predictor's rows"),
        ([n, 8, D - 1, 8], "the predictor's first layer"),
        ([n, 8, D, 7], "the predictor's bias"),
    ] {
        let refused = layers(wrong).unwrap_err();
        assert!(matches!(refused, OpError::Shape { what: found, .. } if found == what), "{what}");
    }
    assert!(!held.has_predictor() && layers([n, 8, D, 8]).unwrap());
    for residual in [&[][..], &x[1..]] {
        let too_few = start(HeldNeurons::Predicted(residual), &x);
        assert!(matches!(too_few, Err(OpError::Shape { what: "the residual stream", .. })));
    }
    let silu = FfnWeights::new(m(), None, m(), Activation::Silu).unwrap();
    let silu = hold(&silu, &ids).unwrap();
    assert!(matches!(
        silu.start(HeldNeurons::Firing, &x).map(drop),
        Err(OpError::NotSparse { .. })
    ));
    let mut short = vec![0.0; D];
    let short = held.start(HeldNeurons::All, &x).unwrap().wait(&mut short);
    assert!(matches!(short, Err(OpError::Shape { what: "y", .. })));
}

#[test]
fn a_modelled_speed_is_kept() {
    let speed = ModelledSpeed {
        bytes_per_second: 1e9,
        link_bytes_per_second: 1e8,
        link_latency: Duration::from_millis(2),
    };
    assert_eq!(speed.duration(1_000_000, 100_000), Duration::from_millis(4 + 1 + 1));
    let broken = ModelledSpeed { bytes_per_second: f64::NAN, link_bytes_per_second: -1.0, ..speed };
    assert_eq!(broken.duration(u64::MAX, u64::MAX), Duration::from_millis(4));

    let (weights, ids) = (weights(WeightFormat::F32), hot(0.1));
    let device = StandIn::new(StandInOptions::new(1 << 30).with_speed(speed)).unwrap();
    let hot = HotRows { weights: &weights, ids: &ids, density: None };
    let held = device.hold(hot).unwrap();
    let mut y = vec![0.0; D];
    let run = held.start(HeldNeurons::All, &vec![1.0; D]).unwrap().wait(&mut y).unwrap();
    let exchanged = 2 * D * size_of::<f32>();
    let least = speed.duration(run.counts.bytes, exchanged as u64);
    assert!(u128::from(run.busy_ns) >= least.as_nanos());
}
