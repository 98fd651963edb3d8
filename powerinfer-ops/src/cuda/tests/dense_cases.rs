//! Norms, attention, networks in between and head: what they must give on any device.

use std::sync::Arc;
use std::thread;

use testing::{Seeded, assert_close, assert_same_bits};

use super::cases::{Size, bound, hold_all, network, picks};
use super::dense_model::{Kind, Model, N_LAYERS, Pages};
use super::row_layout::RowLayout;
use crate::attention::{KvDtype, KvLayout};
use crate::{
    Activation, FastDevice, FfnCounts, GateEstimate, HeldNeurons, LowBitFormat, NeuronIds,
    NormPart, OpError, RowPredictor, SequenceShape, Slot, WeightFormat,
};

/// A model of its kind in every format, of heads that share keys, and with whatever else there is.
pub(crate) fn kinds() -> Vec<Kind> {
    let plain = Kind {
        format: WeightFormat::F32,
        kv: KvDtype::F32,
        heads: [4, 2, 16],
        window: None,
        alibi: false,
        rotary: true,
        biased: false,
        centred: false,
        hot: 0.6,
    };
    let of = |format| Kind { format, ..plain };
    let mut kinds: Vec<Kind> = RowLayout::FORMATS.map(of).into();
    kinds.extend([
        Kind { kv: KvDtype::F16, biased: true, hot: 1.0, ..plain },
        Kind { window: Some(7), centred: true, hot: 0.0, ..plain },
        Kind { heads: [5, 1, 7], alibi: true, rotary: false, biased: true, centred: true, ..plain },
        Kind { heads: [3, 3, 10], kv: KvDtype::F16, window: Some(1), ..plain },
    ]);
    kinds
}

/// How far a value may lie from the CPU's: where inputs are rounded, one of them may fall to the other
/// side.
fn near(kind: Kind, expected: &[f32]) -> f32 {
    let exact = kind.format.block_len() == 1 && kind.kv == KvDtype::F32;
    bound(expected) * if exact { 1.0 } else { 300.0 }
}

/// Passes of several lengths, one behind the other: streams and logits are the CPU's, and the same bits
/// as in one pass.
pub(crate) fn passes_are_the_cpu_s(device: &dyn FastDevice, kind: Kind, lengths: &[usize]) {
    let model = Model::random(kind);
    let (held, d) = (model.hold(device), model.d_model);
    let n: usize = lengths.iter().sum();
    let x = Seeded::new(3).normal(n * d);
    let [mut whole, mut parts] = [(); 2].map(|()| device.sequence(model.shape()).unwrap());
    let together = held.run(whole.as_mut(), 0, &x);
    let (mut pages, mut done) = ([(); N_LAYERS].map(|()| Pages::default()), 0);
    for &n_tokens in lengths {
        let (what, x) =
            (format!("{kind:?}, {n_tokens} from {done}"), &x[done * d..][..n_tokens * d]);
        let expected = model.on_cpu(&mut pages, done, x);
        let found = held.run(parts.as_mut(), done, x);
        for (at, found) in found.iter().enumerate() {
            assert_close(found, &expected[at], near(kind, &expected[at]), &what);
            let width = together[at].len() / n;
            assert_same_bits(found, &together[at][done * width..][..n_tokens * width], &what);
        }
        done += n_tokens;
        let runs = parts.take_runs().unwrap();
        assert_eq!(runs.len(), N_LAYERS);
        assert_eq!(runs.iter().any(|run| run.counts.fired > 0), kind.hot > 0.0, "{what}");
        assert!(parts.take_runs().unwrap().is_empty());
    }
}

/// What is cut off, copied and begun anew does not show.
pub(crate) fn sequences_are_cut_and_copied(device: &dyn FastDevice, kind: Kind) {
    let model = Model::random(kind);
    let (held, d) = (model.hold(device), model.d_model);
    let x = Seeded::new(4).normal(90 * d);
    let mut sequence = device.sequence(model.shape()).unwrap();
    let before = device.memory().held_bytes;
    let _ = held.run(sequence.as_mut(), 0, &x[..10 * d]);
    let expected = held.run(sequence.as_mut(), 10, &x[80 * d..]);
    sequence.truncate(10);
    let _ = held.run(sequence.as_mut(), 10, &x[10 * d..80 * d]);
    let full = sequence.size_bytes();
    // in the room that a pass has, positions are forgotten
    let again = held.run(sequence.as_mut(), 10, &x[80 * d..]);
    assert_same_bits(&again[0], &expected[0], "begun anew");
    let mut copy = sequence.try_clone(10).unwrap();
    sequence.truncate(12);
    assert!(sequence.size_bytes() < full);
    let _ = held.run(sequence.as_mut(), 12, &x[..30 * d]);
    let found = held.run(copy.as_mut(), 10, &x[80 * d..]);
    assert_same_bits(&found[0], &expected[0], "copied");
    let after = held.run(sequence.as_mut(), 10, &x[80 * d..]);
    assert_same_bits(&after[0], &expected[0], "cut");
    sequence.truncate(0);
    let left = sequence.size_bytes() + copy.size_bytes();
    assert_eq!(device.memory().held_bytes, before + left);
    drop((sequence, copy));
    assert_eq!(device.memory().held_bytes, before);
}

/// Sessions on threads of their own, each with a sequence, get what they get alone.
pub(crate) fn sessions_do_not_disturb_each_other(device: &dyn FastDevice, kind: Kind) {
    let model = Model::random(kind);
    let (held, d) = (model.hold(device), model.d_model);
    let session = |seed: u64| {
        let x = Seeded::new(seed).normal(9 * d);
        let mut sequence = device.sequence(model.shape()).unwrap();
        let passes = [0..5, 5..6, 6..9];
        passes.map(|tokens| {
            held.run(sequence.as_mut(), tokens.start, &x[tokens.start * d..tokens.end * d])
        })
    };
    let alone = [1, 2, 3].map(session);
    thread::scope(|scope| {
        let running = [1, 2, 3].map(|seed| scope.spawn(move || session(seed)));
        for (running, alone) in running.into_iter().zip(alone) {
            let found = running.join().unwrap();
            for (found, alone) in found.iter().flatten().zip(alone.iter().flatten()) {
                assert_same_bits(found, alone, "beside others");
            }
        }
    });
}

/// A slot is read as it was before the network that was started since; values that are written several
/// times are each what they were.
pub(crate) fn slots_are_what_was_written(device: &dyn FastDevice, kind: Kind) {
    let model = Model::random(kind);
    let (held, d) = (model.hold(device), model.d_model);
    let mut sequence = device.sequence(model.shape()).unwrap();
    sequence.begin(0, 3, model.angles(0, 3).as_ref().map(|[c, s]| [&c[..], &s[..]])).unwrap();
    let values = |seed| Seeded::new(seed).normal(3 * d);
    let mut found = Vec::new();
    let slots = [Slot::Residual, Slot::AttentionInput, Slot::FfnInput];
    for (seed, slot) in slots.into_iter().enumerate() {
        sequence.write(slot, &values(seed as u64)).unwrap();
    }
    held.layers[0]
        .network
        .start_in(HeldNeurons::Firing, sequence.as_mut(), Slot::FfnInput)
        .unwrap();
    sequence.write(Slot::FfnInput, &values(8)).unwrap();
    for (seed, slot) in [0, 1, 8].into_iter().zip(slots) {
        sequence.read(slot, &mut found).unwrap();
        assert_same_bits(&found, &values(seed), format!("{slot:?}"));
    }
    sequence.finish_ffn(None).unwrap();
    sequence.finish_ffn(Some(&values(9))).unwrap();
    sequence.finish_ffn(None).unwrap(); // nothing is added twice
    sequence.read(Slot::Residual, &mut found).unwrap();
    let mut y = vec![0.0; 3 * d];
    let pending = held.layers[0].network.start(HeldNeurons::Firing, &values(2)).unwrap();
    let _ = pending.wait(&mut y).unwrap();
    let sum = |at: usize| values(0)[at] + y[at] + model.down_bias(0)[at % d] + values(9)[at];
    let expected: Vec<f32> = (0..3 * d).map(sum).collect();
    assert_close(&found, &expected, bound(&expected), "the network and the part of the host");
    let mut broken = values(0);
    (broken[d], broken[2 * d + 1]) = (f32::NEG_INFINITY, f32::NAN);
    sequence.write(Slot::Residual, &broken).unwrap();
    assert_eq!(sequence.first_broken_token().unwrap(), Some(1));
    broken[d] = 0.0;
    sequence.write(Slot::Residual, &broken).unwrap();
    assert_eq!(sequence.first_broken_token().unwrap(), Some(2));
}

/// Networks on the tokens of a slot give, to the bit, what they give on tokens of the host, whatever picks
/// their neurons.
pub(crate) fn a_network_in_a_slot_is_that_of_the_host(device: &dyn FastDevice, [n, d]: Size) {
    let weights = network(WeightFormat::Q8_0, [n, d], true, false);
    let held = hold_all(device, &weights);
    let bias = weights.gate_bias.as_deref();
    let estimate = GateEstimate::new(LowBitFormat::Bits3, &weights.gate, bias, Activation::Relu);
    let estimate = estimate.unwrap();
    assert!(held.hold_predictor(RowPredictor::Estimated(&estimate, 0.3)).unwrap());
    let kv = KvLayout { n_kv_heads: 1, d_head: 2, dtype: KvDtype::F32 };
    let shape = SequenceShape { d_model: d, n_layers: 0, kv };
    let mut sequence = device.sequence(shape).unwrap();
    let mut found = Vec::new();
    for n_tokens in [0, 1, 3, 20] {
        let (x, picks) = (Seeded::new(6).normal(n_tokens * d), picks(n_tokens, n));
        for neurons in [
            HeldNeurons::All,
            HeldNeurons::Firing,
            HeldNeurons::FiringOf(&picks),
            HeldNeurons::Predicted(&[]),
        ] {
            let what = format!("{neurons:?} of {n_tokens} tokens");
            let mut expected = vec![0.0; x.len()];
            let run = held.start(neurons, &x).unwrap().wait(&mut expected).unwrap();
            sequence.begin(0, n_tokens, None).unwrap();
            sequence.write(Slot::Residual, &vec![0.0; x.len()]).unwrap();
            sequence.write(Slot::FfnInput, &x).unwrap();
            held.start_in(neurons, sequence.as_mut(), Slot::FfnInput).unwrap();
            sequence.finish_ffn(None).unwrap();
            sequence.read(Slot::Residual, &mut found).unwrap();
            assert_same_bits(&found, &expected, &what);
            let runs = sequence.take_runs().unwrap();
            assert_eq!(runs.len(), 1, "{what}");
            let [found, expected] = [runs[0].counts, run.counts];
            let counted =
                |counts: FfnCounts| [counts.fired, counts.ran, counts.picked, counts.bytes];
            assert_eq!(counted(found), counted(expected), "{what}");
        }
    }
}

/// No pass takes more than there is, and what `sequence_bytes` says is enough.
pub(crate) fn a_budget_is_kept(open: &dyn Fn(u64) -> Arc<dyn FastDevice>, kind: Kind) {
    let model = Model::random(kind);
    let needed = {
        let device = open(1 << 30);
        let _held = model.hold(device.as_ref());
        device.memory().held_bytes
    };
    let device = open(needed + open(0).sequence_bytes(model.shape(), 150, 40));
    let held = model.hold(device.as_ref());
    assert_eq!(device.memory().held_bytes, needed);
    let mut sequence = device.sequence(model.shape()).unwrap();
    let x = Seeded::new(5).normal(170 * model.d_model);
    let mut last = [Vec::new(), Vec::new()];
    for (first, n_tokens) in [(0, 40), (40, 40), (80, 40), (120, 29), (149, 1)] {
        let tokens = first * model.d_model..(first + n_tokens) * model.d_model;
        last = held.run(sequence.as_mut(), first, &x[tokens]);
    }
    let before = device.memory();
    let refused = sequence.begin(150, 100_000, None);
    assert!(matches!(refused, Err(OpError::DeviceBudget { .. })), "{refused:?}");
    assert!(device.memory().peak_bytes <= before.budget_bytes);
    assert_eq!(
        device.memory().held_bytes,
        before.held_bytes,
        "nothing is held of what was refused"
    );
    // the positions before are still there
    let again = held.run(sequence.as_mut(), 149, &x[149 * model.d_model..150 * model.d_model]);
    assert_same_bits(&again[0], &last[0], "after a pass that was refused");
}

/// A sequence of one device is none of another's.
pub(crate) fn parts_are_for_their_own_device(device: &dyn FastDevice, other: &dyn FastDevice) {
    let model = Model::random(kinds()[0]);
    let held = model.hold(device);
    let mut sequence = other.sequence(model.shape()).unwrap();
    sequence.begin(0, 1, None).unwrap();
    let network = &held.layers[0].network;
    for refused in [
        held.layers[0].norms[0].run(sequence.as_mut(), Slot::Residual, Slot::FfnInput),
        held.layers[0].attention.run(sequence.as_mut(), 0, Slot::Residual),
        network.start_in(HeldNeurons::Firing, sequence.as_mut(), Slot::Residual),
        held.head.run(sequence.as_mut(), 0..1, &mut Vec::new()),
    ] {
        assert!(matches!(refused, Err(OpError::ForeignSequence { .. })), "{refused:?}");
    }
}

/// Wrong input is refused.
pub(crate) fn what_does_not_fit_is_refused(device: &dyn FastDevice) {
    let model = Model::random(kinds()[0]);
    let (held, d) = (model.hold(device), model.d_model);
    let mut sequence = device.sequence(model.shape()).unwrap();
    let what = |result: Result<(), OpError>| match result.unwrap_err() {
        OpError::Shape { what, .. } => what,
        OpError::IdOutOfRange { .. } => "id",
        other => panic!("{other}"),
    };
    assert_eq!(what(sequence.begin(1, 1, None)), "first position");
    assert!(sequence.begin(0, usize::MAX, None).is_err());
    assert_eq!(what(sequence.begin(0, 2, Some([&[0.0; 16], &[0.0; 15]]))), "angles");
    sequence.begin(0, 2, None).unwrap();
    let sequence = sequence.as_mut();
    assert_eq!(what(sequence.write(Slot::Residual, &vec![0.0; d])), "values");
    assert_eq!(what(sequence.finish_ffn(Some(&vec![0.0; 3 * d]))), "values");
    let layer = &held.layers[0];
    assert_eq!(what(layer.attention.run(sequence, 0, Slot::Residual)), "angles");
    assert_eq!(what(layer.attention.run(sequence, N_LAYERS, Slot::Residual)), "layer");
    assert_eq!(what(held.head.run(sequence, 1..3, &mut Vec::new())), "tokens");
    let lists = [NeuronIds::new(), NeuronIds::all(layer.network.n_neurons() + 1)];
    let beyond = HeldNeurons::FiringOf(&lists);
    assert_eq!(what(layer.network.start_in(beyond, sequence, Slot::Residual)), "id");
    let one = HeldNeurons::FiringOf(&lists[..1]);
    assert_eq!(what(layer.network.start_in(one, sequence, Slot::Residual)), "lists of ids");
    assert_eq!(what(layer.network.hold_down_bias(&[0.0; 3]).map(drop)), "the bias of down");
    let mut shape = model.shape();
    shape.d_model += 1;
    let mut wider = device.sequence(shape).unwrap();
    wider.begin(0, 1, None).unwrap();
    let narrow = layer.norms[0].run(wider.as_mut(), Slot::Residual, Slot::Residual);
    assert_eq!(what(narrow), "the sequence");
    shape.d_model -= 1;
    shape.kv.n_kv_heads += 1;
    let mut heads = device.sequence(shape).unwrap();
    heads.begin(0, 1, None).unwrap();
    let other = layer.attention.run(heads.as_mut(), 0, Slot::Residual);
    assert_eq!(what(other), "heads");
    let norm = NormPart { scale: &[1.0; 4], shift: Some(&[1.0; 3]), eps: 0.0, centred: true };
    assert_eq!(what(device.hold_norm(norm).map(drop)), "shift");
}
