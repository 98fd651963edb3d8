//! The stand-in's dense parts against the host's operators, to the bit.

use candle_core::{Device, Tensor};
use testing::{Seeded, assert_same_bits};

use super::tests::Fault;
use super::*;
use crate::attention::{
    AttentionShape, KvDtype, KvLayout, KvPage, KvPages, PAGE_LEN, alibi_slopes, causal_attention,
};
use crate::fast_device::{DensePart, HeldNeurons, HeldRun, Slot};
use crate::ffn::{FfnWeights, Neurons, ffn_into};
use crate::mask::NeuronIds;
use crate::{Activation, NeuronMatrix, WeightFormat, Workspace, linear, residual_add};

const BIG: u64 = 1 << 30;

fn device(budget_bytes: u64) -> StandIn {
    let threads = NonZeroUsize::new(2).unwrap();
    StandIn::new(StandInOptions::new(budget_bytes).with_threads(threads)).unwrap()
}

fn matrix(format: WeightFormat, n: usize, d: usize, seed: u64) -> NeuronMatrix {
    let values: Vec<f32> = Seeded::new(seed).normal(n * d).iter().map(|v| v * 0.2).collect();
    NeuronMatrix::from_f32(format, n, d, &values).unwrap()
}

/// A layer of attention, as the host has it.
#[derive(Clone)]
struct Layer {
    d_model: usize,
    heads: [usize; 3],
    window: Option<usize>,
    slopes: Option<Vec<f32>>,
    rotary: bool,
    projections: Vec<NeuronMatrix>,
    biases: Vec<Vec<f32>>,
}

impl Layer {
    fn new(format: WeightFormat, d_model: usize, heads: [usize; 3], kind: usize) -> Self {
        let [n_heads, n_kv_heads, d_head] = heads;
        let (q, kv) = (n_heads * d_head, n_kv_heads * d_head);
        let shapes = [(q, d_model), (kv, d_model), (kv, d_model), (d_model, q)];
        let projections = shapes.iter().enumerate();
        let projections = projections.map(|(i, &(n, d))| matrix(format, n, d, i as u64)).collect();
        let biases = shapes.iter().map(|&(n, _)| match kind % 2 {
            0 => Vec::new(),
            _ => Seeded::new(n as u64).normal(n),
        });
        Self {
            d_model,
            heads,
            window: (kind == 1).then_some(20),
            slopes: (kind == 2).then(|| alibi_slopes(n_heads)),
            rotary: kind != 2 && d_head.is_multiple_of(2),
            projections,
            biases: biases.collect(),
        }
    }

    fn dense(&self, at: usize) -> DensePart<'_> {
        let bias = Some(self.biases[at].as_slice()).filter(|bias| !bias.is_empty());
        DensePart { weights: &self.projections[at], bias }
    }

    fn part(&self) -> AttentionPart<'_> {
        let [n_heads, n_kv_heads, d_head] = self.heads;
        AttentionPart {
            query: self.dense(0),
            key: self.dense(1),
            value: self.dense(2),
            output: self.dense(3),
            n_heads,
            n_kv_heads,
            d_head,
            scale: 1.0 / (d_head as f32).sqrt(),
            window: self.window,
            alibi_slopes: self.slopes.as_deref(),
            rotary: self.rotary,
        }
    }

    fn shape(&self, dtype: KvDtype) -> SequenceShape {
        let [_, n_kv_heads, d_head] = self.heads;
        SequenceShape {
            d_model: self.d_model,
            n_layers: 2,
            kv: KvLayout { n_kv_heads, d_head, dtype },
        }
    }

    fn angles(&self, first: usize, n_tokens: usize) -> Option<[Vec<f32>; 2]> {
        let half = self.heads[2] / 2;
        let angle =
            |at: usize| ((first + at / half) as f32 * 0.3 / (1 + at % half) as f32).sin_cos();
        let angles: Vec<(f32, f32)> = (0..n_tokens * half).map(angle).collect();
        let angles = [angles.iter().map(|a| a.1).collect(), angles.iter().map(|a| a.0).collect()];
        self.rotary.then_some(angles)
    }

    fn product(&self, at: usize, x: &[f32]) -> Vec<f32> {
        let DensePart { weights, bias } = self.dense(at);
        let x = tensor(x, weights.d_model());
        values(&linear(weights, bias, &x).unwrap())
    }

    /// `x` and what attention gives for it, on the host, from the first position on.
    fn on_the_host(&self, x: &[f32], input: &[f32], dtype: KvDtype) -> Vec<f32> {
        let [n_heads, n_kv_heads, d_head] = self.heads;
        let n_tokens = x.len() / self.d_model;
        let [mut queries, mut keys, values_of] = [0, 1, 2].map(|at| self.product(at, input));
        if let Some([cos, sin]) = self.angles(0, n_tokens) {
            turn_one_by_one(&mut queries, n_heads, d_head, [&cos, &sin]);
            turn_one_by_one(&mut keys, n_kv_heads, d_head, [&cos, &sin]);
        }
        let width = PAGE_LEN * n_kv_heads * d_head;
        let pages = keys.chunks(width).zip(values_of.chunks(width)).map(|(keys, values)| {
            let mut page = KvPage::zeroed(KvLayout { n_kv_heads, d_head, dtype }).unwrap();
            page.write(0, keys, values).unwrap();
            page
        });
        let AttentionPart { scale, window, alibi_slopes, .. } = self.part();
        let first_position = 0;
        let shape = AttentionShape {
            n_heads,
            n_kv_heads,
            d_head,
            scale,
            first_position,
            window,
            alibi_slopes,
        };
        let (pages, queries) = (Pages(pages.collect()), tensor(&queries, n_heads * d_head));
        let attended = causal_attention(&queries, &pages, shape, &mut Workspace::default());
        let output = self.product(3, &values(&attended.unwrap()));
        let [x, output] = [x, &output].map(|x| tensor(x, self.d_model));
        values(&residual_add(&x, &output).unwrap())
    }
}

struct Pages(Vec<KvPage>);

impl KvPages for Pages {
    fn page(&self, index: usize) -> &KvPage {
        &self.0[index]
    }
}

fn turn_one_by_one(x: &mut [f32], n_heads: usize, d_head: usize, [cos, sin]: [&[f32]; 2]) {
    let half = d_head / 2;
    for (token, x) in x.chunks_mut(n_heads * d_head).enumerate() {
        for head in 0..n_heads {
            for i in 0..half {
                let (at, angle) = (head * d_head + i, token * half + i);
                let (a, b) = (x[at], x[at + half]);
                x[at] = a * cos[angle] - b * sin[angle];
                x[at + half] = a * sin[angle] + b * cos[angle];
            }
        }
    }
}

fn tensor(values: &[f32], width: usize) -> Tensor {
    Tensor::from_vec(values.to_vec(), (values.len() / width, width), &Device::Cpu).unwrap()
}

fn values(tensor: &Tensor) -> Vec<f32> {
    tensor.flatten_all().unwrap().to_vec1().unwrap()
}

fn begin(
    sequence: &mut dyn DeviceSequence,
    layer: &Layer,
    first: usize,
    n_tokens: usize,
) -> Result<(), OpError> {
    let angles = layer.angles(first, n_tokens);
    sequence.begin(first, n_tokens, angles.as_ref().map(|[cos, sin]| [&cos[..], &sin[..]]))
}

/// Attends from the tokens `x` at `first` and returns the stream.
fn pass(
    held: &dyn HeldAttention,
    sequence: &mut dyn DeviceSequence,
    layer: &Layer,
    first: usize,
    x: &[f32],
) -> Vec<f32> {
    begin(sequence, layer, first, x.len() / layer.d_model).unwrap();
    sequence.write(Slot::Residual, x).unwrap();
    held.run(sequence, 1, Slot::Residual).unwrap();
    let mut stream = Vec::new();
    sequence.read(Slot::Residual, &mut stream).unwrap();
    stream
}

/// Layers of odd shapes: grouped heads, a window, ALiBi, biases, quantised rows.
fn layers() -> Vec<Layer> {
    vec![
        Layer::new(WeightFormat::F32, 24, [4, 2, 6], 0),
        Layer::new(WeightFormat::F16, 20, [3, 1, 18], 1),
        Layer::new(WeightFormat::F32, 35, [5, 5, 7], 2),
        Layer::new(WeightFormat::Q8_0, 64, [2, 1, 32], 3),
        Layer::new(WeightFormat::F32, 8, [1, 1, 130], 0),
    ]
}

#[test]
fn attention_gives_the_hosts_bits_in_any_cut_of_a_text() {
    let device = device(BIG);
    for (layer, dtype) in layers().iter().flat_map(|layer| KvDtype::ALL.map(|dtype| (layer, dtype)))
    {
        let n_tokens = 150;
        let x = Seeded::new(9).normal(n_tokens * layer.d_model);
        let expected = layer.on_the_host(&x, &x, dtype);
        let held = device.hold_attention(layer.part()).unwrap();
        for pieces in [&[150][..], &[33, 31, 1, 1, 84], &[64, 64, 22]] {
            let mut sequence = device.sequence(layer.shape(dtype)).unwrap();
            let (mut found, mut done) = (Vec::new(), 0);
            for &piece in pieces {
                let x = &x[done * layer.d_model..][..piece * layer.d_model];
                found.extend(pass(held.as_ref(), sequence.as_mut(), layer, done, x));
                done += piece;
            }
            assert_same_bits(&found, &expected, "the stream");
        }
        assert!(device.scratch_bytes() <= device.shared.ledger().scratch.bytes());
        // attention of another slot than the stream
        let input = Seeded::new(10).normal(x.len());
        let mut sequence = device.sequence(layer.shape(dtype)).unwrap();
        begin(sequence.as_mut(), layer, 0, n_tokens).unwrap();
        sequence.write(Slot::Residual, &x).unwrap();
        sequence.write(Slot::AttentionInput, &input).unwrap();
        held.run(sequence.as_mut(), 0, Slot::AttentionInput).unwrap();
        let mut found = Vec::new();
        sequence.read(Slot::Residual, &mut found).unwrap();
        assert_same_bits(&found, &layer.on_the_host(&x, &input, dtype), "a slot");
    }
}

#[test]
fn what_is_cut_off_is_forgotten_and_a_copy_goes_its_own_way() {
    let device = device(BIG);
    for layer in layers() {
        let n = 90 * layer.d_model;
        let (one, other) = (Seeded::new(1).normal(n), Seeded::new(2).normal(n));
        let cut = 70 * layer.d_model;
        let mixed = [&one[..cut], &other[cut..]].concat();
        let [of_one, of_mixed] = [&one, &mixed].map(|x| layer.on_the_host(x, x, KvDtype::F32));
        let held = device.hold_attention(layer.part()).unwrap();
        let mut sequence = device.sequence(layer.shape(KvDtype::F32)).unwrap();
        let run = |sequence: &mut dyn DeviceSequence, first, x: &[f32]| {
            pass(held.as_ref(), sequence, &layer, first, x)
        };
        assert_same_bits(&run(sequence.as_mut(), 0, &one), &of_one, "one");
        let mut copy = sequence.try_clone(70).unwrap();
        let before = sequence.size_bytes();
        // a pass from an earlier position forgets, so does a cut
        let again = run(sequence.as_mut(), 70, &other[cut..]);
        assert_same_bits(&again, &of_mixed[cut..], "from an earlier position");
        sequence.truncate(60);
        assert!(sequence.size_bytes() < before, "a page is free");
        let again = run(sequence.as_mut(), 60, &mixed[60 * layer.d_model..]);
        assert_same_bits(&again, &of_mixed[60 * layer.d_model..], "after a cut");
        let copied = run(copy.as_mut(), 70, &one[cut..]);
        assert_same_bits(&copied, &of_one[cut..], "the copy");
        drop(sequence);
        let copied = run(copy.as_mut(), 1, &one[layer.d_model..]);
        assert_same_bits(&copied, &of_one[layer.d_model..], "the copy alone");
        // there is nothing between the end and a position behind it
        assert!(matches!(
            begin(copy.as_mut(), &layer, 91, 1),
            Err(OpError::Shape { what: "first position", .. })
        ));
    }
}

#[test]
fn norms_follow_their_definition_in_place_and_from_slot_to_slot() {
    let device = device(BIG);
    let layer = Layer::new(WeightFormat::F32, 35, [5, 5, 7], 2);
    for (centred, n_tokens) in [(false, 1), (false, 70), (true, 1), (true, 70)] {
        let (scale, shift) = (Seeded::new(1).normal(35), Seeded::new(2).normal(35));
        let shift = centred.then_some(&shift[..]);
        let norm = NormPart { scale: &scale, shift, eps: 0.01, centred };
        let held = device.hold_norm(norm).unwrap();
        let x = Seeded::new(3).normal(n_tokens * 35);
        let mut sequence = device.sequence(layer.shape(KvDtype::F32)).unwrap();
        begin(sequence.as_mut(), &layer, 0, n_tokens).unwrap();
        sequence.write(Slot::Residual, &x).unwrap();
        held.run(sequence.as_mut(), Slot::Residual, Slot::FfnInput).unwrap();
        held.run(sequence.as_mut(), Slot::Residual, Slot::Residual).unwrap();
        let (mut there, mut here) = (Vec::new(), Vec::new());
        sequence.read(Slot::FfnInput, &mut there).unwrap();
        sequence.read(Slot::Residual, &mut here).unwrap();
        assert_same_bits(&there, &here, "both ways");
        for (x, y) in x.chunks(35).zip(here.chunks(35)) {
            let mean = x.iter().map(|&x| f64::from(x)).sum::<f64>() / 35.0 * f64::from(centred);
            let squares = x.iter().map(|&x| (f64::from(x) - mean).powi(2)).sum::<f64>() / 35.0;
            for (i, (&x, &y)) in x.iter().zip(y).enumerate() {
                let shift = shift.map_or(0.0, |shift| f64::from(shift[i]));
                let expected = (f64::from(x) - mean) / (squares + 0.01).sqrt();
                let expected = expected * f64::from(scale[i]) + shift;
                assert!((f64::from(y) - expected).abs() < 1e-5, "{y} {expected}");
            }
        }
    }
}

#[test]
fn a_head_gives_the_logits_of_the_tokens_that_are_asked_for() {
    let device = device(BIG);
    let layer = Layer::new(WeightFormat::F32, 24, [4, 2, 6], 0);
    for (format, d_embedding) in [(WeightFormat::F32, 24), (WeightFormat::Q8_0, 32)] {
        let head = matrix(format, 77, d_embedding, 1);
        let projection = matrix(WeightFormat::F16, d_embedding, 24, 2);
        let projects = d_embedding != 24;
        let part = HeadPart {
            norm: None,
            projection: projects.then_some(DensePart { weights: &projection, bias: None }),
            weights: &head,
        };
        let held = device.hold_head(part).unwrap();
        let x = Seeded::new(3).normal(50 * 24);
        let mut hidden = tensor(&x, 24);
        if projects {
            hidden = linear(&projection, None, &hidden).unwrap();
        }
        let expected = values(&linear(&head, None, &hidden).unwrap());
        let mut sequence = device.sequence(layer.shape(KvDtype::F32)).unwrap();
        begin(sequence.as_mut(), &layer, 0, 50).unwrap();
        sequence.write(Slot::Residual, &x).unwrap();
        let mut logits = vec![9.0; 3];
        for tokens in [0..50, 49..50, 7..45, 3..3] {
            held.run(sequence.as_mut(), tokens.clone(), &mut logits).unwrap();
            assert_same_bits(&logits, &expected[tokens.start * 77..tokens.end * 77], "logits");
        }
        let beyond = held.run(sequence.as_mut(), 3..51, &mut logits);
        assert!(matches!(beyond, Err(OpError::Shape { what: "tokens", .. })));
        let mut after = Vec::new();
        sequence.read(Slot::Residual, &mut after).unwrap();
        assert_same_bits(&after, &x, "the stream stays");
    }
}

fn network() -> FfnWeights {
    let m = |seed| matrix(WeightFormat::F32, 50, 24, seed);
    FfnWeights::new(m(1), Some(m(2)), m(3), Activation::Relu).unwrap()
}

#[test]
fn a_network_in_a_sequence_adds_to_the_stream_what_the_cpu_adds() {
    let (device, weights) = (device(BIG), network());
    let layer = Layer::new(WeightFormat::F32, 24, [4, 2, 6], 0);
    let ids = NeuronIds::from_sorted((0..20).collect()).unwrap();
    let here = weights.pick(&ids).unwrap();
    let (bias, part) = (Seeded::new(5).normal(24), Seeded::new(6).normal(40 * 24));
    let (x, input) = (Seeded::new(7).normal(40 * 24), Seeded::new(8).normal(40 * 24));
    let mut alone = vec![0.0; 40 * 24];
    let mut workspace = Workspace::default();
    let counts = ffn_into(&here, Neurons::Firing, &input, &mut workspace, &mut alone).unwrap();
    let hot = HotRows { weights: &weights, ids: &ids, density: None };
    for (with_bias, with_part) in [(false, false), (false, true), (true, false), (true, true)] {
        let held = device.hold(hot).unwrap();
        let before = held.size_bytes();
        if with_bias {
            assert!(held.hold_down_bias(&bias).unwrap());
            assert_eq!(held.size_bytes() - before, 24 * 4);
        }
        let mut sequence = device.sequence(layer.shape(KvDtype::F32)).unwrap();
        begin(sequence.as_mut(), &layer, 0, 40).unwrap();
        sequence.write(Slot::Residual, &x).unwrap();
        sequence.write(Slot::FfnInput, &input).unwrap();
        held.start_in(HeldNeurons::Firing, sequence.as_mut(), Slot::FfnInput).unwrap();
        // the input can be read while the network runs
        let mut read = Vec::new();
        sequence.read(Slot::FfnInput, &mut read).unwrap();
        assert_same_bits(&read, &input, "the input");
        sequence.finish_ffn(with_part.then_some(&part[..])).unwrap();
        sequence.finish_ffn(None).unwrap(); // nothing is added twice
        let mut stream = Vec::new();
        sequence.read(Slot::Residual, &mut stream).unwrap();
        let expected = (0..x.len()).map(|at| {
            let sum = if with_part { part[at] } else { 0.0 } + alone[at];
            x[at] + if with_bias { sum + bias[at % 24] } else { sum }
        });
        assert_same_bits(&stream, &expected.collect::<Vec<f32>>(), "the stream");
        let runs: Vec<HeldRun> = sequence.take_runs().unwrap();
        assert_eq!(runs.len(), 1);
        assert_eq!(runs[0].counts.fired, counts.fired);
        assert!(sequence.take_runs().unwrap().is_empty());
        // one that nobody finishes is counted and not added; a new pass forgets it
        held.start_in(HeldNeurons::All, sequence.as_mut(), Slot::FfnInput).unwrap();
        assert_eq!(sequence.take_runs().unwrap().len(), 1);
        held.start_in(HeldNeurons::All, sequence.as_mut(), Slot::FfnInput).unwrap();
        begin(sequence.as_mut(), &layer, 40, 1).unwrap();
        sequence.finish_ffn(None).unwrap();
        assert!(sequence.take_runs().unwrap().is_empty());
    }
}

#[test]
fn the_first_token_that_is_not_finite_is_found() {
    let device = device(BIG);
    let layer = Layer::new(WeightFormat::F32, 24, [4, 2, 6], 0);
    let mut sequence = device.sequence(layer.shape(KvDtype::F32)).unwrap();
    let mut x = vec![1.0; 5 * 24];
    begin(sequence.as_mut(), &layer, 0, 5).unwrap();
    for (at, expected) in [(None, None), (Some(119), Some(4)), (Some(50), Some(2))] {
        if let Some(at) = at {
            x[at] = f32::NEG_INFINITY;
        }
        sequence.write(Slot::Residual, &x).unwrap();
        assert_eq!(sequence.first_broken_token().unwrap(), expected);
    }
}

#[test]
fn all_that_a_sequence_takes_is_within_the_budget_and_comes_back() {
    let layer = Layer::new(WeightFormat::F16, 20, [3, 1, 18], 1);
    let roomy = device(BIG);
    let held = roomy.hold_attention(layer.part()).unwrap();
    let mut sequence = roomy.sequence(layer.shape(KvDtype::F32)).unwrap();
    begin(sequence.as_mut(), &layer, 0, 130).unwrap();
    let page = layer.shape(KvDtype::F32).kv.page_bytes() as u64;
    let of_pass = 130 * (3 * 20 + 2 * 9) * 4;
    assert_eq!(sequence.size_bytes(), 3 * 2 * page + of_pass);
    let needed = roomy.memory().held_bytes;
    let scratch = roomy.shared.ledger().scratch.bytes();
    assert_eq!(needed, held.size_bytes() + sequence.size_bytes() + scratch);
    let planned = roomy.sequence_bytes(layer.shape(KvDtype::F32), 130, 130);
    assert!(planned >= sequence.size_bytes());
    drop((held, sequence));
    assert_eq!(roomy.memory().held_bytes, scratch);

    // one byte less is an error, and what was there stays
    let tight = device(needed - 1);
    let held = tight.hold_attention(layer.part()).unwrap();
    let mut sequence = tight.sequence(layer.shape(KvDtype::F32)).unwrap();
    let x = Seeded::new(1).normal(60 * 20);
    let expected = layer.on_the_host(&x, &x, KvDtype::F32);
    let _ = pass(held.as_ref(), sequence.as_mut(), &layer, 0, &x[..40 * 20]);
    for n_tokens in [131, 100_000, usize::MAX / 1000] {
        let refused = match n_tokens {
            131 => begin(sequence.as_mut(), &layer, 40, n_tokens),
            _ => sequence.begin(40, n_tokens, None),
        };
        assert!(matches!(refused, Err(OpError::DeviceBudget { .. })), "{refused:?}");
        assert!(tight.memory().held_bytes < needed);
    }
    let rest = pass(held.as_ref(), sequence.as_mut(), &layer, 40, &x[40 * 20..]);
    assert_same_bits(&rest, &expected[40 * 20..], "after a refusal");
    let copies: Vec<_> =
        (0..100).map(|_| sequence.try_clone(60)).take_while(Result::is_ok).collect();
    assert!(copies.len() < 10 && tight.memory().peak_bytes < needed);
    drop((copies, sequence, held));
    assert_eq!(tight.memory().held_bytes, tight.shared.ledger().scratch.bytes());
    let none = device(10);
    let (scale, head) = ([1.0; 20], &layer.projections[0]);
    let norm = NormPart { scale: &scale, shift: None, eps: 0.1, centred: false };
    let head = HeadPart { norm: Some(norm), projection: None, weights: head };
    let over = |result: Result<(), OpError>| matches!(result, Err(OpError::DeviceBudget { .. }));
    assert!(over(none.hold_norm(norm).map(drop)) && over(none.hold_head(head).map(drop)));
    assert!(over(none.hold_attention(layer.part()).map(drop)));
    assert_eq!(none.memory().held_bytes, 0);
}

#[test]
fn what_does_not_fit_together_is_refused() {
    let (here, there) = (device(BIG), device(BIG));
    let layer = Layer::new(WeightFormat::F32, 24, [4, 2, 6], 0);
    let held = here.hold_attention(layer.part()).unwrap();
    let scale = vec![1.0; 24];
    let norm_part = NormPart { scale: &scale, shift: None, eps: 0.1, centred: false };
    let norm = here.hold_norm(norm_part).unwrap();
    let mut foreign = there.sequence(layer.shape(KvDtype::F32)).unwrap();
    begin(foreign.as_mut(), &layer, 0, 2).unwrap();
    let is_foreign = |result| matches!(result, Err(OpError::ForeignSequence { .. }));
    assert!(is_foreign(held.run(foreign.as_mut(), 0, Slot::Residual)));
    assert!(is_foreign(norm.run(foreign.as_mut(), Slot::Residual, Slot::Residual)));
    let ids = NeuronIds::all(50);
    let rows = here.hold(HotRows { weights: &network(), ids: &ids, density: None }).unwrap();
    assert!(is_foreign(rows.start_in(HeldNeurons::All, foreign.as_mut(), Slot::FfnInput)));

    let what = |result: Result<(), OpError>| match result {
        Err(OpError::Shape { what, .. }) => what,
        other => panic!("{other:?}"),
    };
    let shape = layer.shape(KvDtype::F32);
    let mut sequence = here.sequence(shape).unwrap();
    begin(sequence.as_mut(), &layer, 0, 2).unwrap();
    assert_eq!(what(held.run(sequence.as_mut(), 2, Slot::Residual)), "layer");
    assert_eq!(what(sequence.write(Slot::FfnInput, &[0.0; 47])), "values");
    assert_eq!(what(sequence.finish_ffn(Some(&[0.0; 49]))), "values");
    assert_eq!(what(sequence.begin(0, 2, Some([&[0.0; 6], &[0.0; 5]]))), "angles");
    sequence.begin(0, 2, None).unwrap();
    assert_eq!(what(held.run(sequence.as_mut(), 0, Slot::Residual)), "angles");
    let wide = SequenceShape { d_model: 25, ..shape };
    let mut wide = here.sequence(wide).unwrap();
    assert_eq!(what(norm.run(wide.as_mut(), Slot::Residual, Slot::Residual)), "the sequence");
    let heads = KvLayout { n_kv_heads: 3, ..shape.kv };
    let mut heads = here.sequence(SequenceShape { kv: heads, ..shape }).unwrap();
    begin(heads.as_mut(), &layer, 0, 2).unwrap();
    assert_eq!(what(held.run(heads.as_mut(), 0, Slot::Residual)), "heads");

    let (part, before) = (layer.part(), here.memory().held_bytes);
    let hold = |part: AttentionPart<'_>| what(here.hold_attention(part).map(drop));
    assert_eq!(hold(AttentionPart { n_kv_heads: 3, ..part }), "heads");
    assert_eq!(hold(AttentionPart { d_head: 7, ..part }), "query");
    assert_eq!(hold(AttentionPart { value: part.query, ..part }), "value");
    assert_eq!(hold(AttentionPart { output: part.key, ..part }), "output");
    assert_eq!(hold(AttentionPart { window: Some(0), ..part }), "window");
    let short = DensePart { bias: Some(&[1.0]), ..part.key };
    assert_eq!(hold(AttentionPart { key: short, ..part }), "bias");
    let lopsided = NormPart { shift: Some(&[1.0]), ..norm_part };
    assert_eq!(what(here.hold_norm(lopsided).map(drop)), "shift");
    let head = matrix(WeightFormat::F32, 9, 25, 1);
    let head = HeadPart { norm: Some(norm_part), projection: None, weights: &head };
    assert_eq!(what(here.hold_head(head).map(drop)), "norm");
    assert_eq!(here.memory().held_bytes, before, "nothing is held of what was refused");
}

#[test]
fn a_panic_in_a_step_is_an_error_for_its_sequence_and_all_that_come_later() {
    let device = device(BIG);
    let layer = Layer::new(WeightFormat::F32, 24, [4, 2, 6], 0);
    let mut bad = StandInAttention::hold(&device.shared, layer.part()).unwrap();
    bad.fault = Some(Fault::Panic);
    let good = device.hold_attention(layer.part()).unwrap();
    let mut sequences = [0, 1].map(|_| device.sequence(layer.shape(KvDtype::F32)).unwrap());
    for sequence in &mut sequences {
        begin(sequence.as_mut(), &layer, 0, 3).unwrap();
    }
    let [struck, other] = &mut sequences;
    let said = |error: OpError| match error {
        OpError::DeviceFailed { source, .. } => source.to_string(),
        other => panic!("{other}"),
    };
    let error = bad.run(struck.as_mut(), 0, Slot::Residual).unwrap_err();
    assert_eq!(said(error), "its thread panicked: planted");
    for sequence in [struck, other] {
        let error = good.run(sequence.as_mut(), 0, Slot::Residual).unwrap_err();
        assert_eq!(said(error), "its thread is gone");
        assert!(begin(sequence.as_mut(), &layer, 0, 3).is_err());
        assert!(sequence.try_clone(0).is_err());
    }
    drop((sequences, good, bad));
    assert_eq!(device.memory().held_bytes, device.shared.ledger().scratch.bytes());
}

#[test]
fn a_modelled_speed_is_kept_by_steps_and_crossings() {
    let speed = ModelledSpeed {
        bytes_per_second: 1e6,
        link_bytes_per_second: 1e6,
        link_latency: Duration::from_millis(2),
    };
    assert_eq!(speed.work(2000), Duration::from_millis(2));
    assert_eq!(speed.crossing(1000), Duration::from_millis(3));
    let device = StandIn::new(StandInOptions::new(BIG).with_speed(speed)).unwrap();
    let layer = Layer::new(WeightFormat::F32, 24, [4, 2, 6], 0);
    let held = device.hold_attention(layer.part()).unwrap();
    let mut sequence = device.sequence(layer.shape(KvDtype::F32)).unwrap();
    begin(sequence.as_mut(), &layer, 0, 1).unwrap();
    let began = std::time::Instant::now();
    held.run(sequence.as_mut(), 0, Slot::Residual).unwrap();
    assert!(began.elapsed() >= speed.work(held.size_bytes()));
    let began = std::time::Instant::now();
    sequence.read(Slot::Residual, &mut Vec::new()).unwrap();
    assert!(began.elapsed() >= speed.crossing(24 * 4));
}
