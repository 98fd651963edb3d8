//! GGUF files as the loaders of the architectures read weights: under Hugging Face's names, rows in
//! Hugging Face's order.

mod family;
mod row_order;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use powerinfer_core::{
    BlockOrder, Error as CoreError, FileDtype, GgufContext, GgufFile, Holding, MappedTensor,
    ModelConfig, PositionConfig, Result as CoreResult, RopeScaling, RotaryConfig, TensorInfo,
    TensorSource, WeightStore,
};
use powerinfer_ops::Activation;

use crate::error::Result;
use family::Rows;
pub(crate) use family::{EMBEDDING, Family, HEAD, ROPE_FACTORS, by_neuron, is_predictor};
pub(crate) use row_order::RowOrder;

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
            let (given, rows) = family
                .given_name(&info.name, powerinfer)
                .unwrap_or_else(|| (info.name.clone(), Rows::Same));
            let order = RowOrder::new(rows, config);
            let name = std::mem::replace(&mut info.name, given.clone());
            entries.insert(given, Entry { name, info, order });
        }
        Self { file, entries }
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
