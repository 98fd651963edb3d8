//! Lists of the neurons that have a value for any token, made on the device.

use super::queue::{Address, Arg, Launch, Queue};
use super::steps::{Parts, Rows};
use super::tiled_steps::MANY_TOKENS;

const COMPACT_THREADS: u32 = 1024;
const TALLY_THREADS: u32 = 256;
/// Entries that a block of it counts.
const TALLIED: usize = 32;

/// What is made into a list.
#[derive(Debug, Clone, Copy)]
pub struct Entries {
    /// `[n_tokens, stride]` f32.
    pub values: Address,
    /// Places of a token.
    pub stride: usize,
    /// Tokens; at least one.
    pub n_tokens: usize,
    /// The neurons that the entries belong to.
    pub rows: Rows,
    /// Whether a value has the place of its neuron rather than that of its entry: only where there are
    /// [many](MANY_TOKENS) tokens.
    pub by_row: bool,
    /// All neurons.
    pub n_neurons: usize,
}

/// A list on the device.
#[derive(Debug, Clone, Copy)]
pub struct List {
    /// u32 ids, a place for each neuron.
    pub ids: Address,
    /// `[n_tokens, stride]` f32 with the stride of what it was made of: the values of its neurons;
    /// or null. Left as it is where entries are by row.
    pub values: Address,
    /// u32, a place for each neuron: for how many tokens each entry has a value. Where there are not
    /// many tokens it may be null.
    pub tallies: Address,
    /// Two u32: its length, and how many values its neurons have, summed over tokens.
    pub counts: Address,
    /// u32, one more than there are [`Parts`].
    pub starts: Address,
}

impl List {
    /// The rows that it lists.
    #[must_use]
    pub fn rows(&self) -> Rows {
        Rows::Listed { ids: self.ids, count: self.counts }
    }
}

/// Lists the entries with a value for any token, ascending.
///
/// # Errors
/// The queue's.
pub fn compact<Q: Queue>(queue: &Q, entries: &Entries, list: &List) -> Result<(), Q::Error> {
    let (ids, count) = entries.rows.addresses();
    let parts = Parts::of(entries.n_neurons);
    let many = entries.n_tokens >= MANY_TOKENS;
    if many && entries.n_neurons > 0 {
        queue.launch(&Launch {
            file: "compact",
            kernel: "tally",
            grid: [entries.n_neurons.div_ceil(TALLIED) as u32, 1, 1],
            threads: TALLY_THREADS,
            args: &[
                entries.values.into(),
                entries.stride.into(),
                entries.n_tokens.into(),
                ids.into(),
                count.into(),
                entries.n_neurons.into(),
                Arg::Int(i32::from(entries.by_row)),
                list.tallies.into(),
            ],
        })?;
    }
    let tallies = if many { list.tallies } else { Address::NULL };
    let kept_values = if entries.by_row { Address::NULL } else { list.values };
    queue.launch(&Launch {
        file: "compact",
        kernel: "compact",
        grid: [1, 1, 1],
        threads: COMPACT_THREADS,
        args: &[
            entries.values.into(),
            entries.stride.into(),
            entries.n_tokens.into(),
            ids.into(),
            count.into(),
            entries.n_neurons.into(),
            tallies.into(),
            list.ids.into(),
            kept_values.into(),
            list.counts.into(),
            list.starts.into(),
            parts.len.into(),
            parts.n.into(),
        ],
    })
}
