//! An attention layer in a device's memory.

use std::sync::Arc;

use super::backend::{Backend, Block};
use super::dense_steps::{Queries, attention, residual_add, rotary};
use super::device::{Shared, TOKENS_AT_ONCE};
use super::matrix::of_values;
use super::projection::Projection;
use super::queue::Address;
use super::scratch::{DenseScratch, DenseShape, Needs};
use super::sequence::{GpuSequence, own};
use super::steps::{DeviceInput, quantize};
use crate::fast_device::dense_check::{check_attention, check_layer};
use crate::{AttentionPart, DeviceSequence, HeldAttention, OpError, Slot};

/// Its projections and settings.
#[derive(Debug)]
pub(crate) struct GpuAttention<B: Backend> {
    shared: Arc<Shared<B>>,
    query: Projection<B>,
    key: Projection<B>,
    value: Projection<B>,
    output: Projection<B>,
    slopes: Option<B::Block>,
    n_heads: usize,
    n_kv_heads: usize,
    d_head: usize,
    scale: f32,
    window: Option<usize>,
    rotary: bool,
    bytes: u64,
}

impl<B: Backend> GpuAttention<B> {
    pub(crate) fn copy(shared: &Arc<Shared<B>>, part: AttentionPart<'_>) -> Result<Self, OpError> {
        let d_model = check_attention(&part)?;
        let AttentionPart { query, key, value, output, n_heads, n_kv_heads, d_head, .. } = part;
        let mut bytes = part.alibi_slopes.map_or(0, size_of_val) as u64;
        for projection in [query, key, value, output] {
            bytes += Projection::<B>::bytes(projection)?;
        }
        let width = n_heads * d_head;
        let needs = DenseShape {
            input: d_model.max(width),
            query: width,
            kv: n_kv_heads * d_head,
            output: d_model,
            part: part_values(n_heads, d_head),
            n_parts: 0,
        };
        let reserved = shared.reserve(bytes, Needs::of_dense(needs))?;
        let (backend, failed) = (&shared.backend, |error| shared.failed(error));
        let copy = |part| Projection::copy(backend, part).map_err(failed);
        let slopes = part.alibi_slopes.map(|slopes| of_values(backend, slopes));
        let attention = Self {
            shared: Arc::clone(shared),
            query: copy(query)?,
            key: copy(key)?,
            value: copy(value)?,
            output: copy(output)?,
            slopes: slopes.transpose().map_err(failed)?,
            n_heads,
            n_kv_heads,
            d_head,
            scale: part.scale,
            window: part.window,
            rotary: part.rotary,
            bytes,
        };
        reserved.keep();
        Ok(attention)
    }

    fn check(&self, sequence: &GpuSequence<B>, layer: usize) -> Result<(), OpError> {
        let op = "HeldAttention::run";
        sequence.check_width(op, self.query.n_in())?;
        check_layer(sequence.shape(), layer, [self.n_kv_heads, self.d_head])?;
        if self.rotary && sequence.angles().is_none() {
            let (expected, found) = (vec![sequence.n_tokens() * (self.d_head / 2)], vec![0]);
            return Err(OpError::Shape { op, what: "angles", expected, found });
        }
        Ok(())
    }

    fn append(
        &self,
        sequence: &mut GpuSequence<B>,
        layer: usize,
        from: Slot,
    ) -> candle_core::Result<()> {
        // one piece of work after the other: they share scratch memory
        let ledger = self.shared.ledger();
        let (scratch, _) = DenseScratch::carve(ledger.scratch(), ledger.needs.dense);
        let (x, residual) = (sequence.slot(from), sequence.slot_to_write(Slot::Residual));
        for first in (0..sequence.n_tokens()).step_by(TOKENS_AT_ONCE) {
            let n_tokens = TOKENS_AT_ONCE.min(sequence.n_tokens() - first);
            let d_model = self.query.n_in();
            let before = first * d_model * size_of::<f32>();
            let group = Group { sequence, layer, first, n_tokens, scratch: &scratch };
            self.attend(&group, x.offset(before))?;
            let out = [scratch.output, Address::NULL, Address::NULL];
            residual_add(&self.shared.backend, residual.offset(before), out, [n_tokens, d_model])?;
        }
        Ok(())
    }

    /// From some tokens `x` to `output` in scratch memory.
    fn attend(&self, group: &Group<'_, B>, x: Address) -> candle_core::Result<()> {
        let &Group { sequence, layer, first, n_tokens, scratch } = group;
        let backend = &self.shared.backend;
        let x = group.input(x, self.query.n_in());
        let projections = [&self.query, &self.key, &self.value];
        if projections.iter().any(|projection| projection.takes_numbers()) {
            quantize(backend, &x, Address::NULL)?;
        }
        let places = [scratch.queries, scratch.keys, scratch.values];
        for (projection, place) in projections.into_iter().zip(places) {
            projection.run(backend, &x, place)?;
        }
        let d_head = self.d_head;
        if let Some(angles) = sequence.angles().filter(|_| self.rotary) {
            let before = first * (d_head / 2) * size_of::<f32>();
            let angles = angles.map(|angles| angles.offset(before));
            rotary(backend, scratch.queries, [n_tokens, self.n_heads, d_head], angles)?;
            rotary(backend, scratch.keys, [n_tokens, self.n_kv_heads, d_head], angles)?;
        }
        let (cache, first_position) = (sequence.cache(layer), sequence.first_position() + first);
        cache.write(backend, [scratch.keys, scratch.values], first_position, n_tokens)?;
        let queries = Queries {
            values: scratch.queries,
            n_heads: self.n_heads,
            n_tokens,
            first_position,
            window: self.window,
            scale: self.scale,
            slopes: self.slopes.as_ref().map_or(Address::NULL, Block::address),
        };
        attention(backend, &queries, &cache, scratch.parts, scratch.attended)?;
        let attended = group.input(scratch.attended, self.output.n_in());
        if self.output.takes_numbers() {
            quantize(backend, &attended, Address::NULL)?;
        }
        self.output.run(backend, &attended, scratch.output)
    }
}

/// Tokens that run together.
struct Group<'a, B: Backend> {
    sequence: &'a GpuSequence<B>,
    layer: usize,
    first: usize,
    n_tokens: usize,
    scratch: &'a DenseScratch,
}

impl<B: Backend> Group<'_, B> {
    fn input(&self, values: Address, n_columns: usize) -> DeviceInput {
        let (numbers, n_tokens) = (self.scratch.numbers, self.n_tokens);
        DeviceInput { values, numbers, n_columns, n_tokens }
    }
}

impl<B: Backend> HeldAttention for GpuAttention<B> {
    fn run(
        &self,
        sequence: &mut dyn DeviceSequence,
        layer: usize,
        from: Slot,
    ) -> Result<(), OpError> {
        let sequence = own(&self.shared, sequence)?;
        self.check(sequence, layer)?;
        self.append(sequence, layer, from).map_err(|error| self.shared.failed(error))
    }

    fn size_bytes(&self) -> u64 {
        self.bytes
    }
}

impl<B: Backend> Drop for GpuAttention<B> {
    fn drop(&mut self) {
        self.shared.give_back(self.bytes);
    }
}

/// Values of a part of attention: the sum of a head, its largest score and the sum of shares.
pub(crate) fn part_values(n_heads: usize, d_head: usize) -> usize {
    n_heads * (d_head + 2)
}
