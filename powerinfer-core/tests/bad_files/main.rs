//! Files that are cut short, flipped bit by bit or broken by hand: always the right error, never
//! a panic.

mod config;
mod shards;
mod weights;

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use powerinfer_core::{Error, Layout, Result, WeightStore};
use tempfile::TempDir;
use testing::Fixture;

const FILE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// Whether an error is the right one.
type Check = fn(&Error) -> bool;

/// A [`Check`] for a pattern.
macro_rules! pattern {
    ($pattern:pat $(if $guard:expr)?) => {
        |error: &powerinfer_core::Error| matches!(error, $pattern $(if $guard)?)
    };
}
use pattern;

/// A folder of its own to break files in.
struct Folder(TempDir);

impl Folder {
    fn new() -> Self {
        Self(tempfile::tempdir().expect("a temporary folder"))
    }

    /// With the model files of a fixture.
    fn of(name: &str) -> Self {
        let folder = Self::new();
        for entry in fs::read_dir(Fixture::micro(name).model_dir).expect("the fixture") {
            let path = entry.expect("the fixture").path();
            let name = path.file_name().expect("a file").to_owned();
            if !name.to_string_lossy().starts_with("golden") {
                fs::copy(&path, folder.path().join(name)).expect("copied");
            }
        }
        folder
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    fn write(&self, name: &str, bytes: impl AsRef<[u8]>) -> PathBuf {
        let path = self.path().join(name);
        let bytes = bytes.as_ref();
        // overwritten in place: some file systems flush a file that is emptied and written again
        let options = fs::File::options().write(true).create(true).truncate(false).open(&path);
        let mut file = options.expect("a file");
        file.write_all(bytes).and_then(|()| file.set_len(bytes.len() as u64)).expect("written");
        path
    }

    fn read(&self, name: &str) -> Vec<u8> {
        fs::read(self.path().join(name)).expect("the file")
    }
}

/// A safetensors file with that header and zeros for data.
fn weights(header: &str, data_len: usize) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(header.as_bytes());
    bytes.resize(bytes.len() + data_len, 0);
    bytes
}

/// Opens the weights and takes everything that can be taken.
fn take_all(dir: &Path) -> Result<()> {
    let mut store = WeightStore::open(dir)?;
    let tensors: Vec<_> = store.tensors().cloned().collect();
    for info in tensors {
        match *info.shape {
            [len] => drop(store.vector(&info.name, len)?),
            [rows, columns] => {
                store.matrix(&info.name, rows, columns, Layout::NeuronMajor, None)?;
                store.matrix(&info.name, columns, rows, Layout::Transposed, None)?;
            }
            _ => {}
        }
    }
    store.finish(&|_| true).map(drop)
}
