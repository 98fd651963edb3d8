//! The configuration of a model: `config.json` and the end ids of `generation_config.json`.

mod field;
mod rotary;

use std::io;
use std::path::Path;

use powerinfer_ops::{Activation, OpError};

use crate::error::{Error, Result};
use crate::json;
use crate::kv_cache::KvShape;
use crate::regular_file::RegularFile;
use field::Fields;
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
/// `n_kv_heads`, `d_head` is even, and floating-point values are finite and positive, so nothing
/// that is computed from them overflows or divides by zero.
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
pub struct ModelConfig {
    /// `model_type`: which architecture this is.
    pub model_type: String,
    /// `hidden_size`: width of the residual stream.
    pub d_model: usize,
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
    /// `rms_norm_eps`: added to the mean square before its root is taken.
    pub norm_eps: f64,
    /// `hidden_act`: the activation function of the feed-forward networks.
    pub activation: Activation,
    /// The rotary position embedding.
    pub rotary: RotaryConfig,
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
    /// `model_type` is looked at first. Fields that are not part of this struct are ignored,
    /// except those that would change what the model computes:
    ///
    /// - `rope_scaling` (with `type` or `rope_type`) and the newer `rope_parameters` (which may
    ///   hold `rope_theta`) must agree where both are there;
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

    /// The shape of the cache that this model writes its keys and values to.
    #[must_use]
    pub fn kv_shape(&self) -> KvShape {
        KvShape {
            n_layers: self.n_layers,
            n_kv_heads: self.n_kv_heads,
            d_head: self.d_head,
            max_context: self.max_context,
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

        let d_model = fields.count("hidden_size", MAX_WIDTH)?;
        let n_heads = fields.count("num_attention_heads", MAX_WIDTH)?;
        let vocab_size = fields.count("vocab_size", MAX_WIDTH)?;
        let mut config = Self {
            model_type: model_type.to_owned(),
            d_model,
            d_ff: fields.count("intermediate_size", MAX_WIDTH)?,
            n_layers: fields.count("num_hidden_layers", MAX_LAYERS)?,
            n_heads,
            n_kv_heads: n_kv_heads(&fields, n_heads)?,
            d_head: d_head(&fields, d_model, n_heads)?,
            vocab_size,
            max_context: fields.count("max_position_embeddings", MAX_CONTEXT)?,
            norm_eps: fields.positive("rms_norm_eps")?,
            activation: activation(&fields)?,
            rotary: RotaryConfig::read(&fields)?,
            attention_bias: fields.flag("attention_bias")?,
            mlp_bias: fields.flag("mlp_bias")?,
            tie_word_embeddings: fields.flag("tie_word_embeddings")?,
            bos_token_id: fields.token_id("bos_token_id", vocab_size)?,
            eos_token_ids: Vec::new(),
        };
        config.add_eos_token_ids(fields.token_ids("eos_token_id", vocab_size)?);
        Ok(config)
    }

    fn add_eos_token_ids(&mut self, ids: Vec<u32>) {
        self.eos_token_ids.extend(ids);
        self.eos_token_ids.sort_unstable();
        self.eos_token_ids.dedup();
    }
}

fn n_kv_heads(fields: &Fields<'_>, n_heads: usize) -> Result<usize> {
    let name = "num_key_value_heads";
    match fields.optional_count(name, MAX_WIDTH)? {
        None => Ok(n_heads),
        Some(n_kv_heads) if n_heads.is_multiple_of(n_kv_heads) => Ok(n_kv_heads),
        Some(_) => Err(fields.error(name, format!("a divisor of num_attention_heads, {n_heads}"))),
    }
}

fn d_head(fields: &Fields<'_>, d_model: usize, n_heads: usize) -> Result<usize> {
    let (name, d_head) = match fields.optional_count("head_dim", MAX_WIDTH)? {
        Some(d_head) => ("head_dim", d_head),
        None if d_model.is_multiple_of(n_heads) => ("num_attention_heads", d_model / n_heads),
        None => {
            let expected = format!("a divisor of hidden_size, {d_model}, or a head_dim");
            return Err(fields.error("num_attention_heads", expected));
        }
    };
    if !d_head.is_multiple_of(2) {
        let expected = format!("heads of an even width for the rotary embedding, not {d_head}");
        return Err(fields.error(name, expected));
    }
    if n_heads.checked_mul(d_head).is_none_or(|width| width > MAX_WIDTH) {
        let expected = format!("heads of together at most {MAX_WIDTH} values");
        return Err(fields.error(name, expected));
    }
    Ok(d_head)
}

fn activation(fields: &Fields<'_>) -> Result<Activation> {
    let name = fields.text("hidden_act")?;
    name.parse().map_err(|error| match error {
        OpError::UnknownActivation { found, supported } => {
            Error::UnknownActivation { path: fields.path().to_owned(), found, supported }
        }
        other => other.into(),
    })
}

#[cfg(test)]
mod tests;
