//! The header of a GGUF file: magic, version, counts, keys, the table of tensors.
//!
//! The file is not trusted. Every length is compared with the bytes that are left before anything
//! is allocated for it, and every place of a tensor with the file and with the other tensors.

use std::collections::{BTreeMap, BTreeSet};

use super::ggml_type::GgmlType;

use super::reader::HeaderReader;
use super::value::{GgufArray, GgufElement, GgufValue};
use crate::error::{Error, Result};
use crate::regular_file::RegularFile;
use crate::weights::TensorInfo;
use crate::weights::header::Located;

const MAGIC: [u8; 4] = *b"GGUF";
const POWERINFER_MAGIC: [u8; 4] = *b"PWRI";
/// Version 1 had lengths of 32 bits and is not in use.
const VERSIONS: [u32; 2] = [2, 3];
pub(super) const ALIGNMENT_KEY: &str = "general.alignment";
pub(super) const DEFAULT_ALIGNMENT: u32 = 32;

// Caps that real files stay far below; what is kept of an entry is bounded by them and by the
// bytes that the entry takes in the file.
const MAX_KEYS: u64 = 1 << 16;
const MAX_TENSORS: u64 = 1 << 17;
const MAX_KEY_BYTES: u64 = u16::MAX as u64;
const MAX_NAME_BYTES: u64 = 255;
const MAX_DIMS: u32 = 4;
const MAX_ALIGNMENT: u32 = 1 << 20;

/// Length of a key, type of its value, a value of one byte.
const MIN_KEY_BYTES: u64 = 8 + 4 + 1;
/// Length of the name, number of dimensions, one dimension, type, offset.
const MIN_TENSOR_BYTES: u64 = 8 + 4 + 8 + 4 + 8;

/// What a header says.
#[derive(Debug)]
pub(super) struct Header {
    /// Whether the file has PowerInfer's magic.
    pub(super) powerinfer: bool,
    pub(super) values: BTreeMap<String, GgufValue>,
    /// In the order of the file.
    pub(super) tensors: Vec<Located>,
}

/// Reads and checks the header of `file`, and that the tensors lie side by side in the rest of it.
///
/// # Errors
/// [`Error::NotGguf`], [`Error::GgufVersion`], [`Error::GgufHeader`], [`Error::TensorType`],
/// [`Error::TensorOverlap`], [`Error::DuplicateTensor`], [`Error::FileLength`], [`Error::Io`].
pub(super) fn read(file: &RegularFile) -> Result<Header> {
    let mut reader = HeaderReader::new(file);
    let magic: [u8; 4] = reader.array("magic")?;
    let powerinfer = magic == POWERINFER_MAGIC;
    if !powerinfer && magic != MAGIC {
        return Err(Error::NotGguf { path: file.path().to_owned(), found: magic });
    }
    let version = reader.u32("version")?;
    if !VERSIONS.contains(&version) {
        return Err(Error::GgufVersion { path: file.path().to_owned(), found: version });
    }
    let n_tensors = reader.u64("number of tensors")?;
    let n_keys = reader.u64("number of keys")?;
    check_count(&reader, "number of tensors", n_tensors, MAX_TENSORS, MIN_TENSOR_BYTES)?;
    check_count(&reader, "number of keys", n_keys, MAX_KEYS, MIN_KEY_BYTES)?;

    let mut values = BTreeMap::new();
    for index in 0..n_keys {
        let key = text(&mut reader, &format!("key {index}"), MAX_KEY_BYTES)?;
        let field = format!("key `{key}`");
        let value = value(&mut reader, &field)?;
        if values.insert(key, value).is_some() {
            return Err(reader.error(field, "one value", "a second"));
        }
    }
    let alignment = alignment(&reader, values.get(ALIGNMENT_KEY))?;

    let mut tensors = Vec::new();
    let mut names = BTreeSet::new();
    for index in 0..n_tensors {
        let located = tensor(&mut reader, index, alignment, powerinfer)?;
        let name = &located.info.name;
        if !names.insert(name.clone()) {
            let (name, path) = (name.clone(), file.path().to_owned());
            return Err(Error::DuplicateTensor { name, first: path.clone(), second: path });
        }
        tensors.push(located);
    }
    let header_end = reader.position();
    place(file, header_end, alignment, &mut tensors)?;
    Ok(Header { powerinfer, values, tensors })
}

/// What a file begins with.
pub(super) fn magic(powerinfer: bool) -> [u8; 4] {
    if powerinfer { POWERINFER_MAGIC } else { MAGIC }
}

/// Fails if so many entries cannot be in the bytes that are left.
fn check_count(
    reader: &HeaderReader<'_>,
    field: &str,
    count: u64,
    max: u64,
    min_entry_bytes: u64,
) -> Result<()> {
    let max = max.min(reader.left() / min_entry_bytes);
    if count <= max {
        return Ok(());
    }
    Err(reader.error(field, format!("at most {max}"), count.to_string()))
}

fn text(reader: &mut HeaderReader<'_>, field: &str, max_bytes: u64) -> Result<String> {
    let bytes = reader.counted_bytes(field, max_bytes)?;
    String::from_utf8(bytes).map_err(|_| reader.error(field, "a string in UTF-8", "other bytes"))
}

fn value(reader: &mut HeaderReader<'_>, field: &str) -> Result<GgufValue> {
    let number = reader.u32(field)?;
    Ok(match number {
        0 => GgufValue::U8(u8::from_le_bytes(reader.array(field)?)),
        1 => GgufValue::I8(i8::from_le_bytes(reader.array(field)?)),
        2 => GgufValue::U16(u16::from_le_bytes(reader.array(field)?)),
        3 => GgufValue::I16(i16::from_le_bytes(reader.array(field)?)),
        4 => GgufValue::U32(reader.u32(field)?),
        5 => GgufValue::I32(i32::from_le_bytes(reader.array(field)?)),
        6 => GgufValue::F32(f32::from_le_bytes(reader.array(field)?)),
        7 => match reader.array(field)? {
            [0] => GgufValue::Bool(false),
            [1] => GgufValue::Bool(true),
            [other] => return Err(reader.error(field, "0 or 1 for a flag", other.to_string())),
        },
        8 => GgufValue::String(text(reader, field, u64::MAX)?),
        9 => GgufValue::Array(array(reader, field)?),
        10 => GgufValue::U64(reader.u64(field)?),
        11 => GgufValue::I64(i64::from_le_bytes(reader.array(field)?)),
        12 => GgufValue::F64(f64::from_le_bytes(reader.array(field)?)),
        other => {
            return Err(reader.error(field, "a type of value from 0 to 12", other.to_string()));
        }
    })
}

fn array(reader: &mut HeaderReader<'_>, field: &str) -> Result<GgufArray> {
    let element = match reader.u32(field)? {
        0 => GgufElement::U8,
        1 => GgufElement::I8,
        2 => GgufElement::U16,
        3 => GgufElement::I16,
        4 => GgufElement::U32,
        5 => GgufElement::I32,
        6 => GgufElement::F32,
        7 => GgufElement::Bool,
        8 => GgufElement::String,
        10 => GgufElement::U64,
        11 => GgufElement::I64,
        12 => GgufElement::F64,
        9 => {
            let expected = "an array of numbers, flags or strings";
            return Err(reader.error(field, expected, "an array of arrays"));
        }
        other => {
            let expected = "a type of element from 0 to 12";
            return Err(reader.error(field, expected, other.to_string()));
        }
    };
    let len = reader.u64(field)?;
    let bytes = match element.size() {
        Some(size) => reader.bytes(field, len.checked_mul(size as u64))?,
        None => reader.counted_strings(field, len)?,
    };
    if element == GgufElement::Bool && bytes.iter().any(|&byte| byte > 1) {
        return Err(reader.error(field, "0 or 1 for each flag", "another number"));
    }
    // each element takes a byte at least, so their number fits like the bytes do
    Ok(GgufArray::new(element, len as usize, bytes))
}

fn alignment(reader: &HeaderReader<'_>, value: Option<&GgufValue>) -> Result<u64> {
    match value {
        None => Ok(DEFAULT_ALIGNMENT.into()),
        Some(&GgufValue::U32(found)) if found.is_power_of_two() && found <= MAX_ALIGNMENT => {
            Ok(found.into())
        }
        Some(other) => {
            let found = other.integer().map_or("another type".to_owned(), |n| n.to_string());
            let expected = format!("a power of two up to {MAX_ALIGNMENT}, as U32");
            Err(reader.error(format!("key `{ALIGNMENT_KEY}`"), expected, found))
        }
    }
}

/// An entry of the table of tensors. Its offset is still counted from the start of the data.
fn tensor(
    reader: &mut HeaderReader<'_>,
    index: u64,
    alignment: u64,
    powerinfer: bool,
) -> Result<Located> {
    let name = text(reader, &format!("name of tensor {index}"), MAX_NAME_BYTES)?;
    let field = |what: &str| format!("tensor `{name}`: {what}");
    let n_dims = reader.u32(&field("number of dimensions"))?;
    if !(1..=MAX_DIMS).contains(&n_dims) {
        let expected = format!("1 to {MAX_DIMS}");
        return Err(reader.error(field("number of dimensions"), expected, n_dims.to_string()));
    }
    let mut dims = Vec::new();
    for _ in 0..n_dims {
        dims.push(reader.u64(&field("dimension"))?);
    }
    let id = reader.u32(&field("type"))?;
    let offset = reader.u64(&field("offset"))?;

    let Some(ggml_type) = GgmlType::find(id, powerinfer) else {
        return Err(reader.error(field("type"), "a number of ggml's list", id.to_string()));
    };
    let size = size_of(&dims, ggml_type).filter(|&size| size <= reader.file_len());
    let Some(size) = size else {
        let expected = format!("whole blocks of {} within the file", ggml_type.name);
        return Err(reader.error(field("dimensions"), expected, format!("{dims:?}")));
    };
    if !offset.is_multiple_of(alignment) {
        let expected = format!("a multiple of {alignment}");
        return Err(reader.error(field("offset"), expected, offset.to_string()));
    }
    // their product is not beyond the file, and none is 0 beside others
    let shape = dims.iter().rev().map(|&dim| dim as usize).collect();
    Ok(Located { info: TensorInfo { name, dtype: ggml_type.dtype(), shape }, offset, size })
}

/// Bytes of a tensor of that shape, outermost first; `None` if the format does not have it.
pub(super) fn size(shape: &[usize], ggml_type: GgmlType) -> Option<u64> {
    let dims: Vec<u64> = shape.iter().rev().map(|&dim| dim as u64).collect();
    size_of(&dims, ggml_type).filter(|_| dims.len() <= MAX_DIMS as usize)
}

/// Bytes of a tensor, dimensions innermost first; `None` if they are not whole blocks or do not fit
/// 64 bits.
fn size_of(dims: &[u64], ggml_type: GgmlType) -> Option<u64> {
    let row_len = *dims.first()?;
    // a vector may be empty, as a list of neurons; zero among several numbers would hide their product
    if dims.len() > 1 && dims.contains(&0) || !row_len.is_multiple_of(ggml_type.block_len) {
        return None;
    }
    let row_bytes = (row_len / ggml_type.block_len).checked_mul(ggml_type.block_bytes)?;
    let size = dims[1..].iter().try_fold(row_bytes, |size, &dim| size.checked_mul(dim))?;
    // the number of values is computed with, too
    dims.iter().try_fold(1u64, |n, &dim| n.checked_mul(dim))?;
    usize::try_from(size).ok().map(|_| size)
}

/// Counts offsets from the start of the file and checks that the tensors follow each other there,
/// each padded to the alignment: no two overlap, and no byte of the file is outside of all.
fn place(
    file: &RegularFile,
    header_end: u64,
    alignment: u64,
    tensors: &mut [Located],
) -> Result<()> {
    let path = || file.path().to_owned();
    // sums of numbers that are at most the file's length, which an i64 holds
    let data_start = header_end.next_multiple_of(alignment);
    let mut order: Vec<usize> = (0..tensors.len()).collect();
    // what is empty lies before what begins at the same place
    order.sort_by_key(|&index| (tensors[index].offset, tensors[index].size));
    let mut end = 0u64;
    let mut before: Option<usize> = None;
    for index in order {
        let tensor = &tensors[index];
        let (padded, name) = (end.next_multiple_of(alignment), &tensor.info.name);
        if let Some(before) = before.filter(|_| tensor.offset < padded) {
            let (first, second) = (tensors[before].info.name.clone(), name.clone());
            return Err(Error::TensorOverlap { path: path(), first, second });
        }
        if tensor.offset != padded {
            return Err(Error::GgufHeader {
                path: path(),
                field: format!("tensor `{name}`: offset"),
                expected: format!("{padded}, the end of what lies before it"),
                found: tensor.offset.to_string(),
            });
        }
        end = padded + tensor.size;
        let file_end = data_start + end;
        if file_end > file.len() {
            return Err(Error::FileLength { path: path(), expected: file_end, found: file.len() });
        }
        before = Some(index);
    }
    // padding after the last tensor may be left out, and that before the first if there is none
    let expected = data_start + end.next_multiple_of(alignment);
    if file.len() > expected {
        return Err(Error::FileLength { path: path(), expected, found: file.len() });
    }
    for tensor in tensors {
        tensor.offset += data_start;
    }
    Ok(())
}
