//! The stored models and the reference results that belong to them.
//!
//! A [`Fixture`] is a model folder in Hugging Face layout with its [`Golden`] results. The micro
//! models, one for each variant of a configuration, lie in `testing/fixtures/micro/`; the demo
//! model lies in `assets/`, the other trained ones in `testing/fixtures/models/`, and the results of
//! both in `testing/fixtures/trained/`. How they were made is said in `testing/fixtures/README.md`.

use std::path::{Path, PathBuf};

use crate::file::{field, ids, number, read, read_json, text};
use crate::golden::Golden;

/// Name of the small trained model in `assets/`.
pub const DEMO_MODEL: &str = "llama-relu-tiny";

/// Names of the small trained models in `testing/fixtures/models/`.
pub const OTHER_TRAINED_MODELS: [&str; 2] = ["opt-tiny", "falcon-relu-tiny"];

/// The texts in `assets/text/` that no model was trained on.
pub const HELD_OUT_TEXTS: [&str; 4] =
    ["austen.val.txt", "moby.val.txt", "sotu.val.txt", "bible.val.txt"];

/// A model with reference results.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fixture {
    /// Name of the variant, as `llama-rope-llama3`; it begins with the `model_type`.
    pub name: String,
    /// Folder with `config.json` and the weights.
    pub model_dir: PathBuf,
    /// Folder with `golden.json` and `golden.safetensors`.
    pub golden_dir: PathBuf,
}

impl Fixture {
    /// The micro model of that name.
    ///
    /// # Panics
    /// If there is none.
    #[must_use]
    pub fn micro(name: &str) -> Self {
        let dir = fixtures_dir().join("micro").join(name);
        assert!(dir.is_dir(), "no micro model {}", dir.display());
        Self { name: name.to_owned(), model_dir: dir.clone(), golden_dir: dir }
    }

    /// The demo model in `assets/`, trained and with a tokenizer.
    #[must_use]
    pub fn demo() -> Self {
        Self {
            name: DEMO_MODEL.to_owned(),
            model_dir: assets_dir().join(DEMO_MODEL),
            golden_dir: fixtures_dir().join("trained").join(DEMO_MODEL),
        }
    }

    /// The trained models, each with a tokenizer, the demo model first.
    #[must_use]
    pub fn trained() -> Vec<Self> {
        let other = |name: &str| Self {
            name: name.to_owned(),
            model_dir: fixtures_dir().join("models").join(name),
            golden_dir: fixtures_dir().join("trained").join(name),
        };
        [Self::demo()].into_iter().chain(OTHER_TRAINED_MODELS.map(other)).collect()
    }

    /// Every micro model whose name begins with `prefix`, sorted by name.
    ///
    /// # Panics
    /// If there is none: a law that is checked on nothing would always hold.
    #[must_use]
    pub fn micros(prefix: &str) -> Vec<Self> {
        let dir = fixtures_dir().join("micro");
        let mut names: Vec<String> = read("folder", &dir, |dir| std::fs::read_dir(dir))
            .map(|entry| read("folder", &dir, |_| entry).file_name())
            .filter_map(|name| name.into_string().ok())
            .filter(|name| name.starts_with(prefix))
            .collect();
        assert!(!names.is_empty(), "no micro model {}/{prefix}*", dir.display());
        names.sort_unstable();
        names.iter().map(|name| Self::micro(name)).collect()
    }

    /// Every micro model and every trained one, as far as their names begin with `prefix`.
    ///
    /// # Panics
    /// If there is no such micro model.
    #[must_use]
    pub fn all(prefix: &str) -> Vec<Self> {
        let mut all = Self::micros(prefix);
        all.extend(Self::trained().into_iter().filter(|model| model.name.starts_with(prefix)));
        all
    }

    /// `model_type` of the model's `config.json`.
    ///
    /// # Panics
    /// If the file cannot be read or has none.
    #[must_use]
    pub fn model_type(&self) -> String {
        let path = self.model_dir.join("config.json");
        let config = read_json(&path);
        text(&path, &config, "model_type")
    }

    /// The reference results.
    ///
    /// # Panics
    /// If they are missing or not what [`Golden`] describes.
    #[must_use]
    pub fn golden(&self) -> Golden {
        Golden::read(&self.golden_dir)
    }
}

/// A text and the ids that the reference tokenizer of the demo model gives it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenizerCase {
    /// The text.
    pub text: String,
    /// Its ids with what the tokenizer adds: the id that begins a text.
    pub ids: Vec<u32>,
    /// Its ids with nothing added.
    pub ids_no_special: Vec<u32>,
    /// What decoding `ids` gives, special tokens skipped.
    pub decoded: String,
}

/// The stored tokenizer cases.
///
/// # Panics
/// If the file is missing or malformed.
#[must_use]
pub fn tokenizer_cases() -> Vec<TokenizerCase> {
    let path = fixtures_dir().join("tokenizer_cases.json");
    let cases = read_json(&path);
    let cases = cases.as_array().unwrap_or_else(|| panic!("{}: not a list", path.display()));
    cases
        .iter()
        .map(|case| TokenizerCase {
            text: text(&path, case, "text"),
            ids: ids(&path, case, "ids"),
            ids_no_special: ids(&path, case, "ids_no_special"),
            decoded: text(&path, case, "decoded"),
        })
        .collect()
}

/// The perplexity of a model on a whole text, as the reference implementation computes it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ReferencePerplexity {
    /// How many tokens are scored, in windows of 512.
    pub tokens: u64,
    /// The exponential of their mean negative log-likelihood.
    pub perplexity: f64,
}

/// The stored perplexity of `model` on `text`, a name in [`HELD_OUT_TEXTS`].
///
/// # Panics
/// If none is stored.
#[must_use]
pub fn reference_perplexity(model: &str, text: &str) -> ReferencePerplexity {
    let path = fixtures_dir().join("reference_perplexity.json");
    let all = read_json(&path);
    let entry = field(&path, field(&path, &all, model), text);
    let tokens = field(&path, entry, "tokens").as_u64();
    ReferencePerplexity {
        tokens: tokens.unwrap_or_else(|| panic!("{}: tokens is not a count", path.display())),
        perplexity: number(&path, entry, "perplexity"),
    }
}

/// The folder `testing/fixtures/`.
#[must_use]
pub fn fixtures_dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures")
}

/// The folder `assets/`.
///
/// # Panics
/// If this crate does not lie in a workspace.
#[must_use]
pub fn assets_dir() -> PathBuf {
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).parent();
    workspace.expect("this crate lies in the folder of its workspace").join("assets")
}

/// The path of a text in `assets/text/`, a name in [`HELD_OUT_TEXTS`].
#[must_use]
pub fn text_path(name: &str) -> PathBuf {
    assets_dir().join("text").join(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_variant_is_found_by_its_prefix() {
        let count = |prefix| Fixture::micros(prefix).len();
        assert_eq!((count("llama-"), count("opt-"), count("falcon-")), (7, 4, 5));
        assert_eq!((count("mistral-"), count("RefinedWeb")), (2, 2));
        assert_eq!(Fixture::all("llama-").last(), Some(&Fixture::demo()));
        for fixture in Fixture::all("") {
            assert!(fixture.name.starts_with(&fixture.model_type()), "{}", fixture.name);
            assert!(fixture.golden_dir.is_dir(), "{}", fixture.name);
        }
    }

    #[test]
    #[should_panic(expected = "no micro model")]
    fn an_unknown_prefix_is_not_an_empty_list() {
        let _ = Fixture::micros("mamba-");
    }

    #[test]
    fn tokenizer_cases_begin_with_the_beginning_of_a_text() {
        let cases = tokenizer_cases();
        assert!(cases.len() > 20);
        for case in cases {
            assert_eq!(case.ids.first(), Some(&1), "{:?}", case.text);
            assert_eq!(case.ids[1..], case.ids_no_special[..], "{:?}", case.text);
        }
    }

    #[test]
    fn every_held_out_text_has_a_reference_perplexity() {
        for text in HELD_OUT_TEXTS {
            for model in Fixture::trained() {
                let reference = reference_perplexity(&model.name, text);
                assert!(
                    reference.perplexity > 1.0 && reference.tokens.is_multiple_of(512),
                    "{text}"
                );
            }
            assert!(text_path(text).is_file(), "{text}");
        }
    }

    #[test]
    #[should_panic(expected = "no field war-and-peace")]
    fn an_unknown_text_is_named() {
        let _ = reference_perplexity(DEMO_MODEL, "war-and-peace");
    }
}
