//! The weights of two layers as numbers: what training works on and files hold.

use powerinfer_ops::{NeuronMatrix, OpError, WeightFormat};

use super::{MlpForm, MlpPredictor};
use crate::error::{Error, Result};
use crate::random::Random;
use crate::train::FfnSamples;

/// The weights of a [`MlpPredictor`] in f32.
///
/// # Examples
/// ```
/// use powerinfer_ops::WeightFormat;
/// use powerinfer_predictor::{MlpForm, MlpWeights};
/// let weights = MlpWeights {
///     form: MlpForm::LOW_RANK,
///     fc1: vec![1.0, -1.0],
///     bias: None,
///     fc2: vec![1.0, 0.5, -1.0],
///     rank: 1,
///     threshold: 2.0,
/// };
/// assert_eq!((weights.d_model(), weights.n_neurons(), weights.n_parameters()), (2, 3, 5));
/// assert_eq!(weights.predictor(WeightFormat::F16)?.rank(), 1);
/// # Ok::<(), powerinfer_predictor::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct MlpWeights {
    /// What the first layer reads and what lies between.
    pub form: MlpForm,
    /// `[rank, d_model]`
    pub fc1: Vec<f32>,
    /// `[rank]`, added to what `fc1` gives.
    pub bias: Option<Vec<f32>>,
    /// `[n_neurons, rank]`
    pub fc2: Vec<f32>,
    /// Width of the hidden layer.
    pub rank: usize,
    /// The score that a neuron must reach.
    pub threshold: f32,
}

impl MlpWeights {
    /// Random weights of the original's form for the layer of `samples`, as loud as its inputs ask for.
    #[must_use]
    pub fn random(samples: &FfnSamples, rank: usize, seed: u64) -> Self {
        let (d_model, d_ff) = (samples.d_model(), samples.d_ff());
        let inputs = samples.inputs();
        let squares: f64 = inputs.iter().map(|&x| f64::from(x) * f64::from(x)).sum();
        let loudness = (squares / inputs.len().max(1) as f64).sqrt().max(1e-20) as f32;
        let mut random = Random::new(seed, 1);
        let mut normal = |n: usize, deviation: f32| -> Vec<f32> {
            (0..n).map(|_| deviation * random.normal()).collect()
        };
        let fc1 = normal(rank * d_model, 1.0 / (loudness * (d_model as f32).sqrt()));
        let fc2 = normal(d_ff * rank, 1.0 / (rank as f32).sqrt());
        Self { form: MlpForm::ORIGINAL, fc1, bias: None, fc2, rank, threshold: 0.0 }
    }

    /// Width of the stream that it reads.
    #[must_use]
    pub fn d_model(&self) -> usize {
        self.fc1.len() / self.rank.max(1)
    }

    /// Neurons that it knows.
    #[must_use]
    pub fn n_neurons(&self) -> usize {
        self.fc2.len() / self.rank.max(1)
    }

    /// Numbers in its weights.
    #[must_use]
    pub fn n_parameters(&self) -> u64 {
        (self.fc1.len() + self.fc2.len() + self.bias.as_ref().map_or(0, Vec::len)) as u64
    }

    /// The predictor of these weights, held in `format`.
    ///
    /// # Errors
    /// As [`MlpPredictor::new`] and [`MlpPredictor::with_bias`]; [`Error::Op`] if the weights are
    /// no whole rows, or these no whole blocks of the format.
    pub fn predictor(&self, format: WeightFormat) -> Result<MlpPredictor> {
        let (d_model, n_neurons) = (self.d_model(), self.n_neurons());
        let fc1 = NeuronMatrix::from_f32(format, self.rank, d_model, &self.fc1)?;
        let fc2 = NeuronMatrix::from_f32(format, n_neurons, self.rank, &self.fc2)?;
        let made = MlpPredictor::new(fc1, fc2, self.threshold)?.with_form(self.form);
        match &self.bias {
            Some(bias) => made.with_bias(bias.clone()),
            None => Ok(made),
        }
    }

    /// The weights as they are after they have been held in `format`; biases and threshold stay.
    ///
    /// # Errors
    /// [`Error::Op`] if rows are no whole blocks of the format.
    pub fn rounded(&self, format: WeightFormat) -> Result<Self> {
        let round = |values: &[f32], width: usize| -> Result<Vec<f32>> {
            let mut bytes = vec![0; format.row_bytes(width)?];
            let mut rounded = vec![0.0; values.len()];
            for (values, rounded) in
                values.chunks_exact(width.max(1)).zip(rounded.chunks_exact_mut(width.max(1)))
            {
                format.encode(values, &mut bytes);
                format.decode(&bytes, rounded);
            }
            Ok(rounded)
        };
        let (fc1, fc2) = (round(&self.fc1, self.d_model())?, round(&self.fc2, self.rank)?);
        Ok(Self { fc1, fc2, ..self.clone() })
    }

    /// Fails for weights that are no whole rows or no numbers.
    ///
    /// # Errors
    /// [`Error::Op`], [`Error::NotFinite`].
    pub fn check(&self) -> Result<()> {
        let rank = self.rank;
        let whole = |what: &'static str, len: usize| {
            if rank > 0 && len.is_multiple_of(rank) {
                return Ok(());
            }
            let (expected, found) = (vec![rank], vec![len]);
            Err(OpError::Shape { op: "MlpWeights", what, expected, found })
        };
        whole("fc1", self.fc1.len())?;
        whole("fc2", self.fc2.len())?;
        if let Some(bias) = self.bias.as_ref().filter(|bias| bias.len() != rank) {
            let (expected, found) = (vec![rank], vec![bias.len()]);
            return Err(OpError::Shape { op: "MlpWeights", what: "bias", expected, found }.into());
        }
        let parts = [
            ("fc1.weight", self.fc1.as_slice(), self.d_model()),
            ("fc2.weight", &self.fc2, rank),
            ("fc1.bias", self.bias.as_deref().unwrap_or(&[]), 1),
            ("threshold", &[self.threshold], 1),
        ];
        for (what, values, width) in parts {
            if let Some(at) = values.iter().position(|value| !value.is_finite()) {
                return Err(Error::NotFinite { what, row: at / width.max(1) });
            }
        }
        Ok(())
    }
}
