//! The candle operators on tensors that lie on a GPU.
//!
//! A matrix is copied to the GPU when an operator first meets it there, and stays. Masks come from the
//! host, so each call sends its lists; what decodes tokens is the sequence of `ffn_steps.rs`, which
//! makes its lists on the device.

use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::CudaStorage;
use candle_core::{CudaDevice, Layout, Shape};

use super::backend::{Backend, Block};
use super::queue::Address;
use super::steps::{
    Addends, DeviceInput, Finish, Numbers, Parts, Rows, Values, axpy, matvec, n_blocks, quantize,
};
use super::stream::{Memory, Stream, Tensor};
use crate::error::OpError;
use crate::mask::ActivationMask;
use crate::matrix::NeuronMatrix;

/// The operand of an operator: `[n_tokens, n_columns]` f32 on a GPU.
#[derive(Debug)]
pub(crate) struct CudaRows {
    device: CudaDevice,
    address: Address,
    n_tokens: usize,
    n_columns: usize,
}

impl CudaRows {
    /// The operand as candle hands it to an operator.
    pub(crate) fn of(
        op: &'static str,
        what: &'static str,
        storage: &CudaStorage,
        layout: &Layout,
        n_columns: usize,
    ) -> candle_core::Result<Self> {
        let (n_tokens, found) = layout.shape().dims2()?;
        if found != n_columns {
            let (expected, found) = (vec![n_tokens, n_columns], vec![n_tokens, found]);
            return Err(candle_core::Error::wrap(OpError::Shape { op, what, expected, found }));
        }
        let Some((first, _)) = layout.contiguous_offsets() else {
            let strides = layout.stride().to_vec();
            return Err(candle_core::Error::wrap(OpError::NotContiguous { op, what, strides }));
        };
        let device = storage.device().clone();
        let address = Stream::address_of(&device, storage.as_cuda_slice::<f32>()?);
        Ok(Self { address: address.offset(first * size_of::<f32>()), device, n_tokens, n_columns })
    }

    /// Tokens.
    pub(crate) fn n_tokens(&self) -> usize {
        self.n_tokens
    }

    /// The tokens with memory for their rounded form, which is filled if it will be read.
    fn input(&self, stream: &Stream, rounded: bool) -> candle_core::Result<(DeviceInput, Memory)> {
        let blocks = if rounded { self.n_tokens * n_blocks(self.n_columns) } else { 0 };
        let memory = stream.block(blocks * 40 + self.n_tokens * 4)?;
        let at = |bytes: usize| memory.address().offset(bytes);
        let numbers = Numbers { numbers: at(0), scales: at(blocks * 32), norms: at(blocks * 40) };
        let (n_columns, n_tokens) = (self.n_columns, self.n_tokens);
        let input = DeviceInput { values: self.address, numbers, n_columns, n_tokens };
        if rounded && n_tokens > 0 {
            quantize(stream, &input, Address::NULL)?;
        }
        Ok((input, memory))
    }
}

/// One of the tokens.
fn token(input: &DeviceInput, token: usize) -> DeviceInput {
    let (n_columns, blocks) = (input.n_columns, n_blocks(input.n_columns));
    let numbers = Numbers {
        numbers: input.numbers.numbers.offset(token * blocks * 32),
        scales: input.numbers.scales.offset(token * blocks * 8),
        norms: input.numbers.norms.offset(token * 4),
    };
    DeviceInput {
        values: input.values.offset(token * n_columns * 4),
        numbers,
        n_tokens: 1,
        ..*input
    }
}

/// The lists of a mask on the device, each with what `sparse_axpy` needs besides.
struct Lists {
    memory: Memory,
    /// u32 of a token: the count, the beginnings of parts, the ids.
    stride: usize,
}

impl Lists {
    fn of(stream: &Stream, mask: &ActivationMask) -> candle_core::Result<Self> {
        let stride = 1 + (Parts::MOST + 1) + mask.n_neurons();
        let mut values = vec![0u32; mask.n_tokens() * stride];
        let parts = Parts::of(mask.n_neurons());
        for (t, values) in values.chunks_exact_mut(stride).enumerate() {
            let ids = mask.ids(t);
            let ids = ids.as_slice();
            values[0] = ids.len() as u32;
            for part in 0..=parts.n {
                let before = ids.partition_point(|&id| (id as usize) < part * parts.len);
                values[1 + part] = before as u32;
            }
            values[2 + Parts::MOST..][..ids.len()].copy_from_slice(ids);
        }
        let memory = stream.block(size_of_val(values.as_slice()))?;
        stream.upload(bytemuck::cast_slice(&values), memory.address())?;
        Ok(Self { memory, stride })
    }

    fn rows(&self, token: usize) -> Rows {
        let count = self.memory.address().offset(token * self.stride * 4);
        Rows::Listed { ids: count.offset((2 + Parts::MOST) * 4), count }
    }

    fn starts(&self, token: usize) -> Address {
        self.memory.address().offset((token * self.stride + 1) * 4)
    }
}

/// [`sparse_matvec`](crate::sparse_matvec) on a GPU.
pub(crate) fn sparse_matvec(
    w: &NeuronMatrix,
    mask: &ActivationMask,
    x: &CudaRows,
) -> candle_core::Result<(CudaStorage, Shape)> {
    let on_device = w.device_copy.on(&x.device, w)?;
    let (stream, weights) = (&*on_device.stream, on_device.matrix.rows());
    let (input, _numbers) = x.input(stream, weights.layout.takes_numbers())?;
    let (lists, out) =
        (Lists::of(stream, mask)?, Tensor::zeros(stream, [x.n_tokens, w.n_neurons()])?);
    for t in 0..x.n_tokens {
        let address = out.address().offset(t * w.n_neurons() * 4);
        let values = Values { address, stride: w.n_neurons(), by_row: true };
        matvec(stream, &weights, lists.rows(t), &token(&input, t), Finish::NOTHING, values)?;
    }
    Ok(out.into_storage(&x.device))
}

/// [`sparse_axpy`](crate::sparse_axpy) on a GPU.
pub(crate) fn sparse_axpy(
    w: &NeuronMatrix,
    mask: &ActivationMask,
    h: &CudaRows,
) -> candle_core::Result<(CudaStorage, Shape)> {
    let on_device = w.device_copy.on(&h.device, w)?;
    let (stream, weights) = (&*on_device.stream, on_device.matrix.rows());
    let (lists, out) =
        (Lists::of(stream, mask)?, Tensor::zeros(stream, [h.n_tokens, w.d_model()])?);
    let sums = stream.block(Parts::of(w.n_neurons()).sums_bytes(1, w.d_model()))?;
    for t in 0..h.n_tokens {
        let address = h.address.offset(t * h.n_columns * 4);
        let scales = Values { address, stride: h.n_columns, by_row: true };
        let (rows, starts) = (lists.rows(t), lists.starts(t));
        let addends = Addends { rows, starts, scales, n_tokens: 1 };
        let to = [Address::NULL, out.address().offset(t * w.d_model() * 4)];
        axpy(stream, &weights, &addends, sums.address(), to)?;
    }
    Ok(out.into_storage(&h.device))
}

/// [`linear`](crate::linear) on a GPU.
pub(crate) fn linear(
    w: &NeuronMatrix,
    bias: Option<&[f32]>,
    x: &CudaRows,
) -> candle_core::Result<(CudaStorage, Shape)> {
    let on_device = w.device_copy.on(&x.device, w)?;
    let (stream, weights) = (&*on_device.stream, on_device.matrix.rows());
    let (input, _numbers) = x.input(stream, weights.layout.takes_numbers())?;
    let out = Tensor::zeros(stream, [x.n_tokens, w.n_neurons()])?;
    let bias_memory = stream.block(bias.map_or(0, size_of_val))?;
    let mut finish = Finish::NOTHING;
    if let Some(bias) = bias {
        stream.upload(bytemuck::cast_slice(bias), bias_memory.address())?;
        finish.bias = bias_memory.address();
    }
    if x.n_tokens > 0 {
        let values = Values { address: out.address(), stride: w.n_neurons(), by_row: false };
        matvec(stream, &weights, Rows::All, &input, finish, values)?;
    }
    Ok(out.into_storage(&x.device))
}
