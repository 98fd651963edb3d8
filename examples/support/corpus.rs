//! A text file as token ids, the way `perplexity` and its kin read it.

use std::path::{Path, PathBuf};

use powerinfer::Tokenizer;

use super::report::Outcome;

/// Reads a UTF-8 text file.
pub(crate) fn read_text(path: &Path) -> Outcome<String> {
    let text = std::fs::read_to_string(path)
        .map_err(|source| Unreadable { path: path.to_path_buf(), source })?;
    Ok(text)
}

/// The ids of `text` without special tokens around it. A NUL byte marks the end of a document and
/// becomes `end_id`, where the model has an end token.
pub(crate) fn tokenize(
    tokenizer: &Tokenizer,
    text: &str,
    end_id: Option<u32>,
) -> powerinfer::Result<Vec<u32>> {
    let Some(end_id) = end_id else {
        return tokenizer.encode(text, false);
    };
    let mut ids = Vec::new();
    for (i, document) in text.split('\0').enumerate() {
        if i > 0 {
            ids.push(end_id);
        }
        ids.extend(tokenizer.encode(document, false)?);
    }
    Ok(ids)
}

#[derive(Debug, thiserror::Error)]
#[error("cannot read the text file {}", path.display())]
struct Unreadable {
    path: PathBuf,
    source: std::io::Error,
}
