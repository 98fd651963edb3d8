//! Models of real shapes with random weights: they show speed, never quality.
//!
//! Their gates fire for about a chosen share of the neurons, a scattered set that changes with
//! every token. The first value of the residual stream is a constant: every embedding holds it and
//! no projection writes to it, so every normed input contains it. Gate rows are random but for
//! their first value, a negative multiple of what makes a random product exceed the constant with
//! the chosen probability. What attention and feed-forward networks add to the stream is kept
//! small, so that the share is the same in every layer.

mod shape;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use powerinfer_core::{
    CausalLm, Error as CoreError, FileDtype, ModelConfig, ModelSizes, TensorInfo, TensorSource,
    WeightStore, write_safetensors,
};
use powerinfer_ops::{WeightFormat, par_fill};

use crate::error::{Error, Result};
use crate::load::{LoadOptions, build};
use crate::{registry, sizes};
pub use shape::SyntheticShape;
use shape::{Role, Sizes};

/// What attention and feed-forward networks add to the stream, relative to an embedding.
const ADDED: f32 = 0.02;
/// Values that are generated at once by one thread.
const PIECE_VALUES: usize = 1 << 16;

/// A model with random weights.
///
/// # Examples
/// ```
/// use powerinfer_models::LoadOptions;
/// use powerinfer_models::synthetic::{Synthetic, SyntheticShape};
/// let model = Synthetic::new(SyntheticShape::Tiny, 0.1, 1)?.load(&LoadOptions::default())?;
/// assert_eq!(model.info().n_layers, 6);
/// # Ok::<(), powerinfer_models::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Synthetic {
    shape: SyntheticShape,
    density: f64,
    seed: u64,
    format: WeightFormat,
    roles: BTreeMap<String, Role>,
}

impl Synthetic {
    /// A model whose gates fire for a share of `density` of the neurons. The same seed gives the
    /// same weights.
    ///
    /// # Errors
    /// [`Error::Density`] if `density` does not lie between 0.001 and 0.999.
    pub fn new(shape: SyntheticShape, density: f64, seed: u64) -> Result<Self> {
        if !(0.001..=0.999).contains(&density) {
            return Err(Error::Density { found: density });
        }
        let roles = shape.tensors().into_iter().collect();
        Ok(Self { shape, density, seed, format: WeightFormat::F16, roles })
    }

    /// Makes the model, in the format of the options or else in f16. Quantised weights are made
    /// in f16 and quantised as those of a file would be.
    ///
    /// # Errors
    /// [`Error::NotSparse`] never, memory that is not to be had, and a placement that does not fit.
    pub fn load(&self, options: &LoadOptions) -> Result<Box<dyn CausalLm>> {
        let mut source = self.clone();
        source.format = match options.dtype {
            Some(format) if format.block_len() == 1 => format,
            _ => WeightFormat::F16,
        };
        let config = self.config()?;
        build(&config, WeightStore::from_source(Box::new(source)), options)
    }

    /// What its parts take in memory, without making it, and which model it is.
    ///
    /// # Errors
    /// As [`load`](Self::load), as far as shapes tell.
    pub fn sizes(&self, options: &LoadOptions) -> Result<ModelSizes> {
        let store = WeightStore::from_source(Box::new(self.clone()));
        Ok(sizes::of_store(&self.config()?, &store, options)?)
    }

    /// Writes `config.json` and `model.safetensors` to a folder, which is made if needed.
    ///
    /// # Errors
    /// [`CoreError::Io`] naming the file.
    pub fn write(&self, dir: &Path, format: WeightFormat) -> Result<()> {
        let io = |path: &Path, source| CoreError::Io { path: path.to_owned(), source };
        fs::create_dir_all(dir).map_err(|source| io(dir, source))?;
        let config = dir.join("config.json");
        fs::write(&config, self.shape.config_json()).map_err(|source| io(&config, source))?;
        let mut source = self.clone();
        source.format = format;
        Ok(write_safetensors(&dir.join("model.safetensors"), &source)?)
    }

    fn config(&self) -> Result<ModelConfig> {
        let json = self.shape.config_json();
        let path = format!("synthetic {}", self.shape);
        Ok(ModelConfig::from_json(path.as_ref(), &json, &registry::supported_model_types())?)
    }

    /// How the values of a tensor are made; `None` if there is no such tensor.
    fn recipe(&self, name: &str) -> Option<Recipe> {
        let Sizes { d_model, vocab_size, .. } = self.shape.sizes();
        let plain = 1.0 / (d_model as f32).sqrt();
        let reading = |n_rows, scale| Recipe {
            shape: vec![n_rows, d_model],
            scale,
            first_column: Some(0.0),
            first_row_zero: false,
        };
        let same = |len, value| Recipe {
            shape: vec![len],
            scale: 0.0,
            first_column: Some(value),
            first_row_zero: false,
        };
        Some(match *self.roles.get(name)? {
            Role::Embedding => {
                let constant = (d_model as f32).sqrt();
                Recipe { first_column: Some(constant), ..reading(vocab_size, 1.0) }
            }
            Role::Positions { n_rows } => reading(n_rows, ADDED),
            Role::Reads { n_rows } => reading(n_rows, plain),
            Role::Fires { n_rows } => {
                let threshold = normal_quantile(1.0 - self.density) as f32;
                // the constant is as long as the rest of the stream together
                Recipe { first_column: Some(-threshold * plain), ..reading(n_rows, plain) }
            }
            // what writes to the stream leaves the constant alone
            Role::Writes { n_columns, sparse } => {
                let share = if sparse { self.density } else { 1.0 };
                Recipe {
                    shape: vec![d_model, n_columns],
                    scale: ADDED / ((n_columns as f64 * share) as f32).sqrt(),
                    first_column: None,
                    first_row_zero: true,
                }
            }
            Role::Ones => same(d_model, 1.0),
            Role::Zeros { len } => same(len, 0.0),
        })
    }
}

/// How the values of a tensor are made.
struct Recipe {
    shape: Vec<usize>,
    /// Standard deviation.
    scale: f32,
    /// What the first value of each row is, or of a vector all values.
    first_column: Option<f32>,
    first_row_zero: bool,
}

impl Recipe {
    fn value(&self, index: usize, seed: u64) -> f32 {
        let n_columns = if self.shape.len() == 1 { 1 } else { self.shape[1] };
        if self.first_row_zero && index < n_columns {
            return 0.0;
        }
        match self.first_column {
            Some(value) if index.is_multiple_of(n_columns) => value,
            _ => self.scale * nearly_normal(seed, index),
        }
    }
}

impl TensorSource for Synthetic {
    fn tensors(&self) -> Vec<TensorInfo> {
        let info = |name: &String| {
            let shape = self.recipe(name)?.shape;
            Some(TensorInfo { name: name.clone(), dtype: FileDtype::Weights(self.format), shape })
        };
        self.roles.keys().filter_map(info).collect()
    }

    fn read(&self, name: &str, offset_bytes: u64, out: &mut [u8]) -> powerinfer_core::Result<()> {
        let missing = || CoreError::MissingTensor { path: self.path(name), name: name.to_owned() };
        let recipe = self.recipe(name).ok_or_else(missing)?;
        let value_bytes = self.format.row_bytes(1)?;
        let size = (recipe.shape.iter().product::<usize>() * value_bytes) as u64;
        let len = out.len() as u64;
        if offset_bytes.checked_add(len).is_none_or(|end| end > size) {
            let (path, name) = (self.path(name), name.to_owned());
            return Err(CoreError::TensorRange { path, name, offset: offset_bytes, len, size });
        }
        let first = usize::try_from(offset_bytes).unwrap_or(usize::MAX) / value_bytes;
        let seed = name.bytes().fold(self.seed, |seed, byte| mix(seed ^ u64::from(byte)));
        par_fill(out, PIECE_VALUES * value_bytes, |piece, out| {
            let first = first + piece * PIECE_VALUES;
            let values: Vec<f32> = (0..out.len() / value_bytes)
                .map(|index| recipe.value(first + index, seed))
                .collect();
            self.format.encode(&values, out);
        });
        Ok(())
    }

    fn path(&self, _name: &str) -> PathBuf {
        format!("synthetic {}", self.shape).into()
    }
}

/// A sum of four uniform numbers, mean 0 and variance 1: sums of many of them are normal, and it
/// costs a billion of them few seconds.
pub(crate) fn nearly_normal(seed: u64, index: usize) -> f32 {
    let bits = mix(seed.wrapping_add((index as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15)));
    let sum: u32 = (0..4).map(|word| (bits >> (16 * word)) as u32 & 0xFFFF).sum();
    // four uniform numbers of width 65536 have standard deviation 65536 / √3
    (sum as f32 - 131_070.0) * (1.732_050_8 / 65_536.0)
}

/// SplitMix64's mixing function.
fn mix(value: u64) -> u64 {
    let value = (value ^ (value >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    value ^ (value >> 31)
}

/// The number that a standard normal one stays below with probability `p`, by bisection.
pub(crate) fn normal_quantile(p: f64) -> f64 {
    let (mut low, mut high) = (-6.0, 6.0);
    for _ in 0..60 {
        let middle = (low + high) / 2.0;
        if normal_probability(middle) < p { low = middle } else { high = middle }
    }
    (low + high) / 2.0
}

/// Probability that a standard normal number stays below `x`, by the series of the error function.
fn normal_probability(x: f64) -> f64 {
    let (mut term, mut sum) = (x, x);
    for n in 1..200 {
        term *= x * x / (2 * n + 1) as f64;
        sum += term;
    }
    0.5 + sum * (-x * x / 2.0).exp() / std::f64::consts::TAU.sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;
    use powerinfer_core::Step;

    #[test]
    fn quantiles_are_those_of_the_normal_distribution() {
        for (p, x) in [(0.5, 0.0), (0.9, 1.281_551_6), (0.975, 1.959_964), (0.001, -3.090_232)] {
            assert!((normal_quantile(p) - x).abs() < 1e-5, "{p}");
        }
    }

    #[test]
    fn observed_density_is_within_a_tenth_of_the_asked_one_in_every_layer() {
        for density in [0.05, 0.1, 0.5, 0.9] {
            let synthetic = Synthetic::new(SyntheticShape::Tiny, density, 3).unwrap();
            let model = synthetic.load(&LoadOptions::default()).unwrap();
            let (mut cache, mut step) = (model.new_cache(), Step::default());
            let tokens: Vec<u32> = (0..200).map(|i| i * 19 % 4096).collect();
            model.forward(&tokens, &mut cache, &mut step).unwrap();
            for (layer, found) in step.stats.density_per_layer().into_iter().enumerate() {
                assert!((found / density - 1.0).abs() < 0.1, "layer {layer}: {found} {density}");
            }
        }
    }

    #[test]
    fn what_is_written_is_what_is_loaded() {
        let dir = tempfile::tempdir().unwrap();
        let synthetic = Synthetic::new(SyntheticShape::Tiny, 0.1, 5).unwrap();
        synthetic.write(dir.path(), WeightFormat::F16).unwrap();
        let made = synthetic.load(&LoadOptions::default()).unwrap();
        let read = crate::load(dir.path(), &LoadOptions::default()).unwrap();
        let logits = |model: &dyn CausalLm| {
            let (mut cache, mut step) = (model.new_cache(), Step::default());
            model.forward(&[1, 2, 3], &mut cache, &mut step).unwrap();
            step.logits
        };
        assert_eq!(logits(made.as_ref()), logits(read.as_ref()));
    }

    #[test]
    fn densities_and_names_that_cannot_be_are_refused() {
        for density in [0.0, 1.0, -1.0, f64::NAN] {
            let made = Synthetic::new(SyntheticShape::Tiny, density, 1);
            assert!(matches!(made, Err(Error::Density { .. })));
        }
        assert!(matches!("opt-1t".parse::<SyntheticShape>(), Err(Error::UnknownSynthetic { .. })));
        assert_eq!("opt-1.3b".parse::<SyntheticShape>().unwrap(), SyntheticShape::Opt1b);
        assert_eq!("llama-1b".parse::<SyntheticShape>().unwrap(), SyntheticShape::Llama1b);
    }
}
