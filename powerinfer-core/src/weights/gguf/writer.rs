//! Writing a GGUF file, a piece of a tensor at a time.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use super::ggml_type::GgmlType;
use super::header::{self, ALIGNMENT_KEY, DEFAULT_ALIGNMENT};
use super::value::{GgufElement, GgufValue};
use crate::allocation::try_zeroed;
use crate::error::{Error, Result};
use crate::weights::{FileDtype, READABLE, TensorInfo, TensorSource};

/// Bytes that are copied at once.
const PIECE_BYTES: usize = 16 << 20;
const VERSION: u32 = 3;

/// What a file says about itself, for [`write_gguf`].
#[derive(Debug, Clone, Default, PartialEq)]
#[non_exhaustive]
pub struct GgufHeader {
    /// Whether it begins with PowerInfer's magic.
    pub powerinfer: bool,
    /// Its keys, in the order to write them; without `general.alignment`.
    pub keys: Vec<(String, GgufValue)>,
}

impl GgufHeader {
    /// A header with these keys.
    #[must_use]
    pub fn new(powerinfer: bool, keys: Vec<(String, GgufValue)>) -> Self {
        Self { powerinfer, keys }
    }
}

/// Writes every tensor of `source` to `path`, replacing what is there, in the order that the source
/// lists them: a little-endian GGUF file of version 3 whose tensors are aligned to 32 bytes. Memory
/// stays at a few pieces of 16 MiB, whatever the size. Returns the length of the file.
///
/// `progress` is told how many bytes of tensors are written, and of how many.
///
/// # Errors
/// [`Error::TensorDtype`] for a tensor in a type that such a file does not have (PowerInfer's know
/// no bf16), [`Error::GgufHeader`] for a key that comes twice or is not ours to choose and for a
/// tensor of more than four dimensions, [`Error::Write`], and whatever reading the source fails
/// with.
///
/// # Examples
/// ```
/// use std::path::PathBuf;
/// use powerinfer_core::{
///     FileDtype, GgufFile, GgufHeader, GgufValue, Result, TensorInfo, TensorSource, write_gguf,
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
/// let path = dir.path().join("ones.gguf");
/// let keys = vec![("general.architecture".to_owned(), GgufValue::String("ones".to_owned()))];
/// write_gguf(&path, &GgufHeader::new(false, keys), &Ones, &mut |_, _| ())?;
/// let file = GgufFile::open(&path)?;
/// assert_eq!(file.metadata().str("general.architecture")?, "ones");
/// assert_eq!(file.tensors(), Ones.tensors());
/// # Ok::<(), powerinfer_core::Error>(())
/// ```
pub fn write_gguf(
    path: &Path,
    header: &GgufHeader,
    source: &dyn TensorSource,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<u64> {
    let tensors = source.tensors();
    let alignment = u64::from(DEFAULT_ALIGNMENT);
    let mut bytes = head(path, header, tensors.len())?;
    let mut sizes = Vec::with_capacity(tensors.len());
    let mut offset = 0u64;
    for tensor in &tensors {
        let (ggml_type, size) = stored_as(source, tensor, header.powerinfer)?;
        put_string(&mut bytes, &tensor.name);
        bytes.extend((tensor.shape.len() as u32).to_le_bytes());
        for &dim in tensor.shape.iter().rev() {
            bytes.extend((dim as u64).to_le_bytes());
        }
        bytes.extend(ggml_type.id.to_le_bytes());
        bytes.extend(offset.to_le_bytes());
        // a sum beyond any disk
        offset = offset.saturating_add(size).saturating_add(alignment - 1) / alignment * alignment;
        sizes.push(size);
    }
    bytes.resize(bytes.len().next_multiple_of(DEFAULT_ALIGNMENT as usize), 0);

    let failed = |source| Error::Write { path: path.to_owned(), source };
    let mut file = BufWriter::new(File::create(path).map_err(failed)?);
    file.write_all(&bytes).map_err(failed)?;
    let total: u64 = sizes.iter().sum();
    let mut piece: Vec<u8> = try_zeroed("a piece of a tensor", PIECE_BYTES.min(total as usize))?;
    let mut done = 0;
    progress(done, total);
    for (tensor, size) in tensors.iter().zip(sizes) {
        for at in (0..size).step_by(PIECE_BYTES) {
            let piece = &mut piece[..PIECE_BYTES.min((size - at) as usize)];
            source.read(&tensor.name, at, piece)?;
            file.write_all(piece).map_err(failed)?;
            done += piece.len() as u64;
            progress(done, total);
        }
        let padding = size.next_multiple_of(alignment) - size;
        file.write_all(&[0; DEFAULT_ALIGNMENT as usize][..padding as usize]).map_err(failed)?;
    }
    file.flush().map_err(failed)?;
    Ok(bytes.len() as u64 + offset)
}

/// Magic, version, counts and keys.
fn head(path: &Path, header: &GgufHeader, n_tensors: usize) -> Result<Vec<u8>> {
    let mut bytes = Vec::from(header::magic(header.powerinfer));
    bytes.extend(VERSION.to_le_bytes());
    bytes.extend((n_tensors as u64).to_le_bytes());
    bytes.extend((header.keys.len() as u64).to_le_bytes());
    for (index, (key, value)) in header.keys.iter().enumerate() {
        let twice = header.keys[..index].iter().any(|(other, _)| other == key);
        if twice || key == ALIGNMENT_KEY {
            return Err(Error::GgufHeader {
                path: path.to_owned(),
                field: format!("key `{key}`"),
                expected: "a key to write once".to_owned(),
                found: if twice { "a second" } else { "one that the writer sets" }.to_owned(),
            });
        }
        put_string(&mut bytes, key);
        put_value(&mut bytes, value);
    }
    Ok(bytes)
}

fn put_string(bytes: &mut Vec<u8>, text: &str) {
    bytes.extend((text.len() as u64).to_le_bytes());
    bytes.extend(text.as_bytes());
}

fn put_value(bytes: &mut Vec<u8>, value: &GgufValue) {
    let number: u32 = match value {
        GgufValue::U8(_) => 0,
        GgufValue::I8(_) => 1,
        GgufValue::U16(_) => 2,
        GgufValue::I16(_) => 3,
        GgufValue::U32(_) => 4,
        GgufValue::I32(_) => 5,
        GgufValue::F32(_) => 6,
        GgufValue::Bool(_) => 7,
        GgufValue::String(_) => 8,
        GgufValue::Array(_) => 9,
        GgufValue::U64(_) => 10,
        GgufValue::I64(_) => 11,
        GgufValue::F64(_) => 12,
    };
    bytes.extend(number.to_le_bytes());
    match value {
        GgufValue::U8(value) => bytes.extend(value.to_le_bytes()),
        GgufValue::I8(value) => bytes.extend(value.to_le_bytes()),
        GgufValue::U16(value) => bytes.extend(value.to_le_bytes()),
        GgufValue::I16(value) => bytes.extend(value.to_le_bytes()),
        GgufValue::U32(value) => bytes.extend(value.to_le_bytes()),
        GgufValue::I32(value) => bytes.extend(value.to_le_bytes()),
        GgufValue::U64(value) => bytes.extend(value.to_le_bytes()),
        GgufValue::I64(value) => bytes.extend(value.to_le_bytes()),
        GgufValue::F32(value) => bytes.extend(value.to_le_bytes()),
        GgufValue::F64(value) => bytes.extend(value.to_le_bytes()),
        GgufValue::Bool(value) => bytes.push(u8::from(*value)),
        GgufValue::String(text) => put_string(bytes, text),
        GgufValue::Array(array) => {
            let element: u32 = match array.element() {
                GgufElement::U8 => 0,
                GgufElement::I8 => 1,
                GgufElement::U16 => 2,
                GgufElement::I16 => 3,
                GgufElement::U32 => 4,
                GgufElement::I32 => 5,
                GgufElement::F32 => 6,
                GgufElement::Bool => 7,
                GgufElement::String => 8,
                GgufElement::U64 => 10,
                GgufElement::I64 => 11,
                GgufElement::F64 => 12,
            };
            bytes.extend(element.to_le_bytes());
            bytes.extend((array.len() as u64).to_le_bytes());
            bytes.extend(array.bytes());
        }
    }
}

/// The type of a tensor in the file, and its bytes.
fn stored_as(
    source: &dyn TensorSource,
    tensor: &TensorInfo,
    powerinfer: bool,
) -> Result<(GgmlType, u64)> {
    let (path, name) = (source.path(&tensor.name), tensor.name.clone());
    let ggml_type = match tensor.dtype {
        FileDtype::Weights(format) => GgmlType::of(format),
        FileDtype::Other(_) => None,
    };
    // the numbers of the two kinds of file differ from 16 on
    let Some(ggml_type) = ggml_type.filter(|found| !powerinfer || found.id < 16) else {
        let found = tensor.dtype.to_string();
        return Err(Error::TensorDtype { path, name, expected: READABLE, found });
    };
    match header::size(&tensor.shape, ggml_type) {
        Some(size) => Ok((ggml_type, size)),
        None => Err(Error::GgufHeader {
            path,
            field: format!("tensor `{name}`: dimensions"),
            expected: format!("1 to 4 of whole blocks of {}", ggml_type.name),
            found: format!("{:?}", tensor.shape),
        }),
    }
}
