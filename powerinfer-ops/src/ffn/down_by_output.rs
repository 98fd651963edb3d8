//! A down projection that is stored by output, as quantised files have it: its blocks run across
//! neurons, so no neuron's part of it can be read alone. It is computed in full, and only up
//! profits from the neurons that do not fire.

use super::{FfnCounts, Neurons, Run};
use crate::cpu::product::{InputScratch, Inputs};
use crate::cpu::rows;
use crate::error::OpError;
use crate::matrix::NeuronMatrix;

/// Rows read token by token, as a share of all rows, above which reading all rows once is faster
/// for several tokens: scattered rows take about a third longer than a stream.
const SCATTERED_SHARE: f64 = 0.75;

/// Scratch of a network whose down projection is stored by output.
#[derive(Debug, Default)]
pub(crate) struct OutputScratch {
    /// Gate values, then activations, `[n_tokens, n_neurons]`.
    h: Vec<f32>,
    /// Up values, `[n_tokens, n_neurons]` or those of the neurons of one token that fire.
    up: Vec<f32>,
    /// Neurons of one token that fire.
    fired: Vec<u32>,
    /// The activations as products take them.
    inputs: InputScratch,
}

impl OutputScratch {
    pub(crate) fn size_bytes(&self) -> usize {
        let values = (self.h.capacity() + self.up.capacity()) * size_of::<f32>();
        values + self.fired.capacity() * size_of::<u32>() + self.inputs.size_bytes()
    }
}

impl Run<'_> {
    /// `y[t] = down · h[t]`, with the activations of all neurons or of those that fire, which are
    /// the same numbers.
    pub(super) fn down_by_output(
        &self,
        down: &NeuronMatrix,
        neurons: Neurons<'_>,
        scratch: &mut OutputScratch,
        y: &mut [f32],
    ) -> Result<FfnCounts, OpError> {
        let weights = self.weights;
        let scattered = match neurons {
            Neurons::All => false,
            Neurons::Firing => true,
            _ => return Err(OpError::DownByOutput { op: "ffn" }),
        };
        let fired = self.gate(&mut scratch.h);
        let mut bytes = weights.gate.size_bytes() + down.size_bytes();
        if let Some(up) = &weights.up {
            if scattered && fired as f64 <= SCATTERED_SHARE * weights.n_neurons() as f64 {
                self.up_of_firing(up, scratch);
                bytes += fired as usize * up.row_bytes();
            } else {
                self.up(up, scratch);
                bytes += up.size_bytes();
            }
        }
        let OutputScratch { h, inputs, .. } = scratch;
        let h = Inputs::new(self.kernels, &[down.format()], down.d_model(), h, inputs);
        rows::matvec(self.kernels, down, h, y);
        // every neuron's part of down was read
        let ran = scratch.h.len() as u64;
        Ok(FfnCounts { fired, ran, bytes: bytes as u64, picked: ran, predictor_ns: 0 })
    }

    /// `h = act(gate · x + bias)` of all neurons; returns how many fire.
    fn gate(&self, h: &mut Vec<f32>) -> u64 {
        let weights = self.weights;
        h.resize(self.x.n_tokens() * weights.n_neurons(), 0.0);
        rows::matvec(self.kernels, &weights.gate, self.x, h);
        let mut fired = 0;
        for h in h.chunks_exact_mut(weights.n_neurons().max(1)) {
            for (neuron, h) in h.iter_mut().enumerate() {
                *h = weights.activate(neuron, *h);
                fired += u64::from(*h != 0.0);
            }
        }
        fired
    }

    /// Multiplies the activations by the up products of all neurons.
    fn up(&self, matrix: &NeuronMatrix, scratch: &mut OutputScratch) {
        let OutputScratch { h, up, .. } = scratch;
        up.resize(h.len(), 0.0);
        rows::matvec(self.kernels, matrix, self.x, up);
        let n_neurons = matrix.n_neurons().max(1);
        for (h, up) in h.chunks_exact_mut(n_neurons).zip(up.chunks_exact(n_neurons)) {
            for (neuron, (h, &up)) in h.iter_mut().zip(up).enumerate() {
                *h = self.weights.gated(neuron, *h, up);
            }
        }
    }

    /// Multiplies the activations that are not zero by the up products of their neurons.
    fn up_of_firing(&self, matrix: &NeuronMatrix, scratch: &mut OutputScratch) {
        let OutputScratch { h, up, fired: ids, .. } = scratch;
        for (t, h) in h.chunks_exact_mut(matrix.n_neurons().max(1)).enumerate() {
            ids.clear();
            // ids are u32: a matrix has no more rows
            ids.extend((0..h.len()).filter(|&neuron| h[neuron] != 0.0).map(|neuron| neuron as u32));
            up.resize(up.len().max(ids.len()), 0.0);
            let up = &mut up[..ids.len()];
            rows::matvec_picked(self.kernels, matrix, ids, self.x.token(t), up);
            for (&id, &up) in ids.iter().zip(up.iter()) {
                let neuron = id as usize;
                h[neuron] = self.weights.gated(neuron, h[neuron], up);
            }
        }
    }
}
