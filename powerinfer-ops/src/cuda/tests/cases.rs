//! What a device must give, whatever runs it: a GPU, and the kernels on a CPU (`testing/hostsim`, which
//! includes this file). Results are held to the CPU's operators.

use std::sync::Arc;

use candle_core::{Device, Tensor};
use testing::{Seeded, assert_close, assert_same_bits};

use super::row_layout::RowLayout;
use crate::{
    Activation, DensePart, FastDevice, FfnCounts, FfnWeights, GateEstimate, HeldFfn, HeldNeurons,
    HotRows, LowBitFormat, MlpLayers, NeuronIds, NeuronMatrix, NeuronScores, Neurons, OpError,
    RowPredictor, WeightFormat, Workspace, ffn, linear,
};

/// Neurons and values of a token: large on a GPU, small on a CPU.
pub(crate) type Size = [usize; 2];

pub(crate) fn matrix(format: WeightFormat, n: usize, d: usize, seed: u64) -> NeuronMatrix {
    NeuronMatrix::from_f32(format, n, d, &Seeded::new(seed).normal(n * d)).unwrap()
}

pub(crate) fn network(format: WeightFormat, [n, d]: Size, gated: bool, drelu: bool) -> FfnWeights {
    let up = gated.then(|| matrix(format, n, d, 2));
    FfnWeights::new(matrix(format, n, d, 1), up, matrix(format, n, d, 3), Activation::Relu)
        .unwrap()
        .with_biases(Some(Seeded::new(4).normal(n)), gated.then(|| Seeded::new(7).normal(n)))
        .unwrap()
        .with_up_activation(drelu.then_some(Activation::Relu))
}

fn on_cpu(weights: &FfnWeights, neurons: Neurons<'_>, x: &[f32]) -> (Vec<f32>, FfnCounts) {
    let x = Tensor::from_slice(x, (x.len() / weights.d_model(), weights.d_model()), &Device::Cpu);
    let (y, counts) = ffn(weights, neurons, &x.unwrap(), &mut Workspace::default()).unwrap();
    (y.flatten_all().unwrap().to_vec1().unwrap(), counts)
}

fn on_device(held: &dyn HeldFfn, neurons: HeldNeurons<'_>, x: &[f32]) -> (Vec<f32>, FfnCounts) {
    let mut y = vec![0.0; x.len()];
    let run = held.start(neurons, x).unwrap().wait(&mut y).unwrap();
    (y, run.counts)
}

pub(crate) fn hold_all(device: &dyn FastDevice, weights: &FfnWeights) -> Box<dyn HeldFfn> {
    let ids = NeuronIds::all(weights.n_neurons());
    device.hold(HotRows { weights, ids: &ids, density: None }).unwrap()
}

pub(crate) fn bound(expected: &[f32]) -> f32 {
    let square: f32 = expected.iter().map(|y| y * y).sum();
    1e-4 * (square / expected.len().max(1) as f32).sqrt() + f32::MIN_POSITIVE
}

/// As [`bound`], for a network in a format. In whole numbers rows are weighted by activations of 13
/// bits: one whose last bits differ may fall to the other side, and moves an output by 2⁻¹³ of its term.
pub(crate) fn bound_in(format: WeightFormat, expected: &[f32]) -> f32 {
    bound(expected) * if format.block_len() == 1 { 1.0 } else { 10.0 }
}

/// Token by token lists of a tenth of the neurons, those of one token empty.
pub(crate) fn picks(n_tokens: usize, n: usize) -> Vec<NeuronIds> {
    let share = |t: usize| if t == 1 { 0.0 } else { 0.1 };
    let ids = |t: usize| Seeded::new(t as u64).ids(n, share(t));
    (0..n_tokens).map(|t| NeuronIds::from_sorted(ids(t)).unwrap()).collect()
}

/// Networks of every format and kind, over few and many tokens, all that is counted included.
pub(crate) fn networks_are_the_cpu_s(device: &dyn FastDevice, [n, d]: Size) {
    for format in RowLayout::FORMATS {
        for (gated, drelu) in [(true, false), (true, true), (false, false)] {
            let weights = network(format, [n, d], gated, drelu);
            let ids = NeuronIds::from_sorted(Seeded::new(5).ids(n, 0.6)).unwrap();
            let picked = weights.pick(&ids).unwrap();
            let bound = |y: &[f32]| bound_in(format, y);
            for density in [None, Some(0.9)] {
                let rows = HotRows { weights: &weights, ids: &ids, density };
                let held = device.hold(rows).unwrap();
                for n_tokens in [0, 1, 3, 20] {
                    let what = format!("{format}, gated {gated}, {n_tokens} tokens");
                    let x = Seeded::new(6).normal(n_tokens * d);
                    let (expected, counts) = on_cpu(&picked, Neurons::Firing, &x);
                    let (firing, found) = on_device(held.as_ref(), HeldNeurons::Firing, &x);
                    assert_close(&firing, &expected, bound(&expected), &what);
                    assert_eq!(found.fired, counts.fired, "{what}");
                    assert_eq!(found.ran == counts.ran, density.is_none() || n_tokens == 0);
                    let (all, found) = on_device(held.as_ref(), HeldNeurons::All, &x);
                    assert_same_bits(&firing, &all, &what);
                    assert_eq!(found.ran, (n_tokens * ids.len()) as u64, "{what}");
                    let picks = picks(n_tokens, ids.len());
                    let (expected, counts) = on_cpu(&picked, Neurons::FiringOf(&picks), &x);
                    let (some, found) = on_device(held.as_ref(), HeldNeurons::FiringOf(&picks), &x);
                    assert_close(&some, &expected, bound(&expected), &what);
                    assert_eq!(found.fired, counts.fired, "{what}");
                    assert_eq!(found.picked, counts.picked, "{what}");
                }
                let back = held.read_back().unwrap();
                for row in [0, ids.len() - 1] {
                    assert_eq!(back.gate.row(row), picked.gate.row(row));
                    assert_eq!(back.down.row(row), picked.down.row(row));
                }
                assert_eq!(back.gate_bias, picked.gate_bias);
            }
        }
    }
}

/// More tokens than run together: the CPU's outputs, whatever picks the neurons, and those of each token
/// alone to the bit.
pub(crate) fn many_tokens_are_the_cpu_s(device: &dyn FastDevice, [n, d]: Size) {
    let n_tokens = 131;
    for (at, format) in RowLayout::FORMATS.into_iter().enumerate() {
        let weights = network(format, [n, d], at != 1, at % 2 == 0);
        let held = hold_all(device, &weights);
        let bound = |y: &[f32]| bound_in(format, y);
        let x = Seeded::new(6).normal(n_tokens * d);
        let (expected, counts) = on_cpu(&weights, Neurons::Firing, &x);
        let (firing, found) = on_device(held.as_ref(), HeldNeurons::Firing, &x);
        assert_close(&firing, &expected, bound(&expected), format!("{format}"));
        assert_eq!((found.fired, found.ran), (counts.fired, counts.ran), "{format}");
        let (all, _) = on_device(held.as_ref(), HeldNeurons::All, &x);
        assert_same_bits(&firing, &all, format!("{format}: all neurons"));
        for t in [0, 60, 127, 128, 130] {
            let (alone, _) = on_device(held.as_ref(), HeldNeurons::Firing, &x[t * d..][..d]);
            assert_same_bits(&alone, &firing[t * d..][..d], format!("{format}: token {t} alone"));
        }
        let everything = vec![NeuronIds::all(n); n_tokens];
        for picks in [vec![NeuronIds::new(); n_tokens], picks(n_tokens, n), everything] {
            let what = format!("{format}, {} picks of the last token", picks[130].len());
            let (expected, counts) = on_cpu(&weights, Neurons::FiringOf(&picks), &x);
            let (some, found) = on_device(held.as_ref(), HeldNeurons::FiringOf(&picks), &x);
            assert_close(&some, &expected, bound(&expected), &what);
            let counted = |counts: FfnCounts| [counts.picked, counts.fired, counts.ran];
            assert_eq!(counted(found), counted(counts), "{what}");
        }
    }
}

/// The hot part on the device and the cold part on the CPU.
pub(crate) fn parts_add_up_to_the_whole(device: &dyn FastDevice, [n, d]: Size) {
    let weights = network(WeightFormat::F16, [n, d], true, false);
    let x = Seeded::new(8).normal(d);
    let (expected, _) = on_cpu(&weights, Neurons::Firing, &x);
    for share in [0.0, 0.17, 1.0] {
        let hot = Seeded::new(9).ids(n, share);
        let cold = (0..n as u32).filter(|id| !hot.contains(id)).collect();
        let [hot, cold] = [hot, cold].map(|ids| NeuronIds::from_sorted(ids).unwrap());
        let held = device.hold(HotRows { weights: &weights, ids: &hot, density: None }).unwrap();
        let pending = held.start(HeldNeurons::Firing, &x).unwrap();
        let (mut y, _) = on_cpu(&weights.pick(&cold).unwrap(), Neurons::Firing, &x);
        let _ = pending.wait(&mut y).unwrap();
        assert_close(&y, &expected, bound(&expected), format!("{share} hot"));
    }
}

/// Exactly the neurons that the CPU picks.
pub(crate) fn a_low_bit_copy_picks_what_it_picks_on_the_cpu(device: &dyn FastDevice, [n, d]: Size) {
    let weights = network(WeightFormat::F16, [n, d], true, false);
    for format in LowBitFormat::ALL {
        let held = hold_all(device, &weights);
        let bias = weights.gate_bias.as_deref();
        let estimate = GateEstimate::new(format, &weights.gate, bias, Activation::Relu).unwrap();
        let without = held.size_bytes();
        let predictor = RowPredictor::Estimated(&estimate, 0.3);
        assert!(matches!(
            held.start(HeldNeurons::Predicted(&[]), &vec![0.0; d]),
            Err(OpError::NoHeldPredictor { .. })
        ));
        assert!(held.hold_predictor(predictor).unwrap());
        assert!(held.has_predictor() && held.size_bytes() > without);
        let before = device.memory().held_bytes;
        assert!(held.hold_predictor(predictor).unwrap());
        assert_eq!(device.memory().held_bytes, before, "the second is not kept");
        for n_tokens in [1, 3, 40] {
            let x = Seeded::new(6).normal(n_tokens * d);
            let (expected, counts) = on_cpu(&weights, Neurons::Estimated(&estimate, 0.3), &x);
            let (found, run) = on_device(held.as_ref(), HeldNeurons::Predicted(&[]), &x);
            assert_close(&found, &expected, bound(&expected), format!("{format} bits"));
            assert_eq!((run.picked, run.fired), (counts.picked, counts.fired), "{format} bits");
        }
    }
}

/// A trained predictor whose scores keep off the threshold picks the neurons that the CPU picks, in
/// every pair of formats and either form; what is not a number picks all.
pub(crate) fn a_trained_predictor_picks_what_it_picks_on_the_cpu(
    device: &dyn FastDevice,
    [n, d]: Size,
) {
    let (rank, weights) = (32, network(WeightFormat::F16, [n, d], true, false));
    let bias = Seeded::new(12).normal(rank);
    for (at, format) in RowLayout::FORMATS.into_iter().enumerate() {
        let rows_format = RowLayout::FORMATS[(at + 2) % RowLayout::FORMATS.len()];
        let (fc1, fc2) = (matrix(format, rank, d, 10), matrix(rows_format, n, rank, 11));
        for original in [true, false] {
            let held = hold_all(device, &weights);
            for n_tokens in [1, 3, 20] {
                let [x, residual] = [6, 7].map(|seed| Seeded::new(seed).normal(n_tokens * d));
                let seen = if original { &residual } else { &x };
                let mut layers = MlpLayers {
                    first: DensePart { weights: &fc1, bias: original.then_some(&bias[..]) },
                    reads_residual: original,
                    activation: original.then_some(Activation::Relu),
                    rows: &fc2,
                    threshold: 0.0,
                };
                let hidden = on_host(layers.first, seen).into_iter();
                let hidden: Vec<f32> = match layers.activation {
                    Some(function) => hidden.map(|value| function.apply(value)).collect(),
                    None => hidden.collect(),
                };
                let last = DensePart { weights: &fc2, bias: None };
                let mut scores = on_host(last, &hidden);
                scores.sort_by(f32::total_cmp);
                // in the widest gap of the upper half
                let upper = &scores[scores.len() / 2..scores.len() - 1];
                let gap = |at: &usize| upper[at + 1] - upper[*at];
                let widest = (0..upper.len() - 1).max_by(|a, b| gap(a).total_cmp(&gap(b))).unwrap();
                layers.threshold = f32::midpoint(upper[widest], upper[widest + 1]);
                let held_here = hold_all(device, &weights);
                assert!(held_here.hold_predictor(RowPredictor::Scored(layers)).unwrap());
                assert!(held_here.has_predictor() && held_here.size_bytes() > held.size_bytes());
                let threshold = layers.threshold;
                let scored =
                    Neurons::Scored(NeuronScores { rows: &fc2, hidden: &hidden, threshold });
                let (expected, counts) = on_cpu(&weights, scored, &x);
                let given = if original { &residual[..] } else { &[] };
                let (found, run) = on_device(held_here.as_ref(), HeldNeurons::Predicted(given), &x);
                let what = format!("{format}, {rows_format}, original {original}, {n_tokens}");
                assert!(counts.picked > 0 && counts.picked < (n * n_tokens) as u64, "{what}");
                assert_close(&found, &expected, bound(&expected), &what);
                assert_eq!((run.picked, run.fired), (counts.picked, counts.fired), "{what}");
                let broken = vec![f32::NAN; seen.len()];
                let (x, given) = if original { (&x, &broken[..]) } else { (&broken, &[][..]) };
                let (_, run) = on_device(held_here.as_ref(), HeldNeurons::Predicted(given), x);
                assert_eq!(run.picked, (n * n_tokens) as u64, "{what}");
            }
        }
    }
}

/// The products of a part with tokens, on the CPU.
fn on_host(part: DensePart<'_>, x: &[f32]) -> Vec<f32> {
    let d = part.weights.d_model();
    let x = Tensor::from_slice(x, (x.len() / d, d), &Device::Cpu).unwrap();
    linear(part.weights, part.bias, &x).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

/// What is dropped is given back, and what does not fit is not held.
pub(crate) fn memory_is_given_back_and_a_budget_is_kept(
    open: &dyn Fn(u64) -> Arc<dyn FastDevice>,
    [n, d]: Size,
) {
    let device = open(8 << 30);
    let weights = network(WeightFormat::Q4_0, [n, d], true, false);
    let held = hold_all(device.as_ref(), &weights);
    let needed = device.memory().held_bytes;
    assert_eq!(needed, held.size_bytes() + device.workspace_bytes(n, d, 0));
    drop(held);
    assert_eq!(device.memory().held_bytes, device.workspace_bytes(n, d, 0));
    let ids = NeuronIds::all(n);
    let rows = HotRows { weights: &weights, ids: &ids, density: None };
    let small = open(needed - 1);
    assert!(matches!(small.hold(rows), Err(OpError::DeviceBudget { .. })));
    assert_eq!(small.memory().held_bytes, 0);
    let exact = open(needed);
    let held = exact.hold(rows).unwrap();
    assert!(matches!(exact.hold(rows), Err(OpError::DeviceBudget { .. })));
    let bias = weights.gate_bias.as_deref();
    let estimate = GateEstimate::new(LowBitFormat::Bits2, &weights.gate, bias, Activation::Relu);
    let estimate = estimate.unwrap();
    let refused = held.hold_predictor(RowPredictor::Estimated(&estimate, 0.3));
    assert!(matches!(refused, Err(OpError::DeviceBudget { .. })));
    assert!(!held.has_predictor());
    let memory = exact.memory();
    assert_eq!((memory.held_bytes, memory.peak_bytes), (needed, needed));
}

/// Work that nobody waits for, and rows that are dropped under way.
pub(crate) fn work_that_is_given_up_disturbs_nobody(device: &dyn FastDevice, [n, d]: Size) {
    let weights = network(WeightFormat::F16, [n, d], true, false);
    let held = hold_all(device, &weights);
    let x = Seeded::new(1).normal(d);
    let (expected, _) = on_device(held.as_ref(), HeldNeurons::Firing, &x);
    for _ in 0..10 {
        drop(held.start(HeldNeurons::All, &Seeded::new(2).normal(d * 40)).unwrap());
    }
    let (again, _) = on_device(held.as_ref(), HeldNeurons::Firing, &x);
    assert_same_bits(&again, &expected, "the same input");
    let pending = held.start(HeldNeurons::Firing, &x).unwrap();
    drop(held);
    let larger = hold_all(device, &network(WeightFormat::F32, [n + 9, d], true, false));
    drop(larger);
    let mut y = vec![0.0; d];
    let _ = pending.wait(&mut y).unwrap();
    assert_same_bits(&y, &expected, "rows that were given up under way");
}

/// Several pieces of work under way, of several networks and lengths, waited for in any order.
pub(crate) fn work_is_waited_for_in_any_order(device: &dyn FastDevice, [n, d]: Size) {
    let networks = [
        network(WeightFormat::F16, [n, d], true, true),
        network(WeightFormat::Q8_0, [n / 2, d], false, false),
    ];
    let held = networks.each_ref().map(|weights| hold_all(device, weights));
    let case = |at: usize| -> (usize, Vec<f32>, Vec<NeuronIds>) {
        let n_tokens = [1, 20, 2, 33][at % 4];
        let picks = picks(n_tokens, networks[at % 2].n_neurons());
        (at % 2, Seeded::new(at as u64).normal(n_tokens * d), picks)
    };
    let start = |at: usize| {
        let (which, x, picks) = case(at);
        let neurons = if at < 4 { HeldNeurons::Firing } else { HeldNeurons::FiringOf(&picks) };
        Some(held[which].start(neurons, &x).unwrap())
    };
    // buffers of the first round are used again in the second
    for _ in 0..2 {
        let mut pending: Vec<_> = (0..8).map(start).collect();
        for at in [5, 0, 7, 1, 4, 2, 6, 3] {
            let (which, x, picks) = case(at);
            let neurons = if at < 4 { Neurons::Firing } else { Neurons::FiringOf(&picks) };
            let (expected, counts) = on_cpu(&networks[which], neurons, &x);
            let mut y = vec![1.0; x.len()];
            let run = pending[at].take().unwrap().wait(&mut y).unwrap();
            let expected: Vec<f32> = expected.iter().map(|y| 1.0 + y).collect();
            let bound = bound_in(networks[which].down.format(), &expected);
            assert_close(&y, &expected, bound, format!("piece {at}"));
            assert_eq!(run.counts.fired, counts.fired, "piece {at}");
        }
    }
}

/// Wrong input is refused, and nothing is held of it.
pub(crate) fn what_does_not_fit_is_refused(device: &dyn FastDevice, [n, d]: Size) {
    let weights = network(WeightFormat::F32, [n, d], true, false);
    let ids = NeuronIds::from_sorted(vec![n as u32]).unwrap();
    let before = device.memory().held_bytes;
    let beyond = device.hold(HotRows { weights: &weights, ids: &ids, density: None });
    assert!(matches!(beyond, Err(OpError::IdOutOfRange { .. })));
    let m = |n: usize| matrix(WeightFormat::F32, n, d, 1);
    let by_output = matrix(WeightFormat::F32, d, n, 1);
    let by_output = FfnWeights::with_down_by_output(m(n), None, by_output, Activation::Relu);
    let ids = NeuronIds::all(1);
    let rows = HotRows { weights: &by_output.unwrap(), ids: &ids, density: None };
    assert!(matches!(device.hold(rows), Err(OpError::DownByOutput { .. })));
    let q6_k = matrix(WeightFormat::Q6_K, 2, 256, 1);
    let q6_k = FfnWeights::new(q6_k.clone(), None, q6_k, Activation::Relu).unwrap();
    let rows = HotRows { weights: &q6_k, ids: &ids, density: None };
    assert!(matches!(device.hold(rows), Err(OpError::UnknownFormat { .. })));
    assert_eq!(device.memory().held_bytes, before, "nothing is held of what was refused");

    let held = hold_all(device, &weights);
    let x = vec![0.0; 2 * d];
    let start = |neurons: HeldNeurons<'_>, x: &[f32]| held.start(neurons, x).map(drop);
    assert!(matches!(start(HeldNeurons::All, &x[1..]), Err(OpError::Shape { what: "x", .. })));
    let lists = [NeuronIds::new()];
    let too_few = start(HeldNeurons::FiringOf(&lists), &x);
    assert!(matches!(too_few, Err(OpError::Shape { what: "lists of ids", .. })));
    let lists = [NeuronIds::new(), NeuronIds::all(n + 1)];
    let beyond = start(HeldNeurons::FiringOf(&lists), &x);
    assert!(matches!(beyond, Err(OpError::IdOutOfRange { .. })));
    let estimate = GateEstimate::new(LowBitFormat::Bits2, &m(n + 1), None, Activation::Relu);
    let estimate = estimate.unwrap();
    let too_many = held.hold_predictor(RowPredictor::Estimated(&estimate, 0.0));
    assert!(matches!(too_many, Err(OpError::Shape { what: "the predictor's rows", .. })));
    let fc1 = matrix(WeightFormat::F32, 8, d, 1);
    let layers = |fc1, rows| {
        RowPredictor::Scored(MlpLayers {
            first: DensePart { weights: fc1, bias: None },
            reads_residual: true,
            activation: None,
            rows,
            threshold: 0.0,
        })
    };
    let (rows, too_many) =
        (matrix(WeightFormat::F32, n, 8, 1), matrix(WeightFormat::F32, n + 1, 8, 1));
    let too_many = held.hold_predictor(layers(&fc1, &too_many));
    assert!(matches!(too_many, Err(OpError::Shape { what: "the predictor's rows", .. })));
    assert!(held.hold_predictor(layers(&fc1, &rows)).unwrap());
    for residual in [&[][..], &x[1..]] {
        let too_few = start(HeldNeurons::Predicted(residual), &x);
        assert!(matches!(too_few, Err(OpError::Shape { what: "the residual stream", .. })));
    }
    let silu = FfnWeights::new(m(n), None, m(n), Activation::Silu).unwrap();
    let silu = hold_all(device, &silu);
    let skipped = silu.start(HeldNeurons::Firing, &x).map(drop);
    assert!(matches!(skipped, Err(OpError::NotSparse { .. })));
    let short = held.start(HeldNeurons::All, &x).unwrap().wait(&mut vec![0.0; d]);
    assert!(matches!(short, Err(OpError::Shape { what: "y", .. })));
}
