//! Gate and up: products of the picked rows, swept over density, beside candle's dense product.
//!
//! `cargo bench --bench sparse_matvec`

#[path = "support/cases.rs"]
mod cases;

use criterion::{Criterion, criterion_group, criterion_main};
use powerinfer::ops::sparse_matvec;

fn bench(criterion: &mut Criterion) {
    cases::sweep(criterion, "sparse_matvec", cases::D_MODEL, sparse_matvec, |w, x| {
        x.matmul(&w.t()?)
    });
}

criterion_group!(benches, bench);
criterion_main!(benches);
