//! f16: IEEE 754 binary16, little endian; a block is one value.

use super::BlockFormat;

/// Two bytes a value: 11 bits of precision, range ±65504.
#[derive(Debug)]
pub(crate) struct F16;

impl BlockFormat for F16 {
    const NAME: &'static str = "f16";
    const BLOCK_LEN: usize = 1;
    const BLOCK_BYTES: usize = 2;

    fn encode_block(values: &[f32], block: &mut [u8]) {
        block.copy_from_slice(&half::f16::from_f32(values[0]).to_le_bytes());
    }

    fn decode_block(block: &[u8], values: &mut [f32]) {
        values[0] = half::f16::from_le_bytes([block[0], block[1]]).to_f32();
    }
}
