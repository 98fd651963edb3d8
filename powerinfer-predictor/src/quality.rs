//! How far a prediction is from the truth.

use powerinfer_ops::ActivationMask;

use crate::error::{Error, Result};

/// Counts of a prediction against the oracle; additive over tokens and layers.
///
/// # Examples
/// ```
/// use powerinfer_ops::ActivationMask;
/// use powerinfer_predictor::Quality;
/// let (mut predicted, mut truth) = (ActivationMask::new(1, 10), ActivationMask::new(1, 10));
/// [0, 1, 2].map(|neuron| predicted.set(0, neuron));
/// [2, 3].map(|neuron| truth.set(0, neuron));
/// let quality = Quality::measure(&predicted, &truth)?;
/// assert_eq!((quality.recall(), quality.density()), (0.5, 0.3));
/// # Ok::<(), powerinfer_predictor::Error>(())
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Quality {
    /// Neurons that were predicted and fire.
    pub hits: u64,
    /// Neurons that were predicted.
    pub predicted: u64,
    /// Neurons that fire.
    pub fired: u64,
    /// Neurons there are: tokens × neurons.
    pub total: u64,
}

impl Quality {
    /// Counts where two masks agree.
    ///
    /// # Errors
    /// [`Error::MaskShape`] if they have different shapes.
    pub fn measure(predicted: &ActivationMask, oracle: &ActivationMask) -> Result<Self> {
        let shape = |mask: &ActivationMask| (mask.n_tokens(), mask.n_neurons());
        if shape(predicted) != shape(oracle) {
            let (predicted, oracle) = (shape(predicted), shape(oracle));
            return Err(Error::MaskShape { predicted, oracle });
        }
        let mut quality = Self::default();
        for token in 0..oracle.n_tokens() {
            let ids = predicted.ids(token);
            let hits = ids.as_slice().iter().filter(|&&id| oracle.get(token, id as usize)).count();
            quality.hits += hits as u64;
            quality.predicted += ids.len() as u64;
            quality.fired += oracle.count(token) as u64;
            quality.total += oracle.n_neurons() as u64;
        }
        Ok(quality)
    }

    /// Adds the counts of other tokens or layers.
    pub fn merge(&mut self, other: &Self) {
        self.hits += other.hits;
        self.predicted += other.predicted;
        self.fired += other.fired;
        self.total += other.total;
    }

    /// Share of the firing neurons that were predicted; 1 if none fires.
    #[must_use]
    pub fn recall(&self) -> f64 {
        share(self.hits, self.fired)
    }

    /// Share of the predicted neurons that fire; 1 if none was predicted.
    #[must_use]
    pub fn precision(&self) -> f64 {
        share(self.hits, self.predicted)
    }

    /// Share of all neurons that were predicted.
    #[must_use]
    pub fn density(&self) -> f64 {
        self.predicted as f64 / self.total.max(1) as f64
    }
}

fn share(part: u64, whole: u64) -> f64 {
    if whole == 0 { 1.0 } else { part as f64 / whole as f64 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use powerinfer_ops::NeuronIds;

    #[test]
    fn counts_add_up_over_tokens() {
        let mask = |rows: [&[u32]; 2]| {
            let ids = rows.map(|ids| NeuronIds::from_sorted(ids.to_vec()).unwrap());
            ActivationMask::from_ids(&ids, 100).unwrap()
        };
        let both =
            Quality::measure(&mask([&[1, 2, 70], &[]]), &mask([&[2, 70, 99], &[5]])).unwrap();
        assert_eq!(both, Quality { hits: 2, predicted: 3, fired: 4, total: 200 });
        let mut twice = both;
        twice.merge(&both);
        assert_eq!(twice.recall(), 0.5);
        assert_eq!(twice.precision(), 4.0 / 6.0);
        assert_eq!(twice.density(), 0.015);
    }

    #[test]
    fn nothing_to_find_is_all_found() {
        let empty = ActivationMask::new(3, 10);
        let quality = Quality::measure(&empty, &empty).unwrap();
        assert_eq!((quality.recall(), quality.precision(), quality.density()), (1.0, 1.0, 0.0));
        assert!(Quality::measure(&empty, &ActivationMask::new(3, 11)).is_err());
    }
}
