//! Writing a model as a GGUF file, plain or PowerInfer's.

mod keys;
mod output;
mod plan;

use std::path::Path;
use std::sync::Arc;

use powerinfer_core::{
    Error as CoreError, GgufFile, GgufHeader, GgufValue, TensorSource, write_gguf,
};
use powerinfer_ops::WeightFormat;
use powerinfer_predictor::{MlpForm, PredictorFile};

use crate::error::Result;
use crate::load::{LoadOptions, is_gguf, open};
use crate::predictor::FolderTensors;
pub(crate) use keys::THRESHOLDS;
use output::Output;

/// What to write.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct ConvertOptions {
    /// Whether the file is PowerInfer's: for ReLU models, with a neuron's down weights in a row.
    pub powerinfer: bool,
    /// What matrices are stored as; `None` keeps each one's own type, and stores f16 in place of
    /// f32 and bf16 in a PowerInfer file, whose engine computes no others. Vectors are f32 always.
    pub dtype: Option<WeightFormat>,
    /// Keys to add: the tokenizer of a folder, which this crate does not know. Those of a GGUF
    /// file are taken over.
    pub keys: Vec<(String, GgufValue)>,
    /// The weights of a predictor, for a PowerInfer file.
    pub predictor: Option<PredictorTensors>,
    /// How the model is read.
    pub load: LoadOptions,
}

impl ConvertOptions {
    /// A PowerInfer file, or a plain one.
    #[must_use]
    pub fn with_powerinfer(mut self, powerinfer: bool) -> Self {
        self.powerinfer = powerinfer;
        self
    }

    /// What matrices are stored as.
    #[must_use]
    pub fn with_dtype(mut self, dtype: Option<WeightFormat>) -> Self {
        self.dtype = dtype;
        self
    }

    /// Keys to add.
    #[must_use]
    pub fn with_keys(mut self, keys: Vec<(String, GgufValue)>) -> Self {
        self.keys = keys;
        self
    }

    /// A predictor to add.
    #[must_use]
    pub fn with_predictor(mut self, predictor: PredictorTensors) -> Self {
        self.predictor = Some(predictor);
        self
    }
}

/// The weights of a predictor for a file that is to be written: for each layer `layers.N.fc1.weight` `[rank, d_model]` and
/// `layers.N.fc2.weight` `[d_ff, rank]`, and the scores from which on a neuron is computed.
#[derive(Debug, Clone)]
pub struct PredictorTensors {
    /// Where the matrices are read from.
    pub source: Arc<dyn TensorSource>,
    /// `[n_layers]`
    pub thresholds: Vec<f32>,
}

impl PredictorTensors {
    /// Those of a file of [`train_predictor`](crate::train_predictor), if they are of the original's
    /// form, the only one that PowerInfer's files can say.
    ///
    /// # Errors
    /// [`Error::Core`](crate::Error::Core) as [`PredictorFile::open`], for another number of layers, and
    /// with [`PredictorField`](CoreError::PredictorField) for another form.
    pub fn from_file(path: &Path, n_layers: usize) -> Result<Self> {
        let file = PredictorFile::open(path)?;
        let refuse = |field, expected: String, found: String| {
            Err(CoreError::PredictorField { path: path.to_owned(), field, expected, found }.into())
        };
        if file.n_layers() != n_layers {
            let (expected, found) = (n_layers.to_string(), file.n_layers().to_string());
            return refuse("number of thresholds", expected, found);
        }
        let has_biases = file.source().tensors().iter().any(|info| info.name.ends_with(".bias"));
        if file.form() != MlpForm::ORIGINAL || has_biases {
            let form = file.form();
            let expected = "two layers without biases on the residual stream, with a ReLU between";
            let found = format!("{} on the {} stream", form.hidden, form.input);
            return refuse("form", expected.to_owned(), found);
        }
        Ok(Self { thresholds: file.thresholds().to_vec(), source: file.source() })
    }

    /// Those of an original's folder of `model_0.pt`, `model_1.pt`, …; see
    /// [`PredictorSource::Folder`](crate::PredictorSource::Folder).
    ///
    /// # Errors
    /// [`Error::Core`](crate::Error::Core) if a file is missing or broken, or the folder has one for
    /// a layer that the model has not.
    pub fn from_folder(dir: &Path, n_layers: usize) -> Result<Self> {
        let folder = FolderTensors::open(dir, n_layers)?;
        Ok(Self { thresholds: folder.thresholds().to_vec(), source: Arc::new(folder) })
    }
}

/// What was written.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Converted {
    /// Length of the file.
    pub bytes: u64,
    /// Tensors in it.
    pub n_tensors: usize,
    /// What is worth knowing about it.
    pub notes: Vec<String>,
}

/// Writes the model in `model`, a Hugging Face folder or a GGUF file, to the GGUF file `out`,
/// replacing what is there. `progress` is told how many bytes of tensors are written, and of how
/// many.
///
/// Our own keys, which other readers ignore, say what the format has no key for:
/// `powerinfer.activation` and `powerinfer.fatrelu_threshold` (see
/// [`ModelConfig::from_gguf`](powerinfer_core::ModelConfig::from_gguf)), and
/// `powerinfer.sparse_thresholds`, where the layers of a predictor differ in theirs.
///
/// # Cost
/// Reads the weights once. Memory is at most that of the largest tensor and 64 MiB.
///
/// # Errors
/// [`Error::NotConvertible`](crate::Error::NotConvertible) for what such a file cannot say;
/// [`Error::Core`](crate::Error::Core) for what is wrong with the model, or if `out` cannot be
/// written.
///
/// # Examples
/// ```no_run
/// use powerinfer_models::{ConvertOptions, convert};
/// let options = ConvertOptions::default().with_powerinfer(true);
/// let converted = convert(
///     "relu-llama-7b".as_ref(),
///     "relu-llama-7b.powerinfer.gguf".as_ref(),
///     &options,
///     &mut |done, of| println!("{done} of {of} bytes"),
/// )?;
/// println!("{} tensors", converted.n_tensors);
/// # Ok::<(), powerinfer_models::Error>(())
/// ```
pub fn convert(
    model: &Path,
    out: &Path,
    options: &ConvertOptions,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Converted> {
    let (config, store) = open(model, &options.load)?;
    refuse_own_file(out, store.source())?;
    let plan = plan::plan(&config, store.source(), options)?;
    let mut notes = plan.notes;
    let mut keys = keys::keys(model, &config, options, &plan.tensors, &mut notes)?;
    if is_gguf(model) {
        keys::inherit(&mut keys, GgufFile::open(model)?.metadata(), options);
    }
    let n_tensors = plan.tensors.len();
    let predictor = options.predictor.as_ref().map(|predictor| predictor.source.as_ref());
    let output = Output::new(store.source(), predictor, plan.tensors);
    let header = GgufHeader::new(options.powerinfer, keys);
    let bytes = write_gguf(out, &header, &output, progress)?;
    Ok(Converted { bytes, n_tensors, notes })
}

/// Fails if the file to be written is one of those that are read.
fn refuse_own_file(out: &Path, source: &dyn TensorSource) -> Result<()> {
    let Ok(out) = out.canonicalize() else { return Ok(()) };
    for info in source.tensors() {
        if source.path(&info.name).canonicalize().is_ok_and(|path| path == out) {
            let what = std::io::Error::new(std::io::ErrorKind::InvalidInput, "it is read from");
            return Err(CoreError::Write { path: out, source: what }.into());
        }
    }
    Ok(())
}
