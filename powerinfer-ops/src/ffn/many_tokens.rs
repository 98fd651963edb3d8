//! Many tokens: each row that any of them needs is read once for all that do.
//!
//! A task takes a block of neurons from the gate to the activations; the weighted sums of the down
//! rows follow when all activations are there.

use rayon::prelude::*;

use super::{FfnCounts, Neurons, Run};
use crate::cpu::PANEL_ROWS;
use crate::cpu::activations::{Activations, any};
use crate::cpu::panel::{PanelScratch, block_products};
use crate::cpu::weighted_sum;
use crate::matrix::NeuronMatrix;

impl Run<'_> {
    /// Adds the outputs for all tokens to `y`.
    pub(super) fn many_tokens(
        &self,
        neurons: Neurons<'_>,
        h: &mut Activations,
        y: &mut [f32],
    ) -> FfnCounts {
        let weights = self.weights;
        h.resize(weights.n_neurons(), self.x.n_tokens());
        h.pick(weights.n_neurons(), neurons);
        let mut counts = h
            .par_blocks_mut()
            .map_init(PanelScratch::default, |scratch, (index, (values, masks))| {
                self.activate_block(scratch, neurons, Block { index, values, masks })
            })
            .reduce(FfnCounts::default, FfnCounts::sum);
        weighted_sum::axpy(self.kernels, &weights.down, h, y);
        counts.ran = h.count();
        counts.bytes += h.count_rows() * weights.down.row_bytes() as u64;
        counts
    }

    /// The activations of a block of neurons.
    fn activate_block(
        &self,
        scratch: &mut PanelScratch,
        neurons: Neurons<'_>,
        block: Block<'_>,
    ) -> FfnCounts {
        let Block { index, values, masks } = block;
        let weights = self.weights;
        let first = index * PANEL_ROWS;
        let keep_all = matches!(neurons, Neurons::All);
        let mut products = |matrix: &NeuronMatrix, masks: &[u64], put: &mut Put<'_>| {
            block_products(scratch, self.kernels, (matrix, index), (self.x, masks), put);
            u64::from(any(masks).count_ones()) * matrix.row_bytes() as u64
        };
        let picked = masks.iter().map(|mask| u64::from(mask.count_ones())).sum();
        values.fill([0.0; PANEL_ROWS]);
        let mut bytes = products(&weights.gate, masks, &mut |t, r, products| {
            let values = values[t][r..].iter_mut().zip(products);
            for ((r, (value, &product)), picked) in (r..).zip(values).zip(bits(masks[t] >> r)) {
                *value = if picked { weights.activate(first + r, product) } else { 0.0 };
            }
        });
        let fired = values.iter().flatten().filter(|&&h| h != 0.0).count() as u64;
        if !keep_all {
            keep_firing(values, masks);
        }
        if let Some(up) = &weights.up {
            bytes += products(up, masks, &mut |t, r, products| {
                for ((r, value), &product) in (r..).zip(&mut values[t][r..]).zip(products) {
                    *value = weights.gated(first + r, *value, product);
                }
            });
            if !keep_all {
                keep_firing(values, masks);
            }
        }
        FfnCounts { fired, bytes, picked, ..FfnCounts::default() }
    }
}

/// What takes products: token, first neuron of the block, values.
type Put<'a> = dyn FnMut(usize, usize, &[f32]) + 'a;

/// A block of neurons: activations and picks by token.
struct Block<'a> {
    index: usize,
    values: &'a mut [[f32; PANEL_ROWS]],
    masks: &'a mut [u64],
}

/// The bits of a mask, the lowest first.
fn bits(mask: u64) -> impl Iterator<Item = bool> {
    (0..PANEL_ROWS).map(move |r| mask >> r & 1 == 1)
}

/// Picks the neurons whose activation is not zero.
fn keep_firing(values: &[[f32; PANEL_ROWS]], masks: &mut [u64]) {
    for (values, mask) in values.iter().zip(masks) {
        *mask = 0;
        for (r, &value) in values.iter().enumerate() {
            *mask |= u64::from(value != 0.0) << r;
        }
    }
}
