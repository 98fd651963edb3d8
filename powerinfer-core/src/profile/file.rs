//! Profiles as safetensors files: `counts` I64 `[n_layers, d_ff]`, `tokens` I64 `[1]`, optionally
//! `impact` F32 `[n_layers, d_ff]`, and what the model is in the header. I32 counts are read, too.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use safetensors::tensor::TensorView;
use safetensors::{Dtype, serialize};
use serde_json::json;

use super::{ActivationProfile, ProfiledModel};
use crate::allocation::try_zeroed;
use crate::error::{Error, Result};
use crate::json;
use crate::replace_file::replace_file;
use crate::weights::SmallTensors;

/// The entry of the header that says what the model is, as JSON.
const MODEL: &str = "powerinfer_profile";

impl ActivationProfile {
    /// Reads a profile.
    ///
    /// # Errors
    /// [`Error::Io`] and the errors of a broken header; [`Error::MissingTensor`],
    /// [`Error::TensorShape`], [`Error::TensorDtype`], [`Error::LeftoverTensors`];
    /// [`Error::ProfileValue`] for a count that is negative or above the number of tokens, and for
    /// an impact that is negative or no number.
    pub fn load(path: &Path) -> Result<Self> {
        let file = SmallTensors::open_safetensors(path)?;
        file.only(&["counts", "tokens", "impact"])?;
        let shape = file.shape("counts")?;
        let [n_layers, d_ff] = shape[..] else {
            let (name, expected) = ("counts".to_owned(), vec![0, 0]);
            return Err(Error::TensorShape { path: path.to_owned(), name, expected, found: shape });
        };
        let counts = file.whole_numbers("counts", &[n_layers, d_ff])?;
        let tokens = file.whole_numbers("tokens", &[1])?[0];
        let impact = match file.contains("impact") {
            true => Some(file.numbers("impact", &[n_layers, d_ff])?),
            false => None,
        };
        let bad = |what: &'static str, found: String| {
            Err(Error::ProfileValue { path: path.to_owned(), what, found })
        };
        let n_tokens = match u64::try_from(tokens) {
            Ok(n_tokens) => n_tokens,
            Err(_) => return bad("tokens", tokens.to_string()),
        };
        if let Some(count) = counts.iter().find(|&&count| count < 0 || count > tokens) {
            return bad("counts", count.to_string());
        }
        let not_an_impact = |impact: &&f32| !impact.is_finite() || **impact < 0.0;
        if let Some(impact) = impact.iter().flatten().find(not_an_impact) {
            return bad("impact", impact.to_string());
        }
        // checked above: none is negative
        let counts = counts.into_iter().map(|count| count.unsigned_abs()).collect();
        let said = said_model(path, file.metadata().get(MODEL))?;
        let model = ProfiledModel { n_layers, d_ff, ..said };
        Ok(Self { model, counts, n_tokens, impact })
    }

    /// Writes the profile, replacing what is at `path` only once all is written.
    ///
    /// # Errors
    /// [`Error::Write`], [`Error::Allocation`].
    pub fn save(&self, path: &Path) -> Result<()> {
        let ProfiledModel { n_layers, d_ff, .. } = self.model;
        let mut counts: Vec<u8> = try_zeroed("the bytes of a profile", 8 * self.counts.len())?;
        for (bytes, count) in counts.as_chunks_mut::<8>().0.iter_mut().zip(&self.counts) {
            *bytes = count.to_le_bytes();
        }
        let tokens = self.n_tokens.to_le_bytes();
        let impact: Option<Vec<u8>> =
            self.impact.as_ref().map(|all| all.iter().flat_map(|x| x.to_le_bytes()).collect());
        let broken = |source| Error::Safetensors { path: path.to_owned(), source };
        let view = |dtype, shape, bytes| TensorView::new(dtype, shape, bytes).map_err(broken);
        let mut tensors = vec![
            ("counts", view(Dtype::I64, vec![n_layers, d_ff], &counts)?),
            ("tokens", view(Dtype::I64, vec![1], &tokens)?),
        ];
        if let Some(impact) = &impact {
            tensors.push(("impact", view(Dtype::F32, vec![n_layers, d_ff], impact)?));
        }
        let ProfiledModel { d_model, architecture, activation, .. } = &self.model;
        let model =
            json!({"activation": activation, "architecture": architecture, "d_model": d_model});
        let info = HashMap::from([(MODEL.to_owned(), model.to_string())]);
        let bytes = serialize(tensors, Some(info)).map_err(broken)?;
        let failed = |source| Error::Write { path: path.to_owned(), source };
        replace_file(path, |new| fs::write(new, bytes).map_err(failed))
    }
}

/// What the header says; nothing is said by files of others.
fn said_model(path: &Path, text: Option<&String>) -> Result<ProfiledModel> {
    let mut model = ProfiledModel::default();
    let Some(text) = text else { return Ok(model) };
    let map = json::parse_object(path, text.as_bytes())?;
    let field = |name: &str| map.get(name).and_then(|value| value.as_str()).unwrap_or_default();
    model.architecture = field("architecture").to_owned();
    model.activation = field("activation").to_owned();
    let width = map.get("d_model").and_then(serde_json::Value::as_u64).unwrap_or(0);
    model.d_model = usize::try_from(width).unwrap_or(usize::MAX);
    Ok(model)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::ModelInfo;

    fn profile(with_impact: bool) -> ActivationProfile {
        let mut info = ModelInfo::default();
        (info.n_layers, info.d_ff, info.d_model) = (2, 3, 8);
        info.architecture = "opt".to_owned();
        info.activation = "relu".to_owned();
        let mut profile = ActivationProfile::new(&info, with_impact).unwrap();
        profile.record(0, &[1.0, 0.0, 2.0, 0.5, 0.0, 0.0], &[1.0, 2.0, 3.0]).unwrap();
        profile.add_tokens(2);
        profile
    }

    #[test]
    fn what_is_saved_is_loaded() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("p.safetensors");
        for with_impact in [false, true] {
            let profile = profile(with_impact);
            profile.save(&path).unwrap();
            assert_eq!(ActivationProfile::load(&path).unwrap(), profile);
            let bytes = fs::read(&path).unwrap();
            profile.save(&path).unwrap();
            assert_eq!(fs::read(&path).unwrap(), bytes, "the same profile is the same file");
        }
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "nothing is left beside it");
    }

    fn written(tensors: Vec<(&str, Dtype, Vec<usize>, Vec<u8>)>) -> Result<ActivationProfile> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("p.safetensors");
        let views = tensors.iter().map(|(name, dtype, shape, bytes)| {
            (*name, TensorView::new(*dtype, shape.clone(), bytes).unwrap())
        });
        fs::write(&path, serialize(views, None).unwrap()).unwrap();
        ActivationProfile::load(&path)
    }

    fn i32s(values: &[i32]) -> Vec<u8> {
        values.iter().flat_map(|value| value.to_le_bytes()).collect()
    }

    #[test]
    fn i32_counts_without_a_model_are_read() {
        let profile = written(vec![
            ("counts", Dtype::I32, vec![1, 3], i32s(&[4, 0, 5])),
            ("tokens", Dtype::I32, vec![1], i32s(&[5])),
        ])
        .unwrap();
        assert_eq!((profile.counts(0), profile.n_tokens()), (&[4, 0, 5][..], 5));
        assert_eq!(profile.model().architecture, "");
    }

    #[test]
    fn each_thing_that_can_be_wrong_has_its_error() {
        let counts = |values: &[i32]| ("counts", Dtype::I32, vec![1, values.len()], i32s(values));
        let tokens = |n| ("tokens", Dtype::I32, vec![1], i32s(&[n]));
        let impact = |x: f32| ("impact", Dtype::F32, vec![1, 1], x.to_le_bytes().to_vec());
        let value = |tensors, what: &str| {
            let error = written(tensors).unwrap_err();
            assert!(matches!(error, Error::ProfileValue { what: named, .. } if named == what));
        };
        value(vec![counts(&[1, 6]), tokens(5)], "counts");
        value(vec![counts(&[-1]), tokens(5)], "counts");
        value(vec![counts(&[0]), tokens(-5)], "tokens");
        value(vec![counts(&[0]), tokens(1), impact(f32::NAN)], "impact");
        value(vec![counts(&[0]), tokens(1), impact(-1.0)], "impact");
        assert!(
            matches!(written(vec![tokens(5)]), Err(Error::MissingTensor { name, .. }) if name == "counts")
        );
        assert!(
            matches!(written(vec![counts(&[1])]), Err(Error::MissingTensor { name, .. }) if name == "tokens")
        );
        let two = ("tokens", Dtype::I32, vec![2], i32s(&[1, 1]));
        assert!(matches!(written(vec![counts(&[1]), two]), Err(Error::TensorShape { .. })));
        let flat = ("counts", Dtype::I32, vec![1], i32s(&[1]));
        assert!(matches!(written(vec![flat, tokens(1)]), Err(Error::TensorShape { .. })));
        let floats = ("counts", Dtype::F32, vec![1, 1], vec![0; 4]);
        assert!(matches!(written(vec![floats, tokens(1)]), Err(Error::TensorDtype { .. })));
        let other = ("other", Dtype::I32, vec![1], i32s(&[1]));
        let error = written(vec![counts(&[1]), tokens(1), other]).unwrap_err();
        assert!(matches!(error, Error::LeftoverTensors { names, .. } if names == ["other"]));
    }
}
