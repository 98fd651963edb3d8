//! The low-bit copy of a gate: `gate_estimate.cu`.

use hostsim::row_layout::LowBitLayout;
use hostsim::steps::{DeviceEstimate, gate_estimate, quantize};
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

    /// Fails unless the kernel picks what the CPU does; where the estimate lies on the edge, as far as
    /// f32 can tell, either is right.
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
        quantize(queue, &self.x.input()).map_err(|error| error.to_string())?;
        gate_estimate(queue, &on_device, &self.x.input(), margin, picks.address())
            .map_err(|error| error.to_string())?;
        if picks.is_overrun() {
            return Err("written beyond a buffer".to_owned());
        }
        let picks = picks.to_f32();
        for t in 0..n_tokens {
            let mut products = vec![0.0; self.n];
            self.estimate.rows().estimate(self.x.token(t), &mut products);
            let norm = self.x.token(t).iter().map(|x| x * x).sum::<f32>().sqrt();
            for (i, product) in products.iter().enumerate() {
                let above = product + margin * norm * deviations[i] - cuts[i];
                let expected = if above <= 0.0 { 0.0 } else { 1.0 };
                // sums of as many terms, whose order differs
                let edge = 1e-5 * (norm * (self.d as f32).sqrt() + cuts[i].abs());
                let found = picks[t * self.n + i];
                if found != expected && above.abs() > edge || found != 0.0 && found != 1.0 {
                    return Err(format!("neuron {i} of token {t}: {found}, estimate {above}"));
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
fn a_token_that_is_not_finite_picks_every_neuron() {
    let mut case = Case::random(LowBitFormat::Bits3, 20, 64, 1);
    let mut values = case.x.values.clone();
    values[40] = f32::NAN;
    case.x = Tokens::of(values, 1, 64);
    case.check(&HostQueue::new(0), 0.0).unwrap();
}
