//! Tensors out of one weight file, or out of the shards that an index lists.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Component, Path, PathBuf};

use serde::Deserialize;

use super::header::{self, Located, MAX_HEADER_BYTES};
use super::mapped::{MappedFile, MappedTensor};
use super::{TensorInfo, TensorSource, pytorch};
use crate::error::{Error, Result};
use crate::json::{self, UniqueMap};
use crate::regular_file::RegularFile;

/// A kind of weight files: what they are called and how one says where its tensors lie.
struct Kind {
    file: &'static str,
    index: &'static str,
    locate: fn(&RegularFile) -> Result<Vec<Located>>,
}

const SAFETENSORS: Kind =
    Kind { file: "model.safetensors", index: "model.safetensors.index.json", locate: header::read };

const PYTORCH: Kind = Kind {
    file: "pytorch_model.bin",
    index: "pytorch_model.bin.index.json",
    locate: pytorch::read,
};

/// One or more open weight files whose tables of tensors have been checked.
#[derive(Debug)]
pub(super) struct WeightFiles {
    /// The file, or the index of its shards.
    path: PathBuf,
    files: Vec<RegularFile>,
    /// The same files in memory, if they are mapped.
    maps: Vec<MappedFile>,
    tensors: BTreeMap<String, Place>,
}

#[derive(Debug)]
struct Place {
    file: usize,
    located: Located,
}

/// The index of shards; its other fields say nothing that the shards do not.
#[derive(Deserialize)]
struct Index {
    weight_map: UniqueMap<String>,
}

impl WeightFiles {
    /// Opens the single file in `dir`, or else the shards; errors as
    /// [`WeightStore::open`](super::WeightStore::open). PyTorch files of up to `pytorch_bytes`
    /// bytes each are opened where there are no safetensors.
    pub(super) fn open_dir(dir: &Path, pytorch_bytes: Option<u64>) -> Result<Self> {
        if let Some(found) = Self::open_kind(dir, &SAFETENSORS, u64::MAX)? {
            return Ok(found);
        }
        let pytorch = [PYTORCH.file, PYTORCH.index].iter().any(|name| dir.join(name).exists());
        let found = match pytorch_bytes {
            Some(max_bytes) => Self::open_kind(dir, &PYTORCH, max_bytes)?,
            None => None,
        };
        found.ok_or_else(|| Error::NoWeights { path: dir.to_owned(), pytorch })
    }

    /// No files yet.
    fn empty(path: &Path) -> Self {
        Self { path: path.to_owned(), files: vec![], maps: vec![], tensors: BTreeMap::new() }
    }

    /// Opens one PyTorch file.
    pub(super) fn open_pytorch_file(path: &Path) -> Result<Self> {
        let file = RegularFile::open(path)?;
        let mut this = Self::empty(path);
        this.add_file(file, &PYTORCH)?;
        Ok(this)
    }

    /// Opens one safetensors file; gives what its header says beside the tensors, too.
    pub(super) fn open_safetensors_file(path: &Path) -> Result<(Self, BTreeMap<String, String>)> {
        let file = RegularFile::open(path)?;
        let metadata = header::read_metadata(&file)?;
        let mut this = Self::empty(path);
        this.add_file(file, &SAFETENSORS)?;
        Ok((this, metadata))
    }

    /// Bytes of a tensor; 0 if there is none of that name.
    pub(super) fn size_bytes(&self, name: &str) -> usize {
        let size = self.tensors.get(name).map_or(0, |place| place.located.size);
        usize::try_from(size).unwrap_or(usize::MAX)
    }

    /// Maps all files.
    pub(super) fn map(mut self) -> Result<Self> {
        self.maps = self.files.iter().map(MappedFile::new).collect::<Result<_>>()?;
        Ok(self)
    }

    fn open_kind(dir: &Path, kind: &Kind, max_bytes: u64) -> Result<Option<Self>> {
        let (file, index) = (dir.join(kind.file), dir.join(kind.index));
        if let Some(file) = open_if_there(&file, max_bytes)? {
            let mut this = Self::empty(file.path());
            this.add_file(file, kind)?;
            return Ok(Some(this));
        }
        match open_if_there(&index, u64::MAX)? {
            Some(index) => Self::open_shards(dir, &index, kind, max_bytes).map(Some),
            None => Ok(None),
        }
    }

    fn open_shards(dir: &Path, index: &RegularFile, kind: &Kind, max_bytes: u64) -> Result<Self> {
        let text = index.read_all("a shard index", MAX_HEADER_BYTES)?;
        let Index { weight_map: UniqueMap(weight_map) } = json::parse(index.path(), &text)?;
        let mut this = Self::empty(index.path());
        for shard in weight_map.values().collect::<BTreeSet<_>>() {
            let path = this.path.clone();
            if !is_plain_file_name(shard) {
                return Err(Error::ShardName { path, shard: shard.clone() });
            }
            match open_if_there(&dir.join(shard), max_bytes)? {
                Some(file) => this.add_file(file, kind)?,
                None => {
                    return Err(Error::MissingShard { path, shard: shard.clone() });
                }
            }
        }
        this.check_index(dir, &weight_map)?;
        Ok(this)
    }

    /// Reads where the tensors of a file lie and adds them.
    fn add_file(&mut self, file: RegularFile, kind: &Kind) -> Result<()> {
        for located in (kind.locate)(&file)? {
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

impl TensorSource for WeightFiles {
    fn tensors(&self) -> Vec<TensorInfo> {
        self.tensors.values().map(|place| place.located.info.clone()).collect()
    }

    fn read(&self, name: &str, offset_bytes: u64, out: &mut [u8]) -> Result<()> {
        let Some(Place { file, located }) = self.tensors.get(name) else {
            return Err(Error::MissingTensor { path: self.path.clone(), name: name.to_owned() });
        };
        located.read(&self.files[*file], offset_bytes, out)
    }

    fn mapped(&self, name: &str) -> Option<MappedTensor> {
        let Place { file, located } = self.tensors.get(name)?;
        let bytes = self.maps.get(*file)?.part(located.offset, located.size);
        Some(MappedTensor { bytes, order: None })
    }

    fn path(&self, name: &str) -> PathBuf {
        let file = self.tensors.get(name).map(|place| self.files[place.file].path());
        file.unwrap_or(&self.path).to_owned()
    }
}

fn open_if_there(path: &Path, max_bytes: u64) -> Result<Option<RegularFile>> {
    match RegularFile::open(path) {
        Ok(file) if file.len() > max_bytes => {
            let (path, found_bytes) = (path.to_owned(), file.len());
            Err(Error::FileTooLong { path, max_bytes, found_bytes })
        }
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
