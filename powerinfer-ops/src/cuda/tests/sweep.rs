//! How fast the operators are, beside what a GPU can copy and what cuBLAS needs for the dense product.
//!
//! Prints one JSON object a line. Matrices are rotated, so that no call finds its rows in a cache.

use candle_core::{DType, Device, Tensor};
use testing::Seeded;

use super::super::backend::{Backend, Block};
use super::super::matrix::DeviceMatrix;
use super::super::queue::Address;
use super::super::steps::{
    Addends, DeviceInput, Finish, Numbers, Parts, Rows, Values, axpy, matvec, n_blocks, quantize,
};
use super::super::stream::{Memory, Stream};
use crate::{NeuronMatrix, WeightFormat};

const SHAPES: [[usize; 2]; 2] = [[11_008, 4096], [28_672, 8192]];
const FORMATS: [WeightFormat; 3] = [WeightFormat::F16, WeightFormat::Q8_0, WeightFormat::Q4_0];
/// Tokens of the products of many, below and above where they begin to be made in tiles.
const MANY: [usize; 4] = [8, 9, 16, 128];
const DENSITIES: [f32; 7] = [0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 1.0];
/// More than the largest cache twice over.
const ROTATED_BYTES: usize = 256 << 20;
const WARM_UP: usize = 3;
const REPETITIONS: usize = 20;

type Result<T> = candle_core::Result<T>;

/// Seconds that a repetition takes.
fn time(stream: &Stream, mut run: impl FnMut(usize) -> Result<()>) -> Result<f64> {
    (0..WARM_UP).try_for_each(&mut run)?;
    let (began, ended) = (stream.event()?, stream.event()?);
    stream.record(&began)?;
    (0..REPETITIONS).try_for_each(&mut run)?;
    stream.record(&ended)?;
    stream.synchronize()?;
    let ns = stream.elapsed_ns(&began, &ended)?;
    Ok(ns as f64 / 1e9 / REPETITIONS as f64)
}

/// Bytes a second that are read and written when memory is copied.
fn copy_bandwidth(device: &Device, stream: &Stream) -> Result<f64> {
    let from = Tensor::zeros(1 << 28, DType::F32, device)?;
    let seconds = time(stream, |_| from.copy().map(|_| ()))?;
    Ok(2.0 * f64::from(1u32 << 30) / seconds)
}

/// A list of rows and all that is read and written besides weights.
struct Lists {
    memory: Vec<Memory>,
    n: usize,
}

impl Lists {
    fn new(stream: &Stream, n_rows: usize, density: f32) -> Result<Self> {
        let mut lists = Self { memory: Vec::new(), n: 0 };
        for seed in 0..4 {
            let count = ((n_rows as f32 * density) as usize).max(1);
            let ids = Seeded::new(seed).ids_exactly(n_rows, count);
            let parts = Parts::of(n_rows);
            let mut values = vec![ids.len() as u32; 64];
            values
                .extend((0..=Parts::MOST).map(|part| {
                    ids.partition_point(|&id| (id as usize) < part * parts.len) as u32
                }));
            values.extend(&ids);
            let memory = stream.block(size_of_val(values.as_slice()))?;
            stream.upload(bytemuck::cast_slice(&values), memory.address())?;
            lists.memory.push(memory);
            lists.n = ids.len();
        }
        Ok(lists)
    }

    fn get(&self, at: usize) -> (Rows, Address) {
        let base = self.memory[at % self.memory.len()].address();
        let starts = base.offset(64 * 4);
        (Rows::Listed { ids: starts.offset((Parts::MOST + 1) * 4), count: base }, starts)
    }
}

/// Working memory of a shape.
struct Scratch {
    memory: Memory,
    x: DeviceInput,
    h: Address,
    sums: Address,
    y: Address,
}

impl Scratch {
    fn new(stream: &Stream, [n, d]: [usize; 2], n_tokens: usize) -> Result<Self> {
        let blocks = n_tokens * n_blocks(d);
        let (of_d, of_n) = (n_tokens * d * 4, n_tokens * n * 4);
        let sums = Parts::of(n).sums_bytes(n_tokens, d);
        let sizes = [of_d, blocks * 32, blocks * 8, 256, of_n, sums, of_d];
        let aligned = sizes.map(|bytes| bytes.next_multiple_of(256));
        let memory = stream.block(aligned.iter().sum())?;
        let mut at = memory.address();
        let mut places = [Address::NULL; 7];
        for (place, bytes) in places.iter_mut().zip(aligned) {
            (*place, at) = (at, at.offset(bytes));
        }
        let [values, numbers, scales, norms, h, sums, y] = places;
        stream.upload(bytemuck::cast_slice(&Seeded::new(1).normal(n_tokens * d)), values)?;
        stream.upload(bytemuck::cast_slice(&Seeded::new(2).normal(n_tokens * n)), h)?;
        let numbers = Numbers { numbers, scales, norms };
        let x = DeviceInput { values, numbers, n_columns: d, n_tokens };
        quantize(stream, &x, Address::NULL)?;
        Ok(Self { memory, x, h, sums, y })
    }
}

/// Copies of a random matrix, enough to fill no cache.
fn matrices(
    stream: &Stream,
    format: WeightFormat,
    [n, d]: [usize; 2],
) -> Result<Vec<DeviceMatrix<Stream>>> {
    // the speed does not depend on the values: one block of rows, over and over
    let some = NeuronMatrix::from_f32(format, 64, d, &Seeded::new(3).normal(64 * d));
    let some = some.map_err(candle_core::Error::wrap)?;
    let whole = NeuronMatrix::try_from_rows(format, n, d, |row, bytes| {
        bytes.copy_from_slice(some.row(row % 64));
        Ok::<(), crate::OpError>(())
    });
    let whole = whole.map_err(candle_core::Error::wrap)?;
    let copies = ROTATED_BYTES.div_ceil(whole.size_bytes()).max(2);
    (0..copies).map(|_| DeviceMatrix::of_rows(stream, &whole, None)).collect()
}

fn dense_seconds(
    device: &Device,
    stream: &Stream,
    [n, d]: [usize; 2],
    n_tokens: usize,
) -> Result<f64> {
    let copies = ROTATED_BYTES.div_ceil(2 * n * d).max(2);
    let w: Vec<Tensor> =
        (0..copies).map(|_| Tensor::ones((n, d), DType::F16, device)).collect::<Result<_>>()?;
    let x = Tensor::ones((n_tokens, d), DType::F16, device)?;
    time(stream, |at| x.matmul(&w[at % copies].t()?).map(|_| ()))
}

fn json(value: Option<f64>, as_text: impl Fn(f64) -> String) -> String {
    value.map_or_else(|| "null".to_owned(), as_text)
}

fn sweep() -> Result<()> {
    let device = Device::new_cuda_with_stream(0)?;
    let stream = Stream::of(device.as_cuda_device()?);
    let copy = copy_bandwidth(&device, &stream)?;
    println!("{{\"copy_bytes_per_second\":{copy:.4e}}}");
    for shape in SHAPES {
        let [n, d] = shape;
        // where cuBLAS is missing `device.sh` goes on without it
        let dense = dense_seconds(&device, &stream, shape, 1);
        let dense = dense.inspect_err(|error| eprintln!("no dense product: {error}")).ok();
        let seconds = json(dense, |seconds| format!("{seconds:.4e}"));
        println!("{{\"n\":{n},\"d\":{d},\"op\":\"cublas f16\",\"seconds\":{seconds}}}");
        let scratch = Scratch::new(&stream, shape, 1)?;
        for format in FORMATS {
            let weights = matrices(&stream, format, shape)?;
            for density in DENSITIES {
                let lists = Lists::new(&stream, n, density)?;
                let bytes = (lists.n * weights[0].row_bytes()) as f64;
                let run_matvec = |at: usize| {
                    let out = Values { address: scratch.h, stride: n, by_row: false };
                    let rows = weights[at % weights.len()].rows();
                    matvec(&stream, &rows, lists.get(at).0, &scratch.x, Finish::NOTHING, out)
                };
                let run_axpy = |at: usize| {
                    let scales = Values { address: scratch.h, stride: n, by_row: false };
                    let (rows, starts) = lists.get(at);
                    let addends = Addends { rows, starts, scales, n_tokens: 1 };
                    let to = [Address::NULL, scratch.y];
                    axpy(&stream, &weights[at % weights.len()].rows(), &addends, scratch.sums, to)
                };
                let seconds = [time(&stream, run_matvec)?, time(&stream, run_axpy)?];
                for (op, seconds) in ["sparse_matvec", "sparse_axpy"].into_iter().zip(seconds) {
                    let share = bytes / seconds / copy;
                    println!(
                        "{{\"n\":{n},\"d\":{d},\"op\":\"{op}\",\"format\":\"{format}\",\
                         \"density\":{density},\"seconds\":{seconds:.4e},\
                         \"share_of_copy\":{share:.3},\"times_dense\":{}}}",
                        json(dense, |dense| format!("{:.3}", dense / seconds))
                    );
                }
            }
        }
        drop(scratch.memory);
    }
    Ok(())
}

/// All rows with many tokens, beside cuBLAS, which multiplies f16 on tensor cores.
fn many() -> Result<()> {
    let device = Device::new_cuda_with_stream(0)?;
    let stream = Stream::of(device.as_cuda_device()?);
    let [n, d] = SHAPES[0];
    for format in FORMATS {
        let weights = matrices(&stream, format, [n, d])?;
        for n_tokens in MANY {
            let dense = dense_seconds(&device, &stream, [n, d], n_tokens).ok();
            let dense = json(dense, |seconds| format!("{seconds:.4e}"));
            let scratch = Scratch::new(&stream, [n, d], n_tokens)?;
            let h = Values { address: scratch.h, stride: n, by_row: false };
            let rows = |at: usize| weights[at % weights.len()].rows();
            let products = time(&stream, |at| {
                matvec(&stream, &rows(at), Rows::All, &scratch.x, Finish::NOTHING, h)
            })?;
            let addends = Addends { rows: Rows::All, starts: Address::NULL, scales: h, n_tokens };
            let sums = time(&stream, |at| {
                axpy(&stream, &rows(at), &addends, scratch.sums, [Address::NULL, scratch.y])
            })?;
            for (op, seconds) in [("sparse_matvec", products), ("sparse_axpy", sums)] {
                let flops = (2 * n * d * n_tokens) as f64 / seconds;
                println!(
                    "{{\"n\":{n},\"d\":{d},\"op\":\"{op}\",\"format\":\"{format}\",\
                     \"tokens\":{n_tokens},\"seconds\":{seconds:.4e},\"flops\":{flops:.4e},\
                     \"cublas_f16_seconds\":{dense}}}"
                );
            }
        }
    }
    Ok(())
}

/// The sweep of `device.sh`.
#[test]
#[ignore = "measures a GPU"]
fn operators_over_density_shape_and_format() {
    // first what is short: a time limit ends the rest
    many().unwrap();
    sweep().unwrap();
}
