//! The engine: a model, its tokenizer and the threads that run them, shared by all sessions.

use std::fmt;
use std::io::ErrorKind;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use powerinfer_core::{CausalLm, ModelInfo, Sparsity};
use powerinfer_models::{LoadOptions, PredictorOptions, load};
use powerinfer_ops::ThreadPool;

use crate::error::{Error, Result};
use crate::options::Dtype;
use crate::session::Session;
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

    /// The tokenizer; `None` for a model folder without `tokenizer.json` and for a model of one's
    /// own that was given none.
    #[must_use]
    pub fn tokenizer(&self) -> Option<&Tokenizer> {
        self.0.tokenizer.as_ref()
    }

    /// Worker threads; no other threads compute.
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
/// Give it a model folder with [`model`](Self::model) or a model of your own with
/// [`causal_lm`](Self::causal_lm); all else has a default.
#[derive(Debug, Default)]
#[must_use = "a builder does nothing until `build`"]
pub struct EngineBuilder {
    folder: Option<PathBuf>,
    own_model: Option<Box<dyn CausalLm>>,
    tokenizer_file: Option<PathBuf>,
    dtype: Dtype,
    sparsity: Sparsity,
    predictor: Option<PredictorOptions>,
    threads: Option<usize>,
    pytorch_bytes: Option<u64>,
}

impl EngineBuilder {
    /// A folder in Hugging Face layout: `config.json`, `model.safetensors` or
    /// `model.safetensors.index.json` with its shards, and, if there is one, `tokenizer.json`.
    pub fn model(mut self, folder: impl AsRef<Path>) -> Self {
        self.folder = Some(folder.as_ref().to_path_buf());
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

    /// Starts the threads and loads the model and the tokenizer.
    ///
    /// # Cost
    /// Reads the weights once; memory beside them is at most one tensor.
    ///
    /// # Errors
    /// [`Error::ModelSource`] for no model or two; [`Error::InvalidOption`]; [`Error::Core`] with
    /// the file, field or tensor that is wrong, and for a folder that is not there (it holds
    /// [`core::Error::Io`](powerinfer_core::Error::Io), whose source says why); [`Error::Tokenizer`] for a broken tokenizer;
    /// [`Error::Io`] if the file of [`tokenizer_file`](Self::tokenizer_file) is not there.
    pub fn build(self) -> Result<Engine> {
        let pool = start(self.threads)?;
        let (model, folder) = match (self.own_model, self.folder) {
            (Some(model), None) => {
                refuse("dtype", self.dtype == Dtype::Auto, &self.dtype)?;
                refuse("sparsity", self.sparsity == Sparsity::Auto, &self.sparsity)?;
                refuse("predictor", self.predictor.is_none(), &"a predictor")?;
                (model, None)
            }
            (None, Some(folder)) => {
                let mut options = LoadOptions::default();
                options.dtype = self.dtype.weight_format();
                options.sparsity = self.sparsity;
                options.predictor = self.predictor;
                options.pytorch_bytes = self.pytorch_bytes;
                (pool.install(|| load(&folder, &options))?, Some(folder))
            }
            (None, None) => return Err(Error::ModelSource { found: "neither" }),
            (Some(_), Some(_)) => return Err(Error::ModelSource { found: "both" }),
        };
        let tokenizer = match (self.tokenizer_file, folder) {
            (Some(path), _) => Some(Tokenizer::from_file(path)?),
            (None, Some(folder)) => tokenizer_in(&folder)?,
            (None, None) => None,
        };
        let info = model.info();
        tracing::debug!(
            architecture = info.architecture,
            n_parameters = info.n_parameters,
            weight_bytes = info.weight_bytes,
            sparsity = %info.sparsity,
            n_threads = pool.n_threads(),
            "engine ready"
        );
        Ok(Engine(Arc::new(Shared { pool, model, tokenizer })))
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

/// The tokenizer of a model folder, which may have none.
fn tokenizer_in(folder: &Path) -> Result<Option<Tokenizer>> {
    match Tokenizer::from_file(folder.join("tokenizer.json")) {
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
