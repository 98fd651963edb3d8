//! GGUF files with anything wrong in their headers: an error that names the file, never a panic,
//! never a wait, never memory that the file does not justify.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use powerinfer_core::{Error as CoreError, GgufFile, TensorSource};
use powerinfer_models::{ConvertOptions, Error, LoadOptions, convert, load};
use testing::Fixture;

/// What one file may cost.
const MAX_TIME: Duration = Duration::from_millis(100);
const MAX_MEMORY: usize = 64 << 20;

/// One test at a time, since memory is counted over all threads.
static ALONE: Mutex<()> = Mutex::new(());

/// Counts what is allocated, and the most of it that there was.
struct Counting;

static NOW: AtomicUsize = AtomicUsize::new(0);
static MOST: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call goes to the system's allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        MOST.fetch_max(NOW.fetch_add(layout.size(), Relaxed) + layout.size(), Relaxed);
        // SAFETY: as the caller's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        NOW.fetch_sub(layout.size(), Relaxed);
        // SAFETY: as the caller's.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// A valid file, and a copy that is broken in place and mended again.
struct Seed {
    bytes: Vec<u8>,
    header_len: usize,
    path: PathBuf,
    file: File,
    _dir: tempfile::TempDir,
}

/// What has been seen.
#[derive(Debug, Default)]
struct Tally {
    n: usize,
    refused: usize,
}

impl Seed {
    fn new(fixture: &str, powerinfer: bool) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m.gguf");
        let options = ConvertOptions::default().with_powerinfer(powerinfer);
        convert(&Fixture::micro(fixture).model_dir, &path, &options, &mut |_, _| ()).unwrap();
        let bytes = std::fs::read(&path).unwrap();
        let data: u64 = GgufFile::open(&path).unwrap().tensors().iter().map(padded).sum();
        let file = OpenOptions::new().write(true).open(&path).unwrap();
        Self { header_len: bytes.len() - data as usize, bytes, path, file, _dir: dir }
    }

    /// Loads the file with other bytes at `at`; gives the error.
    fn patched(&self, at: usize, new: &[u8], tally: &mut Tally) -> Option<Error> {
        self.file.write_all_at(new, at as u64).unwrap();
        let error = tried(&self.path, &format!("{new:?} at {at}"), tally);
        self.file.write_all_at(&self.bytes[at..at + new.len()], at as u64).unwrap();
        error
    }

    /// Loads the first `len` bytes.
    fn truncated(&self, len: usize, tally: &mut Tally) -> Option<Error> {
        self.file.set_len(len as u64).unwrap();
        let error = tried(&self.path, &format!("cut at {len}"), tally);
        self.file.write_all_at(&self.bytes[len..], len as u64).unwrap();
        error
    }

    /// Loads a file of these bytes.
    fn replaced(&self, bytes: &[u8], tally: &mut Tally) -> Option<Error> {
        self.file.set_len(0).unwrap();
        self.file.write_all_at(bytes, 0).unwrap();
        let error = tried(&self.path, "other bytes", tally);
        self.file.set_len(0).unwrap();
        self.file.write_all_at(&self.bytes, 0).unwrap();
        error
    }
}

fn padded(info: &powerinfer_core::TensorInfo) -> u64 {
    let powerinfer_core::FileDtype::Weights(format) = info.dtype else { panic!("{info:?}") };
    let size = format.row_bytes(info.shape.iter().product()).unwrap();
    (size as u64).next_multiple_of(32)
}

/// Loads a file as a model; fails if that takes too long or too much, or panics.
fn tried(path: &Path, what: &str, tally: &mut Tally) -> Option<Error> {
    let len = std::fs::metadata(path).unwrap().len() as usize;
    let once = || {
        let before = NOW.load(Relaxed);
        MOST.store(before, Relaxed);
        let start = Instant::now();
        let outcome = catch_unwind(AssertUnwindSafe(|| load(path, &LoadOptions::default())));
        let (elapsed, memory) = (start.elapsed(), MOST.load(Relaxed) - before);
        let Ok(outcome) = outcome else { panic!("{what}: a panic") };
        assert!(memory <= len + MAX_MEMORY, "{what}: {memory} bytes for a file of {len}");
        (outcome, elapsed)
    };
    // what slows a file down does so every time; a neighbour on this machine does not
    let mut tries = std::iter::repeat_with(once).take(4);
    let fast = tries.find(|(_, elapsed)| *elapsed <= MAX_TIME);
    let Some((outcome, _)) = fast else { panic!("{what}: longer than {MAX_TIME:?}") };
    tally.n += 1;
    let error = outcome.err()?;
    tally.refused += 1;
    assert!(error.to_string().contains(path.to_str().unwrap()), "{what}: {error}");
    Some(error)
}

/// Where the numbers of a valid header lie: offset and bytes of each, and what it is.
fn fields(bytes: &[u8]) -> Vec<(usize, usize, &'static str)> {
    let mut walk = Walk { bytes, at: 4, fields: vec![] };
    walk.field(4, "version");
    let n_tensors = walk.field(8, "count");
    let n_keys = walk.field(8, "count");
    for _ in 0..n_keys {
        walk.string();
        match walk.field(4, "type of value") {
            8 => walk.string(),
            9 => {
                let element = walk.field(4, "type of element");
                let len = walk.field(8, "length");
                walk.at += size_of_value(element) * len as usize;
            }
            kind => {
                let size = size_of_value(kind);
                walk.field(size, "value");
            }
        }
    }
    for _ in 0..n_tensors {
        walk.string();
        let n_dims = walk.field(4, "number of dimensions");
        (0..n_dims).for_each(|_| {
            walk.field(8, "dimension");
        });
        walk.field(4, "type of tensor");
        walk.field(8, "offset");
    }
    walk.fields
}

fn size_of_value(kind: u64) -> usize {
    match kind {
        0 | 1 | 7 => 1,
        2 | 3 => 2,
        4..=6 => 4,
        10..=12 => 8,
        other => panic!("type {other}"),
    }
}

struct Walk<'a> {
    bytes: &'a [u8],
    at: usize,
    fields: Vec<(usize, usize, &'static str)>,
}

impl Walk<'_> {
    fn field(&mut self, size: usize, what: &'static str) -> u64 {
        self.fields.push((self.at, size, what));
        let mut value = [0; 8];
        value[..size].copy_from_slice(&self.bytes[self.at..self.at + size]);
        self.at += size;
        u64::from_le_bytes(value)
    }

    fn string(&mut self) {
        self.at += self.field(8, "length") as usize;
    }
}

/// Whether a header is wrong in itself, or says another model than the tensors are.
fn is_of_the_header(error: &Error) -> bool {
    use CoreError::{
        DuplicateTensor, FileLength, GgufHeader, GgufVersion, LeftoverTensors, Metadata,
        MissingTensor, NotGguf, TensorDtype, TensorFormat, TensorOverlap, TensorShape,
        UnknownActivation, UnknownModelType, UnknownRopeType,
    };
    matches!(
        error,
        Error::Core(
            DuplicateTensor { .. }
                | FileLength { .. }
                | GgufHeader { .. }
                | GgufVersion { .. }
                | LeftoverTensors { .. }
                | Metadata { .. }
                | MissingTensor { .. }
                | NotGguf { .. }
                | TensorDtype { .. }
                | TensorFormat { .. }
                | TensorOverlap { .. }
                | TensorShape { .. }
                | UnknownActivation { .. }
                | UnknownModelType { .. }
                | UnknownRopeType { .. }
        )
    )
}

#[test]
fn mutated_headers_are_errors_or_models() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let mut tally = Tally::default();
    for (fixture, powerinfer) in [("llama-gqa-tied-theta", true), ("opt-preln", false)] {
        let seed = Seed::new(fixture, powerinfer);
        assert!(tried(&seed.path, "the seed", &mut tally).is_none());
        let whole = &seed.bytes;

        for len in 0..=seed.header_len {
            let error = seed.truncated(len, &mut tally).unwrap();
            let right = matches!(
                error,
                Error::Core(CoreError::GgufHeader { .. } | CoreError::FileLength { .. })
            );
            assert!(right, "cut at {len}: {error}");
        }

        for (at, byte) in whole[..seed.header_len].iter().enumerate() {
            for bit in 0..8 {
                if let Some(error) = seed.patched(at, &[byte ^ 1 << bit], &mut tally) {
                    assert!(is_of_the_header(&error), "bit {bit} at {at}: {error}");
                    let magic = at < 4 && !matches!(error, Error::Core(CoreError::NotGguf { .. }));
                    assert!(!magic, "bit {bit} at {at}: {error}");
                }
            }
        }

        for (at, size, what) in fields(whole) {
            let left = (whole.len() - at - size) as u64;
            let around = [left - 1, left, left + 1, left / 8, left / 33];
            let powers = [1 << 31, 1 << 32, 1 << 61, 1 << 63].map(|power: u64| [power - 1, power]);
            let values = around.into_iter().chain(powers.into_iter().flatten());
            for value in values.chain([0, 1, 2, 3, 5, 13, 33, u64::MAX]) {
                let new = &value.to_le_bytes()[..size];
                if new == &whole[at..at + size] {
                    continue;
                }
                let error = seed.patched(at, new, &mut tally);
                let harmless = matches!(what, "value" | "type of value" | "type of tensor")
                    || (what, value) == ("version", 2);
                assert!(harmless || error.is_some(), "{what} at {at}: {value} is taken");
                if let Some(error) = error {
                    assert!(is_of_the_header(&error), "{what} at {at}: {value}: {error}");
                }
            }
        }
    }
    assert!(tally.n >= 15_000, "{tally:?}");
    assert!(tally.refused > tally.n / 2, "{tally:?}");
}

/// A header by hand: no tensors, these bytes as the values of `n` keys.
fn keys_of(n: u64, bytes: &[u8]) -> Vec<u8> {
    let mut file = Vec::from(*b"GGUF\x03\0\0\0\0\0\0\0\0\0\0\0");
    file.extend(n.to_le_bytes());
    file.extend(bytes);
    file.resize(file.len().next_multiple_of(32), 0);
    file
}

#[test]
fn files_that_broke_other_readers_are_errors() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let seed = Seed::new("llama-gqa-tied-theta", false);
    let mut tally = Tally::default();
    let key = |kind: u32, rest: &[u8]| {
        [&1u64.to_le_bytes()[..], b"k", &kind.to_le_bytes(), rest].concat()
    };
    let array = |element: u32, len: u64, rest: &[u8]| {
        [&element.to_le_bytes()[..], &len.to_le_bytes(), rest].concat()
    };
    let mut nested = array(9, 1, &[]);
    for _ in 0..10_000 {
        nested.extend(array(9, 1, &[]));
    }
    let alignment = |value: u32| {
        let name = b"general.alignment";
        [&17u64.to_le_bytes()[..], name, &4u32.to_le_bytes(), &value.to_le_bytes()].concat()
    };
    let mut cases = vec![
        // a string whose length and terminator wrap
        keys_of(1, &key(8, &u64::MAX.to_le_bytes())),
        // a name whose length wraps
        keys_of(1, &u64::MAX.to_le_bytes()),
        // arrays whose count times size wraps
        keys_of(1, &key(9, &array(8, 1 << 61, &[]))),
        keys_of(1, &key(9, &array(10, (1 << 61) + 1, &[]))),
        keys_of(1, &key(9, &array(0, u64::MAX, &[]))),
        // arrays in arrays
        keys_of(1, &key(9, &nested)),
        // an array of a type that does not exist
        keys_of(1, &key(9, &array(13, 0, &[]))),
        // counts that wrap with the size of an entry
        keys_of(u64::MAX, &[]),
        keys_of(1 << 60, &[]),
        b"GGUF".to_vec(),
        b"GGU".to_vec(),
        Vec::new(),
    ];
    cases.extend([0, 3, 1 << 31].map(|value| keys_of(1, &alignment(value))));
    for bytes in cases {
        let error = seed.replaced(&bytes, &mut tally).unwrap();
        assert!(matches!(error, Error::Core(CoreError::GgufHeader { .. })), "{error}");
    }
    assert_eq!(tally.n, 15);
}

#[test]
fn weights_that_are_not_numbers_are_no_reason_to_panic() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let seed = Seed::new("llama-gqa-tied-theta", true);
    let mut tally = Tally::default();
    // every byte of the data: NaN in f16 and in f32
    let data = vec![0xFF; seed.bytes.len() - seed.header_len];
    let start = Instant::now();
    assert!(seed.patched(seed.header_len, &data, &mut tally).is_none());
    assert!(start.elapsed() < Duration::from_secs(5));
}
