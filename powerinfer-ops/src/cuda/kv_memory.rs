//! Keys and values of a layer in a device's memory.

use super::backend::{Backend, Block};
use super::dense_steps::DeviceCache;
use super::device::Shared;
use super::queue::Address;
use super::scratch::Needs;
use crate::OpError;
use crate::attention::{KvDtype, KvLayout, PAGE_LEN};

/// Room for some positions, which grows and shrinks by whole pages of the CPU's cache.
#[derive(Debug)]
pub(crate) struct KvMemory<B: Backend> {
    block: Option<B::Block>,
    layout: KvLayout,
    capacity: usize,
}

impl<B: Backend> KvMemory<B> {
    /// Room for nothing.
    pub(crate) fn new(layout: KvLayout) -> Self {
        Self { block: None, layout, capacity: 0 }
    }

    /// Bytes that so many positions take.
    pub(crate) fn bytes(layout: KvLayout, n_positions: usize) -> u64 {
        let KvLayout { n_kv_heads, d_head, dtype } = layout;
        let values = n_positions.next_multiple_of(PAGE_LEN) as u64 * (n_kv_heads * d_head) as u64;
        2 * values * dtype.size_bytes() as u64
    }

    /// Bytes that it takes.
    pub(crate) fn size_bytes(&self) -> u64 {
        Self::bytes(self.layout, self.capacity)
    }

    pub(crate) fn capacity(&self) -> usize {
        self.capacity
    }

    /// Makes it as large as `n_positions` take, with the first `kept` positions of another memory, which
    /// may be its own (`None`). For a moment both are there.
    pub(crate) fn resize(
        &mut self,
        shared: &Shared<B>,
        n_positions: usize,
        (from, kept): (Option<&Self>, usize),
    ) -> Result<(), OpError> {
        let bytes = Self::bytes(self.layout, n_positions);
        let reserved = shared.reserve(bytes, Needs::default())?;
        let failed = |error| shared.failed(error);
        let block = shared.backend.block(bytes as usize).map_err(failed)?;
        let capacity = n_positions.next_multiple_of(PAGE_LEN);
        let resized = Self { block: Some(block), layout: self.layout, capacity };
        if kept > 0 {
            let from = from.unwrap_or(self).cache();
            from.copy(&shared.backend, &resized.cache(), kept).map_err(failed)?;
        }
        reserved.keep();
        shared.give_back(self.size_bytes());
        *self = resized;
        Ok(())
    }

    /// Gives all of it back.
    pub(crate) fn clear(&mut self, shared: &Shared<B>) {
        shared.give_back(self.size_bytes());
        *self = Self::new(self.layout);
    }

    pub(crate) fn cache(&self) -> DeviceCache {
        let KvLayout { n_kv_heads, d_head, dtype } = self.layout;
        let keys = self.block.as_ref().map_or(Address::NULL, Block::address);
        DeviceCache {
            keys,
            values: keys.offset(self.size_bytes() as usize / 2),
            half: dtype == KvDtype::F16,
            n_kv_heads,
            d_head,
            capacity: self.capacity,
        }
    }
}
