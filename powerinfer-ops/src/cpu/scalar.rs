//! The reference table, gathered from the formats' own definitions.

use super::{PANEL, PanelTile, RowPrimitives, Table, TokenValues};
use crate::format::{Bf16, BlockFormat, F16, F32, MAX_BLOCK_LEN, Q4K, Q6K, Q40, Q41, Q50, Q80};

pub(super) static TABLE: Table = Table {
    name: "scalar",
    f32: primitives::<F32>(),
    f16: primitives::<F16>(),
    bf16: primitives::<Bf16>(),
    q8_0: primitives::<Q80>(),
    q4_0: primitives::<Q40>(),
    q4_1: primitives::<Q41>(),
    q5_0: primitives::<Q50>(),
    q4_k: primitives::<Q4K>(),
    q6_k: primitives::<Q6K>(),
    axpy_tile,
    fold,
};

const fn primitives<F: BlockFormat>() -> RowPrimitives {
    RowPrimitives {
        dot: |row, _, x| F::dot(row, x),
        dot_group: |rows, _, x| rows.map(|row| F::dot(row, x)),
        dot_tile: |rows, xs| xs.map(|x| rows.map(|row| F::dot(row, x))),
        axpy: |scale, row, _, y| F::axpy(scale, row, y),
        axpy_group: |scales, rows, _, y| {
            for (scale, row) in scales.into_iter().zip(rows) {
                F::axpy(scale, row, y);
            }
        },
        grouped: false,
        decode: decode::<F>,
    }
}

fn decode<F: BlockFormat>(row: &[u8], mut first: usize, mut values: &mut [f32]) {
    let mut whole = [0.0; MAX_BLOCK_LEN];
    let whole = &mut whole[..F::BLOCK_LEN];
    while !values.is_empty() {
        let block = &row[first / F::BLOCK_LEN * F::BLOCK_BYTES..][..F::BLOCK_BYTES];
        F::decode_block(block, whole);
        let part = &whole[first % F::BLOCK_LEN..];
        let (now, later) = values.split_at_mut(part.len().min(values.len()));
        now.copy_from_slice(&part[..now.len()]);
        first += now.len();
        values = later;
    }
}

fn axpy_tile(scales: TokenValues<'_>, panel: &[f32], ys: &mut PanelTile) {
    for (scales, y) in scales.into_iter().zip(ys) {
        for (scale, row) in scales.iter().zip(panel.chunks_exact(PANEL)) {
            for (y, value) in y.iter_mut().zip(row) {
                *y += scale * value;
            }
        }
    }
}

pub(super) fn fold(bytes: &[u8]) -> u64 {
    let words = bytes.chunks_exact(8);
    let rest = words.remainder().iter().fold(0, |fold, &byte| fold ^ u64::from(byte));
    words.fold(rest, |fold, word| {
        fold ^ u64::from_le_bytes(word.try_into().expect("chunks of eight bytes"))
    })
}
