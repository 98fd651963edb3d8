//! Checks that every part of this crate makes of its operands, and the tests of the GPU side too.

use crate::{NeuronIds, OpError};

/// Fails with [`OpError::Shape`] unless `found` is what was expected.
pub(crate) fn check_shape(
    op: &'static str,
    what: &'static str,
    expected: &[usize],
    found: &[usize],
) -> Result<(), OpError> {
    if expected == found {
        return Ok(());
    }
    let (expected, found) = (expected.to_vec(), found.to_vec());
    Err(OpError::Shape { op, what, expected, found })
}

/// Fails with [`OpError::IdOutOfRange`] unless all ids are rows.
pub(crate) fn check_below(op: &'static str, ids: &NeuronIds, n_rows: usize) -> Result<(), OpError> {
    match ids.last() {
        Some(id) if id as usize >= n_rows => Err(OpError::IdOutOfRange { op, id, n_rows }),
        _ => Ok(()),
    }
}

/// Fails with [`OpError::Shape`] unless key and value heads divide query heads, a window sees something
/// and there is one slope a head.
pub(crate) fn check_heads(
    op: &'static str,
    [n_heads, n_kv_heads, d_head]: [usize; 3],
    window: Option<usize>,
    alibi_slopes: Option<&[f32]>,
) -> Result<(), OpError> {
    if n_kv_heads == 0 || !n_heads.is_multiple_of(n_kv_heads) || d_head == 0 {
        let (expected, found) = (vec![n_heads, n_heads, 1], vec![n_heads, n_kv_heads, d_head]);
        return Err(OpError::Shape { op, what: "heads", expected, found });
    }
    if window == Some(0) {
        return Err(OpError::Shape { op, what: "window", expected: vec![1], found: vec![0] });
    }
    let found = alibi_slopes.map_or(n_heads, <[f32]>::len);
    check_shape(op, "alibi slopes", &[n_heads], &[found])
}
