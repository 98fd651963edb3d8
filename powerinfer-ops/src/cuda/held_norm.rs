//! A norm in a device's memory.

use std::sync::Arc;

use super::backend::{Backend, Block};
use super::dense_steps::{DeviceNorm, Stream, norm};
use super::device::Shared;
use super::matrix::of_values;
use super::queue::Address;
use super::scratch::Needs;
use super::sequence::own;
use crate::fast_device::dense_check::check_norm;
use crate::{DeviceSequence, HeldNorm, NormPart, OpError, Slot};

/// Its weights.
#[derive(Debug)]
pub(crate) struct GpuNorm<B: Backend> {
    shared: Arc<Shared<B>>,
    scale: B::Block,
    shift: Option<B::Block>,
    eps: f32,
    centred: bool,
    d_model: usize,
}

impl<B: Backend> GpuNorm<B> {
    pub(crate) fn copy(shared: &Arc<Shared<B>>, part: NormPart<'_>) -> Result<Self, OpError> {
        let NormPart { scale, shift, eps, centred } = part;
        let d_model = check_norm(&part)?;
        let bytes = size_of_val(scale) + shift.map_or(0, size_of_val);
        let reserved = shared.reserve(bytes as u64, Needs::default())?;
        let values =
            |values| of_values(&shared.backend, values).map_err(|error| shared.failed(error));
        let (scale, shift) = (values(scale)?, shift.map(values).transpose()?);
        reserved.keep();
        Ok(Self { shared: Arc::clone(shared), scale, shift, eps, centred, d_model })
    }

    /// Norms tokens `[n_tokens, d_model]` from one place to another, which may be the same.
    pub(crate) fn append(
        &self,
        from: Address,
        to: Address,
        n_tokens: usize,
    ) -> candle_core::Result<()> {
        let weights = DeviceNorm {
            scale: self.scale.address(),
            shift: self.shift.as_ref().map_or(Address::NULL, Block::address),
            eps: self.eps,
            centred: self.centred,
        };
        let (add, sum, d_model) = (Address::NULL, Address::NULL, self.d_model);
        let x = Stream { values: from, add, sum, n_tokens, d_model };
        norm(&self.shared.backend, &weights, &x, to)
    }
}

impl<B: Backend> HeldNorm for GpuNorm<B> {
    fn run(&self, sequence: &mut dyn DeviceSequence, from: Slot, to: Slot) -> Result<(), OpError> {
        let sequence = own(&self.shared, sequence)?;
        sequence.check_width("HeldNorm::run", self.d_model)?;
        if sequence.n_tokens() == 0 {
            return Ok(());
        }
        let (x, out) = (sequence.slot(from), sequence.slot_to_write(to));
        let done = self.append(x, out, sequence.n_tokens());
        done.map_err(|error| self.shared.failed(error))
    }

    fn size_bytes(&self) -> u64 {
        (self.scale.n_bytes() + self.shift.as_ref().map_or(0, Block::n_bytes)) as u64
    }
}

impl<B: Backend> Drop for GpuNorm<B> {
    fn drop(&mut self) {
        self.shared.give_back(self.size_bytes());
    }
}
