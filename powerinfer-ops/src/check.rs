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
