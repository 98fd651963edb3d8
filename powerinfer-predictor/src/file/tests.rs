use std::fs;

use powerinfer_core::{FileDtype, TensorInfo};

use super::*;
use crate::error::Error;

fn layer(form: MlpForm, bias: bool, seed: usize) -> MlpWeights {
    // in eighths, which f16 holds
    let values = |n: usize| (0..n).map(|i| ((i * 7 + seed) % 23) as f32 / 8.0 - 1.0).collect();
    let bias = bias.then(|| vec![0.0, 1.5]);
    MlpWeights {
        form,
        fc1: values(8),
        bias,
        fc2: values(12),
        rank: 2,
        threshold: -0.1 * seed as f32,
    }
}

fn predictor(form: MlpForm, bias: bool) -> ModelPredictor {
    let model = PredictedModel::new("llama", "relu", vec![1, u64::MAX]);
    let layers = vec![layer(form, bias, 1), layer(form, bias, 2)];
    ModelPredictor { model, method: "trained".to_owned(), layers }
}

#[test]
fn what_is_saved_is_loaded_and_the_same_predictor_is_the_same_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("p.safetensors");
    for (form, bias) in [(MlpForm::LOW_RANK, true), (MlpForm::ORIGINAL, false)] {
        let made = predictor(form, bias);
        made.save(&path).unwrap();
        let bytes = fs::read(&path).unwrap();
        assert_eq!(ModelPredictor::load(&path).unwrap(), made);
        made.save(&path).unwrap();
        assert_eq!(fs::read(&path).unwrap(), bytes);
        let file = PredictorFile::open(&path).unwrap();
        assert_eq!((file.shape(), file.n_parameters()), ([4, 6], 40 + 4 * u64::from(bias)));
        for format in [None, Some(WeightFormat::F32), Some(WeightFormat::F16)] {
            let held = file.layer(1, format).unwrap();
            assert_eq!((held.form(), held.threshold()), (form, -0.2));
        }
        // rows of two and four values are no blocks of 32
        assert!(file.layer(1, Some(WeightFormat::Q8_0)).is_err());
    }
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "nothing is left beside it");
}

#[test]
fn layers_are_held_in_blocks_of_few_bits() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("p.safetensors");
    let mut made = predictor(MlpForm::LOW_RANK, false);
    made.layers.truncate(1);
    made.model.digests.truncate(1);
    (made.layers[0].fc1, made.layers[0].fc2) = (vec![0.5; 32 * 64], vec![-0.25; 6 * 32]);
    made.layers[0].rank = 32;
    made.save(&path).unwrap();
    let file = PredictorFile::open(&path).unwrap();
    let bytes =
        |format| crate::ActivationPredictor::size_bytes(&file.layer(0, Some(format)).unwrap());
    assert!(bytes(WeightFormat::Q4_0) < bytes(WeightFormat::Q8_0));
    assert!(bytes(WeightFormat::Q8_0) < bytes(WeightFormat::F16));
}

#[test]
fn the_original_s_folder_holds_the_original_s_form_only() {
    let dir = tempfile::tempdir().unwrap();
    let made = predictor(MlpForm::ORIGINAL, false);
    made.save_folder(dir.path()).unwrap();
    for (layer, weights) in made.layers.iter().enumerate() {
        let path = dir.path().join(format!("model_{layer}.pt"));
        let bytes = fs::read(&path).unwrap();
        let mut store = WeightStore::open_pytorch_file(&path).unwrap();
        let fc1 = store.matrix("fc1.weight", 2, 4, Layout::NeuronMajor, None).unwrap();
        let fc2 = store.matrix("fc2.weight", 6, 2, Layout::NeuronMajor, None).unwrap();
        store.finish(&|_| false).unwrap();
        for (matrix, values, width) in [(fc1, &weights.fc1, 4), (fc2, &weights.fc2, 2)] {
            assert_eq!(matrix.format(), WeightFormat::F16);
            let mut row = vec![0.0; width];
            for (at, expected) in values.chunks_exact(width).enumerate() {
                matrix.row_to_f32(at, &mut row);
                assert_eq!(row, expected);
            }
        }
        made.save_folder(dir.path()).unwrap();
        assert_eq!(fs::read(&path).unwrap(), bytes);
    }
    let config = dir.path().join("config.json");
    let thresholds = powerinfer_core::read_predictor_thresholds(&config, 2).unwrap();
    assert_eq!(thresholds, [-0.1, -0.2]);
    for refused in [predictor(MlpForm::LOW_RANK, false), predictor(MlpForm::ORIGINAL, true)] {
        let Error::Core(error) = refused.save_folder(dir.path()).unwrap_err() else {
            panic!("not an error of the folder");
        };
        assert!(matches!(*error, CoreError::PredictorField { field: "form", .. }));
    }
    let mut mixed = predictor(MlpForm::ORIGINAL, false);
    mixed.layers[1].form = MlpForm::LOW_RANK;
    assert!(mixed.save(&dir.path().join("p.safetensors")).is_err());
}

/// Zeros of these names and shapes.
#[derive(Debug)]
struct Zeros(Vec<(String, Vec<usize>)>);

impl TensorSource for Zeros {
    fn tensors(&self) -> Vec<TensorInfo> {
        let dtype = FileDtype::Weights(WeightFormat::F32);
        let info = |(name, shape): &(String, Vec<usize>)| TensorInfo {
            name: name.clone(),
            dtype: dtype.clone(),
            shape: shape.clone(),
        };
        self.0.iter().map(info).collect()
    }

    fn read(&self, _: &str, _: u64, out: &mut [u8]) -> CoreResult<()> {
        out.fill(0);
        Ok(())
    }

    fn path(&self, _: &str) -> PathBuf {
        "zeros".into()
    }
}

#[test]
fn each_thing_that_can_be_wrong_has_its_error() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("p.safetensors");
    let right = || {
        vec![
            ("layers.0.fc1.weight".to_owned(), vec![2, 4]),
            ("layers.0.fc2.weight".to_owned(), vec![6, 2]),
        ]
    };
    let open = |tensors: Vec<(String, Vec<usize>)>, entries: &[(&str, &str)]| {
        let entries = entries.iter().map(|(name, value)| (name.to_string(), value.to_string()));
        write_safetensors_with(&path, &Zeros(tensors), &entries.collect()).unwrap();
        match PredictorFile::open(&path) {
            Ok(file) => Ok(file),
            Err(Error::Core(error)) => Err(*error),
            Err(other) => panic!("{other}"),
        }
    };
    // what is not said is the original's
    let file = open(right(), &[("thresholds", "0")]).unwrap();
    assert_eq!((file.form(), file.method()), (MlpForm::ORIGINAL, ""));
    file.check_model(1, "any", "relu").unwrap();
    for (entries, wrong) in [
        (&[][..], "thresholds"),
        (&[("thresholds", "0, x")], "thresholds"),
        (&[("thresholds", "NaN")], "thresholds"),
        (&[("thresholds", "inf")], "thresholds"),
        (&[("thresholds", "")], "thresholds"),
        (&[("thresholds", "0"), ("hidden", "gelu")], "hidden"),
        (&[("thresholds", "0"), ("input", "logits")], "input"),
        (&[("thresholds", "0"), ("digests", "1,2")], "digests"),
        (&[("thresholds", "0"), ("digests", "x")], "digests"),
        (&[("thresholds", "0"), ("powerinfer_predictor", "2")], "powerinfer_predictor"),
    ] {
        let error = open(right(), entries).unwrap_err();
        assert!(
            matches!(&error, CoreError::PredictorField { field, .. } if *field == wrong),
            "{error}"
        );
    }
    let one = &[("thresholds", "0")];
    let missing = open(right(), &[("thresholds", "0,0")]).unwrap_err();
    assert!(matches!(missing, CoreError::MissingTensor { name, .. } if name.contains("layers.1")));
    let mut tensors = right();
    tensors[1].1 = vec![6, 3];
    assert!(matches!(open(tensors, one), Err(CoreError::TensorShape { .. })));
    let mut tensors = right();
    tensors[0].1 = vec![0, 4];
    tensors[1].1 = vec![6, 0];
    assert!(matches!(open(tensors, one), Err(CoreError::TensorShape { .. })));
    let mut tensors = right();
    tensors.push(("layers.0.fc1.bias".to_owned(), vec![3]));
    assert!(matches!(open(tensors, one), Err(CoreError::TensorShape { .. })));
    let mut tensors = right();
    tensors.push(("layers.1.fc1.weight".to_owned(), vec![2, 4]));
    assert!(matches!(open(tensors, one), Err(CoreError::LeftoverTensors { .. })));

    predictor(MlpForm::LOW_RANK, true).save(&path).unwrap();
    let file = PredictorFile::open(&path).unwrap();
    file.check_model(2, "llama", "relu").unwrap();
    for (n_layers, architecture, activation, wrong) in [
        (3, "llama", "relu", "number of thresholds"),
        (2, "opt", "relu", "architecture"),
        (2, "llama", "fatrelu", "activation"),
    ] {
        let error = file.check_model(n_layers, architecture, activation).unwrap_err();
        assert!(matches!(error, CoreError::PredictorField { field, .. } if field == wrong));
    }
}
