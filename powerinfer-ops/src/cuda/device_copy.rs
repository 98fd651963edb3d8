//! Matrices that candle's operators meet on a GPU.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use candle_core::CudaDevice;
use candle_core::cuda_backend::DeviceId;

use super::matrix::DeviceMatrix;
use super::stream::Stream;
use crate::matrix::NeuronMatrix;

/// The copy of a matrix on the device that an operator met it on last.
#[derive(Clone, Default)]
pub(crate) struct DeviceCopy(Arc<Mutex<Option<OnDevice>>>);

/// A whole matrix and the stream that it is used on.
#[derive(Debug, Clone)]
pub(super) struct OnDevice {
    device: DeviceId,
    pub(super) stream: Arc<Stream>,
    pub(super) matrix: Arc<DeviceMatrix<Stream>>,
}

impl DeviceCopy {
    /// The copy, made if there is none on that device yet.
    pub(super) fn on(
        &self,
        device: &CudaDevice,
        matrix: &NeuronMatrix,
    ) -> candle_core::Result<OnDevice> {
        let of_device = |copy: &Option<OnDevice>| {
            copy.as_ref().filter(|copy| copy.device == device.id()).cloned()
        };
        if let Some(copy) = of_device(&self.lock()) {
            return Ok(copy);
        }
        // not under the lock: rows are packed by a pool, whose threads may come here meanwhile
        let stream = Arc::new(Stream::of(device));
        let matrix = Arc::new(DeviceMatrix::of_rows(&*stream, matrix, None)?);
        let mut copy = self.lock();
        let made = OnDevice { device: device.id(), stream, matrix };
        Ok(of_device(&copy).unwrap_or_else(|| copy.insert(made).clone()))
    }

    fn lock(&self) -> MutexGuard<'_, Option<OnDevice>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for DeviceCopy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("DeviceCopy")
    }
}
