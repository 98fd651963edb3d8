//! Many tokens: products that read each row once for all of them.

use super::one_token::Candidates;
use super::{FfnCounts, Run};
use crate::cpu::rows;
use crate::matrix::NeuronMatrix;
use crate::workspace::Workspace;

/// Rows read token by token, as a share of all rows, above which reading all rows once is faster
/// for several tokens: scattered rows take about a third longer than a stream.
pub(super) const SCATTERED_SHARE: f64 = 0.75;

impl Run<'_> {
    /// Every row of every matrix.
    pub(super) fn all(&self, workspace: &mut Workspace, y: &mut [f32]) -> FfnCounts {
        if self.n_tokens() == 1 {
            return self.one_token(0, Candidates::All, &mut workspace.step, y);
        }
        let fired = self.gate(workspace);
        let ran = workspace.h.len() as u64;
        self.up_and_down(workspace, y);
        FfnCounts { fired, ran, bytes: self.weights.size_bytes() as u64 }
    }

    /// The neurons that fire. Where the tokens' neurons together are most of them, rows are read
    /// once for all tokens, fired or not; zeros add nothing.
    pub(super) fn firing(&self, workspace: &mut Workspace, y: &mut [f32]) -> FfnCounts {
        if self.n_tokens() == 1 {
            return self.one_token(0, Candidates::Firing, &mut workspace.step, y);
        }
        let weights = self.weights;
        let fired = self.gate(workspace);
        if fired as f64 > SCATTERED_SHARE * weights.n_neurons() as f64 {
            let ran = self.up_and_down(workspace, y);
            return FfnCounts { fired, ran, bytes: weights.size_bytes() as u64 };
        }
        let mut counts = FfnCounts::default();
        let Workspace { h, step, .. } = workspace;
        for (t, h) in h.chunks_exact(weights.n_neurons().max(1)).enumerate() {
            counts.add(self.one_token(t, Candidates::Activated(h), step, y));
        }
        counts.bytes += weights.gate.size_bytes() as u64;
        counts
    }

    /// `h = act(gate · x + bias)` of all neurons; returns how many fire.
    pub(super) fn gate(&self, workspace: &mut Workspace) -> u64 {
        let weights = self.weights;
        let h = &mut workspace.h;
        h.resize(self.n_tokens() * weights.n_neurons(), 0.0);
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

    /// Up and down over all rows, from the activations in `h`; returns how many neurons were not
    /// zero in the end.
    fn up_and_down(&self, workspace: &mut Workspace, y: &mut [f32]) -> u64 {
        if let Some(matrix) = &self.weights.up {
            self.up(matrix, workspace);
        }
        rows::axpy(self.kernels, &self.weights.down, &workspace.h, y);
        workspace.h.iter().filter(|&&h| h != 0.0).count() as u64
    }

    /// Multiplies the activations in `h` by the up products of all neurons.
    pub(super) fn up(&self, matrix: &NeuronMatrix, workspace: &mut Workspace) {
        let Workspace { h, up, .. } = workspace;
        up.resize(h.len(), 0.0);
        rows::matvec(self.kernels, matrix, self.x, up);
        let n_neurons = matrix.n_neurons().max(1);
        for (h, up) in h.chunks_exact_mut(n_neurons).zip(up.chunks_exact(n_neurons)) {
            for (neuron, (h, &up)) in h.iter_mut().zip(up).enumerate() {
                *h = self.weights.gated(neuron, *h, up);
            }
        }
    }
}
