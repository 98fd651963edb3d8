//! Scratch memory that all work of a device shares, one piece after the other.

use super::device::TOKENS_AT_ONCE;
use super::ffn_steps::ScratchShape;
use super::queue::Address;
use super::steps::{Numbers, n_blocks};
use super::tiled_steps::MANY_QUERIES;

/// What it has to be large enough for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Needs {
    pub(crate) network: ScratchShape,
    pub(crate) dense: DenseShape,
}

impl Needs {
    /// Those of networks of so many neurons, with a predictor of a rank.
    pub(crate) fn of_network(n_neurons: usize, d_model: usize, rank: usize) -> Self {
        let network = ScratchShape { n_neurons, d_model, n_tokens: TOKENS_AT_ONCE, rank };
        Self { network, ..Self::default() }
    }

    /// Those of dense parts.
    pub(crate) fn of_dense(dense: DenseShape) -> Self {
        Self { dense, ..Self::default() }
    }

    /// The least that serve both.
    pub(crate) fn union(self, other: Self) -> Self {
        let (network, dense) = (self.network.union(other.network), self.dense.union(other.dense));
        Self { network, dense }
    }

    /// Bytes of scratch memory.
    pub(crate) fn bytes(self) -> usize {
        self.network.bytes().max(self.dense.bytes())
    }
}

/// The largest dense parts: values of a token.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct DenseShape {
    /// Of what a projection reads, or 0 without projections.
    pub(crate) input: usize,
    /// Of queries.
    pub(crate) query: usize,
    /// Of keys, and of values.
    pub(crate) kv: usize,
    /// Of what a projection gives that is no query, key or value.
    pub(crate) output: usize,
    /// Of a part of attention.
    pub(crate) part: usize,
    /// Parts.
    pub(crate) n_parts: usize,
}

impl DenseShape {
    fn union(self, other: Self) -> Self {
        Self {
            input: self.input.max(other.input),
            query: self.query.max(other.query),
            kv: self.kv.max(other.kv),
            output: self.output.max(other.output),
            part: self.part.max(other.part),
            n_parts: self.n_parts.max(other.n_parts),
        }
    }

    /// Bytes for as many tokens as run together.
    pub(crate) fn bytes(self) -> usize {
        DenseScratch::carve(Address(0), self).1
    }
}

/// Scratch memory of dense parts, each f32 for as many tokens as run together.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DenseScratch {
    pub(crate) numbers: Numbers,
    pub(crate) normed: Address,
    pub(crate) queries: Address,
    pub(crate) keys: Address,
    pub(crate) values: Address,
    pub(crate) attended: Address,
    pub(crate) output: Address,
    pub(crate) parts: Address,
}

impl DenseScratch {
    /// Cuts memory at `base` into pieces for a shape; also says how many bytes that takes.
    pub(crate) fn carve(base: Address, shape: DenseShape) -> (Self, usize) {
        let DenseShape { input, query, kv, output, part, n_parts } = shape;
        let mut used = 0;
        let mut take_for = |n_tokens: usize, bytes: usize| {
            let address = base.offset(used);
            // as the system aligns an allocation
            used += (n_tokens * bytes).next_multiple_of(256);
            address
        };
        // many tokens need no parts
        let parts = take_for(MANY_QUERIES - 1, part * n_parts * 4);
        let mut take = |bytes: usize| take_for(TOKENS_AT_ONCE, bytes);
        let blocks = n_blocks(input);
        let numbers =
            Numbers { numbers: take(blocks * 32), scales: take(blocks * 8), norms: Address::NULL };
        let scratch = Self {
            numbers,
            normed: take(input * 4),
            queries: take(query * 4),
            keys: take(kv * 4),
            values: take(kv * 4),
            attended: take(query * 4),
            output: take(output * 4),
            parts,
        };
        (scratch, used)
    }
}
