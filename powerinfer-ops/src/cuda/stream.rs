//! A CUDA stream: kernels, memory and copies in the order in which they were asked for.
//!
//! Kernels get addresses, which the driver cannot check. That they lie within memory that lives long
//! enough is what the callers promise: they are the functions of `steps.rs` over memory that its
//! owner frees on the same stream, behind all that was queued before.
#![allow(unsafe_code, reason = "launches and memory that the host cannot see into")]

use std::collections::HashMap;
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use candle_core::cuda_backend::cudarc::driver::{
    CudaEvent, CudaFunction, CudaSlice, CudaStream, DevicePtr, LaunchConfig, PinnedHostSlice,
    PushKernelArg, result, sys,
};
use candle_core::cuda_backend::{CudaStorage, WrapErr};
use candle_core::{CudaDevice, Shape};

use super::backend::{Backend, Block, Pinned};
use super::queue::{Address, Arg, Launch, Queue};

/// The compiled kernels: file and PTX.
const PTX: [(&str, &str); 12] = [
    ("attention", include_str!(concat!(env!("OUT_DIR"), "/attention.ptx"))),
    ("compact", include_str!(concat!(env!("OUT_DIR"), "/compact.ptx"))),
    ("gate_estimate", include_str!(concat!(env!("OUT_DIR"), "/gate_estimate.ptx"))),
    ("norm", include_str!(concat!(env!("OUT_DIR"), "/norm.ptx"))),
    ("quantize", include_str!(concat!(env!("OUT_DIR"), "/quantize.ptx"))),
    ("residual", include_str!(concat!(env!("OUT_DIR"), "/residual.ptx"))),
    ("rotary", include_str!(concat!(env!("OUT_DIR"), "/rotary.ptx"))),
    ("sparse_axpy", include_str!(concat!(env!("OUT_DIR"), "/sparse_axpy.ptx"))),
    ("sparse_matvec", include_str!(concat!(env!("OUT_DIR"), "/sparse_matvec.ptx"))),
    ("tiled_axpy", include_str!(concat!(env!("OUT_DIR"), "/tiled_axpy.ptx"))),
    ("tiled_matvec", include_str!(concat!(env!("OUT_DIR"), "/tiled_matvec.ptx"))),
    ("token_norms", include_str!(concat!(env!("OUT_DIR"), "/token_norms.ptx"))),
];

/// What a GPU has to be able to: `ARCHITECTURE` of `build.rs`.
const LEAST_CAPABILITY: (i32, i32) = (8, 0);

/// A stream of a device, with the kernels that were loaded.
pub(crate) struct Stream {
    device: CudaDevice,
    stream: Arc<CudaStream>,
    /// For copies that do not wait for all of it; made when first asked for.
    aside: OnceLock<Arc<CudaStream>>,
    functions: Mutex<HashMap<String, CudaFunction>>,
}

/// Memory of the device; freed on its stream.
#[derive(Debug)]
pub(crate) struct Memory {
    slice: CudaSlice<u8>,
    address: Address,
}

/// Memory of the host that copies go to and from without the CPU's help.
#[derive(Debug)]
pub(crate) struct HostMemory {
    pinned: PinnedHostSlice<u8>,
    /// The last copy to or from it.
    copied: CudaEvent,
}

/// f32 values on the device that become a tensor of candle's.
#[derive(Debug)]
pub(crate) struct Tensor {
    slice: CudaSlice<f32>,
    address: Address,
    dims: [usize; 2],
}

impl Stream {
    /// Where a tensor's values begin.
    pub(crate) fn address_of(device: &CudaDevice, slice: &CudaSlice<f32>) -> Address {
        Address(slice.device_ptr(&device.cuda_stream()).0)
    }

    /// The stream that candle uses on a device.
    pub(crate) fn of(device: &CudaDevice) -> Self {
        let (functions, aside) = (Mutex::new(HashMap::new()), OnceLock::new());
        Self { stream: device.cuda_stream(), aside, device: device.clone(), functions }
    }

    fn aside(&self) -> candle_core::Result<&CudaStream> {
        if let Some(aside) = self.aside.get() {
            return Ok(aside);
        }
        let made = self.stream.context().new_stream().w()?;
        Ok(self.aside.get_or_init(|| made))
    }

    /// Bytes of the device's memory that are free, and all of them.
    pub(crate) fn free_bytes(&self) -> candle_core::Result<(u64, u64)> {
        let (free, total) = self.stream.context().mem_get_info().w()?;
        Ok((free as u64, total as u64))
    }

    /// What the device calls itself.
    pub(crate) fn device_name(&self) -> candle_core::Result<String> {
        self.stream.context().name().w()
    }

    /// Has the driver compile all kernels, or take them from its cache.
    pub(crate) fn load(&self) -> candle_core::Result<()> {
        let (major, minor) = self.stream.context().compute_capability().w()?;
        if (major, minor) < LEAST_CAPABILITY {
            let (least_major, least_minor) = LEAST_CAPABILITY;
            return Err(candle_core::Error::msg(format!(
                "compute capability {major}.{minor} where kernels need {least_major}.{least_minor}"
            )));
        }
        for (file, ptx) in PTX {
            // any kernel of a file stands for all
            let first = ptx.split(".entry ").nth(1).and_then(|rest| rest.split('(').next());
            self.load_function(file, first.unwrap_or(""))?;
        }
        Ok(())
    }

    /// Waits for all that was queued.
    pub(crate) fn synchronize(&self) -> candle_core::Result<()> {
        self.stream.synchronize().w()
    }

    fn copy_here(
        &self,
        stream: &CudaStream,
        from: Address,
        to: &mut HostMemory,
        range: Range<usize>,
    ) -> candle_core::Result<()> {
        self.stream.context().bind_to_thread().w()?;
        let bytes = &mut to.pinned.as_mut_slice().w()?[range];
        // SAFETY: `from` is memory of as many bytes, by the promise above. The host's memory is not
        // read, written or freed before the event that follows: its methods and `drop` wait for it.
        unsafe { result::memcpy_dtoh_async(bytes, from.0, stream.cu_stream()) }.w()?;
        to.copied.record(stream).w()
    }

    fn function(&self, launch: &Launch<'_>) -> candle_core::Result<CudaFunction> {
        let mut functions = self.functions.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(function) = functions.get(launch.kernel) {
            return Ok(function.clone());
        }
        let function = self.load_function(launch.file, launch.kernel)?;
        functions.insert(launch.kernel.to_owned(), function.clone());
        Ok(function)
    }

    fn load_function(&self, file: &str, kernel: &str) -> candle_core::Result<CudaFunction> {
        let ptx = PTX.iter().find(|(name, _)| *name == file).map_or("", |(_, ptx)| *ptx);
        let module = concat!("powerinfer-ops ", env!("CARGO_PKG_VERSION"), " ");
        let module = format!("{module}{file}");
        Ok(self.device.get_or_load_custom_func(kernel, &module, ptx)?.into_cuda_function())
    }
}

impl Queue for Stream {
    type Error = candle_core::Error;

    fn launch(&self, launch: &Launch<'_>) -> candle_core::Result<()> {
        let function = self.function(launch)?;
        let mut builder = self.stream.launch_builder(&function);
        for arg in launch.args {
            match arg {
                Arg::Address(address) => builder.arg(&address.0),
                Arg::Size(size) => builder.arg(size),
                Arg::Int(value) => builder.arg(value),
                Arg::Float(value) => builder.arg(value),
            };
        }
        let [x, y, z] = launch.grid;
        let grid_dim = (x, y, z);
        let block_dim = (launch.threads, 1, 1);
        let config = LaunchConfig { grid_dim, block_dim, shared_mem_bytes: 0 };
        // SAFETY: number and types of the arguments are the kernel's, which `testing/hostsim` runs
        // from the same list, and addresses lie in memory as above.
        unsafe { builder.launch(config) }.w()?;
        Ok(())
    }
}

impl Backend for Stream {
    type Block = Memory;
    type Pinned = HostMemory;
    type Event = CudaEvent;

    fn block(&self, n_bytes: usize) -> candle_core::Result<Memory> {
        // SAFETY: the memory is unset, and any byte is a byte.
        let slice = unsafe { self.stream.alloc::<u8>(n_bytes.max(1)) }.w()?;
        let (address, _) = slice.device_ptr(&self.stream);
        Ok(Memory { address: Address(address), slice })
    }

    fn pinned(&self, n_bytes: usize) -> candle_core::Result<HostMemory> {
        let context = self.stream.context();
        // SAFETY: as for `block`. Not write-combined, which is the default: the CPU reads it.
        let mut pinned = unsafe { context.alloc_pinned_with_flags::<u8>(n_bytes.max(1), 0) }.w()?;
        pinned.as_mut_slice().w()?.fill(0);
        Ok(HostMemory { pinned, copied: context.new_event(None).w()? })
    }

    fn event(&self) -> candle_core::Result<CudaEvent> {
        self.stream.context().new_event(Some(sys::CUevent_flags::CU_EVENT_DEFAULT)).w()
    }

    fn upload(&self, bytes: &[u8], to: Address) -> candle_core::Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        self.stream.context().bind_to_thread().w()?;
        // SAFETY: `to` is memory of as many bytes, by the promise above, and `bytes` outlives the copy,
        // which has ended when this returns.
        unsafe { result::memcpy_htod_async(to.0, bytes, self.stream.cu_stream()) }.w()?;
        self.synchronize()
    }

    fn download(&self, from: Address, bytes: &mut [u8]) -> candle_core::Result<()> {
        self.stream.context().bind_to_thread().w()?;
        // SAFETY: as for `upload`.
        unsafe { result::memcpy_dtoh_async(bytes, from.0, self.stream.cu_stream()) }.w()?;
        self.synchronize()
    }

    fn send(&self, from: &HostMemory, range: Range<usize>, to: Address) -> candle_core::Result<()> {
        self.stream.context().bind_to_thread().w()?;
        let bytes = &from.pinned.as_slice().w()?[range];
        // SAFETY: `to` is memory of as many bytes, by the promise above. The host's memory is not
        // written and not freed before the event that follows: `bytes_mut` and `drop` wait for it.
        unsafe { result::memcpy_htod_async(to.0, bytes, self.stream.cu_stream()) }.w()?;
        from.copied.record(&self.stream).w()
    }

    fn receive(
        &self,
        from: Address,
        to: &mut HostMemory,
        range: Range<usize>,
    ) -> candle_core::Result<()> {
        self.copy_here(&self.stream, from, to, range)
    }

    fn receive_after(
        &self,
        event: &CudaEvent,
        from: Address,
        to: &mut HostMemory,
        range: Range<usize>,
    ) -> candle_core::Result<()> {
        // one event says when the last copy has ended, and the copies before may be on the other stream
        to.copied.synchronize().w()?;
        let aside = self.aside()?;
        aside.wait(event).w()?;
        self.copy_here(aside, from, to, range)
    }

    fn record(&self, event: &CudaEvent) -> candle_core::Result<()> {
        event.record(&self.stream).w()
    }

    fn elapsed_ns(&self, from: &CudaEvent, to: &CudaEvent) -> candle_core::Result<u64> {
        Ok((f64::from(from.elapsed_ms(to).w()?) * 1e6) as u64)
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stream").field("device", &self.device).finish_non_exhaustive()
    }
}

impl Block for Memory {
    fn address(&self) -> Address {
        self.address
    }

    fn n_bytes(&self) -> usize {
        self.slice.len()
    }
}

impl Tensor {
    pub(crate) fn zeros(stream: &Stream, dims: [usize; 2]) -> candle_core::Result<Self> {
        let slice = stream.stream.alloc_zeros::<f32>((dims[0] * dims[1]).max(1)).w()?;
        Ok(Self { address: Stream::address_of(&stream.device, &slice), slice, dims })
    }

    pub(crate) fn address(&self) -> Address {
        self.address
    }

    /// The tensor as an operator returns it.
    pub(crate) fn into_storage(self, device: &CudaDevice) -> (CudaStorage, Shape) {
        let [n_rows, n_columns] = self.dims;
        let storage = CudaStorage::wrap_cuda_slice(self.slice, device.clone());
        (storage, Shape::from((n_rows, n_columns)))
    }
}

impl Pinned for HostMemory {
    fn n_bytes(&self) -> usize {
        self.pinned.len()
    }

    fn bytes(&mut self) -> candle_core::Result<&[u8]> {
        self.copied.synchronize().w()?;
        self.pinned.as_slice().w()
    }

    fn bytes_mut(&mut self) -> candle_core::Result<&mut [u8]> {
        self.copied.synchronize().w()?;
        self.pinned.as_mut_slice().w()
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        // a copy that is under way must not find the memory gone; where the device is lost there is none
        let _ = self.copied.synchronize();
    }
}
