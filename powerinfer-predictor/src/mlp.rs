//! Two linear layers: the original's predictor, with a ReLU between, on the residual stream; and a
//! low-rank copy of the gate, with nothing between, on the normed input.

mod form;
mod weights;

use std::sync::Arc;

use powerinfer_ops::{
    Activation, DensePart, MlpLayers, NeuronIds, NeuronMatrix, NeuronScores, Neurons, OpError,
    RowPredictor, linear_into,
};

use crate::{ActivationPredictor, FfnInputs, PredictorKind, Result};

pub use form::{MlpForm, MlpHidden, MlpInput, UnknownName};
pub use weights::MlpWeights;

/// Lists the neurons whose score reaches a threshold: `fc2 · relu(fc1 · residual) ≥ threshold`, with
/// neither biases nor a sigmoid (PowerInfer, "Adaptive Sparsity Predictors"); or as another
/// [`MlpForm`] says.
///
/// The rank, that is the rows of `fc1`, differs from layer to layer, and so may the threshold.
///
/// # Examples
/// ```
/// use candle_core::{Device, Tensor};
/// use powerinfer_ops::{NeuronMatrix, WeightFormat};
/// use powerinfer_predictor::{ActivationPredictor, FfnInputs, MlpPredictor};
///
/// let fc1 = NeuronMatrix::from_f32(WeightFormat::F32, 1, 2, &[1., -1.])?;
/// let fc2 = NeuronMatrix::from_f32(WeightFormat::F32, 3, 1, &[1., 0.5, -1.])?;
/// let predictor = MlpPredictor::new(fc1, fc2, 2.0)?;
/// let x = Tensor::new(&[[5f32, 1.], [1., 5.]], &Device::Cpu)?;
/// let mut picks = Vec::new();
/// predictor.predict(&FfnInputs { residual: &x, normed: &x }, &mut picks)?;
/// assert_eq!(picks[0].as_slice(), &[0, 1]);
/// assert!(picks[1].is_empty());
/// # Ok::<(), powerinfer_predictor::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct MlpPredictor {
    fc1: NeuronMatrix,
    fc2: NeuronMatrix,
    /// `[rank]`
    bias: Option<Vec<f32>>,
    form: MlpForm,
    threshold: f32,
}

impl MlpPredictor {
    /// A predictor of the layers `fc1` `[rank, d_model]` and `fc2` `[n_neurons, rank]`.
    ///
    /// # Errors
    /// [`Error::Op`](crate::Error::Op) if they disagree on the rank,
    /// [`Error::NotFinite`](crate::Error::NotFinite) if a weight or the threshold is not a number.
    pub fn new(fc1: NeuronMatrix, fc2: NeuronMatrix, threshold: f32) -> Result<Self> {
        if fc1.n_neurons() != fc2.d_model() {
            let expected = vec![fc2.n_neurons(), fc1.n_neurons()];
            let found = vec![fc2.n_neurons(), fc2.d_model()];
            return Err(OpError::Shape { op: "MlpPredictor", what: "fc2", expected, found }.into());
        }
        if threshold.is_nan() {
            return Err(crate::Error::NotFinite { what: "threshold", row: 0 });
        }
        for (what, matrix) in [("fc1.weight", &fc1), ("fc2.weight", &fc2)] {
            check_finite(what, matrix)?;
        }
        Ok(Self { fc1, fc2, bias: None, form: MlpForm::ORIGINAL, threshold })
    }

    /// Says what the first layer reads and what lies between the two; the original's form without.
    #[must_use]
    pub fn with_form(mut self, form: MlpForm) -> Self {
        self.form = form;
        self
    }

    /// Adds `bias` `[rank]` to what the first layer gives. A row of `fc1` that is zero and has one
    /// gives each neuron a bias of its own.
    ///
    /// # Errors
    /// [`Error::Op`](crate::Error::Op) if it has another length,
    /// [`Error::NotFinite`](crate::Error::NotFinite) if one is not a number.
    pub fn with_bias(mut self, bias: Vec<f32>) -> Result<Self> {
        if bias.len() != self.rank() {
            let (expected, found) = (vec![self.rank()], vec![bias.len()]);
            return Err(OpError::Shape { op: "MlpPredictor", what: "bias", expected, found }.into());
        }
        if let Some(row) = bias.iter().position(|value| !value.is_finite()) {
            return Err(crate::Error::NotFinite { what: "fc1.bias", row });
        }
        self.bias = Some(bias);
        Ok(self)
    }

    /// What the first layer reads and what lies between the two.
    #[must_use]
    pub fn form(&self) -> MlpForm {
        self.form
    }

    /// Moves the threshold: below 0 lists more neurons and misses fewer.
    #[must_use]
    pub fn with_threshold_shift(mut self, shift: f32) -> Self {
        self.threshold += shift;
        self
    }

    /// The score that a neuron must reach.
    #[must_use]
    pub fn threshold(&self) -> f32 {
        self.threshold
    }

    /// Rows of `fc1`.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.fc1.n_neurons()
    }

    /// Neurons that it knows.
    #[must_use]
    pub fn n_neurons(&self) -> usize {
        self.fc2.n_neurons()
    }

    /// Width of the stream that it reads.
    #[must_use]
    pub fn d_model(&self) -> usize {
        self.fc1.d_model()
    }

    /// What the second layer reads, `[n_tokens, rank]`.
    fn hide(&self, inputs: &FfnInputs<'_>, hidden: &mut Vec<f32>) -> Result<()> {
        let input = match self.form.input {
            MlpInput::Residual => inputs.residual,
            MlpInput::Normed => inputs.normed,
        };
        linear_into(&self.fc1, input, hidden)?;
        if let Some(bias) = &self.bias {
            for hidden in hidden.chunks_exact_mut(bias.len().max(1)) {
                hidden.iter_mut().zip(bias).for_each(|(value, bias)| *value += bias);
            }
        }
        if let Some(activation) = self.activation() {
            // a NaN stays one, so that its scores are none and its neurons are listed
            hidden.iter_mut().for_each(|value| *value = activation.apply(*value));
        }
        Ok(())
    }

    fn activation(&self) -> Option<Activation> {
        match self.form.hidden {
            MlpHidden::Relu => Some(Activation::Relu),
            MlpHidden::Linear => None,
        }
    }

    fn scores<'a>(&'a self, hidden: &'a [f32]) -> NeuronScores<'a> {
        NeuronScores { rows: &self.fc2, hidden, threshold: self.threshold }
    }
}

impl ActivationPredictor for MlpPredictor {
    fn predict(&self, inputs: &FfnInputs<'_>, picks: &mut Vec<NeuronIds>) -> Result<()> {
        let mut hidden = Vec::new();
        self.hide(inputs, &mut hidden)?;
        self.scores(&hidden).pick(picks);
        Ok(())
    }

    fn fused<'a>(
        &'a self,
        inputs: &FfnInputs<'_>,
        hidden: &'a mut Vec<f32>,
    ) -> Result<Option<Neurons<'a>>> {
        self.hide(inputs, hidden)?;
        Ok(Some(Neurons::Scored(self.scores(hidden))))
    }

    fn restrict(&self, ids: &NeuronIds) -> Result<Option<Arc<dyn ActivationPredictor>>> {
        Ok(Some(Arc::new(Self { fc2: self.fc2.pick_rows(ids)?, ..self.clone() })))
    }

    fn rows(&self) -> Option<RowPredictor<'_>> {
        Some(RowPredictor::Scored(MlpLayers {
            first: DensePart { weights: &self.fc1, bias: self.bias.as_deref() },
            reads_residual: self.form.input == MlpInput::Residual,
            activation: self.activation(),
            rows: &self.fc2,
            threshold: self.threshold,
        }))
    }

    fn kind(&self) -> PredictorKind {
        PredictorKind::Mlp
    }

    fn size_bytes(&self) -> usize {
        self.fc1.size_bytes() + self.fc2.size_bytes()
    }

    fn bytes_before(&self) -> usize {
        self.fc1.size_bytes()
    }

    fn describe(&self) -> String {
        let kind = match self.form {
            MlpForm::ORIGINAL => "two layers",
            MlpForm { hidden: MlpHidden::Linear, .. } => "low-rank gate",
            MlpForm { .. } => "two layers on the normed input",
        };
        format!("{kind} of rank {}, threshold {}", self.rank(), self.threshold)
    }
}

fn check_finite(what: &'static str, matrix: &NeuronMatrix) -> Result<()> {
    let mut values = vec![0.0; matrix.d_model()];
    for row in 0..matrix.n_neurons() {
        matrix.row_to_f32(row, &mut values);
        if !values.iter().all(|value| value.is_finite()) {
            return Err(crate::Error::NotFinite { what, row });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{Device, Tensor};
    use powerinfer_ops::WeightFormat;
    use testing::Seeded;

    fn matrix(format: WeightFormat, n: usize, d: usize, seed: u64) -> NeuronMatrix {
        NeuronMatrix::from_f32(format, n, d, &Seeded::new(seed).normal(n * d)).unwrap()
    }

    fn product(matrix: &NeuronMatrix, row: usize, x: &[f64]) -> f64 {
        let mut values = vec![0.0; matrix.d_model()];
        matrix.row_to_f32(row, &mut values);
        values.iter().zip(x).map(|(w, x)| f64::from(*w) * x).sum()
    }

    #[test]
    fn picks_are_those_of_the_plain_definition_in_every_format() {
        let (n, rank, d, n_tokens) = (300, 64, 96, 4);
        for format in [WeightFormat::F32, WeightFormat::F16, WeightFormat::Q8_0, WeightFormat::Q4_0]
        {
            let (fc1, fc2) = (matrix(format, rank, d, 1), matrix(format, n, rank, 2));
            let x = Seeded::new(3).normal(n_tokens * d);
            let residual = Tensor::from_slice(&x, (n_tokens, d), &Device::Cpu).unwrap();
            let predictor = MlpPredictor::new(fc1.clone(), fc2.clone(), 20.0)
                .unwrap()
                .with_threshold_shift(5.0);
            let mut picks = vec![NeuronIds::all(3)];
            let inputs = FfnInputs { residual: &residual, normed: &residual };
            predictor.predict(&inputs, &mut picks).unwrap();
            for (picks, x) in picks.iter().zip(x.chunks_exact(d)) {
                let x: Vec<f64> = x.iter().map(|&x| f64::from(x)).collect();
                let hidden: Vec<f64> =
                    (0..rank).map(|row| product(&fc1, row, &x).max(0.0)).collect();
                let scores: Vec<f64> = (0..n).map(|row| product(&fc2, row, &hidden)).collect();
                let expected: Vec<u32> =
                    (0..n as u32).filter(|&id| scores[id as usize] >= 25.0).collect();
                assert!(!expected.is_empty());
                if format.block_len() == 1 {
                    // none lies so close to the threshold that rounding could decide
                    assert!(scores.iter().all(|score| (score - 25.0).abs() > 1e-3));
                    assert_eq!(picks.as_slice(), expected, "{format}");
                }
                // quantised rows meet inputs of eight bits
                for (id, score) in scores.iter().enumerate() {
                    let picked = picks.as_slice().contains(&(id as u32));
                    assert!(picked == (*score >= 25.0) || (score - 25.0).abs() < 2.0, "{score}");
                }
            }
        }
    }

    #[test]
    fn layers_that_do_not_fit_and_weights_that_are_no_numbers_are_refused() {
        let fc1 = matrix(WeightFormat::F32, 3, 4, 1);
        let error = MlpPredictor::new(fc1.clone(), matrix(WeightFormat::F32, 5, 2, 1), 0.0);
        assert!(matches!(error, Err(crate::Error::Op(OpError::Shape { what: "fc2", .. }))));
        let mut values = vec![1.0; 15];
        values[10] = f32::NAN;
        let fc2 = NeuronMatrix::from_f32(WeightFormat::F16, 5, 3, &values).unwrap();
        let error = MlpPredictor::new(fc1.clone(), fc2, 0.0);
        assert!(matches!(error, Err(crate::Error::NotFinite { what: "fc2.weight", row: 3 })));
        let fc2 = matrix(WeightFormat::F32, 5, 3, 1);
        assert!(MlpPredictor::new(fc1, fc2, f32::NAN).is_err());
    }

    #[test]
    fn an_input_that_is_not_a_number_lists_every_neuron() {
        let predictor = MlpPredictor::new(
            matrix(WeightFormat::F32, 2, 4, 1),
            matrix(WeightFormat::F32, 5, 2, 2),
            9.0,
        )
        .unwrap();
        let x = Tensor::from_slice(&[f32::NAN; 4], (1, 4), &Device::Cpu).unwrap();
        let mut picks = Vec::new();
        predictor.predict(&FfnInputs { residual: &x, normed: &x }, &mut picks).unwrap();
        assert_eq!(picks[0], NeuronIds::all(5));
    }
}
