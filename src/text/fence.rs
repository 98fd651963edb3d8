//! What a `tokenizer.json` must not do to the process that reads it.
//!
//! The tokenizer library trusts its file. Panics are caught where it is called; this module refuses
//! what could not be caught: a pipe that never ends, a size read out of the file and allocated
//! unchecked, and replacements that make a text a million times longer.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::Path;

use serde::Deserialize;
use serde_json::Value;

/// The longest file that is read: several times the largest vocabulary in use.
const MAX_BYTES: u64 = 256 << 20;
/// How much longer all replacements together may make a text.
const MAX_GROWTH: usize = 4096;

/// Reads a regular file.
pub(crate) fn read(path: &Path) -> io::Result<Vec<u8>> {
    let invalid = |what: String| io::Error::new(io::ErrorKind::InvalidInput, what);
    // asked before opening: to open a pipe for reading waits for a writer
    let metadata = fs::metadata(path)?;
    if !metadata.is_file() {
        return Err(invalid("not a regular file".to_owned()));
    }
    if metadata.len() > MAX_BYTES {
        return Err(invalid(format!(
            "expected at most {MAX_BYTES} bytes, found {}",
            metadata.len()
        )));
    }
    let mut bytes = Vec::new();
    File::open(path)?.take(MAX_BYTES).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// The parts of a `tokenizer.json` that rewrite text; of the vocabulary one field.
#[derive(Deserialize)]
struct Parts {
    #[serde(default)]
    normalizer: Value,
    #[serde(default)]
    pre_tokenizer: Value,
    #[serde(default)]
    decoder: Value,
    #[serde(default)]
    model: Model,
}

/// What of the vocabulary's model is looked at.
#[derive(Default, Deserialize)]
struct Model {
    dropout: Option<f64>,
}

/// Fails if the file asks for memory that nothing in it justifies.
pub(super) fn check(bytes: &[u8]) -> tokenizers::Result<()> {
    let parts: Parts = serde_json::from_slice(bytes)?;
    if let Some(dropout) = parts.model.dropout.filter(|&dropout| dropout != 0.0) {
        let why = "a text must always give the same tokens";
        return Err(format!("model.dropout: expected none, found {dropout}: {why}").into());
    }
    for (name, part) in [
        ("normalizer", &parts.normalizer),
        ("pre_tokenizer", &parts.pre_tokenizer),
        ("decoder", &parts.decoder),
    ] {
        let growth = growth(name, part)?;
        if growth > MAX_GROWTH {
            let limit = format!("{name}: expected at most {MAX_GROWTH} times the text");
            return Err(format!("{limit}, found replacements that make {growth} times").into());
        }
    }
    Ok(())
}

/// How much longer a part may make a text; fails at a table that is larger than its bytes.
fn growth(name: &str, part: &Value) -> tokenizers::Result<usize> {
    match part {
        Value::Array(parts) => parts
            .iter()
            .try_fold(1usize, |product, part| Ok(product.saturating_mul(growth(name, part)?))),
        Value::Object(fields) => {
            let text = |field: &str| fields.get(field).and_then(Value::as_str).unwrap_or("");
            match text("type") {
                "Replace" => return Ok(text("content").len().max(1)),
                "Precompiled" => check_charsmap(name, text("precompiled_charsmap"))?,
                _ => {}
            }
            fields
                .values()
                .try_fold(1usize, |product, part| Ok(product.saturating_mul(growth(name, part)?)))
        }
        _ => Ok(1),
    }
}

/// A precompiled map begins with the size of a table, four bytes, little endian.
fn check_charsmap(name: &str, base64: &str) -> tokenizers::Result<()> {
    let size = base64.bytes().take(6).try_fold(0u64, |bits, digit| {
        let digit = match digit {
            b'A'..=b'Z' => digit - b'A',
            b'a'..=b'z' => digit - b'a' + 26,
            b'0'..=b'9' => digit - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            _ => return None,
        };
        Some(bits << 6 | u64::from(digit))
    });
    // 36 bits hold the four bytes and half of the fifth
    let size = size.map(|bits| ((bits >> 4) as u32).swap_bytes());
    let held = base64.len() / 4 * 3;
    match size {
        Some(size) if base64.len() >= 8 && size as usize <= held => Ok(()),
        _ => {
            let found = size.map_or("no base64".to_owned(), |size| format!("{size} bytes"));
            Err(format!(
                "{name}.precompiled_charsmap: expected a table of at most {held} bytes, \
                 found {found}"
            )
            .into())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn check_part(normalizer: &Value) -> tokenizers::Result<()> {
        check(json!({"model": {"vocab": {}}, "normalizer": normalizer}).to_string().as_bytes())
    }

    #[test]
    fn replacements_of_real_tokenizers_pass() {
        let replace = |pattern: &str, content: &str| json!({"type": "Replace", "pattern": {"String": pattern}, "content": content});
        let llama = json!({"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "▁"}, replace(" ", "▁"), replace("``", "\""),
        ]});
        check_part(&llama).unwrap();
        check_part(&Value::Null).unwrap();
        // a table of 4 bytes in 9
        check_part(&json!({"type": "Precompiled", "precompiled_charsmap": "BAAAAP////8A"}))
            .unwrap();
    }

    #[test]
    fn what_would_take_all_memory_is_refused() {
        let grow =
            json!({"type": "Replace", "pattern": {"String": "a"}, "content": "a".repeat(100)});
        let bomb = json!({"type": "Sequence", "normalizers": [grow, grow, grow]});
        let error = check_part(&bomb).unwrap_err().to_string();
        assert!(error.contains("1000000 times"), "{error}");
        for map in ["/////wAAAAAAAAAA", "", "AAAA", "????????"] {
            let part = json!({"type": "Precompiled", "precompiled_charsmap": map});
            let error = check_part(&part).unwrap_err().to_string();
            assert!(error.contains("precompiled_charsmap"), "{error}");
        }
    }

    #[test]
    fn dropout_is_refused() {
        let with = |dropout: Value| json!({"model": {"dropout": dropout}}).to_string();
        check(with(Value::Null).as_bytes()).unwrap();
        check(with(json!(0.0)).as_bytes()).unwrap();
        let error = check(with(json!(0.5)).as_bytes()).unwrap_err().to_string();
        assert!(error.contains("model.dropout"), "{error}");
    }

    #[test]
    fn only_regular_files_of_sane_size_are_read() {
        let dir = tempfile::tempdir().unwrap();
        assert!(read(dir.path()).unwrap_err().to_string().contains("not a regular file"));
        let sparse = dir.path().join("tokenizer.json");
        File::create(&sparse).unwrap().set_len(MAX_BYTES + 1).unwrap();
        assert!(read(&sparse).unwrap_err().to_string().contains("at most"));
    }
}
