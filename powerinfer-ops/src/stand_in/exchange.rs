//! What goes to the device and comes back: buffers that are reused.

use std::time::Duration;

use super::ModelledSpeed;
use crate::error::OpError;
use crate::fast_device::{HeldNeurons, HeldRun};
use crate::mask::NeuronIds;

/// Which neurons a piece of work asks for; lists and residual streams lie in the [`Exchange`].
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
    /// Whether input and output stay on the device.
    pub(super) in_place: bool,
    /// `[n_tokens, d_model]`
    pub(super) x: Vec<f32>,
    /// Lists of local ids; as many as tokens count.
    pub(super) picks: Vec<NeuronIds>,
    /// `[n_tokens, d_model]` where a predictor reads it, else empty.
    pub(super) residual: Vec<f32>,
    /// Whether it was on the device already.
    pub(super) residual_there: bool,
    /// `[n_tokens, d_model]`
    pub(super) y: Vec<f32>,
    pub(super) run: HeldRun,
}

impl Exchange {
    /// Takes copies of what the work needs.
    pub(super) fn fill(&mut self, neurons: HeldNeurons<'_>, x: &[f32], in_place: bool) {
        self.in_place = in_place;
        copy(&mut self.x, x);
        self.residual.clear();
        self.residual_there = false;
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
            HeldNeurons::Predicted(residual) => {
                copy(&mut self.residual, residual);
                Asked::Predicted
            }
        };
    }

    /// How long the work takes under a model: `x`, the ids, a residual stream and `y` cross the link,
    /// or, in place, only ids and a residual stream that is not there.
    pub(super) fn duration(
        &self,
        speed: ModelledSpeed,
        weight_bytes: u64,
        n_tokens: usize,
    ) -> Duration {
        let picks = match self.asked {
            Asked::FiringOf => self.picks.iter().take(n_tokens).map(NeuronIds::len).sum(),
            _ => 0,
        };
        let bytes = |values: usize| (values * size_of::<f32>()) as u64;
        let residual = if self.residual_there { 0 } else { self.residual.len() };
        let brought = residual + picks;
        match self.in_place {
            false => speed.duration(weight_bytes, bytes(2 * self.x.len() + brought)),
            true if brought > 0 => speed.work(weight_bytes) + speed.crossing(bytes(brought)),
            true => speed.work(weight_bytes),
        }
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
