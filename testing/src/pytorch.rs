//! Writing the files that `torch.save` writes, as far as tests need them: an uncompressed zip archive
//! of a pickle that names tensors, and of their bytes.

use std::fs::File;
use std::io::Write;
use std::path::Path;

use zip::write::SimpleFileOptions;
use zip::{CompressionMethod, ZipWriter};

/// The values of a tensor.
#[derive(Debug, Clone)]
pub enum Storage<'a> {
    /// `torch.float32`
    F32(&'a [f32]),
    /// `torch.int64`
    I64(&'a [i64]),
}

impl Storage<'_> {
    fn class(&self) -> &'static str {
        match self {
            Self::F32(_) => "FloatStorage",
            Self::I64(_) => "LongStorage",
        }
    }

    fn len(&self) -> usize {
        match self {
            Self::F32(values) => values.len(),
            Self::I64(values) => values.len(),
        }
    }

    fn bytes(&self) -> Vec<u8> {
        match self {
            Self::F32(values) => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
            Self::I64(values) => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
        }
    }
}

/// `torch.save(tensor, path)` of a vector.
///
/// # Panics
/// If the file cannot be written.
pub fn write_tensor(path: &Path, values: Storage<'_>) {
    let mut pickle = vec![0x80, 2];
    rebuild(&mut pickle, 0, &[values.len()], &values);
    pickle.push(b'.');
    archive(path, &pickle, &[values.bytes()]);
}

/// `torch.save(state_dict, path)` of f32 tensors: name, shape, values.
///
/// # Panics
/// If the file cannot be written.
pub fn write_state_dict(path: &Path, tensors: &[(&str, Vec<usize>, Vec<f32>)]) {
    let mut pickle = vec![0x80, 2];
    global(&mut pickle, "collections", "OrderedDict");
    // empty tuple, call, mark
    pickle.extend(b")R(");
    for (key, (name, shape, values)) in tensors.iter().enumerate() {
        text(&mut pickle, name);
        rebuild(&mut pickle, key, shape, &Storage::F32(values));
    }
    // set items, stop
    pickle.extend(b"u.");
    let storages: Vec<_> =
        tensors.iter().map(|(_, _, values)| Storage::F32(values).bytes()).collect();
    archive(path, &pickle, &storages);
}

/// `_rebuild_tensor_v2(persistent storage, 0, shape, strides, False, OrderedDict())`
fn rebuild(pickle: &mut Vec<u8>, key: usize, shape: &[usize], values: &Storage<'_>) {
    global(pickle, "torch._utils", "_rebuild_tensor_v2");
    pickle.extend(b"((");
    text(pickle, "storage");
    global(pickle, "torch", values.class());
    text(pickle, &key.to_string());
    text(pickle, "cpu");
    int(pickle, values.len());
    // tuple, persistent id
    pickle.extend(b"tQ");
    int(pickle, 0);
    pickle.push(b'(');
    shape.iter().for_each(|&dim| int(pickle, dim));
    pickle.extend(b"t(");
    let mut strides: Vec<usize> = shape
        .iter()
        .rev()
        .scan(1, |stride, dim| {
            let this = *stride;
            *stride *= dim;
            Some(this)
        })
        .collect();
    strides.reverse();
    strides.iter().for_each(|&stride| int(pickle, stride));
    // tuple, False
    pickle.extend([b't', 0x89]);
    global(pickle, "collections", "OrderedDict");
    // empty tuple, call; tuple, call
    pickle.extend(b")RtR");
}

fn global(pickle: &mut Vec<u8>, module: &str, name: &str) {
    pickle.extend(format!("c{module}\n{name}\n").bytes());
}

fn text(pickle: &mut Vec<u8>, text: &str) {
    pickle.push(b'X');
    pickle.extend(u32::try_from(text.len()).expect("a short text").to_le_bytes());
    pickle.extend(text.bytes());
}

fn int(pickle: &mut Vec<u8>, value: usize) {
    pickle.push(b'J');
    pickle.extend(i32::try_from(value).expect("a small number").to_le_bytes());
}

fn archive(path: &Path, pickle: &[u8], storages: &[Vec<u8>]) {
    let mut zip = ZipWriter::new(File::create(path).expect("a file to write"));
    let stored = SimpleFileOptions::default().compression_method(CompressionMethod::Stored);
    let mut add = |name: String, bytes: &[u8]| {
        zip.start_file(name, stored).expect("an entry");
        zip.write_all(bytes).expect("its bytes");
    };
    add("archive/data.pkl".to_owned(), pickle);
    for (key, bytes) in storages.iter().enumerate() {
        add(format!("archive/data/{key}"), bytes);
    }
    zip.finish().expect("an archive");
}
