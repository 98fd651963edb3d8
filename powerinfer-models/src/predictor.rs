//! Which predictors a model gets, and whether they are any good for it.

mod choice;
mod folder;
mod random;

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use powerinfer_core::{
    CausalLm, Error as CoreError, Layout, ModelConfig, ModelInfo, PredictionCounts, Sparsity, Step,
    WantedLogits, WeightStore,
};
use powerinfer_ops::{FfnWeights, LowBitFormat, NeuronMatrix, WeightFormat};
use powerinfer_predictor::{
    ActivationPredictor, MlpPredictor, PredictorFile, QuantizedGate, gate_digest,
};

use crate::error::{Error, Result};
use crate::layers::Decoder;
pub(crate) use folder::FolderTensors;
use folder::PredictorFolder;
use random::random_predictor;

/// Tokens that predictors are tried on when a model is loaded.
const TRIAL_TOKENS: usize = 24;
/// A predictor that lists more than this share saves nothing that running the whole gate would not.
const MOST_LISTED: f64 = 0.9;

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

/// Gives each layer its predictor while the model is loaded.
#[derive(Debug)]
pub(crate) struct Predictors<'a> {
    options: &'a PredictorOptions,
    folder: Option<PredictorFolder>,
    /// Layers get theirs when all are loaded.
    later: bool,
    file: Option<PredictorFile>,
    /// Layers whose gate is another than the file's.
    other_gates: Mutex<Vec<usize>>,
}

impl<'a> Predictors<'a> {
    /// Predictors for a model of `n_layers` layers; `whole` if the neurons of a layer are all in one
    /// place.
    pub(crate) fn open(
        options: &'a PredictorOptions,
        n_layers: usize,
        whole: bool,
    ) -> powerinfer_core::Result<Self> {
        let (mut folder, mut file) = (None, None);
        match &options.source {
            PredictorSource::File(path) => {
                file = Some(PredictorFile::open(path).map_err(core_error)?);
            }
            PredictorSource::Folder(dir) => folder = Some(PredictorFolder::open(dir, n_layers)?),
            PredictorSource::InModel { thresholds }
                if ![1, n_layers].contains(&thresholds.len()) =>
            {
                return Err(CoreError::PredictorThresholds { found: thresholds.len(), n_layers });
            }
            _ => {}
        }
        let later = whole && options.source == PredictorSource::Quantized(None);
        Ok(Self { options, folder, later, file, other_gates: Mutex::default() })
    }

    /// Fails if the predictors are in a file that names another model.
    pub(crate) fn check_model(&self, config: &ModelConfig) -> powerinfer_core::Result<()> {
        let Some(file) = &self.file else { return Ok(()) };
        file.check_model(config.n_layers, &config.model_type, config.activation.name())
    }

    /// What is worth knowing of what was read.
    pub(crate) fn notes(self) -> Vec<String> {
        let layers = self.other_gates.into_inner().unwrap_or_else(PoisonError::into_inner);
        if let Some(file) = self.file.filter(|file| file.model().digests.is_empty()) {
            return vec![format!(
                "{}: no digests, so nothing says that the predictor was made for these weights",
                file.path().display()
            )];
        }
        if layers.is_empty() {
            return Vec::new();
        }
        vec![format!(
            "the predictor was made for other weights in layers {layers:?}, or for the same in \
             another type"
        )]
    }

    /// The predictor of a layer with these weights, out of the model's store if it lies there. `None`
    /// if the layer gets one later.
    pub(crate) fn of_layer(
        &self,
        layer: usize,
        weights: &FfnWeights,
        store: &mut WeightStore,
    ) -> powerinfer_core::Result<Option<Arc<dyn ActivationPredictor>>> {
        if self.later {
            return Ok(None);
        }
        self.made_for(layer, weights, store).map(Some)
    }

    fn made_for(
        &self,
        layer: usize,
        weights: &FfnWeights,
        store: &mut WeightStore,
    ) -> powerinfer_core::Result<Arc<dyn ActivationPredictor>> {
        let PredictorOptions { source, shift, dtype, .. } = self.options;
        if let Some(file) = &self.file {
            let read = file.layer(layer, *dtype).map_err(core_error)?;
            check_shape(file, &read, weights)?;
            if file.model().digests.get(layer).is_some_and(|said| *said != gate_digest(weights)) {
                self.other_gates.lock().unwrap_or_else(PoisonError::into_inner).push(layer);
            }
            return Ok(Arc::new(read.with_threshold_shift(-shift)));
        }
        if let Some(folder) = &self.folder {
            let read = folder.of_layer(layer, weights, *dtype)?;
            return Ok(Arc::new(read.with_threshold_shift(-shift)));
        }
        if let PredictorSource::InModel { thresholds } = source {
            let names = ["fc1", "fc2"].map(|part| format!("blk.{layer}.{part}.weight"));
            // one for all, or one a layer
            let threshold = thresholds[layer.min(thresholds.len() - 1)];
            let read = read_layers(store, &names, weights, *dtype)?;
            let made = MlpPredictor::new(read.0, read.1, threshold).map_err(model_error)?;
            return Ok(Arc::new(made.with_threshold_shift(-shift)));
        }
        let bits = match source {
            &PredictorSource::Random { rank, density } => {
                let made = random_predictor(layer, weights, (rank, density), *dtype)?;
                return Ok(Arc::new(made.with_threshold_shift(-shift)));
            }
            PredictorSource::Quantized(Some(bits)) => *bits,
            _ => bits_that_pay(
                8.0 * weights.gate.row_bytes() as f64 / weights.d_model().max(1) as f64,
            ),
        };
        let made = QuantizedGate::new(weights, bits).map_err(model_error)?;
        let margin = made.margin() + shift;
        Ok(Arc::new(made.with_margin(margin)))
    }
}

/// Fails if a predictor in a file is that of a layer of another width.
fn check_shape(
    file: &PredictorFile,
    read: &MlpPredictor,
    weights: &FfnWeights,
) -> powerinfer_core::Result<()> {
    let (expected, found) =
        ([weights.d_model(), weights.n_neurons()], [read.d_model(), read.n_neurons()]);
    if expected == found {
        return Ok(());
    }
    let text = |[d_model, d_ff]: [usize; 2]| format!("d_model {d_model} and d_ff {d_ff}");
    Err(CoreError::PredictorField {
        path: file.path().to_owned(),
        field: "shape",
        expected: text(expected),
        found: text(found),
    })
}

/// The two layers of a trained predictor, whose rank is the file's to say.
fn read_layers(
    store: &mut WeightStore,
    [fc1, fc2]: &[String; 2],
    weights: &FfnWeights,
    dtype: Option<WeightFormat>,
) -> powerinfer_core::Result<(NeuronMatrix, NeuronMatrix)> {
    let first = store.tensors().find(|tensor| tensor.name == *fc1);
    let rank = first.and_then(|tensor| tensor.shape.first().copied()).unwrap_or(0);
    let (d_ff, d_model) = (weights.n_neurons(), weights.d_model());
    Ok((
        store.matrix(fc1, rank, d_model, Layout::NeuronMajor, dtype)?,
        store.matrix(fc2, d_ff, rank, Layout::NeuronMajor, dtype)?,
    ))
}

/// How many bits a copy of the gate is best made of where nothing is tried: as few as keep the loss small where the gate
/// itself is held in few, one more where reading the gate costs so much that fewer rows listed in
/// vain outweigh it.
fn bits_that_pay(bits_per_weight: f64) -> LowBitFormat {
    if bits_per_weight < 6.0 { LowBitFormat::Bits2 } else { LowBitFormat::Bits3 }
}

/// Tokens from all over the vocabulary.
fn trial_tokens(info: &ModelInfo) -> Vec<u32> {
    let spread = (info.vocab_size / TRIAL_TOKENS).max(1);
    let id = |i: usize| u32::try_from((i * spread + 11) % info.vocab_size.max(1)).unwrap_or(0);
    (0..TRIAL_TOKENS.min(info.max_context)).map(id).collect()
}

/// Runs a few tokens. Gives layers without predictors those that pay, if they were to get theirs now,
/// or takes predictors away that miss too much or list nearly everything; returns what was done, in
/// words.
pub(crate) fn try_out(
    model: &mut Decoder,
    options: &PredictorOptions,
    whole: bool,
) -> Result<Vec<String>> {
    if whole && options.source == PredictorSource::Quantized(None) {
        return choice::choose(model, options);
    }
    let info = model.info();
    let tokens = trial_tokens(info);
    let mut step = Step {
        wanted: WantedLogits::None,
        sparsity: Some(Sparsity::Exact),
        measure_prediction: true,
        ..Step::default()
    };
    model.forward(&tokens, &mut model.new_cache(), &mut step)?;
    let floor = options.floor();
    let (mut missing, mut listing_all) = (Vec::new(), Vec::new());
    for (layer, counts) in step.stats.prediction_per_layer.iter().enumerate() {
        if !reaches(counts, floor) {
            missing.push(layer);
        } else if counts.picked_density() > MOST_LISTED {
            listing_all.push(layer);
        }
    }
    let trained =
        !matches!(options.source, PredictorSource::Quantized(_) | PredictorSource::Random { .. });
    if trained && missing.len() == info.n_layers {
        return Err(Error::PredictorOfAnotherModel { floor });
    }
    let worst = step.stats.prediction_per_layer.iter().map(PredictionCounts::recall_mass);
    let worst = worst.fold(f64::INFINITY, f64::min);
    for &layer in missing.iter().chain(&listing_all) {
        model.drop_predictor(layer);
    }
    let mut notes = Vec::new();
    if !missing.is_empty() {
        notes.push(format!(
            "layers {missing:?} run exactly: their predictors list less than {:.0} % of the \
             activation mass ({:.0} % in the worst)",
            100.0 * floor,
            100.0 * worst
        ));
    }
    if !listing_all.is_empty() {
        notes.push(format!(
            "layers {listing_all:?} run exactly: their predictors list nearly all neurons"
        ));
    }
    Ok(notes)
}

fn reaches(counts: &PredictionCounts, floor: f64) -> bool {
    counts.recall_mass() >= floor
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

#[cfg(test)]
mod tests {
    use super::*;
    use powerinfer_core::{FileDtype, TensorInfo, TensorSource};
    use powerinfer_ops::Activation;

    /// Predictors of rank 3 for layers of 5 neurons and width 4, all ones.
    #[derive(Debug)]
    struct Ones;

    impl TensorSource for Ones {
        fn tensors(&self) -> Vec<TensorInfo> {
            let dtype = || FileDtype::Weights(WeightFormat::F32);
            let layer = |layer: usize| {
                let info = |part: &str, shape| {
                    let name = format!("blk.{layer}.{part}.weight");
                    TensorInfo { name, dtype: dtype(), shape }
                };
                [info("fc1", vec![3, 4]), info("fc2", vec![5, 3])]
            };
            (0..2).flat_map(layer).collect()
        }

        fn read(&self, _: &str, _: u64, out: &mut [u8]) -> powerinfer_core::Result<()> {
            out.chunks_exact_mut(4).for_each(|value| value.copy_from_slice(&1f32.to_le_bytes()));
            Ok(())
        }

        fn path(&self, _: &str) -> PathBuf {
            "ones".into()
        }
    }

    #[test]
    fn predictors_in_a_model_s_file_have_a_threshold_for_all_layers_or_one_a_layer() {
        let matrix = NeuronMatrix::from_f32(WeightFormat::F32, 5, 4, &[1.0; 20]).unwrap();
        let weights = FfnWeights::new(matrix.clone(), None, matrix, Activation::Relu).unwrap();
        let read = |thresholds: &[f32]| -> powerinfer_core::Result<Vec<String>> {
            let thresholds = thresholds.to_vec();
            let options =
                PredictorOptions::new(PredictorSource::InModel { thresholds }).with_shift(0.25);
            let predictors = Predictors::open(&options, 2, true)?;
            let mut store = WeightStore::from_source(Box::new(Ones));
            let mut made_for = |layer| predictors.made_for(layer, &weights, &mut store);
            let found = [made_for(0)?, made_for(1)?].map(|predictor| predictor.describe());
            store.finish(&|_| false)?;
            Ok(found.to_vec())
        };
        let threshold = |x: f32| format!("two layers of rank 3, threshold {x}");
        assert_eq!(read(&[1.0]).unwrap(), [threshold(0.75), threshold(0.75)]);
        assert_eq!(read(&[1.0, 2.0]).unwrap(), [threshold(0.75), threshold(1.75)]);
        for wrong in [&[][..], &[1.0, 2.0, 3.0]] {
            let error = read(wrong).unwrap_err();
            assert!(matches!(error, CoreError::PredictorThresholds { n_layers: 2, .. }));
        }
    }
}
