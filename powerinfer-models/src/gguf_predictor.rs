//! The predictor that a PowerInfer file holds beside the model.

use std::path::Path;

use powerinfer_core::{
    Error as CoreError, GgufFile, GgufMetadata, Layout, TensorSource, WeightStore,
};
use powerinfer_ops::NeuronMatrix;

use crate::convert::THRESHOLDS;
use crate::error::Result;
use crate::gguf_names;

/// The predictor of a layer: a neuron is computed if its score in `fc2 · relu(fc1 · x)` is at least
/// the threshold, with `x` the residual stream before the norm of the feed-forward network, or for
/// Falcon the layer's input. No other function follows.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct MlpPredictorWeights {
    /// `[rank, d_model]`; the rank differs from layer to layer.
    pub fc1: NeuronMatrix,
    /// `[d_ff, rank]`
    pub fc2: NeuronMatrix,
    /// The score from which on a neuron is computed.
    pub threshold: f32,
}

/// The predictor in a PowerInfer file, whose weights are read layer by layer.
///
/// # Examples
/// ```no_run
/// use powerinfer_models::GgufPredictor;
/// if let Some(predictor) = GgufPredictor::open("relu-llama-7b.powerinfer.gguf".as_ref())? {
///     println!("ranks {:?}", predictor.ranks());
///     let first = predictor.layer(0)?;
///     assert_eq!(first.fc1.n_neurons(), first.fc2.d_model());
/// }
/// # Ok::<(), powerinfer_models::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct GgufPredictor {
    file: GgufFile,
    d_model: usize,
    d_ff: usize,
    ranks: Vec<usize>,
    thresholds: Vec<f32>,
}

impl GgufPredictor {
    /// Opens the predictor in a GGUF file; `None` if the file is not PowerInfer's or holds none.
    ///
    /// The threshold of a layer is that in `powerinfer.sparse_thresholds` where that is there, else
    /// `powerinfer.sparse_threshold`, else 0.
    ///
    /// # Errors
    /// [`Error::Core`](crate::Error::Core) if the file is broken or a layer has no predictor.
    pub fn open(path: &Path) -> Result<Option<Self>> {
        let file = GgufFile::open(path)?;
        let has_any = file.tensors().iter().any(|info| gguf_names::is_predictor(&info.name));
        if !file.is_powerinfer() || !has_any {
            return Ok(None);
        }
        let keys = file.metadata();
        let architecture = keys.str("general.architecture")?;
        let size = |name: &str| keys.u32(&format!("{architecture}.{name}"));
        let (n_layers, d_model) = (size("block_count")?, size("embedding_length")? as usize);
        let d_ff = size("feed_forward_length")? as usize;
        let mut ranks = Vec::new();
        // ends at the first layer that is missing, whatever the count says
        for layer in 0..n_layers {
            let name = fc1(layer as usize);
            let Some(info) = file.tensor(&name) else {
                return Err(CoreError::MissingTensor { path: file.path(&name), name }.into());
            };
            ranks.push(info.shape.first().copied().unwrap_or_default());
        }
        let thresholds = thresholds(keys, ranks.len())?;
        Ok(Some(Self { file, d_model, d_ff, ranks, thresholds }))
    }

    /// `[n_layers]`: rows of each layer's first matrix.
    #[must_use]
    pub fn ranks(&self) -> &[usize] {
        &self.ranks
    }

    /// `[n_layers]`: the scores from which on neurons are computed.
    #[must_use]
    pub fn thresholds(&self) -> &[f32] {
        &self.thresholds
    }

    /// Reads the weights of a layer, in the file's own type.
    ///
    /// # Errors
    /// [`Error::Core`](crate::Error::Core) for a tensor that is missing, of another shape or of a
    /// type that weights are not read from.
    ///
    /// # Panics
    /// If there is no such layer.
    pub fn layer(&self, layer: usize) -> Result<MlpPredictorWeights> {
        let (rank, threshold) = (self.ranks[layer], self.thresholds[layer]);
        let mut store = WeightStore::from_source(Box::new(self.file.clone()));
        let mut matrix = |name: String, n_rows, row_len| {
            store.matrix(&name, n_rows, row_len, Layout::NeuronMajor, None)
        };
        Ok(MlpPredictorWeights {
            fc1: matrix(fc1(layer), rank, self.d_model)?,
            fc2: matrix(format!("blk.{layer}.fc2.weight"), self.d_ff, rank)?,
            threshold,
        })
    }
}

fn fc1(layer: usize) -> String {
    format!("blk.{layer}.fc1.weight")
}

fn thresholds(keys: &GgufMetadata, n_layers: usize) -> Result<Vec<f32>> {
    let [one, each] = THRESHOLDS;
    let all = keys.optional_f32(one)?.unwrap_or(0.0);
    let (key, thresholds) = match keys.optional_f32s(each)? {
        Some(thresholds) => (each, thresholds),
        None => (one, vec![all; n_layers]),
    };
    if thresholds.len() != n_layers || thresholds.iter().any(|threshold| threshold.is_nan()) {
        return Err(keys.error(key, format!("one number a layer, {n_layers}")).into());
    }
    Ok(thresholds)
}
