//! Blocks of quantised weights as ggml writes and reads them.

use std::path::Path;

use serde_json::Value;

use crate::file::{field, read_json, text};
use crate::fixture::fixtures_dir;

/// Some values in one quantised format, and bytes of it at random.
#[derive(Debug, Clone, PartialEq)]
pub struct GgmlBlocks {
    /// 256 values in f32.
    pub values: Vec<f32>,
    /// They as ggml's reference quantiser writes them.
    pub quantised: Vec<u8>,
    /// These bytes as ggml reads them.
    pub quantised_read: Vec<f32>,
    /// Random bytes, with scales that are finite.
    pub noise: Vec<u8>,
    /// These bytes as ggml reads them.
    pub noise_read: Vec<f32>,
}

impl GgmlBlocks {
    /// The blocks of a format: `q8_0`, `q4_0`, `q4_1`, `q5_0`, `q4_k` or `q6_k`.
    ///
    /// # Panics
    /// If there are none, or the file is missing or malformed.
    #[must_use]
    pub fn of(format: &str) -> Self {
        let path = fixtures_dir().join("ggml_blocks.json");
        let all = read_json(&path);
        let blocks = field(&path, field(&path, &all, "formats"), format);
        Self {
            values: floats(&path, &all, "values"),
            quantised: bytes(&path, blocks, "quantised"),
            quantised_read: floats(&path, blocks, "quantised_read"),
            noise: bytes(&path, blocks, "noise"),
            noise_read: floats(&path, blocks, "noise_read"),
        }
    }
}

/// Bytes in hexadecimal digits.
fn bytes(path: &Path, value: &Value, name: &str) -> Vec<u8> {
    let digits = text(path, value, name);
    let pairs = digits.as_bytes().chunks(2).map(|pair| std::str::from_utf8(pair).ok());
    pairs
        .map(|pair| pair.and_then(|pair| u8::from_str_radix(pair, 16).ok()))
        .map(|byte| byte.unwrap_or_else(|| panic!("{}: {name} is not hex", path.display())))
        .collect()
}

fn floats(path: &Path, value: &Value, name: &str) -> Vec<f32> {
    let bytes = bytes(path, value, name);
    bytes.as_chunks().0.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_format_has_as_many_values_as_were_written() {
        for format in ["q8_0", "q4_0", "q4_1", "q5_0", "q4_k", "q6_k"] {
            let blocks = GgmlBlocks::of(format);
            assert_eq!(blocks.values.len(), 256, "{format}");
            assert_eq!(blocks.quantised_read.len(), 256, "{format}");
            assert_eq!(blocks.noise.len(), blocks.quantised.len(), "{format}");
            assert!(blocks.noise_read.iter().all(|value| value.is_finite()), "{format}");
        }
    }
}
