//! The predictor that a PowerInfer file holds beside the model.

use std::path::Path;

use powerinfer_core::{
    Error as CoreError, GgufFile, GgufMetadata, Layout, TensorSource, WeightStore,
};
use powerinfer_ops::NeuronMatrix;

use crate::convert::THRESHOLDS;
use crate::error::Result;

/// The predictor of a layer: a neuron is computed if its logit in `down · relu(up · x)` is at least
/// the threshold, with `x` the residual stream before the norm of the feed-forward network, or for
/// Falcon the layer's input. No other function follows.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct MlpPredictorWeights {
    /// `[rank, d_model]`; the rank differs from layer to layer.
    pub up: NeuronMatrix,
    /// `[d_ff, rank]`
    pub down: NeuronMatrix,
    /// The logit from which on a neuron is computed.
    pub threshold: f32,
}

/// Reads the predictor in a PowerInfer file, one entry a layer, in the file's own types; `None` for
/// any other file.
///
/// The threshold is `powerinfer.sparse_thresholds` where it is there, one a layer, else
/// `powerinfer.sparse_threshold`, else 0.
///
/// # Errors
/// [`Error::Core`](crate::Error::Core) if the file is broken or a layer has no predictor.
pub fn gguf_predictor(path: &Path) -> Result<Option<Vec<MlpPredictorWeights>>> {
    let file = GgufFile::open(path)?;
    if !file.is_powerinfer() {
        return Ok(None);
    }
    let keys = file.metadata();
    let architecture = keys.str("general.architecture")?;
    let size = |name: &str| keys.u32(&format!("{architecture}.{name}"));
    let (n_layers, d_model) = (size("block_count")?, size("embedding_length")? as usize);
    let d_ff = size("feed_forward_length")? as usize;
    if !file.tensors().iter().any(|info| crate::gguf_names::is_predictor(&info.name)) {
        return Ok(None);
    }
    let thresholds = thresholds(keys, n_layers as usize)?;
    let mut layers = Vec::new();
    let mut store = WeightStore::from_source(Box::new(file.clone()));
    for (layer, threshold) in thresholds.enumerate() {
        let [fc1, fc2] = ["fc1", "fc2"].map(|part| format!("blk.{layer}.{part}.weight"));
        let Some(info) = file.tensor(&fc1) else {
            return Err(CoreError::MissingTensor { path: file.path(&fc1), name: fc1 }.into());
        };
        let rank = info.shape.first().copied().unwrap_or_default();
        layers.push(MlpPredictorWeights {
            up: store.matrix(&fc1, rank, d_model, Layout::NeuronMajor, None)?,
            down: store.matrix(&fc2, d_ff, rank, Layout::NeuronMajor, None)?,
            threshold,
        });
    }
    Ok(Some(layers))
}

/// The threshold of each layer; the count of layers is not trusted.
fn thresholds(keys: &GgufMetadata, n_layers: usize) -> Result<impl Iterator<Item = f32> + use<>> {
    let [one, each] = THRESHOLDS;
    let all = keys.optional_f32(one)?.unwrap_or(0.0);
    let each_layer = keys.optional_f32s(each)?;
    if each_layer.as_ref().is_some_and(|values| values.len() != n_layers) {
        return Err(keys.error(each, format!("one number a layer, {n_layers}")).into());
    }
    let nan = |values: &Vec<f32>| values.iter().any(|value| value.is_nan());
    if each_layer.as_ref().is_some_and(nan) || all.is_nan() {
        let key = if all.is_nan() { one } else { each };
        return Err(keys.error(key, "numbers").into());
    }
    let mut each_layer = each_layer.map(Vec::into_iter);
    Ok((0..n_layers).map(move |_| each_layer.as_mut().and_then(Iterator::next).unwrap_or(all)))
}
