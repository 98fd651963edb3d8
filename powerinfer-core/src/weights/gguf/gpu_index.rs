//! The split that PowerInfer's engine leaves beside a model, `<model file>.generated.gpuidx`: which
//! neurons it put on the GPU.

use std::path::Path;

use powerinfer_ops::NeuronIds;

use super::GgufFile;
use crate::allocation::try_zeroed;
use crate::error::{Error, Result};
use crate::placement::Placement;
use crate::weights::{FileDtype, TensorInfo, TensorSource};

const ARCHITECTURE: &str = "generic.gpu_index";
const LAYERS_KEY: &str = "generic.gpu_index.block_count";
const VRAM_KEY: &str = "split.vram_capacity";
const MAX_LAYERS: u32 = 1 << 12;
/// Most neurons of a layer.
const MAX_NEURONS: usize = 1 << 24;

/// A split of neurons as PowerInfer's engine stored it.
///
/// **Do not trust one that you find.** Since January 2024 the tool that makes these files takes the
/// statistics of the layers in the order 0, 1, 10, 11, …, 2, 20, …: in a file for more than ten
/// layers nearly every layer has the hot neurons of another. The file says nothing about it, and
/// it is valid all the same; make a placement from a profile instead.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct GpuIndex {
    /// The neurons that were put on the GPU are the hot ones.
    pub placement: Placement,
    /// Bytes of GPU memory that the split was made for.
    pub vram_bytes: u64,
    /// What to tell the user: that the layers may be mixed up, if there are more than ten.
    pub warning: Option<&'static str>,
}

/// Told about every index of more layers than the order of names keeps apart.
const WARNING: &str = "files of this kind made since January 2024 hold the hot neurons of the wrong \
                       layers; a placement made from a profile is better";

impl GpuIndex {
    /// Reads and checks an index: two tensors a layer, in the order of the file whatever they are
    /// called, the first with a 1 for each neuron on the GPU and a 0 for each other, the second
    /// with the ids of the former, ascending.
    ///
    /// # Errors
    /// Those of [`GgufFile::open`], [`Error::Metadata`] for an index of another kind,
    /// [`Error::TensorDtype`], [`Error::TensorShape`], and [`Error::TensorValue`] for numbers that
    /// are not as above.
    pub fn open(path: &Path) -> Result<Self> {
        let file = GgufFile::open(path)?;
        let keys = file.metadata();
        if !file.is_powerinfer() || keys.str("general.architecture")? != ARCHITECTURE {
            return Err(keys.error("general.architecture", format!("{ARCHITECTURE} after PWRI")));
        }
        let n_layers = keys.u32(LAYERS_KEY)?;
        let names = file.names_in_order();
        if n_layers > MAX_LAYERS || names.len() as u64 != 2 * u64::from(n_layers) {
            let expected = format!("half of the {} tensors, at most {MAX_LAYERS}", names.len());
            return Err(keys.error(LAYERS_KEY, expected));
        }
        let vram_bytes = keys.u64(VRAM_KEY)?;
        let mut hot = Vec::new();
        let mut d_ff = None;
        for pair in names.chunks_exact(2) {
            let flags = integers(&file, pair[0], d_ff, MAX_NEURONS)?;
            d_ff = Some(flags.len());
            let on_gpu: Vec<u32> =
                (0u32..).zip(&flags).filter(|(_, flag)| **flag == 1).map(|(id, _)| id).collect();
            if let Some(&wrong) = flags.iter().find(|flag| !matches!(flag, 0 | 1)) {
                return Err(value_error(&file, pair[0], "0 or 1 a neuron", wrong));
            }
            let ids = integers(&file, pair[1], Some(on_gpu.len()), flags.len())?;
            let differs =
                ids.iter().zip(&on_gpu).find(|&(&id, &hot)| i64::from(id) != i64::from(hot));
            if let Some((&wrong, _)) = differs {
                let expected = "the ids of the neurons whose flag is 1, ascending";
                return Err(value_error(&file, pair[1], expected, wrong));
            }
            hot.push(NeuronIds::from_sorted(on_gpu)?);
        }
        let warning = (hot.len() > 10).then_some(WARNING);
        let placement = Placement::new(hot, d_ff.unwrap_or_default())?;
        Ok(Self { placement, vram_bytes, warning })
    }
}

/// A vector of 32-bit integers, of that length or of at most so many.
fn integers(file: &GgufFile, name: &str, len: Option<usize>, max: usize) -> Result<Vec<i32>> {
    let path = || file.path(name);
    let Some(TensorInfo { dtype, shape, .. }) = file.tensor(name) else {
        return Err(Error::MissingTensor { path: path(), name: name.to_owned() });
    };
    if *dtype != FileDtype::Other("I32".to_owned()) {
        let (name, found) = (name.to_owned(), dtype.to_string());
        return Err(Error::TensorDtype { path: path(), name, expected: "I32", found });
    }
    let found = match shape[..] {
        [found] if found <= max && len.is_none_or(|len| len == found) => found,
        _ => {
            let (name, found) = (name.to_owned(), shape.clone());
            let expected = vec![len.unwrap_or(max)];
            return Err(Error::TensorShape { path: path(), name, expected, found });
        }
    };
    let mut bytes = try_zeroed("an index of neurons", found * 4)?;
    file.read(name, 0, &mut bytes)?;
    let (values, _) = bytes.as_chunks::<4>();
    Ok(values.iter().map(|value| i32::from_le_bytes(*value)).collect())
}

fn value_error(file: &GgufFile, name: &str, expected: &'static str, found: i32) -> Error {
    let (path, name, found) = (file.path(name), name.to_owned(), found as f32);
    Error::TensorValue { path, name, expected, found }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;

    use crate::weights::gguf::{GgufHeader, GgufValue};

    /// An index as PowerInfer's tool writes it, by hand, since the writer knows no integers.
    fn bytes(layers: &[(&[i32], &[i32])], n_layers: u32) -> Vec<u8> {
        let mut bytes = Vec::from(*b"PWRI\x03\0\0\0");
        bytes.extend((2 * layers.len() as u64).to_le_bytes());
        bytes.extend(3u64.to_le_bytes());
        let text = |bytes: &mut Vec<u8>, text: &str| {
            bytes.extend((text.len() as u64).to_le_bytes());
            bytes.extend(text.as_bytes());
        };
        text(&mut bytes, "general.architecture");
        bytes.extend(8u32.to_le_bytes());
        text(&mut bytes, ARCHITECTURE);
        text(&mut bytes, LAYERS_KEY);
        bytes.extend(4u32.to_le_bytes());
        bytes.extend(n_layers.to_le_bytes());
        text(&mut bytes, VRAM_KEY);
        bytes.extend(10u32.to_le_bytes());
        bytes.extend((3u64 << 30).to_le_bytes());
        let mut data = Vec::new();
        for (layer, (flags, ids)) in layers.iter().enumerate() {
            for (what, values) in [("gpu_idx", flags), ("gpu_bucket", ids)] {
                text(&mut bytes, &format!("blk.{layer}.{what}"));
                bytes.extend(1u32.to_le_bytes());
                bytes.extend((values.len() as u64).to_le_bytes());
                bytes.extend(18u32.to_le_bytes());
                bytes.extend((data.len() as u64).to_le_bytes());
                data.extend(values.iter().flat_map(|value| value.to_le_bytes()));
                data.resize(data.len().next_multiple_of(32), 0);
            }
        }
        bytes.resize(bytes.len().next_multiple_of(32), 0);
        bytes.extend(data);
        bytes
    }

    fn open(bytes: &[u8]) -> Result<GpuIndex> {
        let dir = tempfile::tempdir().unwrap();
        let path: PathBuf = dir.path().join("m.gguf.generated.gpuidx");
        std::fs::write(&path, bytes).unwrap();
        GpuIndex::open(&path)
    }

    #[test]
    fn an_index_is_a_placement() {
        let layers: [(&[i32], &[i32]); 3] =
            [(&[1, 0, 0, 1], &[0, 3]), (&[0; 4], &[]), (&[1; 4], &[0, 1, 2, 3])];
        let index = open(&bytes(&layers, 3)).unwrap();
        assert_eq!(index.vram_bytes, 3 << 30);
        assert_eq!((index.placement.d_ff(), index.placement.n_layers()), (4, 3));
        assert_eq!(index.placement.hot(0).as_slice(), [0, 3]);
        assert_eq!(index.placement.hot(1).as_slice(), [0; 0]);
        assert_eq!(index.placement.cold(2).as_slice(), [0; 0]);
        assert_eq!(index.warning, None);
    }

    #[test]
    fn more_layers_than_ten_are_warned_about() {
        let layer: (&[i32], &[i32]) = (&[0, 1], &[1]);
        assert!(open(&bytes(&[layer; 11], 11)).unwrap().warning.is_some());
    }

    #[test]
    fn what_contradicts_itself_is_refused() {
        let right: (&[i32], &[i32]) = (&[1, 0, 0, 1], &[0, 3]);
        let error = |layers: &[(&[i32], &[i32])], n| open(&bytes(layers, n)).unwrap_err();
        assert!(matches!(error(&[right], 2), Error::Metadata { key, .. } if key == LAYERS_KEY));
        assert!(matches!(
            error(&[right, (&[1, 0], &[0])], 2),
            Error::TensorShape { name, .. } if name == "blk.1.gpu_idx"
        ));
        for ids in [&[0][..], &[0, 2, 3]] {
            assert!(matches!(
                error(&[(&[1, 0, 0, 1], ids)], 1),
                Error::TensorShape { name, .. } if name == "blk.0.gpu_bucket"
            ));
        }
        for (layer, wrong) in [
            ((&[1, 0, 0, 2][..], &[0][..]), "blk.0.gpu_idx"),
            ((&[1, 0, 0, -1], &[0]), "blk.0.gpu_idx"),
            ((&[1, 0, 0, 1], &[3, 0]), "blk.0.gpu_bucket"),
            ((&[1, 0, 0, 1], &[0, -1]), "blk.0.gpu_bucket"),
        ] {
            assert!(matches!(
                error(&[layer], 1),
                Error::TensorValue { name, .. } if name == wrong
            ));
        }
    }

    #[test]
    fn a_model_is_no_index() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m.gguf");
        let keys = vec![("general.architecture".to_owned(), GgufValue::String("llama".into()))];
        let nothing = crate::weights::gguf::tests::Nothing;
        let header = GgufHeader::new(true, keys);
        crate::write_gguf(&path, &header, &nothing, &mut |_, _| ()).unwrap();
        let error = GpuIndex::open(&path).unwrap_err();
        assert!(matches!(error, Error::Metadata { key, .. } if key == "general.architecture"));
    }
}
