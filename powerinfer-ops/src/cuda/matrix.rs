//! Rows of weights in a GPU's memory.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use candle_core::CudaDevice;
use candle_core::cuda_backend::DeviceId;

use super::row_layout::RowLayout;
use super::steps::DeviceRows;
use super::stream::{Memory, Stream};
use crate::error::OpError;
use crate::mask::NeuronIds;
use crate::matrix::NeuronMatrix;

/// Bytes of rows that are packed on the host at a time.
const STAGED_BYTES: usize = 32 << 20;

/// Some rows of a matrix on the device.
#[derive(Debug)]
pub(super) struct CudaMatrix {
    memory: Memory,
    rows: DeviceRows,
}

impl CudaMatrix {
    /// Bytes that so many rows of a matrix take.
    ///
    /// # Errors
    /// [`OpError::UnknownFormat`] if there are no kernels for its format.
    pub(super) fn bytes(matrix: &NeuronMatrix, n_rows: usize) -> Result<u64, OpError> {
        Ok(layout(matrix)?.stride as u64 * n_rows as u64)
    }

    /// Copies all rows, or some.
    pub(super) fn of_rows(
        stream: &Stream,
        matrix: &NeuronMatrix,
        ids: Option<&NeuronIds>,
    ) -> candle_core::Result<Self> {
        let layout = layout(matrix).map_err(candle_core::Error::wrap)?;
        let n_rows = ids.map_or(matrix.n_neurons(), NeuronIds::len);
        let memory = stream.memory(n_rows * layout.stride)?;
        let rows_at_once = (STAGED_BYTES / layout.stride.max(1)).max(1);
        let mut staged = Vec::new();
        for first in (0..n_rows).step_by(rows_at_once) {
            let n = rows_at_once.min(n_rows - first);
            staged.clear();
            staged.resize(n * layout.stride, 0);
            for (at, bytes) in staged.chunks_exact_mut(layout.stride.max(1)).enumerate() {
                let row = ids.map_or(first + at, |ids| ids.as_slice()[first + at] as usize);
                layout.pack(matrix.row(row), bytes);
            }
            stream.upload(&staged, memory.address().offset(first * layout.stride))?;
        }
        let rows = DeviceRows { address: memory.address(), layout, n_rows };
        Ok(Self { memory, rows })
    }

    pub(super) fn rows(&self) -> DeviceRows {
        self.rows
    }

    /// Bytes of a row.
    pub(super) fn row_bytes(&self) -> usize {
        self.rows.layout.stride
    }

    /// A copy on the host.
    pub(super) fn read_back(&self, stream: &Stream) -> Result<NeuronMatrix, OpError> {
        let RowLayout { format, n_columns, stride, .. } = self.rows.layout;
        let mut packed = vec![0; stride];
        NeuronMatrix::try_from_rows(format, self.rows.n_rows, n_columns, |row, bytes| {
            stream.download(self.memory.address().offset(row * stride), &mut packed)?;
            self.rows.layout.unpack(&packed, bytes);
            Ok(())
        })
    }
}

fn layout(matrix: &NeuronMatrix) -> Result<RowLayout, OpError> {
    RowLayout::new(matrix.format(), matrix.d_model()).ok_or_else(|| OpError::UnknownFormat {
        found: format!("{} on a GPU", matrix.format()),
        supported: "f32, f16, bf16, q8_0, q4_0",
    })
}

/// The copy of a matrix on the device that an operator met it on last.
#[derive(Clone, Default)]
pub(crate) struct DeviceCopy(Arc<Mutex<Option<OnDevice>>>);

/// A whole matrix and the stream that it is used on.
#[derive(Debug, Clone)]
pub(super) struct OnDevice {
    device: DeviceId,
    pub(super) stream: Arc<Stream>,
    pub(super) matrix: Arc<CudaMatrix>,
}

impl DeviceCopy {
    /// The copy, made if there is none on that device yet.
    pub(super) fn on(
        &self,
        device: &CudaDevice,
        matrix: &NeuronMatrix,
    ) -> candle_core::Result<OnDevice> {
        let mut copy = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(copy) = copy.as_ref().filter(|copy| copy.device == device.id()) {
            return Ok(copy.clone());
        }
        let stream = Arc::new(Stream::of(device));
        let matrix = Arc::new(CudaMatrix::of_rows(&stream, matrix, None)?);
        Ok(copy.insert(OnDevice { device: device.id(), stream, matrix }).clone())
    }
}

impl fmt::Debug for DeviceCopy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("DeviceCopy")
    }
}
