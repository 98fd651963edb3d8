//! The threshold of a layer, from text that the weights were not fitted to.

use powerinfer_core::PredictionCounts;

use super::FfnSamples;
use super::layer::scores;
use crate::error::{Error, Result};
use crate::mlp::MlpWeights;

/// Tokens whose scores are in memory at once.
const TILE: usize = 512;
/// Halvings of the interval in which a threshold for a share of picks is sought.
const HALVINGS: usize = 24;

/// What a layer's threshold is to reach.
///
/// # Examples
/// ```
/// use powerinfer_predictor::PredictionTarget;
/// assert_eq!(PredictionTarget::default().recall_mass, 0.97);
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PredictionTarget {
    /// The share of the activation mass to list.
    pub recall_mass: f64,
    /// The most neurons to list, as a share of all, even if that misses the former.
    pub max_density: f64,
}

impl Default for PredictionTarget {
    fn default() -> Self {
        Self { recall_mass: 0.97, max_density: 1.0 }
    }
}

impl MlpWeights {
    /// Sets the threshold to the highest with which at least the share of `target` of the activation mass
    /// of `samples` is listed; or to the lowest that lists no more neurons than it allows. Returns
    /// what it then lists.
    ///
    /// # Errors
    /// [`Error::NotFinite`] if a score is not a number; [`Error::Op`] if the samples are those of
    /// another layer; [`Error::NoSamples`] if nothing fires in them.
    ///
    /// # Examples
    /// ```
    /// use powerinfer_predictor::{FfnSamples, MlpForm, MlpWeights, PredictionTarget};
    /// let mut samples = FfnSamples::new(1, 2, 10);
    /// samples.push(&[3.0, 1.0], &[3.0, 0.0, 1.0, 0.0])?;
    /// let (fc1, fc2) = (vec![1.0], vec![1.0, -1.0]);
    /// let form = MlpForm::LOW_RANK;
    /// let mut weights = MlpWeights { form, fc1, bias: None, fc2, rank: 1, threshold: 0.0 };
    /// let target = PredictionTarget { recall_mass: 0.7, ..PredictionTarget::default() };
    /// let counts = weights.set_threshold(&samples, &target)?;
    /// assert_eq!((weights.threshold, counts.recall_mass()), (3.0, 0.75));
    /// # Ok::<(), powerinfer_predictor::Error>(())
    /// ```
    pub fn set_threshold(
        &mut self,
        samples: &FfnSamples,
        target: &PredictionTarget,
    ) -> Result<PredictionCounts> {
        let mut fired: Vec<(f32, f32)> = Vec::new();
        let mut bounds = (f32::INFINITY, f32::NEG_INFINITY);
        each_token(self, samples, |token, scores| {
            for score in scores {
                bounds = (bounds.0.min(*score), bounds.1.max(*score));
            }
            let (ids, magnitudes) = samples.fired(token);
            fired
                .extend(ids.iter().zip(magnitudes).map(|(&id, &mass)| (scores[id as usize], mass)));
        })?;
        // the same scores in any order are the same sum
        fired.sort_by(|a, b| b.0.total_cmp(&a.0).then(b.1.total_cmp(&a.1)));
        let whole: f64 = fired.iter().map(|&(_, mass)| f64::from(mass)).sum();
        let mut mass = 0.0;
        let reached = fired.iter().find(|&&(_, own)| {
            mass += f64::from(own);
            mass >= target.recall_mass * whole
        });
        let Some(&(threshold, _)) = reached.or(fired.last()) else {
            return Err(Error::NoSamples);
        };
        self.threshold = threshold;
        let mut counts = self.count(samples)?;
        if counts.picked_density() > target.max_density {
            // between a threshold that lists too many and one that lists none
            let (mut low, mut high) = (threshold, bounds.1 + 1.0);
            for _ in 0..HALVINGS {
                self.threshold = low + (high - low) / 2.0;
                counts = self.count(samples)?;
                let too_many = counts.picked_density() > target.max_density;
                *(if too_many { &mut low } else { &mut high }) = self.threshold;
            }
            self.threshold = high;
            counts = self.count(samples)?;
        }
        Ok(counts)
    }

    /// How what the threshold lists compares with what fired.
    ///
    /// # Errors
    /// As [`set_threshold`](Self::set_threshold).
    pub fn count(&self, samples: &FfnSamples) -> Result<PredictionCounts> {
        let mut counts = PredictionCounts::default();
        each_token(self, samples, |token, scores| {
            let (ids, magnitudes) = samples.fired(token);
            counts.neurons += scores.len() as u64;
            counts.picked += scores.iter().filter(|score| **score >= self.threshold).count() as u64;
            counts.fired += ids.len() as u64;
            for (&id, &mass) in ids.iter().zip(magnitudes) {
                counts.mass += f64::from(mass);
                if scores[id as usize] >= self.threshold {
                    counts.hits += 1;
                    counts.mass_hits += f64::from(mass);
                }
            }
        })?;
        Ok(counts)
    }
}

/// Shows the scores of one token after the other.
fn each_token(
    weights: &MlpWeights,
    samples: &FfnSamples,
    mut see: impl FnMut(usize, &[f32]),
) -> Result<()> {
    weights.check()?;
    let (d_model, d_ff) = (samples.d_model(), samples.d_ff());
    for (what, expected, found) in
        [("d_model", d_model, weights.d_model()), ("neurons", d_ff, weights.n_neurons())]
    {
        if expected != found {
            let (expected, found) = (vec![expected], vec![found]);
            let op = "set_threshold";
            return Err(powerinfer_ops::OpError::Shape { op, what, expected, found }.into());
        }
    }
    for (tile, inputs) in samples.inputs().chunks(TILE * d_model.max(1)).enumerate() {
        let all = scores(weights, inputs)?;
        for (i, scores) in all.chunks_exact(d_ff.max(1)).enumerate() {
            let token = tile * TILE + i;
            if !scores.iter().all(|score| score.is_finite()) {
                return Err(Error::NotFinite { what: "score", row: token });
            }
            see(token, scores);
        }
    }
    Ok(())
}
