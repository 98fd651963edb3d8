//! The whole flow: files → weights → placement → layers.

use std::path::Path;

use powerinfer_core::{
    CancelToken, CausalLm, Error as CoreError, KvShape, ModelConfig, Placement, Sparsity,
    WeightStore,
};
use powerinfer_ops::WeightFormat;
use powerinfer_ops::attention::KvDtype;

use crate::error::{Error, Result};
use crate::loader::Loader;
use crate::registry;

/// How to hold and run a model.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct LoadOptions {
    /// What the weights are held as; `None` keeps each tensor's own type.
    pub dtype: Option<WeightFormat>,
    /// Which neurons are computed.
    pub sparsity: Sparsity,
    /// Which neurons are hot; `None` keeps all neurons of a layer together.
    pub placement: Option<Placement>,
    /// What keys and values are cached as, f32 by default.
    pub kv_dtype: KvDtype,
    /// Reads PyTorch files of at most so many bytes each where there are no safetensors; `None`
    /// reads none. See [`WeightStore::open_with_pytorch`] for whom to trust.
    pub pytorch_bytes: Option<u64>,
    /// Stops the loading, from another thread, before the next tensor.
    pub cancel: CancelToken,
}

impl LoadOptions {
    /// Holds all matrices in one format.
    #[must_use]
    pub fn with_dtype(mut self, dtype: Option<WeightFormat>) -> Self {
        self.dtype = dtype;
        self
    }

    /// Chooses which neurons are computed.
    #[must_use]
    pub fn with_sparsity(mut self, sparsity: Sparsity) -> Self {
        self.sparsity = sparsity;
        self
    }

    /// Caches keys and values in another type.
    #[must_use]
    pub fn with_kv_dtype(mut self, kv_dtype: KvDtype) -> Self {
        self.kv_dtype = kv_dtype;
        self
    }

    /// Reads PyTorch files, too, of at most `max_bytes` bytes each.
    #[must_use]
    pub fn with_pytorch(mut self, max_bytes: u64) -> Self {
        self.pytorch_bytes = Some(max_bytes);
        self
    }

    /// Stops the loading once `cancel` is cancelled.
    #[must_use]
    pub fn with_cancel(mut self, cancel: CancelToken) -> Self {
        self.cancel = cancel;
        self
    }

    /// Splits the neurons of each layer into hot and cold.
    #[must_use]
    pub fn with_placement(mut self, placement: Placement) -> Self {
        self.placement = Some(placement);
        self
    }
}

/// Loads a Hugging Face folder: `config.json`, `generation_config.json` for the end tokens, and
/// `model.safetensors` or the shards of `model.safetensors.index.json`; on request
/// `pytorch_model.bin` or its shards.
///
/// Runs on the current thread pool; see [`ThreadPool`](powerinfer_ops::ThreadPool).
///
/// # Errors
/// [`Error::Core`] naming the file and field or tensor that is missing, misshapen or unknown;
/// [`Error::Core`] with [`Cancelled`](powerinfer_core::Error::Cancelled) if that is what happened;
/// [`Error::NotSparse`] if sparse inference was asked for and the model is not sparse.
///
/// # Examples
/// ```no_run
/// use powerinfer_models::{LoadOptions, load};
/// let model = load("relu-llama-7b".as_ref(), &LoadOptions::default())?;
/// println!("{:?}", model.info());
/// # Ok::<(), powerinfer_models::Error>(())
/// ```
pub fn load(dir: &Path, options: &LoadOptions) -> Result<Box<dyn CausalLm>> {
    let config = ModelConfig::from_dir(dir, &registry::supported_model_types())?;
    build(&config, open(dir, options)?, options)
}

/// The weights of a folder; only headers are read.
pub(crate) fn open(dir: &Path, options: &LoadOptions) -> powerinfer_core::Result<WeightStore> {
    match options.pytorch_bytes {
        Some(max_bytes) => WeightStore::open_with_pytorch(dir, max_bytes),
        None => WeightStore::open(dir),
    }
}

/// Builds a model of a known architecture from any source of weights.
pub(crate) fn build(
    config: &ModelConfig,
    mut store: WeightStore,
    options: &LoadOptions,
) -> Result<Box<dyn CausalLm>> {
    let model_type = config.model_type.as_str();
    let architecture = registry::find(model_type).ok_or_else(|| CoreError::UnknownModelType {
        path: "config.json".into(),
        found: model_type.to_owned(),
        supported: registry::supported_model_types().join(", "),
    })?;
    let sparsity = resolve(options.sparsity, config)?;
    if let Some(placement) = &options.placement {
        placement.check(config.n_layers, config.d_ff)?;
    }
    let mut loader = Loader::new(&mut store, options.dtype, options.placement.as_ref())
        .with_cancel(options.cancel.clone());
    let mut model = (architecture.build)(config, &mut loader)?;
    let loaded = loader.finish();
    let ignored = store.finish(&architecture.is_ignorable)?;
    let kv = KvShape { dtype: options.kv_dtype, ..config.kv_shape() };
    model.describe(config, kv, sparsity, loaded, &ignored);
    Ok(Box::new(model))
}

/// What a mode means for a model.
fn resolve(sparsity: Sparsity, config: &ModelConfig) -> Result<Sparsity> {
    let activation = config.activation;
    match sparsity {
        Sparsity::Auto if activation.is_sparse() => Ok(Sparsity::Exact),
        Sparsity::Auto | Sparsity::Dense => Ok(Sparsity::Dense),
        Sparsity::Exact if activation.is_sparse() => Ok(Sparsity::Exact),
        Sparsity::Exact => Err(Error::NotSparse { sparsity, activation }),
        _ => Err(Error::UnsupportedSparsity { sparsity }),
    }
}
