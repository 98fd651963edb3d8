//! Memory of the tokens of a pass.

use super::backend::{Backend, Block};
use super::device::Shared;
use super::queue::Address;
use super::scratch::Needs;
use crate::{OpError, SequenceShape, Slot};

/// Slots, what networks and the host add to the stream, angles, and marks of broken tokens.
#[derive(Debug)]
pub(crate) struct PassMemory<B: Backend> {
    block: Option<B::Block>,
    shape: SequenceShape,
    /// Tokens that there is room for.
    n_tokens: usize,
}

impl<B: Backend> PassMemory<B> {
    /// Room for nothing.
    pub(crate) fn new(shape: SequenceShape) -> Self {
        Self { block: None, shape, n_tokens: 0 }
    }

    /// Bytes that so many tokens take.
    pub(crate) fn bytes(shape: SequenceShape, n_tokens: usize) -> u64 {
        (Self::token_bytes(shape) * n_tokens) as u64
    }

    /// Bytes that it takes.
    pub(crate) fn size_bytes(&self) -> u64 {
        Self::bytes(self.shape, self.n_tokens)
    }

    /// Makes room for so many tokens; what was there is lost if it grows.
    pub(crate) fn grow(&mut self, shared: &Shared<B>, n_tokens: usize) -> Result<(), OpError> {
        if n_tokens <= self.n_tokens {
            return Ok(());
        }
        let (bytes, had) = (Self::bytes(self.shape, n_tokens), self.size_bytes());
        let reserved = shared.reserve(bytes - had, Needs::default())?;
        *self = Self::new(self.shape);
        match shared.backend.block(bytes as usize) {
            Ok(block) => self.block = Some(block),
            Err(error) => {
                shared.give_back(had);
                return Err(shared.failed(error));
            }
        }
        self.n_tokens = n_tokens;
        reserved.keep();
        Ok(())
    }

    /// `[n_tokens, d_model]` f32.
    pub(crate) fn slot(&self, slot: Slot) -> Address {
        self.row(match slot {
            Slot::Residual => 0,
            Slot::AttentionInput => 1,
            Slot::FfnInput => 2,
        })
    }

    /// `[n_tokens, d_model]` f32: what a network gives.
    pub(crate) fn network(&self) -> Address {
        self.row(3)
    }

    /// `[n_tokens, d_model]` f32: what the host adds.
    pub(crate) fn part(&self) -> Address {
        self.row(4)
    }

    /// `[n_tokens]` u32.
    pub(crate) fn broken(&self) -> Address {
        self.row(Self::N_ROWS)
    }

    /// Cosines and sines, `[n_tokens, d_head / 2]` f32 each, behind each other.
    pub(crate) fn angles(&self) -> Address {
        self.broken().offset(self.n_tokens * size_of::<u32>())
    }

    const N_ROWS: usize = 5;

    fn token_bytes(shape: SequenceShape) -> usize {
        (Self::N_ROWS * shape.d_model + 1 + 2 * (shape.kv.d_head / 2)) * size_of::<f32>()
    }

    fn row(&self, at: usize) -> Address {
        let base = self.block.as_ref().map_or(Address::NULL, Block::address);
        base.offset(at * self.n_tokens * self.shape.d_model * size_of::<f32>())
    }
}
