//! The head of a model in a device's memory.

use std::ops::Range;
use std::sync::Arc;

use super::backend::{Backend, Block, Pinned, grow};
use super::device::Shared;
use super::held_norm::GpuNorm;
use super::projection::Projection;
use super::queue::Address;
use super::scratch::{DenseScratch, DenseShape, Needs};
use super::sequence::own;
use super::steps::{DeviceInput, quantize};
use crate::fast_device::dense_check::check_head;
use crate::{DeviceSequence, HeadPart, HeldHead, HeldNorm, OpError, Slot};

/// Tokens whose logits are computed together, which are kept on the device until they have been fetched:
/// those that share a row that was read, no more than run through other parts together.
const TOKENS_AT_ONCE: usize = 16;

/// Norm, projection and embeddings, and room for logits.
#[derive(Debug)]
pub(crate) struct GpuHead<B: Backend> {
    shared: Arc<Shared<B>>,
    norm: Option<GpuNorm<B>>,
    projection: Option<Projection<B>>,
    embeddings: Projection<B>,
    logits: B::Block,
    /// Without the norm.
    bytes: u64,
}

impl<B: Backend> GpuHead<B> {
    pub(crate) fn copy(shared: &Arc<Shared<B>>, part: HeadPart<'_>) -> Result<Self, OpError> {
        let HeadPart { norm, projection, weights } = part;
        let (d_model, d_embedding) = (check_head(&part)?, weights.d_model());
        let norm = norm.map(|norm| GpuNorm::copy(shared, norm)).transpose()?;
        let embeddings = Projection::<B>::plain(weights);
        let logits_bytes = TOKENS_AT_ONCE * weights.n_neurons() * size_of::<f32>();
        let mut bytes = logits_bytes as u64 + Projection::<B>::bytes(embeddings)?;
        if let Some(projection) = projection {
            bytes += Projection::<B>::bytes(projection)?;
        }
        let (input, output) = (d_model.max(d_embedding), d_embedding);
        let needs = DenseShape { input, output, ..DenseShape::default() };
        let reserved = shared.reserve(bytes, Needs::of_dense(needs))?;
        let (backend, failed) = (&shared.backend, |error| shared.failed(error));
        let copy = |part| Projection::copy(backend, part).map_err(failed);
        let head = Self {
            shared: Arc::clone(shared),
            norm,
            projection: projection.map(copy).transpose()?,
            embeddings: copy(embeddings)?,
            logits: backend.block(logits_bytes).map_err(failed)?,
            bytes,
        };
        reserved.keep();
        Ok(head)
    }

    fn d_model(&self) -> usize {
        self.projection.as_ref().unwrap_or(&self.embeddings).n_in()
    }

    /// From some tokens `x` of the stream to logits in memory of the host, which is large enough.
    fn append(
        &self,
        mut x: Address,
        n_tokens: usize,
        logits: &mut B::Pinned,
    ) -> candle_core::Result<()> {
        let backend = &self.shared.backend;
        // the logits' memory is shared, too: until they have been fetched nobody else appends
        let ledger = self.shared.ledger();
        let (scratch, _) = DenseScratch::carve(ledger.scratch(), ledger.needs.dense);
        if let Some(norm) = &self.norm {
            norm.append(x, scratch.normed, n_tokens)?;
            x = scratch.normed;
        }
        let run = |part: &Projection<B>, values, to| {
            let (numbers, n_columns) = (scratch.numbers, part.n_in());
            let x = DeviceInput { values, numbers, n_columns, n_tokens };
            if part.takes_numbers() {
                quantize(backend, &x, Address::NULL)?;
            }
            part.run(backend, &x, to)
        };
        if let Some(projection) = &self.projection {
            run(projection, x, scratch.output)?;
            x = scratch.output;
        }
        run(&self.embeddings, x, self.logits.address())?;
        backend.receive(self.logits.address(), logits, 0..self.logits_bytes(n_tokens))
    }

    fn logits_bytes(&self, n_tokens: usize) -> usize {
        n_tokens * self.embeddings.n_out() * size_of::<f32>()
    }
}

impl<B: Backend> HeldHead for GpuHead<B> {
    fn run(
        &self,
        sequence: &mut dyn DeviceSequence,
        tokens: Range<usize>,
        logits: &mut Vec<f32>,
    ) -> Result<(), OpError> {
        let (op, sequence) = ("HeldHead::run", own(&self.shared, sequence)?);
        sequence.check_width(op, self.d_model())?;
        if tokens.start > tokens.end || tokens.end > sequence.n_tokens() {
            let expected = vec![0, sequence.n_tokens()];
            let found = vec![tokens.start, tokens.end];
            return Err(OpError::Shape { op, what: "tokens", expected, found });
        }
        logits.clear();
        let (residual, d_model) = (sequence.slot(Slot::Residual), self.d_model());
        let mut run = |first: usize, n_tokens: usize| {
            let (n_bytes, here) = (self.logits_bytes(n_tokens), sequence.answer_mut());
            grow(&self.shared.backend, here, n_bytes)?;
            self.append(residual.offset(first * d_model * size_of::<f32>()), n_tokens, here)?;
            logits.extend_from_slice(bytemuck::cast_slice(&here.bytes()?[..n_bytes]));
            Ok(())
        };
        for first in tokens.clone().step_by(TOKENS_AT_ONCE) {
            let n_tokens = TOKENS_AT_ONCE.min(tokens.end - first);
            run(first, n_tokens).map_err(|error| self.shared.failed(error))?;
        }
        Ok(())
    }

    fn size_bytes(&self) -> u64 {
        self.bytes + self.norm.as_ref().map_or(0, GpuNorm::size_bytes)
    }
}

impl<B: Backend> Drop for GpuHead<B> {
    fn drop(&mut self) {
        self.shared.give_back(self.bytes);
    }
}
