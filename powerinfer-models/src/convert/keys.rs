//! The keys of a GGUF file that say what a configuration says.

use std::path::Path;

use powerinfer_core::{GgufMetadata, GgufValue, ModelConfig, PositionConfig, RotaryConfig};
use powerinfer_ops::{Activation, WeightFormat};

use super::ConvertOptions;
use super::plan::{Planned, linear_factor};
use crate::error::Result;
use crate::gguf_names::Family;

/// The version of ggml's quantised formats.
const QUANTIZATION_VERSION: u32 = 2;
const NAME: &str = "general.name";
/// That of PowerInfer for all layers, and ours for each.
pub(crate) const THRESHOLDS: [&str; 2] =
    ["powerinfer.sparse_threshold", "powerinfer.sparse_thresholds"];

/// The keys, in the order in which PowerInfer's converters write them.
pub(super) fn keys(
    model: &Path,
    config: &ModelConfig,
    options: &ConvertOptions,
    tensors: &[Planned],
    notes: &mut Vec<String>,
) -> Result<Vec<(String, GgufValue)>> {
    let mut keys = Keys { architecture: architecture(config), keys: Vec::new() };
    keys.add("general.architecture", GgufValue::String(keys.architecture.to_owned()));
    let name = model.file_stem().map(|name| name.to_string_lossy().into_owned());
    keys.add(NAME, GgufValue::String(name.unwrap_or_default()));
    keys.model(config);
    let mut matrices = tensors.iter().filter(|planned| planned.info.shape.len() == 2);
    let format = matrices.next().map_or(WeightFormat::F32, |planned| planned.format);
    keys.add("general.file_type", GgufValue::U32(file_type(format)));
    if format.block_len() > 1 {
        let version = GgufValue::U32(QUANTIZATION_VERSION);
        keys.add("general.quantization_version", version);
    }
    keys.activation(config.activation);
    keys.special_tokens(config);
    if let Some(predictor) = &options.predictor {
        keys.thresholds(&predictor.thresholds);
    }
    if options.powerinfer {
        notes.extend(cautions(config, format));
    }
    for (key, value) in &options.keys {
        match keys.keys.iter_mut().find(|(known, _)| known == key) {
            Some((_, known)) => *known = value.clone(),
            None => keys.add(key, value.clone()),
        }
    }
    Ok(keys.keys)
}

/// Takes over what a GGUF file says that no configuration does: its tokenizer, its name, and the
/// thresholds of the predictor that goes with it.
pub(super) fn inherit(
    keys: &mut Vec<(String, GgufValue)>,
    metadata: &GgufMetadata,
    options: &ConvertOptions,
) {
    let own_predictor = options.powerinfer && options.predictor.is_none();
    for (key, value) in metadata.iter() {
        let text = key.starts_with("tokenizer.") || key == NAME;
        if text || own_predictor && THRESHOLDS.contains(&key) {
            match keys.iter_mut().find(|(known, _)| known == key) {
                Some(_) if key != NAME => {}
                Some((_, known)) => *known = value.clone(),
                None => keys.push((key.to_owned(), value.clone())),
            }
        }
    }
}

fn architecture(config: &ModelConfig) -> &'static str {
    match config.position {
        PositionConfig::Learned { .. } => "opt",
        _ if Family::is_falcon(config) => "falcon",
        _ if config.up_activation.is_some() => "bamboo",
        _ => "llama",
    }
}

/// llama.cpp's number for what most of a file's matrices are.
fn file_type(format: WeightFormat) -> u32 {
    match format {
        WeightFormat::F32 => 0,
        WeightFormat::F16 => 1,
        WeightFormat::Q4_0 => 2,
        WeightFormat::Q8_0 => 7,
        WeightFormat::BF16 => 32,
        // "guessed" of the list
        _ => 1024,
    }
}

/// What PowerInfer's own engine makes of the file.
fn cautions(config: &ModelConfig, format: WeightFormat) -> Vec<String> {
    let mut notes = Vec::new();
    let mut note = |text: &str| notes.push(text.to_owned());
    if !matches!(format, WeightFormat::F16 | WeightFormat::Q4_0) {
        note("PowerInfer's own engine computes f16 and q4_0 rightly, and nothing else");
    }
    if matches!(config.activation, Activation::FatRelu { .. }) {
        note("PowerInfer's own engine ignores the threshold of fatrelu");
    }
    if config.window.is_some() {
        note("PowerInfer's own engine lets every token see all before it");
    }
    if architecture(config) == "llama" && (config.attention_bias || config.mlp_bias) {
        note("PowerInfer's own engine does not read the biases of LLaMA models");
    }
    notes
}

struct Keys {
    architecture: &'static str,
    keys: Vec<(String, GgufValue)>,
}

impl Keys {
    fn add(&mut self, key: &str, value: GgufValue) {
        self.keys.push((key.to_owned(), value));
    }

    /// A key of the architecture.
    fn own(&mut self, name: &str, value: GgufValue) {
        self.keys.push((format!("{}.{name}", self.architecture), value));
    }

    fn count(&mut self, name: &str, count: usize) {
        // counts of a configuration stay below 2³²
        self.own(name, GgufValue::U32(count as u32));
    }

    fn model(&mut self, config: &ModelConfig) {
        let offset = match config.position {
            PositionConfig::Learned { offset } => offset,
            _ => 0,
        };
        self.count("context_length", config.max_context + offset);
        if self.architecture == "falcon" {
            self.own("tensor_data_layout", GgufValue::String("jploski".to_owned()));
        }
        self.count("embedding_length", config.d_model);
        self.count("block_count", config.n_layers);
        self.count("feed_forward_length", config.d_ff);
        self.count("vocab_size", config.vocab_size);
        self.count("attention.head_count", config.n_heads);
        self.count("attention.head_count_kv", config.n_kv_heads);
        if config.d_head * config.n_heads != config.d_model {
            self.count("attention.key_length", config.d_head);
            self.count("attention.value_length", config.d_head);
        }
        let eps = match self.architecture {
            "falcon" | "opt" => "attention.layer_norm_epsilon",
            _ => "attention.layer_norm_rms_epsilon",
        };
        self.own(eps, GgufValue::F32(config.norm_eps as f32));
        if let Some(window) = config.window {
            self.count("attention.sliding_window", window);
        }
        if let PositionConfig::Rotary(RotaryConfig { theta, scaling }) = &config.position {
            self.count("rope.dimension_count", config.d_head);
            self.own("rope.freq_base", GgufValue::F32(*theta as f32));
            if let Some(factor) = linear_factor(scaling) {
                self.own("rope.scaling.type", GgufValue::String("linear".to_owned()));
                self.own("rope.scaling.factor", GgufValue::F32(factor as f32));
            }
        }
    }

    fn activation(&mut self, activation: Activation) {
        self.add("powerinfer.activation", GgufValue::String(activation.to_string()));
        if let Activation::FatRelu { threshold } = activation {
            self.add("powerinfer.fatrelu_threshold", GgufValue::F32(threshold));
        }
    }

    fn special_tokens(&mut self, config: &ModelConfig) {
        if let Some(id) = config.bos_token_id {
            self.add("tokenizer.ggml.bos_token_id", GgufValue::U32(id));
        }
        if let [first, ..] = config.eos_token_ids[..] {
            self.add("tokenizer.ggml.eos_token_id", GgufValue::U32(first));
        }
        if config.eos_token_ids.len() > 1 {
            let ids: Vec<i32> = config.eos_token_ids.iter().map(|&id| id as i32).collect();
            self.add("powerinfer.eos_token_ids", GgufValue::i32s(&ids));
        }
    }

    /// PowerInfer has one for all layers: the least loses no neuron that another would keep.
    fn thresholds(&mut self, thresholds: &[f32]) {
        let least = thresholds.iter().copied().fold(f32::INFINITY, f32::min);
        if least.is_finite() {
            self.add(THRESHOLDS[0], GgufValue::F32(least));
        }
        if thresholds.iter().any(|&threshold| threshold != least) {
            self.add(THRESHOLDS[1], GgufValue::f32s(thresholds));
        }
    }
}
