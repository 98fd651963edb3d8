//! How long a layer takes on two executors, next to what each side takes alone. A measurement, so it
//! runs on request only:
//!
//! ```sh
//! cargo test --release -p powerinfer-ops --test overlap -- --ignored --nocapture
//! ```
//!
//! It needs two CPUs that nothing else uses: where other work keeps all of them busy, the scheduler lets
//! the device's thread wait until the CPU's side is done, and a layer takes the sum of both.
#![allow(clippy::unwrap_used, reason = "helper functions of tests")]

use std::num::NonZeroUsize;
use std::time::{Duration, Instant};

use candle_core::{Device, Tensor};
use powerinfer_ops::{
    Activation, FastDevice, FfnWeights, HeldFfn, HeldNeurons, HotRows, ModelledSpeed, NeuronIds,
    NeuronMatrix, Neurons, StandIn, StandInOptions, ThreadPool, WeightFormat, Workspace, ffn,
    hybrid_ffn,
};
use testing::Seeded;

const N_LAYERS: usize = 4;
const D_MODEL: usize = 2048;
const D_FF: usize = 4096;
/// Passes through a layer.
const N_PASSES: usize = 256;
/// A fast device has fewer rows to read in the same time than it could: it sleeps out the rest.
const HOT_SHARE: f32 = 0.3;

struct Layer {
    cold: FfnWeights,
    hot: Box<dyn HeldFfn>,
}

fn layers(weights: &[FfnWeights], hot: &NeuronIds, device: &StandIn) -> Vec<Layer> {
    let is_cold = |id: &u32| hot.as_slice().binary_search(id).is_err();
    let cold = NeuronIds::from_sorted((0..D_FF as u32).filter(is_cold).collect()).unwrap();
    let layer = |weights: &FfnWeights| Layer {
        cold: weights.pick(&cold).unwrap(),
        hot: device.hold(HotRows { weights, ids: hot, density: None }).unwrap(),
    };
    weights.iter().map(layer).collect()
}

fn seconds(pass: impl FnOnce()) -> f64 {
    let began = Instant::now();
    pass();
    began.elapsed().as_secs_f64()
}

fn median(mut seconds: Vec<f64>) -> f64 {
    seconds.sort_unstable_by(f64::total_cmp);
    seconds[seconds.len() / 2]
}

#[test]
#[ignore = "measures time"]
fn a_layer_takes_little_more_than_its_longer_side() {
    let matrix = |seed| {
        let values = Seeded::new(seed).normal(D_FF * D_MODEL);
        NeuronMatrix::from_f32(WeightFormat::F16, D_FF, D_MODEL, &values).unwrap()
    };
    let weights: Vec<FfnWeights> = (0..N_LAYERS as u64)
        .map(|layer| {
            let [gate, up, down] = [1, 2, 3].map(|part| matrix(10 * layer + part));
            FfnWeights::new(gate, Some(up), down, Activation::Relu).unwrap()
        })
        .collect();
    let hot = NeuronIds::from_sorted(Seeded::new(5).ids(D_FF, HOT_SHARE)).unwrap();
    let values = Seeded::new(6).normal(D_MODEL);
    let x = Tensor::from_slice(&values, (1, D_MODEL), &Device::Cpu).unwrap();
    let pool = ThreadPool::new(NonZeroUsize::new(1)).unwrap();
    let mut workspace = Workspace::default();
    let mut cold_alone = |layer: &Layer| {
        let run = || ffn(&layer.cold, Neurons::All, &x, &mut workspace).map(drop);
        pool.install(run).unwrap();
    };

    let unhurried = StandIn::new(StandInOptions::new(1 << 30)).unwrap();
    let rows = layers(&weights, &hot, &unhurried);
    let pass = |at: usize| seconds(|| cold_alone(&rows[at % N_LAYERS]));
    let cold_seconds = median((0..N_PASSES).map(pass).collect());
    drop(rows);
    let hot_bytes: usize = hot.len() * 3 * D_MODEL * 2;
    let speed = ModelledSpeed {
        bytes_per_second: hot_bytes as f64 / cold_seconds,
        link_bytes_per_second: f64::INFINITY,
        link_latency: Duration::ZERO,
    };
    let device = StandIn::new(StandInOptions::new(1 << 30).with_speed(speed)).unwrap();
    let rows = layers(&weights, &hot, &device);
    let (mut workspace, mut y) = (Workspace::default(), vec![0.0; D_MODEL]);
    let (mut cold, mut fast, mut both) = (Vec::new(), Vec::new(), Vec::new());
    // the three take turns, so that whatever else the machine does meets them alike
    for at in 0..N_PASSES {
        let layer = &rows[at % N_LAYERS];
        cold.push(seconds(|| cold_alone(layer)));
        fast.push(seconds(|| {
            let pending = layer.hot.start(HeldNeurons::All, &values).unwrap();
            let _ = pending.wait(&mut y).unwrap();
        }));
        both.push(seconds(|| {
            let hot = (layer.hot.as_ref(), HeldNeurons::All);
            let cold = (&layer.cold, Neurons::All);
            let run = || hybrid_ffn(cold, hot, &x, &mut workspace).map(drop);
            pool.install(run).unwrap();
        }));
    }
    let [cold, fast, both] = [cold, fast, both].map(|seconds| 1e6 * median(seconds));
    let ratio = both / cold.max(fast);
    println!("CPU alone {cold:.0} µs, device alone {fast:.0} µs, both {both:.0} µs: {ratio:.3}");
    assert!(ratio <= 1.25, "both sides at once take {ratio:.3} of the longer one");
}
