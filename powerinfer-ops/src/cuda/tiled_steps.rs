//! Many tokens: from how many on other kernels run, and which.
//!
//! None of these numbers has been measured on a GPU. They follow from what is read and what is computed;
//! `sweep.rs` measures both sides of the first. Which kernels run changes no bit of a result: all of
//! them add in the same order.

use super::row_layout::RowLayout;
use super::steps::Parts;
use crate::WeightFormat;

/// From so many tokens on, products and sums of rows are made in tiles.
///
/// The kernels for few tokens read a row once for every four of them, those for many once for 16
/// (products) or 32 (sums), but compute whole tiles. Nine tokens would have rows read three times: of
/// 14 GB of f16 weights that is 12 ms at 3.4 TB/s, where 16 tokens' arithmetic, 220 GFLOP, is 7 ms at half
/// of the 67 TFLOP/s of an H100; eight tokens are about even.
pub const MANY_TOKENS: usize = 9;

/// From so many tokens on, a block of threads goes through all positions of a head for eight of them, and
/// reads keys and values once. With 32 heads these are 128 blocks, about one for each multiprocessor of a
/// large device; with fewer tokens there is more to gain from cutting the positions into parts.
pub const MANY_QUERIES: usize = 32;

/// Tokens that share what a block of the attention kernel reads; as in `attention.cu`.
pub(super) const QUERY_TILE: usize = 8;
/// Tokens of a tile of products; as in `tiled_matvec.cu`.
const PRODUCT_TOKENS: usize = 16;
pub(super) const PRODUCT_THREADS: u32 = 256;
/// Tokens and columns of a tile of sums; as in `tiled_axpy.cu`.
const SUM_TOKENS: usize = 32;
const SUM_COLUMNS: usize = 128;
pub(super) const SUM_THREADS: u32 = 128;

/// Tiles of rows and tokens, those of the same rows behind each other.
pub(super) fn product_grid(layout: &RowLayout, n_rows: usize, n_tokens: usize) -> [u32; 3] {
    // a piece of Q4_0 is twice as many numbers as one of Q8_0, and takes as many more registers
    let tile_rows = if layout.format == WeightFormat::Q4_0 { 16 } else { 32 };
    [(n_rows.div_ceil(tile_rows) * n_tokens.div_ceil(PRODUCT_TOKENS)) as u32, 1, 1]
}

/// Tiles of tokens and columns, for each group of parts.
pub(super) fn sum_grid(layout: &RowLayout, parts: Parts, n_tokens: usize) -> [u32; 3] {
    let columns = layout.n_columns.div_ceil(SUM_COLUMNS);
    [n_tokens.div_ceil(SUM_TOKENS) as u32, columns as u32, parts.n_groups() as u32]
}
