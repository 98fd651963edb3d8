//! Rows of weights in a device's memory.

use candle_core::Error;
use rayon::prelude::*;

use super::backend::{Backend, Block};
use super::row_layout::RowLayout;
use super::steps::DeviceRows;
use crate::{NeuronIds, NeuronMatrix, OpError};

/// Bytes of rows that are packed on the host at a time.
const STAGED_BYTES: usize = 32 << 20;

/// Some rows of a matrix on a device.
#[derive(Debug)]
pub(crate) struct DeviceMatrix<B: Backend> {
    block: B::Block,
    rows: DeviceRows,
}

impl<B: Backend> DeviceMatrix<B> {
    /// Bytes that so many rows of a matrix take.
    ///
    /// # Errors
    /// [`OpError::UnknownFormat`] if there are no kernels for its format.
    pub(crate) fn bytes(matrix: &NeuronMatrix, n_rows: usize) -> Result<u64, OpError> {
        Ok(layout(matrix)?.stride as u64 * n_rows as u64)
    }

    /// Copies all rows, or some.
    pub(crate) fn of_rows(
        backend: &B,
        matrix: &NeuronMatrix,
        ids: Option<&NeuronIds>,
    ) -> candle_core::Result<Self> {
        let layout = layout(matrix).map_err(Error::wrap)?;
        let n_rows = ids.map_or(matrix.n_neurons(), NeuronIds::len);
        let block = backend.block(n_rows * layout.stride)?;
        let rows_at_once = (STAGED_BYTES / layout.stride.max(1)).max(1);
        let mut staged = vec![0; rows_at_once.min(n_rows) * layout.stride];
        for first in (0..n_rows).step_by(rows_at_once) {
            let n = rows_at_once.min(n_rows - first);
            let staged = &mut staged[..n * layout.stride];
            // what fills up a row stays zero
            staged.par_chunks_exact_mut(layout.stride.max(1)).enumerate().for_each(
                |(at, bytes)| {
                    let row = ids.map_or(first + at, |ids| ids.as_slice()[first + at] as usize);
                    layout.pack(matrix.row(row), bytes);
                },
            );
            backend.upload(staged, block.address().offset(first * layout.stride))?;
        }
        let rows = DeviceRows { address: block.address(), layout, n_rows };
        Ok(Self { block, rows })
    }

    pub(crate) fn rows(&self) -> DeviceRows {
        self.rows
    }

    /// Bytes of a row.
    pub(crate) fn row_bytes(&self) -> usize {
        self.rows.layout.stride
    }

    /// A copy on the host.
    pub(crate) fn read_back(&self, backend: &B) -> Result<NeuronMatrix, OpError> {
        let RowLayout { format, n_columns, stride, .. } = self.rows.layout;
        let rows_at_once = (STAGED_BYTES / stride.max(1)).clamp(1, self.rows.n_rows.max(1));
        let mut staged = vec![0; rows_at_once * stride];
        NeuronMatrix::try_from_rows(format, self.rows.n_rows, n_columns, |row, bytes| {
            let at = row % rows_at_once * stride;
            if row % rows_at_once == 0 {
                let n_rows = rows_at_once.min(self.rows.n_rows - row);
                let from = self.block.address().offset(row * stride);
                backend.download(from, &mut staged[..n_rows * stride])?;
            }
            self.rows.layout.unpack(&staged[at..at + stride], bytes);
            Ok(())
        })
    }
}

/// f32 values on a device.
pub(crate) fn of_values<B: Backend>(backend: &B, values: &[f32]) -> candle_core::Result<B::Block> {
    let block = backend.block(size_of_val(values))?;
    backend.upload(bytemuck::cast_slice(values), block.address())?;
    Ok(block)
}

fn layout(matrix: &NeuronMatrix) -> Result<RowLayout, OpError> {
    RowLayout::new(matrix.format(), matrix.d_model()).ok_or_else(|| OpError::UnknownFormat {
        found: format!("{} on a GPU", matrix.format()),
        supported: "f32, f16, bf16, q8_0, q4_0",
    })
}
