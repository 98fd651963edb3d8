//! Adds up tensors by where they will lie: in memory, on a fast device, in their file.

use powerinfer_core::{
    Error as CoreError, FileDtype, Holding, ModelConfig, Placement, Result as CoreResult,
    TensorInfo,
};
use powerinfer_ops::NeuronMatrix;

use super::MemoryEstimate;
use crate::load::LoadOptions;
use crate::sizes::Part;

/// What a tensor takes.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct TensorBytes {
    /// Once it is held.
    pub(crate) held: u64,
    /// Beside that while it is read.
    pub(crate) scratch: u64,
    /// Whether it can be used where it lies in a file.
    pub(crate) in_place: bool,
    /// Whether it can where a down projection may stay by output.
    pub(crate) in_place_by_output: bool,
}

/// What a tensor takes in the format that the options ask for.
pub(crate) fn tensor_bytes(
    tensor: &TensorInfo,
    config: &ModelConfig,
    options: &LoadOptions,
) -> CoreResult<TensorBytes> {
    let FileDtype::Weights(stored) = tensor.dtype else {
        return Ok(TensorBytes::default()); // loading refuses it, if it is needed
    };
    match *tensor.shape.as_slice() {
        [rows, columns] => {
            let format = options.dtype.unwrap_or(stored);
            // a quantised down projection stays as it is
            let quantised = [stored, format].iter().all(|format| format.block_len() > 1);
            let stays = quantised && !options.requantise_down;
            // what files hold a neuron a column
            let turned = [rows, columns] == [config.d_model, config.d_ff] && !stays;
            let [n_neurons, width] = if turned { [columns, rows] } else { [rows, columns] };
            let held = NeuronMatrix::resident_bytes(format, n_neurons, width)
                // a table of positions that stays in the file's type, or an error of the loading
                .or_else(|_| NeuronMatrix::resident_bytes(stored, n_neurons, width))?;
            // queries, keys and values in one tensor are taken apart
            let heads = config.n_heads + 2 * config.n_kv_heads;
            let fused = [rows, columns] == [heads * config.d_head, config.d_model];
            let scratch = match (turned, fused) {
                (true, _) => stored.row_bytes(columns)?.saturating_mul(rows),
                (false, true) => held,
                (false, false) => 0,
            };
            let as_stored = options.holding == Holding::Mapped && format == stored && !fused;
            Ok(TensorBytes {
                held: held as u64,
                scratch: scratch as u64,
                in_place: as_stored && !turned,
                in_place_by_output: as_stored,
            })
        }
        [len] => {
            let held = (len as u64).saturating_mul(size_of::<f32>() as u64);
            Ok(TensorBytes { held, ..TensorBytes::default() })
        }
        _ => Err(CoreError::TensorShape {
            path: "the model".into(),
            name: tensor.name.clone(),
            expected: vec![0, 0],
            found: tensor.shape.clone(),
        }),
    }
}

/// What was added up so far.
pub(super) struct Tally<'a> {
    placement: Option<&'a Placement>,
    has_device: bool,
    /// Bytes of each layer that are held for a while, before a part of them goes.
    passing: Vec<u64>,
    scratch: u64,
}

impl<'a> Tally<'a> {
    pub(super) fn new(n_layers: usize, placement: Option<&'a Placement>, has_device: bool) -> Self {
        Self { placement, has_device, passing: vec![0; n_layers], scratch: 0 }
    }

    /// Adds a tensor; `is_mapped` if its source has it in a mapped file.
    pub(super) fn add(
        &mut self,
        memory: &mut MemoryEstimate,
        part: &Part,
        bytes: TensorBytes,
        is_mapped: bool,
    ) {
        let on_fast = self.on_fast(part, bytes.held);
        memory.fast_bytes = memory.fast_bytes.saturating_add(on_fast);
        let stays = bytes.held - on_fast;
        let splits = self.splits(part);
        let in_place = bytes.in_place || self.placement.is_none() && bytes.in_place_by_output;
        if in_place && is_mapped && !splits {
            memory.mapped_bytes = memory.mapped_bytes.saturating_add(stays);
            return;
        }
        memory.weight_bytes = memory.weight_bytes.saturating_add(stays);
        self.scratch = self.scratch.max(bytes.scratch);
        if let Part::Ffn { layer, .. } | Part::Attention { layer } = *part
            && (splits || on_fast > 0)
            && let Some(passing) = self.passing.get_mut(layer)
        {
            *passing = passing.saturating_add(bytes.held);
        }
    }

    /// What loading takes for a while.
    pub(super) fn load_bytes(&self) -> u64 {
        self.scratch.saturating_add(self.passing.iter().max().copied().unwrap_or(0))
    }

    /// Layers whose keys and values are on the fast device.
    pub(super) fn n_fast_attention(&self) -> usize {
        self.on_device().map_or(0, Placement::n_fast_attention)
    }

    fn on_device(&self) -> Option<&'a Placement> {
        self.placement.filter(|_| self.has_device)
    }

    /// Whether a tensor is copied to both sides of a partition.
    fn splits(&self, part: &Part) -> bool {
        match (self.placement, part) {
            (Some(placement), &Part::Ffn { layer, .. }) if layer < placement.n_layers() => {
                !self.has_device || !placement.hot(layer).is_empty()
            }
            _ => false,
        }
    }

    /// Bytes of a tensor that go to the fast device. A head that is the table of embeddings, which is no
    /// tensor of its own, is not counted.
    fn on_fast(&self, part: &Part, held: u64) -> u64 {
        let Some(placement) = self.on_device() else { return 0 };
        let n_layers = placement.n_layers();
        match *part {
            Part::Attention { layer } if layer < n_layers && placement.fast_attention(layer) => {
                held
            }
            Part::Ffn { layer, .. } if layer < n_layers => {
                let hot = placement.hot(layer).len() as u128 * u128::from(held);
                u64::try_from(hot / placement.d_ff().max(1) as u128).unwrap_or(held)
            }
            Part::Head { .. } if placement.fast_head() => held,
            _ => 0,
        }
    }
}
