//! Reading the header of a file from front to back, never more of it than there is.

use crate::allocation::try_zeroed;
use crate::error::{Error, Result};
use crate::regular_file::RegularFile;

/// Longest header that is read; a large vocabulary takes some mebibytes.
const MAX_HEADER_BYTES: u64 = 256 << 20;
/// Bytes that are read ahead.
const BUFFER_BYTES: u64 = 256 << 10;

/// A file and how far it has been read.
#[derive(Debug)]
pub(super) struct HeaderReader<'a> {
    file: &'a RegularFile,
    position: u64,
    /// Bytes of the file from `buffer_start` on.
    buffer: Vec<u8>,
    buffer_start: u64,
}

impl<'a> HeaderReader<'a> {
    pub(super) fn new(file: &'a RegularFile) -> Self {
        Self { file, position: 0, buffer: Vec::new(), buffer_start: 0 }
    }

    pub(super) fn position(&self) -> u64 {
        self.position
    }

    pub(super) fn file_len(&self) -> u64 {
        self.file.len()
    }

    /// Bytes that may still be read.
    pub(super) fn left(&self) -> u64 {
        self.file.len().min(MAX_HEADER_BYTES) - self.position
    }

    pub(super) fn error(
        &self,
        field: impl Into<String>,
        expected: impl Into<String>,
        found: impl Into<String>,
    ) -> Error {
        Error::GgufHeader {
            path: self.file.path().to_owned(),
            field: field.into(),
            expected: expected.into(),
            found: found.into(),
        }
    }

    pub(super) fn array<const N: usize>(&mut self, field: &str) -> Result<[u8; N]> {
        let mut bytes = [0; N];
        self.check(field, Some(N as u64))?;
        self.fill(&mut bytes)?;
        Ok(bytes)
    }

    pub(super) fn u32(&mut self, field: &str) -> Result<u32> {
        self.array(field).map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self, field: &str) -> Result<u64> {
        self.array(field).map(u64::from_le_bytes)
    }

    /// The next `len` bytes; `None` for more than 64 bits count.
    pub(super) fn bytes(&mut self, field: &str, len: Option<u64>) -> Result<Vec<u8>> {
        let len = self.check(field, len)?;
        let mut bytes = try_zeroed("a value of a header", len)?;
        self.fill(&mut bytes)?;
        Ok(bytes)
    }

    /// A number of bytes and as many bytes.
    pub(super) fn counted_bytes(&mut self, field: &str, max_bytes: u64) -> Result<Vec<u8>> {
        let len = self.u64(field)?;
        if len > max_bytes {
            return Err(self.error(field, format!("at most {max_bytes} bytes"), len.to_string()));
        }
        self.bytes(field, Some(len))
    }

    /// `n` times a number of bytes and as many bytes, as they are in the file.
    pub(super) fn counted_strings(&mut self, field: &str, n: u64) -> Result<Vec<u8>> {
        self.check(field, n.checked_mul(8))?;
        let start = self.position;
        for _ in 0..n {
            let len = self.u64(field)?;
            let len = self.check(field, Some(len))?;
            self.position += len as u64;
        }
        let len = self.position - start;
        self.position = start;
        self.bytes(field, Some(len))
    }

    /// Fails if fewer than `len` bytes are left; gives it as an index.
    fn check(&self, field: &str, len: Option<u64>) -> Result<usize> {
        let left = self.left();
        match len {
            // at most MAX_HEADER_BYTES
            Some(len) if len <= left => Ok(len as usize),
            _ => {
                let asked = len.map_or("more than 2⁶⁴".to_owned(), |len| len.to_string());
                let expected = format!("{asked} bytes");
                Err(self.error(field, expected, format!("{left} bytes left")))
            }
        }
    }

    /// Fills `bytes`, which are there.
    fn fill(&mut self, bytes: &mut [u8]) -> Result<()> {
        let len = bytes.len() as u64;
        if len >= BUFFER_BYTES {
            self.file.read_at(self.position, bytes)?;
        } else {
            let end = self.buffer_start + self.buffer.len() as u64;
            if self.position < self.buffer_start || self.position + len > end {
                let ahead = BUFFER_BYTES.min(self.file.len() - self.position);
                self.buffer.resize(ahead as usize, 0);
                self.file.read_at(self.position, &mut self.buffer)?;
                self.buffer_start = self.position;
            }
            let start = (self.position - self.buffer_start) as usize;
            bytes.copy_from_slice(&self.buffer[start..start + bytes.len()]);
        }
        self.position += len;
        Ok(())
    }
}
