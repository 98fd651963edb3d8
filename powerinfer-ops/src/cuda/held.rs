//! Hot rows on a GPU, and the work that is queued on them.

use std::sync::{Arc, OnceLock};

use super::device::{Shared, TOKENS_AT_ONCE};
use super::estimate::HeldEstimate;
use super::exchange::Exchange;
use super::ffn_steps::{DeviceFfn, FfnScratch, N_COUNTS, ScratchShape, Wanted, ffn};
use super::matrix::CudaMatrix;
use super::pending::CudaPending;
use super::queue::Address;
use super::stream::Memory;
use crate::error::OpError;
use crate::fast_device::{HeldFfn, HeldNeurons, HeldShape, HotRows, PendingFfn, RowPredictor};
use crate::ffn::{FfnCounts, FfnWeights};
use crate::gate_estimate::GateEstimate;
use crate::mask::NeuronIds;

/// From this share of firing neurons on, all rows are read in order: what a list saves of them is less
/// than what making it costs. A guess until it has been measured on a GPU.
const DENSE_FROM: f64 = 0.8;

/// Rows of some neurons on the device.
#[derive(Debug)]
pub(super) struct HeldRows {
    pub(super) shared: Arc<Shared>,
    gate: CudaMatrix,
    up: Option<CudaMatrix>,
    down: CudaMatrix,
    biases: [Option<Memory>; 2],
    /// Without matrices: biases and functions.
    settings: Settings,
    /// What they take on the device, without a predictor.
    bytes: u64,
    predictor: OnceLock<HeldEstimate>,
    dense: bool,
}

/// What a network is besides its matrices.
#[derive(Debug)]
struct Settings {
    gate_bias: Option<Vec<f32>>,
    up_bias: Option<Vec<f32>>,
    activation: crate::Activation,
    up_activation: Option<crate::Activation>,
}

impl HeldRows {
    /// Copies rows to the device, matrix by matrix.
    pub(super) fn copy(shared: &Arc<Shared>, rows: HotRows<'_>) -> Result<Self, OpError> {
        let HotRows { weights, ids, density } = rows;
        if weights.down_by_output.is_some() {
            return Err(OpError::DownByOutput { op: "FastDevice::hold" });
        }
        weights.gate.check_ids("FastDevice::hold", ids)?;
        let matrices = [Some(&weights.gate), weights.up.as_ref(), Some(&weights.down)];
        let pick = |bias: &Option<Vec<f32>>| -> Option<Vec<f32>> {
            let bias = bias.as_ref()?;
            Some(ids.as_slice().iter().map(|&id| bias[id as usize]).collect())
        };
        let settings = Settings {
            gate_bias: pick(&weights.gate_bias),
            up_bias: pick(&weights.up_bias),
            activation: weights.activation,
            up_activation: weights.up_activation,
        };
        let mut bytes = 0;
        for matrix in matrices.into_iter().flatten() {
            bytes += CudaMatrix::bytes(matrix, ids.len())?;
        }
        for bias in [&settings.gate_bias, &settings.up_bias].into_iter().flatten() {
            bytes += size_of_val(bias.as_slice()) as u64;
        }
        let (n_neurons, d_model) = (ids.len(), weights.d_model());
        shared.reserve(bytes, ScratchShape { n_neurons, d_model, n_tokens: TOKENS_AT_ONCE })?;
        let held = Reserved { shared, bytes: Some(bytes) };
        let failed = |error| shared.failed(error);
        let copy = |matrix| CudaMatrix::of_rows(&shared.stream, matrix, Some(ids)).map_err(failed);
        let bias = |bias: &Option<Vec<f32>>| -> Result<Option<Memory>, OpError> {
            let Some(bias) = bias else { return Ok(None) };
            let memory = shared.stream.memory(size_of_val(bias.as_slice())).map_err(failed)?;
            shared.stream.upload(bytemuck::cast_slice(bias), memory.address()).map_err(failed)?;
            Ok(Some(memory))
        };
        let rows = Self {
            shared: Arc::clone(shared),
            gate: copy(&weights.gate)?,
            up: weights.up.as_ref().map(copy).transpose()?,
            down: copy(&weights.down)?,
            biases: [bias(&settings.gate_bias)?, bias(&settings.up_bias)?],
            settings,
            bytes,
            predictor: OnceLock::new(),
            dense: density.is_some_and(|density| density >= DENSE_FROM),
        };
        held.keep();
        Ok(rows)
    }

    /// Copies the low-bit copy of the gate to the device.
    fn add_estimate(&self, estimate: &GateEstimate, margin: f32) -> Result<(), OpError> {
        let (n_neurons, d_model) = (self.n_neurons(), self.d_model());
        let found = [estimate.rows().n_rows(), estimate.rows().n_columns()];
        let (op, what) = ("HeldFfn::hold_predictor", "the predictor's rows");
        OpError::check_shape(op, what, &[n_neurons, d_model], &found)?;
        let bytes = HeldEstimate::bytes(estimate);
        let shared = &*self.shared;
        shared.reserve(bytes, ScratchShape { n_neurons, d_model, n_tokens: TOKENS_AT_ONCE })?;
        let reserved = Reserved { shared, bytes: Some(bytes) };
        let held = HeldEstimate::copy(&shared.stream, estimate, margin);
        let held = held.map_err(|error| shared.failed(error))?;
        // if there is one already, the memory is given back
        if self.predictor.set(held).is_ok() {
            reserved.keep();
        }
        Ok(())
    }

    fn size_bytes(&self) -> u64 {
        self.bytes + self.predictor.get().map_or(0, HeldEstimate::size_bytes)
    }

    fn device(&self) -> DeviceFfn {
        let bias = |at: usize| self.biases[at].as_ref().map_or(Address::NULL, Memory::address);
        DeviceFfn {
            gate: self.gate.rows(),
            up: self.up.as_ref().map(CudaMatrix::rows),
            down: self.down.rows(),
            gate_bias: bias(0),
            up_bias: bias(1),
            activation: self.settings.activation,
            up_activation: self.settings.up_activation,
        }
    }

    fn n_neurons(&self) -> usize {
        self.gate.rows().n_rows
    }

    fn d_model(&self) -> usize {
        self.gate.rows().layout.n_columns
    }

    /// What the steps do for a group of tokens.
    pub(super) fn counts(&self, lists: [u32; N_COUNTS], group: Group) -> FfnCounts {
        let [n_listed, n_picked, n_fired, fired, n_ran, ran] = lists.map(u64::from);
        let (n, n_tokens) = (self.n_neurons() as u64, group.n_tokens as u64);
        let candidates = if group.listed || group.predicted { n_listed } else { n };
        let picked = if group.predicted { n_picked } else { group.picked };
        let estimate = self.predictor.get().filter(|_| group.predicted);
        let drelu = self.up.is_some() && self.settings.up_activation.is_some();
        let (rows_up, rows_down, ran) = match (group.all, drelu) {
            (true, _) => (n, n, n * n_tokens),
            (false, true) => (n_fired, n_ran, ran),
            (false, false) => (n_fired, n_fired, fired),
        };
        let row_bytes = |matrix: &CudaMatrix| matrix.row_bytes() as u64;
        let bytes = candidates * row_bytes(&self.gate)
            + rows_up * self.up.as_ref().map_or(0, row_bytes)
            + rows_down * row_bytes(&self.down)
            + estimate.map_or(0, HeldEstimate::size_bytes);
        FfnCounts { fired, ran, bytes, picked, predictor_ns: 0 }
    }
}

impl Drop for HeldRows {
    fn drop(&mut self) {
        self.shared.give_back(self.size_bytes());
    }
}

/// Bytes that were taken of the budget, given back if the rows do not come.
struct Reserved<'a> {
    shared: &'a Shared,
    bytes: Option<u64>,
}

impl Reserved<'_> {
    fn keep(mut self) {
        self.bytes = None;
    }
}

impl Drop for Reserved<'_> {
    fn drop(&mut self) {
        if let Some(bytes) = self.bytes {
            self.shared.give_back(bytes);
        }
    }
}

/// Tokens that run together.
#[derive(Debug, Clone, Copy)]
pub(super) struct Group {
    n_tokens: usize,
    /// Whether all rows are computed.
    all: bool,
    /// Whether the host picked rows.
    listed: bool,
    /// Whether the device did.
    predicted: bool,
    /// Gates that are computed, summed over tokens.
    picked: u64,
}

/// What the trait's user holds.
#[derive(Debug)]
pub(super) struct CudaFfn {
    rows: Arc<HeldRows>,
}

impl CudaFfn {
    pub(super) fn new(rows: Arc<HeldRows>) -> Self {
        Self { rows }
    }

    fn check(&self, neurons: HeldNeurons<'_>, x: &[f32]) -> Result<usize, OpError> {
        let rows = &self.rows;
        let shape = HeldShape {
            device: &rows.shared.name,
            activation: rows.settings.activation,
            n_neurons: rows.n_neurons(),
            d_model: rows.d_model(),
            // a low-bit copy reads the input itself
            rank: rows.predictor.get().map(|_| 0),
        };
        shape.check(neurons, x)
    }

    /// Queues all groups of tokens.
    fn queue(
        &self,
        exchange: &mut Exchange,
        neurons: HeldNeurons<'_>,
        x: &[f32],
    ) -> candle_core::Result<Vec<Group>> {
        let (rows, d_model, n) = (&self.rows, self.rows.d_model(), self.rows.n_neurons());
        let stream = &rows.shared.stream;
        // one network after the other: they share scratch memory
        let ledger = rows.shared.ledger();
        let base = ledger.scratch.as_ref().map_or(Address::NULL, Memory::address);
        let (scratch, _) = FfnScratch::carve(base, ledger.shape);
        exchange.begin(stream, x, d_model)?;
        let places = match neurons {
            HeldNeurons::FiringOf(picks) => Some(exchange.write_picks(stream, picks, n)?),
            _ => None,
        };
        let estimate = match neurons {
            HeldNeurons::Predicted(_) => rows.predictor.get().map(HeldEstimate::device),
            _ => None,
        };
        if estimate.is_some() {
            exchange.write_norms(stream, x, d_model)?;
        }
        let all = matches!(neurons, HeldNeurons::All)
            || rows.dense && matches!(neurons, HeldNeurons::Firing);
        let mut groups = Vec::new();
        let n_all = x.len() / d_model;
        for (at, first) in (0..n_all).step_by(TOKENS_AT_ONCE).enumerate() {
            let n_tokens = TOKENS_AT_ONCE.min(n_all - first);
            let place = places.as_ref().map(|places| places[at]);
            exchange.send(stream, [first, n_tokens, d_model], &scratch)?;
            let wanted = match (place, &estimate) {
                (Some(place), _) => {
                    exchange.send_picks(stream, place, n, &scratch)?;
                    Wanted::Picked
                }
                (None, Some((estimate, margin))) => {
                    exchange.send_norms(stream, [first, n_tokens], &scratch)?;
                    Wanted::Estimated(estimate, *margin)
                }
                (None, None) if all => Wanted::All,
                (None, None) => Wanted::Firing,
            };
            ffn(stream, &rows.device(), wanted, n_tokens, &scratch)?;
            exchange.receive(stream, [first, n_tokens, d_model], &scratch)?;
            let picked = match neurons {
                HeldNeurons::FiringOf(picks) => {
                    picks[first..first + n_tokens].iter().map(NeuronIds::len).sum()
                }
                _ => n * n_tokens,
            };
            groups.push(Group {
                n_tokens,
                all,
                listed: place.is_some(),
                predicted: estimate.is_some(),
                picked: picked as u64,
            });
        }
        exchange.end(stream)?;
        drop(ledger);
        Ok(groups)
    }
}

impl HeldFfn for CudaFfn {
    fn n_neurons(&self) -> usize {
        self.rows.n_neurons()
    }

    fn d_model(&self) -> usize {
        self.rows.d_model()
    }

    fn size_bytes(&self) -> u64 {
        self.rows.size_bytes()
    }

    /// A low-bit copy of the gate; scores of a last layer round in the order of a CPU's kernels, which
    /// the CPU therefore computes itself.
    fn hold_predictor(&self, predictor: RowPredictor<'_>) -> Result<bool, OpError> {
        match predictor {
            RowPredictor::Estimated(estimate, margin) => {
                self.rows.add_estimate(estimate, margin).map(|()| true)
            }
            RowPredictor::Scored(..) => Ok(false),
        }
    }

    fn has_predictor(&self) -> bool {
        self.rows.predictor.get().is_some()
    }

    fn start(&self, neurons: HeldNeurons<'_>, x: &[f32]) -> Result<Box<dyn PendingFfn>, OpError> {
        self.check(neurons, x)?;
        let mut exchange = self.rows.shared.take_exchange()?;
        let groups = self.queue(&mut exchange, neurons, x);
        let groups = groups.map_err(|error| self.rows.shared.failed(error))?;
        let rows = Arc::clone(&self.rows);
        Ok(Box::new(CudaPending::new(rows, exchange, groups, x.len())))
    }

    fn read_back(&self) -> Result<FfnWeights, OpError> {
        let rows = &self.rows;
        let read = |matrix: &CudaMatrix| matrix.read_back(&rows.shared.stream);
        let up = rows.up.as_ref().map(read).transpose()?;
        let Settings { gate_bias, up_bias, activation, up_activation } = &rows.settings;
        FfnWeights::new(read(&rows.gate)?, up, read(&rows.down)?, *activation)?
            .with_biases(gate_bias.clone(), up_bias.clone())
            .map(|weights| weights.with_up_activation(*up_activation))
    }
}
