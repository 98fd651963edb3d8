//! A low-bit copy of the gate, which needs no training and no text.

use std::sync::Arc;

use powerinfer_ops::{
    FfnWeights, GateEstimate, LowBitFormat, NeuronIds, Neurons, RowPredictor, with_f32,
};

use crate::{ActivationPredictor, FfnInputs, PredictorKind, Result};

/// Lists the neurons whose gate product is likely to be positive, going by a copy of the gate in 2,
/// 3 or 4 bits a weight and the input in 8.
///
/// The margin is in standard deviations of the copy's error: 0 takes the estimate at its word, more
/// lists more neurons and misses fewer. What is listed in vain costs a row of the gate, whose true
/// product decides; what is missed had a product close to zero.
///
/// # Examples
/// ```
/// use candle_core::{Device, Tensor};
/// use powerinfer_ops::{Activation, FfnWeights, LowBitFormat, NeuronMatrix, WeightFormat};
/// use powerinfer_predictor::{ActivationPredictor, FfnInputs, QuantizedGate};
///
/// let gate = NeuronMatrix::from_f32(WeightFormat::F32, 2, 2, &[1., 1., -1., -1.])?;
/// let weights = FfnWeights::new(gate.clone(), None, gate, Activation::Relu)?;
/// let predictor = QuantizedGate::new(&weights, LowBitFormat::Bits3)?;
/// let x = Tensor::new(&[[3f32, 1.]], &Device::Cpu)?;
/// let mut picks = Vec::new();
/// predictor.predict(&FfnInputs { residual: &x, normed: &x }, &mut picks)?;
/// assert_eq!(picks[0].as_slice(), &[0]);
/// # Ok::<(), powerinfer_predictor::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct QuantizedGate {
    estimate: GateEstimate,
    margin: f32,
}

impl QuantizedGate {
    /// A copy of the gate of `weights`, with the margin of [`default_margin`](Self::default_margin).
    /// Runs on the current pool.
    ///
    /// # Errors
    /// [`Error::Op`](crate::Error::Op) if nothing is zero under the activation, or memory is short.
    pub fn new(weights: &FfnWeights, bits: LowBitFormat) -> Result<Self> {
        let FfnWeights { gate, gate_bias, activation, .. } = weights;
        let estimate = GateEstimate::new(bits, gate, gate_bias.as_deref(), *activation)?;
        Ok(Self { estimate, margin: Self::default_margin(bits) })
    }

    /// Sets the margin, in standard deviations of the copy's error.
    #[must_use]
    pub fn with_margin(mut self, margin: f32) -> Self {
        self.margin = margin;
        self
    }

    /// The margin that keeps perplexity within about a thousandth (4 bits), two (3 bits) and four
    /// (2 bits) of dense on the trained models that it was chosen on, listing at most 1.2, 1.4 and
    /// 2.2 neurons for each that fires.
    #[must_use]
    pub fn default_margin(bits: LowBitFormat) -> f32 {
        match bits {
            LowBitFormat::Bits2 => 0.65,
            _ => 0.5,
        }
    }

    /// Bits a weight of the copy.
    #[must_use]
    pub fn bits(&self) -> LowBitFormat {
        self.estimate.rows().format()
    }

    /// The margin, in standard deviations of the copy's error.
    #[must_use]
    pub fn margin(&self) -> f32 {
        self.margin
    }
}

impl ActivationPredictor for QuantizedGate {
    fn predict(&self, inputs: &FfnInputs<'_>, picks: &mut Vec<NeuronIds>) -> Result<()> {
        let (rows, n_columns) = (self.estimate.rows(), inputs.normed.dim(1)?);
        if rows.n_columns() != n_columns {
            let (expected, found) = (vec![rows.n_columns()], vec![n_columns]);
            let what = "the normed input";
            return Err(
                powerinfer_ops::OpError::Shape { op: "predict", what, expected, found }.into()
            );
        }
        with_f32(inputs.normed, |values| {
            self.estimate.pick(values, self.margin, picks);
            Ok(())
        })
    }

    fn fused<'a>(&'a self, _: &FfnInputs<'_>, _: &'a mut Vec<f32>) -> Result<Option<Neurons<'a>>> {
        Ok(Some(Neurons::Estimated(&self.estimate, self.margin)))
    }

    fn restrict(&self, ids: &NeuronIds) -> Result<Option<Arc<dyn ActivationPredictor>>> {
        let estimate = self.estimate.pick_rows(ids)?;
        Ok(Some(Arc::new(Self { estimate, margin: self.margin })))
    }

    fn rows(&self) -> Option<RowPredictor<'_>> {
        Some(RowPredictor::Estimated(&self.estimate, self.margin))
    }

    fn kind(&self) -> PredictorKind {
        PredictorKind::QuantizedGate
    }

    fn size_bytes(&self) -> usize {
        self.estimate.size_bytes()
    }

    fn describe(&self) -> String {
        format!("quantized gate, {} bits, margin {}", self.bits(), self.margin)
    }
}
