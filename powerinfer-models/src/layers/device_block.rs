//! One layer of a decoder whose norms and attention lie on a fast device.

use std::sync::Arc;

use candle_core::Tensor;
use powerinfer_core::{Error, KvCache, Result, Step};
use powerinfer_ops::{DeviceSequence, FastDevice, HeldAttention, HeldNorm, Slot};

use crate::layers::block::{BlockNorms, Pass};
use crate::layers::sparse_ffn::{SlotInputs, StartedFfn};
use crate::layers::{Block, SparseFfn};

/// A layer, wherever its attention lies.
#[derive(Debug, Clone)]
pub enum PlacedBlock {
    /// On the host; of the feed-forward network hot neurons may lie on a device.
    Host(Box<Block>),
    /// On a fast device.
    Device(Box<DeviceBlock>),
}

impl From<Block> for PlacedBlock {
    fn from(block: Block) -> Self {
        Self::Host(Box::new(block))
    }
}

impl PlacedBlock {
    pub(crate) fn ffn(&self) -> &SparseFfn {
        match self {
            Self::Host(block) => &block.ffn,
            Self::Device(block) => &block.ffn,
        }
    }

    /// Bytes that a pass reads whatever fires.
    pub(crate) fn dense_bytes(&self) -> usize {
        match self {
            Self::Host(block) => block.dense_bytes(),
            Self::Device(block) => block.dense_bytes,
        }
    }

    pub(crate) fn is_on_device(&self) -> bool {
        matches!(self, Self::Device(_))
    }

    /// Memory that it takes on a fast device.
    pub(crate) fn fast_bytes(&self) -> u64 {
        let dense = match self {
            Self::Host(_) => 0,
            Self::Device(block) => block.held_bytes(),
        };
        dense + self.ffn().fast_bytes()
    }
}

/// Attention and norms on a fast device, around a feed-forward network that is split or the host's.
///
/// The residual stream stays on the device from block to block; of a layer only the network's input
/// comes to the host and the cold neurons' part goes back, and nothing where no neuron is cold.
#[derive(Debug, Clone)]
pub struct DeviceBlock {
    norms: BlockNorms<Arc<dyn HeldNorm>>,
    attention: Arc<dyn HeldAttention>,
    /// Which of the device's layers this is.
    layer: usize,
    ffn: SparseFfn,
    dense_bytes: usize,
}

impl DeviceBlock {
    /// Copies norms and attention of a block to the device, as its layer number `layer`; what the host
    /// held of them is dropped. `rotary` says whether positions turn queries and keys.
    ///
    /// # Errors
    /// As [`FastDevice::hold_attention`].
    pub fn hold(block: Block, device: &dyn FastDevice, layer: usize, rotary: bool) -> Result<Self> {
        let dense_bytes = block.dense_bytes();
        let Block { norms, attention, mut ffn } = block;
        let norms = norms.try_map(|norm| {
            norm.with_part(|part| Ok(Arc::from(device.hold_norm(part)?) as Arc<dyn HeldNorm>))
        })?;
        let attention = device.hold_attention(attention.part(rotary))?.into();
        ffn.hold_down_bias()?;
        Ok(Self { norms, attention, layer, ffn, dense_bytes })
    }

    fn held_bytes(&self) -> u64 {
        let norms = match &self.norms {
            BlockNorms::Before { attention, ffn } | BlockNorms::After { attention, ffn } => {
                attention.size_bytes() + ffn.size_bytes()
            }
            BlockNorms::Parallel { attention, ffn } => {
                attention.size_bytes() + ffn.as_ref().map_or(0, |norm| norm.size_bytes())
            }
        };
        norms + self.attention.size_bytes()
    }

    /// Takes the residual stream of the cache's sequence through the block. Returns the network that was
    /// started on the device, if one was, for the counts at the end of the pass.
    pub(crate) fn forward(
        &self,
        pass: Pass<'_>,
        cache: &mut KvCache,
        step: &mut Step,
    ) -> Result<Option<StartedFfn>> {
        let n_tokens = cache.reserved();
        let sequence = sequence_of(cache)?;
        step.cancel.check()?;
        let attend = |sequence: &mut dyn DeviceSequence, from| {
            self.attention.run(sequence, self.layer, from)
        };
        let ffn = |sequence: &mut dyn DeviceSequence, inputs: SlotInputs, step: &mut Step| {
            step.cancel.check()?;
            self.ffn.forward_in(sequence, inputs, pass, step)
        };
        match &self.norms {
            BlockNorms::Before { attention, ffn: ffn_norm } => {
                attention.run(sequence, Slot::Residual, Slot::AttentionInput)?;
                attend(sequence, Slot::AttentionInput)?;
                ffn_norm.run(sequence, Slot::Residual, Slot::FfnInput)?;
                ffn(sequence, SlotInputs::new(n_tokens, Slot::FfnInput), step)
            }
            BlockNorms::After { attention, ffn: ffn_norm } => {
                attend(sequence, Slot::Residual)?;
                attention.run(sequence, Slot::Residual, Slot::Residual)?;
                let started = ffn(sequence, SlotInputs::new(n_tokens, Slot::Residual), step)?;
                ffn_norm.run(sequence, Slot::Residual, Slot::Residual)?;
                Ok(started)
            }
            BlockNorms::Parallel { attention, ffn: ffn_norm } => {
                attention.run(sequence, Slot::Residual, Slot::AttentionInput)?;
                let mut inputs = SlotInputs::new(n_tokens, Slot::AttentionInput);
                if let Some(ffn_norm) = ffn_norm {
                    ffn_norm.run(sequence, Slot::Residual, Slot::FfnInput)?;
                    inputs = SlotInputs::new(n_tokens, Slot::FfnInput);
                }
                // the attention changes the stream that a predictor sees
                if self.ffn.wants_inputs(pass.sparsity, step) {
                    inputs.read_residual(sequence)?;
                }
                attend(sequence, Slot::AttentionInput)?;
                ffn(sequence, inputs, step)
            }
        }
    }
}

/// The sequence of the pass that is under way.
pub(crate) fn sequence_of(cache: &mut KvCache) -> Result<&mut (dyn DeviceSequence + 'static)> {
    let what = "a sequence on the fast device";
    cache.sequence().ok_or(Error::CacheShape { what, expected: 1, found: 0 })
}

/// The values of a slot as a tensor `[n_tokens, d_model]`.
pub(crate) fn read_slot(
    sequence: &mut dyn DeviceSequence,
    slot: Slot,
    n_tokens: usize,
) -> Result<Tensor> {
    let mut values = Vec::new();
    sequence.read(slot, &mut values)?;
    let d_model = values.len() / n_tokens.max(1);
    Ok(Tensor::from_vec(values, (n_tokens, d_model), &candle_core::Device::Cpu)?)
}
