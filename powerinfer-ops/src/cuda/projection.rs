//! A matrix with its bias in a device's memory: projections, and the last matrix of a head.

use candle_core::Result;

use super::backend::{Backend, Block};
use super::matrix::{DeviceMatrix, of_values};
use super::queue::Address;
use super::steps::{DeviceInput, Finish, Rows, Values, matvec};
use crate::{DensePart, NeuronMatrix, OpError};

/// All rows of a matrix, and what is added to their products.
#[derive(Debug)]
pub(crate) struct Projection<B: Backend> {
    matrix: DeviceMatrix<B>,
    bias: Option<B::Block>,
}

impl<B: Backend> Projection<B> {
    /// Bytes that it takes.
    pub(crate) fn bytes(part: DensePart<'_>) -> std::result::Result<u64, OpError> {
        let bias = part.bias.map_or(0, size_of_val) as u64;
        Ok(bias + DeviceMatrix::<B>::bytes(part.weights, part.weights.n_neurons())?)
    }

    pub(crate) fn copy(backend: &B, part: DensePart<'_>) -> Result<Self> {
        let matrix = DeviceMatrix::of_rows(backend, part.weights, None)?;
        let bias = part.bias.map(|bias| of_values(backend, bias)).transpose()?;
        Ok(Self { matrix, bias })
    }

    /// A matrix without a bias.
    pub(crate) fn plain(weights: &NeuronMatrix) -> DensePart<'_> {
        DensePart { weights, bias: None }
    }

    /// Values of a token that it reads.
    pub(crate) fn n_in(&self) -> usize {
        self.matrix.rows().layout.n_columns
    }

    /// Values of a token that it gives.
    pub(crate) fn n_out(&self) -> usize {
        self.matrix.rows().n_rows
    }

    /// Whether its input has to be rounded first.
    pub(crate) fn takes_numbers(&self) -> bool {
        self.matrix.rows().layout.takes_numbers()
    }

    /// `out` `[n_tokens, n_out]` of the tokens `x`, which have been rounded if that is asked for.
    pub(crate) fn run(&self, backend: &B, x: &DeviceInput, out: Address) -> Result<()> {
        let bias = self.bias.as_ref().map_or(Address::NULL, Block::address);
        let out = Values { address: out, stride: self.n_out(), by_row: false };
        matvec(backend, &self.matrix.rows(), Rows::All, x, Finish { bias, ..Finish::NOTHING }, out)
    }
}
