//! Kernels with their grids and arguments: one function a step.
//!
//! Grids do not depend on how many neurons fire, which only the device knows: they are as large as
//! keeps a device busy, and kernels walk the lists.

use super::queue::{Address, Arg, Launch, Queue};
use super::row_layout::{BLOCK, RowLayout};
use super::tiled_steps::{self, MANY_TOKENS, PRODUCT_THREADS, product_grid, sum_grid};
use crate::Activation;

/// Threads of a block of the kernels that give a warp a row.
pub(super) const ROW_THREADS: u32 = 128;
/// Warps of such a block.
const ROW_WARPS: usize = ROW_THREADS as usize / 32;
/// Blocks of them that keep a large device busy: eight on each of 132 multiprocessors, twice.
const MANY_BLOCKS: usize = 2112;
/// Threads of a block that adds up rows, a piece of sixteen bytes each.
const AXPY_THREADS: u32 = 128;
const SUM_THREADS: u32 = 256;
const QUANTIZE_THREADS: u32 = 256;
/// Tokens that share a row that was read, where there are several but not many.
const TOKEN_TILE: usize = 4;

/// Rows of weights on the device.
#[derive(Debug, Clone, Copy)]
pub struct DeviceRows {
    /// Where they begin.
    pub address: Address,
    /// How they lie.
    pub layout: RowLayout,
    /// How many there are.
    pub n_rows: usize,
}

/// Tokens on the device, as formats take them.
#[derive(Debug, Clone, Copy)]
pub struct DeviceInput {
    /// `[n_tokens, n_columns]` f32.
    pub values: Address,
    /// What [`quantize`] writes; may be null if no matrix takes whole numbers.
    pub numbers: Numbers,
    /// Values of a token.
    pub n_columns: usize,
    /// Tokens; at least one.
    pub n_tokens: usize,
}

/// Where a token's rounded values lie.
#[derive(Debug, Clone, Copy)]
pub struct Numbers {
    /// `[n_tokens, n_blocks · 32]` i8.
    pub numbers: Address,
    /// `[n_tokens, n_blocks]`: scale and sum of a block, both f32.
    pub scales: Address,
    /// `[n_tokens]` f32: Euclidean norms, for a low-bit copy.
    pub norms: Address,
}

/// Blocks that tokens of `n_columns` values are rounded in: whole pieces of every format.
#[must_use]
pub fn n_blocks(n_columns: usize) -> usize {
    n_columns.div_ceil(2 * BLOCK) * 2
}

/// Which rows are computed.
#[derive(Debug, Clone, Copy)]
pub enum Rows {
    /// All of them.
    All,
    /// Those of a list, ascending.
    Listed {
        /// u32 ids.
        ids: Address,
        /// How many there are, a u32.
        count: Address,
    },
}

/// Values of neurons, `[n_tokens, stride]` f32.
#[derive(Debug, Clone, Copy)]
pub struct Values {
    /// Where they begin.
    pub address: Address,
    /// Places of a token.
    pub stride: usize,
    /// Whether a row of a list has the place of its id rather than its place in the list.
    pub by_row: bool,
}

/// What becomes of a product.
#[derive(Debug, Clone, Copy)]
pub struct Finish {
    /// `[n_rows]` f32, or null.
    pub bias: Address,
    /// What is applied to a product with its bias.
    pub then: Then,
    /// What that is multiplied with, laid out as the result, or null. Where it is zero, so is the
    /// result.
    pub factor: Address,
}

impl Finish {
    /// The product itself.
    pub const NOTHING: Self =
        Self { bias: Address::NULL, then: Then::Nothing, factor: Address::NULL };
}

/// What is applied to a product.
#[derive(Debug, Clone, Copy)]
pub enum Then {
    /// It stays as it is.
    Nothing,
    /// An activation function.
    Activation(Activation),
    /// It becomes 1 where it reaches a threshold or is not a number, else 0.
    Reaches(f32),
}

impl Then {
    /// Its number in `rt.cuh`, and its threshold.
    fn code(self) -> (i32, f32) {
        match self {
            Self::Activation(Activation::Relu) => (1, 0.0),
            Self::Activation(Activation::FatRelu { threshold }) => (1, threshold),
            Self::Activation(Activation::Silu) => (2, 0.0),
            Self::Activation(Activation::Gelu) => (3, 0.0),
            Self::Reaches(threshold) => (4, threshold),
            _ => (0, 0.0),
        }
    }
}

/// `out[t, k]`: the products of rows and tokens, finished.
///
/// # Errors
/// The queue's.
pub fn matvec<Q: Queue>(
    queue: &Q,
    weights: &DeviceRows,
    rows: Rows,
    x: &DeviceInput,
    finish: Finish,
    out: Values,
) -> Result<(), Q::Error> {
    if weights.n_rows == 0 {
        return Ok(());
    }
    let (ids, count) = rows.addresses();
    let (act, threshold) = finish.then.code();
    let (layout, format) = (&weights.layout, weights.layout.format.name());
    let (file, kernel, grid, threads) = if x.n_tokens >= MANY_TOKENS {
        let grid = product_grid(layout, weights.n_rows, x.n_tokens);
        ("tiled_matvec", format!("tiled_matvec_{format}"), grid, PRODUCT_THREADS)
    } else {
        let tile = token_tile(x.n_tokens);
        let grid = [row_blocks(weights.n_rows), x.n_tokens.div_ceil(tile) as u32, 1];
        ("sparse_matvec", format!("sparse_matvec_{format}_{tile}"), grid, ROW_THREADS)
    };
    queue.launch(&Launch {
        file,
        kernel: &kernel,
        grid,
        threads,
        args: &[
            weights.address.into(),
            Arg::Size(layout.stride as u64),
            layout.n_pieces.into(),
            ids.into(),
            count.into(),
            weights.n_rows.into(),
            x.values.into(),
            x.numbers.numbers.into(),
            x.numbers.scales.into(),
            layout.n_columns.into(),
            n_blocks(layout.n_columns).into(),
            x.n_tokens.into(),
            finish.bias.into(),
            finish.factor.into(),
            Arg::Int(act),
            threshold.into(),
            out.address.into(),
            out.stride.into(),
            Arg::Int(i32::from(out.by_row)),
        ],
    })
}

/// How neurons are cut into parts whose rows are added up on their own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Parts {
    /// Neurons of a part.
    pub len: usize,
    /// How many there are.
    pub n: usize,
}

impl Parts {
    /// Parts that neurons are cut into at most.
    pub const MOST: usize = 64;
    /// Parts whose sums are added up before others are.
    pub const GROUP: usize = 8;

    /// The parts of some neurons: a cut that depends on nothing else.
    #[must_use]
    pub fn of(n_neurons: usize) -> Self {
        let len = n_neurons.div_ceil(Self::MOST).max(1);
        Self { len, n: n_neurons.div_ceil(len) }
    }

    /// Groups of parts.
    #[must_use]
    pub fn n_groups(&self) -> usize {
        self.n.div_ceil(Self::GROUP)
    }

    /// Bytes of the sums of all parts, of their groups where there are many tokens.
    #[must_use]
    pub fn sums_bytes(&self, n_tokens: usize, n_columns: usize) -> usize {
        let n = if n_tokens >= MANY_TOKENS { self.n_groups() } else { self.n };
        n * n_tokens * n_columns * size_of::<f32>()
    }

    /// The most that this is for any neurons and up to so many tokens.
    #[must_use]
    pub fn sums_bytes_at_most(n_tokens: usize, n_columns: usize) -> usize {
        let most = Self { len: 1, n: Self::MOST };
        let few = n_tokens.min(MANY_TOKENS - 1);
        most.sums_bytes(few, n_columns).max(most.sums_bytes(n_tokens, n_columns))
    }
}

/// Rows to add up, with their weights.
#[derive(Debug, Clone, Copy)]
pub struct Addends {
    /// The list, or all.
    pub rows: Rows,
    /// Where each part begins in the list: what [`compact`](super::list_steps::compact) wrote. Null for all rows.
    pub starts: Address,
    /// What the rows are multiplied with.
    pub scales: Values,
    /// Tokens; at least one.
    pub n_tokens: usize,
}

/// `out[t]`: the sums of the listed rows, each times its scale, and of `add[t]` if that is not null.
/// `sums` has [`Parts::sums_bytes`].
///
/// # Errors
/// The queue's.
pub fn axpy<Q: Queue>(
    queue: &Q,
    weights: &DeviceRows,
    addends: &Addends,
    sums: Address,
    [add, out]: [Address; 2],
) -> Result<(), Q::Error> {
    let (layout, parts) = (&weights.layout, Parts::of(weights.n_rows));
    let n_values = addends.n_tokens * layout.n_columns;
    if n_values == 0 {
        return Ok(());
    }
    if addends.n_tokens >= MANY_TOKENS {
        sum_tiles(queue, weights, addends, sums)?;
        return sum_parts(queue, [sums, add, out], [parts.n_groups(), 1, n_values]);
    }
    let tile = token_tile(addends.n_tokens);
    let (ids, _) = addends.rows.addresses();
    if parts.n > 0 {
        let columns = layout.n_pieces.div_ceil(AXPY_THREADS as usize);
        queue.launch(&Launch {
            file: "sparse_axpy",
            kernel: &format!("sparse_axpy_{}_{tile}", layout.format.name()),
            grid: [columns as u32, parts.n as u32, addends.n_tokens.div_ceil(tile) as u32],
            threads: AXPY_THREADS,
            args: &[
                weights.address.into(),
                Arg::Size(layout.stride as u64),
                layout.n_pieces.into(),
                ids.into(),
                weights.n_rows.into(),
                addends.starts.into(),
                parts.len.into(),
                addends.scales.address.into(),
                addends.scales.stride.into(),
                Arg::Int(i32::from(addends.scales.by_row)),
                addends.n_tokens.into(),
                layout.n_columns.into(),
                sums.into(),
            ],
        })?;
    }
    sum_parts(queue, [sums, add, out], [parts.n, Parts::GROUP, n_values])
}

/// The sums of groups of parts, for many tokens.
fn sum_tiles<Q: Queue>(
    queue: &Q,
    weights: &DeviceRows,
    addends: &Addends,
    sums: Address,
) -> Result<(), Q::Error> {
    let (layout, parts) = (&weights.layout, Parts::of(weights.n_rows));
    if parts.n == 0 {
        return Ok(());
    }
    let (ids, _) = addends.rows.addresses();
    queue.launch(&Launch {
        file: "tiled_axpy",
        kernel: &format!("tiled_axpy_{}", layout.format.name()),
        grid: sum_grid(layout, parts, addends.n_tokens),
        threads: tiled_steps::SUM_THREADS,
        args: &[
            weights.address.into(),
            Arg::Size(layout.stride as u64),
            layout.n_pieces.into(),
            ids.into(),
            weights.n_rows.into(),
            addends.starts.into(),
            parts.len.into(),
            parts.n.into(),
            Parts::GROUP.into(),
            addends.scales.address.into(),
            addends.scales.stride.into(),
            Arg::Int(i32::from(addends.scales.by_row)),
            addends.n_tokens.into(),
            layout.n_columns.into(),
            sums.into(),
        ],
    })
}

/// `out`: the sums of parts, each group of them added up on its own, and of `add` if that is not null.
fn sum_parts<Q: Queue>(
    queue: &Q,
    [sums, add, out]: [Address; 3],
    [n_parts, group, n_values]: [usize; 3],
) -> Result<(), Q::Error> {
    queue.launch(&Launch {
        file: "sparse_axpy",
        kernel: "sum_parts",
        grid: [n_values.div_ceil(SUM_THREADS as usize) as u32, 1, 1],
        threads: SUM_THREADS,
        args: &[sums.into(), n_parts.into(), group.into(), n_values.into(), add.into(), out.into()],
    })
}

/// Rounds tokens to eight bits; `norms` receives their norms up to rounding, if it is not null.
///
/// # Errors
/// The queue's.
pub fn quantize<Q: Queue>(queue: &Q, x: &DeviceInput, norms: Address) -> Result<(), Q::Error> {
    let Numbers { numbers, scales, .. } = x.numbers;
    queue.launch(&Launch {
        file: "quantize",
        kernel: "quantize",
        grid: [x.n_tokens as u32, 1, 1],
        threads: QUANTIZE_THREADS,
        args: &[
            x.values.into(),
            x.n_columns.into(),
            n_blocks(x.n_columns).into(),
            numbers.into(),
            scales.into(),
            norms.into(),
        ],
    })
}

impl Rows {
    /// Ids and their count, or null.
    pub(super) fn addresses(self) -> (Address, Address) {
        match self {
            Self::All => (Address::NULL, Address::NULL),
            Self::Listed { ids, count } => (ids, count),
        }
    }
}

fn token_tile(n_tokens: usize) -> usize {
    if n_tokens == 1 { 1 } else { TOKEN_TILE }
}

pub(super) fn row_blocks(n_rows: usize) -> u32 {
    n_rows.div_ceil(ROW_WARPS).clamp(1, MANY_BLOCKS) as u32
}
