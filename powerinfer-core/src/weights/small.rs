//! Files of a few tensors that are no weights: profiles and statistics.

use std::collections::BTreeMap;
use std::path::Path;

use super::files::WeightFiles;
use super::{FileDtype, TensorInfo, TensorSource};
use crate::allocation::try_zeroed;
use crate::error::{Error, Result};

/// The tensors of one file, read whole and by value.
#[derive(Debug)]
pub(crate) struct SmallTensors {
    files: WeightFiles,
    tensors: BTreeMap<String, TensorInfo>,
    metadata: BTreeMap<String, String>,
}

impl SmallTensors {
    /// Opens a safetensors file.
    pub(crate) fn open_safetensors(path: &Path) -> Result<Self> {
        let (files, metadata) = WeightFiles::open_safetensors_file(path)?;
        Ok(Self::new(files, metadata))
    }

    /// Opens a PyTorch file of a table of tensors or of a single one.
    pub(crate) fn open_pytorch(path: &Path) -> Result<Self> {
        Ok(Self::new(WeightFiles::open_pytorch_file(path)?, BTreeMap::new()))
    }

    fn new(files: WeightFiles, metadata: BTreeMap<String, String>) -> Self {
        let tensors = files.tensors().into_iter().map(|info| (info.name.clone(), info)).collect();
        Self { files, tensors, metadata }
    }

    /// What the header says beside the tensors.
    pub(crate) fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }

    pub(crate) fn contains(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// Fails if there is a tensor of another name.
    pub(crate) fn only(&self, names: &[&str]) -> Result<()> {
        let others = self.tensors.keys().filter(|name| !names.contains(&name.as_str()));
        let names: Vec<String> = others.cloned().collect();
        if names.is_empty() {
            return Ok(());
        }
        Err(Error::LeftoverTensors { path: self.files.path(""), names })
    }

    pub(crate) fn shape(&self, name: &str) -> Result<Vec<usize>> {
        Ok(self.info(name)?.shape.clone())
    }

    /// The I32 or I64 values of a tensor.
    pub(crate) fn whole_numbers(&self, name: &str, shape: &[usize]) -> Result<Vec<i64>> {
        let bytes = self.bytes(name, shape)?;
        match self.info(name)?.dtype.to_string().as_str() {
            "I32" => {
                Ok(bytes.as_chunks().0.iter().map(|&b| i64::from(i32::from_le_bytes(b))).collect())
            }
            "I64" => Ok(bytes.as_chunks().0.iter().map(|&b| i64::from_le_bytes(b)).collect()),
            _ => Err(self.dtype_error(name, "I32, I64")),
        }
    }

    /// The values of a tensor in a weight format, as f32.
    pub(crate) fn numbers(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>> {
        let FileDtype::Weights(format) = self.info(name)?.dtype else {
            return Err(self.dtype_error(name, "F32, F16, BF16"));
        };
        let bytes = self.bytes(name, shape)?;
        let mut values = try_zeroed("the values of a tensor", shape.iter().product())?;
        format.decode(&bytes, &mut values);
        Ok(values)
    }

    /// The values of the only tensor, which is a vector of whole numbers or floats.
    pub(crate) fn only_vector(&self) -> Result<Vec<f64>> {
        let mut all = self.tensors.values();
        let (Some(info), None) = (all.next(), all.next()) else {
            let what = "not the one tensor that statistics of a layer are";
            return Err(Error::PyTorch { path: self.files.path(""), what, source: None });
        };
        let (name, shape) = (info.name.as_str(), info.shape.as_slice());
        if shape.len() != 1 {
            let (path, name) = (self.files.path(name), name.to_owned());
            return Err(Error::TensorShape {
                path,
                name,
                expected: vec![shape.iter().product()],
                found: shape.to_vec(),
            });
        }
        match info.dtype.to_string().as_str() {
            "I32" | "I64" => {
                Ok(self.whole_numbers(name, shape)?.iter().map(|&n| n as f64).collect())
            }
            "F64" => {
                let bytes = self.bytes(name, shape)?;
                Ok(bytes.as_chunks().0.iter().map(|&b| f64::from_le_bytes(b)).collect())
            }
            _ => Ok(self.numbers(name, shape)?.iter().map(|&x| f64::from(x)).collect()),
        }
    }

    fn info(&self, name: &str) -> Result<&TensorInfo> {
        self.tensors.get(name).ok_or_else(|| Error::MissingTensor {
            path: self.files.path(name),
            name: name.to_owned(),
        })
    }

    /// The bytes of a tensor, whose length the file was checked to have.
    fn bytes(&self, name: &str, shape: &[usize]) -> Result<Vec<u8>> {
        let info = self.info(name)?;
        if info.shape != shape {
            let (path, name) = (self.files.path(name), name.to_owned());
            let (expected, found) = (shape.to_vec(), info.shape.clone());
            return Err(Error::TensorShape { path, name, expected, found });
        }
        let mut bytes = try_zeroed("the bytes of a tensor", self.files.size_bytes(name))?;
        self.files.read(name, 0, &mut bytes)?;
        Ok(bytes)
    }

    fn dtype_error(&self, name: &str, expected: &'static str) -> Error {
        let found = self.tensors.get(name).map(|info| info.dtype.to_string()).unwrap_or_default();
        Error::TensorDtype { path: self.files.path(name), name: name.to_owned(), expected, found }
    }
}
