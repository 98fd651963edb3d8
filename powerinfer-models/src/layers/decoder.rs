//! A stack of blocks between embeddings and head: the one `CausalLm` of all architectures.

use std::sync::Arc;

use candle_core::Tensor;
use powerinfer_core::{
    CausalLm, Error, KvCache, KvShape, ModelConfig, ModelInfo, Result, Sparsity, Step,
};
use powerinfer_ops::{FastDevice, FfnWeights};
use powerinfer_predictor::ActivationPredictor;

use crate::gguf_names::is_predictor;
use crate::layers::block::Pass;
use crate::layers::{Block, Embedding, Head, Norm, Position};
use crate::loader::Loaded;

/// A decoder-only transformer.
#[derive(Debug, Clone)]
pub struct Decoder {
    info: ModelInfo,
    embedding: Embedding,
    position: Position,
    blocks: Vec<Block>,
    norm: Option<Norm>,
    head: Head,
    /// Predictors were to be chosen and none paid: predicted runs are exact ones.
    exact_pays: bool,
}

impl Decoder {
    /// Stacks `blocks`. Give it an [`info`](Self::with_info) before use.
    #[must_use]
    pub fn new(
        embedding: Embedding,
        position: Position,
        blocks: Vec<Block>,
        norm: Option<Norm>,
        head: Head,
    ) -> Self {
        let info = ModelInfo::default();
        Self { info, embedding, position, blocks, norm, head, exact_pays: false }
    }

    /// Says what the model is; [`ModelInfo::kv`] and [`ModelInfo::sparsity`] take effect.
    #[must_use]
    pub fn with_info(mut self, info: ModelInfo) -> Self {
        self.info = info;
        self
    }

    /// Fills in the info of a loaded model.
    pub(crate) fn describe(
        &mut self,
        config: &ModelConfig,
        kv: KvShape,
        sparsity: Sparsity,
        loaded: Loaded,
        ignored: &[String],
    ) {
        let mut notes = loaded.notes;
        if !config.activation.is_sparse() {
            notes.push(format!(
                "`{}` fires for every neuron: this model is not sparse and runs densely",
                config.activation
            ));
        }
        let (predictor, ignored): (Vec<&str>, Vec<&str>) =
            ignored.iter().map(String::as_str).partition(|name| is_predictor(name));
        if !predictor.is_empty() {
            let n = predictor.len();
            notes.push(format!("the file's own predictor, {n} matrices, is not used"));
        }
        if !ignored.is_empty() {
            notes.push(format!("tensors that are not needed: {}", ignored.join(", ")));
        }
        let mut info = ModelInfo::default();
        info.architecture.clone_from(&config.model_type);
        info.n_layers = config.n_layers;
        info.d_model = config.d_model;
        info.d_ff = config.d_ff;
        info.vocab_size = config.vocab_size;
        info.max_context = config.max_context;
        info.kv = kv;
        info.activation = config.activation.to_string();
        info.sparsity = sparsity;
        info.n_parameters = loaded.n_parameters;
        info.weight_bytes = loaded.weight_bytes;
        info.dtypes = loaded.dtypes.iter().map(ToString::to_string).collect();
        info.eos_token_ids.clone_from(&config.eos_token_ids);
        info.bos_token_id = config.bos_token_id;
        info.notes = notes;
        self.info = info;
    }

    /// Gives the device the predictors of the neurons that it holds, as far as there is room beside
    /// `free_bytes`, which are for a context, and says what it has.
    pub(crate) fn settle_on(&mut self, device: &dyn FastDevice, free_bytes: u64) -> Result<()> {
        let mut left = 0;
        for block in &self.blocks {
            left += usize::from(!block.ffn.hold_predictor(device.memory(), free_bytes)?);
        }
        if left > 0 {
            let (name, n_layers) = (device.name(), self.blocks.len());
            self.info.notes.push(format!(
                "the CPU runs the predictors of {left} of {n_layers} layers for {name}"
            ));
        }
        self.info.fast_device = Some(device.name().to_owned());
        self.info.fast_bytes = self.blocks.iter().map(|block| block.ffn.fast_bytes()).sum();
        Ok(())
    }

    /// Adds sentences to the notes, and says which predictor there is now.
    pub(crate) fn add_notes(&mut self, notes: Vec<String>) {
        self.info.notes.extend(notes);
        self.info.predictor = self.predictor().map(ActivationPredictor::describe);
    }

    /// Gives a layer a predictor.
    pub(crate) fn set_predictor(&mut self, layer: usize, predictor: Arc<dyn ActivationPredictor>) {
        self.info.weight_bytes += predictor.size_bytes() as u64;
        self.blocks[layer].ffn.set_predictor(predictor);
    }

    /// Lets predicted runs be exact ones if no layer has a predictor.
    pub(crate) fn run_exactly_without_predictors(&mut self) {
        self.exact_pays = self.predictor().is_none();
    }

    /// The weights of a layer whose neurons can be skipped and are all in one place.
    pub(crate) fn whole_ffn(&self, layer: usize) -> Option<&FfnWeights> {
        self.blocks[layer].ffn.whole().filter(|weights| weights.down_by_output.is_none())
    }

    /// Takes the predictor of a layer away.
    pub(crate) fn drop_predictor(&mut self, layer: usize) {
        self.blocks[layer].ffn.drop_predictor();
        if self.predictor().is_none() {
            self.info.sparsity = match self.info.sparsity {
                Sparsity::Predicted => Sparsity::Exact,
                other => other,
            };
        }
    }

    /// The predictor of the first layer that has one.
    fn predictor(&self) -> Option<&dyn ActivationPredictor> {
        self.blocks.iter().find_map(|block| block.ffn.predictor())
    }
}

impl CausalLm for Decoder {
    fn info(&self) -> &ModelInfo {
        &self.info
    }

    fn forward(&self, tokens: &[u32], cache: &mut KvCache, step: &mut Step) -> Result<()> {
        if tokens.is_empty() {
            return Err(Error::EmptyPrompt);
        }
        let x = self.embedding.forward(tokens)?;
        cache.reserve(tokens.len())?;
        let mut x = self.position.add(x, cache.len())?;
        let sparsity = step.sparsity.unwrap_or(self.info.sparsity);
        if sparsity == Sparsity::Predicted && self.predictor().is_none() && !self.exact_pays {
            return Err(Error::NoPredictor);
        }
        let rotary = self.position.rotary(cache.len(), tokens.len())?;
        for (layer, block) in self.blocks.iter().enumerate() {
            let pass = Pass { layer, sparsity, rotary: rotary.as_ref() };
            x = block.forward(&x, pass, cache, step)?;
            check_finite(&x, layer, cache.len())?;
            step.stats.weight_bytes += block.dense_bytes() as u64;
        }
        let n_rows = step.wanted.n_rows(tokens.len());
        step.cancel.check()?;
        if n_rows == 0 {
            step.logits.clear();
        } else {
            let mut last = x.narrow(0, tokens.len() - n_rows, n_rows)?;
            if let Some(norm) = &self.norm {
                last = norm.forward(&last)?;
                step.stats.weight_bytes += norm.size_bytes() as u64;
            }
            self.head.forward(&last, &mut step.logits)?;
            step.stats.weight_bytes += self.head.size_bytes() as u64;
        }
        let position_bytes = tokens.len() * self.position.token_bytes();
        let embedding_bytes = self.embedding.pass_bytes(tokens.len());
        step.stats.weight_bytes += (embedding_bytes + position_bytes) as u64;
        step.stats.n_tokens += tokens.len() as u64;
        cache.commit();
        Ok(())
    }
}

/// Fails at the first position of the residual stream `x` `[n_tokens, d_model]` that is not finite:
/// neither are the logits that come of it, and its keys and values would spoil all that follow.
fn check_finite(x: &Tensor, layer: usize, first_position: usize) -> Result<()> {
    let d_model = x.dim(1)?.max(1);
    let broken = powerinfer_ops::with_f32(x, |values| -> Result<Option<usize>> {
        Ok(values.iter().position(|value| !value.is_finite()))
    })?;
    match broken {
        Some(at) => Err(Error::NonFiniteLogits {
            position: first_position + at / d_model,
            layer: Some(layer),
        }),
        None => Ok(()),
    }
}
