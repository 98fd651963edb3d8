//! Attention over a cache: a decode step and a prompt, in the shapes of three models and both types of
//! cache, beside candle's products and softmax over keys and values repeated for each head.
//!
//! `cargo bench --bench attention`; whole models: `cargo run --release --example bench -- --context N`.

use std::hint::black_box;

use candle_core::{D, Device, Tensor};
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use powerinfer::core::{KvCache, KvShape};
use powerinfer::ops::Workspace;
use powerinfer::ops::attention::{AttentionShape, KvDtype, causal_attention};
use testing::Seeded;

/// Name, heads, key-value heads, values of a head.
const MODELS: [(&str, usize, usize, usize); 3] =
    [("llama-1b", 32, 4, 64), ("llama-7b", 32, 32, 128), ("falcon-7b", 71, 1, 64)];
/// Tokens in the cache at the end, and how many of them are queries.
const CASES: [(usize, usize); 3] = [(2048, 1), (512, 512), (2048, 512)];
/// Layers that calls cycle over, so that a decode step finds no cache as warm as a loop leaves it.
const N_LAYERS: usize = 12;

fn bench(criterion: &mut Criterion) {
    for (name, n_heads, n_kv_heads, d_head) in MODELS {
        let mut group = criterion.benchmark_group(format!("attention {name}"));
        group.sample_size(10);
        for (n_positions, n_tokens) in CASES {
            let case = format!("{n_tokens} of {n_positions}");
            let scale = 1.0 / (d_head as f32).sqrt();
            let first_position = n_positions - n_tokens;
            let (window, alibi_slopes) = (None, None);
            let shape = AttentionShape {
                n_heads,
                n_kv_heads,
                d_head,
                scale,
                first_position,
                window,
                alibi_slopes,
            };
            let queries = tensor(1, (n_tokens, n_heads * d_head));
            for dtype in KvDtype::ALL {
                let cache = filled(n_kv_heads, d_head, n_positions, dtype);
                group.throughput(Throughput::Bytes((cache.size_bytes() / N_LAYERS) as u64));
                group.bench_function(BenchmarkId::new(dtype.name(), &case), |bencher| {
                    let (mut workspace, mut call) = (Workspace::default(), 0);
                    bencher.iter(|| {
                        call += 1;
                        let pages = cache.layer(call % N_LAYERS);
                        let attended = causal_attention(&queries, &pages, shape, &mut workspace);
                        black_box(attended.expect("operands agree"))
                    });
                });
            }
            let queries = tensor(1, (n_heads, n_tokens, d_head));
            let layers: Vec<_> = (0..N_LAYERS)
                .map(|_| [2, 3].map(|seed| tensor(seed, (n_heads, n_positions, d_head))))
                .collect();
            group.throughput(Throughput::Bytes((2 * n_heads * n_positions * d_head * 4) as u64));
            group.bench_function(BenchmarkId::new("candle f32", &case), |bencher| {
                let mut call = 0;
                bencher.iter(|| {
                    call += 1;
                    let [keys, values] = &layers[call % N_LAYERS];
                    black_box(candle(&queries, keys, values).expect("operands agree"))
                });
            });
        }
        group.finish();
    }
}

fn tensor(seed: u64, shape: impl Into<candle_core::Shape>) -> Tensor {
    let shape = shape.into();
    let values = Seeded::new(seed).normal(shape.elem_count());
    Tensor::from_vec(values, shape, &Device::Cpu).expect("as many values as the shape has")
}

/// A cache of that many tokens.
fn filled(n_kv_heads: usize, d_head: usize, n_tokens: usize, dtype: KvDtype) -> KvCache {
    let (n_layers, max_context) = (N_LAYERS, n_tokens);
    let mut cache = KvCache::new(KvShape { n_layers, n_kv_heads, d_head, max_context, dtype });
    cache.reserve(n_tokens).expect("memory");
    let keys = Seeded::new(2).normal(n_tokens * n_kv_heads * d_head);
    for layer in 0..N_LAYERS {
        cache.write(layer, &keys, &keys).expect("as many values as tokens have");
    }
    cache.commit();
    cache
}

/// Without the mask of a prompt, which costs it little.
fn candle(queries: &Tensor, keys: &Tensor, values: &Tensor) -> candle_core::Result<Tensor> {
    let scores = (queries.matmul(&keys.t()?)? * 0.125)?;
    let weights = (scores.broadcast_sub(&scores.max_keepdim(D::Minus1)?))?.exp()?;
    let total = weights.sum_keepdim(D::Minus1)?;
    weights.matmul(values)?.broadcast_div(&total)
}

criterion_group!(benches, bench);
criterion_main!(benches);
