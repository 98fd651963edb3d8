//! A low-bit copy of a gate in a device's memory.

use super::backend::{Backend, Block};
use super::estimate_steps::DeviceEstimate;
use super::row_layout::LowBitLayout;
use crate::GateEstimate;

/// The copy, with where each neuron begins to fire.
#[derive(Debug)]
pub(crate) struct HeldEstimate<B: Backend> {
    rows: B::Block,
    /// Cuts, then deviations.
    limits: B::Block,
    layout: LowBitLayout,
    n_rows: usize,
    margin: f32,
}

impl<B: Backend> HeldEstimate<B> {
    /// Bytes that it takes.
    pub(crate) fn bytes(estimate: &GateEstimate) -> u64 {
        let rows = estimate.rows();
        let layout = LowBitLayout::new(rows.format(), rows.n_columns());
        (rows.n_rows() * (layout.stride + 2 * size_of::<f32>())) as u64
    }

    pub(crate) fn copy(
        backend: &B,
        estimate: &GateEstimate,
        margin: f32,
    ) -> candle_core::Result<Self> {
        let (copy, n_rows) = (estimate.rows(), estimate.rows().n_rows());
        let layout = LowBitLayout::new(copy.format(), copy.n_columns());
        let mut bytes = vec![0; n_rows * layout.stride];
        for (row, bytes) in bytes.chunks_exact_mut(layout.stride.max(1)).enumerate() {
            layout.pack(estimate, row, bytes);
        }
        let (rows, limits) = (backend.block(bytes.len())?, backend.block(n_rows * 8)?);
        backend.upload(&bytes, rows.address())?;
        backend.upload(bytemuck::cast_slice(estimate.cuts()), limits.address())?;
        let deviations = limits.address().offset(n_rows * 4);
        backend.upload(bytemuck::cast_slice(estimate.deviations()), deviations)?;
        Ok(Self { rows, limits, layout, n_rows, margin })
    }

    pub(crate) fn size_bytes(&self) -> u64 {
        (self.n_rows * (self.layout.stride + 2 * size_of::<f32>())) as u64
    }

    /// Where it lies, and the margin.
    pub(crate) fn device(&self) -> (DeviceEstimate, f32) {
        let (cuts, n_rows) = (self.limits.address(), self.n_rows);
        let deviations = cuts.offset(n_rows * 4);
        let (address, layout) = (self.rows.address(), self.layout);
        (DeviceEstimate { address, layout, n_rows, cuts, deviations }, self.margin)
    }
}
