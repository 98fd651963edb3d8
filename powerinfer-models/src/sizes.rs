//! What each part of a model takes in memory, from its headers: what plans are made and checked with.

use std::path::Path;

use powerinfer_core::{
    Digest, FileDtype, KvShape, LayerSizes, ModelConfig, ModelSizes, PlannedModel,
    Result as CoreResult, TensorInfo, WeightStore,
};

use crate::error::Result;
use crate::estimate::{predictor_bytes, tensor_bytes};
use crate::gguf_names::{Family, by_neuron, is_predictor};
use crate::load::{LoadOptions, open};
use crate::registry;

/// Bytes at each end of a tensor that go into the digest of a model.
const SAMPLED: u64 = 64;

/// Reads configuration and headers of a model, a folder or a GGUF file, and says what its parts take as
/// [`load`](crate::load) with the same options would hold them, and which model it is.
///
/// # Cost
/// Opens the files and reads their headers, and 128 bytes of each tensor for the digest.
///
/// # Errors
/// As [`load`](crate::load), as far as headers tell.
///
/// # Examples
/// ```
/// use powerinfer_models::{LoadOptions, model_sizes};
///
/// # let demo = concat!(env!("CARGO_MANIFEST_DIR"), "/../assets/llama-relu-tiny");
/// let sizes = model_sizes(demo.as_ref(), &LoadOptions::default())?;
/// assert_eq!(sizes.model.ffn_tensors.len(), 3);
/// // gate, up and down rows of f16
/// assert_eq!(sizes.layers[0].neuron_bytes(), 3 * 2 * sizes.model.d_model as u64);
/// # Ok::<(), powerinfer_models::Error>(())
/// ```
pub fn model_sizes(path: &Path, options: &LoadOptions) -> Result<ModelSizes> {
    let (config, store) = open(path, options)?;
    Ok(of_store(&config, &store, options)?)
}

/// As [`model_sizes`], of any source of weights.
pub(crate) fn of_store(
    config: &ModelConfig,
    store: &WeightStore,
    options: &LoadOptions,
) -> CoreResult<ModelSizes> {
    let model = PlannedModel {
        n_layers: config.n_layers,
        d_ff: config.d_ff,
        d_model: config.d_model,
        architecture: config.model_type.clone(),
        activation: config.activation.to_string(),
        ..PlannedModel::default()
    };
    let mut sizes = ModelSizes {
        model,
        layers: vec![LayerSizes::default(); config.n_layers],
        kv: KvShape { dtype: options.kv_dtype, ..config.kv_shape() },
        tied_head: true,
        ..ModelSizes::default()
    };
    let family = Family::of(config);
    let is_ignorable = registry::find(&config.model_type).map(|found| found.is_ignorable);
    let mut digest = Digest::default();
    // gate, up and down of each layer, as far as there are such
    let mut rows = vec![[0u64; 3]; config.n_layers];
    for tensor in store.tensors() {
        let ignorable = is_ignorable.is_some_and(|is_ignorable| is_ignorable(&tensor.name));
        if ignorable || is_predictor(&tensor.name) {
            continue;
        }
        sample(&mut digest, tensor, store)?;
        let bytes = tensor_bytes(tensor, config, options)?.held;
        match part_of(family, &tensor.name) {
            Part::Embedding => sizes.embedding_bytes += bytes,
            Part::Head { logits } => {
                sizes.head_bytes += bytes;
                sizes.tied_head &= !logits;
            }
            Part::Attention { layer } => {
                if let Some(layer) = sizes.layers.get_mut(layer) {
                    layer.attention_bytes += bytes;
                }
            }
            Part::Ffn { layer, matrix } => {
                let Some(of_layer) = sizes.layers.get_mut(layer) else { continue };
                let by_neuron = matrix < 2 || tensor.shape.len() == 2;
                match tensor.shape.len() {
                    2 => {
                        rows[layer][matrix] += bytes.div_ceil(config.d_ff as u64);
                        if layer == 0 {
                            sizes.model.ffn_tensors.push(plain_name(&tensor.name));
                        }
                    }
                    _ if by_neuron => of_layer.neuron_biases += 1,
                    // the bias of down
                    _ => of_layer.attention_bytes += bytes,
                }
            }
        }
    }
    if sizes.tied_head {
        sizes.head_bytes += table_bytes(config, store, options)?;
    }
    sizes.model.ffn_tensors.sort_unstable();
    sizes.model.digest = digest.name();
    let predictor = predictor_bytes(config, store, options)?.div_ceil(config.n_layers as u64);
    for (layer, rows) in sizes.layers.iter_mut().zip(rows) {
        layer.neuron_rows = rows.into_iter().filter(|&row| row > 0).collect();
        layer.predictor_bytes = predictor;
    }
    Ok(sizes)
}

/// What a tensor is for.
pub(crate) enum Part {
    Embedding,
    /// The head, a norm before it, or what else is there once.
    Head {
        logits: bool,
    },
    Attention {
        layer: usize,
    },
    /// 0 for the gate, 1 for up, 2 for down.
    Ffn {
        layer: usize,
        matrix: usize,
    },
}

pub(crate) fn part_of(family: &Family, name: &str) -> Part {
    let rooted = format!("model.{name}");
    // files of OPT's bare decoder leave `model.` out
    let target = family.target(name).or_else(|| family.target(&rooted));
    let Some(target) = target else { return Part::Head { logits: false } };
    let Some((layer, part)) =
        target.name.strip_prefix("blk.").and_then(|rest| rest.split_once('.'))
    else {
        return match target.name.as_str() {
            "token_embd.weight" | "position_embd.weight" => Part::Embedding,
            name => Part::Head { logits: name == "output.weight" },
        };
    };
    let Ok(layer) = layer.parse() else { return Part::Head { logits: false } };
    match part.split_once('.').map(|(part, _)| part) {
        Some("ffn_gate") => Part::Ffn { layer, matrix: 0 },
        Some("ffn_up") => Part::Ffn { layer, matrix: 1 },
        Some("ffn_down") => Part::Ffn { layer, matrix: 2 },
        _ => Part::Attention { layer },
    }
}

/// The table of embeddings, which a tied head reads.
fn table_bytes(
    config: &ModelConfig,
    store: &WeightStore,
    options: &LoadOptions,
) -> CoreResult<u64> {
    let is_table = |tensor: &&TensorInfo| tensor.shape == [config.vocab_size, config.d_embedding];
    match store.tensors().find(is_table) {
        Some(tensor) => Ok(tensor_bytes(tensor, config, options)?.held),
        None => Ok(0),
    }
}

/// A tensor's name without its layer, and without what tells how a file holds it.
fn plain_name(name: &str) -> String {
    let numbered = |part: &str| part.bytes().all(|byte| byte.is_ascii_digit());
    let parts = name.split('.').skip_while(|part| !numbered(part)).skip(1);
    let name = parts.collect::<Vec<_>>().join(".");
    name.replace(&by_neuron(""), "")
}

/// Takes in what a tensor is called and looks like, and its first and last bytes.
fn sample(digest: &mut Digest, tensor: &TensorInfo, store: &WeightStore) -> CoreResult<()> {
    digest.update(tensor.name.as_bytes());
    digest.update(format!("{} {:?}", tensor.dtype, tensor.shape).as_bytes());
    let FileDtype::Weights(format) = tensor.dtype else { return Ok(()) };
    let [first @ .., width] = tensor.shape.as_slice() else { return Ok(()) };
    let rows: u64 = first.iter().map(|&n| n as u64).product();
    let size = rows.saturating_mul(format.row_bytes(*width).unwrap_or(0) as u64);
    let mut bytes = [0; SAMPLED as usize];
    for offset in [0, size.saturating_sub(SAMPLED)] {
        let bytes = &mut bytes[..SAMPLED.min(size) as usize];
        store.source().read(&tensor.name, offset, bytes)?;
        digest.update(bytes);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use powerinfer_core::CausalLm;
    use powerinfer_ops::WeightFormat;
    use testing::Fixture;

    use super::*;
    use crate::{estimate, load};

    #[test]
    fn the_parts_are_the_whole() {
        for fixture in Fixture::trained() {
            for dtype in [None, Some(WeightFormat::F32), Some(WeightFormat::Q8_0)] {
                let options = LoadOptions::default().with_dtype(dtype);
                let sizes = model_sizes(&fixture.model_dir, &options).unwrap();
                let whole = estimate(&fixture.model_dir, &options).unwrap();
                // a row is rounded up to the next byte
                let (found, expected) = (sizes.total_bytes(), whole.weight_bytes);
                assert!(
                    found.abs_diff(expected) <= expected / 1000,
                    "{}: {found} {expected}",
                    fixture.name
                );
                let matrices = sizes.layers[0].neuron_rows.len();
                assert_eq!(sizes.model.ffn_tensors.len(), matrices, "{}", fixture.name);
                assert_eq!(matrices, if fixture.name.contains("llama") { 3 } else { 2 });
                let info = load(&fixture.model_dir, &options).unwrap().info().clone();
                assert_eq!(sizes.model.architecture, info.architecture);
                assert_eq!(sizes.model.activation, info.activation);
                assert!(sizes.head_bytes > 0 && sizes.embedding_bytes > 0);
            }
        }
    }

    #[test]
    fn the_digest_tells_weights_apart() {
        use crate::synthetic::{Synthetic, SyntheticShape};
        let sizes = |seed| {
            let synthetic = Synthetic::new(SyntheticShape::Tiny, 0.1, seed).unwrap();
            synthetic.sizes(&LoadOptions::default()).unwrap()
        };
        assert_eq!(sizes(1).model, sizes(1).model);
        assert_ne!(sizes(1).model.digest, sizes(2).model.digest);
        assert!(sizes(1).model.check(&sizes(2).model).unwrap().is_some());
    }
}
