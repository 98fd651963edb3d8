//! The cases of the operator benches: densities, formats, and more matrices than a cache holds.

use std::hint::black_box;

use candle_core::{DType, Device, Tensor};
use criterion::{BenchmarkId, Criterion, Throughput};
use powerinfer::ops::{ActivationMask, NeuronIds, NeuronMatrix, OpError, WeightFormat};
use testing::Seeded;

pub(crate) const D_MODEL: usize = 4096;
pub(crate) const D_FF: usize = 11008;
/// Distinct matrices that calls cycle over.
const N_MATRICES: usize = 4;

/// Sweeps `sparse` over formats and densities, then `dense` over candle's types. Matrices are
/// `[D_FF, D_MODEL]`, `x` has `width` values.
pub(crate) fn sweep(
    criterion: &mut Criterion,
    name: &str,
    width: usize,
    sparse: impl Fn(&NeuronMatrix, &ActivationMask, &Tensor) -> Result<Tensor, OpError>,
    dense: impl Fn(&Tensor, &Tensor) -> candle_core::Result<Tensor>,
) {
    let x = Tensor::from_vec(Seeded::new(2).normal(width), (1, width), &Device::Cpu);
    let x = x.expect("a vector");
    let mut group = criterion.benchmark_group(format!("{name} {D_FF}x{D_MODEL}"));
    group.sample_size(20);
    for format in WeightFormat::ALL {
        let matrices = matrices(format);
        for density in [0.05, 0.1, 0.3, 1.0] {
            let masks: Vec<_> = (0..16).map(|seed| mask(density, seed)).collect();
            let rows = masks.iter().map(|mask| mask.count(0)).sum::<usize>() / masks.len();
            group.throughput(Throughput::Bytes((rows * matrices[0].row_bytes()) as u64));
            group.bench_function(BenchmarkId::new(format.to_string(), density), |bencher| {
                let mut call = 0;
                bencher.iter(|| {
                    call += 1;
                    let (w, mask) = (&matrices[call % N_MATRICES], &masks[call % masks.len()]);
                    black_box(sparse(w, mask, &x).expect("operands agree"))
                });
            });
        }
    }
    for dtype in [DType::F16, DType::F32] {
        let x = x.to_dtype(dtype).expect("a conversion");
        let weights: Vec<_> = (0..N_MATRICES)
            .map(|_| Tensor::ones((D_FF, D_MODEL), dtype, &Device::Cpu).expect("a matrix"))
            .collect();
        group.throughput(Throughput::Bytes((D_FF * D_MODEL * dtype.size_in_bytes()) as u64));
        group.bench_function(BenchmarkId::new("candle dense", dtype.as_str()), |bencher| {
            let mut call = 0;
            bencher.iter(|| {
                call += 1;
                black_box(dense(&weights[call % N_MATRICES], &x).expect("operands agree"))
            });
        });
    }
    group.finish();
}

fn matrices(format: WeightFormat) -> Vec<NeuronMatrix> {
    let row = Seeded::new(1).normal(D_MODEL);
    let matrix = NeuronMatrix::try_from_rows(format, D_FF, D_MODEL, |_, bytes| {
        format.encode(&row, bytes);
        Ok::<(), OpError>(())
    });
    let matrix = matrix.expect("a matrix of this size fits");
    let all = NeuronIds::all(D_FF);
    (0..N_MATRICES).map(|_| matrix.pick_rows(&all).expect("ids are in range")).collect()
}

fn mask(density: f32, seed: u64) -> ActivationMask {
    let ids = NeuronIds::from_sorted(Seeded::new(seed).ids(D_FF, density)).expect("sorted");
    ActivationMask::from_ids(&[ids], D_FF).expect("ids are in range")
}
