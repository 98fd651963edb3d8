//! Norms, attention and heads that the stand-in holds.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use super::dense_steps::{AttentionValues, HeadValues, NormValues, Projection};
use super::executor::Step;
use super::rows::resident;
use super::sequence::{StandInSequence, check_wanted, chunk_scratch, dense_scratch, own};
use super::shared::{Scratch, Shared, Taken};
use crate::attention::AttentionShape;
use crate::error::OpError;
use crate::fast_device::dense_check::{check_attention, check_head, check_layer, check_norm};
use crate::fast_device::{
    AttentionPart, DensePart, DeviceSequence, HeadPart, HeldAttention, HeldHead, HeldNorm,
    NormPart, Slot,
};

/// Bytes that a projection takes.
fn bytes_of(part: DensePart<'_>) -> Result<u64, OpError> {
    let weights = resident(part.weights, part.weights.n_neurons())?;
    Ok((weights + part.bias.map_or(0, size_of_val)) as u64)
}

/// Bytes that a norm takes.
fn bytes_of_norm(norm: &NormPart<'_>) -> u64 {
    (size_of_val(norm.scale) + norm.shift.map_or(0, size_of_val)) as u64
}

/// A part that is held: its weights, and what they took of the budget.
pub(super) struct Held<T> {
    values: Arc<T>,
    d_model: usize,
    shared: Arc<Shared>,
    taken: Taken,
    #[cfg(test)]
    pub(super) fault: Option<super::tests::Fault>,
}

/// A norm.
pub(super) type StandInNorm = Held<NormValues>;
/// An attention layer.
pub(super) type StandInAttention = Held<AttentionValues>;
/// A head.
pub(super) type StandInHead = Held<HeadValues>;

impl<T> Held<T> {
    fn new(shared: &Arc<Shared>, taken: Taken, d_model: usize, values: T) -> Self {
        let (values, shared) = (Arc::new(values), Arc::clone(shared));
        Self {
            values,
            d_model,
            shared,
            taken,
            #[cfg(test)]
            fault: None,
        }
    }

    /// The device's own sequence, of the right width.
    fn own<'a>(
        &self,
        op: &'static str,
        sequence: &'a mut dyn DeviceSequence,
    ) -> Result<&'a mut StandInSequence, OpError> {
        let sequence = own(&self.shared, sequence)?;
        sequence.check_width(op, self.d_model)?;
        Ok(sequence)
    }

    fn step(&self, sequence: &mut StandInSequence, step: Step) -> Result<Vec<f32>, OpError> {
        sequence.step(
            step,
            #[cfg(test)]
            self.fault,
        )
    }
}

impl<T> fmt::Debug for Held<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Held").field("d_model", &self.d_model).field("taken", &self.taken).finish()
    }
}

impl StandInNorm {
    pub(super) fn hold(shared: &Arc<Shared>, norm: NormPart<'_>) -> Result<Self, OpError> {
        let d_model = check_norm(&norm)?;
        let taken = Taken::new(shared, bytes_of_norm(&norm), Scratch::default())?;
        Ok(Self::new(shared, taken, d_model, NormValues::of(norm)))
    }
}

impl HeldNorm for StandInNorm {
    fn run(&self, sequence: &mut dyn DeviceSequence, from: Slot, to: Slot) -> Result<(), OpError> {
        let sequence = self.own("HeldNorm::run", sequence)?;
        let step = Step::Norm { norm: Arc::clone(&self.values), from, to };
        self.step(sequence, step).map(drop)
    }

    fn size_bytes(&self) -> u64 {
        self.taken.bytes()
    }
}

impl StandInAttention {
    pub(super) fn hold(shared: &Arc<Shared>, part: AttentionPart<'_>) -> Result<Self, OpError> {
        let d_model = check_attention(&part)?;
        let mut bytes = part.alibi_slopes.map_or(0, size_of_val) as u64;
        for projection in [part.query, part.key, part.value, part.output] {
            bytes += bytes_of(projection)?;
        }
        let widths = [part.n_heads, part.n_kv_heads].map(|heads| heads * part.d_head);
        let chunk = chunk_scratch(part.n_heads, part.d_head).chunk;
        let scratch = Scratch { chunk, ..dense_scratch(d_model, widths) };
        let taken = Taken::new(shared, bytes, scratch)?;
        let [query, key, value, output] =
            [part.query, part.key, part.value, part.output].map(Projection::of);
        let alibi_slopes = part.alibi_slopes.map(<[f32]>::to_vec);
        let AttentionPart { n_heads, n_kv_heads, d_head, scale, window, .. } = part;
        let shape = AttentionShape {
            n_heads,
            n_kv_heads,
            d_head,
            scale,
            first_position: 0,
            window,
            alibi_slopes: None,
        };
        let rotary = part.rotary;
        let values = AttentionValues { query, key, value, output, shape, alibi_slopes, rotary };
        Ok(Self::new(shared, taken, d_model, values))
    }
}

impl HeldAttention for StandInAttention {
    fn run(
        &self,
        sequence: &mut dyn DeviceSequence,
        layer: usize,
        from: Slot,
    ) -> Result<(), OpError> {
        let op = "HeldAttention::run";
        let sequence = self.own(op, sequence)?;
        let (shape, have) = (&self.values.shape, sequence.shape());
        check_layer(have, layer, [shape.n_kv_heads, shape.d_head])?;
        let tokens = sequence.tokens()?;
        if self.values.rotary && !tokens.has_angles() {
            let (expected, found) = (vec![tokens.n_tokens() * (have.kv.d_head / 2)], vec![0]);
            return Err(OpError::Shape { op, what: "angles", expected, found });
        }
        let attention = Arc::clone(&self.values);
        self.step(sequence, Step::Attention { attention, layer, from }).map(drop)
    }

    fn size_bytes(&self) -> u64 {
        self.taken.bytes()
    }
}

impl StandInHead {
    pub(super) fn hold(shared: &Arc<Shared>, head: HeadPart<'_>) -> Result<Self, OpError> {
        let d_model = check_head(&head)?;
        let HeadPart { norm, projection, weights } = head;
        let mut bytes = bytes_of(DensePart { weights, bias: None })?;
        bytes += norm.as_ref().map_or(0, bytes_of_norm);
        bytes += projection.map_or(Ok(0), bytes_of)?;
        let scratch = dense_scratch(d_model, [weights.d_model(), 0]);
        let taken = Taken::new(shared, bytes, scratch)?;
        let (norm, projection) = (norm.map(NormValues::of), projection.map(Projection::of));
        let values = HeadValues { norm, projection, weights: weights.clone() };
        Ok(Self::new(shared, taken, d_model, values))
    }
}

impl HeldHead for StandInHead {
    fn run(
        &self,
        sequence: &mut dyn DeviceSequence,
        tokens: Range<usize>,
        logits: &mut Vec<f32>,
    ) -> Result<(), OpError> {
        let sequence = self.own("HeldHead::run", sequence)?;
        check_wanted(sequence.tokens()?, &tokens)?;
        let head = Arc::clone(&self.values);
        let step = Step::Head { head, wanted: tokens, logits: std::mem::take(logits) };
        *logits = self.step(sequence, step)?;
        sequence.cross(logits.len(), Instant::now());
        Ok(())
    }

    fn size_bytes(&self) -> u64 {
        self.taken.bytes()
    }
}
