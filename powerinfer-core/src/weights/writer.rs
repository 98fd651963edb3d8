//! Writing a source of tensors as one safetensors file, a piece at a time.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use powerinfer_ops::WeightFormat;
use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo as StoredInfo};

use crate::allocation::try_zeroed;
use crate::error::{Error, Result};
use crate::weights::{FileDtype, READABLE, TensorInfo, TensorSource};

/// Bytes that are copied at once.
const PIECE_BYTES: usize = 16 << 20;
/// The header is padded to a multiple of this, so that the data is aligned.
const ALIGNMENT: usize = 8;

/// Writes every tensor of `source` to `path`, replacing what is there, in the order that the source
/// lists them. Memory stays at a few pieces of 16 MiB, whatever the size.
///
/// # Errors
/// [`Error::TensorDtype`] for a tensor in a type that is no weight format,
/// [`Error::Safetensors`] for one too large for the format, [`Error::Write`], and whatever
/// reading the source fails with.
///
/// # Examples
/// ```
/// use std::path::PathBuf;
/// use powerinfer_core::{
///     FileDtype, Layout, Result, TensorInfo, TensorSource, WeightStore, write_safetensors,
/// };
/// use powerinfer_ops::WeightFormat;
///
/// /// A 2 × 3 matrix of ones.
/// #[derive(Debug)]
/// struct Ones;
///
/// impl TensorSource for Ones {
///     fn tensors(&self) -> Vec<TensorInfo> {
///         let dtype = FileDtype::Weights(WeightFormat::F32);
///         vec![TensorInfo { name: "ones".to_owned(), dtype, shape: vec![2, 3] }]
///     }
///     fn read(&self, _name: &str, _offset_bytes: u64, out: &mut [u8]) -> Result<()> {
///         out.chunks_exact_mut(4).for_each(|value| value.copy_from_slice(&1f32.to_le_bytes()));
///         Ok(())
///     }
///     fn path(&self, _name: &str) -> PathBuf {
///         "made up".into()
///     }
/// }
///
/// let dir = tempfile::tempdir().expect("a folder");
/// write_safetensors(&dir.path().join("model.safetensors"), &Ones)?;
/// let ones = WeightStore::open(dir.path())?.matrix("ones", 2, 3, Layout::NeuronMajor, None)?;
/// assert_eq!(ones.size_bytes(), 24);
/// # Ok::<(), powerinfer_core::Error>(())
/// ```
pub fn write_safetensors(path: &Path, source: &dyn TensorSource) -> Result<()> {
    write_safetensors_with(path, source, &BTreeMap::new())
}

/// As [`write_safetensors`], with these entries in the header, sorted by name, so that the same
/// tensors and entries are the same bytes. [`WeightStore::open_safetensors_file`] gives them back.
///
/// [`WeightStore::open_safetensors_file`]: crate::WeightStore::open_safetensors_file
///
/// # Errors
/// As [`write_safetensors`].
pub fn write_safetensors_with(
    path: &Path,
    source: &dyn TensorSource,
    entries: &BTreeMap<String, String>,
) -> Result<()> {
    let tensors = source.tensors();
    let mut stored = Vec::with_capacity(tensors.len());
    let mut end = 0usize;
    for tensor in &tensors {
        let (dtype, size) = stored_as(source, tensor)?;
        let begin = end;
        // a sum that does not fit is refused by the check below
        end = end.saturating_add(size);
        let info = StoredInfo { dtype, shape: tensor.shape.clone(), data_offsets: (begin, end) };
        stored.push((tensor.name.clone(), info));
    }
    let metadata = Metadata::new(None, stored)
        .map_err(|source| Error::Safetensors { path: path.to_owned(), source })?;
    let broken = |source| Error::Json { path: path.to_owned(), source };
    let mut header = serde_json::to_vec(&metadata).map_err(broken)?;
    if !entries.is_empty() {
        // the library keeps entries in no order, and a file is to be the same twice
        let entries = serde_json::to_string(entries).map_err(broken)?;
        let comma = if tensors.is_empty() { "" } else { "," };
        header.splice(1..1, format!("\"__metadata__\":{entries}{comma}").into_bytes());
    }
    header.resize(header.len().next_multiple_of(ALIGNMENT), b' ');

    let failed = |source| Error::Write { path: path.to_owned(), source };
    let mut file = BufWriter::new(File::create(path).map_err(failed)?);
    file.write_all(&(header.len() as u64).to_le_bytes()).map_err(failed)?;
    file.write_all(&header).map_err(failed)?;
    let mut piece: Vec<u8> = try_zeroed("a piece of a tensor", PIECE_BYTES.min(end))?;
    for tensor in &tensors {
        let (_, size) = stored_as(source, tensor)?;
        for offset in (0..size).step_by(PIECE_BYTES) {
            let piece = &mut piece[..PIECE_BYTES.min(size - offset)];
            source.read(&tensor.name, offset as u64, piece)?;
            file.write_all(piece).map_err(failed)?;
        }
    }
    file.flush().map_err(failed)
}

/// The type that the format has for a tensor, and its bytes.
fn stored_as(source: &dyn TensorSource, tensor: &TensorInfo) -> Result<(Dtype, usize)> {
    let (format, dtype) = match tensor.dtype {
        FileDtype::Weights(format @ WeightFormat::F32) => (format, Dtype::F32),
        FileDtype::Weights(format @ WeightFormat::F16) => (format, Dtype::F16),
        FileDtype::Weights(format @ WeightFormat::BF16) => (format, Dtype::BF16),
        _ => {
            return Err(Error::TensorDtype {
                path: source.path(&tensor.name),
                name: tensor.name.clone(),
                expected: READABLE,
                found: tensor.dtype.to_string(),
            });
        }
    };
    let n_values = tensor.shape.iter().try_fold(1usize, |product, &dim| product.checked_mul(dim));
    Ok((dtype, format.row_bytes(n_values.unwrap_or(usize::MAX))?))
}
