//! The rows that the stand-in holds, and the work on them.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, OnceLock};

use super::exchange::Exchange;
use super::executor::{Answer, Job, TOKENS_AT_ONCE, Work};
use super::sequence::own;
use super::shared::{Scratch, Shared};
use super::{NAME, StandInFailure, failed};
use crate::error::OpError;
use crate::fast_device::{
    DeviceSequence, HeldFfn, HeldNeurons, HeldRun, HeldShape, HotRows, PendingFfn, RowPredictor,
    Slot,
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

/// A predictor's rows.
#[derive(Debug)]
pub(super) enum HeldPredictor {
    Estimated(GateEstimate, f32),
    Scored(NeuronMatrix, f32),
}

impl HeldPredictor {
    fn of(predictor: RowPredictor<'_>) -> Self {
        match predictor {
            RowPredictor::Estimated(estimate, margin) => Self::Estimated(estimate.clone(), margin),
            RowPredictor::Scored(rows, threshold) => Self::Scored(rows.clone(), threshold),
        }
    }

    /// What the network runs for tokens with those hidden values.
    pub(super) fn neurons<'a>(&'a self, hidden: &'a [f32]) -> Neurons<'a> {
        match self {
            Self::Estimated(estimate, margin) => Neurons::Estimated(estimate, *margin),
            Self::Scored(rows, threshold) => {
                Neurons::Scored(NeuronScores { rows, hidden, threshold: *threshold })
            }
        }
    }

    /// Hidden values of a token.
    fn rank(&self) -> usize {
        match self {
            Self::Estimated(..) => 0,
            Self::Scored(rows, _) => rows.d_model(),
        }
    }

    fn bytes(&self) -> Result<usize, OpError> {
        match self {
            Self::Estimated(estimate, _) => Ok(estimate.resident_bytes()),
            Self::Scored(rows, _) => resident(rows, rows.n_neurons()),
        }
    }

    fn shape(&self) -> [usize; 2] {
        match self {
            Self::Estimated(estimate, _) => [estimate.rows().n_rows(), estimate.rows().n_columns()],
            Self::Scored(rows, _) => [rows.n_neurons(), rows.d_model()],
        }
    }
}

/// What networks of that many neurons, values of a token and columns of a predictor grow scratch to.
fn ffn_scratch(shape: [usize; 3]) -> Scratch {
    let ffn = Workspace::ffn_bytes_at_most(shape, TOKENS_AT_ONCE);
    Scratch { ffn, ..Scratch::default() }
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

    /// Takes the part of the budget of a predictor's rows, then holds them.
    fn add_predictor(&self, predictor: RowPredictor<'_>) -> Result<(), OpError> {
        let predictor = HeldPredictor::of(predictor);
        let (n, d_model) = (self.weights.n_neurons(), self.weights.d_model());
        let found = predictor.shape();
        let columns = if predictor.rank() == 0 { d_model } else { found[1] };
        let (op, what) = ("HeldFfn::hold_predictor", "the predictor's rows");
        OpError::check_shape(op, what, &[n, columns], &found)?;
        let scratch = ffn_scratch([n, d_model, predictor.rank()]);
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
            rank: self.predictor.get().map(HeldPredictor::rank),
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

    fn queue(
        &self,
        neurons: HeldNeurons<'_>,
        x: &[f32],
        in_place: bool,
    ) -> Result<Pending, OpError> {
        self.rows.shape().check(neurons, x)?;
        let shared = &self.rows.shared;
        let mut exchange = shared.take_exchange();
        exchange.fill(neurons, x, in_place);
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
        Ok(Box::new(self.queue(neurons, x, false)?))
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
        let pending = self.queue(neurons, sequence.tokens()?.slot(from), true)?;
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
