//! Writing a source of tensors as one PyTorch file: an uncompressed zip archive of a pickle, which
//! names the tensors, and of their bytes.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use powerinfer_ops::WeightFormat;
use zip::write::SimpleFileOptions;
use zip::{CompressionMethod, ZipWriter};

use crate::allocation::try_zeroed;
use crate::error::{Error, Result};
use crate::weights::{FileDtype, READABLE, TensorInfo, TensorSource};

/// Bytes that are copied at once.
const PIECE_BYTES: usize = 16 << 20;

/// Writes every tensor of `source` to `path`, replacing what is there, as `torch.save` writes a table
/// of tensors: what [`WeightStore::open_pytorch_file`](crate::WeightStore::open_pytorch_file) reads,
/// and the original's converters. The same tensors are the same bytes.
///
/// # Errors
/// [`Error::TensorDtype`] for a tensor in another type than f32, f16 and bf16; [`Error::Write`]; and
/// whatever reading the source fails with.
///
/// # Examples
/// ```
/// use std::path::PathBuf;
/// use powerinfer_core::{
///     FileDtype, Layout, Result, TensorInfo, TensorSource, WeightStore, write_pytorch,
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
/// let path = dir.path().join("model_0.pt");
/// write_pytorch(&path, &Ones)?;
/// let mut store = WeightStore::open_pytorch_file(&path)?;
/// assert_eq!(store.matrix("ones", 2, 3, Layout::NeuronMajor, None)?.size_bytes(), 24);
/// # Ok::<(), powerinfer_core::Error>(())
/// ```
pub fn write_pytorch(path: &Path, source: &dyn TensorSource) -> Result<()> {
    let tensors = source.tensors();
    let mut pickle = vec![0x80, 2];
    global(&mut pickle, "collections", "OrderedDict");
    // an empty tuple, a call, a mark
    pickle.extend(b")R(");
    let mut sizes = Vec::with_capacity(tensors.len());
    for (key, tensor) in tensors.iter().enumerate() {
        let (class, format) = storage(source, tensor)?;
        let n_values = tensor.shape.iter().try_fold(1usize, |all, &dim| all.checked_mul(dim));
        let n_values = n_values.unwrap_or(usize::MAX);
        sizes.push(format.row_bytes(n_values)?);
        text(&mut pickle, &tensor.name);
        rebuild(&mut pickle, key, class, n_values, &tensor.shape);
    }
    // set the items, stop
    pickle.extend(b"u.");

    let failed = |source| Error::Write { path: path.to_owned(), source };
    let refused = |error: zip::result::ZipError| failed(std::io::Error::other(error));
    let mut archive = ZipWriter::new(BufWriter::new(File::create(path).map_err(failed)?));
    let stored = SimpleFileOptions::default()
        .compression_method(CompressionMethod::Stored)
        .last_modified_time(zip::DateTime::default())
        .large_file(sizes.iter().any(|&size| size as u64 >= u64::from(u32::MAX)));
    for (name, bytes) in [("data.pkl", pickle.as_slice()), ("byteorder", b"little")] {
        archive.start_file(format!("archive/{name}"), stored).map_err(refused)?;
        archive.write_all(bytes).map_err(failed)?;
    }
    let largest = sizes.iter().max().copied().unwrap_or(0);
    let mut piece: Vec<u8> = try_zeroed("a piece of a tensor", PIECE_BYTES.min(largest))?;
    for (key, (tensor, &size)) in tensors.iter().zip(&sizes).enumerate() {
        archive.start_file(format!("archive/data/{key}"), stored).map_err(refused)?;
        for offset in (0..size).step_by(PIECE_BYTES) {
            let piece = &mut piece[..PIECE_BYTES.min(size - offset)];
            source.read(&tensor.name, offset as u64, piece)?;
            archive.write_all(piece).map_err(failed)?;
        }
    }
    // PyTorch's reader asks for the version of the layout
    archive.start_file("archive/version", stored).map_err(refused)?;
    archive.write_all(b"3\n").map_err(failed)?;
    archive.finish().map_err(refused)?.flush().map_err(failed)
}

/// What PyTorch calls the storage of a tensor's type.
fn storage(source: &dyn TensorSource, tensor: &TensorInfo) -> Result<(&'static str, WeightFormat)> {
    match tensor.dtype {
        FileDtype::Weights(WeightFormat::F32) => Ok(("FloatStorage", WeightFormat::F32)),
        FileDtype::Weights(WeightFormat::F16) => Ok(("HalfStorage", WeightFormat::F16)),
        FileDtype::Weights(WeightFormat::BF16) => Ok(("BFloat16Storage", WeightFormat::BF16)),
        _ => Err(Error::TensorDtype {
            path: source.path(&tensor.name),
            name: tensor.name.clone(),
            expected: READABLE,
            found: tensor.dtype.to_string(),
        }),
    }
}

/// `_rebuild_tensor_v2(storage, 0, shape, strides, False, OrderedDict())`
fn rebuild(pickle: &mut Vec<u8>, key: usize, class: &str, n_values: usize, shape: &[usize]) {
    global(pickle, "torch._utils", "_rebuild_tensor_v2");
    pickle.extend(b"((");
    text(pickle, "storage");
    global(pickle, "torch", class);
    text(pickle, &key.to_string());
    text(pickle, "cpu");
    int(pickle, n_values);
    // a tuple, looked up as a persistent id
    pickle.extend(b"tQ");
    int(pickle, 0);
    pickle.push(b'(');
    shape.iter().for_each(|&dim| int(pickle, dim));
    pickle.extend(b"t(");
    for outer in 1..=shape.len() {
        int(pickle, shape[outer..].iter().fold(1, |all, &dim| all.saturating_mul(dim)));
    }
    // a tuple, False
    pickle.extend([b't', 0x89]);
    global(pickle, "collections", "OrderedDict");
    // an empty tuple, a call; a tuple, a call
    pickle.extend(b")RtR");
}

fn global(pickle: &mut Vec<u8>, module: &str, name: &str) {
    pickle.extend(format!("c{module}\n{name}\n").bytes());
}

fn text(pickle: &mut Vec<u8>, text: &str) {
    // names are a few bytes long
    pickle.push(b'X');
    pickle.extend((text.len() as u32).to_le_bytes());
    pickle.extend(text.bytes());
}

/// A number of any size, in eight bytes and one that keeps it positive.
fn int(pickle: &mut Vec<u8>, value: usize) {
    match i32::try_from(value) {
        Ok(value) => {
            pickle.push(b'J');
            pickle.extend(value.to_le_bytes());
        }
        Err(_) => {
            pickle.extend([0x8a, 9]);
            pickle.extend((value as u64).to_le_bytes());
            pickle.push(0);
        }
    }
}
