//! Down: weighted sums of the picked rows, swept over density, beside candle's dense product.
//!
//! `cargo bench --bench sparse_axpy`

#[path = "support/cases.rs"]
mod cases;

use criterion::{Criterion, criterion_group, criterion_main};
use powerinfer::ops::sparse_axpy;

fn bench(criterion: &mut Criterion) {
    cases::sweep(criterion, "sparse_axpy", cases::D_FF, sparse_axpy, |w, x| x.matmul(w));
}

criterion_group!(benches, bench);
criterion_main!(benches);
