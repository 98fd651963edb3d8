//! The rows that the stand-in holds, and the work on them.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, OnceLock};

use super::dense_steps::Projection;
use super::exchange::Exchange;
use super::executor::{Answer, Job, TOKENS_AT_ONCE, Work};
use super::sequence::own;
use super::shared::{Scratch, Shared};
use super::{NAME, StandInFailure, failed};
use crate::activation::Activation;
use crate::error::OpError;
use crate::fast_device::{
    DeviceSequence, HeldFfn, HeldNeurons, HeldRun, HeldShape, HotRows, MlpLayers, PendingFfn,
    RowPredictor, Slot,
};
use crate::ffn::{FfnWeights, NeuronScores, Neurons};
use crate::gate_estimate::GateEstimate;
use crate::matrix::NeuronMatrix;
use crate::workspace::Workspace;

/// Share of the hot neurons that fire from which on all their rows are read in order: scattered
/// rows take about a third longer than a stream.
const DENSE_FROM: f64 = 0.75;

/// Rows on the device; their memory is given back when the last work on them is done.
#[derive(Debug)]
pub(super) struct HeldRows {
    pub(super) weights: FfnWeights,
    pub(super) predictor: OnceLock<HeldPredictor>,
    /// `[d_model]`
    pub(super) down_bias: OnceLock<Vec<f32>>,
    /// Whether so many fire that all are computed.
    pub(super) is_dense: bool,
    bytes: AtomicU64,
    shared: Arc<Shared>,
}

/// A predictor.
#[derive(Debug)]
pub(super) enum HeldPredictor {
    Estimated(GateEstimate, f32),
    Scored(HeldLayers),
}

/// [`MlpLayers`] of its own.
#[derive(Debug)]
pub(super) struct HeldLayers {
    first: Projection,
    reads_residual: bool,
    activation: Option<Activation>,
    rows: NeuronMatrix,
    threshold: f32,
}

impl HeldPredictor {
    fn of(predictor: RowPredictor<'_>) -> Self {
        match predictor {
            RowPredictor::Estimated(estimate, margin) => Self::Estimated(estimate.clone(), margin),
            RowPredictor::Scored(layers) => {
                let MlpLayers { first, reads_residual, activation, rows, threshold } = layers;
                let (first, rows) = (Projection::of(first), rows.clone());
                Self::Scored(HeldLayers { first, reads_residual, activation, rows, threshold })
            }
        }
    }

    /// What is done once for all neurons: `hidden` becomes what lies between the layers for the
    /// residual stream and input of some tokens. Returns the bytes of weights that were read.
    pub(super) fn begin(
        &self,
        [residual, x]: [&[f32]; 2],
        workspace: &mut Workspace,
        hidden: &mut Vec<f32>,
    ) -> u64 {
        let Self::Scored(layers) = self else { return 0 };
        let seen = if layers.reads_residual { residual } else { x };
        layers.first.apply(seen, workspace, hidden);
        if let Some(activation) = layers.activation {
            hidden.iter_mut().for_each(|value| *value = activation.apply(*value));
        }
        layers.first.read_bytes()
    }

    /// What the network runs then.
    pub(super) fn neurons<'a>(&'a self, hidden: &'a [f32]) -> Neurons<'a> {
        match self {
            Self::Estimated(estimate, margin) => Neurons::Estimated(estimate, *margin),
            Self::Scored(HeldLayers { rows, threshold, .. }) => {
                Neurons::Scored(NeuronScores { rows, hidden, threshold: *threshold })
            }
        }
    }

    fn reads_residual(&self) -> bool {
        matches!(self, Self::Scored(HeldLayers { reads_residual: true, .. }))
    }

    fn bytes(&self) -> Result<usize, OpError> {
        match self {
            Self::Estimated(estimate, _) => Ok(estimate.resident_bytes()),
            Self::Scored(HeldLayers { first: Projection { weights, bias }, rows, .. }) => {
                let layers = resident(weights, weights.n_neurons())?;
                Ok(layers + size_of_val(bias.as_slice()) + resident(rows, rows.n_neurons())?)
            }
        }
    }
}

/// Bytes that networks of that many neurons and values of a token grow scratch to, with a predictor of a
/// rank.
pub(super) fn ffn_scratch_bytes(shape: [usize; 3]) -> u64 {
    // a vector that grows may double
    let hidden = 2 * TOKENS_AT_ONCE * shape[2] * size_of::<f32>();
    Workspace::ffn_bytes_at_most(shape, TOKENS_AT_ONCE) + hidden as u64
}

fn ffn_scratch(shape: [usize; 3]) -> Scratch {
    Scratch { ffn: ffn_scratch_bytes(shape), ..Scratch::default() }
}

pub(super) fn resident(matrix: &NeuronMatrix, n_rows: usize) -> Result<usize, OpError> {
    NeuronMatrix::resident_bytes(matrix.format(), n_rows, matrix.d_model())
}

impl HeldRows {
    /// Takes their part of the budget, then copies them.
    pub(super) fn copy(shared: &Arc<Shared>, hot: HotRows<'_>) -> Result<Self, OpError> {
        let HotRows { weights, ids, .. } = hot;
        if weights.down_by_output.is_some() {
            return Err(OpError::DownByOutput { op: "FastDevice::hold" });
        }
        let (n, d_model) = (ids.len(), weights.d_model());
        let mut bytes = 0;
        for matrix in [Some(&weights.gate), weights.up.as_ref(), Some(&weights.down)] {
            bytes += matrix.map_or(Ok(0), |matrix| resident(matrix, n))?;
        }
        let biases = [&weights.gate_bias, &weights.up_bias].into_iter().flatten().count();
        let bytes = (bytes + biases * n * size_of::<f32>()) as u64;
        shared.reserve(bytes, ffn_scratch([n, d_model, 0]))?;
        let weights = weights.copy(ids).inspect_err(|_| shared.give_back(bytes))?;
        let is_dense = hot.density.is_some_and(|density| density >= DENSE_FROM);
        let shared = Arc::clone(shared);
        let (predictor, down_bias) = (OnceLock::new(), OnceLock::new());
        Ok(Self { weights, predictor, down_bias, is_dense, bytes: bytes.into(), shared })
    }

    /// Takes the part of the budget of a predictor, then holds it.
    fn add_predictor(&self, predictor: RowPredictor<'_>) -> Result<(), OpError> {
        let (n, d_model) = (self.weights.n_neurons(), self.weights.d_model());
        predictor.check_shape(n, d_model)?;
        let scratch = ffn_scratch([n, d_model, predictor.rank()]);
        let predictor = HeldPredictor::of(predictor);
        let bytes = predictor.bytes()? as u64;
        self.shared.reserve(bytes, scratch)?;
        self.count(bytes, self.predictor.set(predictor).is_ok());
        Ok(())
    }

    /// Takes the part of the budget of the bias of down, then holds it.
    fn add_down_bias(&self, bias: &[f32]) -> Result<(), OpError> {
        let (op, what) = ("HeldFfn::hold_down_bias", "the bias of down");
        OpError::check_shape(op, what, &[self.weights.d_model()], &[bias.len()])?;
        let bytes = size_of_val(bias) as u64;
        self.shared.reserve(bytes, Scratch::default())?;
        self.count(bytes, self.down_bias.set(bias.to_vec()).is_ok());
        Ok(())
    }

    /// Counts bytes that were taken, or gives them back where there was such a thing already.
    fn count(&self, bytes: u64, is_new: bool) {
        match is_new {
            true => _ = self.bytes.fetch_add(bytes, Ordering::Relaxed),
            false => self.shared.give_back(bytes),
        }
    }

    /// What work on the rows is checked against.
    fn shape(&self) -> HeldShape<'static> {
        HeldShape {
            device: NAME,
            activation: self.weights.activation,
            n_neurons: self.weights.n_neurons(),
            d_model: self.weights.d_model(),
            reads_residual: self.predictor.get().map(HeldPredictor::reads_residual),
        }
    }
}

impl Drop for HeldRows {
    fn drop(&mut self) {
        self.shared.give_back(*self.bytes.get_mut());
    }
}

/// [`HeldRows`] as their owner has them.
#[derive(Debug)]
pub(super) struct StandInFfn {
    pub(super) rows: Arc<HeldRows>,
    #[cfg(test)]
    pub(super) fault: Option<super::tests::Fault>,
}

impl StandInFfn {
    pub(super) fn new(rows: Arc<HeldRows>) -> Self {
        Self {
            rows,
            #[cfg(test)]
            fault: None,
        }
    }

    /// `stream` is the residual stream where it is on the device, as then `x` is.
    fn queue<'a>(
        &self,
        mut neurons: HeldNeurons<'a>,
        x: &[f32],
        stream: Option<&'a [f32]>,
    ) -> Result<Pending, OpError> {
        let (shape, shared) = (self.rows.shape(), &self.rows.shared);
        let is_there = shape.reads_residual == Some(true)
            && matches!((neurons, stream), (HeldNeurons::Predicted([]), Some(_)));
        if let Some(stream) = stream.filter(|_| is_there) {
            neurons = HeldNeurons::Predicted(stream);
        }
        shape.check(neurons, x)?;
        let mut exchange = shared.take_exchange();
        exchange.fill(neurons, x, stream.is_some());
        exchange.residual_there = is_there;
        let (answer, pending) = channel();
        shared.send(Job {
            work: Work::Network { rows: Arc::clone(&self.rows), exchange, answer },
            #[cfg(test)]
            fault: self.fault,
        })?;
        Ok(Pending { shared: Arc::clone(shared), answer: pending })
    }
}

impl HeldFfn for StandInFfn {
    fn n_neurons(&self) -> usize {
        self.rows.weights.n_neurons()
    }

    fn d_model(&self) -> usize {
        self.rows.weights.d_model()
    }

    fn size_bytes(&self) -> u64 {
        self.rows.bytes.load(Ordering::Relaxed)
    }

    fn hold_predictor(&self, predictor: RowPredictor<'_>) -> Result<bool, OpError> {
        self.rows.add_predictor(predictor).map(|()| true)
    }

    fn has_predictor(&self) -> bool {
        self.rows.predictor.get().is_some()
    }

    fn hold_down_bias(&self, bias: &[f32]) -> Result<bool, OpError> {
        self.rows.add_down_bias(bias).map(|()| true)
    }

    fn start(&self, neurons: HeldNeurons<'_>, x: &[f32]) -> Result<Box<dyn PendingFfn>, OpError> {
        Ok(Box::new(self.queue(neurons, x, None)?))
    }

    fn start_in(
        &self,
        neurons: HeldNeurons<'_>,
        sequence: &mut dyn DeviceSequence,
        from: Slot,
    ) -> Result<(), OpError> {
        let sequence = own(&self.rows.shared, sequence)?;
        sequence.check_width("HeldFfn::start_in", self.d_model())?;
        sequence.settle()?;
        let tokens = sequence.tokens()?;
        let stream = tokens.slot(Slot::Residual);
        let pending = self.queue(neurons, tokens.slot(from), Some(stream))?;
        sequence.set_started(pending, Arc::clone(&self.rows));
        Ok(())
    }

    fn read_back(&self) -> Result<FfnWeights, OpError> {
        Ok(self.rows.weights.clone())
    }
}

/// Work in the queue.
pub(super) struct Pending {
    shared: Arc<Shared>,
    answer: Receiver<Answer>,
}

impl Pending {
    /// Waits for the work, hands its output `[n_tokens, d_model]` on and says what it did.
    pub(super) fn finish(
        self,
        take: impl FnOnce(&Exchange) -> Result<(), OpError>,
    ) -> Result<HeldRun, OpError> {
        // an executor that is gone has dropped the other end
        let exchange: Exchange = self.answer.recv().map_err(|_| failed(StandInFailure::Gone))??;
        let (taken, run) = (take(&exchange), exchange.run);
        self.shared.return_exchange(exchange);
        taken.map(|()| run)
    }
}

impl PendingFfn for Pending {
    fn wait(self: Box<Self>, y: &mut [f32]) -> Result<HeldRun, OpError> {
        self.finish(|exchange| exchange.add_to(y))
    }
}

impl fmt::Debug for Pending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Pending")
    }
}
