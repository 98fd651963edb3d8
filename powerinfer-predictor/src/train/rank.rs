//! How much of the parameters each layer gets.

use crate::error::{Error, Result};

/// What a layer's predictor would list at a few ranks, if it is to reach its share of the activation
/// mass. How fast that falls is what the layer's sparsity and skewness come to: a layer of few firing
/// neurons, or of some that fire all the time, is told apart with little.
#[derive(Debug, Clone, PartialEq)]
pub struct RankCurve {
    /// Share of the neurons that fire.
    pub density: f64,
    /// Rank, ascending, and the share of the neurons that are listed.
    pub points: Vec<(usize, f64)>,
}

impl RankCurve {
    /// The first point at which no more than `ratio` neurons are listed for each that fires.
    fn enough(&self, ratio: f64) -> usize {
        let reached = self.points.iter().position(|&(_, picked)| picked <= ratio * self.density);
        reached.unwrap_or(self.points.len() - 1)
    }
}

/// A rank for each layer: each step goes to the layer in which it saves most per rank of what is listed,
/// until each lists at most `ratio` neurons for each that fires, or the ranks sum to `budget`.
/// Each layer gets at least the rank of its first point.
///
/// # Errors
/// [`Error::NoSamples`] for a curve without points.
///
/// # Examples
/// ```
/// use powerinfer_predictor::{RankCurve, allocate_ranks};
/// let curve = |picked: [f64; 3]| RankCurve {
///     density: 0.1,
///     points: vec![(32, picked[0]), (64, picked[1]), (96, picked[2])],
/// };
/// let curves = [curve([0.14, 0.12, 0.11]), curve([0.4, 0.3, 0.14])];
/// assert_eq!(allocate_ranks(&curves, 1.5, 1000)?, [32, 96]);
/// assert_eq!(allocate_ranks(&curves, 1.0, 160)?, [64, 96]);
/// assert_eq!(allocate_ranks(&curves, 1.0, 100)?, [32, 64]);
/// # Ok::<(), powerinfer_predictor::Error>(())
/// ```
pub fn allocate_ranks(curves: &[RankCurve], ratio: f64, budget: usize) -> Result<Vec<usize>> {
    if curves.iter().any(|curve| curve.points.is_empty()) {
        return Err(Error::NoSamples);
    }
    let mut chosen = vec![0; curves.len()];
    loop {
        let used: usize = chosen.iter().zip(curves).map(|(&at, curve)| curve.points[at].0).sum();
        let mut best: Option<(f64, usize, usize)> = None;
        for (layer, curve) in curves.iter().enumerate() {
            let (rank, picked) = curve.points[chosen[layer]];
            for at in chosen[layer] + 1..=curve.enough(ratio) {
                // a step that saves nothing may be on the way to one that does
                let (next, then_picked) = curve.points[at];
                let more = next - rank;
                let saved = (picked - then_picked) / more.max(1) as f64;
                if used + more <= budget && saved > best.map_or(0.0, |(saved, ..)| saved) {
                    best = Some((saved, layer, at));
                }
            }
        }
        match best {
            Some((_, layer, at)) => chosen[layer] = at,
            None => break,
        }
    }
    Ok(chosen.iter().zip(curves).map(|(&at, curve)| curve.points[at].0).collect())
}
