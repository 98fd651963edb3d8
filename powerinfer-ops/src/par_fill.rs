//! Filling memory on the current thread pool.

use rayon::prelude::*;

/// Cuts `out` into pieces of `piece_bytes` and lets the threads of the current pool fill them:
/// `fill(index, piece)`.
///
/// # Panics
/// If `piece_bytes` is 0.
///
/// # Examples
/// ```
/// let mut out = [0u8; 5];
/// powerinfer_ops::par_fill(&mut out, 2, |index, piece| piece.fill(index as u8));
/// assert_eq!(out, [0, 0, 1, 1, 2]);
/// ```
pub fn par_fill(out: &mut [u8], piece_bytes: usize, fill: impl Fn(usize, &mut [u8]) + Sync) {
    out.par_chunks_mut(piece_bytes).enumerate().for_each(|(index, piece)| fill(index, piece));
}
