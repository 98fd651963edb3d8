//! A sequence on the stand-in: its tokens, their keys and values, and the network that works on them.

use std::any::Any;
use std::fmt;
use std::ops::Range;
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use super::dense_steps::DenseScratch;
use super::executor::{Done, Job, Step, TOKENS_AT_ONCE, Work, wait_until};
use super::rows::{HeldRows, Pending};
use super::shared::{Scratch, Shared, Taken};
use super::tokens::Tokens;
use super::{NAME, StandInFailure, failed};
use crate::attention::{AttentionScratch, PAGE_LEN};
use crate::cpu::product::InputScratch;
use crate::error::OpError;
use crate::fast_device::dense_check::{check_pass, check_values};
use crate::fast_device::{DeviceSequence, HeldRun, SequenceShape, Slot};

/// What a sequence of `n_tokens` takes at most in passes of `pass_tokens`, and of the scratch memory that
/// all share what models take whose queries are as wide as the stream.
pub(super) fn bytes_at_most(shape: SequenceShape, n_tokens: usize, pass_tokens: usize) -> u64 {
    let SequenceShape { d_model, n_layers, kv } = shape;
    let n_pages = n_tokens.div_ceil(PAGE_LEN).saturating_mul(n_layers);
    let of_token = (3 * d_model + 2 * (kv.d_head / 2)) * size_of::<f32>();
    let own = n_pages.saturating_mul(kv.page_bytes());
    let own = own.saturating_add(pass_tokens.saturating_mul(of_token));
    let mut scratch = dense_scratch(d_model, [d_model, kv.n_kv_heads * kv.d_head]);
    let n_heads = d_model.div_ceil(kv.d_head.max(1));
    scratch.chunk = chunk_scratch(n_heads, kv.d_head).chunk;
    scratch.n_chunks = AttentionScratch::parts_at_most(n_tokens) as u64;
    (own as u64).saturating_add(scratch.bytes())
}

/// What projections of queries and keys of those widths grow scratch to.
pub(super) fn dense_scratch(d_model: usize, [query, kv]: [usize; 2]) -> Scratch {
    let inputs = InputScratch::bytes_at_most(d_model.max(query), TOKENS_AT_ONCE);
    let between = DenseScratch::bytes_at_most(2 * query + 2 * kv + d_model);
    Scratch { dense: (2 * inputs + between) as u64, ..Scratch::default() }
}

/// What attention grows scratch to.
pub(super) fn chunk_scratch(n_heads: usize, d_head: usize) -> Scratch {
    // a vector that grows may double
    let chunk = AttentionScratch::part_bytes(n_heads, d_head, TOKENS_AT_ONCE).saturating_mul(2);
    Scratch { chunk: chunk as u64, ..Scratch::default() }
}

/// The device's own sequence behind any.
pub(super) fn own<'a>(
    shared: &Arc<Shared>,
    sequence: &'a mut dyn DeviceSequence,
) -> Result<&'a mut StandInSequence, OpError> {
    let own = sequence.as_any().downcast_mut::<StandInSequence>();
    let own = own.filter(|own| Arc::ptr_eq(&own.shared, shared));
    own.ok_or_else(|| OpError::ForeignSequence { device: NAME.to_owned() })
}

/// A sequence, as its owner has it.
pub(super) struct StandInSequence {
    shared: Arc<Shared>,
    shape: SequenceShape,
    /// None when a step took them along that ended with the device.
    tokens: Option<Box<Tokens>>,
    /// The network that was started last, with its rows.
    started: Mutex<Option<(Pending, Arc<HeldRows>)>>,
    runs: Vec<HeldRun>,
}

impl StandInSequence {
    pub(super) fn new(shared: &Arc<Shared>, shape: SequenceShape) -> Result<Self, OpError> {
        let taken = Taken::new(shared, 0, Scratch::default())?;
        Ok(Self::of(shared, Tokens::new(shape, taken)))
    }

    fn of(shared: &Arc<Shared>, tokens: Tokens) -> Self {
        Self {
            shared: Arc::clone(shared),
            shape: tokens.shape(),
            tokens: Some(Box::new(tokens)),
            started: Mutex::new(None),
            runs: Vec::new(),
        }
    }

    pub(super) fn shape(&self) -> SequenceShape {
        self.shape
    }

    pub(super) fn tokens(&self) -> Result<&Tokens, OpError> {
        self.tokens.as_deref().ok_or_else(|| failed(StandInFailure::Gone))
    }

    fn tokens_mut(&mut self) -> Result<&mut Tokens, OpError> {
        self.tokens.as_deref_mut().ok_or_else(|| failed(StandInFailure::Gone))
    }

    /// Fails unless a part for tokens of `d_model` values may work on it.
    pub(super) fn check_width(&self, op: &'static str, d_model: usize) -> Result<(), OpError> {
        OpError::check_shape(op, "the sequence", &[d_model], &[self.shape.d_model])
    }

    fn started_mut(&mut self) -> &mut Option<(Pending, Arc<HeldRows>)> {
        self.started.get_mut().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn set_started(&mut self, pending: Pending, rows: Arc<HeldRows>) {
        *self.started_mut() = Some((pending, rows));
    }

    /// Waits for a network that was started and whose output nobody asked for.
    pub(super) fn settle(&mut self) -> Result<(), OpError> {
        if let Some((pending, _)) = self.started_mut().take() {
            let run = pending.finish(|_| Ok(()))?;
            self.runs.push(run);
        }
        Ok(())
    }

    /// Lets the device's thread do a step behind all that was queued, and waits for it.
    pub(super) fn step(
        &mut self,
        step: Step,
        #[cfg(test)] fault: Option<super::tests::Fault>,
    ) -> Result<Vec<f32>, OpError> {
        let tokens = self.tokens.take().ok_or_else(|| failed(StandInFailure::Gone))?;
        let (answer, done) = channel();
        self.shared.send(Job {
            work: Work::Step { step, tokens, answer },
            #[cfg(test)]
            fault,
        })?;
        let done = done.recv().map_err(|_| failed(StandInFailure::Gone))?;
        let Done { tokens, logits, result } = done?;
        self.tokens = Some(tokens);
        result.map(|()| logits)
    }

    /// Lets the time pass that values take over the link under a model.
    pub(super) fn cross(&self, n_values: usize, began: Instant) {
        if let Some(speed) = self.shared.speed {
            wait_until(began, speed.crossing((n_values * size_of::<f32>()) as u64));
        }
    }
}

impl DeviceSequence for StandInSequence {
    fn as_any(&mut self) -> &mut dyn Any {
        self
    }

    fn begin(
        &mut self,
        first_position: usize,
        n_tokens: usize,
        angles: Option<[&[f32]; 2]>,
    ) -> Result<(), OpError> {
        *self.started_mut() = None;
        self.runs.clear();
        let (began, shape) = (Instant::now(), self.shape);
        let tokens = self.tokens_mut()?;
        check_pass(shape, tokens.len(), (first_position, n_tokens), angles)?;
        tokens.begin(first_position, n_tokens, angles)?;
        if let Some([cos, sin]) = angles {
            self.cross(cos.len() + sin.len(), began);
        }
        Ok(())
    }

    fn write(&mut self, slot: Slot, values: &[f32]) -> Result<(), OpError> {
        let (began, shape) = (Instant::now(), self.shape);
        let tokens = self.tokens_mut()?;
        check_values("DeviceSequence::write", shape, tokens.n_tokens(), values.len())?;
        tokens.slot_mut(slot).copy_from_slice(values);
        self.cross(values.len(), began);
        Ok(())
    }

    fn read(&mut self, slot: Slot, values: &mut Vec<f32>) -> Result<(), OpError> {
        let began = Instant::now();
        values.clear();
        values.extend_from_slice(self.tokens()?.slot(slot));
        self.cross(values.len(), began);
        Ok(())
    }

    fn finish_ffn(&mut self, part: Option<&[f32]>) -> Result<(), OpError> {
        let (began, shape) = (Instant::now(), self.shape);
        let n_tokens = self.tokens()?.n_tokens();
        if let Some(part) = part {
            check_values("DeviceSequence::finish_ffn", shape, n_tokens, part.len())?;
            self.cross(part.len(), began);
        }
        let started = self.started_mut().take();
        let tokens = self.tokens_mut()?;
        match (started, part) {
            (Some((pending, rows)), part) => {
                let bias = rows.down_bias.get().map(Vec::as_slice).unwrap_or_default();
                let run = pending.finish(|exchange| {
                    tokens.add_network(&exchange.y, part, bias);
                    Ok(())
                })?;
                self.runs.push(run);
            }
            (None, Some(part)) => crate::cpu::rows::add(tokens.slot_mut(Slot::Residual), part),
            (None, None) => {}
        }
        Ok(())
    }

    fn first_broken_token(&mut self) -> Result<Option<usize>, OpError> {
        let d_model = self.shape.d_model.max(1);
        let values = self.tokens()?.slot(Slot::Residual);
        Ok(values.iter().position(|value| !value.is_finite()).map(|at| at / d_model))
    }

    fn take_runs(&mut self) -> Result<Vec<HeldRun>, OpError> {
        self.settle()?;
        Ok(std::mem::take(&mut self.runs))
    }

    fn truncate(&mut self, len: usize) {
        if let Some(tokens) = &mut self.tokens {
            tokens.truncate(len);
        }
    }

    fn try_clone(&self, len: usize) -> Result<Box<dyn DeviceSequence>, OpError> {
        Ok(Box::new(Self::of(&self.shared, self.tokens()?.copy(&self.shared, len)?)))
    }

    fn size_bytes(&self) -> u64 {
        self.tokens.as_ref().map_or(0, |tokens| tokens.size_bytes())
    }
}

impl fmt::Debug for StandInSequence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StandInSequence")
            .field("shape", &self.shape)
            .field("size_bytes", &self.size_bytes())
            .finish_non_exhaustive()
    }
}

/// Tokens of a pass that a head is asked for.
pub(super) fn check_wanted(tokens: &Tokens, wanted: &Range<usize>) -> Result<(), OpError> {
    let n_tokens = tokens.n_tokens();
    if wanted.start > wanted.end || wanted.end > n_tokens {
        let (expected, found) = (vec![0, n_tokens], vec![wanted.start, wanted.end]);
        return Err(OpError::Shape { op: "HeldHead::run", what: "tokens", expected, found });
    }
    Ok(())
}
