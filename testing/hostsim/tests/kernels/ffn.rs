//! Whole feed-forward networks: the sequence of kernels in `ffn_steps.rs`.

use candle_core::{Device, Tensor};
use hostsim::estimate_steps::DeviceEstimate;
use hostsim::ffn_steps::{DeviceFfn, FfnScratch, ScratchShape, Wanted, ffn};
use hostsim::picks::{norm, union_by_row, union_of};
use hostsim::queue::Address;
use hostsim::row_layout::{LowBitLayout, RowLayout};
use hostsim::tiled_steps::MANY_TOKENS;
use hostsim::{HostBuffer, HostQueue};
use powerinfer_ops::{
    Activation, FfnCounts, FfnWeights, GateEstimate, LowBitFormat, NeuronIds, Neurons,
    WeightFormat, Workspace,
};
use testing::{Seeded, assert_close, assert_same_bits};

use crate::device::Weights;

/// What distinguishes a network.
#[derive(Debug, Clone, Copy)]
struct Kind {
    gated: bool,
    biased: bool,
    activation: Activation,
    up_activation: Option<Activation>,
}

const FAT: Activation = Activation::FatRelu { threshold: 0.3 };
const KINDS: [Kind; 6] = [
    Kind { gated: true, biased: false, activation: Activation::Relu, up_activation: None },
    Kind { gated: true, biased: true, activation: FAT, up_activation: None },
    Kind {
        gated: true,
        biased: false,
        activation: Activation::Relu,
        up_activation: Some(Activation::Relu),
    },
    Kind { gated: false, biased: true, activation: Activation::Relu, up_activation: None },
    Kind { gated: false, biased: false, activation: Activation::Gelu, up_activation: None },
    Kind { gated: true, biased: true, activation: Activation::Silu, up_activation: None },
];

/// A network on both devices.
struct Network {
    host: FfnWeights,
    matrices: Vec<Weights>,
    biases: [Option<HostBuffer>; 2],
}

impl Network {
    fn random(kind: Kind, format: WeightFormat, [n, d]: [usize; 2], seed: u64) -> Self {
        let weights = |at: u64| Weights::random(format, n, d, seed + at);
        let bias = |at: u64| kind.biased.then(|| Seeded::new(seed + at).normal(n));
        let matrices: Vec<Weights> = (0..3).map(weights).collect();
        let matrix = |at: usize| matrices[at].host.clone();
        let up = kind.gated.then(|| matrix(1));
        let host = FfnWeights::new(matrix(0), up, matrix(2), kind.activation)
            .unwrap()
            .with_biases(bias(3), bias(4).filter(|_| kind.gated))
            .unwrap()
            .with_up_activation(kind.up_activation);
        let biases = [&host.gate_bias, &host.up_bias];
        let biases = biases.map(|bias| bias.as_deref().map(HostBuffer::of_f32));
        Self { host, matrices, biases }
    }

    fn device(&self) -> DeviceFfn {
        let bias = |at: usize| self.biases[at].as_ref().map_or(Address::NULL, HostBuffer::address);
        DeviceFfn {
            gate: self.matrices[0].rows(),
            up: self.host.up.as_ref().map(|_| self.matrices[1].rows()),
            down: self.matrices[2].rows(),
            gate_bias: bias(0),
            up_bias: bias(1),
            activation: self.host.activation,
            up_activation: self.host.up_activation,
        }
    }

    /// Outputs and counts of the kernels. `picks` are written where the host writes them.
    fn run(
        &self,
        queue: &HostQueue,
        wanted: Wanted<'_>,
        x: &[f32],
        picks: Option<&[NeuronIds]>,
    ) -> (Vec<f32>, Vec<u32>) {
        let (n, d) = (self.host.n_neurons(), self.host.d_model());
        let n_tokens = x.len() / d;
        // larger than needed, as when networks share it
        let (n_neurons, d_model, n_tokens_most) = (n + 7, d + 64, n_tokens + 1);
        let shape = ScratchShape { n_neurons, d_model, n_tokens: n_tokens_most, rank: 0 };
        let memory = HostBuffer::new(shape.bytes());
        let (scratch, _) = FfnScratch::carve(memory.address(), shape);
        let bytes =
            |values: &[f32]| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<_>>();
        memory.write(scratch.x, &bytes(x));
        let norms: Vec<f32> = x.chunks(d).map(norm).collect();
        memory.write(scratch.numbers.norms, &bytes(&norms));
        if let Some(picks) = picks {
            let (mut union, mut mask) = (Vec::new(), vec![0.0; n_tokens * n]);
            let lists = picks.iter().map(NeuronIds::as_slice);
            if n_tokens >= MANY_TOKENS {
                union_by_row(lists, &mut union, &mut mask, n);
            } else {
                union_of(lists, &mut union, &mut mask, n);
            }
            let count = u32::try_from(union.len()).unwrap().to_le_bytes();
            memory.write(scratch.picked.counts, &count);
            let ids: Vec<u8> = union.iter().flat_map(|id| id.to_le_bytes()).collect();
            memory.write(scratch.picked.ids, &ids);
            memory.write(scratch.picked.values, &bytes(&mask));
        }
        ffn(queue, &self.device(), wanted, n_tokens, &scratch).unwrap();
        assert!(!memory.is_overrun(), "written beyond scratch memory");
        let read = |address, len: usize| memory.read(address, len * 4);
        let y = read(scratch.y, n_tokens * d);
        let y = y.as_chunks().0.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect();
        let counts = read(scratch.counts, 6);
        (y, counts.as_chunks().0.iter().map(|&bytes| u32::from_le_bytes(bytes)).collect())
    }

    fn on_cpu(&self, neurons: Neurons<'_>, x: &[f32]) -> (Vec<f32>, FfnCounts) {
        let d = self.host.d_model();
        let x = Tensor::from_slice(x, (x.len() / d, d), &Device::Cpu).unwrap();
        let mut workspace = Workspace::default();
        let (y, counts) = powerinfer_ops::ffn(&self.host, neurons, &x, &mut workspace).unwrap();
        (y.flatten_all().unwrap().to_vec1().unwrap(), counts)
    }
}

/// Three sums in a row, each of which rounds: a hundredth of what leaving out one neuron changes.
fn bound(expected: &[f32]) -> f32 {
    let square: f32 = expected.iter().map(|y| y * y).sum();
    1e-4 * (square / expected.len().max(1) as f32).sqrt() + f32::MIN_POSITIVE
}

fn check(kind: Kind, format: WeightFormat, n_tokens: usize, order: u64) {
    let [n, d] = [150, if format.block_len() == 1 { 33 } else { 96 }];
    let what = format!("{kind:?}, {format}, {n_tokens} tokens, order {order}");
    let network = Network::random(kind, format, [n, d], 1);
    let x = Seeded::new(9).normal(n_tokens * d);
    let queue = HostQueue::new(order);
    let (expected, counts) = network.on_cpu(Neurons::All, &x);
    let (all, on_device) = network.run(&queue, Wanted::All, &x, None);
    assert_close(&all, &expected, bound(&expected), &what);
    assert_eq!(u64::from(on_device[3]), counts.fired, "{what}");
    if !kind.activation.is_sparse() {
        return;
    }
    let (firing, on_device) = network.run(&queue, Wanted::Firing, &x, None);
    assert_same_bits(&firing, &all, &what);
    let (_, counts) = network.on_cpu(Neurons::Firing, &x);
    let ran = on_device[if kind.up_activation.is_some() { 5 } else { 3 }];
    assert_eq!((u64::from(on_device[3]), u64::from(ran)), (counts.fired, counts.ran), "{what}");
    for density in [0.0, 0.02, 0.5, 1.0] {
        let picks: Vec<NeuronIds> = (0..n_tokens)
            .map(|t| NeuronIds::from_sorted(Seeded::new(t as u64).ids(n, density)).unwrap())
            .collect();
        let (expected, counts) = network.on_cpu(Neurons::FiringOf(&picks), &x);
        let (found, on_device) = network.run(&queue, Wanted::Picked, &x, Some(&picks));
        assert_close(&found, &expected, bound(&expected), format!("{what}, {density} picked"));
        assert_eq!(u64::from(on_device[3]), counts.fired, "{what}, {density} picked");
    }
}

#[test]
fn networks_are_the_cpu_s_in_every_kind_and_format() {
    for (at, kind) in KINDS.into_iter().enumerate() {
        for format in RowLayout::FORMATS {
            for n_tokens in [1, 3, MANY_TOKENS + at] {
                check(kind, format, n_tokens, [0, 1, 2][at % 3]);
            }
        }
    }
}

#[test]
fn tokens_have_the_same_bits_alone_and_among_others() {
    for format in RowLayout::FORMATS {
        let network = Network::random(KINDS[0], format, [150, 96], 4);
        let queue = HostQueue::new(0);
        for n_tokens in [5, 19] {
            let x = Seeded::new(5).normal(n_tokens * 96);
            let (together, _) = network.run(&queue, Wanted::Firing, &x, None);
            for (t, x) in x.chunks(96).enumerate().step_by(3) {
                let (alone, _) = network.run(&queue, Wanted::Firing, x, None);
                let what = format!("{format}, token {t} of {n_tokens}");
                assert_same_bits(&alone, &together[t * 96..][..96], what);
            }
        }
    }
}

#[test]
fn a_low_bit_copy_picks_on_the_device_what_it_picks_on_the_cpu() {
    let network = Network::random(KINDS[1], WeightFormat::F16, [150, 96], 2);
    for format in LowBitFormat::ALL {
        let FfnWeights { gate, gate_bias, activation, .. } = &network.host;
        let estimate = GateEstimate::new(format, gate, gate_bias.as_deref(), *activation).unwrap();
        let layout = LowBitLayout::new(format, 96);
        let mut bytes = vec![0; 150 * layout.stride];
        for (row, bytes) in bytes.chunks_exact_mut(layout.stride).enumerate() {
            layout.pack(&estimate, row, bytes);
        }
        let rows = HostBuffer::of_bytes(&bytes);
        let (cuts, deviations) =
            (HostBuffer::of_f32(estimate.cuts()), HostBuffer::of_f32(estimate.deviations()));
        let on_device = DeviceEstimate {
            address: rows.address(),
            layout,
            n_rows: 150,
            cuts: cuts.address(),
            deviations: deviations.address(),
        };
        for n_tokens in [1, 3, 17] {
            let x = Seeded::new(8).normal(n_tokens * 96);
            let (expected, counts) = network.on_cpu(Neurons::Estimated(&estimate, 0.2), &x);
            let wanted = Wanted::Estimated(&on_device, 0.2);
            let (found, on_device) = network.run(&HostQueue::new(2), wanted, &x, None);
            assert_close(&found, &expected, bound(&expected), format!("{format} bits"));
            assert_eq!(u64::from(on_device[1]), counts.picked, "{format} bits");
            assert_eq!(u64::from(on_device[3]), counts.fired, "{format} bits");
        }
    }
}
