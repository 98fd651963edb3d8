//! The original's predictors: a folder with a PyTorch file a layer.

use std::path::{Path, PathBuf};

use powerinfer_core::{Error as CoreError, Result, WeightStore, read_predictor_threshold};
use powerinfer_ops::{FfnWeights, WeightFormat};
use powerinfer_predictor::MlpPredictor;

use super::{model_error, read_layers};

/// A folder whose files are those of a model with so many layers.
#[derive(Debug)]
pub(super) struct PredictorFolder {
    dir: PathBuf,
    threshold: f32,
}

impl PredictorFolder {
    /// Reads the folder's threshold.
    ///
    /// # Errors
    /// [`CoreError::Config`] for a threshold that is no number, [`CoreError::PredictorLayers`] if the
    /// folder has a file for a layer that the model has not.
    pub(super) fn open(dir: &Path, n_layers: usize) -> Result<Self> {
        let beyond = file(dir, n_layers);
        if beyond.exists() {
            return Err(CoreError::PredictorLayers { path: beyond, n_layers });
        }
        let threshold = read_predictor_threshold(&dir.join("config.json"))?.unwrap_or(0.0);
        Ok(Self { dir: dir.to_owned(), threshold })
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
        MlpPredictor::new(fc1, fc2, self.threshold).map_err(model_error)
    }
}

fn file(dir: &Path, layer: usize) -> PathBuf {
    dir.join(format!("model_{layer}.pt"))
}
