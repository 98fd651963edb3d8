//! What goes to the device and comes back: buffers that are reused.

use crate::error::OpError;
use crate::fast_device::{HeldNeurons, HeldRun};
use crate::mask::NeuronIds;

/// Which neurons a piece of work asks for; lists and hidden values lie in the [`Exchange`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum Asked {
    #[default]
    All,
    Firing,
    FiringOf,
    Predicted,
}

/// A piece of work and what became of it.
#[derive(Debug, Default)]
pub(super) struct Exchange {
    pub(super) asked: Asked,
    /// `[n_tokens, d_model]`
    pub(super) x: Vec<f32>,
    /// Lists of local ids; as many as tokens count.
    pub(super) picks: Vec<NeuronIds>,
    /// `[n_tokens, rank]`
    pub(super) hidden: Vec<f32>,
    /// `[n_tokens, d_model]`
    pub(super) y: Vec<f32>,
    pub(super) run: HeldRun,
}

impl Exchange {
    /// Takes copies of what the work needs.
    pub(super) fn fill(&mut self, neurons: HeldNeurons<'_>, x: &[f32]) {
        copy(&mut self.x, x);
        self.hidden.clear();
        self.run = HeldRun::default();
        self.asked = match neurons {
            HeldNeurons::All => Asked::All,
            HeldNeurons::Firing => Asked::Firing,
            HeldNeurons::FiringOf(picks) => {
                let len = self.picks.len().max(picks.len());
                self.picks.resize_with(len, NeuronIds::new);
                self.picks.iter_mut().zip(picks).for_each(|(to, from)| to.copy_from(from));
                Asked::FiringOf
            }
            HeldNeurons::Predicted(hidden) => {
                copy(&mut self.hidden, hidden);
                Asked::Predicted
            }
        };
    }

    /// Bytes that cross the link: `x`, the ids, hidden values, and `y`.
    pub(super) fn link_bytes(&self, n_tokens: usize) -> u64 {
        let picks = match self.asked {
            Asked::FiringOf => self.picks.iter().take(n_tokens).map(NeuronIds::len).sum(),
            _ => 0,
        };
        ((2 * self.x.len() + self.hidden.len() + picks) * size_of::<f32>()) as u64
    }

    /// Adds the output to `y`.
    pub(super) fn add_to(&self, y: &mut [f32]) -> Result<(), OpError> {
        OpError::check_shape("PendingFfn::wait", "y", &[self.y.len()], &[y.len()])?;
        crate::cpu::rows::add(y, &self.y);
        Ok(())
    }
}

fn copy(to: &mut Vec<f32>, from: &[f32]) {
    to.clear();
    to.extend_from_slice(from);
}
