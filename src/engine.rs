//! The engine: a model, its tokenizer and the threads that run them, shared by all sessions.

mod device;

use std::fmt;
use std::io::ErrorKind;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use powerinfer_core::{
    ActivationProfile, CancelToken, CausalLm, Holding, LoadProgress, ModelInfo, Offload, Placement,
    Plan, Sparsity,
};
use powerinfer_models::{LoadOptions, MemoryEstimate, PredictorOptions, estimate, load};
use powerinfer_ops::attention::KvDtype;
use powerinfer_ops::{Activation, FastDevice, ThreadPool};

use crate::chat::{ChatMessage, ChatOptions, ChatTemplate};
use crate::error::{Error, Result};
use crate::options::Dtype;
use crate::session::{Session, begin_once};
use crate::text::Tokenizer;

/// No machine has more cores, and a system that runs out of threads ends the process.
const MAX_THREADS: usize = 1024;

/// A model ready to run, with its tokenizer and its worker threads.
///
/// Cloning shares all three, and any number of [`Session`]s run on them at once, from any number
/// of threads. The engine is gone when its last clone and its last session are.
///
/// # Examples
/// ```
/// use powerinfer::{Dtype, Engine};
///
/// let engine = Engine::builder()
///     .model("assets/llama-relu-tiny")
///     .dtype(Dtype::F32)
///     .threads(2)
///     .build()?;
/// assert_eq!(engine.info().architecture, "llama");
/// assert_eq!(engine.n_threads(), 2);
/// # Ok::<(), powerinfer::Error>(())
/// ```
#[derive(Clone)]
pub struct Engine(Arc<Shared>);

struct Shared {
    pool: ThreadPool,
    model: Box<dyn CausalLm>,
    tokenizer: Option<Tokenizer>,
    chat_template: Option<ChatTemplate>,
    max_context: usize,
}

impl Engine {
    /// Starts choosing a model and how it runs.
    pub fn builder() -> EngineBuilder {
        EngineBuilder::default()
    }

    /// A new, empty context on this engine.
    ///
    /// # Cost
    /// Next to nothing: memory for keys and values comes as the context grows.
    ///
    /// # Errors
    /// None so far; a limit on sessions would be one.
    pub fn session(&self) -> Result<Session> {
        Ok(Session::new(self.clone()))
    }

    /// Sizes of the model, how it is held in memory, its end tokens, and notes on how it was
    /// loaded.
    #[must_use]
    pub fn info(&self) -> &ModelInfo {
        self.0.model.info()
    }

    /// The tokenizer; `None` for a model folder without `tokenizer.json`, for a GGUF file without a
    /// vocabulary and for a model of one's own that was given none.
    #[must_use]
    pub fn tokenizer(&self) -> Option<&Tokenizer> {
        self.0.tokenizer.as_ref()
    }

    /// Tokens that a context holds: those that the model allows, or fewer if
    /// [`EngineBuilder::max_context`] says so.
    #[must_use]
    pub fn max_context(&self) -> usize {
        self.0.max_context
    }

    /// The template that turns messages into a prompt; `None` if the model came without one and
    /// none was given.
    #[must_use]
    pub fn chat_template(&self) -> Option<&ChatTemplate> {
        self.0.chat_template.as_ref()
    }

    /// The prompt that a text makes at the beginning of a context, special tokens included, for
    /// [`Session::generate_whole`], which takes the text, too.
    ///
    /// # Errors
    /// [`Error::NoTokenizer`]; [`Error::Tokenizer`]; [`Error::PromptTooLong`].
    pub fn text_prompt(&self, text: &str) -> Result<Vec<u32>> {
        let mut ids = self.encode(text, true)?;
        begin_once(&mut ids, self.info().bos_token_id);
        Ok(ids)
    }

    /// The ids of a text that could fit a context.
    pub(crate) fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>> {
        let tokenizer = self.tokenizer().ok_or(Error::NoTokenizer { what: "the prompt" })?;
        self.check_length(text)?;
        tokenizer.encode(text, add_special)
    }

    /// The prompt that a conversation makes by the model's chat template, for
    /// [`Session::generate_whole`]; [`Session::chat`] does both.
    ///
    /// Special tokens are those that the template writes. The beginning-of-sequence token is never
    /// there twice.
    ///
    /// # Errors
    /// [`Error::NoChatTemplate`]; [`Error::ChatTemplate`] if the template fails or refuses the
    /// messages; [`Error::NoTokenizer`]; [`Error::Tokenizer`]; [`Error::PromptTooLong`].
    ///
    /// # Examples
    /// ```
    /// use powerinfer::{ChatMessage, ChatOptions, Engine};
    ///
    /// let engine = Engine::builder()
    ///     .model("assets/llama-relu-tiny")
    ///     .chat_template("{{ bos_token }}{{ messages[0].content }}")
    ///     .build()?;
    /// let prompt = engine.chat_prompt(&[ChatMessage::user("It was")], &ChatOptions::default())?;
    /// assert_eq!(prompt, [1, 1388, 342]);
    /// # Ok::<(), powerinfer::Error>(())
    /// ```
    pub fn chat_prompt(&self, messages: &[ChatMessage], options: &ChatOptions) -> Result<Vec<u32>> {
        let template = self.chat_template().ok_or(Error::NoChatTemplate)?;
        let tokenizer = self.tokenizer().ok_or(Error::NoTokenizer { what: "a conversation" })?;
        let mut ids = self.encode(&template.render(messages, options)?, false)?;
        let bos = template.token("bos_token").and_then(|token| tokenizer.token_id(token));
        begin_once(&mut ids, bos.or(self.info().bos_token_id));
        Ok(ids)
    }

    /// The end token that the tokenizer's configuration names, which that of the model may not.
    pub(crate) fn end_id(&self) -> Option<u32> {
        let token = self.chat_template()?.token("eos_token")?;
        self.tokenizer()?.token_id(token)
    }

    /// Refuses a text that cannot fit before the tokenizer spends memory on it: no vocabulary spends
    /// this many bytes on each token of a text.
    fn check_length(&self, text: &str) -> Result<()> {
        const BYTES_PER_TOKEN: usize = 256;
        let max_context = self.max_context();
        let max_bytes = max_context.saturating_mul(BYTES_PER_TOKEN);
        if text.len() <= max_bytes {
            return Ok(());
        }
        Err(Error::PromptTooLong { found_bytes: text.len(), max_bytes, max_context })
    }

    /// Worker threads; no other threads compute, but for those of a
    /// [`StandIn`](crate::StandIn) that the engine was given.
    #[must_use]
    pub fn n_threads(&self) -> usize {
        self.0.pool.n_threads()
    }

    pub(crate) fn pool(&self) -> &ThreadPool {
        &self.0.pool
    }

    pub(crate) fn model(&self) -> &dyn CausalLm {
        self.0.model.as_ref()
    }
}

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Engine")
            .field("info", self.info())
            .field("tokenizer", &self.tokenizer())
            .field("n_threads", &self.n_threads())
            .finish()
    }
}

/// Where an [`Engine`]'s model comes from and how it runs.
///
/// Give it a model folder or file with [`model`](Self::model) or a model of your own with
/// [`causal_lm`](Self::causal_lm); all else has a default.
#[derive(Debug, Default)]
#[must_use = "a builder does nothing until `build`"]
pub struct EngineBuilder {
    folder: Option<PathBuf>,
    own_model: Option<Box<dyn CausalLm>>,
    tokenizer_file: Option<PathBuf>,
    dtype: Dtype,
    kv_dtype: KvDtype,
    sparsity: Sparsity,
    predictor: Option<PredictorOptions>,
    threads: Option<usize>,
    pytorch_bytes: Option<u64>,
    holding: Holding,
    gguf_activation: Option<Activation>,
    requantise_down: bool,
    max_context: Option<usize>,
    memory_budget: Option<u64>,
    cancel: CancelToken,
    chat_template: Option<String>,
    fast_device: Option<Arc<dyn FastDevice>>,
    placement: Option<Placement>,
    plan: Option<Plan>,
    profile: Option<ActivationProfile>,
    offload: Option<Offload>,
    device_context: Option<usize>,
    progress: Option<LoadProgress>,
}

impl EngineBuilder {
    /// A folder in Hugging Face layout: `config.json`, `model.safetensors` or
    /// `model.safetensors.index.json` with its shards, and, if there is one, `tokenizer.json`.
    /// Or a GGUF file, plain or PowerInfer's, which holds all that itself, a tokenizer included; of
    /// one in parts any part.
    pub fn model(mut self, path: impl AsRef<Path>) -> Self {
        self.folder = Some(path.as_ref().to_path_buf());
        self
    }

    /// Whether weights are copied into memory, the default, or used where they lie in the file. See
    /// [`Holding::Mapped`] for what that asks of the file. Only for a model folder or file.
    pub fn holding(mut self, holding: Holding) -> Self {
        self.holding = holding;
        self
    }

    /// Says which activation the model in a GGUF file has. Plain files of ReLU models name none and
    /// are otherwise run as what they look like: with SiLU.
    pub fn gguf_activation(mut self, activation: Activation) -> Self {
        self.gguf_activation = Some(activation);
        self
    }

    /// Quantises down projections anew where their blocks run across neurons, as in plain quantised
    /// GGUF files, so that neurons that do not fire need not be read. Rounds a second time.
    pub fn requantise_down(mut self, requantise: bool) -> Self {
        self.requantise_down = requantise;
        self
    }

    /// Reads `pytorch_model.bin` or its shards where the folder has no safetensors, files of at most
    /// `max_bytes` bytes each; without this they are not touched.
    ///
    /// Such a file holds a pickle. Nothing in it is executed, but its reader was not made for
    /// hostile ones: use it on files of a source that you trust.
    pub fn pytorch(mut self, max_bytes: u64) -> Self {
        self.pytorch_bytes = Some(max_bytes);
        self
    }

    /// A model of your own. It is fed token ids; with [`tokenizer_file`](Self::tokenizer_file) it
    /// takes and gives text, too.
    ///
    /// # Examples
    /// `examples/own_architecture.rs` builds one from the layers in
    /// [`powerinfer_models::layers`]; the page of [`powerinfer_core`] has a tiny one.
    pub fn causal_lm(mut self, model: impl CausalLm + 'static) -> Self {
        self.own_model = Some(Box::new(model));
        self
    }

    /// A `tokenizer.json`, in place of the one in the model folder.
    pub fn tokenizer_file(mut self, path: impl AsRef<Path>) -> Self {
        self.tokenizer_file = Some(path.as_ref().to_path_buf());
        self
    }

    /// What the weights are held as; default [`Dtype::Auto`]. Only for a model folder.
    pub fn dtype(mut self, dtype: Dtype) -> Self {
        self.dtype = dtype;
        self
    }

    /// What keys and values of the context are held as; default [`KvDtype::F32`], which keeps them
    /// as they were computed. [`KvDtype::F16`] takes half the memory and makes long contexts faster,
    /// and rounds each of them to 11 bits. Only for a model folder.
    ///
    /// # Examples
    /// ```
    /// use powerinfer::{Engine, KvDtype};
    ///
    /// let engine =
    ///     Engine::builder().model("assets/llama-relu-tiny").kv_dtype(KvDtype::F16).build()?;
    /// assert_eq!(engine.info().kv.dtype, KvDtype::F16);
    /// # Ok::<(), powerinfer::Error>(())
    /// ```
    pub fn kv_dtype(mut self, kv_dtype: KvDtype) -> Self {
        self.kv_dtype = kv_dtype;
        self
    }

    /// Which neurons of each feed-forward network are computed; default [`Sparsity::Auto`], which
    /// loses nothing. Only for a model folder.
    pub fn sparsity(mut self, sparsity: Sparsity) -> Self {
        self.sparsity = sparsity;
        self
    }

    /// Predicts which neurons fire; with one, [`Sparsity::Auto`] is [`Sparsity::Predicted`], and
    /// [`Sparsity::Predicted`] without one makes quantised predictors. Only for a model folder.
    ///
    /// [`PredictorOptions::shift`] trades speed for accuracy.
    ///
    /// # Examples
    /// ```
    /// use powerinfer::{Engine, PredictorOptions, Sparsity};
    ///
    /// let engine = Engine::builder()
    ///     .model("assets/llama-relu-tiny")
    ///     .predictor(PredictorOptions::default().with_shift(0.5))
    ///     .build()?;
    /// assert_eq!(engine.info().sparsity, Sparsity::Predicted);
    /// # Ok::<(), powerinfer::Error>(())
    /// ```
    pub fn predictor(mut self, predictor: PredictorOptions) -> Self {
        self.predictor = Some(predictor);
        self
    }

    /// Threads to compute with, 1 to 1024; default one for each core that the process may use.
    pub fn threads(mut self, threads: usize) -> Self {
        self.threads = Some(threads);
        self
    }

    /// Tokens that a context may hold at most, where that is fewer than the model allows: what a
    /// session can take in memory is in proportion to it.
    pub fn max_context(mut self, max_context: usize) -> Self {
        self.max_context = Some(max_context);
        self
    }

    /// Memory that the engine and one session with a full context may take, in bytes. A model that
    /// needs more is refused before anything of it is loaded. Only for a model folder.
    ///
    /// # Examples
    /// ```
    /// use powerinfer::{Engine, Error};
    ///
    /// let demo = Engine::builder().model("assets/llama-relu-tiny");
    /// let needed = demo.estimate()?.total_bytes(1, usize::MAX);
    /// let refused = demo.memory_budget(needed - 1).build();
    /// assert!(matches!(refused, Err(Error::OverBudget { needed_bytes, .. }) if needed_bytes == needed));
    /// # Ok::<(), Error>(())
    /// ```
    pub fn memory_budget(mut self, bytes: u64) -> Self {
        self.memory_budget = Some(bytes);
        self
    }

    /// Stops [`build`](Self::build) from another thread, before the next tensor.
    pub fn cancel(mut self, cancel: &CancelToken) -> Self {
        self.cancel = cancel.clone();
        self
    }

    /// Has `tell` called while [`build`](Self::build) loads the weights, after each tensor and on the
    /// thread that loads: with the bytes that were read so far and those of all tensors that the model
    /// takes, as its files hold them. It goes from none to all, or up to where an error ends the
    /// loading. Only for a model folder or file.
    ///
    /// # Examples
    /// ```
    /// use std::sync::atomic::{AtomicU64, Ordering};
    /// use powerinfer::Engine;
    ///
    /// static PERCENT: AtomicU64 = AtomicU64::new(0);
    /// Engine::builder()
    ///     .model("assets/llama-relu-tiny")
    ///     .on_load_progress(|done_bytes, total_bytes| {
    ///         PERCENT.store(100 * done_bytes / total_bytes, Ordering::Relaxed);
    ///     })
    ///     .build()?;
    /// assert_eq!(PERCENT.load(Ordering::Relaxed), 100);
    /// # Ok::<(), powerinfer::Error>(())
    /// ```
    pub fn on_load_progress(mut self, tell: impl Fn(u64, u64) + Send + Sync + 'static) -> Self {
        self.progress = Some(LoadProgress::new(tell));
        self
    }

    /// The text of a chat template, in place of the one that comes with the model.
    pub fn chat_template(mut self, template: impl Into<String>) -> Self {
        self.chat_template = Some(template.into());
        self
    }

    /// What the model would take in memory, from its headers; loads nothing.
    ///
    /// # Errors
    /// [`Error::ModelSource`] without a model folder; [`Error::Core`] naming the file, field or
    /// tensor that is wrong.
    pub fn estimate(&self) -> Result<MemoryEstimate> {
        let Some(folder) = &self.folder else {
            return Err(Error::ModelSource { found: "neither" });
        };
        let mut memory = estimate(folder, &self.load_options())?;
        memory.max_context = self.max_context.unwrap_or(usize::MAX).min(memory.max_context);
        Ok(memory)
    }

    /// Starts the threads and loads the model and the tokenizer.
    ///
    /// # Cost
    /// Reads the weights once; memory beside them is at most one tensor.
    ///
    /// # Errors
    /// [`Error::ModelSource`] for no model or two; [`Error::InvalidOption`]; [`Error::OverBudget`];
    /// [`Error::ChatTemplate`] for a template that cannot be parsed; [`Error::Core`] with
    /// the file, field or tensor that is wrong, and for a folder that is not there (it holds
    /// [`core::Error::Io`](powerinfer_core::Error::Io), whose source says why); [`Error::Tokenizer`] for a broken tokenizer;
    /// [`Error::Io`] if the file of [`tokenizer_file`](Self::tokenizer_file) is not there.
    pub fn build(self) -> Result<Engine> {
        self.check_budget()?;
        let pool = start(self.threads)?;
        let options = self.load_options();
        let (model, folder) = match (self.own_model, self.folder) {
            (Some(model), None) => {
                refuse("dtype", self.dtype == Dtype::Auto, &self.dtype)?;
                refuse("kv_dtype", self.kv_dtype == KvDtype::default(), &self.kv_dtype)?;
                refuse("sparsity", self.sparsity == Sparsity::Auto, &self.sparsity)?;
                refuse("predictor", self.predictor.is_none(), &"a predictor")?;
                refuse("fast_device", self.fast_device.is_none(), &"a device")?;
                refuse("placement", self.placement.is_none(), &"a placement")?;
                refuse("plan", self.plan.is_none(), &"a plan")?;
                refuse("profile", self.profile.is_none(), &"a profile")?;
                let offload = self.offload.map(Offload::name).unwrap_or_default();
                refuse("offload", self.offload.is_none(), &offload)?;
                let device_context = self.device_context.unwrap_or_default();
                refuse("device_context", self.device_context.is_none(), &device_context)?;
                (model, None)
            }
            (None, Some(folder)) => (pool.install(|| load(&folder, &options))?, Some(folder)),
            (None, None) => return Err(Error::ModelSource { found: "neither" }),
            (Some(_), Some(_)) => return Err(Error::ModelSource { found: "both" }),
        };
        let tokenizer = match (self.tokenizer_file, &folder) {
            (Some(path), _) => Some(Tokenizer::from_file(path)?),
            (None, Some(folder)) => tokenizer_in(folder)?,
            (None, None) => None,
        };
        let chat_template = ChatTemplate::find(folder.as_deref(), self.chat_template)?;
        let info = model.info();
        let max_context = self.max_context.unwrap_or(usize::MAX).min(info.kv.max_context);
        tracing::debug!(
            architecture = info.architecture,
            n_parameters = info.n_parameters,
            weight_bytes = info.weight_bytes,
            sparsity = %info.sparsity,
            n_threads = pool.n_threads(),
            "engine ready"
        );
        Ok(Engine(Arc::new(Shared { pool, model, tokenizer, chat_template, max_context })))
    }

    fn load_options(&self) -> LoadOptions {
        let mut options = LoadOptions::default();
        options.dtype = self.dtype.weight_format();
        options.kv_dtype = self.kv_dtype;
        options.sparsity = self.sparsity;
        options.predictor = self.predictor.clone();
        options.pytorch_bytes = self.pytorch_bytes;
        options.holding = self.holding;
        options.gguf_activation = self.gguf_activation;
        options.requantise_down = self.requantise_down;
        options.cancel = self.cancel.clone();
        options.fast_device = self.fast_device.clone();
        options.placement = self.placement.clone();
        options.plan = self.plan.clone();
        options.profile = self.profile.clone();
        options.offload = self.offload;
        options.device_context = self.device_context;
        options.max_context = self.max_context;
        options.progress = self.progress.clone();
        options
    }

    fn check_budget(&self) -> Result<()> {
        let Some(budget_bytes) = self.memory_budget else {
            return Ok(());
        };
        let memory = self.estimate()?;
        let needed_bytes = memory.total_bytes(1, usize::MAX);
        if needed_bytes <= budget_bytes {
            return Ok(());
        }
        Err(Error::OverBudget { needed_bytes, budget_bytes, memory: Box::new(memory) })
    }
}

fn start(threads: Option<usize>) -> Result<ThreadPool> {
    let outside = |&threads: &usize| threads == 0 || threads > MAX_THREADS;
    if let Some(threads) = threads.filter(outside) {
        return Err(Error::InvalidOption {
            field: "threads",
            expected: "1 to 1024",
            found: threads.to_string(),
        });
    }
    Ok(ThreadPool::new(threads.and_then(NonZeroUsize::new))?)
}

fn refuse(field: &'static str, is_auto: bool, found: &dyn ToString) -> Result<()> {
    if is_auto {
        return Ok(());
    }
    Err(Error::InvalidOption {
        field,
        expected: "auto for a model of one's own",
        found: found.to_string(),
    })
}

/// The tokenizer of a GGUF file or of a model folder, either of which may have none.
fn tokenizer_in(model: &Path) -> Result<Option<Tokenizer>> {
    if model.is_file() {
        return Tokenizer::in_gguf(model);
    }
    match Tokenizer::from_file(model.join("tokenizer.json")) {
        Ok(tokenizer) => Ok(Some(tokenizer)),
        Err(Error::Io { source, .. }) if source.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_engine_is_shared_and_a_session_moves_between_threads() {
        fn shared<T: Clone + Send + Sync + 'static>() {}
        fn moves<T: Send + 'static>() {}
        shared::<Engine>();
        moves::<Session>();
        moves::<EngineBuilder>();
    }

    #[test]
    fn a_builder_without_a_model_says_so() {
        let error = Engine::builder().build().unwrap_err();
        assert!(matches!(error, Error::ModelSource { found: "neither" }));
    }

    #[test]
    fn impossible_thread_counts_are_refused() {
        for threads in [0, 1025, usize::MAX] {
            let error = Engine::builder().threads(threads).build().unwrap_err();
            assert!(matches!(error, Error::InvalidOption { field: "threads", .. }));
        }
    }
}
