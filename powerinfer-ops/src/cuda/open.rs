//! Opens a GPU as a fast device.

use candle_core::Device;

use super::device::Gpu;
use super::stream::Stream;
use crate::error::OpError;

/// Of the memory that is free where no budget is given, what is left to the driver, to kernels and to
/// others: a sixteenth.
const LEFT_SHARE: u64 = 16;

/// Opens the GPU `index` and compiles the kernels for it, which takes the driver seconds the first time: it
/// fails here and not once a model is loaded if the driver does not know their PTX. The budget is what is asked for or what is free, whichever is less.
pub(crate) fn open(index: usize, budget_bytes: Option<u64>) -> Result<Gpu<Stream>, OpError> {
    let name = format!("cuda:{index}");
    let failed = |error| OpError::DeviceFailed { device: name.clone(), source: Box::new(error) };
    let device = Device::new_cuda_with_stream(index).map_err(failed)?;
    let stream = Stream::of(device.as_cuda_device().map_err(failed)?);
    stream.load().map_err(failed)?;
    let (free, total) = stream.free_bytes().map_err(failed)?;
    let budget = budget_bytes.map_or(free - free / LEFT_SHARE, |asked| asked.min(free));
    let description = stream.device_name().map_err(failed)?;
    let description = format!("{name}, {description}, {} MiB", total >> 20);
    Ok(Gpu::new(stream, name, description, budget))
}
