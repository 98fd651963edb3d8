//! Kernel tables for the CPU and the one place that asks what the CPU can do.
//!
//! A table holds one body of each row primitive per weight format. Holding a [`RowKernels`] proves
//! that its instructions exist, because [`RowKernels::available`] alone hands them out.
//!
//! Every table keeps one rule, which the equality of dense and sparse results rests on: **the dot
//! product of a row and a vector is one sum in one fixed order**, whichever primitive computes it,
//! and so is each element of an `axpy`.
//! Different tables may use different orders.

pub(crate) mod activations;
pub(crate) mod attention_rows;
pub(crate) mod int8;
pub(crate) mod low_bit;
pub(crate) mod panel;
pub(crate) mod product;
pub(crate) mod rows;
mod scalar;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod simd;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod simd_blocks;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod simd_dots;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod simd_sums;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod simd_table;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod tiles;
pub(crate) mod weighted_sum;

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "x86_64")]
mod int8_avx2;
#[cfg(target_arch = "x86_64")]
mod int8_avx512;
#[cfg(target_arch = "x86_64")]
mod low_bit_avx2;
#[cfg(target_arch = "x86_64")]
mod low_bit_avx512;

#[cfg(target_arch = "aarch64")]
mod int8_neon;
#[cfg(target_arch = "aarch64")]
mod low_bit_neon;
#[cfg(target_arch = "aarch64")]
mod neon;

use std::fmt;
use std::sync::OnceLock;

use self::int8::{InputGroup, WeightGroup};
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use crate::format::NumberFormat;
use crate::format::WeightFormat;
use attention_rows::AttentionRows;

/// Rows that a group takes at once.
pub(crate) const GROUP: usize = 4;
/// Tokens that [`Table::axpy_tile`] takes at once.
pub(crate) const TILE_TOKENS: usize = 4;
/// Columns of the decoded panel that [`Table::axpy_tile`] takes.
pub(crate) const PANEL: usize = 256;

/// Rows of a panel: one bit each in a mask.
pub(crate) const PANEL_ROWS: usize = u64::BITS as usize;

/// The bytes of the rows of a group.
pub(crate) type Rows<'a> = [&'a [u8]; GROUP];
/// One value for each row of a group.
pub(crate) type RowValues = [f32; GROUP];
/// The scales of the rows of a panel, for each token of a tile.
pub(crate) type TokenScales<'a> = [&'a [f32; PANEL_ROWS]; TILE_TOKENS];
/// The columns of a panel of each token of a tile.
#[repr(align(64))]
pub(crate) struct PanelTile(pub(crate) [[f32; PANEL]; TILE_TOKENS]);

impl Default for PanelTile {
    fn default() -> Self {
        Self([[0.0; PANEL]; TILE_TOKENS])
    }
}

/// The row primitives of one weight format. Rows are bytes that hold as many values as `y`;
/// `ahead` are rows that come later, brought into the cache on the way.
pub(crate) struct RowPrimitives {
    /// Dot products.
    pub(crate) products: Products,
    /// `y += scale · row`, with a scale from
    /// [`round_scale`](WeightFormat::round_scale), and values in an order of the kernel's own.
    pub(crate) axpy: fn(scale: f32, row: &[u8], ahead: &[u8], y: &mut [f32]),
    /// `y += Σ_r scales[r] · rows[r]` in order of `r`, as by [`axpy`](Self::axpy).
    pub(crate) axpy_group: fn(scales: RowValues, rows: Rows<'_>, ahead: Rows<'_>, y: &mut [f32]),
    /// `y += sum`, where `sum` began with zeros and the functions above added to it. Both may be cut
    /// into panels.
    pub(crate) settle: fn(sum: &[f32], y: &mut [f32]),
    /// When groups are faster than rows one by one, for weighted sums.
    pub(crate) grouping: Grouping,
    /// A row as f32.
    pub(crate) decode: fn(row: &[u8], values: &mut [f32]),
}

/// What the dot products of a format multiply its rows with.
pub(crate) enum Products {
    /// Values as they are.
    F32(F32Products),
    /// Values rounded to eight bits.
    Int8(Int8Products),
}

/// Dot products with f32 values, and those of decoded rows.
pub(crate) type F32Products = ProductBodies<f32, f32>;
/// Dot products with values rounded to eight bits, and those of unpacked rows.
pub(crate) type Int8Products = ProductBodies<InputGroup, WeightGroup>;

/// Dot products of rows with tokens that are slices of `X`, as they are or unpacked to slices of `W`
/// first. All of them are the same sum.
pub(crate) struct ProductBodies<X: 'static, W: 'static> {
    /// `row · x`
    pub(crate) dot: fn(row: &[u8], ahead: &[u8], x: &[X]) -> f32,
    /// `rows[r] · x`
    pub(crate) dot_group: fn(rows: Rows<'_>, ahead: Rows<'_>, x: &[X]) -> RowValues,
    /// When groups are faster than rows one by one.
    pub(crate) grouping: Grouping,
    /// Unpacks a row for many tokens.
    pub(crate) unpack: fn(row: &[u8], unpacked: &mut [W]),
    /// `out[t][r] = rows[r] · xs[t]`; rows and tokens have `len` elements each.
    pub(crate) block: fn(rows: &[W], xs: &[X], len: usize, out: &mut [f32]),
    /// `out[k] = row · xs[tokens[k]]`; tokens have as many elements as the row.
    pub(crate) gather: Gather<X, W>,
}

type Gather<X, W> = fn(row: &[W], xs: &[X], tokens: &[u32], out: &mut [f32]);

/// When several rows are better taken at once than one by one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Grouping {
    Never,
    /// Where they do not follow each other: the memory waits less. A single stream is recognised
    /// by the hardware, which runs ahead of it.
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "its products only"))]
    Scattered,
    /// Where they do not follow each other, or are so long that a row and what it is multiplied with do
    /// not stay in the L1 cache together.
    ScatteredOrLong,
    /// Where unpacking takes longer than reading.
    Always,
}

/// One instruction set's bodies of everything.
pub(crate) struct Table {
    name: &'static str,
    f32: RowPrimitives,
    f16: RowPrimitives,
    bf16: RowPrimitives,
    q8_0: RowPrimitives,
    q4_0: RowPrimitives,
    q4_1: RowPrimitives,
    q5_0: RowPrimitives,
    q4_k: RowPrimitives,
    q6_k: RowPrimitives,
    /// Rounds the values of a token to eight bits, see [`int8::quantize`].
    pub(crate) quantize: fn(values: &[f32], groups: &mut [InputGroup]),
    /// `ys[t] += Σ_r scales[t][r] · panel[r]` in order of `r`, with `panel` `[PANEL_ROWS, PANEL]`.
    pub(crate) axpy_tile: fn(scales: TokenScales<'_>, panel: &[f32], ys: &mut PanelTile),
    /// As [`axpy_tile`](Self::axpy_tile) for one token and the rows whose bit is set in `picked`, the
    /// lowest first.
    pub(crate) axpy_picked: AxpyPicked,
    /// Asks for all lines of some bytes.
    pub(crate) prefetch: fn(bytes: &[u8]),
    /// The primitives of attention.
    pub(crate) attention: &'static AttentionRows,
    /// Reads every byte with the widest loads and folds the words by exclusive or: for measuring
    /// bandwidth. The bytes must begin at a multiple of eight.
    pub(crate) fold: fn(bytes: &[u8]) -> u64,
}

pub(crate) type AxpyPicked =
    fn(scales: &[f32; PANEL_ROWS], picked: u64, panel: &[f32], y: &mut [f32; PANEL]);

/// The bodies of [`Int8Products`] that one instruction set has.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
struct Int8Table {
    q8_0: Int8Products,
    q4_0: Int8Products,
    q4_1: Int8Products,
    q5_0: Int8Products,
    q4_k: Int8Products,
}

/// Asserts that rows of blocks hold as many as a token of `n_groups` groups.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
fn check_blocks<F: NumberFormat>(rows: &[&[u8]], n_groups: usize) {
    for row in rows {
        let n_blocks = row.len() / F::BLOCK_BYTES * F::PARTS;
        assert!(
            row.len().is_multiple_of(F::BLOCK_BYTES) && n_blocks.div_ceil(int8::BLOCKS) == n_groups,
            "a row holds as many blocks as the token"
        );
    }
}

/// The CPU kernels of one instruction set.
///
/// # Examples
/// ```
/// use powerinfer_ops::RowKernels;
/// assert_eq!(RowKernels::available()[0].name(), "scalar");
/// assert!(RowKernels::available().contains(&RowKernels::best()));
/// ```
#[derive(Clone, Copy)]
pub struct RowKernels(&'static Table);

impl RowKernels {
    /// The fastest kernels that this CPU runs; detected once.
    #[must_use]
    pub fn best() -> Self {
        static BEST: OnceLock<RowKernels> = OnceLock::new();
        *BEST.get_or_init(|| *Self::available().last().expect("scalar kernels run everywhere"))
    }

    /// All kernels that this CPU runs, slowest first: `scalar`, then `avx2`, `avx512`,
    /// `avx512vnni`; or `scalar`, `neon`.
    #[must_use]
    pub fn available() -> Vec<Self> {
        #[allow(unused_mut, reason = "not every architecture has more than one table")]
        let mut tables = vec![Self(&scalar::TABLE)];
        #[cfg(target_arch = "x86_64")]
        {
            let avx2 = is_x86_feature_detected!("avx2")
                && is_x86_feature_detected!("fma")
                && is_x86_feature_detected!("f16c");
            if avx2 {
                tables.push(Self(&avx2::TABLE));
            }
            let avx512 = avx2
                && is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512vl");
            if avx512 {
                tables.push(Self(&avx512::TABLE));
                if is_x86_feature_detected!("avx512vnni") {
                    tables.push(Self(&avx512::TABLE_VNNI));
                }
            }
        }
        #[cfg(target_arch = "aarch64")]
        if std::arch::is_aarch64_feature_detected!("neon") {
            tables.push(Self(&neon::TABLE));
        }
        tables
    }

    /// The instruction set, for instance `"avx2"`.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.0.name
    }

    /// The primitives of a weight format.
    pub(crate) fn primitives(self, format: WeightFormat) -> &'static RowPrimitives {
        match format {
            WeightFormat::F32 => &self.0.f32,
            WeightFormat::F16 => &self.0.f16,
            WeightFormat::BF16 => &self.0.bf16,
            WeightFormat::Q8_0 => &self.0.q8_0,
            WeightFormat::Q4_0 => &self.0.q4_0,
            WeightFormat::Q4_1 => &self.0.q4_1,
            WeightFormat::Q5_0 => &self.0.q5_0,
            WeightFormat::Q4_K => &self.0.q4_k,
            WeightFormat::Q6_K => &self.0.q6_k,
        }
    }

    /// The primitives that know no weight format.
    pub(crate) fn table(self) -> &'static Table {
        self.0
    }
}

/// The tables for low-bit copies that this CPU runs, slowest first.
fn low_bit_tables() -> Vec<&'static low_bit::LowBitTable> {
    #[allow(unused_mut, reason = "not every architecture has more than one table")]
    let mut tables = vec![&low_bit::SCALAR];
    #[cfg(target_arch = "x86_64")]
    {
        let of_rows = RowKernels::available();
        if of_rows.iter().any(|kernels| kernels.name() == "avx2") {
            tables.push(&low_bit_avx2::TABLE);
        }
        if of_rows.iter().any(|kernels| kernels.name() == "avx512vnni") {
            tables.push(&low_bit_avx512::TABLE);
        }
    }
    #[cfg(target_arch = "aarch64")]
    if RowKernels::available().iter().any(|kernels| kernels.name() == "neon") {
        tables.push(&low_bit_neon::TABLE);
    }
    tables
}

impl fmt::Debug for RowKernels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RowKernels({})", self.name())
    }
}

impl PartialEq for RowKernels {
    fn eq(&self, other: &Self) -> bool {
        std::ptr::eq(self.0, other.0)
    }
}

impl Eq for RowKernels {}
