//! A few tokens that run along while a model is loaded.

use std::sync::{Arc, Mutex, PoisonError};

use candle_core::Tensor;
use powerinfer_core::{CancelToken, KvCache, KvShape, ModelConfig, Result, Sparsity, Step};
use powerinfer_ops::NeuronIds;
use powerinfer_predictor::{
    ActivationPredictor, All, FfnInputs, PredictorKind, Result as PredictorResult,
};

use crate::layers::{Block, Embedding, Pass, Position, RotaryTable, check_finite};

/// Tokens that predictors are tried on.
const TRIAL_TOKENS: usize = 24;

/// Some tokens on their way through the layers of a model, each as it is loaded.
#[derive(Debug)]
pub(super) struct Trial {
    tokens: Vec<u32>,
    /// The residual stream before the next layer.
    stream: Option<(Tensor, Option<RotaryTable>)>,
    cache: KvCache,
    step: Step,
}

/// What the network of a layer sees, each `[n_tokens, d_model]`.
#[derive(Debug)]
pub(super) struct Seen {
    pub(super) residual: Tensor,
    pub(super) normed: Tensor,
}

impl Trial {
    /// Tokens from all over the vocabulary.
    pub(super) fn new(config: &ModelConfig, kv: KvShape, cancel: &CancelToken) -> Self {
        let vocab_size = config.vocab_size;
        let spread = (vocab_size / TRIAL_TOKENS).max(1);
        let id = |i: usize| u32::try_from((i * spread + 11) % vocab_size.max(1)).unwrap_or(0);
        let tokens = (0..TRIAL_TOKENS.min(config.max_context)).map(id).collect();
        let step = Step { cancel: cancel.clone(), ..Step::default() };
        Self { tokens, stream: None, cache: KvCache::new(kv), step }
    }

    /// Takes the tokens through a block, whose neurons are all in one place; all that fire run. `None` if
    /// no predictor may be made for its network.
    pub(super) fn pass(
        &mut self,
        layer: usize,
        block: &mut Block,
        (embedding, position): (&Embedding, &Position),
    ) -> Result<Option<Seen>> {
        let (x, rotary) = match self.stream.take() {
            Some(stream) => stream,
            None => {
                let x = embedding.forward(&self.tokens)?;
                self.cache.reserve(self.tokens.len())?;
                (position.add(x, 0)?, position.rotary(0, self.tokens.len())?)
            }
        };
        let n_neurons = block.ffn.predictable().map(|weights| weights.n_neurons());
        let watcher = n_neurons.map(|n| Arc::new(Watcher { all: All::new(n), seen: None.into() }));
        let given = block.ffn.replace_predictor(watcher.clone().map(|watcher| watcher as _));
        let sparsity = match watcher {
            Some(_) => Sparsity::Predicted,
            None => Sparsity::Exact,
        };
        let pass = Pass { layer, sparsity, rotary: rotary.as_ref() };
        let x = block.forward(&x, pass, &mut self.cache, &mut self.step)?;
        block.ffn.replace_predictor(given);
        check_finite(&x, Some(layer), 0)?;
        self.stream = Some((x, rotary));
        let seen = watcher
            .map(|watcher| watcher.seen.lock().unwrap_or_else(PoisonError::into_inner).take());
        Ok(seen.flatten())
    }
}

/// Lists all neurons and keeps what their network saw.
#[derive(Debug)]
struct Watcher {
    all: All,
    seen: Mutex<Option<Seen>>,
}

impl ActivationPredictor for Watcher {
    fn predict(&self, inputs: &FfnInputs<'_>, picks: &mut Vec<NeuronIds>) -> PredictorResult<()> {
        let seen = Seen { residual: inputs.residual.clone(), normed: inputs.normed.clone() };
        *self.seen.lock().unwrap_or_else(PoisonError::into_inner) = Some(seen);
        self.all.predict(inputs, picks)
    }

    fn kind(&self) -> PredictorKind {
        PredictorKind::All
    }
}
