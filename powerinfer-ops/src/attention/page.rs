//! A page of a key-value cache: where each element lies, and in which type.

use std::fmt;
use std::str::FromStr;

use bytemuck::Zeroable;
use half::f16;
use half::slice::HalfFloatSliceExt;

use crate::bytes::{LINE_BYTES, Line};
use crate::cpu::attention_rows::{COLUMNS, SPAN};
use crate::error::OpError;

/// Positions in a page of a key-value cache.
pub const PAGE_LEN: usize = 64;

// The scores of a page are one row of a panel, its values the rows of one.
const _: () = assert!(PAGE_LEN == SPAN && PAGE_LEN.is_multiple_of(COLUMNS));

/// What a key-value cache holds its elements as.
///
/// # Examples
/// ```
/// use powerinfer_ops::attention::KvDtype;
/// assert_eq!("f16".parse::<KvDtype>()?, KvDtype::F16);
/// assert_eq!(KvDtype::default().to_string(), "f32");
/// assert!("q8_0".parse::<KvDtype>().is_err());
/// # Ok::<(), powerinfer_ops::OpError>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum KvDtype {
    /// 32-bit floats: keys and values as they were computed.
    #[default]
    F32,
    /// 16-bit floats of IEEE 754: half the memory and half of what a token reads, each element
    /// rounded to 11 bits. What lies beyond ±65504 becomes infinite.
    F16,
}

impl KvDtype {
    /// Every type.
    pub const ALL: [Self; 2] = [Self::F32, Self::F16];

    /// The name, as on a command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
        }
    }

    /// Bytes of an element.
    #[must_use]
    pub fn size_bytes(self) -> usize {
        match self {
            Self::F32 => size_of::<f32>(),
            Self::F16 => size_of::<f16>(),
        }
    }
}

impl fmt::Display for KvDtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for KvDtype {
    type Err = OpError;

    fn from_str(name: &str) -> Result<Self, OpError> {
        Self::ALL.into_iter().find(|dtype| dtype.name() == name).ok_or_else(|| {
            OpError::UnknownKvDtype { found: name.to_owned(), supported: "f32, f16" }
        })
    }
}

/// What the pages of a layer's cache hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct KvLayout {
    /// Key and value heads.
    pub n_kv_heads: usize,
    /// Values in a head.
    pub d_head: usize,
    /// What they are held as.
    pub dtype: KvDtype,
}

impl KvLayout {
    /// Memory of a page, in bytes; saturated. Values of a head are padded to a multiple of sixteen.
    ///
    /// # Examples
    /// ```
    /// use powerinfer_ops::attention::{KvDtype, KvLayout};
    /// let layout = KvLayout { n_kv_heads: 4, d_head: 64, dtype: KvDtype::F16 };
    /// assert_eq!(layout.page_bytes(), 64 * 2 * 4 * 64 * 2); // positions, keys and values, heads
    /// ```
    #[must_use]
    pub fn page_bytes(&self) -> usize {
        self.n_kv_heads.saturating_mul(self.head_bytes())
    }

    /// Bytes of keys and values of a head: a multiple of a cache line.
    fn head_bytes(&self) -> usize {
        self.keys_bytes().saturating_add(
            PAGE_LEN.saturating_mul(self.padded()).saturating_mul(self.dtype.size_bytes()),
        )
    }

    fn keys_bytes(&self) -> usize {
        PAGE_LEN.saturating_mul(self.d_head).saturating_mul(self.dtype.size_bytes())
    }

    /// Elements from one value row to the next.
    pub(crate) fn padded(&self) -> usize {
        self.d_head.checked_next_multiple_of(COLUMNS).unwrap_or(usize::MAX)
    }
}

/// Keys and values of [`PAGE_LEN`] positions in one layer.
///
/// For each head the keys lie transposed, `[d_head, PAGE_LEN]`, and then the values, `[PAGE_LEN,
/// d_head]` with rows padded by zeros: both are read as rows that are weighted and added up.
///
/// # Examples
/// ```
/// use powerinfer_ops::attention::{KvDtype, KvLayout, KvPage};
/// let layout = KvLayout { n_kv_heads: 2, d_head: 3, dtype: KvDtype::F16 };
/// let mut page = KvPage::zeroed(layout)?;
/// page.write(5, &[1., 2., 3., 4., 5., 6.], &[-1., -2., -3., -4., -5., -6.])?;
/// assert_eq!(page.key(1, 5), [4., 5., 6.]);
/// assert_eq!(page.value(0, 5), [-1., -2., -3.]);
/// assert_eq!(page.value(0, 6), [0.; 3]);
/// # Ok::<(), powerinfer_ops::OpError>(())
/// ```
#[derive(Clone)]
pub struct KvPage {
    layout: KvLayout,
    lines: Vec<Line>,
}

impl KvPage {
    /// A page of zeros.
    ///
    /// # Errors
    /// [`OpError::Allocation`] if the system does not give the memory.
    pub fn zeroed(layout: KvLayout) -> Result<Self, OpError> {
        let bytes = layout.page_bytes();
        let mut lines = Vec::new();
        lines.try_reserve_exact(bytes / LINE_BYTES).map_err(|_| OpError::Allocation {
            bytes,
            source: std::io::ErrorKind::OutOfMemory.into(),
        })?;
        lines.resize(bytes / LINE_BYTES, Line::zeroed());
        Ok(Self { layout, lines })
    }

    /// A page of the same contents.
    ///
    /// # Errors
    /// As [`zeroed`](Self::zeroed).
    pub fn try_clone(&self) -> Result<Self, OpError> {
        let mut page = Self::zeroed(self.layout)?;
        page.lines.copy_from_slice(&self.lines);
        Ok(page)
    }

    /// Takes over the contents of a page of the same layout.
    pub(crate) fn copy_from(&mut self, page: &Self) {
        self.lines.copy_from_slice(&page.lines);
    }

    /// What the page holds.
    #[must_use]
    pub fn layout(&self) -> KvLayout {
        self.layout
    }

    /// Writes keys and values of the positions from `first` on, counted from the page's beginning.
    ///
    /// # Shapes
    /// `keys`, `values` `[n_positions, n_kv_heads · d_head]`
    ///
    /// # Errors
    /// [`OpError::Shape`] if they differ in length, are no whole positions or go beyond the page.
    pub fn write(&mut self, first: usize, keys: &[f32], values: &[f32]) -> Result<(), OpError> {
        let KvLayout { n_kv_heads, d_head, dtype } = self.layout;
        let width = n_kv_heads * d_head;
        let most = PAGE_LEN.saturating_sub(first) * width;
        let whole = keys.len().checked_rem(width).unwrap_or(keys.len()) == 0;
        let (op, what) = ("KvPage::write", "keys");
        if !whole || keys.len() > most {
            return Err(OpError::Shape { op, what, expected: vec![most], found: vec![keys.len()] });
        }
        if values.len() != keys.len() {
            let (what, expected, found) = ("values", vec![keys.len()], vec![values.len()]);
            return Err(OpError::Shape { op, what, expected, found });
        }
        match dtype {
            KvDtype::F32 => self.write_as(first, keys, values, |from, to: &mut [f32]| {
                to.copy_from_slice(from);
            }),
            KvDtype::F16 => self.write_as(first, keys, values, |from, to: &mut [f16]| {
                to.convert_from_f32_slice(from);
            }),
        }
        Ok(())
    }

    /// The key of a head at a position of the page.
    ///
    /// # Panics
    /// If there is no such head or position.
    #[must_use]
    pub fn key(&self, head: usize, position: usize) -> Vec<f32> {
        assert!(position < PAGE_LEN, "position {position} of {PAGE_LEN}");
        let element = |d| self.element(self.keys(head), d * PAGE_LEN + position);
        (0..self.layout.d_head).map(element).collect()
    }

    /// The value of a head at a position of the page.
    ///
    /// # Panics
    /// If there is no such head or position.
    #[must_use]
    pub fn value(&self, head: usize, position: usize) -> Vec<f32> {
        assert!(position < PAGE_LEN, "position {position} of {PAGE_LEN}");
        let first = position * self.layout.padded();
        let element = |d| self.element(self.values(head), first + d);
        (0..self.layout.d_head).map(element).collect()
    }

    /// `[d_head, PAGE_LEN]` elements.
    pub(crate) fn keys(&self, head: usize) -> &[u8] {
        &self.head(head)[..self.layout.keys_bytes()]
    }

    /// `[PAGE_LEN, padded d_head]` elements.
    pub(crate) fn values(&self, head: usize) -> &[u8] {
        &self.head(head)[self.layout.keys_bytes()..]
    }

    fn head(&self, head: usize) -> &[u8] {
        let bytes = self.layout.head_bytes();
        &bytemuck::cast_slice(&self.lines)[head * bytes..][..bytes]
    }

    fn element(&self, elements: &[u8], index: usize) -> f32 {
        match self.layout.dtype {
            KvDtype::F32 => bytemuck::cast_slice::<_, f32>(elements)[index],
            KvDtype::F16 => bytemuck::cast_slice::<_, f16>(elements)[index].to_f32(),
        }
    }

    fn write_as<T: bytemuck::Pod + Default>(
        &mut self,
        first: usize,
        keys: &[f32],
        values: &[f32],
        convert: impl Fn(&[f32], &mut [T]),
    ) {
        let KvLayout { n_kv_heads, d_head, .. } = self.layout;
        let (padded, head_len) = (self.layout.padded(), self.layout.head_bytes() / size_of::<T>());
        let width = n_kv_heads * d_head;
        if width == 0 {
            return;
        }
        let page: &mut [T] = bytemuck::cast_slice_mut(&mut self.lines);
        let (keys, values) = (keys.chunks_exact(width), values.chunks_exact(width));
        for (head, page) in page.chunks_exact_mut(head_len).enumerate() {
            let (page_keys, page_values) = page.split_at_mut(d_head * PAGE_LEN);
            for (position, (keys, values)) in (first..).zip(keys.clone().zip(values.clone())) {
                let key = &keys[head * d_head..][..d_head];
                let value = &values[head * d_head..][..d_head];
                convert(value, &mut page_values[position * padded..][..d_head]);
                let mut some = [T::default(); COLUMNS];
                for (rows, key) in page_keys.chunks_mut(COLUMNS * PAGE_LEN).zip(key.chunks(COLUMNS))
                {
                    let some = &mut some[..key.len()];
                    convert(key, some);
                    for (row, &mut element) in rows.chunks_exact_mut(PAGE_LEN).zip(some) {
                        row[position] = element;
                    }
                }
            }
        }
    }
}

impl fmt::Debug for KvPage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "KvPage({:?})", self.layout)
    }
}
