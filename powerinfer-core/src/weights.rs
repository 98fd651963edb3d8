//! Names to matrices: every tensor is checked for shape and type as it is taken, and what nobody
//! took is not overlooked.

mod files;
mod gguf;
mod header;
mod mapped;
mod pytorch;
mod pytorch_writer;
mod small;
mod source;
mod writer;

use std::collections::BTreeMap;
use std::path::Path;

use powerinfer_ops::{NeuronMatrix, OpError, WeightFormat};

pub use gguf::{
    GgufArray, GgufElement, GgufFile, GgufHeader, GgufMetadata, GgufValue, GpuIndex, write_gguf,
};
pub use mapped::{Holding, MappedTensor};
pub use pytorch_writer::write_pytorch;
pub(crate) use small::SmallTensors;
pub use source::{FileDtype, TensorInfo, TensorSource};
pub use writer::{write_safetensors, write_safetensors_with};

use crate::allocation::try_zeroed;
use crate::error::{Error, Result};
use crate::load_progress::LoadProgress;
use files::WeightFiles;

/// How much is read at once where rows are converted one by one.
const READ_BYTES: usize = 1 << 20;

/// The types that weights are read from.
const READABLE: &str = "F32, F16, BF16";

/// How a file holds a matrix, seen from the neurons whose weights it is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layout {
    /// `[n_neurons, d_model]`, a neuron a row: read as it is.
    NeuronMajor,
    /// `[d_model, n_neurons]`, a neuron a column, as files hold a down projection: transposed
    /// while it is read.
    Transposed,
}

/// The tensors of a model, taken out one after the other by name.
///
/// Taking does not remove: a tensor can be taken again, as a head that is also the embedding
/// table. Nothing of a tensor is in memory before it is taken, and loading a model holds no more
/// than the weights themselves and a scratch copy of the largest [`Layout::Transposed`] tensor.
///
/// # Examples
/// ```
/// use std::path::PathBuf;
/// use powerinfer_core::{FileDtype, Layout, Result, TensorInfo, TensorSource, WeightStore};
/// use powerinfer_ops::WeightFormat;
///
/// /// One 2 × 3 matrix of ones.
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
/// let mut store = WeightStore::from_source(Box::new(Ones));
/// // three neurons of width 2, each a column in the file
/// let down = store.matrix("ones", 3, 2, Layout::Transposed, Some(WeightFormat::F16))?;
/// assert_eq!((down.n_neurons(), down.d_model()), (3, 2));
/// assert!(store.matrix("twos", 3, 2, Layout::Transposed, None).is_err());
/// assert!(store.finish(&|_| false)?.is_empty());
/// # Ok::<(), powerinfer_core::Error>(())
/// ```
#[derive(Debug)]
pub struct WeightStore {
    source: Box<dyn TensorSource>,
    tensors: BTreeMap<String, Entry>,
    watch: Option<Watch>,
}

#[derive(Debug)]
struct Entry {
    info: TensorInfo,
    taken: bool,
    /// Whether its bytes are among those done.
    done: bool,
}

/// Who is told how far the loading is, and how far it is.
#[derive(Debug)]
struct Watch {
    progress: LoadProgress,
    done_bytes: u64,
    total_bytes: u64,
}

impl WeightStore {
    /// Opens the weights in `dir`: `model.safetensors`, or where that is not there the shards that
    /// `model.safetensors.index.json` lists. Only headers are read.
    ///
    /// Files are read at positions, never mapped, so a file that changes while it is in use gives
    /// an error and not a crash.
    ///
    /// # Errors
    /// [`Error::NoWeights`] if `dir` has neither file. For each file, before anything of a size
    /// that it states is allocated: [`Error::HeaderTooLong`], [`Error::FileLength`] if the file is
    /// not exactly as long as its header says, [`Error::Json`], [`Error::Safetensors`]. For the
    /// index: [`Error::ShardName`], [`Error::MissingShard`], [`Error::MissingTensor`],
    /// [`Error::UnlistedTensor`], [`Error::DuplicateTensor`].
    pub fn open(dir: &Path) -> Result<Self> {
        Ok(Self::from_source(Box::new(WeightFiles::open_dir(dir, None)?)))
    }

    /// As [`open`](Self::open), and maps the files: matrices that need no change are used where
    /// they lie. See [`Holding::Mapped`] for what that asks of the files.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_mapped(dir: &Path) -> Result<Self> {
        Ok(Self::from_source(Box::new(WeightFiles::open_dir(dir, None)?.map()?)))
    }

    /// As [`open`](Self::open), and where `dir` has no safetensors opens `pytorch_model.bin` or the
    /// shards of `pytorch_model.bin.index.json`, each of at most `max_bytes` bytes.
    ///
    /// The table of tensors in such a file is a pickle. Nothing in it is executed, but its reader
    /// was not made for hostile ones: open files of a source that you trust.
    ///
    /// # Errors
    /// As [`open`](Self::open), [`Error::FileTooLong`], and [`Error::PyTorch`] for a file that is
    /// no archive of whole, uncompressed, contiguous tensors.
    pub fn open_with_pytorch(dir: &Path, max_bytes: u64) -> Result<Self> {
        Ok(Self::from_source(Box::new(WeightFiles::open_dir(dir, Some(max_bytes))?)))
    }

    /// Opens one safetensors file of any name; gives the entries of its header, too.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_safetensors_file(path: &Path) -> Result<(Self, BTreeMap<String, String>)> {
        let (files, entries) = WeightFiles::open_safetensors_file(path)?;
        Ok((Self::from_source(Box::new(files)), entries))
    }

    /// Opens one PyTorch file, such as a layer of the original's predictors; whom to trust is said
    /// at [`open_with_pytorch`](Self::open_with_pytorch).
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::PyTorch`].
    pub fn open_pytorch_file(path: &Path) -> Result<Self> {
        Ok(Self::from_source(Box::new(WeightFiles::open_pytorch_file(path)?)))
    }

    /// Takes the tensors from somewhere else. Of two with the same name the first is used.
    #[must_use]
    pub fn from_source(source: Box<dyn TensorSource>) -> Self {
        let mut tensors = BTreeMap::new();
        for info in source.tensors() {
            tensors.entry(info.name.clone()).or_insert(Entry { info, taken: false, done: false });
        }
        Self { source, tensors, watch: None }
    }

    /// Tells `progress` of every tensor that has been taken: bytes done and bytes of all tensors but
    /// those that are `ignorable`, from none to all of them when [`finish`](Self::finish) finds
    /// nothing wrong.
    #[must_use]
    pub fn with_progress(
        mut self,
        progress: LoadProgress,
        ignorable: &dyn Fn(&str) -> bool,
    ) -> Self {
        let wanted = self.tensors().filter(|info| !ignorable(&info.name));
        let total_bytes = wanted.fold(0u64, |sum, info| sum.saturating_add(info.size_bytes()));
        progress.tell(0, total_bytes);
        self.watch = Some(Watch { progress, done_bytes: 0, total_bytes });
        self
    }

    /// What the files say about a tensor.
    #[must_use]
    pub fn info(&self, name: &str) -> Option<&TensorInfo> {
        self.tensors.get(name).map(|entry| &entry.info)
    }

    /// What the tensors are read from.
    #[must_use]
    pub fn source(&self) -> &dyn TensorSource {
        self.source.as_ref()
    }

    /// Whether there is a tensor of that name.
    #[must_use]
    pub fn contains(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// Every tensor, taken or not, sorted by name.
    pub fn tensors(&self) -> impl Iterator<Item = &TensorInfo> {
        self.tensors.values().map(|entry| &entry.info)
    }

    /// Takes a matrix of `n_neurons` rows of width `d_model`, which the file holds as `layout`
    /// says. `dtype` is the format to hold it in, `None` the file's own.
    ///
    /// # Cost
    /// Where layout and format are the file's, the bytes are read to where they stay, or stay in a
    /// mapped file. A change of format converts rows in blocks of about a mebibyte; [`Layout::Transposed`] reads the
    /// tensor into scratch memory of its size, which is freed before this returns.
    ///
    /// # Errors
    /// [`Error::MissingTensor`], [`Error::TensorDtype`], [`Error::TensorShape`] with the shape as
    /// the file should have it, [`Error::TensorFormat`] if its rows are no whole blocks of `dtype`,
    /// [`Error::Io`], [`Error::Allocation`], [`Error::Op`].
    pub fn matrix(
        &mut self,
        name: &str,
        n_neurons: usize,
        d_model: usize,
        layout: Layout,
        dtype: Option<WeightFormat>,
    ) -> Result<NeuronMatrix> {
        let matrix = self.read_matrix(name, [n_neurons, d_model], layout, dtype)?;
        self.tell_done(name);
        Ok(matrix)
    }

    fn read_matrix(
        &mut self,
        name: &str,
        [n_neurons, d_model]: [usize; 2],
        layout: Layout,
        dtype: Option<WeightFormat>,
    ) -> Result<NeuronMatrix> {
        let shape = match layout {
            Layout::NeuronMajor => [n_neurons, d_model],
            Layout::Transposed => [d_model, n_neurons],
        };
        let from = self.take(name, &shape)?;
        let to = dtype.unwrap_or(from);
        to.row_bytes(d_model).map_err(|source| Error::TensorFormat {
            path: self.source.path(name),
            name: name.to_owned(),
            source: Box::new(source),
        })?;
        match layout {
            Layout::NeuronMajor if from == to => {
                if let Some(MappedTensor { bytes, order }) = self.source.mapped(name) {
                    return Ok(NeuronMatrix::from_shared(to, [n_neurons, d_model], bytes, order)?);
                }
                NeuronMatrix::try_from_packed(to, n_neurons, d_model, |offset_bytes, bytes| {
                    self.source.read(name, offset_bytes, bytes)
                })
            }
            Layout::NeuronMajor => self.converted(name, [n_neurons, d_model], from, to),
            Layout::Transposed => {
                let packed = self.packed(name, d_model, from.row_bytes(n_neurons)?)?;
                Ok(NeuronMatrix::from_transposed(to, n_neurons, d_model, from, &packed)?)
            }
        }
    }

    /// Takes a vector of `len` values, a bias or the scales of a norm, as f32.
    ///
    /// # Errors
    /// As [`matrix`](Self::matrix).
    pub fn vector(&mut self, name: &str, len: usize) -> Result<Vec<f32>> {
        let format = self.take(name, &[len])?;
        let packed = self.packed(name, 1, format.row_bytes(len)?)?;
        let mut values = try_zeroed("a vector of weights", len)?;
        format.decode(&packed, &mut values);
        self.tell_done(name);
        Ok(values)
    }

    /// Ends the loading: gives the names of the tensors that nobody took, sorted, all of which
    /// must be `ignorable`.
    ///
    /// # Errors
    /// [`Error::LeftoverTensors`] naming those that are not: the file is then not the model that
    /// its configuration claims.
    pub fn finish(self, ignorable: &dyn Fn(&str) -> bool) -> Result<Vec<String>> {
        let left = self.tensors.into_iter().filter(|(_, entry)| !entry.taken).map(|(name, _)| name);
        let (ignored, names): (Vec<_>, Vec<_>) = left.partition(|name| ignorable(name));
        if names.is_empty() {
            if let Some(watch) = self.watch {
                watch.progress.tell(watch.total_bytes, watch.total_bytes);
            }
            return Ok(ignored);
        }
        Err(Error::LeftoverTensors { path: self.source.path(""), names })
    }

    /// Counts a tensor that has been read, once.
    fn tell_done(&mut self, name: &str) {
        let (Some(watch), Some(entry)) = (&mut self.watch, self.tensors.get_mut(name)) else {
            return;
        };
        if std::mem::replace(&mut entry.done, true) {
            return;
        }
        let done_bytes = watch.done_bytes.saturating_add(entry.info.size_bytes());
        // ignorable tensors may be taken, too
        watch.done_bytes = done_bytes.min(watch.total_bytes);
        watch.progress.tell(watch.done_bytes, watch.total_bytes);
    }

    /// Marks a tensor as taken; gives its format.
    fn take(&mut self, name: &str, shape: &[usize]) -> Result<WeightFormat> {
        let path = || self.source.path(name);
        let Some(entry) = self.tensors.get_mut(name) else {
            return Err(Error::MissingTensor { path: path(), name: name.to_owned() });
        };
        let format = match &entry.info.dtype {
            FileDtype::Weights(format) => *format,
            FileDtype::Other(found) => {
                return Err(Error::TensorDtype {
                    path: path(),
                    name: name.to_owned(),
                    expected: READABLE,
                    found: found.clone(),
                });
            }
        };
        if entry.info.shape != shape {
            return Err(Error::TensorShape {
                path: path(),
                name: name.to_owned(),
                expected: shape.to_vec(),
                found: entry.info.shape.clone(),
            });
        }
        entry.taken = true;
        Ok(format)
    }

    /// The bytes of a whole tensor.
    fn packed(&self, name: &str, n_rows: usize, row_bytes: usize) -> Result<Vec<u8>> {
        let bytes = n_rows.checked_mul(row_bytes).ok_or(OpError::TooLarge { n_rows, row_bytes })?;
        let mut packed = try_zeroed("the bytes of a tensor", bytes)?;
        self.source.read(name, 0, &mut packed)?;
        Ok(packed)
    }

    fn converted(
        &self,
        name: &str,
        [n_neurons, d_model]: [usize; 2],
        from: WeightFormat,
        to: WeightFormat,
    ) -> Result<NeuronMatrix> {
        let row_bytes = from.row_bytes(d_model)?;
        let block_rows = (READ_BYTES / row_bytes.max(1)).clamp(1, n_neurons.max(1));
        let mut packed = try_zeroed("rows to convert", block_rows * row_bytes)?;
        let mut values = try_zeroed("a row to convert", d_model)?;
        let mut block = 0..0;
        NeuronMatrix::try_from_rows(to, n_neurons, d_model, |row, bytes| {
            if !block.contains(&row) {
                block = row..n_neurons.min(row + block_rows);
                let packed = &mut packed[..block.len() * row_bytes];
                self.source.read(name, row as u64 * row_bytes as u64, packed)?;
            }
            let offset = (row - block.start) * row_bytes;
            from.decode(&packed[offset..][..row_bytes], &mut values);
            to.encode(&values, bytes);
            Ok(())
        })
    }
}

#[cfg(test)]
mod tests;
