//! The low-bit copy of a gate: `gate_estimate.cu`.

use hostsim::estimate_steps::{DeviceEstimate, gate_estimate};
use hostsim::picks::norm;
use hostsim::queue::Address;
use hostsim::row_layout::LowBitLayout;
use hostsim::steps::quantize;
use hostsim::{HostBuffer, HostQueue};
use powerinfer_ops::{Activation, GateEstimate, LowBitFormat, NeuronMatrix, WeightFormat};
use testing::Seeded;

use crate::device::{ORDERS, Tokens};

/// A gate of `n` neurons with biases, its copy, and tokens.
pub(crate) struct Case {
    pub(crate) estimate: GateEstimate,
    pub(crate) x: Tokens,
    n: usize,
    d: usize,
}

impl Case {
    pub(crate) fn random(format: LowBitFormat, n: usize, d: usize, n_tokens: usize) -> Self {
        let mut random = Seeded::new((n * d) as u64);
        let gate = NeuronMatrix::from_f32(WeightFormat::F32, n, d, &random.normal(n * d)).unwrap();
        let bias = random.normal(n);
        let estimate = GateEstimate::new(format, &gate, Some(&bias), Activation::Relu).unwrap();
        Self { estimate, x: Tokens::random(n_tokens, d, 5), n, d }
    }

    /// Neurons whose cut is their estimate, less what the last bit of it counts for or not: any other
    /// rounding picks others.
    pub(crate) fn edge(format: LowBitFormat, n: usize, d: usize) -> Self {
        let case = Self::random(format, n, d, 1);
        let gate = Seeded::new((n * d) as u64).normal(n * d);
        let gate = NeuronMatrix::from_f32(WeightFormat::F32, n, d, &gate).unwrap();
        let mut products = vec![0.0; n];
        case.estimate.rows().estimate(case.x.token(0), &mut products);
        let below = |(i, product): (usize, &f32)| {
            // a bias of minus the cut; every second neuron fires by the least that there is
            if i % 2 == 0 { -product } else { -product.next_down() }
        };
        let bias: Vec<f32> = products.iter().enumerate().map(below).collect();
        let estimate = GateEstimate::new(format, &gate, Some(&bias), Activation::Relu).unwrap();
        Self { estimate, ..case }
    }

    /// Fails unless the kernel picks exactly what the CPU does.
    pub(crate) fn check(&self, queue: &HostQueue, margin: f32) -> Result<(), String> {
        let layout = LowBitLayout::new(self.estimate.rows().format(), self.d);
        let mut bytes = vec![0; self.n * layout.stride];
        for (row, bytes) in bytes.chunks_exact_mut(layout.stride).enumerate() {
            layout.pack(&self.estimate, row, bytes);
        }
        let rows = HostBuffer::of_bytes(&bytes);
        let (cuts, deviations) = (self.estimate.cuts(), self.estimate.deviations());
        let buffers = [cuts, deviations].map(HostBuffer::of_f32);
        let on_device = DeviceEstimate {
            address: rows.address(),
            layout,
            n_rows: self.n,
            cuts: buffers[0].address(),
            deviations: buffers[1].address(),
        };
        let n_tokens = self.x.input().n_tokens;
        let picks = HostBuffer::new(n_tokens * self.n * 4);
        let norms: Vec<u8> =
            (0..n_tokens).flat_map(|t| norm(self.x.token(t)).to_le_bytes()).collect();
        self.x.buffers[3].write(self.x.input().numbers.norms, &norms);
        quantize(queue, &self.x.input(), Address::NULL).map_err(|error| error.to_string())?;
        gate_estimate(queue, &on_device, &self.x.input(), margin, picks.address())
            .map_err(|error| error.to_string())?;
        if picks.is_overrun() {
            return Err("written beyond a buffer".to_owned());
        }
        let mut expected = Vec::new();
        self.estimate.pick(&self.x.values, margin, &mut expected);
        for (t, picks) in picks.to_f32().chunks(self.n).enumerate() {
            for (i, &pick) in picks.iter().enumerate() {
                let listed = expected[t].as_slice().binary_search(&(i as u32)).is_ok();
                if pick != if listed { 1.0 } else { 0.0 } {
                    return Err(format!("neuron {i} of token {t}: {pick}, listed {listed}"));
                }
            }
        }
        Ok(())
    }
}

#[test]
fn picks_are_the_cpu_s_over_every_format_width_and_order() {
    for format in LowBitFormat::ALL {
        for (n, d) in [(1, 1), (16, 31), (21, 32), (35, 100), (9, 2048), (20, 4544)] {
            let case = Case::random(format, n, d, 1 + n % 3);
            for order in ORDERS {
                for margin in [-0.7, 0.0, 1.5] {
                    let what = format!("{format} bits, {n} × {d}, order {order}");
                    case.check(&HostQueue::new(order), margin).expect(&what);
                }
            }
        }
    }
}

#[test]
fn picks_are_the_cpu_s_to_the_last_bit_of_an_estimate() {
    for format in LowBitFormat::ALL {
        for d in [33, 4096, 4544] {
            Case::edge(format, 200, d).check(&HostQueue::new(0), 0.0).unwrap();
        }
    }
}

#[test]
fn a_token_that_is_not_finite_picks_every_neuron() {
    let mut case = Case::random(LowBitFormat::Bits3, 20, 64, 1);
    let mut values = case.x.values.clone();
    values[40] = f32::NAN;
    case.x = Tokens::of(values, 1, 64);
    case.check(&HostQueue::new(0), 0.0).unwrap();
}
