//! GGUF files as the loaders of the architectures read weights: under Hugging Face's names, rows in
//! Hugging Face's order.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use powerinfer_core::{
    BlockOrder, Error as CoreError, FileDtype, GgufContext, GgufFile, Holding, MappedTensor,
    ModelConfig, PositionConfig, Result as CoreResult, RopeScaling, RotaryConfig, TensorInfo,
    TensorSource, WeightStore,
};
use powerinfer_ops::Activation;

use crate::error::Result;

pub(crate) const EMBEDDING: &str = "token_embd.weight";
pub(crate) const HEAD: &str = "output.weight";
pub(crate) const ROPE_FACTORS: &str = "rope_freqs.weight";

/// Where a part of a model lies in a Hugging Face file and where in a GGUF file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Part {
    /// Without `blk.N.` and `.weight` or `.bias`.
    gguf: &'static str,
    /// Without the prefix of the layer.
    hf: &'static str,
    rows: Rows,
}

/// How the rows of a tensor are arranged in a GGUF file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Rows {
    /// As in a Hugging Face file.
    Same,
    /// Those of queries: in each head, the pairs that turn together lie side by side.
    Pairs,
    /// Queries, keys and values: all of each together.
    Fused,
}

/// What is called what in a family of architectures.
#[derive(Debug)]
pub(crate) struct Family {
    /// Parts that are there once.
    model: &'static [Part],
    /// What the names of a layer's parts begin with, before and after its number.
    layer: (&'static str, &'static str),
    parts: &'static [Part],
    /// The down projection: its prefix in a layer.
    down: &'static str,
}

const fn part(gguf: &'static str, hf: &'static str) -> Part {
    Part { gguf, hf, rows: Rows::Same }
}

const fn arranged(gguf: &'static str, hf: &'static str, rows: Rows) -> Part {
    Part { gguf, hf, rows }
}

const LLAMA: Family = Family {
    model: &[
        part("token_embd", "model.embed_tokens"),
        part("output_norm", "model.norm"),
        part("output", "lm_head"),
    ],
    layer: ("model.layers.", "."),
    parts: &[
        part("attn_norm", "input_layernorm"),
        arranged("attn_q", "self_attn.q_proj", Rows::Pairs),
        arranged("attn_k", "self_attn.k_proj", Rows::Pairs),
        part("attn_v", "self_attn.v_proj"),
        part("attn_output", "self_attn.o_proj"),
        part("ffn_norm", "post_attention_layernorm"),
        part("ffn_gate", "mlp.gate_proj"),
        part("ffn_up", "mlp.up_proj"),
    ],
    down: "mlp.down_proj",
};

const OPT: Family = Family {
    model: &[
        part("token_embd", "model.decoder.embed_tokens"),
        part("position_embd", "model.decoder.embed_positions"),
        part("output_norm", "model.decoder.final_layer_norm"),
        part("output", "lm_head"),
    ],
    layer: ("model.decoder.layers.", "."),
    parts: &[
        part("attn_norm", "self_attn_layer_norm"),
        part("attn_q", "self_attn.q_proj"),
        part("attn_k", "self_attn.k_proj"),
        part("attn_v", "self_attn.v_proj"),
        part("attn_output", "self_attn.out_proj"),
        part("ffn_norm", "final_layer_norm"),
        part("ffn_up", "fc1"),
    ],
    down: "fc2",
};

macro_rules! falcon {
    ($($norm:expr),+) => {
        Family {
            model: &[
                part("token_embd", "transformer.word_embeddings"),
                part("output_norm", "transformer.ln_f"),
                part("output", "lm_head"),
            ],
            layer: ("transformer.h.", "."),
            parts: &[
                $($norm,)+
                arranged("attn_qkv", "self_attention.query_key_value", Rows::Fused),
                part("attn_output", "self_attention.dense"),
                part("ffn_up", "mlp.dense_h_to_4h"),
            ],
            down: "mlp.dense_4h_to_h",
        }
    };
}

const FALCON_ONE_NORM: Family = falcon!(part("attn_norm", "input_layernorm"));
const FALCON_TWO_NORMS: Family =
    falcon!(part("attn_norm", "ln_mlp"), part("attn_norm_2", "ln_attn"));

impl Family {
    pub(crate) fn of(config: &ModelConfig) -> &'static Self {
        match (config.model_type.as_str(), config.block_order) {
            ("opt", _) => &OPT,
            _ if !Self::is_falcon(config) => &LLAMA,
            (_, BlockOrder::ParallelTwoNorms) => &FALCON_TWO_NORMS,
            _ => &FALCON_ONE_NORM,
        }
    }

    /// Whether a model is a Falcon, under any of the names that these have had.
    pub(crate) fn is_falcon(config: &ModelConfig) -> bool {
        matches!(config.model_type.as_str(), "falcon" | "RefinedWeb" | "RefinedWebModel")
    }

    /// Where a tensor goes that has a Hugging Face name; `None` if it is no part of the model.
    pub(crate) fn target(&self, name: &str) -> Option<Target> {
        let (prefix, kind) = name.rsplit_once('.')?;
        if !matches!(kind, "weight" | "bias") {
            return None;
        }
        if let Some(part) = self.model.iter().find(|part| part.hf == prefix) {
            let name = format!("{}.{kind}", part.gguf);
            return Some(Target { name, rows: part.rows, down: None });
        }
        let (before, after) = self.layer;
        let (layer, prefix) = prefix.strip_prefix(before)?.split_once(after)?;
        let layer: usize = layer.parse().ok()?;
        let by_neuron = prefix == by_neuron(self.down);
        if by_neuron || prefix == self.down {
            // completed by whoever knows the kind of file
            let name = format!("blk.{layer}.ffn_down");
            let down = (kind == "weight").then_some(by_neuron);
            return Some(Target { name: format!("{name}.{kind}"), rows: Rows::Same, down });
        }
        let part = self.parts.iter().find(|part| part.hf == prefix)?;
        Some(Target {
            name: format!("blk.{layer}.{}.{kind}", part.gguf),
            rows: part.rows,
            down: None,
        })
    }

    /// The weights that every model of the family has, by their names in a GGUF file.
    pub(crate) fn required(&self, n_layers: usize) -> impl Iterator<Item = String> {
        let model = self.model.iter().map(|part| format!("{}.weight", part.gguf));
        let parts = self.parts.iter().map(|part| part.gguf).chain(["ffn_down"]);
        let layers = (0..n_layers).flat_map(move |layer| {
            parts.clone().map(move |part| format!("blk.{layer}.{part}.weight"))
        });
        model.filter(|name| name != HEAD).chain(layers)
    }
}

/// Where a tensor goes in a GGUF file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Target {
    /// Its name in a plain file.
    pub(crate) name: String,
    pub(crate) rows: Rows,
    /// For the weights of a down projection: whether they are `[d_ff, d_model]`.
    pub(crate) down: Option<bool>,
}

/// What the names of a down projection begin with that a file holds as `[d_ff, d_model]`: no
/// Hugging Face file does.
pub(crate) fn by_neuron(down: &str) -> String {
    format!("{down}.by_neuron")
}

/// Whether a tensor belongs to a file's predictor.
pub(crate) fn is_predictor(name: &str) -> bool {
    let rest = name.strip_prefix("blk.").and_then(|rest| rest.split_once('.'));
    rest.is_some_and(|(_, part)| matches!(part, "fc1.weight" | "fc2.weight"))
}

/// Opens a GGUF file: its configuration, and its weights under Hugging Face's names.
pub(crate) fn open(
    path: &Path,
    activation: Option<Activation>,
    holding: Holding,
) -> Result<(ModelConfig, WeightStore)> {
    let file = match holding {
        Holding::Mapped => GgufFile::open_mapped(path)?,
        _ => GgufFile::open(path)?,
    };
    let config = config(&file, activation)?;
    let names = GgufNames::new(file, &config);
    Ok((config, WeightStore::from_source(Box::new(names))))
}

/// The configuration: the keys, and what only the tensors say.
fn config(file: &GgufFile, activation: Option<Activation>) -> Result<ModelConfig> {
    let missing = |name: &str| {
        let (path, name) = (file.path(name), name.to_owned());
        CoreError::MissingTensor { path, name }
    };
    let embedding = file.tensor(EMBEDDING).ok_or_else(|| missing(EMBEDDING))?;
    let vocab_size = embedding.shape.first().copied().unwrap_or_default();
    let context = GgufContext::new(file.is_powerinfer(), vocab_size).with_activation(activation);
    let mut config = ModelConfig::from_gguf(file.metadata(), context)?;
    let has = |name: &str| file.tensor(name).is_some();
    config.tie_word_embeddings = !has(HEAD);
    if config.model_type != "opt" {
        config.attention_bias = has("blk.0.attn_q.bias") || has("blk.0.attn_qkv.bias");
        config.mlp_bias = has("blk.0.ffn_up.bias");
    }
    if config.model_type == "falcon" && has("blk.0.attn_norm_2.weight") {
        config.block_order = BlockOrder::ParallelTwoNorms;
    }
    if has(ROPE_FACTORS) {
        add_rope_factors(file, &mut config)?;
    }
    Ok(config)
}

/// Takes the divisors of the rotary frequencies from their tensor.
fn add_rope_factors(file: &GgufFile, config: &mut ModelConfig) -> Result<()> {
    let mut store = WeightStore::from_source(Box::new(file.clone()));
    let divisors = store.vector(ROPE_FACTORS, config.d_head / 2)?;
    let wrong = divisors.iter().find(|divisor| !(divisor.is_finite() && **divisor > 0.0));
    match &config.position {
        _ if wrong.is_some() => Err(CoreError::TensorValue {
            path: file.path(ROPE_FACTORS),
            name: ROPE_FACTORS.to_owned(),
            expected: "finite numbers above 0",
            found: wrong.copied().unwrap_or_default(),
        }
        .into()),
        PositionConfig::Rotary(RotaryConfig { theta, scaling: RopeScaling::None }) => {
            let scaling = RopeScaling::Factors { divisors };
            config.position = PositionConfig::Rotary(RotaryConfig { theta: *theta, scaling });
            Ok(())
        }
        // two ways to scale, or nothing to scale
        _ => Err(CoreError::LeftoverTensors {
            path: file.path(ROPE_FACTORS),
            names: vec![ROPE_FACTORS.to_owned()],
        }
        .into()),
    }
}

/// A GGUF file's tensors under other names and with their rows in another order.
#[derive(Debug)]
pub(crate) struct GgufNames {
    file: GgufFile,
    /// By the name given.
    entries: BTreeMap<String, Entry>,
}

#[derive(Debug)]
struct Entry {
    /// Its name in the file.
    name: String,
    info: TensorInfo,
    order: RowOrder,
}

impl GgufNames {
    pub(crate) fn new(file: GgufFile, config: &ModelConfig) -> Self {
        let family = Family::of(config);
        let powerinfer = file.is_powerinfer();
        let mut entries = BTreeMap::new();
        for mut info in file.tensors() {
            if info.name == ROPE_FACTORS && matches!(config.position, PositionConfig::Rotary(_)) {
                continue;
            }
            let (given, rows) = given_name(family, &info.name, powerinfer)
                .unwrap_or_else(|| (info.name.clone(), Rows::Same));
            let order = RowOrder::new(rows, config);
            let name = std::mem::replace(&mut info.name, given.clone());
            entries.insert(given, Entry { name, info, order });
        }
        Self { file, entries }
    }
}

/// The Hugging Face name of a tensor and how its rows are arranged; `None` if it has none.
fn given_name(family: &Family, name: &str, powerinfer: bool) -> Option<(String, Rows)> {
    let (prefix, kind) = name.rsplit_once('.')?;
    if !matches!(kind, "weight" | "bias") {
        return None;
    }
    let Some(rest) = prefix.strip_prefix("blk.") else {
        let part = family.model.iter().find(|part| part.gguf == prefix)?;
        return Some((format!("{}.{kind}", part.hf), part.rows));
    };
    let (layer, prefix) = rest.split_once('.')?;
    let (before, after) = family.layer;
    let in_layer = |part: &str| format!("{before}{layer}{after}{part}.{kind}");
    match (prefix, powerinfer) {
        ("ffn_down_t", true) if kind == "weight" => {
            Some((in_layer(&by_neuron(family.down)), Rows::Same))
        }
        ("ffn_down_t", true) | ("ffn_down", false) => Some((in_layer(family.down), Rows::Same)),
        _ => {
            let part = family.parts.iter().find(|part| part.gguf == prefix)?;
            Some((in_layer(part.hf), part.rows))
        }
    }
}

/// Which row of a GGUF file is which row of a Hugging Face file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RowOrder {
    /// The same.
    Same,
    /// Heads whose values `i` and `i + d_head / 2` turn together here, `2i` and `2i + 1` there.
    Pairs { d_head: usize },
    /// For each key-value head its `group` query heads, its key and its value here; all queries,
    /// all keys, all values there.
    Fused { n_kv_heads: usize, group: usize, d_head: usize },
}

impl RowOrder {
    pub(crate) fn new(rows: Rows, config: &ModelConfig) -> Self {
        let d_head = config.d_head;
        match rows {
            Rows::Same => Self::Same,
            Rows::Pairs => Self::Pairs { d_head },
            Rows::Fused => {
                let n_kv_heads = config.n_kv_heads;
                Self::Fused { n_kv_heads, group: config.n_heads / n_kv_heads, d_head }
            }
        }
    }

    /// The row of a GGUF file that holds a row of a Hugging Face file.
    pub(crate) fn stored(self, row: usize) -> usize {
        match self {
            Self::Same => row,
            Self::Pairs { d_head } => {
                let (head, at) = (row / d_head, row % d_head);
                let half = d_head / 2;
                head * d_head + at % half * 2 + at / half
            }
            Self::Fused { n_kv_heads, group, d_head } => {
                let width = (group + 2) * d_head;
                let (head, at) = (row / width, row % width);
                let (queries, keys) = (n_kv_heads * group * d_head, n_kv_heads * d_head);
                match at / d_head {
                    which if which < group => head * group * d_head + at,
                    which if which == group => queries + head * d_head + at % d_head,
                    _ => queries + keys + head * d_head + at % d_head,
                }
            }
        }
    }
}

impl RowOrder {
    /// For each row of a GGUF file the row of a Hugging Face file; `None` if there cannot be so
    /// many.
    pub(crate) fn of_stored(self, n_rows: usize) -> Option<Vec<usize>> {
        let fits = match self {
            Self::Same => true,
            Self::Pairs { d_head } => n_rows.is_multiple_of(d_head),
            Self::Fused { n_kv_heads, group, d_head } => {
                n_rows == (group + 2) * n_kv_heads * d_head
            }
        };
        let mut rows = vec![0; if fits { n_rows } else { return None }];
        (0..n_rows).for_each(|row| rows[self.stored(row)] = row);
        Some(rows)
    }
}

impl TensorSource for GgufNames {
    fn tensors(&self) -> Vec<TensorInfo> {
        self.entries.values().map(|entry| entry.info.clone()).collect()
    }

    fn read(&self, name: &str, offset_bytes: u64, out: &mut [u8]) -> CoreResult<()> {
        let Some(entry) = self.entries.get(name) else {
            return self.file.read(name, offset_bytes, out);
        };
        if entry.order == RowOrder::Same {
            return self.file.read(&entry.name, offset_bytes, out);
        }
        let row_bytes = row_bytes(&entry.info)?;
        let n_rows = entry.info.shape[0];
        let (mut offset, mut rest) = (offset_bytes, out);
        while !rest.is_empty() {
            let row = (offset / row_bytes as u64) as usize;
            if row >= n_rows {
                // beyond the tensor: the file says so
                return self.file.read(&entry.name, offset_bytes, rest);
            }
            let at = (offset % row_bytes as u64) as usize;
            let (piece, after) = rest.split_at_mut((row_bytes - at).min(rest.len()));
            let stored = entry.order.stored(row) as u64 * row_bytes as u64 + at as u64;
            self.file.read(&entry.name, stored, piece)?;
            offset += piece.len() as u64;
            rest = after;
        }
        Ok(())
    }

    fn mapped(&self, name: &str) -> Option<MappedTensor> {
        let entry = self.entries.get(name)?;
        let mut tensor = self.file.mapped(&entry.name)?;
        if entry.order != RowOrder::Same {
            let n_rows = *entry.info.shape.first()?;
            entry.order.of_stored(n_rows)?;
            // rows of a matrix are counted in 32 bits
            let places = (0..n_rows).map(|row| entry.order.stored(row) as u32);
            tensor.order = Some(places.collect());
        }
        Some(tensor)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.file.path(self.entries.get(name).map_or(name, |entry| &entry.name))
    }
}

/// Bytes of a row, which for a vector is one value.
fn row_bytes(info: &TensorInfo) -> CoreResult<usize> {
    let row_len = info.shape[1..].iter().product();
    match &info.dtype {
        FileDtype::Weights(format) => Ok(format.row_bytes(row_len)?),
        // never taken, so never read
        FileDtype::Other(_) => Ok(1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stored(order: RowOrder, n_rows: usize) -> Vec<usize> {
        (0..n_rows).map(|row| order.stored(row)).collect()
    }

    #[test]
    fn rows_of_queries_are_those_that_turn_together() {
        // two heads of four: values 0 and 2 turn together, then 1 and 3
        let order = RowOrder::Pairs { d_head: 4 };
        assert_eq!(stored(order, 8), [0, 2, 1, 3, 4, 6, 5, 7]);
    }

    #[test]
    fn fused_rows_come_apart() {
        // q0 q1 k v | q2 q3 k v with heads of one row
        let order = RowOrder::Fused { n_kv_heads: 2, group: 2, d_head: 1 };
        assert_eq!(stored(order, 8), [0, 1, 4, 6, 2, 3, 5, 7]);
    }

    #[test]
    fn every_order_is_a_permutation() {
        for order in [
            RowOrder::Pairs { d_head: 10 },
            RowOrder::Fused { n_kv_heads: 5, group: 2, d_head: 3 },
            RowOrder::Fused { n_kv_heads: 1, group: 18, d_head: 3 },
        ] {
            let mut rows = stored(order, 60);
            rows.sort_unstable();
            assert_eq!(rows, Vec::from_iter(0..60), "{order:?}");
        }
    }

    #[test]
    fn names_are_those_of_the_loaders() {
        let name =
            |family, name, powerinfer| given_name(family, name, powerinfer).map(|(given, _)| given);
        let some = |text: &str| Some(text.to_owned());
        assert_eq!(
            name(&LLAMA, "blk.12.attn_q.weight", false),
            some("model.layers.12.self_attn.q_proj.weight")
        );
        assert_eq!(
            name(&LLAMA, "blk.1.ffn_down.weight", false),
            some("model.layers.1.mlp.down_proj.weight")
        );
        assert_eq!(name(&LLAMA, "blk.1.ffn_down.weight", true), None);
        assert_eq!(
            name(&OPT, "blk.1.ffn_down_t.weight", true),
            some("model.decoder.layers.1.fc2.by_neuron.weight")
        );
        assert_eq!(
            name(&OPT, "blk.1.ffn_down_t.bias", true),
            some("model.decoder.layers.1.fc2.bias")
        );
        assert_eq!(
            name(&FALCON_TWO_NORMS, "blk.0.attn_norm.bias", false),
            some("transformer.h.0.ln_mlp.bias")
        );
        for unknown in ["blk.0.fc1.weight", "blk.0.attn_q", "blk.weight", "x", "blk.0.attn_q.scale"]
        {
            assert_eq!(name(&LLAMA, unknown, true), None, "{unknown}");
        }
    }
}
