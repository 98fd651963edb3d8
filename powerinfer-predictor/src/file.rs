//! Predictors in files: our own, a safetensors file with thresholds in its header, and the original's,
//! a folder of `model_0.pt`, `model_1.pt`, … and `config.json`.

mod original;
mod tensors;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use powerinfer_core::{
    Digest, Error as CoreError, Layout, Result as CoreResult, TensorSource, WeightStore,
    replace_file, write_safetensors_with,
};
use powerinfer_ops::{FfnWeights, WeightFormat};

use crate::error::Result;
use crate::mlp::{MlpForm, MlpPredictor, MlpWeights};
use tensors::{LayerTensors, SharedStore};

const VERSION: &str = "1";

/// A predictor of every layer of a model, and what the model is.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelPredictor {
    /// The model.
    pub model: PredictedModel,
    /// How it was made, in a word.
    pub method: String,
    /// One a layer, all of one form.
    pub layers: Vec<MlpWeights>,
}

/// What a predictor's file says about the model that it belongs to; empty where it is silent.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PredictedModel {
    /// Its `model_type`, which says what its tensors are called.
    pub architecture: String,
    /// Its activation function.
    pub activation: String,
    /// [`gate_digest`] of each layer.
    pub digests: Vec<u64>,
}

impl PredictedModel {
    /// A model of that `model_type` and activation, and with gates of these digests.
    #[must_use]
    pub fn new(architecture: &str, activation: &str, digests: Vec<u64>) -> Self {
        let (architecture, activation) = (architecture.to_owned(), activation.to_owned());
        Self { architecture, activation, digests }
    }
}

/// What tells one gate from another: a hash of a few of its rows as they are held. The same model in
/// another type has another.
#[must_use]
pub fn gate_digest(weights: &FfnWeights) -> u64 {
    const ROWS: usize = 16;
    let n = weights.n_neurons();
    let rows = (0..ROWS.min(n)).map(|i| i * n / ROWS.min(n));
    let mut digest = Digest::default();
    rows.for_each(|row| digest.update(weights.gate.row(row)));
    digest.value()
}

impl ModelPredictor {
    /// Writes the file, replacing what is at `path` only once all is written: `layers.N.fc1.weight`
    /// `[rank, d_model]` and `layers.N.fc2.weight` `[d_ff, rank]` in f16, `layers.N.fc1.bias` `[rank]`
    /// in f32 where there is one, and the rest in the header.
    ///
    /// # Errors
    /// As [`MlpWeights::check`]; [`Error::Core`](crate::Error::Core) if the layers differ in form or
    /// the file cannot be written.
    pub fn save(&self, path: &Path) -> Result<()> {
        let form = self.form(path)?;
        let list = |values: Vec<String>| values.join(",");
        let each = self.layers.iter();
        let mut entries = BTreeMap::from([
            ("powerinfer_predictor".to_owned(), VERSION.to_owned()),
            ("method".to_owned(), self.method.clone()),
            ("input".to_owned(), form.input.to_string()),
            ("hidden".to_owned(), form.hidden.to_string()),
            ("thresholds".to_owned(), list(each.map(|w| w.threshold.to_string()).collect())),
        ]);
        let PredictedModel { architecture, activation, digests } = &self.model;
        let digests = list(digests.iter().map(|digest| format!("{digest:016x}")).collect());
        for (name, value) in
            [("architecture", architecture), ("activation", activation), ("digests", &digests)]
        {
            if !value.is_empty() {
                entries.insert(name.to_owned(), value.clone());
            }
        }
        let tensors = LayerTensors::new(path, &self.layers, WeightFormat::F16);
        Ok(replace_file(path, |new| write_safetensors_with(new, &tensors, &entries))?)
    }

    /// Reads a file whole.
    ///
    /// # Errors
    /// As [`PredictorFile::open`] and [`PredictorFile::weights`].
    pub fn load(path: &Path) -> Result<Self> {
        let file = PredictorFile::open(path)?;
        let layers =
            (0..file.n_layers()).map(|layer| file.weights(layer)).collect::<Result<_>>()?;
        Ok(Self { model: file.model, method: file.method, layers })
    }

    /// The form of all layers.
    fn form(&self, path: &Path) -> Result<MlpForm> {
        let mut form = None;
        for weights in &self.layers {
            weights.check()?;
            if *form.get_or_insert(weights.form) != weights.form {
                let (expected, found) = ("one form for all layers", "two");
                return Err(field(path, "hidden", expected, found).into());
            }
        }
        Ok(form.unwrap_or(MlpForm::ORIGINAL))
    }
}

/// A predictor's file, whose weights are read layer by layer.
///
/// # Examples
/// ```
/// use powerinfer_ops::WeightFormat;
/// use powerinfer_predictor::{MlpForm, MlpWeights, ModelPredictor, PredictedModel, PredictorFile};
/// let layer = MlpWeights {
///     form: MlpForm::LOW_RANK,
///     fc1: vec![1.0, -1.0],
///     bias: Some(vec![0.5]),
///     fc2: vec![1.0, 0.5, -1.0],
///     rank: 1,
///     threshold: 2.0,
/// };
/// let model = PredictedModel::new("llama", "relu", Vec::new());
/// let made = ModelPredictor { model, method: "svd".to_owned(), layers: vec![layer] };
/// let dir = tempfile::tempdir().expect("a folder");
/// let path = dir.path().join("predictor.safetensors");
/// made.save(&path)?;
/// assert_eq!(ModelPredictor::load(&path)?, made);
/// let file = PredictorFile::open(&path)?;
/// assert_eq!((file.ranks(), file.thresholds()), (&[1][..], &[2.0][..]));
/// assert_eq!(file.layer(0, Some(WeightFormat::F16))?.rank(), 1);
/// # Ok::<(), powerinfer_predictor::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct PredictorFile {
    path: PathBuf,
    store: SharedStore,
    model: PredictedModel,
    method: String,
    form: MlpForm,
    thresholds: Vec<f32>,
    ranks: Vec<usize>,
    d_model: usize,
    d_ff: usize,
}

impl PredictorFile {
    /// Opens a file; reads its header only. One that says no form is of the original's.
    ///
    /// # Errors
    /// [`Error::Core`](crate::Error::Core): the errors of a broken header;
    /// [`PredictorField`](CoreError::PredictorField) for an entry that is missing or broken;
    /// [`MissingTensor`](CoreError::MissingTensor), [`TensorShape`](CoreError::TensorShape) and
    /// [`LeftoverTensors`](CoreError::LeftoverTensors).
    pub fn open(path: &Path) -> Result<Self> {
        let (store, entries) = WeightStore::open_safetensors_file(path)?;
        let entry = |name: &str| entries.get(name).map(String::as_str);
        let version = entry("powerinfer_predictor").unwrap_or(VERSION);
        if version != VERSION {
            return Err(field(path, "powerinfer_predictor", VERSION, version).into());
        }
        let Some(thresholds) = entry("thresholds") else {
            let expected = "one number a layer";
            return Err(field(path, "thresholds", expected, "nothing").into());
        };
        let thresholds = numbers(path, thresholds)?;
        let original = MlpForm::ORIGINAL;
        let form = MlpForm {
            input: named(path, "input", entry("input"), original.input)?,
            hidden: named(path, "hidden", entry("hidden"), original.hidden)?,
        };
        let digests = match entry("digests") {
            Some(text) => digests(path, text, thresholds.len())?,
            None => Vec::new(),
        };
        let text = |name: &str| entry(name).unwrap_or_default();
        let model = PredictedModel::new(text("architecture"), text("activation"), digests);
        let mut this = Self {
            path: path.to_owned(),
            method: text("method").to_owned(),
            store: SharedStore(Arc::new(store)),
            model,
            form,
            ranks: Vec::with_capacity(thresholds.len()),
            thresholds,
            d_model: 0,
            d_ff: 0,
        };
        this.check_tensors()?;
        Ok(this)
    }

    /// The file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Layers.
    #[must_use]
    pub fn n_layers(&self) -> usize {
        self.thresholds.len()
    }

    /// `[n_layers]`
    #[must_use]
    pub fn ranks(&self) -> &[usize] {
        &self.ranks
    }

    /// `[n_layers]`
    #[must_use]
    pub fn thresholds(&self) -> &[f32] {
        &self.thresholds
    }

    /// What the layers read, and what lies between.
    #[must_use]
    pub fn form(&self) -> MlpForm {
        self.form
    }

    /// What it says about its model.
    #[must_use]
    pub fn model(&self) -> &PredictedModel {
        &self.model
    }

    /// Width of the model's stream, and neurons of a layer.
    #[must_use]
    pub fn shape(&self) -> [usize; 2] {
        [self.d_model, self.d_ff]
    }

    /// How it was made.
    #[must_use]
    pub fn method(&self) -> &str {
        &self.method
    }

    /// Numbers in its weights.
    #[must_use]
    pub fn n_parameters(&self) -> u64 {
        let tensors = self.store.0.tensors();
        tensors.map(|info| info.shape.iter().map(|&dim| dim as u64).product::<u64>()).sum()
    }

    /// Its matrices and biases.
    #[must_use]
    pub fn source(&self) -> Arc<dyn TensorSource> {
        Arc::new(self.store.clone())
    }

    /// Fails unless this is a predictor of a model of that architecture and activation with so many
    /// layers; the widths are checked as a layer is read.
    ///
    /// # Errors
    /// [`PredictorField`](CoreError::PredictorField) naming what differs.
    pub fn check_model(
        &self,
        n_layers: usize,
        architecture: &str,
        activation: &str,
    ) -> CoreResult<()> {
        let (ours, theirs) = (n_layers.to_string(), self.n_layers().to_string());
        let PredictedModel { architecture: said, activation: applied, .. } = &self.model;
        for (name, expected, found) in [
            ("number of thresholds", ours.as_str(), &theirs),
            ("architecture", architecture, said),
            ("activation", activation, applied),
        ] {
            if expected != found && !found.is_empty() {
                return Err(field(&self.path, name, expected, found));
            }
        }
        Ok(())
    }

    /// The predictor of a layer, held in `format` or in the file's own type.
    ///
    /// # Errors
    /// [`Error::InFile`](crate::Error::InFile) naming file and layer, with what is wrong there:
    /// [`Error::Core`](crate::Error::Core) for a tensor of a type that weights are not read from or
    /// whose rows are no whole blocks of `format`; as [`MlpPredictor::new`].
    ///
    /// # Panics
    /// If there is no such layer.
    pub fn layer(&self, layer: usize, format: Option<WeightFormat>) -> Result<MlpPredictor> {
        self.read_layer(layer, format).map_err(|source| {
            let (path, source) = (self.path.clone(), Box::new(source));
            crate::Error::InFile { path, layer, source }
        })
    }

    fn read_layer(&self, layer: usize, format: Option<WeightFormat>) -> Result<MlpPredictor> {
        let rank = self.ranks[layer];
        let mut store = WeightStore::from_source(Box::new(self.store.clone()));
        let [fc1, fc2] = names(layer);
        let fc1 = store.matrix(&fc1, rank, self.d_model, Layout::NeuronMajor, format)?;
        let fc2 = store.matrix(&fc2, self.d_ff, rank, Layout::NeuronMajor, format)?;
        let made = MlpPredictor::new(fc1, fc2, self.thresholds[layer])?.with_form(self.form);
        let bias = bias_name(layer);
        match store.contains(&bias) {
            true => made.with_bias(store.vector(&bias, rank)?),
            false => Ok(made),
        }
    }

    /// The weights of a layer in f32.
    ///
    /// # Errors
    /// As [`layer`](Self::layer).
    ///
    /// # Panics
    /// If there is no such layer.
    pub fn weights(&self, layer: usize) -> Result<MlpWeights> {
        let (rank, threshold) = (self.ranks[layer], self.thresholds[layer]);
        let mut store = WeightStore::from_source(Box::new(self.store.clone()));
        let mut matrix = |name: &str, n_rows: usize, width: usize| -> Result<Vec<f32>> {
            let matrix = store.matrix(name, n_rows, width, Layout::NeuronMajor, None)?;
            let mut values = vec![0.0; n_rows * width];
            for (row, values) in values.chunks_exact_mut(width.max(1)).enumerate() {
                matrix.row_to_f32(row, values);
            }
            Ok(values)
        };
        let [fc1, fc2] = names(layer);
        let fc1 = matrix(&fc1, rank, self.d_model)?;
        let fc2 = matrix(&fc2, self.d_ff, rank)?;
        let bias = bias_name(layer);
        let bias = store.contains(&bias).then(|| store.vector(&bias, rank)).transpose()?;
        let weights = MlpWeights { form: self.form, fc1, bias, fc2, rank, threshold };
        weights.check()?;
        Ok(weights)
    }

    /// Finds the ranks and widths, and refuses what is not part of a predictor.
    fn check_tensors(&mut self) -> CoreResult<()> {
        let mut expected = Vec::new();
        let store = &self.store.0;
        for layer in 0..self.thresholds.len() {
            let [fc1, fc2] = names(layer);
            let found = |name: &str| match store.info(name) {
                Some(info) => Ok(info.shape.clone()),
                None => {
                    let (path, name) = (self.path.clone(), name.to_owned());
                    Err(CoreError::MissingTensor { path, name })
                }
            };
            let (first, second) = (found(&fc1)?, found(&fc2)?);
            let rank = first.first().copied().unwrap_or(0);
            if layer == 0 {
                self.d_model = first.last().copied().unwrap_or(0);
                self.d_ff = second.first().copied().unwrap_or(0);
            }
            let bias = bias_name(layer);
            let mut shapes =
                vec![(fc1, first, vec![rank, self.d_model]), (fc2, second, vec![self.d_ff, rank])];
            if let Some(info) = store.info(&bias) {
                shapes.push((bias, info.shape.clone(), vec![rank]));
            }
            for (name, found, shape) in shapes {
                if found != shape || shape.contains(&0) {
                    let (path, expected) = (self.path.clone(), shape);
                    return Err(CoreError::TensorShape { path, name, expected, found });
                }
                expected.push(name);
            }
            self.ranks.push(rank);
        }
        let others = store.tensors().filter(|info| !expected.contains(&info.name));
        let names: Vec<String> = others.map(|info| info.name.clone()).collect();
        if names.is_empty() {
            return Ok(());
        }
        Err(CoreError::LeftoverTensors { path: self.path.clone(), names })
    }
}

fn names(layer: usize) -> [String; 2] {
    ["fc1", "fc2"].map(|part| format!("layers.{layer}.{part}.weight"))
}

fn bias_name(layer: usize) -> String {
    format!("layers.{layer}.fc1.bias")
}

fn field(path: &Path, field: &'static str, expected: &str, found: &str) -> CoreError {
    let (expected, found) = (expected.to_owned(), found.to_owned());
    CoreError::PredictorField { path: path.to_owned(), field, expected, found }
}

/// An entry that names one of a few things.
fn named<T: FromStr<Err = crate::mlp::UnknownName>>(
    path: &Path,
    name: &'static str,
    found: Option<&str>,
    default: T,
) -> CoreResult<T> {
    let Some(found) = found else { return Ok(default) };
    found
        .parse()
        .map_err(|unknown: crate::mlp::UnknownName| field(path, name, unknown.expected, found))
}

fn numbers(path: &Path, text: &str) -> CoreResult<Vec<f32>> {
    let number = |part: &str| {
        let number = part.trim().parse().ok().filter(|number: &f32| number.is_finite());
        number.ok_or_else(|| field(path, "thresholds", "numbers with commas between", part))
    };
    text.split(',').map(number).collect()
}

fn digests(path: &Path, text: &str, n_layers: usize) -> CoreResult<Vec<u64>> {
    let expected = || format!("{n_layers} hexadecimal numbers with commas between");
    let number = |part: &str| {
        u64::from_str_radix(part.trim(), 16).map_err(|_| field(path, "digests", &expected(), part))
    };
    let digests: Vec<u64> = text.split(',').map(number).collect::<CoreResult<_>>()?;
    if digests.len() != n_layers {
        return Err(field(path, "digests", &expected(), &digests.len().to_string()));
    }
    Ok(digests)
}

#[cfg(test)]
mod tests;
