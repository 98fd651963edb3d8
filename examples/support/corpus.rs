//! A text file as token ids, the way `perplexity` and its kin read it.

use powerinfer::Tokenizer;

#[allow(unused_imports, reason = "the tests of this file read no text")]
pub(crate) use super::report::read_text;

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
