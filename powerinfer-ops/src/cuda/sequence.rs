//! The residual stream of a text on a device, with the keys and values of its layers.

use std::any::Any;
use std::sync::Arc;

use super::backend::{Backend, Pinned, grow};
use super::dense_steps::{CHUNK, DeviceCache, broken_tokens, residual_add};
use super::device::Shared;
use super::held_attention::part_values;
use super::kv_memory::KvMemory;
use super::pass_memory::PassMemory;
use super::pending::GpuPending;
use super::queue::Address;
use super::scratch::{DenseShape, Needs};
use crate::attention::PAGE_LEN;
use crate::check::check_shape;
use crate::fast_device::dense_check::{check_pass, check_values};
use crate::{DeviceSequence, HeldRun, OpError, SequenceShape, Slot};

/// Positions are counted as `int` by the kernels.
const MAX_POSITIONS: usize = i32::MAX as usize - PAGE_LEN;

/// What a sequence of `n_tokens` takes at most in passes of `pass_tokens`, and of the scratch memory that
/// all share what models take whose queries are as wide as the stream.
pub(crate) fn bytes_at_most<B: Backend>(
    shape: SequenceShape,
    n_tokens: usize,
    pass_tokens: usize,
) -> u64 {
    let SequenceShape { d_model, n_layers, kv } = shape;
    let [n_tokens, pass_tokens] = [n_tokens, pass_tokens].map(|n| n.min(MAX_POSITIONS));
    // while the last layer grows, what it had is there, too
    let layers = KvMemory::<B>::bytes(kv, n_tokens).saturating_mul(n_layers as u64);
    let before = if n_layers == 0 { 0 } else { n_tokens.saturating_sub(PAGE_LEN) };
    let scratch = DenseShape {
        input: d_model,
        query: d_model,
        kv: kv.n_kv_heads * kv.d_head,
        output: d_model,
        part: part_values(d_model.div_ceil(kv.d_head.max(1)), kv.d_head),
        n_parts: n_tokens.div_ceil(CHUNK),
    };
    layers
        .saturating_add(KvMemory::<B>::bytes(kv, before))
        .saturating_add(PassMemory::<B>::bytes(shape, pass_tokens))
        .saturating_add(scratch.bytes() as u64)
}

/// The device's own sequence behind any.
pub(crate) fn own<'a, B: Backend>(
    shared: &Arc<Shared<B>>,
    sequence: &'a mut dyn DeviceSequence,
) -> Result<&'a mut GpuSequence<B>, OpError> {
    let own = sequence.as_any().downcast_mut::<GpuSequence<B>>();
    let own = own.filter(|own| Arc::ptr_eq(&own.shared, shared));
    own.ok_or_else(|| OpError::ForeignSequence { device: shared.name.clone() })
}

/// A sequence, as its owner has it.
#[derive(Debug)]
pub(crate) struct GpuSequence<B: Backend> {
    shared: Arc<Shared<B>>,
    shape: SequenceShape,
    layers: Vec<KvMemory<B>>,
    pass: PassMemory<B>,
    /// Positions that hold something.
    len: usize,
    first_position: usize,
    n_tokens: usize,
    turns: bool,
    /// What goes to the device: values of a slot, angles, and what the host adds to the stream.
    sent: [B::Pinned; 3],
    /// What comes back.
    answer: B::Pinned,
    /// When the network that was started last began, and the slots that hold since then what they held.
    began: B::Event,
    since: [bool; 3],
    /// Whether the output of a network waits to be added, and the bias that is added with it.
    unfinished: Option<Address>,
    /// Networks that nobody has asked about yet.
    runs: Vec<GpuPending<B>>,
}

impl<B: Backend> GpuSequence<B> {
    pub(crate) fn new(shared: &Arc<Shared<B>>, shape: SequenceShape) -> Result<Self, OpError> {
        let (backend, failed) = (&shared.backend, |error| shared.failed(error));
        let pinned = || backend.pinned(0).map_err(failed);
        Ok(Self {
            shared: Arc::clone(shared),
            shape,
            layers: (0..shape.n_layers).map(|_| KvMemory::new(shape.kv)).collect(),
            pass: PassMemory::new(shape),
            len: 0,
            first_position: 0,
            n_tokens: 0,
            turns: false,
            sent: [pinned()?, pinned()?, pinned()?],
            answer: pinned()?,
            began: backend.event().map_err(failed)?,
            since: [false; 3],
            unfinished: None,
            runs: Vec::new(),
        })
    }

    pub(crate) fn shape(&self) -> SequenceShape {
        self.shape
    }

    pub(crate) fn n_tokens(&self) -> usize {
        self.n_tokens
    }

    pub(crate) fn first_position(&self) -> usize {
        self.first_position
    }

    /// Where cosines and sines of the pass begin.
    pub(crate) fn angles(&self) -> Option<[Address; 2]> {
        let cos = self.pass.angles();
        let sin = cos.offset(self.n_tokens * (self.shape.kv.d_head / 2) * size_of::<f32>());
        self.turns.then_some([cos, sin])
    }

    pub(crate) fn cache(&self, layer: usize) -> DeviceCache {
        self.layers[layer].cache()
    }

    pub(crate) fn slot(&self, slot: Slot) -> Address {
        self.pass.slot(slot)
    }

    pub(crate) fn slot_to_write(&mut self, slot: Slot) -> Address {
        self.since[slot as usize] = false;
        self.pass.slot(slot)
    }

    pub(crate) fn answer_mut(&mut self) -> &mut B::Pinned {
        &mut self.answer
    }

    /// Fails unless a part for tokens of `d_model` values may work on it.
    pub(crate) fn check_width(&self, op: &'static str, d_model: usize) -> Result<(), OpError> {
        check_shape(op, "the sequence", &[d_model], &[self.shape.d_model])
    }

    /// Where a network that is about to be started finds its tokens and leaves its output.
    pub(crate) fn begin_network(&mut self, from: Slot) -> Result<[Address; 2], OpError> {
        let done = self.shared.backend.record(&self.began);
        done.map_err(|error| self.shared.failed(error))?;
        self.since = [true; 3];
        Ok([self.pass.slot(from), self.pass.network()])
    }

    /// Notes a network that was started, and the bias that is added with its output.
    pub(crate) fn network_begun(&mut self, run: GpuPending<B>, bias: Address) {
        self.unfinished = Some(bias);
        self.runs.push(run);
    }

    fn failed(&self) -> impl Fn(candle_core::Error) -> OpError + use<B> {
        let shared = Arc::clone(&self.shared);
        move |error| shared.failed(error)
    }

    /// Appends a copy of values to the device, through one of the buffers.
    fn send(&mut self, through: usize, values: &[&[f32]], to: Address) -> candle_core::Result<()> {
        let n_bytes = values.iter().map(|values| size_of_val(*values)).sum();
        let (backend, sent) = (&self.shared.backend, &mut self.sent[through]);
        grow(backend, sent, n_bytes)?;
        let mut bytes = &mut sent.bytes_mut()?[..n_bytes];
        for values in values {
            let (first, rest) = bytes.split_at_mut(size_of_val(*values));
            first.copy_from_slice(bytemuck::cast_slice(values));
            bytes = rest;
        }
        if n_bytes == 0 { Ok(()) } else { backend.send(sent, 0..n_bytes, to) }
    }

    /// Makes room for a pass; positions before it stay.
    fn make_room(&mut self, first_position: usize, n_tokens: usize) -> Result<(), OpError> {
        let end = first_position + n_tokens;
        let dense = DenseShape { n_parts: end.div_ceil(CHUNK), ..DenseShape::default() };
        self.shared.reserve(0, Needs::of_dense(dense))?.keep();
        self.pass.grow(&self.shared, n_tokens)?;
        for layer in &mut self.layers {
            if layer.capacity() < end {
                layer.resize(&self.shared, end, (None, first_position))?;
            }
        }
        Ok(())
    }
}

impl<B: Backend> DeviceSequence for GpuSequence<B> {
    fn as_any(&mut self) -> &mut dyn Any {
        self
    }

    fn begin(
        &mut self,
        first_position: usize,
        n_tokens: usize,
        angles: Option<[&[f32]; 2]>,
    ) -> Result<(), OpError> {
        let op = "DeviceSequence::begin";
        self.unfinished = None;
        self.runs.clear();
        check_pass(self.shape, self.len, (first_position, n_tokens), angles)?;
        if n_tokens > MAX_POSITIONS - first_position {
            let (expected, found) = (vec![MAX_POSITIONS], vec![first_position, n_tokens]);
            return Err(OpError::Shape { op, what: "positions", expected, found });
        }
        (self.len, self.n_tokens, self.since) = (first_position, 0, [false; 3]);
        self.make_room(first_position, n_tokens)?;
        (self.first_position, self.n_tokens) = (first_position, n_tokens);
        (self.len, self.turns) = (first_position + n_tokens, angles.is_some());
        match angles {
            Some(angles) => self.send(1, &angles, self.pass.angles()).map_err(self.failed()),
            None => Ok(()),
        }
    }

    fn write(&mut self, slot: Slot, values: &[f32]) -> Result<(), OpError> {
        check_values("DeviceSequence::write", self.shape, self.n_tokens, values.len())?;
        let to = self.slot_to_write(slot);
        self.send(0, &[values], to).map_err(self.failed())
    }

    fn read(&mut self, slot: Slot, values: &mut Vec<f32>) -> Result<(), OpError> {
        let n_bytes = self.n_tokens * self.shape.d_model * size_of::<f32>();
        let (backend, from) = (&self.shared.backend, self.pass.slot(slot));
        let answer = &mut self.answer;
        values.clear();
        let mut fetch = || {
            grow(backend, answer, n_bytes)?;
            match self.since[slot as usize] {
                true => backend.receive_after(&self.began, from, answer, 0..n_bytes)?,
                false => backend.receive(from, answer, 0..n_bytes)?,
            }
            values.extend_from_slice(bytemuck::cast_slice(&answer.bytes()?[..n_bytes]));
            Ok(())
        };
        if n_bytes == 0 { Ok(()) } else { fetch().map_err(|error| self.shared.failed(error)) }
    }

    fn finish_ffn(&mut self, part: Option<&[f32]>) -> Result<(), OpError> {
        let (n_tokens, d_model) = (self.n_tokens, self.shape.d_model);
        let mut add = [Address::NULL; 3];
        if let Some(part) = part {
            check_values("DeviceSequence::finish_ffn", self.shape, n_tokens, part.len())?;
            add[1] = self.pass.part();
            self.send(2, &[part], add[1]).map_err(self.failed())?;
        }
        if let Some(bias) = self.unfinished.take() {
            (add[0], add[2]) = (self.pass.network(), bias);
        }
        if n_tokens == 0 || add == [Address::NULL; 3] {
            return Ok(());
        }
        let residual = self.slot_to_write(Slot::Residual);
        let done = residual_add(&self.shared.backend, residual, add, [n_tokens, d_model]);
        done.map_err(self.failed())
    }

    fn first_broken_token(&mut self) -> Result<Option<usize>, OpError> {
        let (backend, n_bytes) = (&self.shared.backend, self.n_tokens * size_of::<u32>());
        if n_bytes == 0 {
            return Ok(None);
        }
        let (residual, broken) = (self.pass.slot(Slot::Residual), self.pass.broken());
        let answer = &mut self.answer;
        let mut fetch = || {
            broken_tokens(backend, residual, [self.n_tokens, self.shape.d_model], broken)?;
            grow(backend, answer, n_bytes)?;
            backend.receive(broken, answer, 0..n_bytes)?;
            let marks = answer.bytes()?[..n_bytes].as_chunks::<4>().0;
            Ok(marks.iter().position(|mark| *mark != [0; 4]))
        };
        fetch().map_err(|error| self.shared.failed(error))
    }

    fn take_runs(&mut self) -> Result<Vec<HeldRun>, OpError> {
        self.runs.drain(..).map(|mut run| run.run()).collect()
    }

    fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
        for layer in &mut self.layers {
            if self.len == 0 {
                layer.clear(&self.shared);
            } else if self.len.next_multiple_of(PAGE_LEN) < layer.capacity() {
                // where there is no room for a copy it stays as large as it is
                let _ = layer.resize(&self.shared, self.len, (None, self.len));
            }
        }
    }

    fn try_clone(&self, len: usize) -> Result<Box<dyn DeviceSequence>, OpError> {
        let len = len.min(self.len);
        let mut copy = Self::new(&self.shared, self.shape)?;
        for (layer, from) in copy.layers.iter_mut().zip(&self.layers) {
            if len > 0 {
                layer.resize(&self.shared, len, (Some(from), len))?;
            }
        }
        copy.len = len;
        Ok(Box::new(copy))
    }

    fn size_bytes(&self) -> u64 {
        let layers: u64 = self.layers.iter().map(KvMemory::size_bytes).sum();
        layers + self.pass.size_bytes()
    }
}

impl<B: Backend> Drop for GpuSequence<B> {
    fn drop(&mut self) {
        self.shared.give_back(self.size_bytes());
    }
}
