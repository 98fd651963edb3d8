//! One decode step of the demo model, densely and exactly.
//!
//! `cargo bench --bench decode`; whole models of real sizes: `cargo run --release --example bench`.

use std::hint::black_box;
use std::path::Path;

use criterion::{Criterion, criterion_group, criterion_main};
use powerinfer::core::{Sparsity, Step};
use powerinfer::models::{LoadOptions, load};

fn bench(criterion: &mut Criterion) {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/llama-relu-tiny");
    let model = load(&dir, &LoadOptions::default()).expect("the demo model loads");
    let mut group = criterion.benchmark_group("decode llama-relu-tiny");
    for sparsity in [Sparsity::Dense, Sparsity::Exact] {
        group.bench_function(sparsity.to_string(), |bencher| {
            let (mut cache, mut step) = (model.new_cache(), Step::default());
            step.sparsity = Some(sparsity);
            bencher.iter(|| {
                if cache.len() == cache.max_context() {
                    cache.clear();
                }
                model.forward(&[black_box(77)], &mut cache, &mut step).expect("a step");
            });
        });
    }
    group.finish();
}

criterion_group!(benches, bench);
criterion_main!(benches);
