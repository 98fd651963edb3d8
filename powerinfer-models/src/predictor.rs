//! Which predictors a model gets, and whether they are any good for it.

mod choice;
mod folder;
mod maker;
mod random;
mod trial;
mod verdict;

use std::path::PathBuf;

use powerinfer_core::Error as CoreError;
use powerinfer_ops::{LowBitFormat, WeightFormat};

use crate::error::{Error, Result};
pub(crate) use folder::FolderTensors;
pub(crate) use maker::file_bytes;
pub(crate) use verdict::{PredictorNotes, Predictors};

/// A predictor of which neurons fire, for every layer.
///
/// # Examples
/// ```
/// use powerinfer_models::{PredictorOptions, PredictorSource};
/// use powerinfer_ops::LowBitFormat;
/// let options = PredictorOptions::default().with_shift(0.5);
/// assert_eq!(options.source, PredictorSource::Quantized(None));
/// let coarse = PredictorOptions::new(PredictorSource::Quantized(Some(LowBitFormat::Bits2)));
/// assert_ne!(coarse.source, options.source);
/// ```
#[derive(Debug, Clone, Default, PartialEq)]
#[non_exhaustive]
pub struct PredictorOptions {
    /// Where the predictors come from.
    pub source: PredictorSource,
    /// More neurons and less loss above 0, fewer and more below: added to the margin of quantised
    /// predictors, which is in standard deviations of their error, and taken off the threshold of
    /// trained ones, which is in units of their scores.
    pub shift: f32,
    /// What the weights of trained predictors are held as; `None` keeps the file's type.
    pub dtype: Option<WeightFormat>,
    /// The share of the activation mass that a layer's predictor has to list, on a trial run of a
    /// few tokens when the model is loaded; a layer whose predictor does not runs exactly instead.
    /// `None`: 0.9 for quantised predictors, 0.5 for trained ones, which leaves broken ones out; and
    /// where the bits are not given, those and the margin are chosen to list 0.99.
    pub floor: Option<f64>,
}

/// Where predictors come from.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum PredictorSource {
    /// Made from the gates: copies of so many bits; or for each layer of the bits, and with the margin,
    /// that cost least of those that list enough on a trial run. A layer where that would be read no
    /// faster than its gate runs exactly.
    Quantized(Option<LowBitFormat>),
    /// A file that [`train_predictor`](crate::train_predictor) made.
    File(PathBuf),
    /// The original's: a folder of `model_0.pt`, `model_1.pt`, …, one a layer, each with `fc1.weight`
    /// and `fc2.weight`, and a `config.json` whose `sparse_threshold` is the least score of a
    /// neuron that runs (0 without it), or whose `sparse_thresholds` is one a layer.
    Folder(PathBuf),
    /// The original's, from tensors `blk.N.fc1.weight` and `blk.N.fc2.weight` among the model's own, as
    /// its GGUF files have them.
    InModel {
        /// The least score of a neuron that runs: one for all layers, or one a layer.
        thresholds: Vec<f32>,
    },
    /// Two random layers, which know nothing: to see what the original's kind costs on a synthetic
    /// model.
    Random {
        /// Rows of the first layer.
        rank: usize,
        /// Share of neurons that fire. About as many rows are read as if the predictor knew which.
        density: f64,
    },
}

impl Default for PredictorSource {
    fn default() -> Self {
        Self::Quantized(None)
    }
}

impl PredictorOptions {
    /// Predictors from there, as they are.
    #[must_use]
    pub fn new(source: PredictorSource) -> Self {
        Self { source, ..Self::default() }
    }

    /// Sets [`shift`](Self::shift).
    #[must_use]
    pub fn with_shift(mut self, shift: f32) -> Self {
        self.shift = shift;
        self
    }

    /// Sets the share of the activation mass that a layer's predictor has to list for the layer not
    /// to run exactly.
    #[must_use]
    pub fn with_floor(mut self, floor: f64) -> Self {
        self.floor = Some(floor);
        self
    }

    /// Sets [`dtype`](Self::dtype).
    #[must_use]
    pub fn with_dtype(mut self, dtype: Option<WeightFormat>) -> Self {
        self.dtype = dtype;
        self
    }

    /// Bits a weight of the copies of gates whose own weights take `gate_bits`, if predictors are
    /// made of such.
    pub(crate) fn bits_of_copy(&self, gate_bits: f64) -> Option<LowBitFormat> {
        match self.source {
            PredictorSource::Quantized(bits) => Some(bits.unwrap_or(bits_that_pay(gate_bits))),
            _ => None,
        }
    }

    pub(crate) fn check(&self) -> Result<()> {
        if self.shift.is_finite() && self.floor.is_none_or(|floor| (0.0..=1.0).contains(&floor)) {
            return Ok(());
        }
        Err(Error::PredictorOptions { shift: self.shift, floor: self.floor })
    }

    fn floor(&self) -> f64 {
        self.floor.unwrap_or(match self.source {
            PredictorSource::Quantized(_) => 0.9,
            PredictorSource::File(_)
            | PredictorSource::Folder(_)
            | PredictorSource::InModel { .. } => 0.5,
            PredictorSource::Random { .. } => 0.0,
        })
    }
}

/// How many bits a copy of the gate is best made of where nothing is tried: as few as keep the loss small where the gate
/// itself is held in few, one more where reading the gate costs so much that fewer rows listed in
/// vain outweigh it.
fn bits_that_pay(bits_per_weight: f64) -> LowBitFormat {
    if bits_per_weight < 6.0 { LowBitFormat::Bits2 } else { LowBitFormat::Bits3 }
}

/// An error of reading a file is core's own.
fn core_error(error: powerinfer_predictor::Error) -> CoreError {
    match error {
        powerinfer_predictor::Error::Core(error) => *error,
        other => model_error(other),
    }
}

pub(crate) fn model_error(error: powerinfer_predictor::Error) -> CoreError {
    CoreError::Model(Box::new(error))
}
