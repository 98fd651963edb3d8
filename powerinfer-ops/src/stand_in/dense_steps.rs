//! What the stand-in computes of the dense parts of a model, on slices.
//!
//! In pieces of [`TOKENS_AT_ONCE`] tokens, so that scratch memory has a bound; where a pass is cut
//! changes no bit.

use std::ops::Range;

use rayon::prelude::*;

use super::executor::TOKENS_AT_ONCE;
use super::tokens::Tokens;
use crate::attention::{AttentionShape, KvPage, KvPages, attend_rows};
use crate::cpu::product::Inputs;
use crate::cpu::{RowKernels, rows};
use crate::error::OpError;
use crate::fast_device::{DensePart, NormPart, Slot};
use crate::matrix::NeuronMatrix;
use crate::residual::add_to_rows;
use crate::workspace::Workspace;

/// Values between two products of a piece.
#[derive(Debug, Default)]
pub(super) struct DenseScratch {
    first: Vec<f32>,
    keys: Vec<f32>,
    values: Vec<f32>,
    second: Vec<f32>,
    third: Vec<f32>,
}

impl DenseScratch {
    /// An upper bound for pieces whose tokens take so many values in all of them.
    pub(super) fn bytes_at_most(values: usize) -> usize {
        // a vector that grows may double
        2 * TOKENS_AT_ONCE * values * size_of::<f32>()
    }

    pub(super) fn size_bytes(&self) -> usize {
        let Self { first, keys, values, second, third } = self;
        let all = [first, keys, values, second, third];
        all.map(|values| values.capacity() * size_of::<f32>()).iter().sum()
    }
}

/// A projection that the device holds.
#[derive(Debug)]
pub(super) struct Projection {
    pub(super) weights: NeuronMatrix,
    pub(super) bias: Vec<f32>,
}

impl Projection {
    pub(super) fn of(part: DensePart<'_>) -> Self {
        Self { weights: part.weights.clone(), bias: part.bias.unwrap_or_default().to_vec() }
    }

    /// `out` becomes `[n_tokens, n_out]`.
    fn run(&self, inputs: Inputs<'_>, out: &mut Vec<f32>) {
        out.resize(inputs.n_tokens() * self.weights.n_neurons(), 0.0);
        rows::matvec(RowKernels::best(), &self.weights, inputs, out);
        add_to_rows(out, &self.bias);
    }

    /// [`run`](Self::run) of tokens `x`.
    pub(super) fn apply(&self, x: &[f32], workspace: &mut Workspace, out: &mut Vec<f32>) {
        let (format, d_model) = (self.weights.format(), self.weights.d_model());
        let scratch = &mut workspace.inputs;
        self.run(Inputs::new(RowKernels::best(), &[format], d_model, x, scratch), out);
    }

    /// Bytes that a piece reads.
    pub(super) fn read_bytes(&self) -> u64 {
        (self.weights.size_bytes() + size_of_val(self.bias.as_slice())) as u64
    }
}

/// A norm that the device holds.
#[derive(Debug)]
pub(super) struct NormValues {
    pub(super) scale: Vec<f32>,
    pub(super) shift: Vec<f32>,
    pub(super) eps: f32,
    pub(super) centred: bool,
}

impl NormValues {
    pub(super) fn of(part: NormPart<'_>) -> Self {
        let NormPart { scale, shift, eps, centred } = part;
        Self { scale: scale.to_vec(), shift: shift.unwrap_or_default().to_vec(), eps, centred }
    }

    pub(super) fn read_bytes(&self) -> u64 {
        ((self.scale.len() + self.shift.len()) * size_of::<f32>()) as u64
    }

    /// Normalises each of `tokens` `[n_tokens, d_model]` where it lies. The sums run from the first value
    /// to the last, as candle's do, so that the bits are those of the host's norms.
    fn apply(&self, tokens: &mut [f32]) {
        let d_model = self.scale.len().max(1);
        tokens.par_chunks_exact_mut(d_model).for_each(|x| {
            if self.centred {
                let (sum, squares) =
                    x.iter().fold((0f32, 0f32), |(sum, squares), v| (sum + v, squares + v * v));
                let mean = sum / d_model as f32;
                let variance = squares / d_model as f32 - mean * mean;
                let share = (variance + self.eps).sqrt().recip();
                let scales = x.iter_mut().zip(&self.scale);
                scales.for_each(|(x, scale)| *x = (*x - mean) * share * scale);
            } else {
                let squares = x.iter().fold(0f32, |squares, v| squares + v * v);
                let root = (squares / d_model as f32 + self.eps).sqrt();
                x.iter_mut().zip(&self.scale).for_each(|(x, scale)| *x = *x / root * scale);
            }
            x.iter_mut().zip(&self.shift).for_each(|(x, shift)| *x += shift);
        });
    }

    /// Normalises the tokens of a slot into a slot.
    pub(super) fn run(&self, tokens: &mut Tokens, from: Slot, to: Slot) {
        tokens.copy_slot(from, to);
        self.apply(tokens.slot_mut(to));
    }
}

/// An attention layer that the device holds.
#[derive(Debug)]
pub(super) struct AttentionValues {
    pub(super) query: Projection,
    pub(super) key: Projection,
    pub(super) value: Projection,
    pub(super) output: Projection,
    /// Without slopes, for the first position.
    pub(super) shape: AttentionShape<'static>,
    pub(super) alibi_slopes: Option<Vec<f32>>,
    pub(super) rotary: bool,
}

impl AttentionValues {
    /// Attends from the tokens of a slot and adds the result to the residual stream.
    pub(super) fn run(
        &self,
        tokens: &mut Tokens,
        (layer, from): (usize, Slot),
        (workspace, scratch): (&mut Workspace, &mut DenseScratch),
    ) -> Result<(), OpError> {
        let kernels = RowKernels::best();
        let (d_model, n_tokens) = (tokens.d_model(), tokens.n_tokens());
        let projections = [&self.query, &self.key, &self.value];
        let formats = projections.map(|projection| projection.weights.format());
        for first in (0..n_tokens).step_by(TOKENS_AT_ONCE) {
            let piece = first..n_tokens.min(first + TOKENS_AT_ONCE);
            let DenseScratch { first: queries, keys, values, second: attended, third: sum } =
                scratch;
            let x = tokens.values(from, piece.clone());
            let inputs = Inputs::new(kernels, &formats, d_model, x, &mut workspace.inputs);
            for (projection, out) in projections.into_iter().zip([&mut *queries, keys, values]) {
                projection.run(inputs, out);
            }
            if self.rotary {
                let angles = tokens.angles(piece.clone());
                let half = self.shape.d_head / 2;
                turn(queries, self.shape.n_heads, half, angles);
                turn(keys, self.shape.n_kv_heads, half, angles);
            }
            let first_position = tokens.first_position() + piece.start;
            tokens.write_pages(layer, first_position, keys, values)?;
            attended.resize(queries.len(), 0.0);
            let alibi_slopes = self.alibi_slopes.as_deref();
            let shape = AttentionShape { first_position, alibi_slopes, ..self.shape };
            let pages = LayerPages(tokens.pages(layer));
            attend_rows(queries, &pages, shape, &mut workspace.attention, attended);
            self.output.apply(attended, workspace, sum);
            rows::add(tokens.values_mut(Slot::Residual, piece), sum);
        }
        Ok(())
    }

    pub(super) fn read_bytes(&self) -> u64 {
        let projections = [&self.query, &self.key, &self.value, &self.output];
        let slopes = self.alibi_slopes.as_deref().map_or(0, size_of_val) as u64;
        slopes + projections.map(Projection::read_bytes).iter().sum::<u64>()
    }
}

/// The pages of one layer.
struct LayerPages<'a>(&'a [KvPage]);

impl KvPages for LayerPages<'_> {
    fn page(&self, index: usize) -> &KvPage {
        &self.0[index]
    }
}

/// Turns the heads of some tokens, whose cosines and sines are `[n_tokens, half]`: the values `i` and
/// `i + half` of each head by the angle `i`.
fn turn(tokens: &mut [f32], n_heads: usize, half: usize, [cos, sin]: [&[f32]; 2]) {
    let angles = cos.chunks_exact(half).zip(sin.chunks_exact(half));
    for (token, (cos, sin)) in tokens.chunks_exact_mut(n_heads * 2 * half).zip(angles) {
        for head in token.chunks_exact_mut(2 * half) {
            let (first, second) = head.split_at_mut(half);
            for ((a, b), (cos, sin)) in first.iter_mut().zip(second).zip(cos.iter().zip(sin)) {
                (*a, *b) = (*a * cos - *b * sin, *a * sin + *b * cos);
            }
        }
    }
}

/// A head that the device holds.
#[derive(Debug)]
pub(super) struct HeadValues {
    pub(super) norm: Option<NormValues>,
    pub(super) projection: Option<Projection>,
    pub(super) weights: NeuronMatrix,
}

impl HeadValues {
    /// Writes the logits of some tokens of the residual stream.
    pub(super) fn run(
        &self,
        tokens: &Tokens,
        wanted: Range<usize>,
        (workspace, scratch): (&mut Workspace, &mut DenseScratch),
        logits: &mut Vec<f32>,
    ) {
        let kernels = RowKernels::best();
        let (format, n_out) = (self.weights.format(), self.weights.n_neurons());
        logits.resize(wanted.len() * n_out, 0.0);
        let pieces = wanted.clone().step_by(TOKENS_AT_ONCE);
        for (first, logits) in pieces.zip(logits.chunks_mut((TOKENS_AT_ONCE * n_out).max(1))) {
            let piece = first..wanted.end.min(first + TOKENS_AT_ONCE);
            let DenseScratch { first: normed, second: projected, .. } = &mut *scratch;
            normed.clear();
            normed.extend_from_slice(tokens.values(Slot::Residual, piece));
            if let Some(norm) = &self.norm {
                norm.apply(normed);
            }
            let mut x = normed;
            if let Some(projection) = &self.projection {
                projection.apply(x, workspace, projected);
                x = projected;
            }
            let d_embedding = self.weights.d_model();
            let inputs = Inputs::new(kernels, &[format], d_embedding, x, &mut workspace.inputs);
            rows::matvec(kernels, &self.weights, inputs, logits);
        }
    }

    pub(super) fn read_bytes(&self) -> u64 {
        let norm = self.norm.as_ref().map_or(0, NormValues::read_bytes);
        let projection = self.projection.as_ref().map_or(0, Projection::read_bytes);
        norm + projection + self.weights.size_bytes() as u64
    }
}
