//! The whole flow: files → weights → placement → layers.

use std::path::Path;

use powerinfer_core::{
    CausalLm, Error as CoreError, ModelConfig, Placement, Sparsity, WeightStore,
};
use powerinfer_ops::WeightFormat;

use crate::error::{Error, Result};
use crate::loader::Loader;
use crate::predictor::{PredictorOptions, Predictors, try_out};
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
    /// How neurons are predicted; [`Sparsity::Predicted`] without one makes quantised predictors.
    /// With one, [`Sparsity::Auto`] is [`Sparsity::Predicted`].
    pub predictor: Option<PredictorOptions>,
    /// Reads PyTorch files of at most so many bytes each where there are no safetensors; `None`
    /// reads none. See [`WeightStore::open_with_pytorch`] for whom to trust.
    pub pytorch_bytes: Option<u64>,
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

    /// Reads PyTorch files, too, of at most `max_bytes` bytes each.
    #[must_use]
    pub fn with_pytorch(mut self, max_bytes: u64) -> Self {
        self.pytorch_bytes = Some(max_bytes);
        self
    }

    /// Predicts which neurons fire.
    #[must_use]
    pub fn with_predictor(mut self, predictor: PredictorOptions) -> Self {
        self.predictor = Some(predictor);
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
    let store = match options.pytorch_bytes {
        Some(max_bytes) => WeightStore::open_with_pytorch(dir, max_bytes)?,
        None => WeightStore::open(dir)?,
    };
    build(&config, store, options)
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
    let sparsity = resolve(options, config)?;
    if let Some(placement) = &options.placement {
        placement.check(config.n_layers, config.d_ff)?;
    }
    let predictor = match (&options.predictor, sparsity) {
        (None, Sparsity::Predicted) => Some(PredictorOptions::default()),
        (given, _) => given.clone(),
    };
    let mut loader = Loader::new(&mut store, options.dtype, options.placement.as_ref());
    if let Some(predictor) = &predictor {
        predictor.check()?;
        loader = loader.with_predictors(Predictors::open(predictor, config.n_layers)?);
    }
    let mut model = (architecture.build)(config, &mut loader)?;
    let loaded = loader.finish();
    let ignored = store.finish(&architecture.is_ignorable)?;
    model.describe(config, sparsity, loaded, &ignored);
    if let Some(predictor) = &predictor {
        let notes = try_out(&mut model, predictor)?;
        model.add_notes(notes);
    }
    Ok(Box::new(model))
}

/// What a mode means for a model.
fn resolve(options: &LoadOptions, config: &ModelConfig) -> Result<Sparsity> {
    let activation = config.activation;
    let given = options.predictor.is_some();
    let sparsity = match options.sparsity {
        Sparsity::Auto if given => Sparsity::Predicted,
        Sparsity::Auto if activation.is_sparse() => Sparsity::Exact,
        Sparsity::Auto => Sparsity::Dense,
        asked => asked,
    };
    match sparsity {
        Sparsity::Dense if !given => Ok(sparsity),
        Sparsity::Dense | Sparsity::Exact | Sparsity::Predicted if activation.is_sparse() => {
            Ok(sparsity)
        }
        Sparsity::Dense | Sparsity::Exact | Sparsity::Predicted => {
            Err(Error::NotSparse { sparsity, activation })
        }
        _ => Err(Error::UnsupportedSparsity { sparsity }),
    }
}
