//! Networks that are queued on rows that a device holds.

use std::sync::Arc;

use super::backend::{Backend, Block};
use super::device::TOKENS_AT_ONCE;
use super::estimate::HeldEstimate;
use super::exchange::Exchange;
use super::ffn_steps::{FfnScratch, Wanted, ffn};
use super::held::HeldRows;
use super::pending::GpuPending;
use super::queue::Address;
use crate::fast_device::HeldShape;
use crate::{FfnWeights, HeldFfn, HeldNeurons, NeuronIds, OpError, PendingFfn, RowPredictor};

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
        x: &[f32],
    ) -> candle_core::Result<Vec<Group>> {
        let (rows, d_model, n) = (&self.rows, self.rows.d_model(), self.rows.n_neurons());
        let backend = &rows.shared.backend;
        // one network after the other: they share scratch memory
        let ledger = rows.shared.ledger();
        let base = ledger.scratch.as_ref().map_or(Address::NULL, Block::address);
        let (scratch, _) = FfnScratch::carve(base, ledger.shape);
        exchange.begin(backend, x, d_model)?;
        let places = match neurons {
            HeldNeurons::FiringOf(picks) => Some(exchange.write_picks(backend, picks, n)?),
            _ => None,
        };
        let estimate = match neurons {
            HeldNeurons::Predicted(_) => rows.predictor.get().map(HeldEstimate::device),
            _ => None,
        };
        if estimate.is_some() {
            exchange.write_norms(backend, x, d_model)?;
        }
        let all = matches!(neurons, HeldNeurons::All)
            || rows.dense && matches!(neurons, HeldNeurons::Firing);
        let mut groups = Vec::new();
        let n_all = x.len() / d_model.max(1);
        for (at, first) in (0..n_all).step_by(TOKENS_AT_ONCE).enumerate() {
            let n_tokens = TOKENS_AT_ONCE.min(n_all - first);
            let place = places.as_ref().map(|places| places[at]);
            exchange.send(backend, [first, n_tokens, d_model], &scratch)?;
            let wanted = match (place, &estimate) {
                (Some(place), _) => {
                    exchange.send_picks(backend, place, n, &scratch)?;
                    Wanted::Picked
                }
                (None, Some((estimate, margin))) => {
                    exchange.send_norms(backend, [first, n_tokens], &scratch)?;
                    Wanted::Estimated(estimate, *margin)
                }
                (None, None) if all => Wanted::All,
                (None, None) => Wanted::Firing,
            };
            ffn(backend, &rows.device(), wanted, n_tokens, &scratch)?;
            exchange.receive(backend, [first, n_tokens, d_model], &scratch)?;
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
        drop(ledger);
        Ok(groups)
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

    fn has_predictor(&self) -> bool {
        self.rows.predictor.get().is_some()
    }

    fn start(&self, neurons: HeldNeurons<'_>, x: &[f32]) -> Result<Box<dyn PendingFfn>, OpError> {
        self.shape().check(neurons, x)?;
        let mut exchange = self.rows.shared.take_exchange()?;
        let groups = self.queue(&mut exchange, neurons, x);
        let groups = groups.map_err(|error| self.rows.shared.failed(error))?;
        let rows = Arc::clone(&self.rows);
        Ok(Box::new(GpuPending::new(rows, exchange, groups, x.len())))
    }

    fn read_back(&self) -> Result<FfnWeights, OpError> {
        self.rows.read_back()
    }
}
