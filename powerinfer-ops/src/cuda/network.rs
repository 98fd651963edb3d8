//! Networks that are queued on rows that a device holds.

use std::sync::Arc;

use super::backend::Backend;
use super::device::TOKENS_AT_ONCE;
use super::estimate::HeldEstimate;
use super::estimate_steps::token_norms;
use super::exchange::Exchange;
use super::ffn_steps::{FfnScratch, Wanted, ffn};
use super::held::HeldRows;
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

/// Where the tokens are that a network works on.
#[derive(Debug, Clone, Copy)]
enum Tokens<'a> {
    /// On the host, where the outputs go, too.
    Here(&'a [f32]),
    /// On the device, `[n_tokens, d_model]` f32 each.
    There { x: Address, y: Address, n_tokens: usize },
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
            // a low-bit copy reads the input itself
            rank: rows.predictor.get().map(|_| 0),
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
        let estimate = match neurons {
            HeldNeurons::Predicted(_) => rows.predictor.get().map(HeldEstimate::device),
            _ => None,
        };
        match tokens {
            Tokens::Here(x) => {
                exchange.begin(backend, x, d_model)?;
                if estimate.is_some() {
                    exchange.write_norms(backend, x, d_model)?;
                }
            }
            Tokens::There { n_tokens, .. } => exchange.begin_there(backend, n_tokens)?,
        }
        let places = match neurons {
            HeldNeurons::FiringOf(picks) => Some(exchange.write_picks(backend, picks, n)?),
            _ => None,
        };
        let all = matches!(neurons, HeldNeurons::All)
            || rows.dense && matches!(neurons, HeldNeurons::Firing);
        let (mut groups, n_all) = (Vec::new(), tokens.len(d_model));
        for (at, first) in (0..n_all).step_by(TOKENS_AT_ONCE).enumerate() {
            let n_tokens = TOKENS_AT_ONCE.min(n_all - first);
            let place = places.as_ref().map(|places| places[at]);
            let mut scratch = scratch;
            match tokens {
                Tokens::Here(_) => exchange.send(backend, [first, n_tokens, d_model], &scratch)?,
                Tokens::There { x, y, .. } => {
                    let before = first * d_model * size_of::<f32>();
                    (scratch.x, scratch.y) = (x.offset(before), y.offset(before));
                }
            }
            let wanted = match (place, &estimate) {
                (Some(place), _) => {
                    exchange.send_picks(backend, place, n, &scratch)?;
                    Wanted::Picked
                }
                (None, Some((estimate, margin))) => {
                    let norms = scratch.numbers.norms;
                    match tokens {
                        Tokens::Here(_) => {
                            exchange.send_norms(backend, [first, n_tokens], norms)?
                        }
                        Tokens::There { .. } => {
                            token_norms(backend, scratch.x, [n_tokens, d_model], norms)?;
                        }
                    }
                    Wanted::Estimated(estimate, *margin)
                }
                (None, None) if all => Wanted::All,
                (None, None) => Wanted::Firing,
            };
            ffn(backend, &rows.device(), wanted, n_tokens, &scratch)?;
            if let Tokens::Here(_) = tokens {
                exchange.receive(backend, [first, n_tokens, d_model], &scratch)?;
            }
            exchange.receive_counts(backend, at, &scratch)?;
            let picked = match neurons {
                HeldNeurons::FiringOf(picks) => {
                    picks[first..first + n_tokens].iter().map(NeuronIds::len).sum()
                }
                _ => n * n_tokens,
            };
            groups.push(Group {
                n_tokens,
                all,
                listed: place.is_some(),
                predicted: estimate.is_some(),
                picked: picked as u64,
            });
        }
        exchange.end(backend)?;
        Ok(groups)
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

    /// A low-bit copy of the gate; scores of a last layer round in the order of a CPU's kernels, which
    /// the CPU therefore computes itself.
    fn hold_predictor(&self, predictor: RowPredictor<'_>) -> Result<bool, OpError> {
        match predictor {
            RowPredictor::Estimated(estimate, margin) => {
                self.rows.add_estimate(estimate, margin).map(|()| true)
            }
            RowPredictor::Scored(..) => Ok(false),
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
        let there = Tokens::There { x, y, n_tokens: sequence.n_tokens() };
        sequence.network_begun(self.begin(neurons, there)?, self.rows.down_bias());
        Ok(())
    }

    fn read_back(&self) -> Result<FfnWeights, OpError> {
        self.rows.read_back()
    }
}
