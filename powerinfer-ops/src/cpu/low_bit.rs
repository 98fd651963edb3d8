//! Estimates of the products of sixteen rows with one token, from a low-bit copy.
//!
//! `Σ_b (scale[b, r] · x.scale[b]) · (Σ_i number[b, r, i] · x[b, i] − middle · Σ_i x[b, i])`: whole
//! numbers within a block, then one fused multiply-add a block. Every table does the same
//! operations on a row in the same order, so that which neurons are picked depends on no
//! instruction set.

use std::fmt;
use std::sync::OnceLock;

use half::f16;

use crate::format::low_bit::{BLOCK, LowBitFormat};
use crate::low_bit_matrix::{LowBitInput, number_at, number_bytes, scale_bytes};

/// Rows that are multiplied at once.
pub(crate) const GROUP_ROWS: usize = 16;

/// One instruction set's body: `numbers` and `scales` are those of the blocks of `x`.
pub(crate) struct LowBitTable {
    pub(crate) name: &'static str,
    pub(crate) estimate:
        fn(LowBitFormat, numbers: &[u8], scales: &[u8], x: &LowBitInput) -> [f32; GROUP_ROWS],
}

/// The kernels of one instruction set for low-bit copies; holding one proves that the CPU has it.
#[derive(Clone, Copy)]
pub(crate) struct LowBitKernels(&'static LowBitTable);

impl LowBitKernels {
    /// The fastest that this CPU runs; detected once.
    pub(crate) fn best() -> Self {
        static BEST: OnceLock<LowBitKernels> = OnceLock::new();
        *BEST.get_or_init(|| *Self::available().last().expect("scalar kernels run everywhere"))
    }

    /// All that this CPU runs, slowest first.
    pub(crate) fn available() -> Vec<Self> {
        super::low_bit_tables().into_iter().map(Self).collect()
    }

    /// The estimates of a group.
    pub(crate) fn estimate(
        self,
        format: LowBitFormat,
        numbers: &[u8],
        scales: &[u8],
        x: &LowBitInput,
    ) -> [f32; GROUP_ROWS] {
        let n_blocks = x.scales.len();
        assert_eq!(numbers.len(), n_blocks * number_bytes(format), "numbers of all blocks");
        assert_eq!(scales.len(), n_blocks * scale_bytes(), "scales of all blocks");
        assert_eq!((x.quads.len(), x.sums.len()), (n_blocks * BLOCK / 4, n_blocks), "one input");
        (self.0.estimate)(format, numbers, scales, x)
    }
}

impl fmt::Debug for LowBitKernels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LowBitKernels({})", self.0.name)
    }
}

/// The definition.
pub(super) static SCALAR: LowBitTable = LowBitTable { name: "scalar", estimate };

fn estimate(
    format: LowBitFormat,
    numbers: &[u8],
    scales: &[u8],
    x: &LowBitInput,
) -> [f32; GROUP_ROWS] {
    let mut sums = [0.0; GROUP_ROWS];
    for (b, block) in numbers.chunks_exact(number_bytes(format)).enumerate() {
        let x_bytes = x.quads[b * BLOCK / 4..][..BLOCK / 4].as_flattened();
        for (r, sum) in sums.iter_mut().enumerate() {
            let products = x_bytes.iter().enumerate();
            let dot: i32 = products
                .map(|(i, &x)| i32::from(number_at(format, block, r, i)) * i32::from(x))
                .sum();
            let scale = &scales[b * scale_bytes() + 2 * r..];
            let scale = f16::from_le_bytes([scale[0], scale[1]]).to_f32() * x.scales[b];
            *sum = (dot as f32 - format.middle() * x.sums[b]).mul_add(scale, *sum);
        }
    }
    sums
}
