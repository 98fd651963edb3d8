//! What every device checks before it holds a dense part, and before it begins a pass.

use super::{AttentionPart, DensePart, HeadPart, NormPart, SequenceShape};
use crate::attention::AttentionShape;
use crate::error::OpError;

impl DensePart<'_> {
    /// Fails unless it is a projection `[n_out, n_in]`.
    pub(crate) fn check(
        &self,
        op: &'static str,
        what: &'static str,
        shape: [usize; 2],
    ) -> Result<(), OpError> {
        let weights = self.weights;
        OpError::check_shape(op, what, &shape, &[weights.n_neurons(), weights.d_model()])?;
        let found = self.bias.map_or(shape[0], <[f32]>::len);
        OpError::check_shape(op, "bias", &shape[..1], &[found])
    }
}

impl NormPart<'_> {
    /// Fails unless scales and shifts are as many; returns the values of a token.
    pub(crate) fn check(&self) -> Result<usize, OpError> {
        let d_model = self.scale.len();
        let found = self.shift.map_or(d_model, <[f32]>::len);
        OpError::check_shape("FastDevice::hold_norm", "shift", &[d_model], &[found])?;
        Ok(d_model)
    }
}

impl AttentionPart<'_> {
    /// Fails unless the projections fit together; returns the values of a token.
    pub(crate) fn check(&self) -> Result<usize, OpError> {
        let op = "FastDevice::hold_attention";
        self.shape().check(op)?;
        let d_model = self.query.weights.d_model();
        let (query, kv) = (self.n_heads * self.d_head, self.n_kv_heads * self.d_head);
        self.query.check(op, "query", [query, d_model])?;
        self.key.check(op, "key", [kv, d_model])?;
        self.value.check(op, "value", [kv, d_model])?;
        self.output.check(op, "output", [d_model, query])?;
        if self.rotary && !self.d_head.is_multiple_of(2) {
            let (expected, found) = (vec![self.d_head + 1], vec![self.d_head]);
            return Err(OpError::Shape { op, what: "heads that turn", expected, found });
        }
        Ok(d_model)
    }

}

impl<'a> AttentionPart<'a> {
    /// Its shape for queries from position 0 on.
    pub(crate) fn shape(&self) -> AttentionShape<'a> {
        AttentionShape {
            n_heads: self.n_heads,
            n_kv_heads: self.n_kv_heads,
            d_head: self.d_head,
            scale: self.scale,
            first_position: 0,
            window: self.window,
            alibi_slopes: self.alibi_slopes,
        }
    }
}

impl HeadPart<'_> {
    /// Fails unless norm, projection and head fit together; returns the values of a token.
    pub(crate) fn check(&self) -> Result<usize, OpError> {
        let op = "FastDevice::hold_head";
        let d_embedding = self.weights.d_model();
        let d_model = self.projection.map_or(d_embedding, |projection| projection.weights.d_model());
        if let Some(projection) = &self.projection {
            projection.check(op, "projection", [d_embedding, d_model])?;
        }
        if let Some(norm) = &self.norm {
            OpError::check_shape(op, "norm", &[d_model], &[norm.check()?])?;
        }
        Ok(d_model)
    }
}

impl SequenceShape {
    /// Fails unless a pass may begin: `have` positions are there.
    pub(crate) fn check_pass(
        &self,
        have: usize,
        (first_position, n_tokens): (usize, usize),
        angles: Option<[&[f32]; 2]>,
    ) -> Result<(), OpError> {
        let op = "DeviceSequence::begin";
        if first_position > have {
            let (expected, found) = (vec![have], vec![first_position]);
            return Err(OpError::Shape { op, what: "first position", expected, found });
        }
        for angles in angles.into_iter().flatten() {
            let expected = [n_tokens * (self.kv.d_head / 2)];
            OpError::check_shape(op, "angles", &expected, &[angles.len()])?;
        }
        Ok(())
    }

    /// Fails unless values of `slot` are those of `n_tokens`.
    pub(crate) fn check_values(
        &self,
        op: &'static str,
        n_tokens: usize,
        found: usize,
    ) -> Result<(), OpError> {
        OpError::check_shape(op, "values", &[n_tokens * self.d_model], &[found])
    }
}
