//! GGUF files, plain and PowerInfer's: keys and tensors, in one file or split over several.

mod ggml_type;
mod gpu_index;
mod header;
mod metadata;
mod reader;
mod split;
mod value;
mod writer;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::header::Located;
use super::mapped::{MappedFile, MappedTensor};
use super::{TensorInfo, TensorSource};
use crate::error::{Error, Result};
use crate::regular_file::RegularFile;
pub use gpu_index::GpuIndex;
use header::Header;
pub use metadata::GgufMetadata;
pub use value::{GgufArray, GgufElement, GgufValue};
pub use writer::{GgufHeader, write_gguf};

/// An open GGUF file, or all parts of a split one, whose header has been checked.
///
/// Files are read at positions, unless they are mapped. Nothing of a tensor is in memory before it is read.
///
/// # Examples
/// ```no_run
/// use powerinfer_core::{GgufFile, TensorSource};
/// let file = GgufFile::open("model.gguf".as_ref())?;
/// println!("{}: {} tensors", file.metadata().str("general.architecture")?, file.tensors().len());
/// # Ok::<(), powerinfer_core::Error>(())
/// ```
///
/// Cloning shares the open files.
#[derive(Debug, Clone)]
pub struct GgufFile(Arc<Opened>);

#[derive(Debug)]
struct Opened {
    powerinfer: bool,
    metadata: GgufMetadata,
    files: Vec<RegularFile>,
    /// The same files in memory, if they are mapped.
    maps: Vec<MappedFile>,
    tensors: BTreeMap<String, Place>,
}

#[derive(Debug)]
struct Place {
    file: usize,
    /// Position in the table of the file.
    index: usize,
    located: Located,
}

impl GgufFile {
    /// Opens a file of GGUF version 2 or 3, little endian, that begins with `GGUF` or with `PWRI`.
    /// If it is a part of a split one, `…-00001-of-0000N.gguf`, the others are opened, too; keys
    /// are those of the first.
    ///
    /// # Errors
    /// [`Error::Io`]; before anything of a size that the file states is allocated:
    /// [`Error::NotGguf`], [`Error::GgufVersion`], [`Error::GgufHeader`], [`Error::TensorOverlap`],
    /// [`Error::DuplicateTensor`], [`Error::FileLength`] if the file is longer or shorter than its
    /// tensors are; for split files [`Error::Metadata`] and [`Error::MissingShard`].
    pub fn open(path: &Path) -> Result<Self> {
        Ok(Self(Arc::new(Opened::whole(path)?)))
    }

    /// As [`open`](Self::open), and maps the file: matrices that need no change are used where they
    /// lie. See [`Holding::Mapped`](crate::Holding::Mapped) for what that asks of the file.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_mapped(path: &Path) -> Result<Self> {
        let mut opened = Opened::whole(path)?;
        opened.maps = opened.files.iter().map(MappedFile::new).collect::<Result<_>>()?;
        Ok(Self(Arc::new(opened)))
    }

    /// Whether the file begins with `PWRI`: it then holds `ffn_down_t` in place of `ffn_down`, and
    /// predictors.
    #[must_use]
    pub fn is_powerinfer(&self) -> bool {
        self.0.powerinfer
    }

    /// The keys.
    #[must_use]
    pub fn metadata(&self) -> &GgufMetadata {
        &self.0.metadata
    }

    /// What the file says about a tensor.
    #[must_use]
    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        self.0.tensors.get(name).map(|place| &place.located.info)
    }

    /// The names of the tensors in the order in which the file lists them.
    #[must_use]
    pub fn names_in_order(&self) -> Vec<&str> {
        let mut places: Vec<&Place> = self.0.tensors.values().collect();
        places.sort_by_key(|place| (place.file, place.index));
        places.into_iter().map(|place| place.located.info.name.as_str()).collect()
    }
}

impl Opened {
    fn whole(path: &Path) -> Result<Self> {
        let opened = Self::read(path, RegularFile::open(path)?)?;
        match split::parts(&opened.metadata)? {
            Some(parts) => Self::read_parts(&parts),
            None => Ok(opened),
        }
    }

    fn read(path: &Path, file: RegularFile) -> Result<Self> {
        let Header { powerinfer, values, tensors } = header::read(&file)?;
        let metadata = GgufMetadata::new(path, values);
        let (files, maps, places) = (Vec::new(), Vec::new(), BTreeMap::new());
        let mut this = Self { powerinfer, metadata, files, maps, tensors: places };
        this.add(file, tensors)?;
        Ok(this)
    }

    fn read_parts(parts: &[PathBuf]) -> Result<Self> {
        let mut whole = Self::read_part(parts, 0)?;
        for number in 1..parts.len() {
            let part = Self::read_part(parts, number)?;
            if part.powerinfer != whole.powerinfer {
                let (path, found) = (parts[number].clone(), header::magic(part.powerinfer));
                return Err(Error::NotGguf { path, found });
            }
            for file in part.files {
                let mut places: Vec<&Place> = part.tensors.values().collect();
                places.sort_by_key(|place| place.index);
                let located = places.into_iter().map(|place| place.located.clone());
                whole.add(file, located.collect())?;
            }
        }
        split::check_whole(&whole.metadata, whole.tensors.len())?;
        Ok(whole)
    }

    fn read_part(parts: &[PathBuf], number: usize) -> Result<Self> {
        let part = Self::read(&parts[number], split::open_part(parts, number)?)?;
        split::check_part(&part.metadata, number, parts.len())?;
        Ok(part)
    }

    fn add(&mut self, file: RegularFile, tensors: Vec<Located>) -> Result<()> {
        for (index, located) in tensors.into_iter().enumerate() {
            let name = located.info.name.clone();
            let place = Place { file: self.files.len(), index, located };
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
}

impl TensorSource for GgufFile {
    fn tensors(&self) -> Vec<TensorInfo> {
        self.0.tensors.values().map(|place| place.located.info.clone()).collect()
    }

    fn read(&self, name: &str, offset_bytes: u64, out: &mut [u8]) -> Result<()> {
        let Some(Place { file, located, .. }) = self.0.tensors.get(name) else {
            return Err(Error::MissingTensor { path: self.path(name), name: name.to_owned() });
        };
        located.read(&self.0.files[*file], offset_bytes, out)
    }

    fn mapped(&self, name: &str) -> Option<MappedTensor> {
        let Place { file, located, .. } = self.0.tensors.get(name)?;
        let bytes = self.0.maps.get(*file)?.part(located.offset, located.size);
        Some(MappedTensor { bytes, order: None })
    }

    fn path(&self, name: &str) -> PathBuf {
        let file = self.0.tensors.get(name).map(|place| self.0.files[place.file].path());
        file.unwrap_or(self.0.metadata.path()).to_owned()
    }
}

#[cfg(test)]
mod tests;
