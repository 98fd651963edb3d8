//! The configuration of the original's predictors.

use std::io;
use std::path::Path;

use super::MAX_BYTES;
use super::field::Fields;
use crate::error::{Error, Result};
use crate::json;
use crate::regular_file::RegularFile;

/// Reads `sparse_threshold`, the least score of a neuron that runs, out of the `config.json` of a
/// folder of predictors; `None` if the file or the field is not there. No other field is looked at.
///
/// # Errors
/// [`Error::Json`], [`Error::Config`] if it is no number, [`Error::FileTooLong`], [`Error::Io`].
pub fn read_predictor_threshold(path: &Path) -> Result<Option<f32>> {
    let file = match RegularFile::open(path) {
        Err(Error::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
            return Ok(None);
        }
        opened => opened?,
    };
    let map = json::parse_object(path, &file.read_all("a configuration", MAX_BYTES)?)?;
    let fields = Fields::new(path, &map);
    let Some(threshold) = fields.optional_number("sparse_threshold")? else { return Ok(None) };
    Ok(Some(threshold as f32))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_threshold_is_optional_and_a_number() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("config.json");
        assert_eq!(read_predictor_threshold(&path).unwrap(), None);
        for (text, expected) in [
            ("{}", None),
            (r#"{"sparse_threshold": null}"#, None),
            (r#"{"model_type": "x", "sparse_threshold": -0.5}"#, Some(-0.5)),
            (r#"{"sparse_threshold": 0}"#, Some(0.0)),
        ] {
            std::fs::write(&path, text).unwrap();
            assert_eq!(read_predictor_threshold(&path).unwrap(), expected, "{text}");
        }
        for text in [r#"{"sparse_threshold": "0.5"}"#, r#"{"sparse_threshold": [1]}"#] {
            std::fs::write(&path, text).unwrap();
            let error = read_predictor_threshold(&path).unwrap_err();
            assert!(matches!(error, Error::Config { field, .. } if field == "sparse_threshold"));
        }
        std::fs::write(&path, "[]").unwrap();
        assert!(matches!(read_predictor_threshold(&path), Err(Error::Json { .. })));
    }
}
