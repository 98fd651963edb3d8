//! A device that is lost under way, and one that has less memory than it was said to: errors, of which
//! nothing is left.

use hostsim::{Limits, SimDevice};
use powerinfer_ops::attention::{KvDtype, KvLayout};
use powerinfer_ops::{
    Activation, AttentionPart, DensePart, FastDevice, FfnWeights, GateEstimate, HeadPart,
    HeldNeurons, HotRows, LowBitFormat, NeuronIds, NormPart, OpError, RowPredictor, SequenceShape,
    Slot, WeightFormat,
};

use crate::cases::matrix;

const N: usize = 40;
const D: usize = 32;

/// Everything that a device does, once.
fn all_of_it(device: &dyn FastDevice) -> Result<(), OpError> {
    let m = |n, seed| matrix(WeightFormat::Q8_0, n, D, seed);
    let weights = FfnWeights::new(m(N, 1), Some(m(N, 2)), m(N, 3), Activation::Relu)?;
    let ids = NeuronIds::all(N);
    let held = device.hold(HotRows { weights: &weights, ids: &ids, density: None })?;
    let estimate = GateEstimate::new(LowBitFormat::Bits3, &weights.gate, None, Activation::Relu)?;
    held.hold_predictor(RowPredictor::Estimated(&estimate, 0.3))?;
    held.hold_down_bias(&[0.5; D])?;
    let norm = NormPart { scale: &[1.0; D], shift: Some(&[0.0; D]), eps: 0.1, centred: true };
    let held_norm = device.hold_norm(norm)?;
    let (square, embeddings) = (m(D, 4), m(50, 5));
    let part = DensePart { weights: &square, bias: Some(&[0.1; D]) };
    let attention = device.hold_attention(AttentionPart {
        query: part,
        key: part,
        value: part,
        output: part,
        n_heads: 2,
        n_kv_heads: 2,
        d_head: D / 2,
        scale: 0.25,
        window: None,
        alibi_slopes: Some(&[0.5, 0.25]),
        rotary: true,
    })?;
    let head = HeadPart { norm: Some(norm), projection: Some(part), weights: &embeddings };
    let head = device.hold_head(head)?;
    let kv = KvLayout { n_kv_heads: 2, d_head: D / 2, dtype: KvDtype::F16 };
    let mut sequence = device.sequence(SequenceShape { d_model: D, n_layers: 1, kv })?;
    let mut y = vec![0.0; 70 * D];
    let pending = held.start(HeldNeurons::Firing, &y)?;
    sequence.begin(0, 70, Some([&[1.0; 70 * D / 4], &[0.0; 70 * D / 4]]))?;
    sequence.write(Slot::Residual, &vec![1.0; 70 * D])?;
    held_norm.run(sequence.as_mut(), Slot::Residual, Slot::FfnInput)?;
    attention.run(sequence.as_mut(), 0, Slot::FfnInput)?;
    held.start_in(HeldNeurons::Predicted(&[]), sequence.as_mut(), Slot::FfnInput)?;
    sequence.read(Slot::FfnInput, &mut Vec::new())?;
    sequence.finish_ffn(Some(&y))?;
    let _ = pending.wait(&mut y)?;
    let mut copy = sequence.try_clone(66)?;
    copy.begin(66, 1, Some([&[1.0; D / 4], &[0.0; D / 4]]))?;
    copy.truncate(10);
    head.run(sequence.as_mut(), 68..70, &mut Vec::new())?;
    sequence.first_broken_token()?;
    sequence.take_runs()?;
    held.read_back().map(drop)
}

/// Whether all was done; else the failure is the device's, and nothing is left of it.
fn is_done(device: &SimDevice, what: u64) -> bool {
    let Err(error) = all_of_it(device) else { return true };
    assert!(matches!(error, OpError::DeviceFailed { .. }), "{what}: {error}");
    let left = device.allocated_bytes().unwrap_or_else(|_| device.live_bytes());
    assert_eq!(left, device.memory().held_bytes, "{what}");
    false
}

#[test]
fn a_device_that_is_lost_is_an_error_wherever_it_happens() {
    let lost_after = |n_work| SimDevice::limited(1 << 30, Limits { n_work, ..Limits::NONE });
    let mut n_work = 0;
    while !is_done(&lost_after(n_work), n_work) {
        n_work += 1 + n_work / 16;
    }
    assert!(n_work > 50, "all is done after {n_work} pieces of work");
}

#[test]
fn memory_that_is_not_there_is_an_error_wherever_it_is_missed() {
    let whole = SimDevice::new(1 << 30, 0);
    assert!(is_done(&whole, 0));
    let most = whole.memory().peak_bytes;
    let is_missed = |part: &u64| {
        let memory_bytes = (most * part / 40) as usize;
        let limits = Limits { memory_bytes, ..Limits::NONE };
        !is_done(&SimDevice::limited(1 << 30, limits), *part)
    };
    assert!((0..40).filter(is_missed).count() > 30);
}
