//! A predictor in two parts, one for each side of a split.

use std::sync::Arc;

use powerinfer_ops::NeuronIds;
use powerinfer_predictor::{ActivationPredictor, FfnInputs, PredictorKind, Result};

/// The hot and the cold part of a layer's predictor. Together they list what the whole one lists,
/// and take the memory that it takes.
#[derive(Debug, Clone)]
pub(crate) struct SplitPredictor {
    pub(crate) hot: Arc<dyn ActivationPredictor>,
    pub(crate) cold: Arc<dyn ActivationPredictor>,
    /// The layer's ids of the neurons that each part knows, hot and cold.
    ids: [NeuronIds; 2],
}

impl SplitPredictor {
    /// Takes a predictor of all neurons of the layer apart; `None` if that cannot be done.
    pub(crate) fn of(
        whole: &dyn ActivationPredictor,
        hot_ids: &NeuronIds,
        cold_ids: &NeuronIds,
    ) -> Result<Option<Self>> {
        let (Some(hot), Some(cold)) = (whole.restrict(hot_ids)?, whole.restrict(cold_ids)?) else {
            return Ok(None);
        };
        Ok(Some(Self { hot, cold, ids: [hot_ids.clone(), cold_ids.clone()] }))
    }
}

impl ActivationPredictor for SplitPredictor {
    fn predict(&self, inputs: &FfnInputs<'_>, picks: &mut Vec<NeuronIds>) -> Result<()> {
        let (mut hot, mut cold) = (Vec::new(), Vec::new());
        self.hot.predict(inputs, &mut hot)?;
        self.cold.predict(inputs, &mut cold)?;
        picks.resize_with(hot.len(), NeuronIds::new);
        for ((picks, hot), cold) in picks.iter_mut().zip(&hot).zip(&cold) {
            let of_layer = |ids: &NeuronIds, local: &NeuronIds| -> Vec<u32> {
                local.as_slice().iter().map(|&at| ids.as_slice()[at as usize]).collect()
            };
            let mut all = of_layer(&self.ids[0], hot);
            all.extend(of_layer(&self.ids[1], cold));
            all.sort_unstable();
            picks.clear();
            all.into_iter().for_each(|id| picks.push(id));
        }
        Ok(())
    }

    fn kind(&self) -> PredictorKind {
        self.cold.kind()
    }

    fn size_bytes(&self) -> usize {
        // both know the step that comes before the rows
        self.hot.size_bytes() + self.cold.size_bytes() - self.hot.bytes_before()
    }

    fn bytes_before(&self) -> usize {
        self.cold.bytes_before()
    }

    fn describe(&self) -> String {
        self.cold.describe()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{Device, Tensor};
    use powerinfer_ops::{Activation, FfnWeights, LowBitFormat, NeuronMatrix, WeightFormat};
    use powerinfer_predictor::{MlpPredictor, QuantizedGate};
    use testing::Seeded;

    #[test]
    fn the_parts_list_what_the_whole_lists() {
        let (n, d, rank, n_tokens) = (130, 64, 32, 5);
        let m = |n: usize, d: usize, seed| {
            let values = Seeded::new(seed).normal(n * d);
            NeuronMatrix::from_f32(WeightFormat::F16, n, d, &values).unwrap()
        };
        let weights = FfnWeights::new(m(n, d, 1), None, m(n, d, 2), Activation::Relu).unwrap();
        let gate = QuantizedGate::new(&weights, LowBitFormat::Bits3).unwrap();
        let mlp = MlpPredictor::new(m(rank, d, 3), m(n, rank, 4), 5.0).unwrap();
        let x = Seeded::new(5).normal(n_tokens * d);
        let x = Tensor::from_vec(x, (n_tokens, d), &Device::Cpu).unwrap();
        let inputs = FfnInputs { residual: &x, normed: &x };
        let wholes: [&dyn ActivationPredictor; 2] = [&gate, &mlp];
        for whole in wholes {
            let (mut all, mut parts) = (Vec::new(), Vec::new());
            whole.predict(&inputs, &mut all).unwrap();
            assert!(all.iter().any(|picks| !picks.is_empty() && picks.len() < n));
            for share in [0.0, 0.3, 1.0] {
                let hot = Seeded::new(6).ids(n, share);
                let cold = (0..n as u32).filter(|id| !hot.contains(id)).collect();
                let [hot, cold] = [hot, cold].map(|ids| NeuronIds::from_sorted(ids).unwrap());
                let split = SplitPredictor::of(whole, &hot, &cold).unwrap().unwrap();
                split.predict(&inputs, &mut parts).unwrap();
                assert_eq!(parts, all);
                assert_eq!(split.describe(), whole.describe());
                assert_eq!(split.kind(), whole.kind());
            }
        }
        let all = powerinfer_predictor::All::new(n);
        let none = NeuronIds::new();
        assert!(SplitPredictor::of(&all, &none, &none).unwrap().is_none());
    }
}
