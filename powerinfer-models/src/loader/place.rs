//! Where a block goes.

use powerinfer_core::{PositionConfig, Result};

use super::Loader;
use crate::layers::{Block, DeviceBlock, PlacedBlock};

impl Loader<'_> {
    /// Puts norms and attention of a block where the placement says. `position` says whether positions
    /// turn queries and keys.
    ///
    /// # Errors
    /// As [`DeviceBlock::hold`].
    pub fn place(
        &self,
        layer: usize,
        block: Block,
        position: &PositionConfig,
    ) -> Result<PlacedBlock> {
        let (Some(placement), Some(device)) = (self.placement, self.fast_device) else {
            return Ok(block.into());
        };
        if !placement.fast_attention(layer) {
            return Ok(block.into());
        }
        let before = (0..layer).filter(|&layer| placement.fast_attention(layer)).count();
        let rotary = matches!(position, PositionConfig::Rotary(_));
        Ok(PlacedBlock::Device(Box::new(DeviceBlock::hold(block, device, before, rotary)?)))
    }
}
