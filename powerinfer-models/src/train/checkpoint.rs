//! The state of a fitting: what it goes on from.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use powerinfer_core::{
    Error as CoreError, FileDtype, Result as CoreResult, TensorInfo, TensorSource, WeightStore,
    replace_file, write_safetensors_with,
};
use powerinfer_ops::WeightFormat;
use powerinfer_predictor::{LayerFit, MlpWeights, PredictionTarget};

use super::options::Identity;
use super::watch::SurveyLayer;
use crate::error::{Error, Result};

/// A fitting after some pieces of the text.
#[derive(Debug)]
pub(super) struct Checkpoint {
    pub(super) fits: Vec<LayerFit>,
    /// The weights that were best when they were measured.
    pub(super) best: Vec<MlpWeights>,
    /// Neurons that these list for each that fires.
    pub(super) listed_per_firing: f64,
    /// Measurements since then.
    pub(super) n_stale: usize,
    pub(super) n_pieces: usize,
    /// What run it is.
    identity: Identity,
}

impl Checkpoint {
    pub(super) fn new(fits: Vec<LayerFit>, identity: Identity) -> Self {
        let best = fits.iter().map(|fit| fit.weights().clone()).collect();
        let listed_per_firing = f64::INFINITY;
        Self { fits, best, listed_per_firing, n_stale: 0, n_pieces: 0, identity }
    }

    /// Measures the weights on what is held out, and keeps them if they are better than what was.
    pub(super) fn measure(
        &mut self,
        surveys: &[SurveyLayer],
        target: &PredictionTarget,
    ) -> Result<()> {
        let (mut picked, mut fired) = (0, 0);
        for (fit, survey) in self.fits.iter().zip(surveys) {
            let mut weights = fit.weights().rounded(WeightFormat::F16)?;
            let counts = weights.set_threshold(&survey.held_out, target)?;
            picked += counts.picked;
            fired += counts.fired;
        }
        let listed = picked as f64 / (fired as f64).max(1.0);
        // a thousandth is no progress
        self.n_stale = if listed < 0.999 * self.listed_per_firing { 0 } else { self.n_stale + 1 };
        if listed < self.listed_per_firing {
            self.listed_per_firing = listed;
            self.best = self.fits.iter().map(|fit| fit.weights().clone()).collect();
        }
        Ok(())
    }

    /// Writes the state, replacing what is at `path` only once all is written.
    pub(super) fn save(&self, path: &Path) -> Result<()> {
        let n_steps = self.fits.first().map_or(0, LayerFit::n_steps);
        let mut entries = BTreeMap::from([
            ("n_pieces".to_owned(), self.n_pieces.to_string()),
            ("n_stale".to_owned(), self.n_stale.to_string()),
            ("n_steps".to_owned(), n_steps.to_string()),
            // as bits: a number of digits might not come back the same
            ("listed".to_owned(), format!("{:016x}", self.listed_per_firing.to_bits())),
        ]);
        entries.extend(self.identity.iter().map(|(name, value)| (of_run(name), value.clone())));
        let state = State { path, parts: self.parts() };
        Ok(replace_file(path, |new| write_safetensors_with(new, &state, &entries))?)
    }

    /// Fails unless the file at `path` is of the same run.
    pub(super) fn check_run(path: &Path, identity: &Identity) -> Result<()> {
        let (_, entries) = WeightStore::open_safetensors_file(path)?;
        let differs = |(name, expected): &(&str, String)| {
            let found = entries.get(&of_run(name)).map(String::as_str);
            let found = Some(found.unwrap_or("nothing")).filter(|found| found != expected);
            found.map(|found| format!("{name}: expected {expected}, found {found}"))
        };
        let differences: Vec<String> = identity.iter().filter_map(differs).collect();
        if differences.is_empty() {
            return Ok(());
        }
        Err(Error::OtherRun { path: path.to_owned(), differences })
    }

    /// Goes on from a file of the same run.
    pub(super) fn load(&mut self, path: &Path) -> Result<()> {
        Self::check_run(path, &self.identity)?;
        let (mut store, entries) = WeightStore::open_safetensors_file(path)?;
        let entry = |name: &'static str| entries.get(name).cloned().unwrap_or_default();
        let refuse = |field: &'static str, expected: &str, found: String| {
            let (path, expected) = (path.to_owned(), expected.to_owned());
            Error::from(CoreError::PredictorField { path, field, expected, found })
        };
        let number = |name: &'static str| {
            let text = entry(name);
            text.parse::<u64>().map_err(|_| refuse(name, "a whole number", text))
        };
        let n_steps = number("n_steps")?;
        let count = |name| {
            let n = number(name)?;
            usize::try_from(n).map_err(|_| refuse(name, "a small number", n.to_string()))
        };
        (self.n_pieces, self.n_stale) = (count("n_pieces")?, count("n_stale")?);
        let listed = u64::from_str_radix(&entry("listed"), 16);
        let listed = listed.map_err(|_| refuse("listed", "bits", entry("listed")))?;
        self.listed_per_firing = f64::from_bits(listed);
        for (layer, (fit, best)) in self.fits.iter_mut().zip(&mut self.best).enumerate() {
            let mut read = |name: String, values: &mut [f32]| -> Result<()> {
                values.copy_from_slice(&store.vector(&name, values.len())?);
                Ok(())
            };
            fit.restore(n_steps, |name, values| read(format!("fit.{layer}.{name}"), values))?;
            for (name, values) in best_parts(best) {
                read(format!("best.{layer}.{name}"), values)?;
            }
        }
        Ok(store.finish(&|_| false).map(|_| ())?)
    }

    /// Everything by name.
    fn parts(&self) -> Vec<(String, &[f32])> {
        let mut parts = Vec::new();
        for (layer, (fit, best)) in self.fits.iter().zip(&self.best).enumerate() {
            for (name, values) in fit.state() {
                parts.push((format!("fit.{layer}.{name}"), values));
            }
            let bias = best.bias.as_deref().unwrap_or(&[]);
            for (name, values) in
                [("fc1.weight", best.fc1.as_slice()), ("fc1.bias", bias), ("fc2.weight", &best.fc2)]
            {
                parts.push((format!("best.{layer}.{name}"), values));
            }
        }
        parts.retain(|(_, values)| !values.is_empty());
        parts
    }
}

/// The name of an entry that says what run a file is of.
fn of_run(name: &str) -> String {
    format!("run.{name}")
}

fn best_parts(best: &mut MlpWeights) -> Vec<(&'static str, &mut [f32])> {
    let bias = best.bias.as_deref_mut().unwrap_or(&mut []);
    let mut parts: Vec<(&'static str, &mut [f32])> =
        vec![("fc1.weight", &mut best.fc1), ("fc1.bias", bias), ("fc2.weight", &mut best.fc2)];
    parts.retain(|(_, values)| !values.is_empty());
    parts
}

/// The parts as vectors of f32.
#[derive(Debug)]
struct State<'a> {
    path: &'a Path,
    parts: Vec<(String, &'a [f32])>,
}

impl TensorSource for State<'_> {
    fn tensors(&self) -> Vec<TensorInfo> {
        let info = |(name, values): &(String, &[f32])| TensorInfo {
            name: name.clone(),
            dtype: FileDtype::Weights(WeightFormat::F32),
            shape: vec![values.len()],
        };
        self.parts.iter().map(info).collect()
    }

    fn read(&self, name: &str, offset_bytes: u64, out: &mut [u8]) -> CoreResult<()> {
        let missing = || CoreError::MissingTensor { path: self.path(name), name: name.to_owned() };
        let found = self.parts.iter().find(|(own, _)| own == name).ok_or_else(missing)?;
        let begin = usize::try_from(offset_bytes).unwrap_or(usize::MAX) / size_of::<f32>();
        let values = found.1.get(begin..begin.saturating_add(out.len() / size_of::<f32>()));
        WeightFormat::F32.encode(values.ok_or_else(missing)?, out);
        Ok(())
    }

    fn path(&self, _: &str) -> PathBuf {
        self.path.to_owned()
    }
}
