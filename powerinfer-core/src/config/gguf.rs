//! The keys of a GGUF file as a configuration.
//!
//! Most keys begin with the name of the architecture, here `A`. What a key would say that a
//! published file never states is taken as the engines that these files were made for take it.

use powerinfer_ops::{Activation, OpError};

use super::{
    BlockOrder, MAX_CONTEXT, MAX_LAYERS, MAX_WIDTH, ModelConfig, PositionConfig, RopeScaling,
    RotaryConfig,
};
use crate::error::{Error, Result};
use crate::weights::GgufMetadata;

/// Names the architecture.
pub(crate) const ARCHITECTURE_KEY: &str = "general.architecture";
const ARCHITECTURES: [&str; 4] = ["llama", "bamboo", "falcon", "opt"];
/// Our own: the name of the activation as in a Hugging Face configuration.
const ACTIVATION_KEY: &str = "powerinfer.activation";
/// Our own: the threshold of `fatrelu`.
const FATRELU_KEY: &str = "powerinfer.fatrelu_threshold";
/// Our own: the tokens that end a text, for which the format has room for one or two.
const EOS_KEY: &str = "powerinfer.eos_token_ids";
/// No key of OPT states it; it is that of the library the models were trained with.
const OPT_NORM_EPS: f64 = 1e-5;
/// OPT's table of positions begins with rows that belong to none, and its context length counts
/// them.
const OPT_POSITION_OFFSET: usize = 2;
const DEFAULT_THETA: f32 = 10_000.0;

/// What a GGUF file says outside of its keys, for [`ModelConfig::from_gguf`].
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct GgufContext {
    /// Whether the file begins with PowerInfer's magic: LLaMA and Falcon are then ReLU models.
    pub powerinfer: bool,
    /// Rows of the embedding table.
    pub vocab_size: usize,
    /// Takes the place of the activation that the file names or implies.
    pub activation: Option<Activation>,
}

impl GgufContext {
    /// A file with such a magic and so many embeddings.
    #[must_use]
    pub fn new(powerinfer: bool, vocab_size: usize) -> Self {
        Self { powerinfer, vocab_size, activation: None }
    }

    /// Says which activation the model has.
    #[must_use]
    pub fn with_activation(mut self, activation: Option<Activation>) -> Self {
        self.activation = activation;
        self
    }
}

impl ModelConfig {
    /// Reads the keys of a GGUF file of the architecture `llama`, `bamboo`, `falcon` or `opt`.
    ///
    /// Keys do not say everything. Biases, the order of Falcon's norms, a head of its own and
    /// factors of the rotary frequencies show in which tensors a file holds; whoever knows those
    /// sets [`attention_bias`](Self::attention_bias), [`mlp_bias`](Self::mlp_bias),
    /// [`block_order`](Self::block_order), [`tie_word_embeddings`](Self::tie_word_embeddings) and
    /// [`position`](Self::position) after this.
    ///
    /// The activation is the key `powerinfer.activation`, with `powerinfer.fatrelu_threshold` for
    /// `fatrelu`. A file without it is a ReLU model if it is PowerInfer's, Bamboo or OPT; otherwise
    /// SiLU for LLaMA and GELU for Falcon, since nothing in a plain file of a ReLU model says so.
    ///
    /// # Errors
    /// [`Error::Metadata`] naming the key; [`Error::UnknownModelType`] for another architecture,
    /// [`Error::UnknownActivation`], [`Error::UnknownRopeType`].
    pub fn from_gguf(metadata: &GgufMetadata, context: GgufContext) -> Result<Self> {
        let architecture = metadata.str(ARCHITECTURE_KEY)?;
        let Some(&model_type) = ARCHITECTURES.iter().find(|known| **known == architecture) else {
            return Err(Error::UnknownModelType {
                path: metadata.path().to_owned(),
                found: architecture.to_owned(),
                supported: ARCHITECTURES.join(", "),
            });
        };
        Keys { metadata, model_type, context }.read()
    }
}

struct Keys<'a> {
    metadata: &'a GgufMetadata,
    model_type: &'static str,
    context: GgufContext,
}

impl Keys<'_> {
    fn read(&self) -> Result<ModelConfig> {
        self.refuse_other_computations()?;
        let d_model = self.count("embedding_length", MAX_WIDTH)?;
        let n_heads = self.count("attention.head_count", MAX_WIDTH)?;
        let d_head = self.d_head(d_model, n_heads)?;
        let (is_opt, is_falcon) = (self.model_type == "opt", self.model_type == "falcon");
        let activation = self.activation()?;
        let mut config = ModelConfig {
            model_type: self.model_type.to_owned(),
            d_model,
            d_embedding: d_model,
            d_ff: self.count("feed_forward_length", MAX_WIDTH)?,
            n_layers: self.count("block_count", MAX_LAYERS)?,
            n_heads,
            n_kv_heads: self.n_kv_heads(n_heads)?,
            d_head,
            vocab_size: self.vocab_size()?,
            max_context: self.max_context(is_opt)?,
            window: self.optional_count("attention.sliding_window", MAX_CONTEXT)?,
            block_order: BlockOrder::PreNorm,
            norm_eps: self.norm_eps()?,
            norm_affine: true,
            final_norm: true,
            activation,
            up_activation: (self.model_type == "bamboo").then_some(activation),
            position: self.position(is_opt, d_head)?,
            attention_bias: is_opt,
            mlp_bias: is_opt,
            tie_word_embeddings: true,
            bos_token_id: self.token("bos")?,
            eos_token_ids: Vec::new(),
        };
        if is_falcon {
            config.block_order = BlockOrder::ParallelOneNorm;
            self.check_falcon_layout()?;
        }
        // the end of a text and the end of a turn
        config.add_eos_token_ids(self.token("eos")?.into_iter().collect());
        config.add_eos_token_ids(self.token("eot")?.into_iter().collect());
        config.add_eos_token_ids(self.more_ends()?);
        Ok(config)
    }

    fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.model_type)
    }

    fn error(&self, name: &str, expected: impl Into<String>) -> Error {
        self.metadata.error(&self.key(name), expected)
    }

    fn count(&self, name: &str, max: usize) -> Result<usize> {
        let count = self.optional_count(name, max)?;
        count.ok_or_else(|| self.error(name, whole_number(max)))
    }

    fn optional_count(&self, name: &str, max: usize) -> Result<Option<usize>> {
        match self.metadata.optional_u32(&self.key(name))? {
            None => Ok(None),
            Some(count) if (1..=max).contains(&(count as usize)) => Ok(Some(count as usize)),
            Some(_) => Err(self.error(name, whole_number(max))),
        }
    }

    fn optional_positive(&self, name: &str) -> Result<Option<f32>> {
        match self.metadata.optional_f32(&self.key(name))? {
            None => Ok(None),
            Some(number) if number.is_finite() && number > 0.0 => Ok(Some(number)),
            Some(_) => Err(self.error(name, "a finite number above 0")),
        }
    }

    fn positive(&self, name: &str) -> Result<f32> {
        let number = self.optional_positive(name)?;
        number.ok_or_else(|| self.error(name, "a finite number above 0"))
    }

    /// Fails for keys that would change what the model computes.
    fn refuse_other_computations(&self) -> Result<()> {
        for name in ["expert_count", "expert_used_count"] {
            if self.metadata.optional_u32(&self.key(name))?.is_some_and(|count| count > 0) {
                return Err(self.error(name, "0 or nothing (one feed-forward network a layer)"));
            }
        }
        let scaled = ["attention.scale", "attention.clamp_kqv", "attention.max_alibi_bias"];
        let other = ["logit_scale", "embedding_scale", "residual_scale", "attn_logit_softcapping"];
        for name in scaled.into_iter().chain(other) {
            if self.metadata.get(&self.key(name)).is_some() {
                return Err(self.error(name, "nothing"));
            }
        }
        if self.metadata.optional_bool(&self.key("attention.causal"))? == Some(false) {
            return Err(self.error("attention.causal", "true or nothing"));
        }
        Ok(())
    }

    fn d_head(&self, d_model: usize, n_heads: usize) -> Result<usize> {
        let stated = self.optional_count("attention.key_length", MAX_WIDTH)?;
        let d_head = match stated {
            Some(d_head) => d_head,
            None if d_model.is_multiple_of(n_heads) => d_model / n_heads,
            None => {
                let expected = format!("a divisor of embedding_length, {d_model}");
                return Err(self.error("attention.head_count", expected));
            }
        };
        let values = self.optional_count("attention.value_length", MAX_WIDTH)?;
        if values.is_some_and(|values| values != d_head) {
            return Err(self.error("attention.value_length", format!("that of the keys, {d_head}")));
        }
        if n_heads.checked_mul(d_head).is_none_or(|width| width > MAX_WIDTH) {
            let expected = format!("heads of together at most {MAX_WIDTH} values");
            return Err(self.error("attention.key_length", expected));
        }
        Ok(d_head)
    }

    fn n_kv_heads(&self, n_heads: usize) -> Result<usize> {
        let name = "attention.head_count_kv";
        match self.optional_count(name, MAX_WIDTH)? {
            None => Ok(n_heads),
            Some(n_kv_heads) if self.model_type == "opt" && n_kv_heads != n_heads => {
                Err(self.error(name, format!("one a head, {n_heads}")))
            }
            Some(n_kv_heads) if n_heads.is_multiple_of(n_kv_heads) => Ok(n_kv_heads),
            Some(_) => Err(self.error(name, format!("a divisor of the {n_heads} heads"))),
        }
    }

    fn vocab_size(&self) -> Result<usize> {
        let rows = self.context.vocab_size;
        match self.optional_count("vocab_size", MAX_WIDTH)? {
            Some(stated) if stated != rows => {
                Err(self.error("vocab_size", format!("{rows}, the rows of the embedding table")))
            }
            _ if rows <= MAX_WIDTH => Ok(rows),
            _ => Err(self.error("vocab_size", whole_number(MAX_WIDTH))),
        }
    }

    fn max_context(&self, is_opt: bool) -> Result<usize> {
        let name = "context_length";
        let context = self.count(name, MAX_CONTEXT)?;
        if !is_opt {
            return Ok(context);
        }
        let tokens = context.checked_sub(OPT_POSITION_OFFSET).filter(|&tokens| tokens > 0);
        tokens.ok_or_else(|| self.error(name, "more than the 2 rows that belong to no position"))
    }

    fn norm_eps(&self) -> Result<f64> {
        let eps = match self.model_type {
            "opt" => self.optional_positive("attention.layer_norm_epsilon")?,
            "falcon" => Some(self.positive("attention.layer_norm_epsilon")?),
            _ => Some(self.positive("attention.layer_norm_rms_epsilon")?),
        };
        // a decimal was rounded to 32 bits: take back what rounding added
        Ok(eps.map_or(OPT_NORM_EPS, shortest))
    }

    fn activation(&self) -> Result<Activation> {
        if let Some(activation) = self.context.activation {
            return Ok(activation);
        }
        let threshold = self.metadata.optional_f32(FATRELU_KEY)?;
        let name = self.metadata.optional_str(ACTIVATION_KEY)?;
        match (name, threshold) {
            (Some("fatrelu"), Some(threshold)) if threshold.is_finite() && threshold >= 0.0 => {
                Ok(Activation::FatRelu { threshold })
            }
            (Some("fatrelu"), _) => Err(self.metadata.error(FATRELU_KEY, "a finite number from 0")),
            (_, Some(_)) => Err(self.metadata.error(ACTIVATION_KEY, "fatrelu, of the threshold")),
            (Some(name), None) => name.parse().map_err(|error| match error {
                OpError::UnknownActivation { found, supported } => Error::UnknownActivation {
                    path: self.metadata.path().to_owned(),
                    field: ACTIVATION_KEY,
                    found,
                    supported,
                },
                other => other.into(),
            }),
            (None, None) => Ok(match self.model_type {
                "llama" if !self.context.powerinfer => Activation::Silu,
                "falcon" if !self.context.powerinfer => Activation::Gelu,
                _ => Activation::Relu,
            }),
        }
    }

    fn position(&self, is_opt: bool, d_head: usize) -> Result<PositionConfig> {
        if is_opt {
            return Ok(PositionConfig::Learned { offset: OPT_POSITION_OFFSET });
        }
        let turned = self.optional_count("rope.dimension_count", MAX_WIDTH)?.unwrap_or(d_head);
        if turned != d_head || !d_head.is_multiple_of(2) {
            let expected = format!("the width of a head, {d_head}, and even");
            return Err(self.error("rope.dimension_count", expected));
        }
        let theta = self.optional_positive("rope.freq_base")?.unwrap_or(DEFAULT_THETA);
        Ok(PositionConfig::Rotary(RotaryConfig {
            theta: shortest(theta),
            scaling: self.scaling()?,
        }))
    }

    fn scaling(&self) -> Result<RopeScaling> {
        let name = self.metadata.optional_str(&self.key("rope.scaling.type"))?;
        let factor = match self.optional_positive("rope.scaling.factor")? {
            Some(factor) => Some(factor),
            // what files before October 2023 have
            None => self.optional_positive("rope.scale_linear")?,
        };
        if self.optional_positive("rope.scaling.attn_factor")?.is_some_and(|factor| factor != 1.0) {
            return Err(self.error("rope.scaling.attn_factor", "1 or nothing"));
        }
        match (name, factor) {
            (Some("none"), _) | (None, None) => Ok(RopeScaling::None),
            (None | Some("linear"), Some(factor)) => {
                Ok(RopeScaling::Linear { factor: shortest(factor) })
            }
            (Some("linear"), None) => {
                Err(self.error("rope.scaling.factor", "a finite number above 0"))
            }
            (Some(unknown), _) => Err(Error::UnknownRopeType {
                path: self.metadata.path().to_owned(),
                found: unknown.to_owned(),
                supported: "none, linear",
            }),
        }
    }

    fn check_falcon_layout(&self) -> Result<()> {
        let name = "tensor_data_layout";
        match self.metadata.optional_str(&self.key(name))? {
            Some("jploski") => Ok(()),
            _ => Err(self.error(name, "jploski")),
        }
    }

    fn token(&self, which: &str) -> Result<Option<u32>> {
        let key = format!("tokenizer.ggml.{which}_token_id");
        match self.metadata.optional_u32(&key)? {
            // what some writers put for none
            None | Some(u32::MAX) => Ok(None),
            Some(id) if (id as usize) < self.context.vocab_size => Ok(Some(id)),
            Some(_) => {
                let vocab_size = self.context.vocab_size;
                Err(self.metadata.error(&key, format!("a token id below {vocab_size}")))
            }
        }
    }
}

impl Keys<'_> {
    /// All tokens that end a text, where there are several.
    fn more_ends(&self) -> Result<Vec<u32>> {
        let ids = self.metadata.optional_u32s(EOS_KEY)?.unwrap_or_default();
        let vocab_size = self.context.vocab_size;
        if ids.iter().any(|&id| id as usize >= vocab_size) {
            return Err(self.metadata.error(EOS_KEY, format!("token ids below {vocab_size}")));
        }
        Ok(ids)
    }
}

fn whole_number(max: usize) -> String {
    format!("a whole number from 1 to {max}")
}

/// The decimal that was meant by a number that a file holds in 32 bits, so that 1e-5 is the same
/// as in a `config.json`.
fn shortest(value: f32) -> f64 {
    value.to_string().parse().unwrap_or_else(|_| f64::from(value))
}
