//! Weights of predictors as tensors with names.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use powerinfer_core::{
    Error as CoreError, FileDtype, Result as CoreResult, TensorInfo, TensorSource, WeightStore,
};
use powerinfer_ops::WeightFormat;

use super::{bias_name, names};
use crate::mlp::MlpWeights;

/// Layers that are to be written: matrices in one format, biases in f32.
#[derive(Debug)]
pub(super) struct LayerTensors<'a> {
    path: PathBuf,
    tensors: Vec<(TensorInfo, WeightFormat, &'a [f32])>,
}

impl<'a> LayerTensors<'a> {
    pub(super) fn new(path: &Path, layers: &'a [MlpWeights], format: WeightFormat) -> Self {
        let mut this = Self { path: path.to_owned(), tensors: Vec::new() };
        for (layer, weights) in layers.iter().enumerate() {
            let [fc1, fc2] = names(layer);
            this.add(fc1, format, vec![weights.rank, weights.d_model()], &weights.fc1);
            if let Some(bias) = &weights.bias {
                this.add(bias_name(layer), WeightFormat::F32, vec![weights.rank], bias);
            }
            this.add(fc2, format, vec![weights.n_neurons(), weights.rank], &weights.fc2);
        }
        this
    }

    /// The two matrices of one layer, as the original calls them.
    pub(super) fn of_original(path: &Path, weights: &'a MlpWeights, format: WeightFormat) -> Self {
        let mut this = Self { path: path.to_owned(), tensors: Vec::new() };
        let (rank, d_model, n) = (weights.rank, weights.d_model(), weights.n_neurons());
        this.add("fc1.weight".to_owned(), format, vec![rank, d_model], &weights.fc1);
        this.add("fc2.weight".to_owned(), format, vec![n, rank], &weights.fc2);
        this
    }

    fn add(&mut self, name: String, format: WeightFormat, shape: Vec<usize>, values: &'a [f32]) {
        let info = TensorInfo { name, dtype: FileDtype::Weights(format), shape };
        self.tensors.push((info, format, values));
    }
}

impl TensorSource for LayerTensors<'_> {
    fn tensors(&self) -> Vec<TensorInfo> {
        self.tensors.iter().map(|(info, ..)| info.clone()).collect()
    }

    fn read(&self, name: &str, offset_bytes: u64, out: &mut [u8]) -> CoreResult<()> {
        let found = self.tensors.iter().find(|(info, ..)| info.name == name);
        let Some((_, format, values)) = found else {
            let (path, name) = (self.path.clone(), name.to_owned());
            return Err(CoreError::MissingTensor { path, name });
        };
        // floats, one by one: offsets and lengths are whole values
        let value_bytes = format.row_bytes(1)?;
        let begin = usize::try_from(offset_bytes).unwrap_or(usize::MAX) / value_bytes;
        let range = begin..begin.saturating_add(out.len() / value_bytes);
        let Some(values) = values.get(range) else {
            let (path, name, len) = (self.path.clone(), name.to_owned(), out.len() as u64);
            let size = (values.len() * value_bytes) as u64;
            return Err(CoreError::TensorRange { path, name, offset: offset_bytes, len, size });
        };
        format.encode(values, out);
        Ok(())
    }

    fn path(&self, _: &str) -> PathBuf {
        self.path.clone()
    }
}

/// An open store that several read from.
#[derive(Debug, Clone)]
pub(super) struct SharedStore(pub(super) Arc<WeightStore>);

impl TensorSource for SharedStore {
    fn tensors(&self) -> Vec<TensorInfo> {
        self.0.tensors().cloned().collect()
    }

    fn read(&self, name: &str, offset_bytes: u64, out: &mut [u8]) -> CoreResult<()> {
        self.0.source().read(name, offset_bytes, out)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.source().path(name)
    }
}
