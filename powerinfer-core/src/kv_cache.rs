//! Keys and values of the tokens so far, in pages that come with use.

use std::fmt;
use std::sync::Arc;

use powerinfer_ops::attention::{KvDtype, KvLayout, KvPage, KvPages, PAGE_LEN};
use powerinfer_ops::{DeviceSequence, FastDevice, OpError, SequenceShape};

use crate::error::{Error, Result};

/// What a cache holds for each token.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct KvShape {
    /// Layers with attention. May be 0 for a model without any: its cache still counts tokens.
    pub n_layers: usize,
    /// Heads of keys and values in a layer.
    pub n_kv_heads: usize,
    /// Values in a head.
    pub d_head: usize,
    /// Tokens that the context holds. Nothing is reserved for them.
    pub max_context: usize,
    /// What keys and values are held as.
    pub dtype: KvDtype,
}

impl KvShape {
    fn layout(&self) -> KvLayout {
        let Self { n_kv_heads, d_head, dtype, .. } = *self;
        KvLayout { n_kv_heads, d_head, dtype }
    }

    /// Memory of a cache of `n_tokens`, in bytes; saturated.
    ///
    /// # Examples
    /// ```
    /// use powerinfer_core::KvShape;
    /// let shape = KvShape { n_layers: 22, n_kv_heads: 4, d_head: 64, ..KvShape::default() };
    /// assert_eq!(shape.size_bytes(0), 0);
    /// assert_eq!(shape.size_bytes(2048), 2048 * 22 * 2 * 4 * 64 * 4);
    /// ```
    #[must_use]
    pub fn size_bytes(&self, n_tokens: usize) -> usize {
        let n_pages = n_tokens.div_ceil(PAGE_LEN).saturating_mul(self.n_layers);
        n_pages.saturating_mul(self.layout().page_bytes())
    }
}

/// Where the layers of a model have their keys and values.
#[derive(Debug, Clone)]
struct KvDevice {
    device: Arc<dyn FastDevice>,
    shape: SequenceShape,
    /// For each layer its place among those of the host; `None` for the device's.
    host_places: Arc<[Option<usize>]>,
    /// Shared by clones, as pages are; none before the first reservation.
    sequence: Option<Arc<dyn DeviceSequence>>,
}

/// Keys and values of one sequence of tokens, in f32 or f16.
///
/// Memory comes in pages of 64 positions as the sequence grows and goes when it is cut, so a
/// large `max_context` costs nothing until it is used, and what is there never moves. A clone shares
/// the pages; whichever goes on first takes a copy of the one page that it writes on.
///
/// A forward pass over n tokens calls [`reserve`](Self::reserve) for n, then in each layer
/// [`write`](Self::write) and reads [`layer`](Self::layer), and at the end
/// [`commit`](Self::commit). One that fails before that leaves the cache as it was.
///
/// Layers whose attention runs on a fast device have their keys and values there, in a
/// [`sequence`](Self::sequence) that the cache owns; there are no pages for them here.
///
/// # Examples
/// ```
/// use powerinfer_core::{Error, KvCache, KvShape};
///
/// let mut shape = KvShape { n_layers: 1, n_kv_heads: 2, d_head: 4, ..KvShape::default() };
/// shape.max_context = 3;
/// let mut cache = KvCache::new(shape);
/// cache.reserve(2)?;
/// cache.write(0, &[1.0; 2 * 8], &[2.0; 2 * 8])?;
/// assert_eq!(cache.len(), 0);
/// cache.commit();
/// assert_eq!(cache.len(), 2);
/// assert!(matches!(cache.reserve(2), Err(Error::ContextExceeded { have: 2, requested: 2, max: 3 })));
/// # Ok::<(), Error>(())
/// ```
#[derive(Clone)]
pub struct KvCache {
    shape: KvShape,
    device: Option<KvDevice>,
    /// Page p of the host's layer l is at `p * n_host_layers + l`.
    pages: Vec<Arc<KvPage>>,
    len: usize,
    reserved: usize,
}

impl KvCache {
    /// An empty cache. Allocates nothing.
    #[must_use]
    pub fn new(shape: KvShape) -> Self {
        Self { shape, device: None, pages: Vec::new(), len: 0, reserved: 0 }
    }

    /// An empty cache for a model of `d_model` values a token, of which the layers that `on_device` names,
    /// one entry for each, have their keys and values on a device. Allocates nothing.
    ///
    /// # Errors
    /// [`Error::CacheShape`] if there are more or fewer entries than layers.
    pub fn with_device(
        shape: KvShape,
        d_model: usize,
        device: Arc<dyn FastDevice>,
        on_device: &[bool],
    ) -> Result<Self> {
        if on_device.len() != shape.n_layers {
            let (expected, found) = (shape.n_layers, on_device.len());
            return Err(Error::CacheShape { what: "layers on a device or not", expected, found });
        }
        let mut n_host = 0;
        let host_places = on_device.iter().map(|&on_device| {
            let place = (!on_device).then_some(n_host);
            n_host += usize::from(!on_device);
            place
        });
        let host_places = host_places.collect();
        let n_layers = on_device.iter().filter(|&&on_device| on_device).count();
        let sequence_shape = SequenceShape { d_model, n_layers, kv: shape.layout() };
        let device = KvDevice { device, shape: sequence_shape, host_places, sequence: None };
        Ok(Self { device: Some(device), ..Self::new(shape) })
    }

    /// What lies on the device, with room reserved for the pass that is under way; `None` if there is no
    /// device or no pass.
    pub fn sequence(&mut self) -> Option<&mut (dyn DeviceSequence + 'static)> {
        let sequence = self.device.as_mut()?.sequence.as_mut()?;
        // the only one since the reservation
        Arc::get_mut(sequence).filter(|_| self.reserved > 0)
    }

    /// Layers whose pages lie here.
    fn n_host_layers(&self) -> usize {
        self.shape.n_layers - self.device.as_ref().map_or(0, |device| device.shape.n_layers)
    }

    /// The place of a layer among those of the host.
    fn host_place(&self, layer: usize) -> Option<usize> {
        match &self.device {
            Some(device) => device.host_places.get(layer).copied().flatten(),
            None => (layer < self.shape.n_layers).then_some(layer),
        }
    }

    /// Tokens in the cache.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether no token is in the cache.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Tokens that fit.
    #[must_use]
    pub fn max_context(&self) -> usize {
        self.shape.max_context
    }

    /// Makes fewer tokens fit; never more than the model allows.
    pub fn limit_context(&mut self, max_context: usize) {
        self.shape.max_context = self.shape.max_context.min(max_context);
    }

    /// Tokens of the forward pass that is under way: reserved and not yet committed.
    #[must_use]
    pub fn reserved(&self) -> usize {
        self.reserved
    }

    /// Memory that keys and values take here now, in bytes, pages that clones share counted in each.
    #[must_use]
    pub fn size_bytes(&self) -> usize {
        self.pages.len() * self.shape.layout().page_bytes()
    }

    /// Memory that they take on a device now, in bytes, with the residual stream of a pass.
    #[must_use]
    pub fn device_bytes(&self) -> u64 {
        let sequence = self.device.as_ref().and_then(|device| device.sequence.as_ref());
        sequence.map_or(0, |sequence| sequence.size_bytes())
    }

    /// What keys and values are held as.
    #[must_use]
    pub fn dtype(&self) -> KvDtype {
        self.shape.dtype
    }

    /// Forgets all tokens from position `len` on, and a reservation; frees pages that hold
    /// nothing any more. Does nothing to fewer tokens than `len`.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
        self.reserved = 0;
        self.pages.truncate(self.len.div_ceil(PAGE_LEN).saturating_mul(self.n_host_layers()));
        let Some(device) = &mut self.device else { return };
        match &mut device.sequence {
            sequence if self.len == 0 => *sequence = None,
            // one that a clone sees, too, is left alone: the next reservation copies what is left here
            Some(sequence) => {
                if let Some(sequence) = Arc::get_mut(sequence) {
                    sequence.truncate(self.len);
                }
            }
            None => {}
        }
    }

    /// Forgets all tokens and frees their memory.
    pub fn clear(&mut self) {
        self.truncate(0);
    }

    /// Makes room for `n_tokens` more: the first thing a forward pass does. A reservation that
    /// was not committed is dropped.
    ///
    /// # Errors
    /// [`Error::ContextExceeded`] if they do not fit, [`Error::Allocation`]. The tokens in the
    /// cache stay as they are.
    pub fn reserve(&mut self, n_tokens: usize) -> Result<()> {
        if self.reserved > 0 {
            self.truncate(self.len);
        }
        let (have, max) = (self.len, self.shape.max_context);
        let end = have.checked_add(n_tokens).filter(|end| *end <= max);
        let end = end.ok_or(Error::ContextExceeded { have, requested: n_tokens, max })?;
        let n_layers = self.n_host_layers();
        let n_pages = end.div_ceil(PAGE_LEN).saturating_mul(n_layers);
        while self.pages.len() < n_pages {
            self.pages.push(Arc::new(KvPage::zeroed(self.shape.layout()).map_err(allocation)?));
        }
        // pages that a clone sees, too, and that are to be written on
        for page in &mut self.pages[have / PAGE_LEN * n_layers..] {
            if Arc::get_mut(page).is_none() {
                *page = Arc::new(page.try_clone().map_err(allocation)?);
            }
        }
        if let Some(device) = &mut self.device {
            device.reserve(have)?;
        }
        self.reserved = n_tokens;
        Ok(())
    }

    /// Writes keys and values of the reserved tokens in one layer.
    ///
    /// # Shapes
    /// `keys`, `values` `[n_tokens, n_kv_heads · d_head]`, n_tokens as reserved
    ///
    /// # Errors
    /// [`Error::CacheShape`] if there is no such layer or a slice has another length.
    pub fn write(&mut self, layer: usize, keys: &[f32], values: &[f32]) -> Result<()> {
        let KvShape { n_layers: expected, n_kv_heads, d_head, .. } = self.shape;
        let wrong = Error::CacheShape { what: "layer", expected, found: layer };
        let (n_layers, layer) = (self.n_host_layers(), self.host_place(layer).ok_or(wrong)?);
        // pages of this size exist or there is nothing reserved, so the products fit
        let width = n_kv_heads.saturating_mul(d_head);
        let expected = self.reserved.saturating_mul(width);
        for (what, found) in [("keys", keys.len()), ("values", values.len())] {
            if found != expected {
                return Err(Error::CacheShape { what, expected, found });
            }
        }
        let mut done = 0;
        while done < self.reserved {
            let position = self.len + done;
            let n = (PAGE_LEN - position % PAGE_LEN).min(self.reserved - done);
            let part = done * width..(done + n) * width;
            let page = &mut self.pages[position / PAGE_LEN * n_layers + layer];
            Arc::make_mut(page).write(position % PAGE_LEN, &keys[part.clone()], &values[part])?;
            done += n;
        }
        Ok(())
    }

    /// The pages of one layer, those of reserved positions included.
    ///
    /// # Panics
    /// If there is no such layer, or it is a device's.
    #[must_use]
    pub fn layer(&self, layer: usize) -> LayerPages<'_> {
        let place = self.host_place(layer);
        assert!(place.is_some(), "layer {layer} of {}", self.shape.n_layers);
        LayerPages { cache: self, place: place.unwrap_or_default() }
    }

    /// Ends a forward pass: the reserved tokens are in the cache now.
    pub fn commit(&mut self) {
        self.len += self.reserved;
        self.reserved = 0;
    }
}

impl fmt::Debug for KvCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KvCache")
            .field("shape", &self.shape)
            .field("len", &self.len)
            .field("reserved", &self.reserved)
            .field("size_bytes", &self.size_bytes())
            .field("device_bytes", &self.device_bytes())
            .finish_non_exhaustive()
    }
}

impl KvDevice {
    /// Makes the sequence the only one, with the first `len` positions.
    fn reserve(&mut self, len: usize) -> Result<()> {
        let Some(sequence) = &mut self.sequence else {
            self.sequence = Some(self.device.sequence(self.shape)?.into());
            return Ok(());
        };
        if Arc::get_mut(sequence).is_none() {
            *sequence = sequence.try_clone(len)?.into();
        }
        Ok(())
    }
}

fn allocation(error: OpError) -> Error {
    match error {
        OpError::Allocation { bytes, .. } => {
            Error::Allocation { what: "a page of the kv cache", bytes }
        }
        other => other.into(),
    }
}

/// The keys and values of one layer of a [`KvCache`], as attention reads them.
#[derive(Debug, Clone, Copy)]
pub struct LayerPages<'a> {
    cache: &'a KvCache,
    place: usize,
}

impl KvPages for LayerPages<'_> {
    /// # Panics
    /// If no position of that page was ever reserved.
    fn page(&self, index: usize) -> &KvPage {
        &self.cache.pages[index * self.cache.n_host_layers() + self.place]
    }
}

#[cfg(test)]
mod tests;
