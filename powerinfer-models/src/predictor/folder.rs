//! The original's predictors: a folder with a PyTorch file a layer.

use std::path::{Path, PathBuf};

use powerinfer_core::{
    Error as CoreError, Result, TensorInfo, TensorSource, WeightStore, read_predictor_thresholds,
};
use powerinfer_ops::{FfnWeights, WeightFormat};
use powerinfer_predictor::MlpPredictor;

use super::maker::read_layers;
use super::model_error;

/// A folder whose files are those of a model with so many layers.
#[derive(Debug)]
pub(super) struct PredictorFolder {
    dir: PathBuf,
    /// `[n_layers]`
    thresholds: Vec<f32>,
}

impl PredictorFolder {
    /// Reads the folder's thresholds.
    ///
    /// # Errors
    /// [`CoreError::Config`] for a threshold that is no number, [`CoreError::PredictorLayers`] if the
    /// folder has a file for a layer that the model has not.
    pub(super) fn open(dir: &Path, n_layers: usize) -> Result<Self> {
        let beyond = file(dir, n_layers);
        if beyond.exists() {
            return Err(CoreError::PredictorLayers { path: beyond, n_layers });
        }
        let thresholds = read_predictor_thresholds(&dir.join("config.json"), n_layers)?;
        Ok(Self { dir: dir.to_owned(), thresholds })
    }

    /// The predictor of a layer with these weights, in `dtype` or in the file's own type.
    ///
    /// # Errors
    /// As [`WeightStore::matrix`]; [`CoreError::Io`] for a file that is not there.
    pub(super) fn of_layer(
        &self,
        layer: usize,
        weights: &FfnWeights,
        dtype: Option<WeightFormat>,
    ) -> Result<MlpPredictor> {
        let mut store = WeightStore::open_pytorch_file(&file(&self.dir, layer))?;
        let names = ["fc1", "fc2"].map(|part| format!("{part}.weight"));
        let (fc1, fc2) = read_layers(&mut store, &names, weights, dtype)?;
        store.finish(&|_| false)?;
        MlpPredictor::new(fc1, fc2, self.thresholds[layer]).map_err(model_error)
    }
}

/// The matrices of all files, called `layers.N.fc1.weight` and `layers.N.fc2.weight`.
#[derive(Debug)]
pub(crate) struct FolderTensors {
    folder: PredictorFolder,
    /// One a layer.
    stores: Vec<WeightStore>,
}

impl FolderTensors {
    /// Opens the file of each layer; errors as [`PredictorFolder`]'s.
    pub(crate) fn open(dir: &Path, n_layers: usize) -> Result<Self> {
        let folder = PredictorFolder::open(dir, n_layers)?;
        let open = |layer| WeightStore::open_pytorch_file(&file(dir, layer));
        let stores = (0..n_layers).map(open).collect::<Result<_>>()?;
        Ok(Self { folder, stores })
    }

    pub(crate) fn thresholds(&self) -> &[f32] {
        &self.folder.thresholds
    }

    /// The source of a layer's tensors, and the name that the tensor has there.
    fn place<'a>(&self, name: &'a str) -> Option<(&dyn TensorSource, &'a str)> {
        let (layer, own) = name.strip_prefix("layers.")?.split_once('.')?;
        let layer: usize = layer.parse().ok()?;
        Some((self.stores.get(layer)?.source(), own))
    }
}

impl TensorSource for FolderTensors {
    fn tensors(&self) -> Vec<TensorInfo> {
        let layers = self.stores.iter().enumerate();
        let tensors = layers.flat_map(|(layer, store)| {
            store.tensors().map(move |info| TensorInfo {
                name: format!("layers.{layer}.{}", info.name),
                ..info.clone()
            })
        });
        tensors.collect()
    }

    fn read(&self, name: &str, offset_bytes: u64, out: &mut [u8]) -> Result<()> {
        match self.place(name) {
            Some((source, own)) => source.read(own, offset_bytes, out),
            None => Err(CoreError::MissingTensor { path: self.path(name), name: name.to_owned() }),
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        match self.place(name) {
            Some((source, own)) => source.path(own),
            None => self.folder.dir.clone(),
        }
    }
}

fn file(dir: &Path, layer: usize) -> PathBuf {
    dir.join(format!("model_{layer}.pt"))
}
