//! The true mask, from the gate itself and the normed input.

use powerinfer_ops::{Activation, NeuronIds, NeuronMatrix, OpError, linear_into};

use crate::{ActivationPredictor, FfnInputs, PredictorKind, Result, clear_picks};

/// Lists exactly the neurons whose activation is not zero, at the price of the whole gate.
#[derive(Debug, Clone)]
pub struct Oracle {
    gate: NeuronMatrix,
    bias: Option<Vec<f32>>,
    activation: Activation,
}

impl Oracle {
    /// The oracle of a network with this gate, `[n_neurons, d_model]`, and bias, `[n_neurons]`.
    ///
    /// # Errors
    /// [`Error::Op`](crate::Error::Op) if the bias has another length, or if the activation is
    /// never zero, so that there is nothing to predict.
    pub fn new(gate: NeuronMatrix, bias: Option<Vec<f32>>, activation: Activation) -> Result<Self> {
        if !activation.is_sparse() {
            return Err(OpError::NotSparse { activation: activation.name() }.into());
        }
        if let Some(bias) = bias.as_ref().filter(|bias| bias.len() != gate.n_neurons()) {
            let (expected, found) = (vec![gate.n_neurons()], vec![bias.len()]);
            return Err(OpError::Shape { op: "oracle", what: "bias", expected, found }.into());
        }
        Ok(Self { gate, bias, activation })
    }
}

impl ActivationPredictor for Oracle {
    fn predict(&self, inputs: &FfnInputs<'_>, picks: &mut Vec<NeuronIds>) -> Result<()> {
        let mut products = Vec::new();
        linear_into(&self.gate, inputs.normed, &mut products)?;
        clear_picks(picks, inputs.normed.dim(0)?);
        let rows = products.chunks_exact(self.gate.n_neurons().max(1));
        for (products, ids) in rows.zip(picks) {
            for (id, &product) in products.iter().enumerate() {
                let bias = self.bias.as_ref().map_or(0.0, |bias| bias[id]);
                if self.activation.apply(product + bias) != 0.0 {
                    ids.push(u32::try_from(id).expect("a matrix has at most u32::MAX rows"));
                }
            }
        }
        Ok(())
    }

    fn kind(&self) -> PredictorKind {
        PredictorKind::Oracle
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{Device, Tensor};
    use powerinfer_ops::WeightFormat;
    use testing::Seeded;

    #[test]
    fn the_oracle_lists_each_neuron_with_a_positive_gate() {
        let (n, d, n_tokens) = (50, 12, 3);
        let mut random = Seeded::new(1);
        let (weights, bias, x) =
            (random.normal(n * d), random.normal(n), random.normal(n_tokens * d));
        let gate = NeuronMatrix::from_f32(WeightFormat::F32, n, d, &weights).unwrap();
        let oracle = Oracle::new(gate, Some(bias.clone()), Activation::Relu).unwrap();
        let normed = Tensor::from_slice(&x, (n_tokens, d), &Device::Cpu).unwrap();
        let mut picks = vec![NeuronIds::all(7); 5];
        oracle.predict(&FfnInputs { residual: &normed, normed: &normed }, &mut picks).unwrap();
        assert_eq!(picks.len(), n_tokens);
        for (picks, x) in picks.iter().zip(x.chunks_exact(d)) {
            let expected: Vec<u32> = (0..n as u32)
                .filter(|&id| {
                    let row = &weights[id as usize * d..][..d];
                    let sum: f32 = row.iter().zip(x).map(|(w, x)| w * x).sum();
                    sum + bias[id as usize] > 0.0
                })
                .collect();
            assert_eq!(picks.as_slice(), expected);
        }
    }

    #[test]
    fn there_is_no_oracle_where_everything_fires() {
        let gate = NeuronMatrix::from_f32(WeightFormat::F32, 1, 1, &[1.0]).unwrap();
        assert!(Oracle::new(gate.clone(), None, Activation::Silu).is_err());
        assert!(Oracle::new(gate, Some(vec![0.0; 2]), Activation::Relu).is_err());
    }
}
