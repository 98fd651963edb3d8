//! Hot rows on a device.

use std::sync::{Arc, OnceLock};

use super::backend::{Backend, Block};
use super::device::Shared;
use super::ffn_steps::{DeviceFfn, N_COUNTS};
use super::held_predictor::HeldPredictor;
use super::matrix::{DeviceMatrix, of_values};
use super::network::Group;
use super::queue::Address;
use super::scratch::Needs;
use crate::check::{check_below, check_shape};
use crate::{Activation, FfnCounts, FfnWeights, HotRows, OpError, RowPredictor};

/// From this share of firing neurons on, all rows are read in order: what a list saves of them is less
/// than what making it costs. A guess until it has been measured on a GPU.
const DENSE_FROM: f64 = 0.8;

/// Rows of some neurons on the device.
#[derive(Debug)]
pub(crate) struct HeldRows<B: Backend> {
    pub(crate) shared: Arc<Shared<B>>,
    gate: DeviceMatrix<B>,
    up: Option<DeviceMatrix<B>>,
    down: DeviceMatrix<B>,
    biases: [Option<B::Block>; 2],
    /// Without matrices: biases and functions.
    pub(crate) settings: Settings,
    /// What they take on the device, without a predictor.
    bytes: u64,
    pub(crate) predictor: OnceLock<HeldPredictor<B>>,
    /// `[d_model]`, added once for a network whose output stays on the device.
    down_bias: OnceLock<B::Block>,
    /// Whether all rows are read wherever it changes nothing.
    pub(crate) dense: bool,
}

/// What a network is besides its matrices.
#[derive(Debug)]
pub(crate) struct Settings {
    gate_bias: Option<Vec<f32>>,
    up_bias: Option<Vec<f32>>,
    pub(crate) activation: Activation,
    up_activation: Option<Activation>,
}

impl<B: Backend> HeldRows<B> {
    /// Copies rows to the device, matrix by matrix.
    pub(crate) fn copy(shared: &Arc<Shared<B>>, rows: HotRows<'_>) -> Result<Self, OpError> {
        let HotRows { weights, ids, density } = rows;
        if weights.down_by_output.is_some() {
            return Err(OpError::DownByOutput { op: "FastDevice::hold" });
        }
        check_below("FastDevice::hold", ids, weights.n_neurons())?;
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
            bytes += DeviceMatrix::<B>::bytes(matrix, ids.len())?;
        }
        for bias in [&settings.gate_bias, &settings.up_bias].into_iter().flatten() {
            bytes += size_of_val(bias.as_slice()) as u64;
        }
        let needs = Needs::of_network(ids.len(), weights.d_model(), 0);
        let reserved = shared.reserve(bytes, needs)?;
        let (backend, failed) = (&shared.backend, |error| shared.failed(error));
        let copy = |matrix| DeviceMatrix::of_rows(backend, matrix, Some(ids)).map_err(failed);
        let bias = |bias: &Option<Vec<f32>>| {
            bias.as_deref().map(|bias| of_values(backend, bias)).transpose().map_err(failed)
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
            down_bias: OnceLock::new(),
            dense: density.is_some_and(|density| density >= DENSE_FROM),
        };
        reserved.keep();
        Ok(rows)
    }

    /// Copies a predictor to the device.
    pub(crate) fn add_predictor(&self, predictor: RowPredictor<'_>) -> Result<(), OpError> {
        let (n_neurons, d_model) = (self.n_neurons(), self.d_model());
        predictor.check_shape(n_neurons, d_model)?;
        let shared = &*self.shared;
        let bytes = HeldPredictor::<B>::bytes(predictor)?;
        let needs = Needs::of_network(n_neurons, d_model, predictor.rank());
        let reserved = shared.reserve(bytes, needs)?;
        let held = HeldPredictor::copy(&shared.backend, predictor);
        let held = held.map_err(|error| shared.failed(error))?;
        // if there is one already, the memory is given back
        if self.predictor.set(held).is_ok() {
            reserved.keep();
        }
        Ok(())
    }

    /// Copies the bias of down to the device.
    pub(crate) fn add_down_bias(&self, bias: &[f32]) -> Result<(), OpError> {
        check_shape(
            "HeldFfn::hold_down_bias",
            "the bias of down",
            &[self.d_model()],
            &[bias.len()],
        )?;
        let shared = &*self.shared;
        let reserved = shared.reserve(size_of_val(bias) as u64, Needs::default())?;
        let block = of_values(&shared.backend, bias).map_err(|error| shared.failed(error))?;
        if self.down_bias.set(block).is_ok() {
            reserved.keep();
        }
        Ok(())
    }

    /// Where it lies, or null.
    pub(crate) fn down_bias(&self) -> Address {
        self.down_bias.get().map_or(Address::NULL, Block::address)
    }

    pub(crate) fn size_bytes(&self) -> u64 {
        self.bytes
            + self.predictor.get().map_or(0, HeldPredictor::size_bytes)
            + self.down_bias.get().map_or(0, |bias| bias.n_bytes() as u64)
    }

    pub(crate) fn device(&self) -> DeviceFfn {
        let bias = |at: usize| self.biases[at].as_ref().map_or(Address::NULL, Block::address);
        DeviceFfn {
            gate: self.gate.rows(),
            up: self.up.as_ref().map(DeviceMatrix::rows),
            down: self.down.rows(),
            gate_bias: bias(0),
            up_bias: bias(1),
            activation: self.settings.activation,
            up_activation: self.settings.up_activation,
        }
    }

    pub(crate) fn n_neurons(&self) -> usize {
        self.gate.rows().n_rows
    }

    pub(crate) fn d_model(&self) -> usize {
        self.gate.rows().layout.n_columns
    }

    /// Adds what the steps did for a group of tokens.
    pub(crate) fn count(&self, lists: [u32; N_COUNTS], group: Group, counts: &mut FfnCounts) {
        let [n_listed, n_picked, n_fired, fired, n_ran, ran] = lists.map(u64::from);
        let (n, n_tokens) = (self.n_neurons() as u64, group.n_tokens as u64);
        let candidates = if group.listed || group.predicted { n_listed } else { n };
        let picked = if group.predicted { n_picked } else { group.picked };
        let predictor = self.predictor.get().filter(|_| group.predicted);
        let drelu = self.up.is_some() && self.settings.up_activation.is_some();
        let (rows_up, rows_down, ran) = match (group.all, drelu) {
            (true, _) => (n, n, n * n_tokens),
            (false, true) => (n_fired, n_ran, ran),
            (false, false) => (n_fired, n_fired, fired),
        };
        let row_bytes = |matrix: &DeviceMatrix<B>| matrix.row_bytes() as u64;
        counts.bytes += candidates * row_bytes(&self.gate)
            + rows_up * self.up.as_ref().map_or(0, row_bytes)
            + rows_down * row_bytes(&self.down)
            + predictor.map_or(0, HeldPredictor::size_bytes);
        counts.fired += fired;
        counts.ran += ran;
        counts.picked += picked;
    }

    /// A copy on the host.
    pub(crate) fn read_back(&self) -> Result<FfnWeights, OpError> {
        let read = |matrix: &DeviceMatrix<B>| matrix.read_back(&self.shared.backend);
        let up = self.up.as_ref().map(read).transpose()?;
        let Settings { gate_bias, up_bias, activation, up_activation } = &self.settings;
        FfnWeights::new(read(&self.gate)?, up, read(&self.down)?, *activation)?
            .with_biases(gate_bias.clone(), up_bias.clone())
            .map(|weights| weights.with_up_activation(*up_activation))
    }
}

impl<B: Backend> Drop for HeldRows<B> {
    fn drop(&mut self) {
        self.shared.give_back(self.size_bytes());
    }
}
