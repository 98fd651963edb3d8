//! A stand-in some of whose steps fail.

use std::any::Any;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use powerinfer_ops::{
    AttentionPart, DeviceMemory, DeviceSequence, FastDevice, FfnWeights, HeadPart, HeldAttention,
    HeldFfn, HeldHead, HeldNeurons, HeldNorm, HeldRun, HotRows, NormPart, OpError, PendingFfn,
    RowPredictor, SequenceShape, Slot, StandIn,
};

/// Counts steps and says which of them fail.
#[derive(Debug, Default)]
pub(crate) struct Switch {
    n_steps: AtomicUsize,
    failing: Mutex<Range<usize>>,
    /// Whether a step that fails has been done all the same.
    done: bool,
}

impl Switch {
    pub(crate) fn new(done: bool) -> Arc<Self> {
        Arc::new(Self { done, ..Self::default() })
    }

    /// Steps so far.
    pub(crate) fn n_steps(&self) -> usize {
        self.n_steps.load(Ordering::SeqCst)
    }

    /// Lets the steps of that range fail, counted from the next one on.
    pub(crate) fn fail(&self, range: Range<usize>) {
        let n = self.n_steps();
        let range = range.start.saturating_add(n)..range.end.saturating_add(n);
        *self.failing.lock().unwrap_or_else(PoisonError::into_inner) = range;
    }

    fn step<T>(&self, step: impl FnOnce() -> Result<T, OpError>) -> Result<T, OpError> {
        let number = self.n_steps.fetch_add(1, Ordering::SeqCst);
        let failing = self.failing.lock().unwrap_or_else(PoisonError::into_inner).contains(&number);
        if !failing {
            return step();
        }
        if self.done {
            let _ = step()?;
        }
        Err(OpError::DeviceFailed { device: "failing".into(), source: "unplugged".into() })
    }
}

/// The device.
#[derive(Debug)]
pub(crate) struct Failing {
    pub(crate) inner: Arc<StandIn>,
    pub(crate) switch: Arc<Switch>,
}

/// Anything that the device made.
#[derive(Debug)]
struct Made<T: ?Sized>(Arc<Switch>, Box<T>);

impl Failing {
    fn made<T: ?Sized>(&self, made: Result<Box<T>, OpError>) -> Result<Made<T>, OpError> {
        Ok(Made(Arc::clone(&self.switch), made?))
    }
}

impl FastDevice for Failing {
    fn name(&self) -> &str {
        "failing"
    }
    fn memory(&self) -> DeviceMemory {
        self.inner.memory()
    }
    fn workspace_bytes(&self, n_neurons: usize, d_model: usize, rank: usize) -> u64 {
        self.inner.workspace_bytes(n_neurons, d_model, rank)
    }
    fn hold(&self, rows: HotRows<'_>) -> Result<Box<dyn HeldFfn>, OpError> {
        Ok(Box::new(self.made(self.inner.hold(rows))?))
    }
    fn runs_dense_parts(&self) -> bool {
        true
    }
    fn sequence_bytes(&self, shape: SequenceShape, n_tokens: usize, pass_tokens: usize) -> u64 {
        self.inner.sequence_bytes(shape, n_tokens, pass_tokens)
    }
    fn hold_norm(&self, norm: NormPart<'_>) -> Result<Box<dyn HeldNorm>, OpError> {
        Ok(Box::new(self.made(self.inner.hold_norm(norm))?))
    }
    fn hold_attention(&self, part: AttentionPart<'_>) -> Result<Box<dyn HeldAttention>, OpError> {
        Ok(Box::new(self.made(self.inner.hold_attention(part))?))
    }
    fn hold_head(&self, head: HeadPart<'_>) -> Result<Box<dyn HeldHead>, OpError> {
        Ok(Box::new(self.made(self.inner.hold_head(head))?))
    }
    fn sequence(&self, shape: SequenceShape) -> Result<Box<dyn DeviceSequence>, OpError> {
        let sequence = self.switch.step(|| self.inner.sequence(shape));
        Ok(Box::new(self.made(sequence)?))
    }
}

impl HeldNorm for Made<dyn HeldNorm> {
    fn run(&self, sequence: &mut dyn DeviceSequence, from: Slot, to: Slot) -> Result<(), OpError> {
        self.0.step(|| self.1.run(sequence, from, to))
    }
    fn size_bytes(&self) -> u64 {
        self.1.size_bytes()
    }
}

impl HeldAttention for Made<dyn HeldAttention> {
    fn run(&self, on: &mut dyn DeviceSequence, layer: usize, from: Slot) -> Result<(), OpError> {
        self.0.step(|| self.1.run(on, layer, from))
    }
    fn size_bytes(&self) -> u64 {
        self.1.size_bytes()
    }
}

impl HeldHead for Made<dyn HeldHead> {
    fn run(
        &self,
        sequence: &mut dyn DeviceSequence,
        tokens: Range<usize>,
        logits: &mut Vec<f32>,
    ) -> Result<(), OpError> {
        self.0.step(|| self.1.run(sequence, tokens, logits))
    }
    fn size_bytes(&self) -> u64 {
        self.1.size_bytes()
    }
}

impl HeldFfn for Made<dyn HeldFfn> {
    fn n_neurons(&self) -> usize {
        self.1.n_neurons()
    }
    fn d_model(&self) -> usize {
        self.1.d_model()
    }
    fn size_bytes(&self) -> u64 {
        self.1.size_bytes()
    }
    fn hold_predictor(&self, predictor: RowPredictor<'_>) -> Result<bool, OpError> {
        self.1.hold_predictor(predictor)
    }
    fn hold_down_bias(&self, bias: &[f32]) -> Result<bool, OpError> {
        self.1.hold_down_bias(bias)
    }
    fn has_predictor(&self) -> bool {
        self.1.has_predictor()
    }
    fn start(&self, neurons: HeldNeurons<'_>, x: &[f32]) -> Result<Box<dyn PendingFfn>, OpError> {
        let pending = self.0.step(|| self.1.start(neurons, x))?;
        Ok(Box::new(Made(Arc::clone(&self.0), pending)))
    }
    fn start_in(
        &self,
        neurons: HeldNeurons<'_>,
        sequence: &mut dyn DeviceSequence,
        from: Slot,
    ) -> Result<(), OpError> {
        self.0.step(|| self.1.start_in(neurons, sequence, from))
    }
    fn read_back(&self) -> Result<FfnWeights, OpError> {
        self.0.step(|| self.1.read_back())
    }
}

impl PendingFfn for Made<dyn PendingFfn> {
    fn wait(self: Box<Self>, y: &mut [f32]) -> Result<HeldRun, OpError> {
        let Self(switch, pending) = *self;
        switch.step(|| pending.wait(y))
    }
}

impl DeviceSequence for Made<dyn DeviceSequence> {
    fn as_any(&mut self) -> &mut dyn Any {
        self.1.as_any()
    }
    fn begin(
        &mut self,
        first_position: usize,
        n_tokens: usize,
        angles: Option<[&[f32]; 2]>,
    ) -> Result<(), OpError> {
        self.0.step(|| self.1.begin(first_position, n_tokens, angles))
    }
    fn write(&mut self, slot: Slot, values: &[f32]) -> Result<(), OpError> {
        self.0.step(|| self.1.write(slot, values))
    }
    fn read(&mut self, slot: Slot, values: &mut Vec<f32>) -> Result<(), OpError> {
        self.0.step(|| self.1.read(slot, values))
    }
    fn finish_ffn(&mut self, part: Option<&[f32]>) -> Result<(), OpError> {
        self.0.step(|| self.1.finish_ffn(part))
    }
    fn first_broken_token(&mut self) -> Result<Option<usize>, OpError> {
        self.0.step(|| self.1.first_broken_token())
    }
    fn take_runs(&mut self) -> Result<Vec<HeldRun>, OpError> {
        self.0.step(|| self.1.take_runs())
    }
    fn truncate(&mut self, len: usize) {
        self.1.truncate(len);
    }
    fn try_clone(&self, len: usize) -> Result<Box<dyn DeviceSequence>, OpError> {
        let copy = self.0.step(|| self.1.try_clone(len))?;
        Ok(Box::new(Made(Arc::clone(&self.0), copy)))
    }
    fn size_bytes(&self) -> u64 {
        self.1.size_bytes()
    }
}
