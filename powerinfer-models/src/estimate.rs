//! What a model takes in memory, known from its headers before anything of it is loaded.

mod tally;

use std::fmt;
use std::path::Path;

use powerinfer_core::{
    GenerationOptions, KvShape, ModelConfig, Result as CoreResult, Sparsity, WeightStore,
};
use powerinfer_ops::LowBitFormat;
use powerinfer_ops::attention::PAGE_LEN;

use crate::error::Result;
use crate::gguf_names::Family;
use crate::load::{LoadOptions, open, resolve, wanted_predictor, with_profile_beside};
use crate::placing::Placed;
use crate::predictor::{PredictorSource, file_bytes};
use crate::sizes::part_of;
use crate::{gguf_names, registry};
use tally::Tally;
pub(crate) use tally::tensor_bytes;

/// What a model takes in memory, in bytes, on the CPU. An estimate from above: what is read is
/// counted as it will be held, padding included, and every buffer at its largest.
///
/// What lies on a fast device is no part of it, and neither are weights that are used where they lie in a
/// file; both are told beside it. Not counted: the tokenizer, some tens of mebibytes, and the program itself.
///
/// # Examples
/// ```
/// use powerinfer_models::{LoadOptions, estimate};
///
/// # let demo = concat!(env!("CARGO_MANIFEST_DIR"), "/../assets/llama-relu-tiny");
/// let memory = estimate(demo.as_ref(), &LoadOptions::default())?;
/// assert_eq!(memory.weight_bytes, 2 * 6_950_144 + 2 * 13 * 256); // f16, the 13 norms f32
/// assert_eq!(memory.cache_bytes_per_token, 6 * 2 * 4 * 32 * 4); // layers, k and v, heads, f32
/// assert_eq!(memory.total_bytes(1, 512), memory.weight_bytes + memory.session_bytes(512));
/// # Ok::<(), powerinfer_models::Error>(())
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemoryEstimate {
    /// The weights, those that lie on a fast device or in a file left out.
    pub weight_bytes: u64,
    /// Weights on the fast device, without its padding and scratch memory.
    pub fast_bytes: u64,
    /// Weights that are used where they lie in the file. The system keeps as much of them in memory as it has
    /// room for.
    pub mapped_bytes: u64,
    /// The predictors, where the model is to run with some.
    pub predictor_bytes: u64,
    /// What loading takes beside the weights for a while: the largest tensor that is turned round, and a layer
    /// of which a part is about to go to a fast device.
    pub load_bytes: u64,
    /// Keys and values of one token of a context, those on a fast device left out.
    pub cache_bytes_per_token: u64,
    /// Activations, logits and scratch memory of one session, once it has run a long prompt.
    pub workspace_bytes: u64,
    /// Tokens of the largest context.
    pub max_context: usize,
}

impl MemoryEstimate {
    /// All weights, wherever they lie.
    #[must_use]
    pub fn model_bytes(&self) -> u64 {
        self.weight_bytes.saturating_add(self.fast_bytes).saturating_add(self.mapped_bytes)
    }

    /// A session whose context has `n_tokens`: keys and values, in whole pages, and workspace.
    #[must_use]
    pub fn session_bytes(&self, n_tokens: usize) -> u64 {
        let held = n_tokens.min(self.max_context).next_multiple_of(PAGE_LEN);
        let cache = self.cache_bytes_per_token.saturating_mul(held as u64);
        cache.saturating_add(self.workspace_bytes)
    }

    /// The most that is in use at any time: weights, predictors and `n_sessions` whose contexts have `n_tokens`
    /// each, or instead of these what loading takes.
    #[must_use]
    pub fn total_bytes(&self, n_sessions: usize, n_tokens: usize) -> u64 {
        let sessions = self.session_bytes(n_tokens).saturating_mul(n_sessions as u64);
        let held = self.weight_bytes.saturating_add(self.predictor_bytes);
        held.saturating_add(sessions.max(self.load_bytes))
    }
}

impl fmt::Display for MemoryEstimate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        let part = |what: &str, bytes: u64| match bytes {
            0 => String::new(),
            bytes => format!(", {what} {:.1} MiB", mib(bytes)),
        };
        let fast = part("on the fast device", self.fast_bytes);
        let mapped = part("in the file", self.mapped_bytes);
        let predictors = part("predictors", self.predictor_bytes);
        write!(
            f,
            "weights {:.1} MiB{fast}{mapped}{predictors}, a session of {} tokens {:.1} MiB",
            mib(self.weight_bytes),
            self.max_context,
            mib(self.session_bytes(self.max_context)),
        )
    }
}

/// Reads configuration and headers of a model, a folder or a GGUF file, and says what [`load`](crate::load) with the
/// same options would take.
///
/// # Cost
/// Opens the files and reads their headers; no weights.
///
/// # Errors
/// As [`load`](crate::load), as far as headers tell.
pub fn estimate(dir: &Path, options: &LoadOptions) -> Result<MemoryEstimate> {
    let (config, store) = open(dir, options)?;
    of_store(&config, &store, &*with_profile_beside(dir, options)?)
}

/// As [`estimate`], of any source of weights.
pub(crate) fn of_store(
    config: &ModelConfig,
    store: &WeightStore,
    options: &LoadOptions,
) -> Result<MemoryEstimate> {
    let mut memory = MemoryEstimate { max_context: config.max_context, ..Default::default() };
    let predictor = wanted_predictor(options, resolve(options, config)?);
    let placed = Placed::find(config, store, options, predictor.as_ref())?;
    let placement = placed.as_ref().map(|placed| &placed.placement);
    let mut tally = Tally::new(config.n_layers, placement, options.fast_device.is_some());
    let family = Family::of(config);
    let is_ignorable = registry::find(&config.model_type).map(|found| found.is_ignorable);
    for tensor in store.tensors() {
        let ignorable = is_ignorable.is_some_and(|is_ignorable| is_ignorable(&tensor.name));
        if ignorable || gguf_names::is_predictor(&tensor.name) {
            continue;
        }
        let is_mapped = store.source().mapped(&tensor.name).is_some();
        let bytes = tensor_bytes(tensor, config, options)?;
        tally.add(&mut memory, &part_of(family, &tensor.name), bytes, is_mapped);
    }
    memory.load_bytes = tally.load_bytes();
    let n_layers = config.n_layers.saturating_sub(tally.n_fast_attention());
    let kv = KvShape { dtype: options.kv_dtype, n_layers, ..config.kv_shape() };
    memory.cache_bytes_per_token = kv.size_bytes(PAGE_LEN).div_ceil(PAGE_LEN) as u64;
    memory.workspace_bytes = workspace_bytes(config);
    memory.predictor_bytes = predictor_bytes(config, store, options)?;
    Ok(memory)
}

/// What the predictors take at most, as far as headers tell.
///
/// # Errors
/// Those of opening a predictor's file or folder, and of one that was made for another model.
pub(crate) fn predictor_bytes(
    config: &ModelConfig,
    store: &WeightStore,
    options: &LoadOptions,
) -> CoreResult<u64> {
    let float = size_of::<f32>() as u64;
    let [n_layers, d_ff, d_model] =
        [config.n_layers, config.d_ff, config.d_model].map(|n| n as u64);
    let in_model = || -> u64 {
        let tensors = store.tensors().filter(|tensor| gguf_names::is_predictor(&tensor.name));
        tensors.map(|tensor| tensor.shape.iter().map(|&n| n as u64).product::<u64>() * float).sum()
    };
    // half a bit a weight are scales, and rows are padded to whole blocks
    let quantized = |bits: u32| {
        n_layers
            * d_ff.next_multiple_of(32)
            * d_model.next_multiple_of(64)
            * (2 * u64::from(bits) + 1)
            / 16
    };
    let Some(predictor) = &options.predictor else {
        let wanted = options.sparsity == Sparsity::Predicted;
        return Ok(if wanted { in_model().max(quantized(4)) } else { 0 });
    };
    Ok(match &predictor.source {
        PredictorSource::Quantized(format) => quantized(format.map_or(4, LowBitFormat::bits)),
        PredictorSource::InModel { .. } => in_model(),
        PredictorSource::Random { rank, .. } => {
            (n_layers * (d_ff + d_model)).saturating_mul(*rank as u64).saturating_mul(float)
        }
        PredictorSource::File(_) | PredictorSource::Folder(_) => file_bytes(config, predictor)?,
    })
}

/// Buffers of the largest pass, a chunk of a prompt.
fn workspace_bytes(config: &ModelConfig) -> u64 {
    let chunk = GenerationOptions::default().prefill_chunk.min(config.max_context) as u64;
    let [d_model, d_ff, d_head] = [config.d_model, config.d_ff, config.d_head].map(|n| n as u64);
    let heads = (config.n_heads + 2 * config.n_kv_heads) as u64;
    // the stream, its norm, what attention and feed-forward network add, and one being made; queries,
    // keys and values before and after they are turned; gate and up products and the list of those
    // that fire
    let per_token = 5 * d_model + 2 * heads * d_head + 3 * d_ff;
    // sums of a token's chunks of neurons; logits, and a sampler's candidates, twice, of 16 bytes
    let once = d_ff.div_ceil(256) * d_model + (config.vocab_size as u64) * (1 + 2 * 4);
    (chunk * per_token + once) * size_of::<f32>() as u64
}

#[cfg(test)]
mod tests {
    use powerinfer_core::CausalLm;
    use powerinfer_ops::WeightFormat;
    use testing::Fixture;

    use super::*;
    use crate::load;

    #[test]
    fn the_estimate_covers_what_loading_counts_and_little_more() {
        let formats =
            [None, Some(WeightFormat::F32), Some(WeightFormat::F16), Some(WeightFormat::Q8_0)];
        for fixture in Fixture::trained() {
            for dtype in formats {
                let options = LoadOptions::default().with_dtype(dtype);
                let memory = estimate(&fixture.model_dir, &options).unwrap();
                let loaded = load(&fixture.model_dir, &options).unwrap().info().weight_bytes;
                let ratio = memory.weight_bytes as f64 / loaded as f64;
                assert!((1.0..1.2).contains(&ratio), "{} {dtype:?}: {ratio}", fixture.name);
            }
        }
    }

    #[test]
    fn quantised_predictors_are_covered() {
        let folder = Fixture::demo().model_dir;
        let options = LoadOptions::default().with_sparsity(Sparsity::Predicted);
        let memory = estimate(&folder, &options).unwrap();
        let exact = estimate(&folder, &LoadOptions::default()).unwrap();
        assert_eq!(exact.predictor_bytes, 0);
        let loaded = load(&folder, &options).unwrap().info().weight_bytes;
        assert!(memory.weight_bytes + memory.predictor_bytes >= loaded);
        assert!(memory.predictor_bytes < exact.weight_bytes / 2, "{memory}");
    }

    #[test]
    fn a_session_is_counted_in_whole_pages_up_to_the_context() {
        let memory = MemoryEstimate {
            weight_bytes: 900,
            fast_bytes: 1 << 40,
            mapped_bytes: 1 << 40,
            predictor_bytes: 100,
            load_bytes: 5000,
            cache_bytes_per_token: 10,
            workspace_bytes: 7,
            max_context: 100,
        };
        assert_eq!(memory.session_bytes(0), 7);
        assert_eq!(memory.session_bytes(1), 647);
        assert_eq!(memory.session_bytes(usize::MAX), 1287);
        assert_eq!(memory.total_bytes(0, 100), 6000);
        assert_eq!(memory.total_bytes(5, 100), 1000 + 5 * 1287);
        assert_eq!(memory.total_bytes(usize::MAX, 100), u64::MAX);
    }
}
