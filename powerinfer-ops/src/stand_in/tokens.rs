//! The memory of a sequence on the stand-in.

use std::ops::Range;
use std::sync::Arc;

use super::shared::{Scratch, Shared, Taken};
use crate::attention::{AttentionScratch, KvPage, PAGE_LEN};
use crate::error::OpError;
use crate::fast_device::{SequenceShape, Slot};

/// The tokens of a pass, and keys and values of all before them.
pub(super) struct Tokens {
    shape: SequenceShape,
    first_position: usize,
    n_tokens: usize,
    /// Positions that there are.
    len: usize,
    /// `[n_tokens, d_model]` each.
    slots: [Vec<f32>; 3],
    /// Cosines and sines, `[n_tokens, d_head / 2]` each; empty without.
    angles: [Vec<f32>; 2],
    /// The pages of each layer.
    layers: Vec<Vec<KvPage>>,
    taken: Taken,
}

impl Tokens {
    /// None.
    pub(super) fn new(shape: SequenceShape, taken: Taken) -> Self {
        Self {
            shape,
            first_position: 0,
            n_tokens: 0,
            len: 0,
            slots: Default::default(),
            angles: Default::default(),
            layers: (0..shape.n_layers).map(|_| Vec::new()).collect(),
            taken,
        }
    }

    pub(super) fn shape(&self) -> SequenceShape {
        self.shape
    }

    pub(super) fn d_model(&self) -> usize {
        self.shape.d_model
    }

    pub(super) fn first_position(&self) -> usize {
        self.first_position
    }

    pub(super) fn n_tokens(&self) -> usize {
        self.n_tokens
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn size_bytes(&self) -> u64 {
        self.taken.bytes()
    }

    /// Bytes of the keys and values of a layer.
    pub(super) fn layer_bytes(&self, layer: usize) -> u64 {
        (self.layers[layer].len() * self.shape.kv.page_bytes()) as u64
    }

    pub(super) fn pages(&self, layer: usize) -> &[KvPage] {
        &self.layers[layer]
    }

    pub(super) fn slot(&self, slot: Slot) -> &[f32] {
        &self.slots[slot as usize]
    }

    pub(super) fn slot_mut(&mut self, slot: Slot) -> &mut [f32] {
        &mut self.slots[slot as usize]
    }

    /// Some tokens of a slot.
    pub(super) fn values(&self, slot: Slot, tokens: Range<usize>) -> &[f32] {
        let d_model = self.shape.d_model;
        &self.slot(slot)[tokens.start * d_model..tokens.end * d_model]
    }

    pub(super) fn values_mut(&mut self, slot: Slot, tokens: Range<usize>) -> &mut [f32] {
        let d_model = self.shape.d_model;
        &mut self.slot_mut(slot)[tokens.start * d_model..tokens.end * d_model]
    }

    pub(super) fn copy_slot(&mut self, from: Slot, to: Slot) {
        if let Ok([from, to]) = self.slots.get_disjoint_mut([from as usize, to as usize]) {
            to.copy_from_slice(from);
        }
    }

    pub(super) fn has_angles(&self) -> bool {
        !self.angles[0].is_empty() || self.n_tokens == 0
    }

    /// Cosines and sines of some tokens.
    pub(super) fn angles(&self, tokens: Range<usize>) -> [&[f32]; 2] {
        let half = self.shape.kv.d_head / 2;
        let [cos, sin] = &self.angles;
        [cos, sin].map(|angles| &angles[tokens.start * half..tokens.end * half])
    }

    /// Makes room for a pass; forgets what is from its first position on.
    pub(super) fn begin(
        &mut self,
        first_position: usize,
        n_tokens: usize,
        angles: Option<[&[f32]; 2]>,
    ) -> Result<(), OpError> {
        self.truncate(first_position);
        self.n_tokens = 0;
        let end = first_position.saturating_add(n_tokens);
        self.make_room(end, n_tokens, angles).inspect_err(|_| self.truncate(first_position))?;
        (self.first_position, self.n_tokens, self.len) = (first_position, n_tokens, end);
        Ok(())
    }

    fn make_room(
        &mut self,
        end: usize,
        n_tokens: usize,
        angles: Option<[&[f32]; 2]>,
    ) -> Result<(), OpError> {
        self.grow(end)?;
        let len = n_tokens.saturating_mul(self.shape.d_model);
        for at in 0..self.slots.len() {
            resize(&mut self.slots[at], len, &mut self.taken)?;
        }
        let [cos, sin] = angles.unwrap_or_default();
        for (angles, from) in self.angles.iter_mut().zip([cos, sin]) {
            resize(angles, from.len(), &mut self.taken)?;
            angles.copy_from_slice(from);
        }
        Ok(())
    }

    /// Takes pages for so many positions, or leaves what there was.
    fn grow(&mut self, len: usize) -> Result<(), OpError> {
        let (n_before, n_pages) = (self.len.div_ceil(PAGE_LEN), len.div_ceil(PAGE_LEN));
        let n_chunks = AttentionScratch::parts_at_most(len) as u64;
        let page_bytes = self.shape.kv.page_bytes() as u64;
        let n_more = n_pages.saturating_sub(n_before).saturating_mul(self.shape.n_layers) as u64;
        let scratch = Scratch { n_chunks, ..Scratch::default() };
        self.taken.more(n_more.saturating_mul(page_bytes), scratch)?;
        let mut n_made = 0;
        for layer in &mut self.layers {
            while layer.len() < n_pages {
                match KvPage::zeroed(self.shape.kv) {
                    Ok(page) => layer.push(page),
                    Err(error) => {
                        self.taken.less((n_more - n_made) * page_bytes);
                        self.drop_pages(n_before);
                        return Err(error);
                    }
                }
                n_made += 1;
            }
        }
        Ok(())
    }

    /// Frees pages from number `n_pages` of each layer on.
    fn drop_pages(&mut self, n_pages: usize) {
        for layer in &mut self.layers {
            let n_dropped = layer.len().saturating_sub(n_pages);
            layer.truncate(n_pages);
            self.taken.less((n_dropped * self.shape.kv.page_bytes()) as u64);
        }
    }

    /// Forgets positions from `len` on; with any of its positions a pass is over.
    pub(super) fn truncate(&mut self, len: usize) {
        if len < self.len {
            self.n_tokens = 0;
        }
        self.len = self.len.min(len);
        self.drop_pages(self.len.div_ceil(PAGE_LEN));
    }

    /// A copy of the first positions.
    pub(super) fn copy(&self, shared: &Arc<Shared>, len: usize) -> Result<Self, OpError> {
        let mut copy = Self::new(self.shape, Taken::new(shared, 0, Scratch::default())?);
        copy.grow(self.len.min(len))?;
        copy.len = self.len.min(len);
        for (copies, pages) in copy.layers.iter_mut().zip(&self.layers) {
            for (copy, page) in copies.iter_mut().zip(pages) {
                copy.copy_from(page);
            }
        }
        Ok(copy)
    }

    /// Writes keys and values of positions from `first` on, `[n_tokens, n_kv_heads · d_head]`.
    pub(super) fn write_pages(
        &mut self,
        layer: usize,
        first: usize,
        keys: &[f32],
        values: &[f32],
    ) -> Result<(), OpError> {
        let width = self.shape.kv.n_kv_heads * self.shape.kv.d_head;
        let n_tokens = keys.len() / width.max(1);
        let mut done = 0;
        while done < n_tokens {
            let position = first + done;
            let n = (PAGE_LEN - position % PAGE_LEN).min(n_tokens - done);
            let part = done * width..(done + n) * width;
            let page = &mut self.layers[layer][position / PAGE_LEN];
            page.write(position % PAGE_LEN, &keys[part.clone()], &values[part])?;
            done += n;
        }
        Ok(())
    }

    /// Adds what a network gave to the stream: the host's part, then the device's, then the bias, in the
    /// order in which a host adds them.
    pub(super) fn add_network(&mut self, network: &[f32], part: Option<&[f32]>, bias: &[f32]) {
        let d_model = self.shape.d_model.max(1);
        for (at, (x, &y)) in self.slot_mut(Slot::Residual).iter_mut().zip(network).enumerate() {
            let mut sum = part.map_or(0.0, |part| part[at]) + y;
            if !bias.is_empty() {
                sum += bias[at % d_model];
            }
            *x += sum;
        }
    }
}

/// Gives a vector that length, within the budget; new values are zeros.
fn resize(values: &mut Vec<f32>, len: usize, taken: &mut Taken) -> Result<(), OpError> {
    let before = values.capacity();
    if len > before {
        let more = (len - before) as u64 * size_of::<f32>() as u64;
        taken.more(more, Scratch::default())?;
        values.clear();
        if values.try_reserve_exact(len).is_err() {
            taken.less(more);
            let (bytes, source) = (len * size_of::<f32>(), std::io::ErrorKind::OutOfMemory.into());
            return Err(OpError::Allocation { bytes, source });
        }
    }
    values.resize(len, 0.0);
    Ok(())
}
