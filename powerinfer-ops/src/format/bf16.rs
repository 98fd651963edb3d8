//! bf16: the upper half of a binary32, little endian; a block is one value.

use super::BlockFormat;

/// Two bytes a value: 8 bits of precision, the range of f32.
#[derive(Debug)]
pub(crate) struct Bf16;

impl BlockFormat for Bf16 {
    const NAME: &'static str = "bf16";
    const BLOCK_LEN: usize = 1;
    const BLOCK_BYTES: usize = 2;

    fn encode_block(values: &[f32], block: &mut [u8]) {
        block.copy_from_slice(&half::bf16::from_f32(values[0]).to_le_bytes());
    }

    fn decode_block(block: &[u8], values: &mut [f32]) {
        values[0] = half::bf16::from_le_bytes([block[0], block[1]]).to_f32();
    }
}
