//! Models of real shapes with random weights: they show speed, never quality.
//!
//! Their gates fire for about a chosen share of the neurons, a scattered set that changes with
//! every token. The first value of the residual stream is a constant: every embedding holds it and
//! no projection writes to it, so every normed input contains it. Gate rows are random but for
//! their first value, a negative multiple of what makes a random product exceed the constant with
//! the chosen probability. What attention and feed-forward networks add to the stream is kept
//! small, so that the share is the same in every layer.
//!
//! With a [`skew`](Synthetic::with_skew) each gate row has a multiple of its own, so that some neurons fire
//! often and most seldom, as in trained models; which ones is scattered over a layer and another set in each.

mod rates;
mod recipe;
mod repeated;
mod shape;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use powerinfer_core::{
    ActivationProfile, CausalLm, Error as CoreError, FileDtype, ModelConfig, ModelSizes, Skew,
    SplitMix64, TensorInfo, TensorSource, WeightStore, write_safetensors,
};
use powerinfer_ops::{WeightFormat, par_fill};

use crate::error::{Error, Result};
use crate::gguf_names::by_neuron;
use crate::load::{LoadOptions, build};
use crate::{registry, sizes};
use rates::Rates;
pub(crate) use rates::normal_quantile;
pub(crate) use recipe::nearly_normal;
use recipe::{First, Recipe};
use repeated::Repeated;
pub use shape::SyntheticShape;
use shape::{Role, Sizes};

/// What attention and feed-forward networks add to the stream, relative to an embedding.
const ADDED: f32 = 0.02;
/// Values that are generated at once by one thread.
const PIECE_VALUES: usize = 1 << 16;

/// A share of the neurons that makes 80 % of the activations at which all fire alike.
const NO_SKEW: f64 = 0.8;

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
    hot_share_80: f64,
    /// `None`: all neurons fire alike.
    rates: Option<Arc<Rates>>,
    /// Whether down projections are given a neuron a row, as in files of GGUF: the same values, and
    /// nothing to turn round.
    by_neuron: bool,
    /// `None`: every layer has values of its own.
    repeated: Option<Repeated>,
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
        Ok(Self {
            shape,
            density,
            seed,
            format: WeightFormat::F16,
            roles,
            hot_share_80: NO_SKEW,
            rates: None,
            by_neuron: false,
            repeated: None,
        })
    }

    /// Lets a share of `hot_share_80` of the neurons make 80 % of the activations, the hottest most and the others
    /// ever less, as [`Skew`] has it. Near 0.8 all neurons fire alike, as they do without this.
    ///
    /// # Errors
    /// [`Error::Skew`] if the share does not lie between 0.001 and 0.8, or if it cannot be had at this
    /// density: no neuron fires more often than always.
    ///
    /// # Examples
    /// ```
    /// use powerinfer_models::synthetic::{Synthetic, SyntheticShape};
    /// let synthetic = Synthetic::new(SyntheticShape::Tiny, 0.03, 1)?.with_skew(0.17)?;
    /// let profile = synthetic.profile()?;
    /// assert!((profile.hot_share(0, 0.8) - 0.17).abs() < 0.01);
    /// # Ok::<(), powerinfer_models::Error>(())
    /// ```
    pub fn with_skew(mut self, hot_share_80: f64) -> Result<Self> {
        let refused = Err(Error::Skew { found: hot_share_80, density: self.density });
        if !(0.001..=NO_SKEW).contains(&hot_share_80) {
            return refused;
        }
        self.hot_share_80 = hot_share_80;
        let profile = self.profile()?;
        let is_skewed = (profile.hot_share(0, 0.8) - hot_share_80).abs() < 0.02;
        let is_dense = (profile.density(0) / self.density - 1.0).abs() < 0.02;
        if !is_skewed || !is_dense {
            return refused;
        }
        self.rates = Some(Arc::new(Rates::of(&profile)));
        Ok(self)
    }

    /// Makes the values of `n_layers` layers only, which the others repeat, so that a large model is there in
    /// the time that copying it takes. Every layer still has memory of its own and neurons that fire as
    /// often as [its own](Self::profile) do: speeds are those of a model without this. What was made is kept
    /// until the last clone of this is gone.
    #[must_use]
    pub fn with_distinct_layers(mut self, n_layers: usize) -> Self {
        self.repeated = Some(Repeated::new(n_layers));
        self
    }

    /// How often its neurons fire, known without running it: what a plan is made from.
    ///
    /// # Errors
    /// As [`sizes`](Self::sizes).
    pub fn profile(&self) -> Result<ActivationProfile> {
        let skew = Skew { density: self.density, hot_share_80: self.hot_share_80 };
        Ok(skew.profile(&self.sizes(&LoadOptions::default())?.model)?)
    }

    /// Makes the model, in the format of the options or else in f16. Quantised weights are made
    /// in f16 and quantised as those of a file would be. Without a profile in the options its
    /// [own](Self::profile) says which neurons are hot.
    ///
    /// # Errors
    /// [`Error::NotSparse`] never, memory that is not to be had, and a placement that does not fit.
    pub fn load(&self, options: &LoadOptions) -> Result<Box<dyn CausalLm>> {
        let mut source = self.clone();
        source.format = match options.dtype {
            Some(format) if format.block_len() == 1 => format,
            _ => WeightFormat::F16,
        };
        source.by_neuron = true;
        let mut options = options.clone();
        if options.profile.is_none() && options.fast_device.is_some() {
            options.profile = Some(self.profile()?);
        }
        build(&self.config()?, WeightStore::from_source(Box::new(source)), &options)
    }

    /// What its parts take in memory, without making it, and which model it is.
    ///
    /// # Errors
    /// As [`load`](Self::load), as far as shapes tell.
    pub fn sizes(&self, options: &LoadOptions) -> Result<ModelSizes> {
        let source = Self { by_neuron: true, ..self.clone() };
        let store = WeightStore::from_source(Box::new(source));
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
    fn recipe(&self, name: &str) -> Option<Recipe<'_>> {
        let Sizes { d_model, vocab_size, .. } = self.shape.sizes();
        let plain = 1.0 / (d_model as f32).sqrt();
        let reading = |n_rows, scale| Recipe {
            shape: vec![n_rows, d_model],
            scale,
            first_column: First::Same(0.0),
            first_row_zero: false,
            turned: false,
        };
        let same = |len, value| Recipe {
            shape: vec![len],
            scale: 0.0,
            first_column: First::Same(value),
            first_row_zero: false,
            turned: false,
        };
        Some(match *self.roles.get(name)? {
            Role::Embedding => {
                let constant = (d_model as f32).sqrt();
                Recipe { first_column: First::Same(constant), ..reading(vocab_size, 1.0) }
            }
            Role::Positions { n_rows } => reading(n_rows, ADDED),
            Role::Reads { n_rows } => reading(n_rows, plain),
            Role::Fires { n_rows } => {
                // the constant is as long as the rest of the stream together
                let first_column = match &self.rates {
                    Some(rates) => First::Of(rates.thresholds(layer_of(name)?), -plain),
                    None => First::Same(-normal_quantile(1.0 - self.density) as f32 * plain),
                };
                Recipe { first_column, ..reading(n_rows, plain) }
            }
            // what writes to the stream leaves the constant alone
            Role::Writes { n_columns, sparse } => {
                let share = if sparse { self.density } else { 1.0 };
                Recipe {
                    shape: vec![d_model, n_columns],
                    scale: ADDED / ((n_columns as f64 * share) as f32).sqrt(),
                    first_column: First::Random,
                    first_row_zero: true,
                    turned: false,
                }
            }
            Role::Ones => same(d_model, 1.0),
            Role::Zeros { len } => same(len, 0.0),
        })
    }

    /// The name that a tensor is given under, and how its values are made.
    fn given<'a>(&'a self, name: &'a str) -> Option<(String, Recipe<'a>)> {
        let mut recipe = self.recipe(name)?;
        let down = matches!(self.roles.get(name), Some(Role::Writes { sparse: true, .. }));
        if self.by_neuron && down {
            recipe.shape.reverse();
            recipe.turned = true;
            return Some((by_neuron_name(name), recipe));
        }
        Some((name.to_owned(), recipe))
    }

    /// The seed of a tensor's values.
    fn seed_of(&self, own_name: &str) -> u64 {
        own_name.bytes().fold(self.seed, |seed, byte| SplitMix64::mix(seed ^ u64::from(byte)))
    }

    /// Makes the values from the one at `first` on.
    fn fill(&self, recipe: &Recipe<'_>, seed: u64, first: usize, out: &mut [u8]) {
        // formats of single values, which `load` and `write` choose
        let value_bytes = self.format.block_bytes();
        par_fill(out, PIECE_VALUES * value_bytes, |piece, out| {
            let first = first + piece * PIECE_VALUES;
            let values: Vec<f32> = (0..out.len() / value_bytes)
                .map(|index| recipe.value(first + index, seed))
                .collect();
            self.format.encode(&values, out);
        });
    }

    /// The name in `roles` of a tensor that is given as `name`.
    fn own_name(&self, name: &str) -> String {
        name.replace(&by_neuron(""), "")
    }
}

/// The layer that a name tells.
fn layer_of(name: &str) -> Option<usize> {
    name.split('.').find_map(|part| part.parse().ok())
}

/// The name of a down projection that has a neuron a row.
fn by_neuron_name(name: &str) -> String {
    let prefix = name.strip_suffix(".weight").unwrap_or(name);
    format!("{}.weight", by_neuron(prefix))
}

impl TensorSource for Synthetic {
    fn tensors(&self) -> Vec<TensorInfo> {
        let info = |name: &String| {
            let (name, Recipe { shape, .. }) = self.given(name)?;
            Some(TensorInfo { name, dtype: FileDtype::Weights(self.format), shape })
        };
        self.roles.keys().filter_map(info).collect()
    }

    fn read(&self, name: &str, offset_bytes: u64, out: &mut [u8]) -> powerinfer_core::Result<()> {
        let missing = || CoreError::MissingTensor { path: self.path(name), name: name.to_owned() };
        let own_name = self.own_name(name);
        let given = self.given(&own_name).filter(|(given, _)| given == name);
        let (_, recipe) = given.ok_or_else(missing)?;
        let value_bytes = self.format.row_bytes(1)?;
        let size = (recipe.shape.iter().product::<usize>() * value_bytes) as u64;
        let len = out.len() as u64;
        if offset_bytes.checked_add(len).is_none_or(|end| end > size) {
            let (path, name) = (self.path(name), name.to_owned());
            return Err(CoreError::TensorRange { path, name, offset: offset_bytes, len, size });
        }
        let first = usize::try_from(offset_bytes).unwrap_or(usize::MAX) / value_bytes;
        let original = self
            .repeated
            .as_ref()
            .filter(|_| recipe.shape.len() > 1)
            .and_then(|repeated| Some((repeated, repeated.original(&own_name)?)));
        let Some((repeated, original)) = original else {
            self.fill(&recipe, self.seed_of(&own_name), first, out);
            return Ok(());
        };
        let key = format!("{original} {} {}", self.format, recipe.turned);
        let offset = first * value_bytes;
        repeated.copy(key, (offset, &mut *out), || {
            let mut made = vec![0; recipe.shape.iter().product::<usize>() * value_bytes];
            self.fill(&recipe, self.seed_of(&original), 0, &mut made);
            made
        });
        if let First::Of(values, factor) = recipe.first_column {
            let n_columns = recipe.shape[1];
            let end = first + out.len() / value_bytes;
            let rows = first.div_ceil(n_columns)..end.div_ceil(n_columns);
            for (row, value) in rows.clone().zip(&values[rows]) {
                let at = (row * n_columns - first) * value_bytes;
                self.format.encode(&[value * factor], &mut out[at..at + value_bytes]);
            }
        }
        Ok(())
    }

    fn path(&self, _name: &str) -> PathBuf {
        format!("synthetic {}", self.shape).into()
    }
}

#[cfg(test)]
mod tests;
