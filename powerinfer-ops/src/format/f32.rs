//! f32: IEEE 754 binary32, little endian; a block is one value.

use super::BlockFormat;

/// Four bytes a value.
#[derive(Debug)]
pub(crate) struct F32;

impl BlockFormat for F32 {
    const NAME: &'static str = "f32";
    const BLOCK_LEN: usize = 1;
    const BLOCK_BYTES: usize = 4;

    fn encode_block(values: &[f32], block: &mut [u8]) {
        block.copy_from_slice(&values[0].to_le_bytes());
    }

    fn decode_block(block: &[u8], values: &mut [f32]) {
        values[0] = f32::from_le_bytes([block[0], block[1], block[2], block[3]]);
    }
}
