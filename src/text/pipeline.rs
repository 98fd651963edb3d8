//! The two tokenizers that a [`Tokenizer`](super::Tokenizer) can be, behind one set of calls.

use tokenizers::{
    DecoderWrapper, NormalizerWrapper, PostProcessorWrapper, PreTokenizerWrapper, Result,
    Tokenizer as HfTokenizer, TokenizerImpl,
};

use super::gguf::Pieces;

/// The library's tokenizer around a model of our own.
pub(super) type PieceTokenizer = TokenizerImpl<
    Pieces,
    NormalizerWrapper,
    PreTokenizerWrapper,
    PostProcessorWrapper,
    DecoderWrapper,
>;

/// A tokenizer, whatever its model.
#[derive(Debug)]
pub(super) enum Pipeline {
    /// With one of the library's models.
    Library(Box<HfTokenizer>),
    /// With pieces that have scores, which the library does not have.
    Pieces(Box<PieceTokenizer>),
}

/// Runs an expression with `$inner` bound to the tokenizer.
macro_rules! with_inner {
    ($pipeline:expr, $inner:ident => $body:expr) => {
        match $pipeline {
            Pipeline::Library($inner) => $body,
            Pipeline::Pieces($inner) => $body,
        }
    };
}

impl Pipeline {
    pub(super) fn vocab_size(&self) -> usize {
        with_inner!(self, inner => inner.get_vocab_size(true))
    }

    pub(super) fn token_id(&self, token: &str) -> Option<u32> {
        with_inner!(self, inner => inner.token_to_id(token))
    }

    pub(super) fn token(&self, id: u32) -> Option<String> {
        with_inner!(self, inner => inner.id_to_token(id))
    }

    pub(super) fn is_special(&self, token: &str) -> bool {
        with_inner!(self, inner => inner.get_added_vocabulary().is_special_token(token))
    }

    pub(super) fn decoder(&self) -> Option<&DecoderWrapper> {
        with_inner!(self, inner => inner.get_decoder())
    }

    pub(super) fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>> {
        with_inner!(self, inner => Ok(inner.encode_fast(text, add_special)?.get_ids().to_vec()))
    }

    /// The text of `ids` without special tokens.
    pub(super) fn decode(&self, ids: &[u32]) -> Result<String> {
        with_inner!(self, inner => inner.decode(ids, true))
    }
}
