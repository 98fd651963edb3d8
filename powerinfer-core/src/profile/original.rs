//! Statistics of the original: a folder `activation` with a file `activation_N.pt` a layer, each one
//! tensor of a number a neuron, larger is hotter.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use super::{ActivationProfile, ProfiledModel};
use crate::error::{Error, Result};
use crate::weights::SmallTensors;

impl ActivationProfile {
    /// Reads the original's `activation` folder. Layers are those that the files' numbers say: the
    /// original itself sorted the names as texts, so that layer 2 got the statistics of layer 10.
    ///
    /// Such files say neither how many tokens were counted nor what was counted. Whole numbers are
    /// taken as they are; others are scaled so that the largest of all becomes a million, which
    /// keeps their order. [`n_tokens`](Self::n_tokens) is 0.
    ///
    /// # Errors
    /// [`Error::ProfileFolder`] if there is no such file or a layer between two has none,
    /// [`Error::ProfileValue`] for a number that is negative or not finite,
    /// [`Error::TensorShape`] for layers of different lengths, and the errors of a PyTorch file.
    pub fn from_activation_folder(dir: &Path) -> Result<Self> {
        let files = files(dir)?;
        let mut layers: Vec<Vec<f64>> = Vec::with_capacity(files.len());
        for path in files.values() {
            let values = SmallTensors::open_pytorch(path)?.only_vector()?;
            if let Some(first) = layers.first().filter(|first| first.len() != values.len()) {
                let (name, expected, found) =
                    ("activation".to_owned(), vec![first.len()], vec![values.len()]);
                return Err(Error::TensorShape { path: path.clone(), name, expected, found });
            }
            if let Some(bad) = values.iter().find(|value| !value.is_finite() || **value < 0.0) {
                let (path, found) = (path.clone(), bad.to_string());
                return Err(Error::ProfileValue { path, what: "activation", found });
            }
            layers.push(values);
        }
        let (n_layers, d_ff) = (layers.len(), layers.first().map_or(0, Vec::len));
        let all = layers.into_iter().flatten();
        let values: Vec<f64> = all.collect();
        let largest = values.iter().copied().fold(0.0, f64::max);
        // the mantissa of f64
        let whole = values.iter().all(|value| value.fract() == 0.0 && *value <= 2f64.powi(53));
        let scale = if whole || largest == 0.0 { 1.0 } else { 1e6 / largest };
        let counts = values.iter().map(|value| (value * scale).round() as u64).collect();
        let model = ProfiledModel { n_layers, d_ff, ..ProfiledModel::default() };
        Ok(Self { model, counts, n_tokens: 0, impact: None })
    }
}

/// The file of each layer.
fn files(dir: &Path) -> Result<BTreeMap<usize, PathBuf>> {
    let io = |source| Error::Io { path: dir.to_owned(), source };
    let mut files = BTreeMap::new();
    for entry in fs::read_dir(dir).map_err(io)? {
        let path = entry.map_err(io)?.path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let number = name.strip_prefix("activation_").and_then(|rest| rest.strip_suffix(".pt"));
        let plain = number.filter(|number| number.bytes().all(|byte| byte.is_ascii_digit()));
        if let Some(layer) = plain.and_then(|number| number.parse().ok())
            && let Some(other) = files.insert(layer, path.clone())
        {
            let what = format!("{} and {}", other.display(), path.display());
            return Err(Error::ProfileFolder { path: dir.to_owned(), layer, what });
        }
    }
    let missing = (0..files.len().max(1)).find(|layer| !files.contains_key(layer));
    match missing {
        Some(layer) => {
            let what = "no file".to_owned();
            Err(Error::ProfileFolder { path: dir.to_owned(), layer, what })
        }
        None => Ok(files),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use testing::pytorch::{Storage, write_tensor};

    fn folder(layers: &[(&str, Storage<'_>)]) -> (tempfile::TempDir, Result<ActivationProfile>) {
        let dir = tempfile::tempdir().unwrap();
        for (name, values) in layers {
            write_tensor(&dir.path().join(name), values.clone());
        }
        let read = ActivationProfile::from_activation_folder(dir.path());
        (dir, read)
    }

    #[test]
    fn layers_are_ordered_by_number_and_not_by_name() {
        let values: Vec<[i64; 2]> = (0..12).map(|layer| [layer, 100 - layer]).collect();
        let names: Vec<String> = (0..12).map(|layer| format!("activation_{layer}.pt")).collect();
        let layers: Vec<_> =
            names.iter().zip(&values).map(|(name, v)| (name.as_str(), Storage::I64(v))).collect();
        let (_dir, profile) = folder(&layers);
        let profile = profile.unwrap();
        assert_eq!(profile.model().n_layers, 12);
        for layer in 0..12 {
            assert_eq!(profile.counts(layer), [layer as u64, 100 - layer as u64]);
        }
    }

    #[test]
    fn frequencies_keep_their_order_over_all_layers() {
        let (_dir, profile) = folder(&[
            ("activation_0.pt", Storage::F32(&[0.25, 0.0, 0.001])),
            ("activation_1.pt", Storage::F32(&[0.5, 0.125, 1e-6])),
        ]);
        let profile = profile.unwrap();
        assert_eq!(profile.counts(0), [500_000, 0, 2000]);
        assert_eq!(profile.counts(1), [1_000_000, 250_000, 2]);
    }

    #[test]
    fn what_is_missing_or_does_not_fit_is_named() {
        let (dir, _) = folder(&[]);
        let empty = ActivationProfile::from_activation_folder(dir.path());
        assert!(matches!(empty, Err(Error::ProfileFolder { layer: 0, .. })));
        let ones = Storage::F32(&[1.0, 1.0]);
        let (_dir, gap) =
            folder(&[("activation_0.pt", ones.clone()), ("activation_2.pt", ones.clone())]);
        assert!(matches!(gap, Err(Error::ProfileFolder { layer: 1, .. })));
        let (_dir, twice) =
            folder(&[("activation_0.pt", ones.clone()), ("activation_00.pt", ones.clone())]);
        assert!(matches!(twice, Err(Error::ProfileFolder { layer: 0, .. })));
        let (_dir, lengths) =
            folder(&[("activation_0.pt", ones), ("activation_1.pt", Storage::F32(&[1.0]))]);
        assert!(matches!(lengths, Err(Error::TensorShape { .. })));
        for bad in [-1.0, f32::NAN, f32::INFINITY] {
            let (_dir, read) = folder(&[("activation_0.pt", Storage::F32(&[bad]))]);
            assert!(matches!(read, Err(Error::ProfileValue { .. })));
        }
    }
}
