//! What surrounds the feed-forward network of a layer, on the device: norms, rotary embedding, the
//! key-value cache and attention. Projections are [`matvec`](super::steps::matvec) over all rows.

use super::queue::{Address, Arg, Launch, Queue};
use super::tiled_steps::{MANY_QUERIES, QUERY_TILE};

const NORM_THREADS: u32 = 256;
const ELEMENT_THREADS: u32 = 256;
const ATTENTION_THREADS: u32 = 128;
/// Blocks that copy the values of a head.
const COPY_BLOCKS: u32 = 64;
/// Positions that are summed on their own; as in `attention.cu`.
pub const CHUNK: usize = 256;

/// A norm's weights.
#[derive(Debug, Clone, Copy)]
pub struct DeviceNorm {
    /// `[d_model]` f32.
    pub scale: Address,
    /// Likewise, or null.
    pub shift: Address,
    /// What is added to the mean square.
    pub eps: f32,
    /// Whether the mean is taken away: a layer norm.
    pub centred: bool,
}

/// A residual stream of some tokens.
#[derive(Debug, Clone, Copy)]
pub struct Stream {
    /// `[n_tokens, d_model]` f32.
    pub values: Address,
    /// Likewise, added to it first; or null.
    pub add: Address,
    /// Where the sum goes, which may be `values`; or null.
    pub sum: Address,
    /// Tokens; at least one.
    pub n_tokens: usize,
    /// Values of a token.
    pub d_model: usize,
}

/// `out[t]`: the normed tokens of a stream after what is added to it.
///
/// # Errors
/// The queue's.
pub fn norm<Q: Queue>(
    queue: &Q,
    norm: &DeviceNorm,
    x: &Stream,
    out: Address,
) -> Result<(), Q::Error> {
    queue.launch(&Launch {
        file: "norm",
        kernel: if norm.centred { "layer_norm" } else { "rms_norm" },
        grid: [x.n_tokens as u32, 1, 1],
        threads: NORM_THREADS,
        args: &[
            x.values.into(),
            x.add.into(),
            x.d_model.into(),
            norm.eps.into(),
            norm.scale.into(),
            norm.shift.into(),
            x.sum.into(),
            out.into(),
        ],
    })
}

/// Adds to the tokens `x` `[n_tokens, d_model]` those of `y` and `part` and a bias `[d_model]`, each of
/// which may be null.
///
/// # Errors
/// The queue's.
pub fn residual_add<Q: Queue>(
    queue: &Q,
    x: Address,
    [y, part, bias]: [Address; 3],
    [n_tokens, d_model]: [usize; 2],
) -> Result<(), Q::Error> {
    queue.launch(&Launch {
        file: "residual",
        kernel: "residual_add",
        grid: [n_tokens as u32, elements(d_model), 1],
        threads: ELEMENT_THREADS,
        args: &[x.into(), y.into(), part.into(), bias.into(), d_model.into()],
    })
}

/// `broken[t]`: a u32 for each of the tokens `x` `[n_tokens, d_model]`, 1 if a value is not finite and else
/// 0.
///
/// # Errors
/// The queue's.
pub fn broken_tokens<Q: Queue>(
    queue: &Q,
    x: Address,
    [n_tokens, d_model]: [usize; 2],
    broken: Address,
) -> Result<(), Q::Error> {
    queue.launch(&Launch {
        file: "residual",
        kernel: "broken_tokens",
        grid: [n_tokens as u32, 1, 1],
        threads: ELEMENT_THREADS,
        args: &[x.into(), d_model.into(), broken.into()],
    })
}

/// Turns the heads of `x` `[n_tokens, n_heads · d_head]` in place by the angles in tables
/// `[n_tokens, d_head / 2]` of cosines and sines.
///
/// # Errors
/// The queue's.
pub fn rotary<Q: Queue>(
    queue: &Q,
    x: Address,
    [n_tokens, n_heads, d_head]: [usize; 3],
    [cos, sin]: [Address; 2],
) -> Result<(), Q::Error> {
    let half = d_head / 2;
    queue.launch(&Launch {
        file: "rotary",
        kernel: "rotary",
        grid: [elements(n_heads * half), n_tokens as u32, 1],
        threads: ELEMENT_THREADS,
        args: &[x.into(), n_heads.into(), half.into(), cos.into(), sin.into()],
    })
}

/// The cache of a layer on the device.
#[derive(Debug, Clone, Copy)]
pub struct DeviceCache {
    /// `[n_kv_heads, capacity, d_head]`
    pub keys: Address,
    /// Likewise.
    pub values: Address,
    /// Whether elements are f16; else f32.
    pub half: bool,
    /// Key and value heads.
    pub n_kv_heads: usize,
    /// Values of a head.
    pub d_head: usize,
    /// Positions that there is room for.
    pub capacity: usize,
}

impl DeviceCache {
    fn kernel(&self, stem: &str) -> String {
        format!("{stem}_{}", if self.half { "f16" } else { "f32" })
    }

    /// Writes keys and values `[n_tokens, n_kv_heads · d_head]` f32 of the positions from
    /// `first_position` on, all of them below the capacity.
    ///
    /// # Errors
    /// The queue's.
    pub fn write<Q: Queue>(
        &self,
        queue: &Q,
        [keys, values]: [Address; 2],
        first_position: usize,
        n_tokens: usize,
    ) -> Result<(), Q::Error> {
        for (from, to) in [(keys, self.keys), (values, self.values)] {
            queue.launch(&Launch {
                file: "attention",
                kernel: &self.kernel("kv_write"),
                grid: [elements(self.n_kv_heads * self.d_head), n_tokens as u32, 1],
                threads: ELEMENT_THREADS,
                args: &[
                    from.into(),
                    to.into(),
                    self.n_kv_heads.into(),
                    self.d_head.into(),
                    self.capacity.into(),
                    first_position.into(),
                ],
            })?;
        }
        Ok(())
    }

    /// Copies the first `len` positions to a cache of another capacity.
    ///
    /// # Errors
    /// The queue's.
    pub fn copy<Q: Queue>(&self, queue: &Q, to: &Self, len: usize) -> Result<(), Q::Error> {
        let stride = |cache: &Self| Arg::Size((cache.capacity * cache.d_head) as u64);
        for (from, there) in [(self.keys, to.keys), (self.values, to.values)] {
            queue.launch(&Launch {
                file: "attention",
                kernel: &self.kernel("kv_copy"),
                grid: [COPY_BLOCKS, self.n_kv_heads as u32, 1],
                threads: ELEMENT_THREADS,
                args: &[
                    from.into(),
                    stride(self),
                    there.into(),
                    stride(to),
                    Arg::Size((len * self.d_head) as u64),
                ],
            })?;
        }
        Ok(())
    }
}

/// The queries of an attention layer.
#[derive(Debug, Clone, Copy)]
pub struct Queries {
    /// `[n_tokens, n_heads · d_head]` f32.
    pub values: Address,
    /// Query heads: a multiple of the key-value heads.
    pub n_heads: usize,
    /// Tokens; at least one.
    pub n_tokens: usize,
    /// Position of the first token.
    pub first_position: usize,
    /// Positions that a token sees, its own the last of them; all if `None`.
    pub window: Option<usize>,
    /// What scores are multiplied with.
    pub scale: f32,
    /// ALiBi's slopes, `[n_heads]` f32; or null.
    pub slopes: Address,
}

impl Queries {
    /// Parts that a query's positions are cut into.
    #[must_use]
    pub fn n_chunks(&self) -> usize {
        let first =
            self.window.map_or(0, |window| (self.first_position + 1).saturating_sub(window));
        (self.first_position + self.n_tokens).div_ceil(CHUNK) - first / CHUNK
    }
}

/// Attends from each query to its own position and those before it, all of which are in the cache.
/// `parts` has room for `n_tokens · n_heads · n_chunks · (d_head + 2)` f32 unless there are
/// [many](MANY_QUERIES) tokens; `out` is laid out as the queries.
///
/// # Errors
/// The queue's.
pub fn attention<Q: Queue>(
    queue: &Q,
    queries: &Queries,
    cache: &DeviceCache,
    parts: Address,
    out: Address,
) -> Result<(), Q::Error> {
    let (n_heads, n_tokens) = (queries.n_heads as u32, queries.n_tokens as u32);
    let many = queries.n_tokens >= MANY_QUERIES;
    let tiles = queries.n_tokens.div_ceil(QUERY_TILE) as u32;
    let (stem, grid) = match many {
        true => ("attention_many", [n_heads, tiles, 1]),
        false => ("attention", [n_heads, queries.n_chunks() as u32, n_tokens]),
    };
    let mut args = vec![
        queries.values.into(),
        cache.keys.into(),
        cache.values.into(),
        cache.n_kv_heads.into(),
        cache.d_head.into(),
        cache.capacity.into(),
        queries.first_position.into(),
        // 0 is none, and a window of no position does not exist
        queries.window.unwrap_or(0).into(),
        Arg::Float(queries.scale),
        queries.slopes.into(),
    ];
    match many {
        true => args.extend::<[Arg; 2]>([queries.n_tokens.into(), out.into()]),
        false => args.push(parts.into()),
    }
    queue.launch(&Launch {
        file: "attention",
        kernel: &cache.kernel(stem),
        grid,
        threads: ATTENTION_THREADS,
        args: &args,
    })?;
    if many {
        return Ok(());
    }
    queue.launch(&Launch {
        file: "attention",
        kernel: "merge_chunks",
        grid: [n_heads, n_tokens, 1],
        threads: ATTENTION_THREADS,
        args: &[parts.into(), queries.n_chunks().into(), cache.d_head.into(), out.into()],
    })
}

/// Blocks of threads for so many elements.
fn elements(n: usize) -> u32 {
    n.div_ceil(ELEMENT_THREADS as usize).max(1) as u32
}
