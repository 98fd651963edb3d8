//! The reference table, gathered from the formats' own definitions.

use super::attention_rows;
use super::{PANEL, PanelTile, RowPrimitives, Table, TokenValues};
use crate::format::{Bf16, BlockFormat, F16, F32, Q40, Q80};

pub(super) static TABLE: Table = Table {
    name: "scalar",
    f32: primitives::<F32>(),
    f16: primitives::<F16>(),
    bf16: primitives::<Bf16>(),
    q8_0: primitives::<Q80>(),
    q4_0: primitives::<Q40>(),
    axpy_tile,
    attention: &attention_rows::SCALAR,
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
        decode: |row, values| {
            let blocks = row.chunks_exact(F::BLOCK_BYTES);
            for (block, values) in blocks.zip(values.chunks_exact_mut(F::BLOCK_LEN)) {
                F::decode_block(block, values);
            }
        },
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
