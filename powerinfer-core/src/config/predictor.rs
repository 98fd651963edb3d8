//! The configuration of the original's predictors.

use std::io;
use std::path::Path;

use super::MAX_BYTES;
use super::field::Fields;
use crate::error::{Error, Result};
use crate::json;
use crate::regular_file::RegularFile;

/// Reads the least scores of neurons that run, one a layer, out of the `config.json` of a folder of
/// predictors: our own field `sparse_thresholds`, or else `sparse_threshold`, the original's, which is one
/// for all layers; 0 if the file or both fields are not there. No other field is looked at.
///
/// # Errors
/// [`Error::Json`], [`Error::Config`] if one is no number or they are not one a layer,
/// [`Error::FileTooLong`], [`Error::Io`].
pub fn read_predictor_thresholds(path: &Path, n_layers: usize) -> Result<Vec<f32>> {
    let file = match RegularFile::open(path) {
        Err(Error::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
            return Ok(vec![0.0; n_layers]);
        }
        opened => opened?,
    };
    let map = json::parse_object(path, &file.read_all("a configuration", MAX_BYTES)?)?;
    let one = Fields::new(path, &map).optional_number("sparse_threshold")?.unwrap_or(0.0);
    let Some(each) = map.get("sparse_thresholds") else { return Ok(vec![one as f32; n_layers]) };
    let numbers: Option<Vec<f32>> = each.as_array().and_then(|values| {
        values.iter().map(|value| value.as_f64().map(|number| number as f32)).collect()
    });
    numbers.filter(|numbers| numbers.len() == n_layers).ok_or_else(|| Error::Config {
        path: path.to_owned(),
        field: "sparse_thresholds".to_owned(),
        expected: format!("{n_layers} numbers, one a layer"),
        found: each.to_string(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thresholds_are_optional_and_numbers() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("config.json");
        assert_eq!(read_predictor_thresholds(&path, 2).unwrap(), [0.0, 0.0]);
        for (text, expected) in [
            ("{}", [0.0, 0.0]),
            (r#"{"sparse_threshold": null}"#, [0.0, 0.0]),
            (r#"{"model_type": "x", "sparse_threshold": -0.5}"#, [-0.5, -0.5]),
            (r#"{"sparse_threshold": -1, "sparse_thresholds": [-1, 2.5]}"#, [-1.0, 2.5]),
        ] {
            std::fs::write(&path, text).unwrap();
            assert_eq!(read_predictor_thresholds(&path, 2).unwrap(), expected, "{text}");
        }
        for text in [
            r#"{"sparse_threshold": "0.5"}"#,
            r#"{"sparse_threshold": [1]}"#,
            r#"{"sparse_thresholds": 1}"#,
            r#"{"sparse_thresholds": [1]}"#,
            r#"{"sparse_thresholds": [1, null]}"#,
        ] {
            std::fs::write(&path, text).unwrap();
            let error = read_predictor_thresholds(&path, 2).unwrap_err();
            assert!(matches!(error, Error::Config { .. }), "{text}: {error}");
        }
        std::fs::write(&path, "[]").unwrap();
        assert!(matches!(read_predictor_thresholds(&path, 2), Err(Error::Json { .. })));
    }
}
