//! A predictor in a device's memory.

use super::backend::{Backend, Block};
use super::estimate::HeldEstimate;
use super::matrix::{DeviceMatrix, of_values};
use super::mlp_steps::DeviceMlp;
use super::queue::Address;
use crate::{Activation, MlpLayers, OpError, RowPredictor};

/// What picks neurons on the device.
#[derive(Debug)]
pub(crate) enum HeldPredictor<B: Backend> {
    Estimated(HeldEstimate<B>),
    Scored(HeldMlp<B>),
}

/// Two layers.
#[derive(Debug)]
pub(crate) struct HeldMlp<B: Backend> {
    first: DeviceMatrix<B>,
    bias: Option<B::Block>,
    pub(crate) reads_residual: bool,
    activation: Option<Activation>,
    rows: DeviceMatrix<B>,
    threshold: f32,
    bytes: u64,
}

impl<B: Backend> HeldPredictor<B> {
    /// Bytes that it takes.
    ///
    /// # Errors
    /// [`OpError::UnknownFormat`] if there are no kernels for a format of its layers.
    pub(crate) fn bytes(predictor: RowPredictor<'_>) -> Result<u64, OpError> {
        match predictor {
            RowPredictor::Estimated(estimate, _) => Ok(HeldEstimate::<B>::bytes(estimate)),
            RowPredictor::Scored(MlpLayers { first, rows, .. }) => {
                let bias = first.bias.map_or(0, size_of_val) as u64;
                let first = DeviceMatrix::<B>::bytes(first.weights, first.weights.n_neurons())?;
                Ok(first + bias + DeviceMatrix::<B>::bytes(rows, rows.n_neurons())?)
            }
        }
    }

    pub(crate) fn copy(backend: &B, predictor: RowPredictor<'_>) -> candle_core::Result<Self> {
        Ok(match predictor {
            RowPredictor::Estimated(estimate, margin) => {
                Self::Estimated(HeldEstimate::copy(backend, estimate, margin)?)
            }
            RowPredictor::Scored(layers) => Self::Scored(HeldMlp {
                first: DeviceMatrix::of_rows(backend, layers.first.weights, None)?,
                bias: layers.first.bias.map(|bias| of_values(backend, bias)).transpose()?,
                reads_residual: layers.reads_residual,
                activation: layers.activation,
                rows: DeviceMatrix::of_rows(backend, layers.rows, None)?,
                threshold: layers.threshold,
                bytes: Self::bytes(predictor).map_err(candle_core::Error::wrap)?,
            }),
        })
    }

    pub(crate) fn size_bytes(&self) -> u64 {
        match self {
            Self::Estimated(estimate) => estimate.size_bytes(),
            Self::Scored(mlp) => mlp.bytes,
        }
    }

    pub(crate) fn reads_residual(&self) -> bool {
        matches!(self, Self::Scored(HeldMlp { reads_residual: true, .. }))
    }
}

impl<B: Backend> HeldMlp<B> {
    pub(crate) fn device(&self) -> DeviceMlp {
        DeviceMlp {
            first: self.first.rows(),
            bias: self.bias.as_ref().map_or(Address::NULL, Block::address),
            activation: self.activation,
            rows: self.rows.rows(),
            threshold: self.threshold,
        }
    }
}
