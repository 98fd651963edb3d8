//! What a predictor that is run with its network needs.

use std::time::Instant;

use super::{NeuronScores, Neurons};
use crate::cpu::product::{InputScratch, Inputs};
use crate::cpu::{RowKernels, rows};
use crate::low_bit_matrix::LowBitInput;
use crate::mask::NeuronIds;

/// Scratch of a predictor.
#[derive(Debug, Default)]
pub(crate) struct PredictorScratch {
    /// A token rounded for a low-bit copy.
    input: LowBitInput,
    /// Hidden values in the form that the last layer's format takes.
    hidden: InputScratch,
    /// Scores of many tokens.
    scores: Vec<f32>,
    /// What was picked for each of many tokens.
    pub(super) picks: Vec<NeuronIds>,
}

/// What a predictor sees of the only token.
#[derive(Clone, Copy)]
pub(super) enum Seen<'a> {
    /// There is none.
    Nothing,
    LowBit(&'a LowBitInput),
    Hidden(Inputs<'a>),
}

impl PredictorScratch {
    /// What the predictor in `neurons` sees of the token `x`.
    pub(super) fn prepare<'a>(
        &'a mut self,
        kernels: RowKernels,
        neurons: Neurons<'a>,
        x: &[f32],
    ) -> Seen<'a> {
        match neurons {
            Neurons::Estimated(..) => {
                self.input.round(kernels, x);
                Seen::LowBit(&self.input)
            }
            Neurons::Scored(NeuronScores { rows, hidden, .. }) => {
                let (formats, rank) = ([rows.format()], rows.d_model());
                Seen::Hidden(Inputs::new(kernels, &formats, rank, hidden, &mut self.hidden))
            }
            _ => Seen::Nothing,
        }
    }

    /// Lists what the predictor in `neurons` picks for each of the tokens `x`; returns the bytes of
    /// its weights.
    pub(super) fn pick(&mut self, kernels: RowKernels, neurons: Neurons<'_>, x: &[f32]) -> usize {
        let Self { hidden: scratch, scores: products, picks, .. } = self;
        match neurons {
            Neurons::Estimated(estimate, margin) => estimate.pick(x, margin, picks),
            Neurons::Scored(scores) => scores.pick_into(kernels, scratch, products, picks),
            _ => {}
        }
        neurons.predictor_bytes()
    }

    /// Bytes for so many tokens, with lists of all neurons.
    pub(crate) fn bytes_at_most([n_neurons, d_model, rank]: [usize; 3], n_tokens: usize) -> usize {
        // scores and ids
        let per_neuron = size_of::<f32>() + size_of::<u32>();
        LowBitInput::bytes_at_most(d_model)
            + InputScratch::bytes_at_most(rank, n_tokens)
            + n_tokens * n_neurons * per_neuron
    }

    pub(crate) fn size_bytes(&self) -> usize {
        let picks: usize = self.picks.iter().map(NeuronIds::len).sum();
        self.input.size_bytes()
            + self.hidden.size_bytes()
            + self.scores.capacity() * size_of::<f32>()
            + picks * size_of::<u32>()
    }
}

impl Neurons<'_> {
    /// Bytes of the predictor, all of which a token reads.
    pub(super) fn predictor_bytes(self) -> usize {
        match self {
            Self::Estimated(estimate, _) => estimate.size_bytes(),
            Self::Scored(scores) => scores.rows.size_bytes(),
            _ => 0,
        }
    }
}

impl NeuronScores<'_> {
    /// Replaces `picks` by the neurons that each token picks.
    ///
    /// # Panics
    /// If `hidden` is not whole tokens of as many values as the rows have.
    pub fn pick(self, picks: &mut Vec<NeuronIds>) {
        let (kernels, mut scratch) = (RowKernels::best(), InputScratch::default());
        self.pick_into(kernels, &mut scratch, &mut Vec::new(), picks);
    }

    fn pick_into(
        self,
        kernels: RowKernels,
        scratch: &mut InputScratch,
        scores: &mut Vec<f32>,
        picks: &mut Vec<NeuronIds>,
    ) {
        let (n_neurons, rank) = (self.rows.n_neurons(), self.rows.d_model());
        assert!(self.hidden.len().is_multiple_of(rank.max(1)), "whole tokens");
        let formats = [self.rows.format()];
        let hidden = Inputs::new(kernels, &formats, rank, self.hidden, scratch);
        scores.clear();
        scores.resize(hidden.n_tokens() * n_neurons, 0.0);
        rows::matvec(kernels, self.rows, hidden, scores);
        picks.resize_with(hidden.n_tokens(), NeuronIds::new);
        for (ids, scores) in picks.iter_mut().zip(scores.chunks_exact(n_neurons.max(1))) {
            ids.clear();
            for (id, &score) in scores.iter().enumerate() {
                if self.reaches(score) {
                    ids.push(id as u32);
                }
            }
        }
    }

    /// Whether a neuron of that score runs; one whose score is not a number does.
    pub(super) fn reaches(self, score: f32) -> bool {
        score >= self.threshold || score.is_nan()
    }
}

pub(crate) fn nanoseconds(began: Instant) -> u64 {
    u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX)
}
