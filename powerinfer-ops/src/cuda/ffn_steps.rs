//! A feed-forward network on the device, from the tokens to their outputs, with no trip to the host.
//!
//! The gate goes first, in full or for what a predictor picks; what fires is listed on the device; up and
//! the activation are one kernel over that list; and the rows of down are added up. Where several
//! tokens run together the list is of the neurons that fire for any of them, and the activations
//! of the others are zero.
//!
//! Activations of [many](MANY_TOKENS) tokens have the places of their neurons, so that making a list
//! does not move them. There is no size of a list from which on all rows are computed instead: a list that
//! holds every row costs its making, which is about a hundredth of what the products of many tokens
//! take, and rows that no token needs are left out however few they are.
//!
//! Running all neurons and running those that fire give the same bits, alone or among other tokens:
//! products are sums in one order, and rows of down are added by parts that are cut by neuron.

use super::estimate_steps::{DeviceEstimate, gate_estimate};
use super::list_steps::{Entries, List, compact};
use super::mlp_steps::{DeviceMlp, mlp_picks};
use super::queue::{Address, Queue};
use super::steps::{
    Addends, DeviceInput, DeviceRows, Finish, Numbers, Parts, Rows, Then, Values, axpy, matvec,
    n_blocks, quantize,
};
use super::tiled_steps::MANY_TOKENS;
use crate::Activation;

/// The matrices of a network on the device.
#[derive(Debug, Clone, Copy)]
pub struct DeviceFfn {
    /// `[n_neurons, d_model]`
    pub gate: DeviceRows,
    /// Likewise, of a gated network.
    pub up: Option<DeviceRows>,
    /// Likewise: down, transposed.
    pub down: DeviceRows,
    /// `[n_neurons]` f32, or null.
    pub gate_bias: Address,
    /// `[n_neurons]` f32, or null.
    pub up_bias: Address,
    /// What is applied to the gate products.
    pub activation: Activation,
    /// What is applied to the up products.
    pub up_activation: Option<Activation>,
}

/// Which neurons are computed.
#[derive(Debug, Clone, Copy)]
pub enum Wanted<'a> {
    /// All.
    All,
    /// Those that fire.
    Firing,
    /// Those that fire of [`FfnScratch::picked`], which the host has written: ids, their count, and
    /// where several tokens run `[n_tokens, n_neurons]` f32 values, 1 where a token picks the neuron
    /// of that place in the list, or of that place among all where there are [many](MANY_TOKENS)
    /// tokens, and 0 elsewhere.
    Picked,
    /// Those that fire of the ones that a low-bit copy lets through. The host has written the tokens'
    /// norms.
    Estimated(&'a DeviceEstimate, f32),
    /// Those that fire of the ones that two layers pick, which read these tokens, `[n_tokens, d_model]`
    /// f32.
    Scored(&'a DeviceMlp, Address),
}

/// The largest network and the most tokens that scratch memory is for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ScratchShape {
    /// Neurons.
    pub n_neurons: usize,
    /// Values of a token.
    pub d_model: usize,
    /// Tokens that run together.
    pub n_tokens: usize,
    /// Values between the layers of a predictor; 0 without.
    pub rank: usize,
}

impl ScratchShape {
    /// The least shape that serves both.
    #[must_use]
    pub fn union(self, other: Self) -> Self {
        Self {
            n_neurons: self.n_neurons.max(other.n_neurons),
            d_model: self.d_model.max(other.d_model),
            n_tokens: self.n_tokens.max(other.n_tokens),
            rank: self.rank.max(other.rank),
        }
    }

    /// Bytes of scratch memory.
    #[must_use]
    pub fn bytes(self) -> usize {
        FfnScratch::carve(Address(0), self).1
    }
}

/// Scratch memory of a network.
#[derive(Debug, Clone, Copy)]
pub struct FfnScratch {
    /// `[n_tokens, d_model]` f32.
    pub x: Address,
    /// `x` rounded.
    pub numbers: Numbers,
    /// What the host or a predictor picked.
    pub picked: List,
    /// What fires.
    pub fired: List,
    /// What is left of that after up.
    pub ran: List,
    /// What lies between the layers of a predictor, `[n_tokens, rank]` f32; and that, or what they read,
    /// rounded.
    hidden: (Address, Numbers),
    /// `[n_tokens, n_neurons]` f32.
    h: Address,
    /// Sums of parts.
    sums: Address,
    /// `[n_tokens, d_model]` f32.
    pub y: Address,
    /// The counts of the three lists, two u32 each, in the order in which they are declared.
    pub counts: Address,
}

/// The u32 in [`FfnScratch::counts`].
pub const N_COUNTS: usize = 6;

impl FfnScratch {
    /// Cuts memory at `base` into pieces for a shape; also says how many bytes that takes.
    #[must_use]
    pub fn carve(base: Address, shape: ScratchShape) -> (Self, usize) {
        let ScratchShape { n_neurons, d_model, n_tokens, rank } = shape;
        let mut used = 0;
        let mut take = |bytes: usize| {
            let address = base.offset(used);
            // as the system aligns an allocation
            used += bytes.next_multiple_of(256);
            address
        };
        let tokens = n_tokens * d_model * 4;
        let activations = |n_tokens: usize| n_tokens * n_neurons * 4;
        let few = n_tokens.min(MANY_TOKENS - 1);
        let (counts, tallies) = (take(N_COUNTS * 4), take(n_neurons * 4));
        let mut list = |at: usize, n_tokens| List {
            ids: take(n_neurons * 4),
            values: take(activations(n_tokens)),
            tallies,
            counts: counts.offset(at * 8),
            starts: take((Parts::MOST + 1) * 4),
        };
        let (picked, fired, ran) = (list(0, n_tokens), list(1, few), list(2, few));
        let mut numbers = |blocks: usize, norms: usize| Numbers {
            numbers: take(blocks * 32),
            scales: take(blocks * 8),
            norms: take(norms * 4),
        };
        let rounded = numbers(n_tokens * n_blocks(d_model), n_tokens);
        let widest = if rank > 0 { rank.max(d_model) } else { 0 };
        let between = numbers(n_tokens * n_blocks(widest), 0);
        let scratch = Self {
            x: take(tokens),
            numbers: rounded,
            picked,
            fired,
            ran,
            hidden: (take(n_tokens * rank * 4), between),
            h: take(activations(n_tokens)),
            sums: take(Parts::sums_bytes_at_most(n_tokens, d_model)),
            y: take(tokens),
            counts,
        };
        (scratch, used)
    }
}

/// Computes `y` of the tokens `x` in `scratch`, which is for the network's shape at least; `counts` are
/// those of the lists that were made.
///
/// # Errors
/// The queue's.
pub fn ffn<Q: Queue>(
    queue: &Q,
    weights: &DeviceFfn,
    wanted: Wanted<'_>,
    n_tokens: usize,
    scratch: &FfnScratch,
) -> Result<(), Q::Error> {
    let run = Run { queue, weights, scratch, n_tokens };
    let x = run.input();
    let takes_numbers = |rows: &DeviceRows| rows.layout.takes_numbers();
    let picked_by_numbers = match wanted {
        Wanted::Estimated(..) => true,
        Wanted::Scored(mlp, seen) => seen == x.values && takes_numbers(&mlp.first),
        _ => false,
    };
    if picked_by_numbers
        || takes_numbers(&weights.gate)
        || weights.up.as_ref().is_some_and(takes_numbers)
    {
        quantize(queue, &x, Address::NULL)?;
    }
    let picked = run.pick(wanted, &x)?;
    let then = Then::Activation(weights.activation);
    let finish = Finish { bias: weights.gate_bias, then, factor: picked.mask };
    matvec(queue, &weights.gate, picked.rows, &x, finish, run.values(scratch.h))?;
    compact(queue, &run.entries(scratch.h, picked.rows), &scratch.fired)?;
    match wanted {
        Wanted::All => run.finish_all(&x),
        _ => run.finish_firing(&x),
    }
}

/// Rows that were picked.
struct Picks {
    rows: Rows,
    /// 1 where a token picks the row, or null if every token picks every row.
    mask: Address,
}

struct Run<'a, Q> {
    queue: &'a Q,
    weights: &'a DeviceFfn,
    scratch: &'a FfnScratch,
    n_tokens: usize,
}

impl<Q: Queue> Run<'_, Q> {
    fn input(&self) -> DeviceInput {
        let FfnScratch { x: values, numbers, .. } = *self.scratch;
        let n_columns = self.weights.gate.layout.n_columns;
        DeviceInput { values, numbers, n_columns, n_tokens: self.n_tokens }
    }

    /// Places of a token in activations.
    fn stride(&self) -> usize {
        self.weights.gate.n_rows
    }

    /// Whether activations have the places of their neurons.
    fn by_row(&self) -> bool {
        self.n_tokens >= MANY_TOKENS
    }

    fn values(&self, address: Address) -> Values {
        Values { address, stride: self.stride(), by_row: self.by_row() }
    }

    fn entries(&self, values: Address, rows: Rows) -> Entries {
        let (stride, n_tokens, by_row) = (self.stride(), self.n_tokens, self.by_row());
        Entries { values, stride, n_tokens, rows, by_row, n_neurons: stride }
    }

    /// Where the activations of a list lie.
    fn values_of(&self, list: &List) -> Address {
        if self.by_row() { self.scratch.h } else { list.values }
    }

    fn pick(&self, wanted: Wanted<'_>, x: &DeviceInput) -> Result<Picks, Q::Error> {
        let FfnScratch { picked, h, hidden: (values, numbers), .. } = *self.scratch;
        match wanted {
            Wanted::All | Wanted::Firing => {
                return Ok(Picks { rows: Rows::All, mask: Address::NULL });
            }
            Wanted::Picked => {}
            Wanted::Estimated(estimate, margin) => {
                let picks = if self.by_row() { picked.values } else { h };
                gate_estimate(self.queue, estimate, x, margin, picks)?;
                compact(self.queue, &self.entries(picks, Rows::All), &picked)?;
            }
            Wanted::Scored(mlp, seen) => {
                let hidden = DeviceInput { values, numbers, n_columns: mlp.rank(), ..*x };
                let mut x = *x;
                if seen != x.values {
                    (x.values, x.numbers) = (seen, numbers);
                    if mlp.first.layout.takes_numbers() {
                        quantize(self.queue, &x, Address::NULL)?;
                    }
                }
                let picks = if self.by_row() { picked.values } else { h };
                mlp_picks(self.queue, mlp, [&x, &hidden], picks)?;
                compact(self.queue, &self.entries(picks, Rows::All), &picked)?;
            }
        }
        // a list of one token's is what it picks
        let mask = if self.n_tokens == 1 { Address::NULL } else { picked.values };
        Ok(Picks { rows: picked.rows(), mask })
    }

    /// Up and down of all neurons, whose activations lie in `h`.
    fn finish_all(&self, x: &DeviceInput) -> Result<(), Q::Error> {
        let h = self.scratch.h;
        self.up(Rows::All, x, h)?;
        self.down(Rows::All, Address::NULL, h)
    }

    /// Up and down of those that fire.
    fn finish_firing(&self, x: &DeviceInput) -> Result<(), Q::Error> {
        let FfnScratch { fired, ran, .. } = *self.scratch;
        let values = self.values_of(&fired);
        self.up(fired.rows(), x, values)?;
        // an up product is hardly ever zero, unless a function makes it so
        let last = if self.weights.up.is_some() && self.weights.up_activation.is_some() {
            compact(self.queue, &self.entries(values, fired.rows()), &ran)?;
            ran
        } else {
            fired
        };
        self.down(last.rows(), last.starts, self.values_of(&last))
    }

    /// `h`, times the up products of its neurons where there are any.
    fn up(&self, rows: Rows, x: &DeviceInput, h: Address) -> Result<(), Q::Error> {
        let Some(up) = &self.weights.up else { return Ok(()) };
        let then = self.weights.up_activation.map_or(Then::Nothing, Then::Activation);
        let finish = Finish { bias: self.weights.up_bias, then, factor: h };
        matvec(self.queue, up, rows, x, finish, self.values(h))
    }

    fn down(&self, rows: Rows, starts: Address, scales: Address) -> Result<(), Q::Error> {
        let addends =
            Addends { rows, starts, scales: self.values(scales), n_tokens: self.n_tokens };
        let FfnScratch { sums, y, .. } = *self.scratch;
        axpy(self.queue, &self.weights.down, &addends, sums, [Address::NULL, y])
    }
}
