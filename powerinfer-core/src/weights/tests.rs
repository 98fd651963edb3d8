use super::*;
use std::path::PathBuf;
use std::sync::Mutex;
use testing::{Fixture, Seeded};

/// Tensors in memory, with the reads that were made.
#[derive(Debug, Default)]
struct Memory {
    tensors: Vec<(TensorInfo, Vec<u8>)>,
    reads: std::sync::Arc<Mutex<Vec<(u64, usize)>>>,
}

impl Memory {
    fn with(mut self, name: &str, format: WeightFormat, shape: &[usize], values: &[f32]) -> Self {
        let mut bytes = vec![0; format.row_bytes(values.len()).unwrap()];
        format.encode(values, &mut bytes);
        let dtype = FileDtype::Weights(format);
        let info = TensorInfo { name: name.to_owned(), dtype, shape: shape.to_vec() };
        self.tensors.push((info, bytes));
        self
    }
}

impl TensorSource for Memory {
    fn tensors(&self) -> Vec<TensorInfo> {
        self.tensors.iter().map(|(info, _)| info.clone()).collect()
    }

    fn read(&self, name: &str, offset_bytes: u64, out: &mut [u8]) -> Result<()> {
        self.reads.lock().unwrap().push((offset_bytes, out.len()));
        let (_, bytes) = self.tensors.iter().find(|(info, _)| info.name == name).unwrap();
        out.copy_from_slice(&bytes[offset_bytes as usize..][..out.len()]);
        Ok(())
    }

    fn path(&self, _name: &str) -> PathBuf {
        "memory".into()
    }
}

fn rows(matrix: &NeuronMatrix) -> Vec<Vec<f32>> {
    (0..matrix.n_neurons())
        .map(|row| {
            let mut values = vec![0.0; matrix.d_model()];
            matrix.row_to_f32(row, &mut values);
            values
        })
        .collect()
}

/// `values` as a format holds them.
fn rounded(values: &[f32], formats: &[WeightFormat]) -> Vec<f32> {
    let mut values = values.to_vec();
    for format in formats {
        let mut bytes = vec![0; format.row_bytes(values.len()).unwrap()];
        format.encode(&values, &mut bytes);
        format.decode(&bytes, &mut values);
    }
    values
}

/// The formats that files of safetensors hold.
const PLAIN: [WeightFormat; 3] = [WeightFormat::F32, WeightFormat::F16, WeightFormat::BF16];

#[test]
fn quantising_on_the_way_in_equals_quantising_the_rows() {
    let (n_neurons, d_model) = (70, 64);
    let values = Seeded::new(2).normal(n_neurons * d_model);
    let column_major: Vec<f32> =
        (0..d_model * n_neurons).map(|i| values[i % n_neurons * d_model + i / n_neurons]).collect();
    for to in [WeightFormat::Q8_0, WeightFormat::Q4_0] {
        let source = Memory::default()
            .with("m", WeightFormat::F32, &[n_neurons, d_model], &values)
            .with("t", WeightFormat::F32, &[d_model, n_neurons], &column_major);
        let mut store = WeightStore::from_source(Box::new(source));
        let expected = NeuronMatrix::from_f32(to, n_neurons, d_model, &values).unwrap();
        for (name, layout) in [("m", Layout::NeuronMajor), ("t", Layout::Transposed)] {
            let found = store.matrix(name, n_neurons, d_model, layout, Some(to)).unwrap();
            assert_eq!(rows(&found), rows(&expected), "{name} as {to}");
        }
    }
    let source = Memory::default().with("m", WeightFormat::F32, &[2, 33], &[0.0; 66]);
    let mut store = WeightStore::from_source(Box::new(source));
    let found = store.matrix("m", 2, 33, Layout::NeuronMajor, Some(WeightFormat::Q4_0));
    assert!(matches!(found, Err(Error::TensorFormat { name, .. }) if name == "m"));
}

#[test]
fn every_layout_and_format_gives_the_numbers_of_the_file() {
    for (n_neurons, d_model) in [(1, 1), (3, 5), (32, 16), (70, 33)] {
        let values = Seeded::new(1).normal(n_neurons * d_model);
        for from in PLAIN {
            for to in PLAIN.map(Some).into_iter().chain([None]) {
                let source = Memory::default()
                    .with("m", from, &[n_neurons, d_model], &values)
                    .with("t", from, &[d_model, n_neurons], &values);
                let mut store = WeightStore::from_source(Box::new(source));
                let held = rounded(&values, &[from, to.unwrap_or(from)]);

                let m = store.matrix("m", n_neurons, d_model, Layout::NeuronMajor, to).unwrap();
                assert_eq!(m.format(), to.unwrap_or(from));
                assert_eq!(rows(&m).concat(), held);

                let t = store.matrix("t", n_neurons, d_model, Layout::Transposed, to).unwrap();
                for (i, row) in rows(&t).iter().enumerate() {
                    let column: Vec<f32> = (0..d_model).map(|d| held[d * n_neurons + i]).collect();
                    assert_eq!(row, &column);
                }
            }
        }
    }
}

#[test]
fn rows_that_need_no_change_are_read_at_once_and_others_in_blocks() {
    let (n_neurons, d_model) = (5000, 64);
    let values = vec![1.0; n_neurons * d_model];
    let source = Memory::default().with("m", WeightFormat::F32, &[n_neurons, d_model], &values);
    let reads = source.reads.clone();
    let mut store = WeightStore::from_source(Box::new(source));
    store.matrix("m", n_neurons, d_model, Layout::NeuronMajor, None).unwrap();
    assert_eq!(*reads.lock().unwrap(), [(0, 5000 * 256)]);

    reads.lock().unwrap().clear();
    let to = Some(WeightFormat::F16);
    let matrix = store.matrix("m", n_neurons, d_model, Layout::NeuronMajor, to).unwrap();
    assert_eq!(*reads.lock().unwrap(), [(0, 4096 * 256), (4096 * 256, 904 * 256)]);
    assert_eq!(rows(&matrix)[4999], [1.0; 64]);
}

#[test]
fn vectors_come_as_f32() {
    let values = [1.0, -2.5, 0.1];
    for format in PLAIN {
        let source = Memory::default().with("v", format, &[3], &values);
        let mut store = WeightStore::from_source(Box::new(source));
        assert_eq!(store.vector("v", 3).unwrap(), rounded(&values, &[format]));
        assert!(matches!(store.vector("v", 4), Err(Error::TensorShape { expected, found, .. })
            if expected == [4] && found == [3]));
    }
}

#[test]
fn shape_and_type_are_checked_before_anything_is_read() {
    let source = Memory::default().with("m", WeightFormat::F32, &[2, 3], &[0.0; 6]);
    let reads = source.reads.clone();
    let mut store = WeightStore::from_source(Box::new(source));
    for (n_neurons, d_model, layout, asked) in [
        (3, 2, Layout::NeuronMajor, [3, 2]),
        (2, 3, Layout::Transposed, [3, 2]),
        (usize::MAX, usize::MAX, Layout::NeuronMajor, [usize::MAX; 2]),
    ] {
        let error = store.matrix("m", n_neurons, d_model, layout, None).unwrap_err();
        assert!(matches!(error, Error::TensorShape { path, name, expected, found }
            if path == Path::new("memory") && name == "m" && expected == asked && found == [2, 3]));
    }
    assert!(matches!(store.vector("m", 6), Err(Error::TensorShape { .. })));
    assert!(matches!(store.vector("n", 6), Err(Error::MissingTensor { name, .. }) if name == "n"));
    assert!(reads.lock().unwrap().is_empty());
    // what was refused was not taken
    assert!(store.finish(&|_| false).is_err());
}

#[test]
fn sizes_that_only_a_lying_source_has_are_errors() {
    #[derive(Debug)]
    struct Liar;
    impl TensorSource for Liar {
        fn tensors(&self) -> Vec<TensorInfo> {
            let dtype = FileDtype::Weights(WeightFormat::F16);
            vec![TensorInfo { name: "m".to_owned(), dtype, shape: vec![usize::MAX, usize::MAX] }]
        }
        fn read(&self, _: &str, _: u64, _: &mut [u8]) -> Result<()> {
            unreachable!("nothing can be that large")
        }
        fn path(&self, _: &str) -> PathBuf {
            PathBuf::new()
        }
    }
    let mut store = WeightStore::from_source(Box::new(Liar));
    for layout in [Layout::NeuronMajor, Layout::Transposed] {
        for dtype in [None, Some(WeightFormat::F32)] {
            let error = store.matrix("m", usize::MAX, usize::MAX, layout, dtype).unwrap_err();
            let Error::TensorFormat { name, source, .. } = error else { panic!("{error:?}") };
            assert!(name == "m" && matches!(*source, OpError::TooLarge { .. }), "{source:?}");
        }
    }
}

#[test]
fn other_types_are_listed_and_refused_only_when_taken() {
    #[derive(Debug)]
    struct Other;
    impl TensorSource for Other {
        fn tensors(&self) -> Vec<TensorInfo> {
            let dtype = FileDtype::Other("I64".to_owned());
            vec![TensorInfo { name: "ids".to_owned(), dtype, shape: vec![4] }]
        }
        fn read(&self, _: &str, _: u64, _: &mut [u8]) -> Result<()> {
            unreachable!("it is not weights")
        }
        fn path(&self, _: &str) -> PathBuf {
            "other".into()
        }
    }
    let mut store = WeightStore::from_source(Box::new(Other));
    assert!(store.contains("ids"));
    assert_eq!(store.tensors().next().unwrap().dtype.to_string(), "I64");
    assert!(
        matches!(store.vector("ids", 4), Err(Error::TensorDtype { found, .. }) if found == "I64")
    );
    assert_eq!(store.finish(&|name| name == "ids").unwrap(), ["ids"]);
}

#[test]
fn what_nobody_took_is_listed_or_an_error() {
    let store = || {
        let source = ["c", "a", "b"]
            .into_iter()
            .fold(Memory::default(), |s, name| s.with(name, WeightFormat::F32, &[1], &[0.0]));
        WeightStore::from_source(Box::new(source))
    };
    assert_eq!(store().finish(&|_| true).unwrap(), ["a", "b", "c"]);
    assert!(
        matches!(store().finish(&|name| name == "b"), Err(Error::LeftoverTensors { names, .. })
        if names == ["a", "c"])
    );
    let mut store = store();
    for name in ["a", "b", "c", "a"] {
        store.vector(name, 1).unwrap();
    }
    assert!(store.finish(&|_| false).unwrap().is_empty());
}

#[test]
fn every_fixture_opens_and_gives_the_numbers_that_the_format_s_own_reader_gives() {
    for fixture in Fixture::micros("") {
        if fixture.name.contains("-bin") {
            continue; // no safetensors
        }
        let mut store = WeightStore::open(&fixture.model_dir).unwrap();
        let mut seen = 0;
        for entry in std::fs::read_dir(&fixture.model_dir).unwrap() {
            let path = entry.unwrap().path();
            let is_weights = path.extension().is_some_and(|extension| extension == "safetensors");
            if !is_weights || path.file_name().is_some_and(|name| name == "golden.safetensors") {
                continue;
            }
            let bytes = std::fs::read(&path).unwrap();
            for (name, view) in ::safetensors::SafeTensors::deserialize(&bytes).unwrap().tensors() {
                if let [n_neurons, d_model] = *view.shape() {
                    let m = store.matrix(&name, n_neurons, d_model, Layout::NeuronMajor, None);
                    let m = m.unwrap();
                    let rows: Vec<u8> = (0..n_neurons).flat_map(|i| m.row(i).to_vec()).collect();
                    assert_eq!(rows, view.data(), "{} {name}", fixture.name);
                } else {
                    let values = store.vector(&name, view.shape()[0]).unwrap();
                    assert!(values.iter().all(|value| value.is_finite()));
                }
                seen += 1;
            }
        }
        assert_eq!(store.tensors().count(), seen);
        assert!(store.finish(&|_| false).unwrap().is_empty(), "{}", fixture.name);
    }
}

#[test]
fn what_was_written_is_read_back_byte_for_byte() {
    let values = Seeded::new(3).normal(5 << 20);
    let source = Memory::default()
        .with("vector", WeightFormat::BF16, &[7], &values[..7])
        .with("nothing", WeightFormat::F32, &[0, 3], &[])
        // longer than a piece
        .with("long", WeightFormat::F32, &[5, 1 << 20], &values)
        .with("half", WeightFormat::F16, &[3, 11], &values[..33]);
    let dir = tempfile::tempdir().unwrap();
    write_safetensors(&dir.path().join("model.safetensors"), &source).unwrap();
    let store = WeightStore::open(dir.path()).unwrap();
    assert_eq!(store.tensors().count(), 4);
    for (info, bytes) in &source.tensors {
        assert!(store.tensors().any(|read| read == info));
        let mut read = vec![0; bytes.len()];
        store.source.read(&info.name, 0, &mut read).unwrap();
        assert!(&read == bytes, "{}", info.name);
        let beyond = store.source.read(&info.name, 1, &mut read);
        assert!(bytes.is_empty() || matches!(beyond, Err(Error::TensorRange { offset: 1, .. })));
    }
}

#[test]
fn what_cannot_be_written_is_an_error_that_names_it() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("missing/model.safetensors");
    let source = Memory::default().with("v", WeightFormat::F32, &[1], &[0.0]);
    assert!(matches!(write_safetensors(&path, &source), Err(Error::Write { path: named, .. })
        if named == path));

    let mut source = Memory::default();
    let dtype = FileDtype::Other("I64".to_owned());
    source.tensors.push((TensorInfo { name: "ids".to_owned(), dtype, shape: vec![1] }, vec![0; 8]));
    assert!(matches!(write_safetensors(&path, &source), Err(Error::TensorDtype { name, .. })
        if name == "ids"));
}
