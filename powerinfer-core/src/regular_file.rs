//! Files on disk, read at positions and never mapped: a file that somebody cuts short while it is
//! in use gives an error here, where a mapping would end the process.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use crate::allocation::try_zeroed;
use crate::error::{Error, Result};

/// An open regular file with the length it had when it was opened.
#[derive(Debug)]
pub(crate) struct RegularFile {
    path: PathBuf,
    len: u64,
    reader: PositionedReader,
}

impl RegularFile {
    /// Opens `path`, which may be a link to a file.
    ///
    /// # Errors
    /// [`Error::Io`] if it is not there, is not a regular file or may not be read.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let open = || {
            // asked before opening: to open a pipe for reading waits for a writer
            if !fs::metadata(path)?.is_file() {
                return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
            }
            let file = File::open(path)?;
            Ok((file.metadata()?.len(), file))
        };
        let (len, file) = open().map_err(|source| Error::Io { path: path.to_owned(), source })?;
        Ok(Self { path: path.to_owned(), len, reader: PositionedReader::new(file) })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Length in bytes at the time of opening.
    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    /// Fills `bytes` from `offset` on, from any number of threads at once.
    ///
    /// # Errors
    /// [`Error::Io`], also where the file ends early.
    pub(crate) fn read_at(&self, offset: u64, bytes: &mut [u8]) -> Result<()> {
        self.reader
            .read_exact_at(bytes, offset)
            .map_err(|source| Error::Io { path: self.path.clone(), source })
    }

    /// Reads the whole file if it is not longer than `max_bytes`.
    ///
    /// # Errors
    /// [`Error::FileTooLong`] before anything is read, [`Error::Allocation`], [`Error::Io`].
    pub(crate) fn read_all(&self, what: &'static str, max_bytes: u64) -> Result<Vec<u8>> {
        if self.len > max_bytes {
            let (path, found_bytes) = (self.path.clone(), self.len);
            return Err(Error::FileTooLong { path, max_bytes, found_bytes });
        }
        let len =
            usize::try_from(self.len).map_err(|_| Error::Allocation { what, bytes: usize::MAX })?;
        let mut bytes = try_zeroed(what, len)?;
        self.read_at(0, &mut bytes)?;
        Ok(bytes)
    }
}

#[cfg(unix)]
#[derive(Debug)]
struct PositionedReader(File);

#[cfg(unix)]
impl PositionedReader {
    fn new(file: File) -> Self {
        Self(file)
    }

    fn read_exact_at(&self, bytes: &mut [u8], offset: u64) -> io::Result<()> {
        std::os::unix::fs::FileExt::read_exact_at(&self.0, bytes, offset)
    }
}

/// Where the system has no positioned read of its own, one seek and read at a time.
#[cfg(not(unix))]
#[derive(Debug)]
struct PositionedReader(std::sync::Mutex<File>);

#[cfg(not(unix))]
impl PositionedReader {
    fn new(file: File) -> Self {
        Self(std::sync::Mutex::new(file))
    }

    fn read_exact_at(&self, bytes: &mut [u8], offset: u64) -> io::Result<()> {
        use std::io::{Read, Seek, SeekFrom};
        // a reader that panicked leaves nothing behind that the next seek does not set
        let mut file = self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        file.seek(SeekFrom::Start(offset))?;
        file.read_exact(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_the_bytes_at_the_position() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        fs::write(&path, b"0123456789").unwrap();
        let file = RegularFile::open(&path).unwrap();
        let mut bytes = [0; 3];
        file.read_at(6, &mut bytes).unwrap();
        assert_eq!(&bytes, b"678");
        assert_eq!(file.read_all("a test", 10).unwrap(), b"0123456789");
    }

    #[test]
    fn a_file_cut_short_after_opening_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        fs::write(&path, [1; 100]).unwrap();
        let file = RegularFile::open(&path).unwrap();
        File::options().write(true).open(&path).unwrap().set_len(50).unwrap();
        let error = file.read_at(40, &mut [0; 20]).unwrap_err();
        assert!(matches!(error, Error::Io { source, .. }
            if source.kind() == io::ErrorKind::UnexpectedEof));
    }

    #[test]
    fn a_file_over_the_limit_is_not_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        // sparse: a tebibyte on paper
        File::create(&path).unwrap().set_len(1 << 40).unwrap();
        let error = RegularFile::open(&path).unwrap().read_all("a test", 16).unwrap_err();
        assert!(matches!(error, Error::FileTooLong { max_bytes: 16, found_bytes, .. }
            if found_bytes == 1 << 40));
    }

    #[test]
    fn what_is_not_a_file_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        for path in [dir.path().to_owned(), dir.path().join("missing")] {
            let error = RegularFile::open(&path).unwrap_err();
            assert!(matches!(error, Error::Io { path: named, .. } if named == path));
        }
    }
}
