use std::fs;

use powerinfer_ops::WeightFormat;

use super::*;
use crate::weights::FileDtype;

/// A file of the kind that the format's description has for an example, written by hand: one key
/// of each sort that matters, and two tensors.
fn by_hand(magic: &[u8; 4]) -> Vec<u8> {
    let mut bytes = Vec::new();
    bytes.extend(magic);
    bytes.extend([3, 0, 0, 0]);
    bytes.extend([2, 0, 0, 0, 0, 0, 0, 0]); // tensors
    bytes.extend([4, 0, 0, 0, 0, 0, 0, 0]); // keys
    let key = |bytes: &mut Vec<u8>, name: &[u8], kind: u8| {
        bytes.extend([name.len() as u8, 0, 0, 0, 0, 0, 0, 0]);
        bytes.extend(name);
        bytes.extend([kind, 0, 0, 0]);
    };
    key(&mut bytes, b"general.architecture", 8);
    bytes.extend([5, 0, 0, 0, 0, 0, 0, 0]);
    bytes.extend(b"llama");
    key(&mut bytes, b"llama.block_count", 4);
    bytes.extend([22, 0, 0, 0]);
    key(&mut bytes, b"powerinfer.sparse_threshold", 6);
    bytes.extend([0, 0, 0, 0xBF]); // -0.5
    key(&mut bytes, b"tokenizer.ggml.tokens", 9);
    bytes.extend([8, 0, 0, 0]); // of strings
    bytes.extend([2, 0, 0, 0, 0, 0, 0, 0]);
    bytes.extend([1, 0, 0, 0, 0, 0, 0, 0]);
    bytes.extend(b"a");
    bytes.extend([2, 0, 0, 0, 0, 0, 0, 0]);
    bytes.extend("ä".as_bytes());
    let dims = |bytes: &mut Vec<u8>, name: &[u8], dims: &[u8], kind: u8, offset: u8| {
        bytes.extend([name.len() as u8, 0, 0, 0, 0, 0, 0, 0]);
        bytes.extend(name);
        bytes.extend([dims.len() as u8, 0, 0, 0]);
        for &dim in dims {
            bytes.extend([dim, 0, 0, 0, 0, 0, 0, 0]);
        }
        bytes.extend([kind, 0, 0, 0]);
        bytes.extend([offset, 0, 0, 0, 0, 0, 0, 0]);
    };
    // [2, 3] f16: the innermost dimension first
    dims(&mut bytes, b"blk.0.ffn_up.weight", &[3, 2], 1, 0);
    dims(&mut bytes, b"output_norm.weight", &[3], 0, 32);
    bytes.resize(bytes.len().next_multiple_of(32), 0);
    bytes.extend([1, 0x3C, 2, 0x3C, 3, 0x3C, 4, 0x3C, 5, 0x3C, 6, 0x3C]);
    bytes.resize(bytes.len().next_multiple_of(32), 0);
    bytes.extend([1f32, 2.0, 3.0].iter().flat_map(|value| value.to_le_bytes()));
    bytes.resize(bytes.len().next_multiple_of(32), 0);
    bytes
}

fn open(bytes: &[u8]) -> Result<GgufFile> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.gguf");
    fs::write(&path, bytes).unwrap();
    GgufFile::open(&path)
}

#[test]
fn a_file_written_by_hand_is_read() {
    for (magic, powerinfer) in [(b"GGUF", false), (b"PWRI", true)] {
        let file = open(&by_hand(magic)).unwrap();
        assert_eq!(file.is_powerinfer(), powerinfer);
        let keys = file.metadata();
        assert_eq!(keys.str("general.architecture").unwrap(), "llama");
        assert_eq!(keys.u32("llama.block_count").unwrap(), 22);
        assert_eq!(keys.f32("powerinfer.sparse_threshold").unwrap(), -0.5);
        assert_eq!(keys.strings("tokenizer.ggml.tokens").unwrap(), ["a", "ä"]);
        let info = |name: &str, format, shape: &[usize]| TensorInfo {
            name: name.to_owned(),
            dtype: FileDtype::Weights(format),
            shape: shape.to_vec(),
        };
        let up = info("blk.0.ffn_up.weight", WeightFormat::F16, &[2, 3]);
        let norm = info("output_norm.weight", WeightFormat::F32, &[3]);
        assert_eq!(file.tensors(), [up, norm]);
        assert_eq!(file.names_in_order(), ["blk.0.ffn_up.weight", "output_norm.weight"]);
        let mut row = [0; 6];
        file.read("blk.0.ffn_up.weight", 6, &mut row).unwrap();
        assert_eq!(row, [4, 0x3C, 5, 0x3C, 6, 0x3C]);
        assert!(matches!(
            file.read("output_norm.weight", 8, &mut row),
            Err(Error::TensorRange { offset: 8, len: 6, size: 12, .. })
        ));
    }
}

#[test]
fn what_is_written_is_what_was_written_by_hand() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.gguf");
    for (magic, powerinfer) in [(b"GGUF", false), (b"PWRI", true)] {
        let expected = by_hand(magic);
        let file = open_in(&path, &expected);
        let names = ["general.architecture", "llama.block_count"];
        let more = ["powerinfer.sparse_threshold", "tokenizer.ggml.tokens"];
        let value = |name: &str| (name.to_owned(), file.metadata().get(name).unwrap().clone());
        let keys = names.into_iter().chain(more).map(value).collect();
        let copy = dir.path().join("copy.gguf");
        let mut told = Vec::new();
        let header = GgufHeader::new(powerinfer, keys);
        let len = write_gguf(&copy, &header, &file, &mut |done, of| told.push((done, of))).unwrap();
        assert_eq!(len, expected.len() as u64);
        assert_eq!(fs::read(&copy).unwrap(), expected);
        assert_eq!(told, [(0, 24), (12, 24), (24, 24)]);
    }
}

fn open_in(path: &Path, bytes: &[u8]) -> GgufFile {
    fs::write(path, bytes).unwrap();
    GgufFile::open(path).unwrap()
}

/// Where a sequence of bytes is in the file.
fn at(bytes: &[u8], what: &[u8]) -> usize {
    bytes.windows(what.len()).position(|window| window == what).unwrap()
}

/// The error for a file in which the bytes `offset` after `after` are others.
fn changed(after: &[u8], offset: usize, new: &[u8]) -> Error {
    let mut bytes = by_hand(b"GGUF");
    let start = at(&bytes, after) + after.len() + offset;
    bytes[start..start + new.len()].copy_from_slice(new);
    open(&bytes).unwrap_err()
}

#[track_caller]
fn header_error(error: Error, field: &str) {
    match error {
        Error::GgufHeader { field: found, .. } => assert_eq!(found, field),
        other => panic!("{field}: {other}"),
    }
}

const MAX: [u8; 8] = [0xFF; 8];

#[test]
fn other_files_and_versions_are_not_read() {
    let other = open(&by_hand(b"ggml")).unwrap_err();
    assert!(matches!(other, Error::NotGguf { found, .. } if &found == b"ggml"));
    for version in [0u32, 1, 4, 3 << 24] {
        let error = changed(b"GGUF", 0, &version.to_le_bytes());
        assert!(matches!(error, Error::GgufVersion { found, .. } if found == version));
    }
    let two = {
        let mut bytes = by_hand(b"GGUF");
        bytes[4] = 2;
        open(&bytes).unwrap()
    };
    assert_eq!(two.metadata().u32("llama.block_count").unwrap(), 22);
}

#[test]
fn counts_and_lengths_beyond_the_file_are_refused() {
    for count in [MAX, (1u64 << 63).to_le_bytes(), 1000u64.to_le_bytes()] {
        header_error(changed(b"GGUF", 4, &count), "number of tensors");
        header_error(changed(b"GGUF", 12, &count), "number of keys");
    }
    let key = b"general.architecture";
    header_error(changed(b"GGUF", 20, &MAX), "key 0");
    header_error(changed(key, 4, &MAX), "key `general.architecture`");
    let tokens = "key `tokenizer.ggml.tokens`";
    for count in [MAX, (1u64 << 61).to_le_bytes()] {
        header_error(changed(b"tokenizer.ggml.tokens", 8, &count), tokens);
        header_error(changed(b"tokenizer.ggml.tokens", 16, &count), tokens);
    }
}

#[test]
fn types_of_values_are_those_of_the_format() {
    header_error(changed(b"llama.block_count", 0, &[13]), "key `llama.block_count`");
    header_error(changed(b"llama.block_count", 0, &[7]), "key `llama.block_count`");
    header_error(changed(b"tokenizer.ggml.tokens", 4, &[9]), "key `tokenizer.ggml.tokens`");
    header_error(changed(b"tokenizer.ggml.tokens", 4, &[13]), "key `tokenizer.ggml.tokens`");
    header_error(changed(b"general.architecture", 12, &[0xFF]), "key `general.architecture`");
}

#[test]
fn shapes_and_places_of_tensors_are_checked() {
    let up = b"blk.0.ffn_up.weight";
    let field = |what: &str| format!("tensor `blk.0.ffn_up.weight`: {what}");
    for n_dims in [0, 5, 0xFF] {
        header_error(changed(up, 0, &[n_dims]), &field("number of dimensions"));
    }
    let dims = field("dimensions");
    header_error(changed(up, 4, &[0]), &dims);
    header_error(changed(up, 4, &MAX), &dims);
    header_error(changed(up, 12, &(1u64 << 63).to_le_bytes()), &dims);
    // 2 blocks of 32 would be needed for rows of three
    header_error(changed(up, 20, &[2]), &dims);
    header_error(changed(up, 20, &[4]), &field("type"));
    header_error(changed(up, 24, &[16]), &field("offset"));
    header_error(changed(up, 24, &[96]), "tensor `output_norm.weight`: offset");
    header_error(changed(up, 24, &[32]), &field("offset"));
    assert!(matches!(
        changed(b"output_norm.weight", 16, &[0]),
        Error::TensorOverlap { first, second, .. }
            if [first.as_str(), &second] == ["blk.0.ffn_up.weight", "output_norm.weight"]
    ));
    let mut bytes = by_hand(b"GGUF");
    let name = at(&bytes, b"output_norm.weight");
    bytes[name - 8] = 19;
    bytes.insert(name, b' ');
    bytes[name..name + 19].copy_from_slice(up);
    assert!(matches!(
        open(&bytes).unwrap_err(),
        Error::DuplicateTensor { name, .. } if name.as_bytes() == up
    ));
}

#[test]
fn a_key_that_comes_twice_is_an_error() {
    let mut bytes = by_hand(b"GGUF");
    let key = at(&bytes, b"llama.block_count");
    bytes.splice(key - 8..key - 8, bytes[key - 8..key + 25].to_vec());
    bytes[16] = 5;
    header_error(open(&bytes).unwrap_err(), "key `llama.block_count`");
}

#[test]
fn alignment_is_a_power_of_two() {
    let with = |value: u32| {
        let mut bytes = by_hand(b"GGUF");
        let key = at(&bytes, b"llama.block_count");
        bytes.splice(key..key + 17, *b"general.alignment");
        bytes[key + 21..key + 25].copy_from_slice(&value.to_le_bytes());
        open(&bytes)
    };
    assert!(with(32).is_ok());
    for wrong in [0, 3, 33, 1 << 31, u32::MAX] {
        header_error(with(wrong).unwrap_err(), "key `general.alignment`");
    }
    // the tensors are not there
    assert!(with(64).is_err());
}

#[test]
fn the_file_is_as_long_as_its_header_says() {
    let whole = by_hand(b"GGUF");
    for len in 0..whole.len() {
        let error = open(&whole[..len]);
        // padding after the last tensor may be missing
        if len >= whole.len() - 20 {
            assert!(error.is_ok(), "{len}");
        } else {
            let error = error.unwrap_err();
            let right = matches!(error, Error::GgufHeader { .. } | Error::FileLength { .. });
            assert!(right, "{len}: {error}");
        }
    }
    let mut longer = whole.clone();
    longer.push(0);
    let (expected, found) = (whole.len() as u64, longer.len() as u64);
    assert!(matches!(
        open(&longer).unwrap_err(),
        Error::FileLength { expected: e, found: f, .. } if (e, f) == (expected, found)
    ));
}

/// Two parts of a file with a tensor each.
fn write_parts(dir: &Path, keys: [[u16; 3]; 2]) -> [PathBuf; 2] {
    let whole = open_in(&dir.join("whole"), &by_hand(b"GGUF"));
    [0, 1].map(|part| {
        let path = dir.join(format!("m-0000{}-of-00002.gguf", part + 1));
        let [number, count, tensors] = keys[part].map(GgufValue::U16);
        let split =
            [("split.no", number), ("split.count", count), ("split.tensors.count", tensors)];
        let keys = split.into_iter().map(|(key, value)| (key.to_owned(), value)).collect();
        let one = One { name: whole.names_in_order()[part].to_owned(), file: whole.clone() };
        write_gguf(&path, &GgufHeader::new(false, keys), &one, &mut |_, _| ()).unwrap();
        path
    })
}

/// No tensors at all.
#[derive(Debug)]
pub(super) struct Nothing;

impl TensorSource for Nothing {
    fn tensors(&self) -> Vec<TensorInfo> {
        Vec::new()
    }
    fn read(&self, name: &str, _offset_bytes: u64, _out: &mut [u8]) -> Result<()> {
        Err(Error::MissingTensor { path: self.path(name), name: name.to_owned() })
    }
    fn path(&self, _name: &str) -> PathBuf {
        PathBuf::new()
    }
}

/// One of the tensors of a file.
#[derive(Debug)]
struct One {
    file: GgufFile,
    name: String,
}

impl TensorSource for One {
    fn tensors(&self) -> Vec<TensorInfo> {
        vec![self.file.tensor(&self.name).unwrap().clone()]
    }
    fn read(&self, name: &str, offset_bytes: u64, out: &mut [u8]) -> Result<()> {
        self.file.read(name, offset_bytes, out)
    }
    fn path(&self, name: &str) -> PathBuf {
        self.file.path(name)
    }
}

#[test]
fn parts_of_a_split_file_make_a_whole() {
    let dir = tempfile::tempdir().unwrap();
    let parts = write_parts(dir.path(), [[0, 2, 2], [1, 2, 2]]);
    for part in &parts {
        let file = GgufFile::open(part).unwrap();
        assert_eq!(file.tensors().len(), 2);
        assert_eq!(file.path("output_norm.weight"), parts[1]);
        let mut value = [0; 4];
        file.read("output_norm.weight", 4, &mut value).unwrap();
        assert_eq!(f32::from_le_bytes(value), 2.0);
    }
    let alone = dir.path().join("alone.gguf");
    fs::copy(&parts[0], &alone).unwrap();
    let error = GgufFile::open(&alone).unwrap_err();
    assert!(matches!(error, Error::Metadata { key, .. } if key == "split.count"));
    fs::remove_file(&parts[1]).unwrap();
    let error = GgufFile::open(&parts[0]).unwrap_err();
    assert!(matches!(error, Error::MissingShard { shard, .. } if shard == "m-00002-of-00002.gguf"));
}

#[test]
fn parts_that_contradict_each_other_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    for (keys, wrong) in [
        ([[0, 2, 2], [0, 2, 2]], "split.no"),
        ([[0, 2, 2], [1, 3, 2]], "split.count"),
        ([[0, 2, 3], [1, 2, 2]], "split.tensors.count"),
        ([[0, 5000, 2], [1, 2, 2]], "split.count"),
    ] {
        let parts = write_parts(dir.path(), keys);
        let error = GgufFile::open(&parts[0]).unwrap_err();
        assert!(matches!(&error, Error::Metadata { key, .. } if key == wrong), "{error}");
    }
}

/// A tensor of some type and shape whose bytes are never asked for.
#[derive(Debug)]
struct Claimed(FileDtype, Vec<usize>);

impl TensorSource for Claimed {
    fn tensors(&self) -> Vec<TensorInfo> {
        vec![TensorInfo { name: "t".to_owned(), dtype: self.0.clone(), shape: self.1.clone() }]
    }
    fn read(&self, name: &str, _offset_bytes: u64, _out: &mut [u8]) -> Result<()> {
        Err(Error::MissingTensor { path: self.path(name), name: name.to_owned() })
    }
    fn path(&self, _name: &str) -> PathBuf {
        "claimed".into()
    }
}

#[test]
fn what_cannot_be_written_is_an_error_before_the_file_is_touched() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.gguf");
    let write = |powerinfer, keys: &[&str], dtype, shape: &[usize]| {
        let keys = keys.iter().map(|key| ((*key).to_owned(), GgufValue::U32(32))).collect();
        let source = Claimed(dtype, shape.to_vec());
        write_gguf(&path, &GgufHeader::new(powerinfer, keys), &source, &mut |_, _| ()).unwrap_err()
    };
    let weights = FileDtype::Weights;
    let f32 = || weights(WeightFormat::F32);
    header_error(write(false, &["a", "a"], f32(), &[1]), "key `a`");
    header_error(write(false, &["general.alignment"], f32(), &[1]), "key `general.alignment`");
    header_error(write(false, &[], f32(), &[1; 5]), "tensor `t`: dimensions");
    header_error(
        write(false, &[], weights(WeightFormat::Q8_0), &[4, 33]),
        "tensor `t`: dimensions",
    );
    header_error(write(false, &[], f32(), &[usize::MAX, 2]), "tensor `t`: dimensions");
    let unknown = FileDtype::Other("I32".to_owned());
    assert!(matches!(write(false, &[], unknown, &[1]), Error::TensorDtype { .. }));
    // its engine has no such number
    let bf16 = weights(WeightFormat::BF16);
    assert!(
        matches!(write(true, &[], bf16, &[1]), Error::TensorDtype { found, .. } if found == "bf16")
    );
    assert!(!path.exists());
}
