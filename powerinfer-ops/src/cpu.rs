//! Kernel tables for the CPU and the one place that asks what the CPU can do.
//!
//! A table holds one body of each row primitive per weight format. Holding a [`RowKernels`] proves
//! that its instructions exist, because [`RowKernels::available`] alone hands them out.
//!
//! Every table keeps one rule, which the equality of dense and sparse results rests on: **the dot
//! product of a row and a vector is one sum in one fixed order**, whichever primitive computes it,
//! and so is each element of an `axpy`.
//! Different tables may use different orders.

pub(crate) mod rows;
mod scalar;
#[cfg(target_arch = "x86_64")]
mod simd;
#[cfg(target_arch = "x86_64")]
mod simd_blocks;
#[cfg(target_arch = "x86_64")]
mod simd_table;

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;

use std::fmt;
use std::sync::OnceLock;

use crate::format::WeightFormat;

/// Rows that a group takes at once.
pub(crate) const GROUP: usize = 4;
/// Tokens that a tile takes at once.
pub(crate) const TILE_TOKENS: usize = 4;
/// Rows that a tile of dot products takes at once.
pub(crate) const TILE_ROWS: usize = 2;
/// Columns of the decoded panel that [`Table::axpy_tile`] takes.
pub(crate) const PANEL: usize = 64;

/// The bytes of the rows of a group.
pub(crate) type Rows<'a> = [&'a [u8]; GROUP];
/// One value for each row of a group.
pub(crate) type RowValues = [f32; GROUP];
/// The bytes of the rows of a tile.
pub(crate) type TileRows<'a> = [&'a [u8]; TILE_ROWS];
/// Some values of each token of a tile.
pub(crate) type TokenValues<'a> = [&'a [f32]; TILE_TOKENS];
/// The dot products of a tile, `[token][row]`.
pub(crate) type DotTile = [[f32; TILE_ROWS]; TILE_TOKENS];
/// The columns of a panel of each token of a tile.
pub(crate) type PanelTile = [[f32; PANEL]; TILE_TOKENS];

/// The row primitives of one weight format. Rows are bytes that hold as many values as `x` or `y`;
/// `ahead` are rows that come later, brought into the cache on the way.
pub(crate) struct RowPrimitives {
    /// `row · x`
    pub(crate) dot: fn(row: &[u8], ahead: &[u8], x: &[f32]) -> f32,
    /// `rows[r] · x`
    pub(crate) dot_group: fn(rows: Rows<'_>, ahead: Rows<'_>, x: &[f32]) -> RowValues,
    /// `rows[r] · xs[t]`
    pub(crate) dot_tile: fn(rows: TileRows<'_>, xs: TokenValues<'_>) -> DotTile,
    /// `y += scale · row`
    pub(crate) axpy: fn(scale: f32, row: &[u8], ahead: &[u8], y: &mut [f32]),
    /// `y += Σ_r scales[r] · rows[r]` in order of `r`
    pub(crate) axpy_group: fn(scales: RowValues, rows: Rows<'_>, ahead: Rows<'_>, y: &mut [f32]),
    /// Whether groups are faster than rows one by one, for rows that stream from memory.
    pub(crate) grouped: bool,
    /// The values `first ..` of a row as f32; `first` begins a block or, where blocks are longer
    /// than that, is a multiple of [`PANEL`].
    pub(crate) decode: fn(row: &[u8], first: usize, values: &mut [f32]),
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
    /// `ys[t] += Σ_r scales[t][r] · panel[r]` in order of `r`, with `panel` `[n_rows, PANEL]` and
    /// each `scales[t]` `n_rows` long.
    pub(crate) axpy_tile: fn(scales: TokenValues<'_>, panel: &[f32], ys: &mut PanelTile),
    /// Reads every byte with the widest loads and folds the words by exclusive or: for measuring
    /// bandwidth. The bytes must begin at a multiple of eight.
    pub(crate) fold: fn(bytes: &[u8]) -> u64,
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

    /// All kernels that this CPU runs, slowest first: `scalar`, then `avx2`, `avx512`.
    #[must_use]
    pub fn available() -> Vec<Self> {
        #[allow(unused_mut, reason = "only x86-64 has more than one table")]
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
            }
        }
        tables
    }

    /// The instruction set, for instance `"avx512"`.
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
