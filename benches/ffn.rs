//! The fused feed-forward network of one token, swept over shape, format, threads and the share of
//! neurons that are picked, beside a streaming read and candle's dense products.
//!
//! `cargo bench --bench ffn`, or some of it: `cargo bench --bench ffn -- '4096.*q4_0/2 threads'`
//!
//! Throughput is the bytes of the rows that are picked. Picks are scattered, others for each of
//! sixteen calls, and calls go round over networks of at least 1 GiB together. Every picked neuron
//! fires.

use std::hint::black_box;
use std::num::NonZeroUsize;
use std::time::Duration;

use candle_core::quantized::{GgmlDType, QMatMul, QTensor};
use candle_core::{DType, Device, Module, Tensor};
use criterion::measurement::WallTime;
use criterion::{
    BenchmarkGroup, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main,
};
use powerinfer::ops::{
    Activation, FfnWeights, NeuronIds, NeuronMatrix, Neurons, OpError, ThreadPool, WeightFormat,
    Workspace, ffn, read_bandwidth,
};
use testing::Seeded;

const SHAPES: [(usize, usize); 3] = [(2048, 5632), (4096, 11008), (8192, 22016)];
const FORMATS: [WeightFormat; 5] = [
    WeightFormat::F32,
    WeightFormat::F16,
    WeightFormat::BF16,
    WeightFormat::Q8_0,
    WeightFormat::Q4_0,
];
const DENSITIES: [f32; 9] = [0.01, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.85, 1.0];
const THREADS: [usize; 2] = [1, 2];
/// What calls go round over.
const COLD_BYTES: usize = 1 << 30;
const N_PICKS: u64 = 16;

fn bench(criterion: &mut Criterion) {
    for threads in THREADS {
        let pool = ThreadPool::new(NonZeroUsize::new(threads)).expect("threads");
        let mut group = criterion.benchmark_group(format!("ffn {threads} threads"));
        group.sample_size(10).warm_up_time(Duration::from_millis(200));
        group.measurement_time(Duration::from_millis(800));
        stream(&mut group, &pool);
        for (d_model, d_ff) in SHAPES {
            for format in FORMATS {
                sweep(&mut group, &pool, format, (d_model, d_ff));
            }
        }
        candle(&mut group, SHAPES[1]);
        group.finish();
    }
}

/// A read of 1 GiB of the same kind of pages.
fn stream(group: &mut BenchmarkGroup<'_, WallTime>, pool: &ThreadPool) {
    group.throughput(Throughput::Bytes(COLD_BYTES as u64));
    group.bench_function("streaming read", |bencher| {
        bencher.iter_custom(|n| {
            let passes = n.clamp(1, 32) as usize;
            let read = read_bandwidth(pool, COLD_BYTES, passes).expect("1 GiB");
            Duration::from_secs_f64(n as f64 * COLD_BYTES as f64 / read.bytes_per_second)
        });
    });
}

fn sweep(
    group: &mut BenchmarkGroup<'_, WallTime>,
    pool: &ThreadPool,
    format: WeightFormat,
    (d_model, d_ff): (usize, usize),
) {
    let name = format!("{d_model}x{d_ff} {format}");
    let mut networks = None;
    for density in DENSITIES {
        let picks: Vec<[NeuronIds; 1]> = (0..N_PICKS)
            .map(|seed| {
                let ids = Seeded::new(seed).ids(d_ff, density);
                [NeuronIds::from_sorted(ids).expect("sorted")]
            })
            .collect();
        let mean = picks.iter().map(|[ids]| ids.len()).sum::<usize>() as u64 / N_PICKS;
        let row_bytes = format.row_bytes(d_model).expect("whole blocks") as u64;
        group.throughput(Throughput::Bytes(mean * 3 * row_bytes));
        group.bench_function(BenchmarkId::new(&name, density), |bencher| {
            // made when a case of this shape runs at all
            let networks = networks.get_or_insert_with(|| networks_of(format, d_model, d_ff));
            let x = Tensor::ones((1, d_model), DType::F32, &Device::Cpu).expect("a vector");
            let (mut call, mut workspace) = (0, Workspace::default());
            pool.install(|| {
                bencher.iter(|| {
                    call += 1;
                    let weights = &networks[call % networks.len()];
                    let picks = &picks[call % picks.len()];
                    // a density of one is the dense path itself
                    let neurons =
                        if density < 1.0 { Neurons::FiringOf(picks) } else { Neurons::All };
                    black_box(ffn(weights, neurons, &x, &mut workspace).expect("shapes agree"))
                });
            });
        });
    }
}

/// Distinct networks of at least [`COLD_BYTES`] together, whose biases make every neuron fire.
fn networks_of(format: WeightFormat, d_model: usize, d_ff: usize) -> Vec<FfnWeights> {
    let mut row = vec![0; format.row_bytes(d_model).expect("whole blocks")];
    format.encode(&Seeded::new(1).normal(d_model), &mut row);
    let matrix = || {
        NeuronMatrix::try_from_rows(format, d_ff, d_model, |_, bytes| {
            bytes.copy_from_slice(&row);
            Ok::<(), OpError>(())
        })
        .expect("a matrix of this size fits")
    };
    let bytes = 3 * d_ff * row.len();
    (0..COLD_BYTES.div_ceil(bytes).max(2))
        .map(|_| {
            FfnWeights::new(matrix(), Some(matrix()), matrix(), Activation::Relu)
                .and_then(|weights| weights.with_biases(Some(vec![1e4; d_ff]), None))
                .expect("shapes agree")
        })
        .collect()
}

/// The three dense products of candle, on its own threads.
fn candle(group: &mut BenchmarkGroup<'_, WallTime>, (d_model, d_ff): (usize, usize)) {
    let x = Tensor::ones((1, d_model), DType::F32, &Device::Cpu).expect("a vector");
    for dtype in [GgmlDType::F16, GgmlDType::Q8_0, GgmlDType::Q4_0] {
        let bytes = d_ff * d_model / dtype.block_size() * dtype.type_size();
        group.throughput(Throughput::Bytes(bytes as u64));
        let mut matrices = None;
        group.bench_function(BenchmarkId::new("candle product", format!("{dtype:?}")), |bencher| {
            let matrices = matrices.get_or_insert_with(|| {
                let dense = Tensor::ones((d_ff, d_model), DType::F32, &Device::Cpu);
                let quantised = QTensor::quantize(&dense.expect("a matrix"), dtype);
                let n = COLD_BYTES.div_ceil(bytes);
                let data = quantised.expect("a conversion").data().expect("bytes").to_vec();
                let copy = |_| {
                    let storage = candle_core::quantized::ggml_file::qtensor_from_ggml(
                        dtype,
                        &data,
                        vec![d_ff, d_model],
                        &Device::Cpu,
                    );
                    QMatMul::from_qtensor(storage.expect("a matrix")).expect("a product")
                };
                (0..n).map(copy).collect::<Vec<_>>()
            });
            let mut call = 0;
            bencher.iter(|| {
                call += 1;
                black_box(matrices[call % matrices.len()].forward(&x).expect("shapes agree"))
            });
        });
    }
}

criterion_group!(benches, bench);
criterion_main!(benches);
