//! Products of dense matrices, by candle, on slices.

use candle_core::{Device, Tensor};

use crate::error::Result;

/// A matrix `[rows, columns]` in a slice, and whether it is meant transposed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Dense<'a> {
    values: &'a [f32],
    shape: (usize, usize),
    transposed: bool,
}

impl<'a> Dense<'a> {
    pub(crate) fn new(values: &'a [f32], rows: usize, columns: usize) -> Self {
        Self { values, shape: (rows, columns), transposed: false }
    }

    pub(crate) fn t(mut self) -> Self {
        self.transposed = !self.transposed;
        self
    }

    /// The product, row by row. Runs on the current pool; the order in which an element is summed
    /// does not depend on who computes it.
    pub(crate) fn matmul(self, other: Dense<'_>) -> Result<Vec<f32>> {
        Ok(self.tensor()?.matmul(&other.tensor()?)?.flatten_all()?.to_vec1()?)
    }

    fn tensor(self) -> Result<Tensor> {
        let tensor = Tensor::from_slice(self.values, self.shape, &Device::Cpu)?;
        Ok(if self.transposed { tensor.t()? } else { tensor })
    }
}
