//! A down projection that is stored by output, as quantised files have it: its blocks run across
//! neurons, so no neuron's part of it can be read alone. It is computed in full, and only up
//! profits from the neurons that do not fire.

use super::many_tokens::SCATTERED_SHARE;
use super::{FfnCounts, Neurons, Run};
use crate::cpu::rows;
use crate::error::OpError;
use crate::matrix::NeuronMatrix;
use crate::workspace::Workspace;

impl Run<'_> {
    /// `y[t] = down · h[t]`, with the activations of all neurons or of those that fire, which are
    /// the same numbers.
    pub(super) fn down_by_output(
        &self,
        down: &NeuronMatrix,
        neurons: Neurons<'_>,
        workspace: &mut Workspace,
        y: &mut [f32],
    ) -> Result<FfnCounts, OpError> {
        let weights = self.weights;
        let scattered = match neurons {
            Neurons::All => false,
            Neurons::Firing => true,
            _ => return Err(OpError::DownByOutput { op: "ffn" }),
        };
        let fired = self.gate(workspace);
        let mut bytes = weights.gate.size_bytes() + down.size_bytes();
        if let Some(up) = &weights.up {
            if scattered && fired as f64 <= SCATTERED_SHARE * weights.n_neurons() as f64 {
                self.up_of_firing(up, workspace);
                bytes += fired as usize * up.row_bytes();
            } else {
                self.up(up, workspace);
                bytes += up.size_bytes();
            }
        }
        rows::matvec(self.kernels, down, &workspace.h, y);
        // every neuron's part of down was read
        let ran = workspace.h.len() as u64;
        Ok(FfnCounts { fired, ran, bytes: bytes as u64 })
    }

    /// Multiplies the activations that are not zero by the up products of their neurons.
    fn up_of_firing(&self, matrix: &NeuronMatrix, workspace: &mut Workspace) {
        let Workspace { h, up, fired: ids, .. } = workspace;
        for (t, h) in h.chunks_exact_mut(matrix.n_neurons().max(1)).enumerate() {
            ids.clear();
            // ids are u32: a matrix has no more rows
            ids.extend((0..h.len()).filter(|&neuron| h[neuron] != 0.0).map(|neuron| neuron as u32));
            up.resize(up.len().max(ids.len()), 0.0);
            let up = &mut up[..ids.len()];
            rows::matvec_picked(self.kernels, matrix, ids, &self.x[self.token(t)], up);
            for (&id, &up) in ids.iter().zip(up.iter()) {
                let neuron = id as usize;
                h[neuron] = self.weights.gated(neuron, h[neuron], up);
            }
        }
    }
}
