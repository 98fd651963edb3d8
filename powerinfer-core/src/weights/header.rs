//! The header of a safetensors file: 8 bytes of length, JSON, then the data.
//!
//! The file is not trusted: each number in it is checked against the length of the file before
//! anything is allocated or read for it.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use ::safetensors::Dtype;
use ::safetensors::tensor::{Metadata, TensorInfo as RawInfo};
use powerinfer_ops::WeightFormat;
use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, Visitor};

use super::{FileDtype, TensorInfo};
use crate::allocation::try_zeroed;
use crate::error::{Error, Result};
use crate::json::{self, UniqueMap};
use crate::regular_file::RegularFile;

/// The limit of the format.
pub(super) const MAX_HEADER_BYTES: u64 = 100_000_000;

/// The entry that describes the file and is no tensor.
const METADATA: &str = "__metadata__";

/// A tensor and where its bytes lie.
#[derive(Debug, Clone)]
pub(super) struct Located {
    pub(super) info: TensorInfo,
    /// First byte, counted from the start of the file.
    pub(super) offset: u64,
    /// Length in bytes.
    pub(super) size: u64,
}

impl Located {
    /// Fills `out` from `offset` on, counted from the start of the tensor.
    ///
    /// # Errors
    /// [`Error::TensorRange`], [`Error::Io`].
    pub(super) fn read(&self, file: &RegularFile, offset: u64, out: &mut [u8]) -> Result<()> {
        let len = out.len() as u64;
        if offset.checked_add(len).is_none_or(|end| end > self.size) {
            return Err(Error::TensorRange {
                path: file.path().to_owned(),
                name: self.info.name.clone(),
                offset,
                len,
                size: self.size,
            });
        }
        file.read_at(self.offset + offset, out)
    }
}

/// Reads and checks the header of `file`, and that the file is as long as the header says.
///
/// # Errors
/// [`Error::HeaderTooLong`], [`Error::FileLength`], [`Error::Json`], [`Error::Safetensors`],
/// [`Error::Io`].
pub(super) fn read(file: &RegularFile) -> Result<Vec<Located>> {
    let path = || file.path().to_owned();
    let (data_start, Header { mut tensors, .. }) = parse(file)?;
    // the order in which the check walks the data area
    tensors.sort_by_key(|(_, info)| info.data_offsets);
    let metadata = Metadata::new(None, tensors)
        .map_err(|source| Error::Safetensors { path: path(), source })?;
    let file_bytes = data_start.saturating_add(metadata.data_len() as u64);
    if file_bytes != file.len() {
        return Err(Error::FileLength { path: path(), expected: file_bytes, found: file.len() });
    }
    Ok(metadata.tensors().into_iter().map(|(name, info)| locate(data_start, name, info)).collect())
}

/// What the header says beside the tensors.
///
/// # Errors
/// As [`read`], which alone checks the tensors.
pub(super) fn read_metadata(file: &RegularFile) -> Result<BTreeMap<String, String>> {
    Ok(parse(file)?.1.metadata)
}

/// Where the data begins, and the header.
fn parse(file: &RegularFile) -> Result<(u64, Header)> {
    let path = || file.path().to_owned();
    let length_error = |expected| Error::FileLength { path: path(), expected, found: file.len() };

    let mut len = [0; 8];
    if file.len() < len.len() as u64 {
        return Err(length_error(len.len() as u64));
    }
    file.read_at(0, &mut len)?;
    let header_bytes = u64::from_le_bytes(len);
    if header_bytes > MAX_HEADER_BYTES {
        let (max_bytes, found_bytes) = (MAX_HEADER_BYTES, header_bytes);
        return Err(Error::HeaderTooLong { path: path(), max_bytes, found_bytes });
    }
    let data_start = len.len() as u64 + header_bytes;
    if data_start > file.len() {
        return Err(length_error(data_start));
    }
    // below the limit, so it fits any address space
    let mut text = try_zeroed("the header of a weight file", header_bytes as usize)?;
    file.read_at(len.len() as u64, &mut text)?;
    Ok((data_start, json::parse(file.path(), &text)?))
}

fn locate(data_start: u64, name: String, info: &RawInfo) -> Located {
    let dtype = match info.dtype {
        Dtype::F32 => FileDtype::Weights(WeightFormat::F32),
        Dtype::F16 => FileDtype::Weights(WeightFormat::F16),
        Dtype::BF16 => FileDtype::Weights(WeightFormat::BF16),
        other => FileDtype::Other(other.to_string()),
    };
    let (start, end) = info.data_offsets;
    Located {
        info: TensorInfo { name, dtype, shape: info.shape.clone() },
        offset: data_start + start as u64,
        size: (end - start) as u64,
    }
}

/// The JSON of a header. Unlike the deserialisation of [`Metadata`] it refuses a tensor that
/// comes twice, of which one would be lost without a word.
struct Header {
    tensors: Vec<(String, RawInfo)>,
    metadata: BTreeMap<String, String>,
}

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        deserializer.deserialize_map(HeaderVisitor)
    }
}

struct HeaderVisitor;

impl<'de> Visitor<'de> for HeaderVisitor {
    type Value = Header;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> std::result::Result<Header, A::Error> {
        let mut names = BTreeSet::new();
        let (mut tensors, mut metadata) = (Vec::new(), BTreeMap::new());
        while let Some(name) = access.next_key::<String>()? {
            if !names.insert(name.clone()) {
                return Err(json::duplicate_key(&name));
            }
            if name == METADATA {
                let said = access.next_value::<Option<UniqueMap<String>>>()?;
                metadata = said.map(|UniqueMap(map)| map).unwrap_or_default();
            } else {
                tensors.push((name, access.next_value::<RawInfo>()?));
            }
        }
        Ok(Header { tensors, metadata })
    }
}
