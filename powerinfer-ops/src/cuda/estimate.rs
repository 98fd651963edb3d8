//! A low-bit copy of a gate in a GPU's memory.

use super::estimate_steps::DeviceEstimate;
use super::row_layout::LowBitLayout;
use super::stream::{Memory, Stream};
use crate::gate_estimate::GateEstimate;

/// The copy, with where each neuron begins to fire.
#[derive(Debug)]
pub(super) struct HeldEstimate {
    rows: Memory,
    /// Cuts, then deviations.
    limits: Memory,
    layout: LowBitLayout,
    n_rows: usize,
    margin: f32,
}

impl HeldEstimate {
    /// Bytes that it takes.
    pub(super) fn bytes(estimate: &GateEstimate) -> u64 {
        let rows = estimate.rows();
        let layout = LowBitLayout::new(rows.format(), rows.n_columns());
        (rows.n_rows() * (layout.stride + 2 * size_of::<f32>())) as u64
    }

    pub(super) fn copy(
        stream: &Stream,
        estimate: &GateEstimate,
        margin: f32,
    ) -> candle_core::Result<Self> {
        let (copy, n_rows) = (estimate.rows(), estimate.rows().n_rows());
        let layout = LowBitLayout::new(copy.format(), copy.n_columns());
        let mut bytes = vec![0; n_rows * layout.stride];
        for (row, bytes) in bytes.chunks_exact_mut(layout.stride.max(1)).enumerate() {
            layout.pack(estimate, row, bytes);
        }
        let (rows, limits) = (stream.memory(bytes.len())?, stream.memory(n_rows * 8)?);
        stream.upload(&bytes, rows.address())?;
        stream.upload(bytemuck::cast_slice(estimate.cuts()), limits.address())?;
        let deviations = limits.address().offset(n_rows * 4);
        stream.upload(bytemuck::cast_slice(estimate.deviations()), deviations)?;
        Ok(Self { rows, limits, layout, n_rows, margin })
    }

    pub(super) fn size_bytes(&self) -> u64 {
        (self.n_rows * (self.layout.stride + 2 * size_of::<f32>())) as u64
    }

    /// Where it lies, and the margin.
    pub(super) fn device(&self) -> (DeviceEstimate, f32) {
        let (cuts, n_rows) = (self.limits.address(), self.n_rows);
        let deviations = cuts.offset(n_rows * 4);
        let (address, layout) = (self.rows.address(), self.layout);
        (DeviceEstimate { address, layout, n_rows, cuts, deviations }, self.margin)
    }
}
