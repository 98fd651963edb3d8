//! The template in the keys of a GGUF file.

use std::path::Path;

use powerinfer_core::{Error as CoreError, GgufFile, GgufMetadata};

use super::ChatTemplate;
use crate::error::Result;

const TEMPLATE: &str = "tokenizer.chat_template";
/// The one that is used where tools are given.
const TOOL_TEMPLATE: &str = "tokenizer.chat_template.tool_use";
const TOKENS: &str = "tokenizer.ggml.tokens";

/// What templates call the special tokens, and where their ids are; the third is spelled as files
/// spell it.
const SPECIAL: [(&str, &str); 6] = [
    ("bos_token", "tokenizer.ggml.bos_token_id"),
    ("eos_token", "tokenizer.ggml.eos_token_id"),
    ("sep_token", "tokenizer.ggml.seperator_token_id"),
    ("unk_token", "tokenizer.ggml.unknown_token_id"),
    ("pad_token", "tokenizer.ggml.padding_token_id"),
    ("mask_token", "tokenizer.ggml.mask_token_id"),
];

impl ChatTemplate {
    /// The template in the keys of a GGUF file with its special tokens; `None` if it has none.
    ///
    /// A template that cannot be parsed is an error when it is used: the model still runs without.
    ///
    /// # Errors
    /// [`Error::Core`](crate::Error::Core) naming the file and the key that is wrong.
    pub fn from_gguf(path: impl AsRef<Path>) -> Result<Option<Self>> {
        Self::in_gguf(path.as_ref(), None)
    }

    /// The template given as a text, or that of the file, with the tokens of the file.
    pub(super) fn in_gguf(path: &Path, given: Option<String>) -> Result<Option<Self>> {
        let file = GgufFile::open(path)?;
        let keys = file.metadata();
        let template = match (given, keys.optional_str(TEMPLATE)?) {
            (Some(text), _) => Some(Self::new(text)?),
            (None, Some(text)) => {
                let origin = format!("{}, key `{TEMPLATE}`", path.display());
                let tool_text = keys.optional_str(TOOL_TEMPLATE)?.map(str::to_owned);
                Some(Self { tool_text, ..Self::unchecked(text.to_owned(), origin) })
            }
            (None, None) => None,
        };
        let Some(template) = template else { return Ok(None) };
        Ok(Some(Self { tokens: special_tokens(keys)?, ..template }))
    }
}

fn special_tokens(
    keys: &GgufMetadata,
) -> std::result::Result<std::collections::BTreeMap<String, String>, CoreError> {
    let tokens = keys.optional_strings(TOKENS)?.unwrap_or_default();
    let mut named = std::collections::BTreeMap::new();
    for (name, key) in SPECIAL {
        // ids beyond the list are the tokenizer's to refuse
        let token = keys.optional_u32(key)?.and_then(|id| tokens.get(id as usize));
        if let Some(token) = token {
            named.insert(name.to_owned(), (*token).to_owned());
        }
    }
    Ok(named)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chat::{ChatMessage, ChatOptions};
    use powerinfer_core::{GgufHeader, GgufValue, Result as CoreResult, TensorInfo, TensorSource};

    /// No tensors.
    #[derive(Debug)]
    struct Nothing;

    impl TensorSource for Nothing {
        fn tensors(&self) -> Vec<TensorInfo> {
            Vec::new()
        }
        fn read(&self, name: &str, _offset_bytes: u64, _out: &mut [u8]) -> CoreResult<()> {
            Err(CoreError::MissingTensor { path: self.path(name), name: name.to_owned() })
        }
        fn path(&self, _name: &str) -> std::path::PathBuf {
            std::path::PathBuf::new()
        }
    }

    fn found(keys: &[(&str, GgufValue)], given: Option<&str>) -> Option<ChatTemplate> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m.gguf");
        let keys = keys.iter().map(|(key, value)| ((*key).to_owned(), value.clone())).collect();
        let header = GgufHeader::new(false, keys);
        powerinfer_core::write_gguf(&path, &header, &Nothing, &mut |_, _| ()).unwrap();
        ChatTemplate::find(Some(&path), given.map(str::to_owned)).unwrap()
    }

    #[test]
    fn the_template_and_tokens_are_those_of_the_keys() {
        let text = |text: &str| GgufValue::String(text.to_owned());
        let keys = [
            (TEMPLATE, text("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}")),
            (TOOL_TEMPLATE, text("tools {{ tools | length }}")),
            (TOKENS, GgufValue::strings(["<unk>", "<s>", "</s>"])),
            ("tokenizer.ggml.bos_token_id", GgufValue::U32(1)),
            ("tokenizer.ggml.eos_token_id", GgufValue::U32(2)),
            ("tokenizer.ggml.padding_token_id", GgufValue::U32(9)),
        ];
        let template = found(&keys, None).unwrap();
        let render = |template: &ChatTemplate, options: &ChatOptions| {
            template.render(&[ChatMessage::user("hi")], options).unwrap()
        };
        assert_eq!(render(&template, &ChatOptions::default()), "<s>hi</s>");
        assert_eq!(render(&template, &ChatOptions::default().with_tools([1, 2])), "tools 2");
        let given = found(&keys, Some("given {{ eos_token }}")).unwrap();
        assert_eq!(render(&given, &ChatOptions::default()), "given </s>");
        assert!(found(&keys[2..], None).is_none());
    }
}
