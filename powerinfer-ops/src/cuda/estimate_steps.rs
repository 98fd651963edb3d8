//! Which neurons a low-bit copy of the gate lets fire, on the device.

use super::queue::{Address, Arg, Launch, Queue};
use super::row_layout::LowBitLayout;
use super::steps::{DeviceInput, ROW_THREADS, n_blocks, row_blocks};

const NORM_THREADS: u32 = 256;

/// A low-bit copy of a gate on the device.
#[derive(Debug, Clone, Copy)]
pub struct DeviceEstimate {
    /// Where its rows begin.
    pub address: Address,
    /// How they lie.
    pub layout: LowBitLayout,
    /// How many there are.
    pub n_rows: usize,
    /// `[n_rows]` f32: what a product must exceed.
    pub cuts: Address,
    /// `[n_rows]` f32: deviations of a product's error for an input of norm 1.
    pub deviations: Address,
}

/// `picks[t, i]`: 1 where the copy lets neuron `i` fire, else 0: exactly the neurons that the CPU
/// picks, if the norms are the CPU's. The tokens have been [rounded](super::steps::quantize).
///
/// # Errors
/// The queue's.
pub fn gate_estimate<Q: Queue>(
    queue: &Q,
    estimate: &DeviceEstimate,
    x: &DeviceInput,
    margin: f32,
    picks: Address,
) -> Result<(), Q::Error> {
    if estimate.n_rows == 0 {
        return Ok(());
    }
    let layout = &estimate.layout;
    queue.launch(&Launch {
        file: "gate_estimate",
        kernel: &format!("gate_estimate_{}", layout.bits),
        grid: [row_blocks(estimate.n_rows), x.n_tokens as u32, 1],
        threads: ROW_THREADS,
        args: &[
            estimate.address.into(),
            Arg::Size(layout.stride as u64),
            layout.n_pieces.into(),
            estimate.n_rows.into(),
            x.numbers.numbers.into(),
            x.numbers.scales.into(),
            n_blocks(x.n_columns).into(),
            x.numbers.norms.into(),
            margin.into(),
            estimate.cuts.into(),
            estimate.deviations.into(),
            picks.into(),
        ],
    })
}

/// `norms[t]`: the norms of the tokens `x` `[n_tokens, n_columns]`, to the bit those of the CPU.
///
/// # Errors
/// The queue's.
pub fn token_norms<Q: Queue>(
    queue: &Q,
    x: Address,
    [n_tokens, n_columns]: [usize; 2],
    norms: Address,
) -> Result<(), Q::Error> {
    queue.launch(&Launch {
        file: "token_norms",
        kernel: "token_norms",
        grid: [n_tokens as u32, 1, 1],
        threads: NORM_THREADS,
        args: &[x.into(), n_columns.into(), norms.into()],
    })
}
