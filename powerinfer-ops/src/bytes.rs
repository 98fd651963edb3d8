//! Memory for weights: 64-byte aligned, in huge pages where the system offers them.

use std::fmt;

use bytemuck::{Pod, Zeroable};
use memmap2::MmapMut;

use crate::error::OpError;

/// A cache line. Rows start on one, so no row shares its first line with another.
pub(crate) const LINE_BYTES: usize = 64;

/// From this size on memory is mapped, below it comes from the heap: a huge page is 2 MiB, and
/// a mapping of its own for each bias vector would waste a page and a system call apiece.
const MAPPED_BYTES: usize = 1 << 20;

#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C, align(64))]
pub(crate) struct Line([u8; LINE_BYTES]);

/// Scratch that begins at a cache line and is reused: registers as wide as a line are loaded half as
/// fast where they lie across two.
#[derive(Debug, Default)]
pub(crate) struct AlignedScratch(Vec<Line>);

impl AlignedScratch {
    /// Room for `len` values; what was there before does not matter.
    pub(crate) fn values<T: Pod>(&mut self, len: usize) -> &mut [T] {
        let n_lines = (len * size_of::<T>()).div_ceil(LINE_BYTES);
        if self.0.len() < n_lines {
            self.0.resize(n_lines, Line([0; LINE_BYTES]));
        }
        &mut bytemuck::cast_slice_mut(&mut self.0[..n_lines])[..len]
    }

    pub(crate) fn size_bytes(&self) -> usize {
        self.0.capacity() * LINE_BYTES
    }
}

/// Zeroed, 64-byte aligned bytes.
pub(crate) enum AlignedBytes {
    Heap { lines: Vec<Line>, len: usize },
    Mapped { map: MmapMut, huge: bool },
}

impl AlignedBytes {
    /// Zeroed memory.
    pub(crate) fn zeroed(len: usize) -> Result<Self, OpError> {
        if len < MAPPED_BYTES {
            let lines = vec![Line([0; LINE_BYTES]); len.div_ceil(LINE_BYTES)];
            return Ok(Self::Heap { lines, len });
        }
        let map =
            MmapMut::map_anon(len).map_err(|source| OpError::Allocation { bytes: len, source })?;
        let huge = advise_huge_pages(&map);
        Ok(Self::Mapped { map, huge })
    }

    /// The bytes.
    pub(crate) fn as_slice(&self) -> &[u8] {
        match self {
            Self::Heap { lines, len } => &bytemuck::cast_slice(lines)[..*len],
            Self::Mapped { map, .. } => map,
        }
    }

    /// The bytes, to be filled.
    pub(crate) fn as_mut_slice(&mut self) -> &mut [u8] {
        match self {
            Self::Heap { lines, len } => &mut bytemuck::cast_slice_mut(lines)[..*len],
            Self::Mapped { map, .. } => map,
        }
    }

    /// What kind of pages the system was asked for.
    pub(crate) fn page_kind(&self) -> &'static str {
        match self {
            Self::Mapped { huge: true, .. } => "transparent huge pages",
            _ => "small pages",
        }
    }
}

impl fmt::Debug for AlignedBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AlignedBytes({}, {})", self.as_slice().len(), self.page_kind())
    }
}

#[cfg(target_os = "linux")]
fn advise_huge_pages(map: &MmapMut) -> bool {
    // Only advice: a kernel without huge pages refuses it, and small pages serve as well.
    map.advise(memmap2::Advice::HugePage).is_ok()
}

#[cfg(not(target_os = "linux"))]
fn advise_huge_pages(_: &MmapMut) -> bool {
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_size_is_zeroed_and_aligned() {
        for len in [0, 1, 63, 64, 65, 4096, MAPPED_BYTES - 1, MAPPED_BYTES, MAPPED_BYTES + 1] {
            let mut bytes = AlignedBytes::zeroed(len).unwrap();
            assert_eq!(bytes.as_slice().len(), len);
            assert!(bytes.as_slice().iter().all(|&byte| byte == 0));
            if len > 0 {
                assert_eq!(bytes.as_slice().as_ptr().addr() % LINE_BYTES, 0);
                bytes.as_mut_slice()[len - 1] = 7;
                assert_eq!(bytes.as_slice()[len - 1], 7);
            }
        }
    }

    #[test]
    fn more_than_there_is_is_an_error() {
        assert!(matches!(
            AlignedBytes::zeroed(isize::MAX as usize),
            Err(OpError::Allocation { .. })
        ));
    }
}
