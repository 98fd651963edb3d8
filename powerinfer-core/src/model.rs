//! What a language model is to everything above it: tokens and a cache in, logits out.

use std::fmt;
use std::str::FromStr;
use std::sync::{Arc, Mutex};

use candle_core::Tensor;
use powerinfer_ops::{FfnWeights, NeuronIds, Workspace};

use crate::cancel::CancelToken;
use crate::error::{Error, Result};
use crate::kv_cache::{KvCache, KvShape};
use crate::stats::StepStats;

/// Which neurons of a feed-forward network are computed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Sparsity {
    /// The fastest mode that loses nothing: [`Exact`](Self::Exact) where the activation function
    /// gives zeros, [`Dense`](Self::Dense) elsewhere; but [`Predicted`](Self::Predicted) where a
    /// predictor was given or lies in the model file.
    #[default]
    Auto,
    /// Every neuron.
    Dense,
    /// The gate in full, then up and down for the neurons that fire. The same logits as dense.
    Exact,
    /// Gate, up and down for the neurons that a predictor picks, as far as they fire. Not the same
    /// logits: a neuron that is not picked counts as not firing. Layers without a predictor run as
    /// in [`Exact`](Self::Exact).
    Predicted,
}

impl Sparsity {
    /// The name in configurations and command lines.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Dense => "dense",
            Self::Exact => "exact",
            Self::Predicted => "predicted",
        }
    }
}

impl fmt::Display for Sparsity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Sparsity {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        let modes = [Self::Auto, Self::Dense, Self::Exact, Self::Predicted];
        modes.into_iter().find(|mode| mode.name() == name).ok_or_else(|| Error::UnknownSparsity {
            found: name.to_owned(),
            supported: "auto, dense, exact, predicted",
        })
    }
}

/// What a model is: its sizes and how it is held in memory.
///
/// A model of one's own starts from the default and fills in what applies.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct ModelInfo {
    /// Name of the architecture, as in `model_type`.
    pub architecture: String,
    /// Layers.
    pub n_layers: usize,
    /// Width of the residual stream.
    pub d_model: usize,
    /// Neurons of a feed-forward network.
    pub d_ff: usize,
    /// Token ids below this exist; a row of logits has this length.
    pub vocab_size: usize,
    /// Tokens of a context.
    pub max_context: usize,
    /// What the cache holds for each token.
    pub kv: KvShape,
    /// Name of the activation function of the feed-forward networks.
    pub activation: String,
    /// The mode that [`Sparsity::Auto`] came to, or the one asked for.
    pub sparsity: Sparsity,
    /// Numbers in the weights, a tied head counted once.
    pub n_parameters: u64,
    /// Memory that the weights take on host and fast device together, in bytes.
    pub weight_bytes: u64,
    /// The formats that matrices are held in, each once.
    pub dtypes: Vec<String>,
    /// Name of the fast device that holds the hot neurons; `None` if the CPU runs them all.
    pub fast_device: Option<String>,
    /// Memory that the hot neurons take on the fast device, in bytes.
    pub fast_bytes: u64,
    /// The predictor of [`Sparsity::Predicted`], in words; `None` if there is none.
    pub predictor: Option<String>,
    /// Tokens that end a text.
    pub eos_token_ids: Vec<u32>,
    /// The token that texts begin with.
    pub bos_token_id: Option<u32>,
    /// What is worth knowing about how the model was loaded, a sentence each: tensors that were
    /// ignored, a head that differs from the embeddings.
    pub notes: Vec<String>,
}

/// A language model that gives logits for the next token.
///
/// Implement it to run a model of one's own through [`Generation`](crate::Generation) and all
/// that is built on it; the [crate page](crate) has one complete.
pub trait CausalLm: fmt::Debug + Send + Sync {
    /// What the model is.
    fn info(&self) -> &ModelInfo;

    /// An empty cache of the shape and type of [`ModelInfo::kv`].
    fn new_cache(&self) -> KvCache {
        KvCache::new(self.info().kv.clone())
    }

    /// Appends `tokens` to `cache` and writes the logits that [`Step::wanted`] asks for to
    /// [`Step::logits`], replacing what was there. What the pass did is added to
    /// [`Step::stats`].
    ///
    /// Any split of a text into passes over one cache gives the logits of a single pass.
    ///
    /// An implementation starts with [`KvCache::reserve`] and ends with [`KvCache::commit`], so
    /// that an error leaves the cache as it was.
    ///
    /// # Shapes
    /// `tokens` `[n_tokens]`, at least one · `step.logits` `[n_tokens, vocab_size]`,
    /// `[1, vocab_size]` or empty, as wanted
    ///
    /// # Errors
    /// [`Error::EmptyPrompt`], [`Error::TokenOutOfRange`] and [`Error::ContextExceeded`] before
    /// any work, [`Error::Cancelled`] before the next layer once [`Step::cancel`] is cancelled, then
    /// whatever the layers fail with.
    fn forward(&self, tokens: &[u32], cache: &mut KvCache, step: &mut Step) -> Result<()>;
}

impl<M: CausalLm + ?Sized> CausalLm for Box<M> {
    fn info(&self) -> &ModelInfo {
        (**self).info()
    }

    fn new_cache(&self) -> KvCache {
        (**self).new_cache()
    }

    fn forward(&self, tokens: &[u32], cache: &mut KvCache, step: &mut Step) -> Result<()> {
        (**self).forward(tokens, cache, step)
    }
}

/// After which tokens of a pass logits are wanted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum WantedLogits {
    /// After the last: what the next token is chosen from.
    #[default]
    Last,
    /// After each: to score a text.
    All,
    /// After none: for the first pieces of a long prompt. Saves the work of the head.
    None,
}

impl WantedLogits {
    /// Rows of logits that a pass over `n_tokens` gives.
    #[must_use]
    pub fn n_rows(self, n_tokens: usize) -> usize {
        match self {
            Self::Last => n_tokens.min(1),
            Self::All => n_tokens,
            Self::None => 0,
        }
    }
}

/// Watches the feed-forward networks of a model: profilers, and what predictors are fitted on.
pub trait FfnObserver: fmt::Debug + Send {
    /// Sees one layer of a pass.
    ///
    /// # Errors
    /// Whatever ends the pass.
    fn observe(&mut self, seen: &FfnSeen<'_>) -> Result<()>;
}

/// What a feed-forward network saw, and what its neurons gave.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct FfnSeen<'a> {
    /// Which layer it is.
    pub layer: usize,
    /// The residual stream before the norm, `[n_tokens, d_model]`.
    pub residual: &'a Tensor,
    /// What gate and up are multiplied with, `[n_tokens, d_model]`.
    pub normed: &'a Tensor,
    /// What the rows of down are multiplied with, `[n_tokens, d_ff]`: zero for a neuron that does
    /// not fire.
    pub activations: &'a [f32],
    /// Euclidean norms of the rows of down, `[d_ff]`.
    pub down_norms: &'a [f32],
    /// The layer's weights, where all its neurons lie together.
    pub weights: Option<&'a FfnWeights>,
}

impl<'a> FfnSeen<'a> {
    /// What a layer saw and gave.
    #[must_use]
    pub fn new(
        layer: usize,
        [residual, normed]: [&'a Tensor; 2],
        activations: &'a [f32],
        down_norms: &'a [f32],
    ) -> Self {
        Self { layer, residual, normed, activations, down_norms, weights: None }
    }

    /// Shows the weights, too.
    #[must_use]
    pub fn with_weights(mut self, weights: Option<&'a FfnWeights>) -> Self {
        self.weights = weights;
        self
    }
}

/// What a forward pass is asked for, works in and gives, kept from pass to pass so that none
/// allocates what the last one had.
#[derive(Debug, Default)]
pub struct Step {
    /// After which tokens logits are wanted: set by the caller.
    pub wanted: WantedLogits,
    /// How feed-forward networks are computed in place of [`ModelInfo::sparsity`], to compare
    /// modes over one set of weights: set by the caller.
    pub sparsity: Option<Sparsity>,
    /// Whether to compute, beside the pass, what every neuron would have given, and to count in
    /// [`StepStats::prediction_per_layer`] how much of it the predictors list: set by the caller. A
    /// pass takes two to three times as long.
    pub measure_prediction: bool,
    /// Who is shown what every feed-forward network saw and what every neuron of it gave, which is
    /// computed beside the pass: set by the caller.
    pub observer: Option<Arc<Mutex<dyn FfnObserver>>>,
    /// Stops the pass, from another thread; a model looks at it before each layer: set by the
    /// caller.
    pub cancel: CancelToken,
    /// The logits, `[rows, vocab_size]`.
    pub logits: Vec<f32>,
    /// Scratch memory of the operators.
    pub workspace: Workspace,
    /// Scratch memory of predictors: lists of neurons.
    pub picks: Vec<NeuronIds>,
    /// Scratch memory of layers that are split: the lists of the hot and of the cold side.
    pub split_picks: [Vec<NeuronIds>; 2],
    /// Scratch memory of predictors: hidden values.
    pub hidden: Vec<f32>,
    /// What passes did since the caller last cleared it.
    pub stats: StepStats,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_modes_are_one_to_one() {
        for mode in [Sparsity::Auto, Sparsity::Dense, Sparsity::Exact, Sparsity::Predicted] {
            assert_eq!(mode.to_string().parse::<Sparsity>().unwrap(), mode);
        }
        let error = "guessed".parse::<Sparsity>().unwrap_err();
        assert_eq!(
            error.to_string(),
            "unknown sparsity \"guessed\", supported: auto, dense, exact, predicted"
        );
    }

    #[test]
    fn rows_follow_from_what_is_wanted() {
        for (wanted, rows) in
            [(WantedLogits::Last, 1), (WantedLogits::All, 5), (WantedLogits::None, 0)]
        {
            assert_eq!(wanted.n_rows(5), rows);
            assert_eq!(wanted.n_rows(0), 0);
        }
    }
}
