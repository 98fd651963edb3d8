//! What every device checks before it holds a dense part, and before it works on a sequence.

use crate::check::{check_heads, check_shape};
use crate::{AttentionPart, DensePart, HeadPart, NormPart, OpError, SequenceShape};

/// Fails unless it is a projection `[n_out, n_in]`.
fn check_dense(
    op: &'static str,
    what: &'static str,
    part: &DensePart<'_>,
    shape: [usize; 2],
) -> Result<(), OpError> {
    let weights = part.weights;
    check_shape(op, what, &shape, &[weights.n_neurons(), weights.d_model()])?;
    let found = part.bias.map_or(shape[0], <[f32]>::len);
    check_shape(op, "bias", &shape[..1], &[found])
}

/// Fails unless scales and shifts are as many; returns the values of a token.
pub(crate) fn check_norm(norm: &NormPart<'_>) -> Result<usize, OpError> {
    let d_model = norm.scale.len();
    let found = norm.shift.map_or(d_model, <[f32]>::len);
    check_shape("FastDevice::hold_norm", "shift", &[d_model], &[found])?;
    Ok(d_model)
}

/// Fails unless heads and projections fit together; returns the values of a token.
pub(crate) fn check_attention(part: &AttentionPart<'_>) -> Result<usize, OpError> {
    let op = "FastDevice::hold_attention";
    let AttentionPart { n_heads, n_kv_heads, d_head, window, alibi_slopes, .. } = *part;
    check_heads(op, [n_heads, n_kv_heads, d_head], window, alibi_slopes)?;
    let d_model = part.query.weights.d_model();
    let [query, kv] = [n_heads, n_kv_heads].map(|heads| heads.saturating_mul(d_head));
    check_dense(op, "query", &part.query, [query, d_model])?;
    check_dense(op, "key", &part.key, [kv, d_model])?;
    check_dense(op, "value", &part.value, [kv, d_model])?;
    check_dense(op, "output", &part.output, [d_model, query])?;
    if part.rotary && !d_head.is_multiple_of(2) {
        let (expected, found) = (vec![d_head + 1], vec![d_head]);
        return Err(OpError::Shape { op, what: "heads that turn", expected, found });
    }
    Ok(d_model)
}

/// Fails unless norm, projection and head fit together; returns the values of a token.
pub(crate) fn check_head(head: &HeadPart<'_>) -> Result<usize, OpError> {
    let op = "FastDevice::hold_head";
    let d_embedding = head.weights.d_model();
    let d_model = head.projection.map_or(d_embedding, |projection| projection.weights.d_model());
    if let Some(projection) = &head.projection {
        check_dense(op, "projection", projection, [d_embedding, d_model])?;
    }
    if let Some(norm) = &head.norm {
        check_shape(op, "norm", &[d_model], &[check_norm(norm)?])?;
    }
    Ok(d_model)
}

/// Fails unless a pass may begin at `first_position` of a sequence that has `have` positions.
pub(crate) fn check_pass(
    shape: SequenceShape,
    have: usize,
    (first_position, n_tokens): (usize, usize),
    angles: Option<[&[f32]; 2]>,
) -> Result<(), OpError> {
    let op = "DeviceSequence::begin";
    if first_position > have {
        let (expected, found) = (vec![have], vec![first_position]);
        return Err(OpError::Shape { op, what: "first position", expected, found });
    }
    let expected = n_tokens.saturating_mul(shape.kv.d_head / 2);
    let mut angles = angles.into_iter().flatten();
    angles.try_for_each(|angles| check_shape(op, "angles", &[expected], &[angles.len()]))
}

/// Fails unless there are as many values as `n_tokens` have.
pub(crate) fn check_values(
    op: &'static str,
    shape: SequenceShape,
    n_tokens: usize,
    found: usize,
) -> Result<(), OpError> {
    check_shape(op, "values", &[n_tokens * shape.d_model], &[found])
}

/// Fails unless an attention layer fits a sequence and a layer of it.
pub(crate) fn check_layer(
    shape: SequenceShape,
    layer: usize,
    [n_kv_heads, d_head]: [usize; 2],
) -> Result<(), OpError> {
    let op = "HeldAttention::run";
    if layer >= shape.n_layers {
        let (expected, found) = (vec![shape.n_layers], vec![layer]);
        return Err(OpError::Shape { op, what: "layer", expected, found });
    }
    check_shape(op, "heads", &[n_kv_heads, d_head], &[shape.kv.n_kv_heads, shape.kv.d_head])
}
