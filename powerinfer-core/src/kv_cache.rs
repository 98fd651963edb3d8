//! Keys and values of the tokens so far, in pages that come with use.

use std::fmt;
use std::sync::Arc;

use powerinfer_ops::OpError;
use powerinfer_ops::attention::{KvDtype, KvLayout, KvPage, KvPages, PAGE_LEN};

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
    /// Page p of layer l is at `p * n_layers + l`.
    pages: Vec<Arc<KvPage>>,
    len: usize,
    reserved: usize,
}

impl KvCache {
    /// An empty cache. Allocates nothing.
    #[must_use]
    pub fn new(shape: KvShape) -> Self {
        Self { shape, pages: Vec::new(), len: 0, reserved: 0 }
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

    /// Memory that keys and values take now, in bytes, pages that clones share counted in each.
    #[must_use]
    pub fn size_bytes(&self) -> usize {
        self.pages.len() * self.shape.layout().page_bytes()
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
        self.pages.truncate(self.len.div_ceil(PAGE_LEN).saturating_mul(self.shape.n_layers));
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
        let n_pages = end.div_ceil(PAGE_LEN).saturating_mul(self.shape.n_layers);
        while self.pages.len() < n_pages {
            self.pages.push(Arc::new(KvPage::zeroed(self.shape.layout()).map_err(allocation)?));
        }
        // pages that a clone sees, too, and that are to be written on
        for page in &mut self.pages[have / PAGE_LEN * self.shape.n_layers..] {
            if Arc::get_mut(page).is_none() {
                *page = Arc::new(page.try_clone().map_err(allocation)?);
            }
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
        let KvShape { n_layers, n_kv_heads, d_head, .. } = self.shape;
        if layer >= n_layers {
            return Err(Error::CacheShape { what: "layer", expected: n_layers, found: layer });
        }
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
    /// If there is no such layer.
    #[must_use]
    pub fn layer(&self, layer: usize) -> LayerPages<'_> {
        assert!(layer < self.shape.n_layers, "layer {layer} of {}", self.shape.n_layers);
        LayerPages { cache: self, layer }
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
            .finish_non_exhaustive()
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
    layer: usize,
}

impl KvPages for LayerPages<'_> {
    /// # Panics
    /// If no position of that page was ever reserved.
    fn page(&self, index: usize) -> &KvPage {
        &self.cache.pages[index * self.cache.shape.n_layers + self.layer]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SHAPE: KvShape =
        KvShape { n_layers: 2, n_kv_heads: 3, d_head: 2, max_context: 300, dtype: KvDtype::F32 };
    const WIDTH: usize = 6;

    /// A value that says where it belongs.
    fn value(layer: usize, position: usize, at: usize) -> f32 {
        (layer * 10_000 + position * 10 + at) as f32
    }

    fn append(cache: &mut KvCache, n_tokens: usize) {
        cache.reserve(n_tokens).unwrap();
        for layer in 0..SHAPE.n_layers {
            let keys: Vec<f32> = (0..n_tokens * WIDTH)
                .map(|i| value(layer, cache.len() + i / WIDTH, i % WIDTH))
                .collect();
            let values: Vec<f32> = keys.iter().map(|key| -key).collect();
            cache.write(layer, &keys, &values).unwrap();
        }
        cache.commit();
    }

    fn assert_holds_its_tokens(cache: &KvCache) {
        for layer in 0..SHAPE.n_layers {
            let pages = cache.layer(layer);
            for position in 0..cache.len() {
                let page = pages.page(position / PAGE_LEN);
                for head in 0..SHAPE.n_kv_heads {
                    let expected: Vec<f32> =
                        (0..2).map(|d| value(layer, position, head * 2 + d)).collect();
                    let negated: Vec<f32> = expected.iter().map(|key| -key).collect();
                    assert_eq!(page.key(head, position % PAGE_LEN), expected);
                    assert_eq!(page.value(head, position % PAGE_LEN), negated);
                }
            }
        }
    }

    proptest! {
        #[test]
        fn what_was_written_is_there_however_it_grew_and_was_cut(
            steps in prop::collection::vec((1usize..100, 0usize..4, 0usize..300), 1..8)
        ) {
            let mut cache = KvCache::new(SHAPE);
            for (n_tokens, kind, len) in steps {
                match kind {
                    0 => cache.truncate(len),
                    // a forward pass that fails half way, having written nonsense
                    1 if cache.reserve(n_tokens).is_ok() => {
                        let junk = vec![f32::NAN; n_tokens * WIDTH];
                        cache.write(0, &junk, &junk).unwrap();
                        let before = cache.len();
                        cache.truncate(before);
                    }
                    _ if cache.len() + n_tokens <= SHAPE.max_context => append(&mut cache, n_tokens),
                    _ => {}
                }
                assert_holds_its_tokens(&cache);
                prop_assert_eq!(cache.size_bytes(), SHAPE.size_bytes(cache.len()));
            }
        }
    }

    #[test]
    fn clones_share_what_is_full_and_go_their_own_ways() {
        let mut one = KvCache::new(SHAPE);
        append(&mut one, 100);
        let mut other = one.clone();
        let shared = |a: &KvCache, b: &KvCache| {
            let pairs = a.pages.iter().zip(&b.pages);
            pairs.map(|(a, b)| Arc::ptr_eq(a, b)).collect::<Vec<_>>()
        };
        assert_eq!(shared(&one, &other), [true; 4]);
        other.reserve(3).unwrap();
        let junk = [9.0; 3 * WIDTH];
        other.write(0, &junk, &junk).unwrap();
        other.commit();
        assert_eq!(shared(&one, &other), [true, true, false, false]);
        append(&mut one, 10);
        assert_holds_its_tokens(&one);
        other.truncate(100);
        assert_holds_its_tokens(&other);
        other.truncate(64);
        append(&mut other, 20);
        assert_holds_its_tokens(&other);
        assert_holds_its_tokens(&one);
    }

    #[test]
    fn a_forward_that_was_not_committed_leaves_nothing() {
        let mut cache = KvCache::new(SHAPE);
        append(&mut cache, 60);
        cache.reserve(10).unwrap();
        cache.write(1, &[f32::NAN; 60], &[f32::NAN; 60]).unwrap();
        assert_eq!((cache.len(), cache.reserved()), (60, 10));
        append(&mut cache, 1);
        assert_holds_its_tokens(&cache);
    }

    #[test]
    fn reserved_positions_can_be_read() {
        let mut cache = KvCache::new(SHAPE);
        cache.reserve(65).unwrap();
        cache.write(0, &[1.0; 65 * WIDTH], &[2.0; 65 * WIDTH]).unwrap();
        let pages = cache.layer(0);
        assert_eq!(
            (pages.page(1).key(2, 0), pages.page(1).value(2, 0)),
            (vec![1.0; 2], vec![2.0; 2])
        );
    }

    #[test]
    fn a_huge_context_reserves_nothing() {
        let shape = KvShape {
            n_layers: 4096,
            n_kv_heads: 64,
            d_head: 256,
            max_context: usize::MAX,
            dtype: KvDtype::F16,
        };
        let mut cache = KvCache::new(shape);
        assert_eq!(cache.size_bytes(), 0);
        assert!(matches!(
            KvCache::new(KvShape { n_kv_heads: usize::MAX, ..SHAPE }).reserve(1),
            Err(Error::Allocation { .. })
        ));
        assert!(matches!(
            KvCache::new(KvShape { n_layers: 0, max_context: 5, ..SHAPE }).reserve(usize::MAX),
            Err(Error::ContextExceeded { have: 0, requested: usize::MAX, max: 5 })
        ));
        cache.clear();
    }

    #[test]
    fn the_context_is_filled_to_the_last_token_and_no_further() {
        let mut cache = KvCache::new(SHAPE);
        append(&mut cache, 299);
        assert!(matches!(
            cache.reserve(2),
            Err(Error::ContextExceeded { have: 299, requested: 2, max: 300 })
        ));
        append(&mut cache, 1);
        assert!(cache.reserve(1).is_err());
        assert_eq!(cache.len(), 300);
        assert_holds_its_tokens(&cache);
    }

    #[test]
    fn a_model_without_attention_counts_tokens() {
        let mut cache = KvCache::new(KvShape { max_context: 100, ..KvShape::default() });
        cache.reserve(70).unwrap();
        cache.commit();
        cache.truncate(65);
        assert_eq!((cache.len(), cache.size_bytes()), (65, 0));
        assert!(cache.reserve(36).is_err());
    }

    #[test]
    fn wrong_sizes_are_errors() {
        let mut cache = KvCache::new(SHAPE);
        cache.reserve(2).unwrap();
        let (right, wrong) = ([0.0; 12], [0.0; 11]);
        for (layer, keys, values, what) in [
            (2, &right[..], &right[..], "layer"),
            (0, &wrong[..], &right[..], "keys"),
            (0, &right[..], &wrong[..], "values"),
        ] {
            assert!(matches!(
                cache.write(layer, keys, values),
                Err(Error::CacheShape { what: named, .. }) if named == what
            ));
        }
    }
}
