//! Networks that are queued on rows that a device holds.

use std::ops::Range;
use std::sync::Arc;

use super::backend::Backend;
use super::device::TOKENS_AT_ONCE;
use super::estimate_steps::{DeviceEstimate, token_norms};
use super::exchange::{Exchange, PicksPlace};
use super::ffn_steps::{FfnScratch, Wanted, ffn};
use super::held::HeldRows;
use super::held_predictor::HeldPredictor;
use super::mlp_steps::DeviceMlp;
use super::pending::GpuPending;
use super::queue::Address;
use super::sequence::own;
use crate::fast_device::HeldShape;
use crate::{
    DeviceSequence, FfnWeights, HeldFfn, HeldNeurons, NeuronIds, OpError, PendingFfn, RowPredictor,
    Slot,
};

/// Tokens that run together.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Group {
    pub(crate) n_tokens: usize,
    /// Whether all rows are computed.
    pub(crate) all: bool,
    /// Whether the host picked rows.
    pub(crate) listed: bool,
    /// Whether the device did.
    pub(crate) predicted: bool,
    /// Gates that are computed, summed over tokens.
    pub(crate) picked: u64,
}

/// Which neurons are computed, once the host has written what the device is told of them.
enum Picks<'a> {
    All,
    Firing,
    /// Lists, and where they are to be sent from.
    Listed(&'a [NeuronIds], Vec<PicksPlace>),
    Estimated((DeviceEstimate, f32)),
    Scored(DeviceMlp, Seen),
}

/// What a predictor of two layers reads.
#[derive(Debug, Clone, Copy)]
enum Seen {
    /// What the network does.
    Input,
    /// The residual stream, which the host brings.
    Brought,
    /// The residual stream, which is there.
    There(Address),
}

/// Where the tokens are that a network works on.
#[derive(Debug, Clone, Copy)]
enum Tokens<'a> {
    /// On the host, where the outputs go, too.
    Here(&'a [f32]),
    /// On the device, as the residual stream is, `[n_tokens, d_model]` f32 each.
    There { x: Address, y: Address, residual: Address, n_tokens: usize },
}

impl Tokens<'_> {
    fn len(self, d_model: usize) -> usize {
        match self {
            Self::Here(x) => x.len() / d_model.max(1),
            Self::There { n_tokens, .. } => n_tokens,
        }
    }
}

/// What the trait's user holds.
#[derive(Debug)]
pub(crate) struct GpuFfn<B: Backend> {
    rows: Arc<HeldRows<B>>,
}

impl<B: Backend> GpuFfn<B> {
    pub(crate) fn new(rows: Arc<HeldRows<B>>) -> Self {
        Self { rows }
    }

    fn shape(&self) -> HeldShape<'_> {
        let rows = &self.rows;
        HeldShape {
            device: &rows.shared.name,
            activation: rows.settings.activation,
            n_neurons: rows.n_neurons(),
            d_model: rows.d_model(),
            reads_residual: rows.predictor.get().map(HeldPredictor::reads_residual),
        }
    }

    /// Queues all groups of tokens.
    fn queue(
        &self,
        exchange: &mut Exchange<B>,
        neurons: HeldNeurons<'_>,
        tokens: Tokens<'_>,
    ) -> candle_core::Result<Vec<Group>> {
        let (rows, d_model, n) = (&self.rows, self.rows.d_model(), self.rows.n_neurons());
        let backend = &rows.shared.backend;
        // one piece of work after the other: they share scratch memory
        let ledger = rows.shared.ledger();
        let (scratch, _) = FfnScratch::carve(ledger.scratch(), ledger.needs.network);
        match tokens {
            Tokens::Here(x) => exchange.begin(backend, x, d_model)?,
            Tokens::There { n_tokens, .. } => exchange.begin_there(backend, n_tokens)?,
        }
        let picks = match neurons {
            HeldNeurons::FiringOf(lists) => {
                Picks::Listed(lists, exchange.write_picks(backend, lists, n)?)
            }
            HeldNeurons::Predicted(given) => match (rows.predictor.get(), tokens) {
                (Some(HeldPredictor::Estimated(estimate)), _) => {
                    if let Tokens::Here(x) = tokens {
                        exchange.write_norms(backend, x, d_model)?;
                    }
                    Picks::Estimated(estimate.device())
                }
                (Some(HeldPredictor::Scored(mlp)), _) => {
                    let seen = match tokens {
                        _ if !mlp.reads_residual => Seen::Input,
                        Tokens::There { residual, .. } if given.is_empty() => Seen::There(residual),
                        _ => {
                            exchange.write_residual(backend, given)?;
                            Seen::Brought
                        }
                    };
                    Picks::Scored(mlp.device(), seen)
                }
                (None, _) => Picks::Firing,
            },
            HeldNeurons::Firing if !rows.dense => Picks::Firing,
            HeldNeurons::Firing | HeldNeurons::All => Picks::All,
        };
        let n_all = tokens.len(d_model);
        let mut groups = Vec::with_capacity(n_all.div_ceil(TOKENS_AT_ONCE));
        for first in (0..n_all).step_by(TOKENS_AT_ONCE) {
            let range = first..n_all.min(first + TOKENS_AT_ONCE);
            groups.push(self.queue_group(exchange, &picks, (tokens, range), scratch)?);
        }
        exchange.end(backend)?;
        Ok(groups)
    }

    /// Queues a group of tokens.
    fn queue_group(
        &self,
        exchange: &mut Exchange<B>,
        picks: &Picks<'_>,
        (tokens, range): (Tokens<'_>, Range<usize>),
        mut scratch: FfnScratch,
    ) -> candle_core::Result<Group> {
        let (rows, d_model, n) = (&self.rows, self.rows.d_model(), self.rows.n_neurons());
        let backend = &rows.shared.backend;
        let (first, n_tokens) = (range.start, range.len());
        match tokens {
            Tokens::Here(_) => exchange.send(backend, [first, n_tokens, d_model], &scratch)?,
            Tokens::There { x, y, .. } => {
                let before = first * d_model * size_of::<f32>();
                (scratch.x, scratch.y) = (x.offset(before), y.offset(before));
            }
        }
        let wanted = match picks {
            Picks::Listed(_, places) => {
                exchange.send_picks(backend, places[first / TOKENS_AT_ONCE], n, &scratch)?;
                Wanted::Picked
            }
            Picks::Estimated((estimate, margin)) => {
                let norms = scratch.numbers.norms;
                if let Tokens::Here(_) = tokens {
                    exchange.send_beside(backend, [first, n_tokens, 1], norms)?;
                } else {
                    token_norms(backend, scratch.x, [n_tokens, d_model], norms)?;
                }
                Wanted::Estimated(estimate, *margin)
            }
            Picks::Scored(mlp, seen) => {
                let seen = match seen {
                    Seen::Input => scratch.x,
                    Seen::There(residual) => residual.offset(first * d_model * size_of::<f32>()),
                    Seen::Brought => {
                        // where the outputs will be
                        exchange.send_beside(backend, [first, n_tokens, d_model], scratch.y)?;
                        scratch.y
                    }
                };
                Wanted::Scored(mlp, seen)
            }
            Picks::Firing => Wanted::Firing,
            Picks::All => Wanted::All,
        };
        ffn(backend, &rows.device(), wanted, n_tokens, &scratch)?;
        if let Tokens::Here(_) = tokens {
            exchange.receive(backend, [first, n_tokens, d_model], &scratch)?;
        }
        exchange.receive_counts(backend, first / TOKENS_AT_ONCE, &scratch)?;
        let picked = match picks {
            Picks::Listed(lists, _) => lists[range].iter().map(NeuronIds::len).sum(),
            _ => n * n_tokens,
        };
        Ok(Group {
            n_tokens,
            all: matches!(picks, Picks::All),
            listed: matches!(picks, Picks::Listed(..)),
            predicted: matches!(picks, Picks::Estimated(_) | Picks::Scored(..)),
            picked: picked as u64,
        })
    }

    /// Queues the work and keeps what it needs until it is done.
    fn begin(
        &self,
        neurons: HeldNeurons<'_>,
        tokens: Tokens<'_>,
    ) -> Result<GpuPending<B>, OpError> {
        let mut exchange = self.rows.shared.take_exchange()?;
        let groups = self.queue(&mut exchange, neurons, tokens);
        let groups = groups.map_err(|error| self.rows.shared.failed(error))?;
        let (rows, d_model) = (Arc::clone(&self.rows), self.rows.d_model());
        Ok(GpuPending::new(rows, exchange, groups, tokens.len(d_model) * d_model))
    }
}

impl<B: Backend> HeldFfn for GpuFfn<B> {
    fn n_neurons(&self) -> usize {
        self.rows.n_neurons()
    }

    fn d_model(&self) -> usize {
        self.rows.d_model()
    }

    fn size_bytes(&self) -> u64 {
        self.rows.size_bytes()
    }

    /// Not one in a format that there are no kernels for, which the CPU runs.
    fn hold_predictor(&self, predictor: RowPredictor<'_>) -> Result<bool, OpError> {
        match self.rows.add_predictor(predictor) {
            Err(OpError::UnknownFormat { .. }) => Ok(false),
            held => held.map(|()| true),
        }
    }

    fn hold_down_bias(&self, bias: &[f32]) -> Result<bool, OpError> {
        self.rows.add_down_bias(bias).map(|()| true)
    }

    fn has_predictor(&self) -> bool {
        self.rows.predictor.get().is_some()
    }

    fn start(&self, neurons: HeldNeurons<'_>, x: &[f32]) -> Result<Box<dyn PendingFfn>, OpError> {
        self.shape().check(neurons, x)?;
        Ok(Box::new(self.begin(neurons, Tokens::Here(x))?))
    }

    fn start_in(
        &self,
        neurons: HeldNeurons<'_>,
        sequence: &mut dyn DeviceSequence,
        from: Slot,
    ) -> Result<(), OpError> {
        let op = "HeldFfn::start_in";
        let sequence = own(&self.rows.shared, sequence)?;
        sequence.check_width(op, self.rows.d_model())?;
        self.shape().check_neurons(op, neurons, sequence.n_tokens())?;
        let [x, y] = sequence.begin_network(from)?;
        let residual = sequence.slot(Slot::Residual);
        let there = Tokens::There { x, y, residual, n_tokens: sequence.n_tokens() };
        sequence.network_begun(self.begin(neurons, there)?, self.rows.down_bias());
        Ok(())
    }

    fn read_back(&self) -> Result<FfnWeights, OpError> {
        self.rows.read_back()
    }
}
