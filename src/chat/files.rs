//! The template of a model: `chat_template.jinja` of a folder, the one in `tokenizer_config.json`, or
//! the one among the keys of a GGUF file.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::Path;

use powerinfer_core::GgufFile;
use serde::Deserialize;

use super::ChatTemplate;
use crate::error::{Error, Result};
use crate::text::read_file;

/// What of `tokenizer_config.json` concerns a template.
#[derive(Debug, Default, Deserialize)]
struct TokenizerConfig {
    chat_template: Option<Templates>,
    #[serde(flatten)]
    tokens: SpecialTokens,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Templates {
    One(String),
    Named(Vec<NamedTemplate>),
}

#[derive(Debug, Deserialize)]
struct NamedTemplate {
    name: String,
    template: String,
}

#[derive(Debug, Default, Deserialize)]
struct SpecialTokens {
    bos_token: Option<SpecialToken>,
    eos_token: Option<SpecialToken>,
    unk_token: Option<SpecialToken>,
    sep_token: Option<SpecialToken>,
    pad_token: Option<SpecialToken>,
    cls_token: Option<SpecialToken>,
    mask_token: Option<SpecialToken>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum SpecialToken {
    Text(String),
    Described { content: String },
}

impl SpecialTokens {
    fn by_name(self) -> BTreeMap<String, String> {
        let named = [
            ("bos_token", self.bos_token),
            ("eos_token", self.eos_token),
            ("unk_token", self.unk_token),
            ("sep_token", self.sep_token),
            ("pad_token", self.pad_token),
            ("cls_token", self.cls_token),
            ("mask_token", self.mask_token),
        ];
        let texts = named.into_iter().filter_map(|(name, token)| {
            let (SpecialToken::Text(text) | SpecialToken::Described { content: text }) = token?;
            Some((name.to_owned(), text))
        });
        texts.collect()
    }
}

impl ChatTemplate {
    /// The template of a model folder with its special tokens: `chat_template.jinja`, or else
    /// `chat_template` in `tokenizer_config.json`, which may be several by name, of which `default`
    /// is used, and `tool_use` where tools are given. `None` if there is neither.
    ///
    /// A template that cannot be parsed is an error when it is used: the model still runs without.
    ///
    /// # Errors
    /// [`Error::Io`] if a file is there and cannot be read; [`Error::Json`] if
    /// `tokenizer_config.json` is not what it should be.
    pub fn from_dir(folder: impl AsRef<Path>) -> Result<Option<Self>> {
        let (template, tokens) = of_folder(folder.as_ref())?;
        Ok(template.map(|template| Self { tokens, ..template }))
    }

    /// The template of a GGUF file with its special tokens: `tokenizer.chat_template`, and
    /// `tokenizer.chat_template.tool_use` where tools are given. `None` if there is none.
    ///
    /// # Errors
    /// [`Error::Core`] if the file is none, or naming the key that is not what it should be.
    pub fn from_gguf(path: impl AsRef<Path>) -> Result<Option<Self>> {
        let (template, tokens) = of_gguf(path.as_ref())?;
        Ok(template.map(|template| Self { tokens, ..template }))
    }

    /// The template given as a text, or that of the model, a folder or a GGUF file, with the special
    /// tokens of the model.
    pub(crate) fn find(model: Option<&Path>, given: Option<String>) -> Result<Option<Self>> {
        let (own, tokens) = match model {
            Some(file) if file.is_file() => of_gguf(file)?,
            Some(folder) => of_folder(folder)?,
            None => (None, BTreeMap::new()),
        };
        let given = given.map(Self::new).transpose()?;
        Ok(given.or(own).map(|template| Self { tokens, ..template }))
    }
}

type Found = (Option<ChatTemplate>, BTreeMap<String, String>);

fn of_folder(folder: &Path) -> Result<Found> {
    let config_path = folder.join("tokenizer_config.json");
    let config = read_config(&config_path)?;
    let own_path = folder.join("chat_template.jinja");
    let template = match read_text(&own_path)? {
        Some(text) => Some(ChatTemplate::unchecked(text, own_path.display().to_string())),
        None => {
            let origin = config_path.display().to_string();
            config.chat_template.and_then(|templates| templates.choose(origin))
        }
    };
    Ok((template, config.tokens.by_name()))
}

/// The keys of a GGUF file, as llama.cpp names them.
fn of_gguf(path: &Path) -> Result<Found> {
    let file = GgufFile::open(path)?;
    let metadata = file.metadata();
    let mut tokens = BTreeMap::new();
    for (name, key) in [
        ("bos_token", "tokenizer.ggml.bos_token_id"),
        ("eos_token", "tokenizer.ggml.eos_token_id"),
        ("unk_token", "tokenizer.ggml.unknown_token_id"),
        ("pad_token", "tokenizer.ggml.padding_token_id"),
    ] {
        let Some(id) = metadata.optional_u32(key)? else {
            continue;
        };
        let list = metadata.optional_array("tokenizer.ggml.tokens")?;
        if let Some(token) = list.and_then(|list| list.byte_strings().nth(id as usize)) {
            tokens.insert(name.to_owned(), String::from_utf8_lossy(token).into_owned());
        }
    }
    let text = |key| Ok::<_, Error>(metadata.optional_str(key)?.map(str::to_owned));
    let tool_text = text("tokenizer.chat_template.tool_use")?;
    let template = text("tokenizer.chat_template")?
        .map(|text| ChatTemplate::unchecked(text, path.display().to_string()))
        .map(|template| ChatTemplate { tool_text, ..template });
    Ok((template, tokens))
}

impl Templates {
    fn choose(self, origin: String) -> Option<ChatTemplate> {
        match self {
            Self::One(text) => Some(ChatTemplate::unchecked(text, origin)),
            Self::Named(named) => {
                let text_of = |name: &str| {
                    let found = named.iter().find(|template| template.name == name);
                    found.map(|template| template.template.clone())
                };
                let tool_text = text_of("tool_use");
                let default = ChatTemplate::unchecked(text_of("default")?, origin);
                Some(ChatTemplate { tool_text, ..default })
            }
        }
    }
}

fn read_config(path: &Path) -> Result<TokenizerConfig> {
    let Some(text) = read_text(path)? else {
        return Ok(TokenizerConfig::default());
    };
    serde_json::from_str(&text).map_err(|source| Error::Json { path: path.to_path_buf(), source })
}

/// The text of a file; `None` if it is not there.
fn read_text(path: &Path) -> Result<Option<String>> {
    let error = |source| Error::Io { path: path.to_path_buf(), source };
    match read_file(path) {
        Ok(bytes) => String::from_utf8(bytes)
            .map(Some)
            .map_err(|source| error(std::io::Error::new(ErrorKind::InvalidData, source))),
        Err(source) if source.kind() == ErrorKind::NotFound => Ok(None),
        Err(source) => Err(error(source)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chat::{ChatMessage, ChatOptions};

    fn folder(files: &[(&str, &str)]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for (name, text) in files {
            std::fs::write(dir.path().join(name), text).unwrap();
        }
        dir
    }

    fn render(dir: &tempfile::TempDir, options: &ChatOptions) -> String {
        let template = ChatTemplate::from_dir(dir.path()).unwrap().unwrap();
        template.render(&[ChatMessage::user("hi")], options).unwrap()
    }

    #[test]
    fn the_file_of_its_own_comes_before_the_one_in_the_configuration() {
        let config = r#"{"chat_template": "config {{ eos_token }}", "bos_token": "<s>",
                         "eos_token": {"content": "</s>", "lstrip": false}, "model_max_length": 5}"#;
        let dir = folder(&[("tokenizer_config.json", config)]);
        assert_eq!(render(&dir, &ChatOptions::default()), "config </s>");
        std::fs::write(dir.path().join("chat_template.jinja"), "file {{ bos_token }}").unwrap();
        assert_eq!(render(&dir, &ChatOptions::default()), "file <s>");
        let given = ChatTemplate::find(Some(dir.path()), Some("given {{ bos_token }}".to_owned()));
        let given = given.unwrap().unwrap();
        assert_eq!(given.render(&[], &ChatOptions::default()).unwrap(), "given <s>");
    }

    #[test]
    fn of_several_templates_tools_choose() {
        let config = r#"{"chat_template": [{"name": "default", "template": "plain"},
                         {"name": "tool_use", "template": "tools {{ tools | length }}"}]}"#;
        let dir = folder(&[("tokenizer_config.json", config)]);
        assert_eq!(render(&dir, &ChatOptions::default()), "plain");
        assert_eq!(render(&dir, &ChatOptions::default().with_tools([1, 2])), "tools 2");
    }

    #[test]
    fn no_template_is_none_and_a_broken_file_is_named() {
        assert!(ChatTemplate::from_dir(folder(&[]).path()).unwrap().is_none());
        let dir = folder(&[("tokenizer_config.json", "{}")]);
        assert!(ChatTemplate::from_dir(dir.path()).unwrap().is_none());
        for broken in ["", "[", r#"{"chat_template": 5}"#, r#"{"bos_token": []}"#] {
            let dir = folder(&[("tokenizer_config.json", broken)]);
            let error = ChatTemplate::from_dir(dir.path()).unwrap_err();
            let named = |path: &Path| path.ends_with("tokenizer_config.json");
            assert!(matches!(&error, Error::Json { path, .. } if named(path)), "{broken}: {error}");
        }
    }

    #[test]
    fn a_broken_template_is_an_error_when_it_is_used() {
        let dir = folder(&[("chat_template.jinja", "{% for %}")]);
        let template = ChatTemplate::from_dir(dir.path()).unwrap().unwrap();
        let error = template.render(&[], &ChatOptions::default()).unwrap_err();
        assert!(matches!(error, Error::ChatTemplate { origin, .. } if origin.ends_with(".jinja")));
    }
}
