//! Where the tensors of a PyTorch file lie.
//!
//! Such a file is a zip archive of raw tensors and a pickle that names them. candle reads the pickle
//! without executing anything; the bytes of the tensors are then read in place, like those of a
//! safetensors file, which works because PyTorch never compresses them.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufReader, Read};
use std::panic::{AssertUnwindSafe, catch_unwind};

use candle_core::DType;
use candle_core::pickle::{Object, Stack, TensorInfo as RawInfo, read_pth_tensor_info};
use powerinfer_ops::WeightFormat;
use zip::{CompressionMethod, ZipArchive};

use super::header::Located;
use super::{FileDtype, TensorInfo};
use crate::error::{Error, Result};
use crate::regular_file::RegularFile;

/// Longest pickle that is read: that of a model of thousands of tensors has a megabyte.
const MAX_PICKLE_BYTES: u64 = 16 << 20;

/// Start and length of an entry of the archive.
type Entries = BTreeMap<String, (u64, u64)>;

/// Reads and checks the table of tensors of `file`.
///
/// # Errors
/// [`Error::PyTorch`], [`Error::MissingTensor`], [`Error::TensorRange`].
pub(super) fn read(file: &RegularFile) -> Result<Vec<Located>> {
    let entries = entries(file)?;
    // the reader indexes into what a pickle holds, so that a broken one makes it panic
    let read = catch_unwind(AssertUnwindSafe(|| {
        let infos = read_pth_tensor_info(file.path(), false, None)?;
        if infos.is_empty() { single(file, &entries) } else { Ok(infos) }
    }));
    let infos = read
        .map_err(|_| broken(file, "a pickle that is no table of tensors", None))?
        .map_err(|error| broken(file, "a broken pickle", Some(Box::new(error))))?;
    if infos.is_empty() {
        return Err(broken(file, "no tensors in it", None));
    }
    infos.iter().map(|info| located(file, &entries, info)).collect()
}

/// The tensor of a file that holds no table but one tensor, under the name of nothing.
fn single(file: &RegularFile, entries: &Entries) -> candle_core::Result<Vec<RawInfo>> {
    let Some(pickle) = entries.keys().find(|name| name.ends_with("data.pkl")) else {
        return Ok(Vec::new());
    };
    let (start, len) = entries[pickle];
    let mut bytes = vec![0; usize::try_from(len).unwrap_or(0)];
    file.read_at(start, &mut bytes).map_err(candle_core::Error::wrap)?;
    let mut stack = Stack::empty();
    stack.read_loop(&mut bytes.as_slice())?;
    let dir = pickle.strip_suffix(".pkl").unwrap_or(pickle);
    let name = Object::Unicode(String::new());
    Ok(Vec::from_iter(stack.finalize()?.into_tensor_info(name, dir.as_ref())?))
}

/// Every entry of the archive, all of them uncompressed.
fn entries(file: &RegularFile) -> Result<Entries> {
    let zip_error = |source: zip::result::ZipError| {
        let what = "not the zip archive that PyTorch writes (since version 1.6)";
        broken(file, what, Some(Box::new(source)))
    };
    let opened = File::open(file.path());
    let opened = opened.map_err(|source| Error::Io { path: file.path().to_owned(), source })?;
    let mut archive = ZipArchive::new(BufReader::new(opened)).map_err(zip_error)?;
    let mut entries = Entries::new();
    for index in 0..archive.len() {
        let mut entry = archive.by_index(index).map_err(zip_error)?;
        let name = entry.name().map_err(zip_error)?.into_owned();
        let (size, start) = (entry.size(), entry.data_start());
        let end = start.and_then(|start| start.checked_add(size));
        if entry.compression() != CompressionMethod::Stored
            || entry.encrypted()
            || entry.compressed_size() != size
            || end.is_none_or(|end| end > file.len())
        {
            return Err(broken(file, "a compressed or truncated archive", None));
        }
        if name.ends_with(".pkl") && size > MAX_PICKLE_BYTES {
            return Err(broken(file, "a table of tensors longer than any real one", None));
        }
        if name.ends_with("/byteorder") {
            let mut order = String::new();
            let read = entry.by_ref().take(16).read_to_string(&mut order);
            if read.is_err() || order != "little" {
                return Err(broken(file, "numbers that are not little endian", None));
            }
        }
        entries.insert(name, (start.unwrap_or(0), size));
    }
    Ok(entries)
}

fn located(file: &RegularFile, entries: &Entries, info: &RawInfo) -> Result<Located> {
    let (path, name) = (file.path().to_owned(), info.name.clone());
    let Some(&(start, len)) = entries.get(&info.path) else {
        return Err(Error::MissingTensor { path, name });
    };
    if !info.layout.is_contiguous() {
        return Err(broken(file, "a tensor that is a view of another", None));
    }
    let shape = info.layout.dims().to_vec();
    let value_bytes = info.dtype.size_in_bytes() as u64;
    let size = shape.iter().try_fold(value_bytes, |size, &dim| size.checked_mul(dim as u64));
    let skipped = info.layout.start_offset() as u64;
    match size.filter(|size| skipped.checked_add(*size).is_some_and(|end| end <= len)) {
        Some(size) => {
            let dtype = dtype(info.dtype);
            let info = TensorInfo { name, dtype, shape };
            Ok(Located { info, offset: start + skipped, size })
        }
        None => {
            let asked = size.unwrap_or(u64::MAX);
            Err(Error::TensorRange { path, name, offset: skipped, len: asked, size: len })
        }
    }
}

fn dtype(dtype: DType) -> FileDtype {
    match dtype {
        DType::F32 => FileDtype::Weights(WeightFormat::F32),
        DType::F16 => FileDtype::Weights(WeightFormat::F16),
        DType::BF16 => FileDtype::Weights(WeightFormat::BF16),
        other => FileDtype::Other(other.as_str().to_uppercase()),
    }
}

fn broken(
    file: &RegularFile,
    what: &'static str,
    source: Option<Box<dyn std::error::Error + Send + Sync>>,
) -> Error {
    Error::PyTorch { path: file.path().to_owned(), what, source }
}
