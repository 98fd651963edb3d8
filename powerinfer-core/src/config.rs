//! The configuration of a model: `config.json` and the end ids of `generation_config.json`.

mod falcon;
pub(crate) mod field;
mod gguf;
mod llama;
mod opt;
mod predictor;
mod rotary;

use std::io;
use std::path::Path;

use powerinfer_ops::attention::KvDtype;
use powerinfer_ops::{Activation, OpError};

use crate::error::{Error, Result};
use crate::json;
use crate::kv_cache::KvShape;
use crate::regular_file::RegularFile;
use field::Fields;
pub use gguf::GgufContext;
pub use predictor::read_predictor_thresholds;
pub use rotary::{RopeScaling, RotaryConfig};

/// Longest configuration that is read: real ones have some kilobytes.
const MAX_BYTES: u64 = 16 << 20;

// Caps that real models stay far below, chosen so that the product of any three sizes and the
// bytes of a value fits 64 bits.
const MAX_WIDTH: usize = 1 << 24;
const MAX_LAYERS: usize = 1 << 12;
const MAX_CONTEXT: usize = 1 << 31;

/// The shape and the settings of a model, every one checked.
///
/// Sizes are from 1 to 2²⁴ (layers to 2¹², context to 2³¹), `n_heads` is a multiple of
/// `n_kv_heads`, `d_head` is even where a rotary embedding turns it, and floating-point values are
/// finite and positive, so nothing that is computed from them overflows or divides by zero.
///
/// One struct for all architectures: each says in its own keys what the fields here say. The names
/// in the fields' descriptions are LLaMA's; OPT and Falcon have other ones for the same.
///
/// # Examples
/// ```
/// use std::path::Path;
/// use powerinfer_core::ModelConfig;
///
/// let text = r#"{
///     "model_type": "llama", "hidden_act": "relu", "hidden_size": 64, "intermediate_size": 176,
///     "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
///     "vocab_size": 1000, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
///     "rope_theta": 500000.0, "eos_token_id": [2, 7]
/// }"#;
/// let config = ModelConfig::from_json(Path::new("config.json"), text, &["llama"])?;
/// assert_eq!((config.d_head, config.n_kv_heads), (16, 2));
/// assert_eq!(config.eos_token_ids, [2, 7]);
///
/// let error = ModelConfig::from_json(Path::new("config.json"), text, &["opt"]).unwrap_err();
/// assert_eq!(error.to_string(), "config.json: unknown model_type \"llama\", supported: opt");
/// # Ok::<(), powerinfer_core::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct ModelConfig {
    /// `model_type`: which architecture this is.
    pub model_type: String,
    /// `hidden_size`: width of the residual stream.
    pub d_model: usize,
    /// `word_embed_proj_dim` (OPT): width of the embeddings and of what the head reads; `d_model`
    /// in all other models.
    pub d_embedding: usize,
    /// `intermediate_size`: neurons of a feed-forward network.
    pub d_ff: usize,
    /// `num_hidden_layers`.
    pub n_layers: usize,
    /// `num_attention_heads`: heads of the queries.
    pub n_heads: usize,
    /// `num_key_value_heads`: heads of keys and values, `n_heads` if absent.
    pub n_kv_heads: usize,
    /// `head_dim`: width of a head, `d_model / n_heads` if absent.
    pub d_head: usize,
    /// `vocab_size`.
    pub vocab_size: usize,
    /// `max_position_embeddings`: tokens of a context.
    pub max_context: usize,
    /// `sliding_window`: how many positions a token sees, its own included; `None` for all.
    pub window: Option<usize>,
    /// In which order a block does its work.
    pub block_order: BlockOrder,
    /// `rms_norm_eps`: added to the mean square before its root is taken.
    pub norm_eps: f64,
    /// `layer_norm_elementwise_affine` (OPT): whether norms have weights.
    pub norm_affine: bool,
    /// `_remove_final_layer_norm` (OPT), turned round: whether a norm follows the last block.
    pub final_norm: bool,
    /// `hidden_act`: the activation function of the feed-forward networks.
    pub activation: Activation,
    /// What is applied to the up products of a gated network, as in dReLU models.
    pub up_activation: Option<Activation>,
    /// How the model knows the order of its tokens.
    pub position: PositionConfig,
    /// `attention_bias`: whether the projections of the attention have a bias.
    pub attention_bias: bool,
    /// `mlp_bias`: whether those of the feed-forward networks have one.
    pub mlp_bias: bool,
    /// `tie_word_embeddings`: whether the head is the embedding table.
    pub tie_word_embeddings: bool,
    /// `bos_token_id`: the token that texts begin with.
    pub bos_token_id: Option<u32>,
    /// `eos_token_id`: the tokens that end a text, those of `config.json` and of
    /// `generation_config.json` together, sorted, each once.
    pub eos_token_ids: Vec<u32>,
}

/// In which order a block normalises, attends, runs its feed-forward network and adds to the
/// residual stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum BlockOrder {
    /// Norm, attention, add; norm, feed-forward network, add.
    PreNorm,
    /// Attention, add, norm; feed-forward network, add, norm.
    PostNorm,
    /// One norm, then attention and feed-forward network side by side, then both are added.
    ParallelOneNorm,
    /// The same with a norm for each of the two.
    ParallelTwoNorms,
}

/// How a model knows the order of its tokens.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum PositionConfig {
    /// Queries and keys turn with their position.
    Rotary(RotaryConfig),
    /// A learned vector for each position is added to the embeddings; the table's first `offset`
    /// rows belong to none.
    Learned {
        /// Rows before that of position 0.
        offset: usize,
    },
    /// Scores are lowered with the distance of the key (Press et al., "Train Short, Test Long").
    Alibi,
}

impl ModelConfig {
    /// Reads `config.json` in `dir`, and the end ids of `generation_config.json` if that is there.
    ///
    /// # Errors
    /// Those of [`from_json`](Self::from_json), and [`Error::Io`] or [`Error::FileTooLong`]. A
    /// `generation_config.json` that is there but broken is an error.
    pub fn from_dir(dir: &Path, supported_model_types: &[&str]) -> Result<Self> {
        let path = dir.join("config.json");
        let bytes = RegularFile::open(&path)?.read_all("a configuration", MAX_BYTES)?;
        let mut config = Self::parse(&path, &bytes, supported_model_types)?;

        let path = dir.join("generation_config.json");
        match RegularFile::open(&path) {
            Ok(file) => {
                let bytes = file.read_all("a configuration", MAX_BYTES)?;
                let map = json::parse_object(&path, &bytes)?;
                let ids = Fields::new(&path, &map).token_ids("eos_token_id", config.vocab_size)?;
                config.add_eos_token_ids(ids);
            }
            Err(Error::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
        Ok(config)
    }

    /// Reads the text of a `config.json`. `path_for_errors` is only named in errors.
    ///
    /// `model_type` is looked at first and says which keys are read: those of OPT for `opt`, of
    /// Falcon for `falcon`, `RefinedWeb` and `RefinedWebModel`, and those of LLaMA for all others.
    /// Fields that are not part of this struct are ignored, except those that would change what
    /// the model computes:
    ///
    /// - `rope_scaling` (with `type` or `rope_type`) and the newer `rope_parameters` (which may
    ///   hold `rope_theta`) must agree where both are there;
    /// - two names of the same setting, as Falcon's `n_head` and `num_attention_heads`, must agree;
    /// - `partial_rotary_factor` must be 1;
    /// - `quantization_config` must be absent.
    ///
    /// A field that is `null` counts as absent.
    ///
    /// # Errors
    /// [`Error::Json`] for text that is not JSON or repeats a key;
    /// [`Error::UnknownModelType`], [`Error::UnknownActivation`], [`Error::UnknownRopeType`];
    /// [`Error::Config`], naming the field, for all else.
    pub fn from_json(
        path_for_errors: &Path,
        text: &str,
        supported_model_types: &[&str],
    ) -> Result<Self> {
        Self::parse(path_for_errors, text.as_bytes(), supported_model_types)
    }

    /// The shape of the cache that this model writes its keys and values to, in f32.
    #[must_use]
    pub fn kv_shape(&self) -> KvShape {
        KvShape {
            n_layers: self.n_layers,
            n_kv_heads: self.n_kv_heads,
            d_head: self.d_head,
            max_context: self.max_context,
            dtype: KvDtype::F32,
        }
    }

    fn parse(path: &Path, bytes: &[u8], supported_model_types: &[&str]) -> Result<Self> {
        let map = json::parse_object(path, bytes)?;
        let fields = Fields::new(path, &map);
        let model_type = fields.text("model_type")?;
        if !supported_model_types.contains(&model_type) {
            return Err(Error::UnknownModelType {
                path: path.to_owned(),
                found: model_type.to_owned(),
                supported: supported_model_types.join(", "),
            });
        }
        fields.refuse("quantization_config", "nothing (weights as f32, f16 or bf16)")?;

        let mut config = match model_type {
            "opt" => opt::read(&fields)?,
            "falcon" | "RefinedWeb" | "RefinedWebModel" => falcon::read(model_type, &fields)?,
            _ => llama::read(model_type, &fields)?,
        };
        config.model_type = model_type.to_owned();
        config.bos_token_id = fields.token_id("bos_token_id", config.vocab_size)?;
        config.add_eos_token_ids(fields.token_ids("eos_token_id", config.vocab_size)?);
        Ok(config)
    }

    fn add_eos_token_ids(&mut self, ids: Vec<u32>) {
        self.eos_token_ids.extend(ids);
        self.eos_token_ids.sort_unstable();
        self.eos_token_ids.dedup();
    }
}

/// The width of a head of a model that does not state it.
fn divided_head(fields: &Fields<'_>, d_model: usize, n_heads: usize) -> Result<usize> {
    if d_model.is_multiple_of(n_heads) {
        return Ok(d_model / n_heads);
    }
    let expected = format!("a divisor of hidden_size, {d_model}, or a head_dim");
    Err(fields.error("num_attention_heads", expected))
}

/// Fails if a rotary embedding cannot turn heads of that width; `name` is the field it is from.
fn check_turned_head(fields: &Fields<'_>, name: &str, d_head: usize) -> Result<()> {
    if d_head.is_multiple_of(2) {
        return Ok(());
    }
    let expected = format!("heads of an even width for the rotary embedding, not {d_head}");
    Err(fields.error(name, expected))
}

fn activation(fields: &Fields<'_>, field: &'static str) -> Result<Activation> {
    activation_named(fields, field, fields.text(field)?)
}

fn activation_named(fields: &Fields<'_>, field: &'static str, name: &str) -> Result<Activation> {
    name.parse().map_err(|error| match error {
        OpError::UnknownActivation { found, supported } => {
            Error::UnknownActivation { path: fields.path().to_owned(), field, found, supported }
        }
        other => other.into(),
    })
}

#[cfg(test)]
mod family_tests;
#[cfg(test)]
mod gguf_tests;
#[cfg(test)]
mod tests;
