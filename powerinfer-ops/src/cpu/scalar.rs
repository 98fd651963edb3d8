//! The reference table, gathered from the formats' own definitions.

use super::int8::{self, BLOCKS, InputGroup, WeightGroup};
use super::{
    F32Products, Grouping, Int8Products, PANEL, PANEL_ROWS, PanelTile, Products, RowPrimitives,
    Table, TokenScales,
};
use crate::format::{Bf16, BlockFormat, F16, F32, NumberFormat, Q4K, Q6K, Q40, Q41, Q50, Q80};

pub(super) static TABLE: Table = Table {
    name: "scalar",
    f32: primitives::<F32>(f32_products::<F32>()),
    f16: primitives::<F16>(f32_products::<F16>()),
    bf16: primitives::<Bf16>(f32_products::<Bf16>()),
    q8_0: primitives::<Q80>(int8_products::<Q80>()),
    q4_0: primitives::<Q40>(int8_products::<Q40>()),
    q4_1: primitives::<Q41>(int8_products::<Q41>()),
    q5_0: primitives::<Q50>(int8_products::<Q50>()),
    q4_k: primitives::<Q4K>(int8_products::<Q4K>()),
    q6_k: primitives::<Q6K>(f32_products::<Q6K>()),
    quantize: int8::quantize,
    axpy_tile,
    axpy_picked,
    prefetch: |_| {},
    attention: &super::attention_rows::SCALAR,
    fold,
};

const fn primitives<F: BlockFormat>(products: Products) -> RowPrimitives {
    RowPrimitives {
        products,
        axpy: |scale, row, _, y| F::axpy(scale, row, y),
        axpy_group: |scales, rows, _, y| {
            for (scale, row) in scales.into_iter().zip(rows) {
                F::axpy(scale, row, y);
            }
        },
        settle: |sum, y| super::rows::add(y, sum),
        grouping: Grouping::Never,
        decode: decode::<F>,
    }
}

fn decode<F: BlockFormat>(row: &[u8], values: &mut [f32]) {
    let blocks = row.chunks_exact(F::BLOCK_BYTES);
    for (block, values) in blocks.zip(values.chunks_exact_mut(F::BLOCK_LEN)) {
        F::decode_block(block, values);
    }
}

const fn f32_products<F: BlockFormat>() -> Products {
    Products::F32(F32Products {
        dot: |row, _, x| F::dot(row, x),
        dot_group: |rows, _, x| rows.map(|row| F::dot(row, x)),
        grouping: Grouping::Never,
        unpack: decode::<F>,
        block: |rows, xs, len, out| block(rows, xs, len, out, f32_dot),
        gather: |row, xs, tokens, out| gather(row, xs, tokens, out, f32_dot),
    })
}

/// The product of a decoded row, summed up as [`BlockFormat::dot`] does.
fn f32_dot(row: &[f32], x: &[f32]) -> f32 {
    row.iter().zip(x).fold(0.0, |sum, (w, x)| sum + w * x)
}

const fn int8_products<F: NumberFormat>() -> Products {
    Products::Int8(Int8Products {
        dot: |row, _, x| F::dot_int8(row, x),
        dot_group: |rows, _, x| rows.map(|row| F::dot_int8(row, x)),
        grouping: Grouping::Never,
        unpack: unpack::<F>,
        block: |rows, xs, len, out| block(rows, xs, len, out, int8_dot),
        gather: |row, xs, tokens, out| gather(row, xs, tokens, out, int8_dot),
    })
}

/// Signed bytes in the order of an [`InputGroup`].
fn unpack<F: NumberFormat>(row: &[u8], groups: &mut [WeightGroup]) {
    groups.fill(bytemuck::Zeroable::zeroed());
    for (b, part) in F::parts(row).enumerate() {
        let (group, b) = (&mut groups[b / BLOCKS], b % BLOCKS);
        group.scales[b * BLOCKS..][..BLOCKS].fill(part.scale);
        group.offsets[b * BLOCKS..][..BLOCKS].fill(part.offset);
        for (i, number) in part.numbers.into_iter().enumerate() {
            group.numbers[i / 16 * 64 + b * 16 + i % 16] = number as u8;
        }
    }
}

/// The product of an unpacked row, summed up as [`NumberFormat::dot_int8`] does.
fn int8_dot(row: &[WeightGroup], x: &[InputGroup]) -> f32 {
    let mut product = 0.0;
    for (group, x) in row.iter().zip(x) {
        for b in 0..BLOCKS {
            let (mut products, mut sum) = (0, 0);
            for i in (b * 16..(b + 1) * 16).chain(64 + b * 16..64 + (b + 1) * 16) {
                products += i32::from(group.numbers[i] as i8) * i32::from(x.numbers[i]);
                sum += i32::from(x.numbers[i]);
            }
            product += group.scales[b * BLOCKS] * x.block_scale(b) * products as f32;
            product += group.offsets[b * BLOCKS] * x.block_scale(b) * sum as f32;
        }
    }
    product
}

fn block<W, X>(rows: &[W], xs: &[X], len: usize, out: &mut [f32], dot: impl Fn(&[W], &[X]) -> f32) {
    let products = xs.chunks_exact(len).flat_map(|x| rows.chunks_exact(len).map(move |w| (w, x)));
    for (out, (row, x)) in out.iter_mut().zip(products) {
        *out = dot(row, x);
    }
}

fn gather<W, X>(
    row: &[W],
    xs: &[X],
    tokens: &[u32],
    out: &mut [f32],
    dot: impl Fn(&[W], &[X]) -> f32,
) {
    for (out, &t) in out.iter_mut().zip(tokens) {
        *out = dot(row, &xs[t as usize * row.len()..][..row.len()]);
    }
}

fn axpy_picked(scales: &[f32; PANEL_ROWS], picked: u64, panel: &[f32], y: &mut [f32; PANEL]) {
    for (row, (scale, values)) in scales.iter().zip(panel.chunks_exact(PANEL)).enumerate() {
        if picked >> row & 1 == 1 {
            for (y, value) in y.iter_mut().zip(values) {
                *y += scale * value;
            }
        }
    }
}

fn axpy_tile(scales: TokenScales<'_>, panel: &[f32], ys: &mut PanelTile) {
    for (scales, y) in scales.into_iter().zip(&mut ys.0) {
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
