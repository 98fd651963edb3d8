//! The architectures, a line each.

use powerinfer_core::ModelConfig;

use crate::error::Result;
use crate::layers::Decoder;
use crate::loader::Loader;
use crate::{falcon, llama, opt};

/// One architecture.
pub(crate) struct Architecture {
    /// `model_type` in `config.json`.
    pub(crate) model_type: &'static str,
    /// Builds the model, taking its tensors.
    pub(crate) build: fn(&ModelConfig, &mut Loader<'_>) -> Result<Decoder>,
    /// Tensors that files of this architecture may hold and that are not needed.
    pub(crate) is_ignorable: fn(&str) -> bool,
}

impl Architecture {
    const fn llama(model_type: &'static str) -> Self {
        Self { model_type, build: llama::build, is_ignorable: llama::is_ignorable }
    }

    const fn opt(model_type: &'static str) -> Self {
        Self { model_type, build: opt::build, is_ignorable: opt::is_ignorable }
    }

    const fn falcon(model_type: &'static str) -> Self {
        Self { model_type, build: falcon::build, is_ignorable: falcon::is_ignorable }
    }
}

const ARCHITECTURES: &[Architecture] = &[
    Architecture::llama("llama"),
    Architecture::llama("sparsellama"),
    Architecture::llama("mistral"),
    Architecture::llama("bamboo"),
    Architecture::llama("turbosparse"),
    Architecture::opt("opt"),
    Architecture::falcon("falcon"),
    Architecture::falcon("RefinedWeb"),
    Architecture::falcon("RefinedWebModel"),
];

/// The values of `model_type` that [`load`](crate::load) knows.
#[must_use]
pub fn supported_model_types() -> Vec<&'static str> {
    ARCHITECTURES.iter().map(|architecture| architecture.model_type).collect()
}

/// The architecture of a `model_type`.
pub(crate) fn find(model_type: &str) -> Option<&'static Architecture> {
    ARCHITECTURES.iter().find(|architecture| architecture.model_type == model_type)
}
