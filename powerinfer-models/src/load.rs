//! The whole flow: files → weights → placement → layers.

use std::borrow::Cow;
use std::path::Path;
use std::sync::Arc;

use powerinfer_core::{
    ActivationProfile, CancelToken, CausalLm, Error as CoreError, Holding, KvShape, LoadProgress,
    ModelConfig, Offload, Placement, Plan, Sparsity, WeightStore,
};
use powerinfer_ops::attention::KvDtype;
use powerinfer_ops::{Activation, FastDevice, WeightFormat};

use crate::error::{Error, Result};
use crate::gguf_predictor::GgufPredictor;
use crate::loader::Loader;
use crate::placing::{Placed, profile_beside};
use crate::predictor::{PredictorOptions, PredictorSource, Predictors};
use crate::{gguf_names, registry};

/// How to hold and run a model.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct LoadOptions {
    /// What the weights are held as; `None` keeps each tensor's own type.
    pub dtype: Option<WeightFormat>,
    /// Which neurons are computed.
    pub sparsity: Sparsity,
    /// What lies on the fast device, going before a plan; `None` without plan and fast device keeps all
    /// neurons of a layer together. Without a fast device both parts of a layer's neurons are the CPU's,
    /// and so is everything else.
    pub placement: Option<Placement>,
    /// A plan that says what lies on the fast device; refused if it is that of another model or takes more
    /// than the fast device has left of its budget.
    pub plan: Option<Plan>,
    /// Where hot neurons lie and run while the CPU runs the others, and dense parts if the device runs
    /// them; `None` leaves all to the CPU. With neither placement nor plan, [`offload`](Self::offload)
    /// says what goes there.
    pub fast_device: Option<Arc<dyn FastDevice>>,
    /// What goes to the fast device, as much as its budget allows. `None` is [`Offload::Everything`] on a GPU that
    /// runs dense parts, and [`Offload::Neurons`] on one that does not and on a
    /// [`StandIn`](powerinfer_ops::StandIn), which is no faster than the CPU.
    pub offload: Option<Offload>,
    /// Tokens of the contexts whose keys and values the fast device's budget is to have room for, all
    /// sequences taken together, from 1 to as many as the model's longest context has. `None`: those of the
    /// plan if there is one, else [`max_context`](Self::max_context), else 2048; or the model's, if those
    /// are fewer. A context that outgrows the budget is refused with
    /// [`DeviceContext`](powerinfer_core::Error::DeviceContext).
    pub device_context: Option<usize>,
    /// Tokens of the longest context that will be asked for, if it is known; only for the room that a fast
    /// device is to have.
    pub max_context: Option<usize>,
    /// How often each neuron fires, to choose hot ones by. `None` takes
    /// `activation_counts.safetensors` in the model's folder, or `NAME.activation_counts.safetensors`
    /// beside a file `NAME.gguf`; where there is none, all neurons count alike.
    pub profile: Option<ActivationProfile>,
    /// How neurons are predicted; [`Sparsity::Predicted`] without one takes those in a PowerInfer
    /// file, or else makes quantised ones.
    /// With one, [`Sparsity::Auto`] is [`Sparsity::Predicted`].
    pub predictor: Option<PredictorOptions>,
    /// What keys and values are cached as, f32 by default.
    pub kv_dtype: KvDtype,
    /// Reads PyTorch files of at most so many bytes each where there are no safetensors; `None`
    /// reads none. See [`WeightStore::open_with_pytorch`] for whom to trust.
    pub pytorch_bytes: Option<u64>,
    /// What a GGUF file's networks apply to their gates, where the file does not say it or says it
    /// wrongly; a folder's `config.json` always says it.
    pub gguf_activation: Option<Activation>,
    /// Whether weights are copied into memory or used where they lie in the file.
    pub holding: Holding,
    /// Quantises a down projection anew whose blocks run across neurons, as in plain quantised GGUF
    /// files, so that the rows of neurons that do not fire need not be read. It rounds a second
    /// time; without this the projection stays as it is and is computed in full.
    pub requantise_down: bool,
    /// Stops the loading, from another thread, before the next tensor.
    pub cancel: CancelToken,
    /// Is told how many bytes of the weights have been read.
    pub progress: Option<LoadProgress>,
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

    /// Predicts which neurons fire.
    #[must_use]
    pub fn with_predictor(mut self, predictor: PredictorOptions) -> Self {
        self.predictor = Some(predictor);
        self
    }

    /// Says which activation the model in a GGUF file has: plain files of ReLU models name none,
    /// and are otherwise taken for what they look like, SiLU models.
    #[must_use]
    pub fn with_gguf_activation(mut self, activation: Activation) -> Self {
        self.gguf_activation = Some(activation);
        self
    }

    /// Copies weights into memory or uses them where they lie.
    #[must_use]
    pub fn with_holding(mut self, holding: Holding) -> Self {
        self.holding = holding;
        self
    }

    /// Quantises down projections anew where their blocks run across neurons.
    #[must_use]
    pub fn with_requantised_down(mut self, requantise: bool) -> Self {
        self.requantise_down = requantise;
        self
    }

    /// Stops the loading once `cancel` is cancelled.
    #[must_use]
    pub fn with_cancel(mut self, cancel: CancelToken) -> Self {
        self.cancel = cancel;
        self
    }

    /// Has `tell` called after each tensor, by the thread that loads, with the bytes that were read so
    /// far and those of all tensors that the model takes, as the files hold them: from none to all, or
    /// up to where an error ends the loading.
    ///
    /// # Examples
    /// ```
    /// use std::sync::{Arc, Mutex};
    /// use powerinfer_models::LoadOptions;
    /// use powerinfer_models::synthetic::{Synthetic, SyntheticShape};
    ///
    /// let seen = Arc::new(Mutex::new(Vec::new()));
    /// let heard = seen.clone();
    /// let tell = move |done, total| heard.lock().expect("nobody panicked").push((done, total));
    /// let options = LoadOptions::default().with_progress(tell);
    /// Synthetic::new(SyntheticShape::Tiny, 0.1, 7)?.load(&options)?;
    /// let seen = seen.lock().expect("nobody panicked");
    /// let &(done, total) = seen.last().expect("at least the beginning");
    /// assert!(seen[0] == (0, total) && done == total && total > 1 << 20);
    /// # Ok::<(), powerinfer_models::Error>(())
    /// ```
    #[must_use]
    pub fn with_progress(mut self, tell: impl Fn(u64, u64) + Send + Sync + 'static) -> Self {
        self.progress = Some(LoadProgress::new(tell));
        self
    }

    /// Splits the neurons of each layer into hot and cold.
    #[must_use]
    pub fn with_placement(mut self, placement: Placement) -> Self {
        self.placement = Some(placement);
        self
    }

    /// Splits the neurons as a plan says.
    #[must_use]
    pub fn with_plan(mut self, plan: Plan) -> Self {
        self.plan = Some(plan);
        self
    }

    /// Chooses hot neurons by this profile.
    #[must_use]
    pub fn with_profile(mut self, profile: ActivationProfile) -> Self {
        self.profile = Some(profile);
        self
    }

    /// Says what goes to the fast device.
    #[must_use]
    pub fn with_offload(mut self, offload: Offload) -> Self {
        self.offload = Some(offload);
        self
    }

    /// Says for how many tokens the fast device is to have room.
    #[must_use]
    pub fn with_device_context(mut self, n_tokens: usize) -> Self {
        self.device_context = Some(n_tokens);
        self
    }

    /// Says how long contexts will be at most.
    #[must_use]
    pub fn with_max_context(mut self, n_tokens: usize) -> Self {
        self.max_context = Some(n_tokens);
        self
    }

    /// Puts the hot neurons on a device.
    #[must_use]
    pub fn with_fast_device(mut self, device: Arc<dyn FastDevice>) -> Self {
        self.fast_device = Some(device);
        self
    }
}

/// Loads a model.
///
/// `path` is a Hugging Face folder: `config.json`, `generation_config.json` for the end tokens, and
/// `model.safetensors` or the shards of `model.safetensors.index.json`; on request
/// `pytorch_model.bin` or its shards. Or it is a GGUF file, plain or PowerInfer's, which says all
/// that itself; see [`ModelConfig::from_gguf`] for how its activation is found. A PowerInfer file
/// that holds a predictor runs it under [`Sparsity::Auto`] and [`Sparsity::Predicted`], unless
/// another was given.
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
pub fn load(path: &Path, options: &LoadOptions) -> Result<Box<dyn CausalLm>> {
    let (config, store) = open(path, options)?;
    let options = with_profile_beside(path, options)?;
    let left_open = matches!(options.sparsity, Sparsity::Auto | Sparsity::Predicted);
    if left_open
        && options.predictor.is_none()
        && config.activation.is_sparse()
        && is_gguf(path)
        && let Some(found) = GgufPredictor::open(path)?
    {
        let thresholds = found.thresholds().to_vec();
        let found = PredictorOptions::new(PredictorSource::InModel { thresholds });
        return build(&config, store, &options.into_owned().with_predictor(found));
    }
    build(&config, store, &options)
}

/// The options with the profile that lies beside the model, where one is needed and none was given.
pub(crate) fn with_profile_beside<'a>(
    path: &Path,
    options: &'a LoadOptions,
) -> Result<Cow<'a, LoadOptions>> {
    let is_planned = options.placement.is_some() || options.plan.is_some();
    if is_planned || options.fast_device.is_none() || options.profile.is_some() {
        return Ok(Cow::Borrowed(options));
    }
    let profile = profile_beside(path)?;
    Ok(Cow::Owned(LoadOptions { profile, ..options.clone() }))
}

/// Opens a model without loading it: its configuration, and its tensors under the names that
/// Hugging Face gives them. Of the options only those that say what is read matter.
///
/// # Errors
/// [`Error::Core`].
pub fn open(path: &Path, options: &LoadOptions) -> Result<(ModelConfig, WeightStore)> {
    if is_gguf(path) {
        return gguf_names::open(path, options.gguf_activation, options.holding);
    }
    let config = ModelConfig::from_dir(path, &registry::supported_model_types())?;
    let store = match (options.holding, options.pytorch_bytes) {
        (Holding::Mapped, _) => WeightStore::open_mapped(path)?,
        (_, Some(max_bytes)) => WeightStore::open_with_pytorch(path, max_bytes)?,
        (_, None) => WeightStore::open(path)?,
    };
    Ok((config, store))
}

/// Whether a model is a GGUF file and no folder.
pub(crate) fn is_gguf(path: &Path) -> bool {
    let named_so = path.extension().is_some_and(|end| end.eq_ignore_ascii_case("gguf"));
    path.is_file() || named_so && !path.is_dir()
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
    let predictor = wanted_predictor(options, sparsity);
    let is_ignorable =
        |name: &str| (architecture.is_ignorable)(name) || gguf_names::is_predictor(name);
    if let Some(progress) = &options.progress {
        store = store.with_progress(progress.clone(), &is_ignorable);
    }
    let placed = Placed::find(config, &store, options, predictor.as_ref())?;
    let (placement, hot_densities) = match &placed {
        Some(placed) => (Some(&placed.placement), placed.hot_densities.as_slice()),
        None => (None, &[][..]),
    };
    let mut loader = Loader::new(&mut store, options.dtype, placement)
        .with_fast_device(options.fast_device.as_deref(), hot_densities)
        .with_holding(options.holding)
        .with_requantised_down(options.requantise_down)
        .with_cancel(options.cancel.clone());
    let kv = KvShape { dtype: options.kv_dtype, ..config.kv_shape() };
    if let Some(predictor) = &predictor {
        let predictors = Predictors::open(predictor, config, kv.clone(), &options.cancel)?;
        loader = loader.with_predictors(predictors);
    }
    let mut model = (architecture.build)(config, &mut loader)?;
    let (loaded, predictors) = loader.finish()?;
    if let Some(device) = &options.fast_device {
        let with_head = placement.is_some_and(Placement::fast_head);
        model.put_on(device, with_head)?;
    }
    let ignored = store.finish(&is_ignorable)?;
    model.describe(config, kv, sparsity, loaded, &ignored);
    if let Some(predictors) = predictors {
        model.settle_predictors(predictors.were_chosen);
        model.add_notes(predictors.of_trial);
    }
    let context_bytes = placed.as_ref().map_or(0, |placed| placed.context_bytes);
    if let Some(placed) = placed {
        model.add_notes(placed.notes);
    }
    if let Some(device) = &options.fast_device {
        model.settle_on(device.as_ref(), context_bytes)?;
    }
    Ok(Box::new(model))
}

/// The predictor that was asked for, or that a mode cannot do without.
pub(crate) fn wanted_predictor(
    options: &LoadOptions,
    sparsity: Sparsity,
) -> Option<PredictorOptions> {
    match (&options.predictor, sparsity) {
        (None, Sparsity::Predicted) => Some(PredictorOptions::default()),
        (given, _) => given.clone(),
    }
}

/// What a mode means for a model.
pub(crate) fn resolve(options: &LoadOptions, config: &ModelConfig) -> Result<Sparsity> {
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
