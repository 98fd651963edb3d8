//! Products of rows with many tokens, as in a prompt. Safe code.
//!
//! The idea: unpack a few rows once, to f32 or to bytes, into memory that stays in the L2 cache, and
//! let all tokens pass over them in tiles that fit the registers. Which tokens are together changes
//! no bit: a product is the same sum in a tile as alone. Where few products matter, each row is
//! multiplied with the tokens that need it.
//!
//! # What was measured
//!
//! One thread of an AMD EPYC (Zen 5) that does 124 GMAC/s of f32 from registers and 500 of bytes,
//! 64 tokens, d_model 2048: f32 rows 92, whole numbers 180. What mattered for f32:
//! - tokens and rows that begin at a cache line: with registers as wide as a line 50 without;
//! - half of the columns at a time, so that the tokens' part stays in the L1 cache: 67 without;
//! - asking for the next rows to unpack: a fifth of the time went into waiting for memory.
//!
//! Tried and dropped: rows and tokens at odd strides, against conflicts in the cache (no gain);
//! asking for the next tile (a loss).

use std::marker::PhantomData;
use std::ops::Range;

use rayon::prelude::*;

use super::activations::{any, block_rows};
use super::int8::InputGroup;
use super::product::{Inputs, ProductInput, for_products};
use super::{PANEL_ROWS, ProductBodies, RowKernels};
use crate::bytes::AlignedScratch;
use crate::matrix::NeuronMatrix;

/// Bytes of unpacked rows that stay in the L2 cache while all tokens pass over them.
const UNPACKED_BYTES: usize = 384 << 10;
/// Tokens whose products are collected before they go where they belong: whole tiles everywhere.
const TOKENS: usize = 24;
/// Products of some neurons with some tokens, as a share of all, from which on multiplying all of
/// them is faster than picking them out.
const PICKED_SHARE: f64 = 0.5;
/// Rows that are asked for ahead of the one that is unpacked.
pub(super) const ROWS_AHEAD: usize = 2;

/// `out[t, i] = w[i] · x[t]` for all rows: `out` is `[n_tokens, n_neurons]`.
pub(crate) fn matmul(kernels: RowKernels, w: &NeuronMatrix, x: Inputs<'_>, out: &mut [f32]) {
    let row_ops = kernels.primitives(w.format());
    for_products!(row_ops, bodies => {
        let blocks = split_columns(out, w.n_neurons(), unpacked_rows(bodies, w.d_model()));
        let rows = Rows { kernels, bodies, w };
        blocks.into_par_iter().enumerate().for_each_init(Unpacked::default, |scratch, block| {
            rows.block(scratch, block, ProductInput::of(&x));
        });
    });
}

/// The products of a block of neurons with many tokens: those that `masks` picks, and perhaps
/// others, to `put` as token, first neuron of the block, products.
pub(crate) fn block_products(
    scratch: &mut PanelScratch,
    kernels: RowKernels,
    (w, block): (&NeuronMatrix, usize),
    (x, masks): (Inputs<'_>, &[u64]),
    put: impl FnMut(usize, usize, &[f32]),
) {
    let row_ops = kernels.primitives(w.format());
    for_products!(row_ops, bodies => {
        let rows = Rows { kernels, bodies, w };
        let x = ProductInput::of(&x);
        rows.picked(ProductInput::scratch(scratch), block, (x, masks), put);
    });
}

/// Rows that are unpacked at once: a multiple of what every tile takes.
fn unpacked_rows<X: ProductInput>(_: &ProductBodies<X, X::Unpacked>, d_model: usize) -> usize {
    let row_bytes = X::len(d_model) * size_of::<X::Unpacked>();
    (UNPACKED_BYTES / row_bytes.max(1)).clamp(1, PANEL_ROWS).div_ceil(12) * 12
}

/// Scratch of a task.
#[derive(Default)]
pub(crate) struct PanelScratch {
    pub(super) f32: Unpacked<f32>,
    pub(super) int8: Unpacked<InputGroup>,
}

/// Unpacked rows and products for one form of values.
pub(crate) struct Unpacked<X: ProductInput> {
    rows: AlignedScratch,
    products: Vec<f32>,
    tokens: Vec<u32>,
    form: PhantomData<X>,
}

impl<X: ProductInput> Default for Unpacked<X> {
    fn default() -> Self {
        Self {
            rows: AlignedScratch::default(),
            products: Vec::new(),
            tokens: Vec::new(),
            form: PhantomData,
        }
    }
}

/// The rows of a matrix and their products in one form of values.
struct Rows<'a, X: ProductInput> {
    kernels: RowKernels,
    bodies: &'a ProductBodies<X, X::Unpacked>,
    w: &'a NeuronMatrix,
}

impl<X: ProductInput> Rows<'_, X> {
    /// Unpacks a row and asks for one that comes soon.
    fn unpack(&self, row: usize, unpacked: &mut [X::Unpacked]) {
        let ahead = (row + ROWS_AHEAD).min(self.w.n_neurons() - 1);
        (self.kernels.table().prefetch)(self.w.row(ahead));
        (self.bodies.unpack)(self.w.row(row), unpacked);
    }

    /// The products of `rows` with all tokens `x`, handed out token by token.
    fn products(
        &self,
        scratch: &mut Unpacked<X>,
        rows: Range<usize>,
        x: &[X],
        mut put: impl FnMut(usize, &[f32]),
    ) {
        let len = X::len(self.w.d_model());
        let unpacked = scratch.rows.values::<X::Unpacked>(rows.len() * len);
        for (unpacked, row) in unpacked.chunks_exact_mut(len).zip(rows.clone()) {
            self.unpack(row, unpacked);
        }
        for (group, x) in x.chunks(TOKENS * len).enumerate() {
            scratch.products.resize(x.len() / len * rows.len(), 0.0);
            (self.bodies.block)(unpacked, x, len, &mut scratch.products);
            for (t, products) in scratch.products.chunks_exact(rows.len()).enumerate() {
                put(group * TOKENS + t, products);
            }
        }
    }

    /// The products of the rows that `outs` is for, one slice a token.
    fn block(
        &self,
        scratch: &mut Unpacked<X>,
        (block, mut outs): (usize, Vec<&mut [f32]>),
        x: &[X],
    ) {
        let first = block * unpacked_rows(self.bodies, self.w.d_model());
        let rows = first..first + outs[0].len();
        self.products(scratch, rows, x, |t, products| outs[t].copy_from_slice(products));
    }

    /// The products of a block of neurons that `masks` picks for each token, and perhaps others.
    fn picked(
        &self,
        scratch: &mut Unpacked<X>,
        block: usize,
        (x, masks): (&[X], &[u64]),
        mut put: impl FnMut(usize, usize, &[f32]),
    ) {
        let rows = block_rows(self.w.n_neurons(), block);
        let n_picked: u32 = masks.iter().map(|mask| mask.count_ones()).sum();
        if f64::from(n_picked) > PICKED_SHARE * (rows.len() * masks.len()) as f64 {
            let step = unpacked_rows(self.bodies, self.w.d_model());
            for at in (0..rows.len()).step_by(step) {
                let some = rows.start + at..rows.end.min(rows.start + at + step);
                self.products(scratch, some, x, |t, products| put(t, at, products));
            }
            return;
        }
        let unpacked = scratch.rows.values::<X::Unpacked>(X::len(self.w.d_model()));
        let (tokens, products) = (&mut scratch.tokens, &mut scratch.products);
        let needed = any(masks);
        for (r, row) in rows.enumerate().filter(|(r, _)| needed >> r & 1 == 1) {
            tokens.clear();
            // a token is a u32: there are fewer than 2³² of them in any context
            let picking = (0u32..).zip(masks).filter(|(_, mask)| *mask >> r & 1 == 1);
            tokens.extend(picking.map(|(t, _)| t));
            products.resize(tokens.len(), 0.0);
            self.unpack(row, unpacked);
            (self.bodies.gather)(unpacked, x, tokens, products);
            for (&t, product) in tokens.iter().zip(products.chunks_exact(1)) {
                put(t as usize, r, product);
            }
        }
    }
}

/// Cuts `[n_tokens, n_columns]` into blocks of columns, each with one slice a token.
pub(super) fn split_columns(
    values: &mut [f32],
    n_columns: usize,
    columns_per_block: usize,
) -> Vec<Vec<&mut [f32]>> {
    let n_tokens = values.len() / n_columns;
    let n_blocks = n_columns.div_ceil(columns_per_block);
    let mut blocks: Vec<_> = (0..n_blocks).map(|_| Vec::with_capacity(n_tokens)).collect();
    for row in values.chunks_exact_mut(n_columns) {
        for (block, piece) in blocks.iter_mut().zip(row.chunks_mut(columns_per_block)) {
            block.push(piece);
        }
    }
    blocks
}
