//! Weight files mapped into memory: the one place of this crate with `unsafe`.

use std::fs::File;
use std::ops::Range;
use std::sync::Arc;

use memmap2::Mmap;
use powerinfer_ops::SharedBytes;

use crate::error::{Error, Result};
use crate::regular_file::RegularFile;

/// How weights are held in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Holding {
    /// In memory of the process, in huge pages where the system has them, a neuron's weights side
    /// by side. The fastest, and what speed figures are of.
    #[default]
    Resident,
    /// Where they lie in the file, which is mapped: a model is there at once, and processes that
    /// use it share its pages. A down projection that is stored by output stays so and is computed
    /// in full, and weights that are to be held in another type are converted into memory.
    ///
    /// Nobody may change the file while it is in use: changed weights are wrong weights, and a
    /// file cut short ends the process with a signal. Map files that you control.
    Mapped,
}

/// The bytes of a tensor in a mapped file.
#[derive(Debug, Clone)]
pub struct MappedTensor {
    /// The rows, packed.
    pub bytes: SharedBytes,
    /// In which place row `i` lies, if that is not place `i` everywhere.
    pub order: Option<Arc<[u32]>>,
}

/// A file in memory.
#[derive(Debug, Clone)]
pub(super) struct MappedFile(Arc<Mmap>);

impl MappedFile {
    /// Maps a file that was opened and checked before.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::FileLength`] if the file has another length by now.
    pub(super) fn new(file: &RegularFile) -> Result<Self> {
        let failed = |source| Error::Io { path: file.path().to_owned(), source };
        let opened = File::open(file.path()).map_err(failed)?;
        let map = map(&opened).map_err(failed)?;
        if map.len() as u64 != file.len() {
            let (expected, found) = (file.len(), map.len() as u64);
            return Err(Error::FileLength { path: file.path().to_owned(), expected, found });
        }
        Ok(Self(Arc::new(map)))
    }

    /// A part of the file; none of it if it is not there.
    pub(super) fn part(&self, offset: u64, size: u64) -> SharedBytes {
        let end = offset.saturating_add(size);
        let index = |at: u64| usize::try_from(at).unwrap_or(usize::MAX);
        let range: Range<usize> = index(offset)..index(end);
        SharedBytes::new(self.0.clone(), range)
    }
}

#[allow(unsafe_code, reason = "a mapping is only as constant as its file")]
fn map(file: &File) -> std::io::Result<Mmap> {
    // SAFETY: the mapping is private to this process and read only, so nothing here changes its
    // bytes; that nobody else changes the file is what `Holding::Mapped` asks of its caller. Bytes
    // that change all the same are read as numbers, of which every bit pattern is one: they index
    // nothing.
    unsafe { Mmap::map(file) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_of_a_file_is_its_bytes() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        std::fs::write(&path, b"0123456789").unwrap();
        let file = RegularFile::open(&path).unwrap();
        let mapped = MappedFile::new(&file).unwrap();
        assert_eq!(mapped.part(2, 3).as_slice(), b"234");
        assert_eq!(mapped.part(8, 3).as_slice(), b"");
        assert_eq!(mapped.part(u64::MAX, 3).as_slice(), b"");
        std::fs::write(&path, b"01234").unwrap();
        assert!(matches!(
            MappedFile::new(&file),
            Err(Error::FileLength { expected: 10, found: 5, .. })
        ));
    }
}
