//! Tensors out of one safetensors file, or out of the shards that an index lists.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Component, Path, PathBuf};

use serde::Deserialize;

use super::header::{self, Located, MAX_HEADER_BYTES};
use super::{TensorInfo, TensorSource};
use crate::error::{Error, Result};
use crate::json::{self, UniqueMap};
use crate::regular_file::RegularFile;

const FILE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// One or more open weight files whose headers have been checked.
#[derive(Debug)]
pub(super) struct Safetensors {
    /// The file, or the index of its shards.
    path: PathBuf,
    files: Vec<RegularFile>,
    tensors: BTreeMap<String, Place>,
}

#[derive(Debug)]
struct Place {
    file: usize,
    located: Located,
}

/// `model.safetensors.index.json`; its other fields say nothing that the shards do not.
#[derive(Deserialize)]
struct Index {
    weight_map: UniqueMap<String>,
}

impl Safetensors {
    /// Opens the single file in `dir`, or else the shards; errors as
    /// [`WeightStore::open`](super::WeightStore::open).
    pub(super) fn open_dir(dir: &Path) -> Result<Self> {
        let (file, index) = (dir.join(FILE), dir.join(INDEX));
        if let Some(file) = open_if_there(&file)? {
            let mut this =
                Self { path: file.path().to_owned(), files: vec![], tensors: BTreeMap::new() };
            this.add_file(file)?;
            return Ok(this);
        }
        match open_if_there(&index)? {
            Some(index) => Self::open_shards(dir, &index),
            None => Err(Error::NoWeights { path: dir.to_owned() }),
        }
    }

    fn open_shards(dir: &Path, index: &RegularFile) -> Result<Self> {
        let text = index.read_all("a shard index", MAX_HEADER_BYTES)?;
        let Index { weight_map: UniqueMap(weight_map) } = json::parse(index.path(), &text)?;
        let mut this =
            Self { path: index.path().to_owned(), files: vec![], tensors: BTreeMap::new() };
        for shard in weight_map.values().collect::<BTreeSet<_>>() {
            let path = this.path.clone();
            if !is_plain_file_name(shard) {
                return Err(Error::ShardName { path, shard: shard.clone() });
            }
            match open_if_there(&dir.join(shard))? {
                Some(file) => this.add_file(file)?,
                None => {
                    return Err(Error::MissingShard { path, shard: shard.clone() });
                }
            }
        }
        this.check_index(dir, &weight_map)?;
        Ok(this)
    }

    /// Reads the header of a file and adds its tensors.
    fn add_file(&mut self, file: RegularFile) -> Result<()> {
        for located in header::read(&file)? {
            let name = located.info.name.clone();
            let place = Place { file: self.files.len(), located };
            if let Some(other) = self.tensors.insert(name.clone(), place) {
                return Err(Error::DuplicateTensor {
                    name,
                    first: self.files[other.file].path().to_owned(),
                    second: file.path().to_owned(),
                });
            }
        }
        self.files.push(file);
        Ok(())
    }

    /// Fails unless each tensor lies in the shard that the index says and the index lists it.
    fn check_index(&self, dir: &Path, weight_map: &BTreeMap<String, String>) -> Result<()> {
        for (name, shard) in weight_map {
            let path = dir.join(shard);
            let found = self.tensors.get(name).map(|place| self.files[place.file].path());
            if found != Some(&path) {
                return Err(Error::MissingTensor { path, name: name.clone() });
            }
        }
        match self.tensors.iter().find(|(name, _)| !weight_map.contains_key(*name)) {
            None => Ok(()),
            Some((name, place)) => {
                let path = self.files[place.file].path().to_owned();
                Err(Error::UnlistedTensor { path, name: name.clone() })
            }
        }
    }
}

impl TensorSource for Safetensors {
    fn tensors(&self) -> Vec<TensorInfo> {
        self.tensors.values().map(|place| place.located.info.clone()).collect()
    }

    fn read(&self, name: &str, offset_bytes: u64, out: &mut [u8]) -> Result<()> {
        let Some(Place { file, located }) = self.tensors.get(name) else {
            return Err(Error::MissingTensor { path: self.path.clone(), name: name.to_owned() });
        };
        let file = &self.files[*file];
        let len = out.len() as u64;
        if offset_bytes.checked_add(len).is_none_or(|end| end > located.size) {
            return Err(Error::TensorRange {
                path: file.path().to_owned(),
                name: name.to_owned(),
                offset: offset_bytes,
                len,
                size: located.size,
            });
        }
        file.read_at(located.offset + offset_bytes, out)
    }

    fn path(&self, name: &str) -> PathBuf {
        let file = self.tensors.get(name).map(|place| self.files[place.file].path());
        file.unwrap_or(&self.path).to_owned()
    }
}

fn open_if_there(path: &Path) -> Result<Option<RegularFile>> {
    match RegularFile::open(path) {
        Ok(file) => Ok(Some(file)),
        Err(Error::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Whether `name` can only mean a file beside the index, on any system.
fn is_plain_file_name(name: &str) -> bool {
    let mut components = Path::new(name).components();
    let one = matches!(components.next(), Some(Component::Normal(part)) if part == name);
    one && components.next().is_none() && !name.contains(['/', '\\', ':', '\0'])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_plain_file_names_are_shards() {
        for name in ["model-00001-of-00002.safetensors", "a", "..a", "ä b"] {
            assert!(is_plain_file_name(name), "{name:?}");
        }
        for name in
            ["", ".", "..", "/etc/passwd", "../a", "a/../b", "a/", "a/.", "./a", "a/b", "\0"]
        {
            assert!(!is_plain_file_name(name), "{name:?}");
        }
        for name in ["..\\a", "C:a", "\\\\host\\a", "a\0b"] {
            assert!(!is_plain_file_name(name), "{name:?}");
        }
    }
}
