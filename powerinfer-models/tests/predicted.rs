//! The laws of predicted mode: it does not depend on how tokens are cut or on threads, it reads less
//! and loses little, and a predictor that is no good is refused or left out with a note.
#![allow(clippy::unwrap_used, reason = "helper functions of tests")]

#[path = "support/run.rs"]
mod run;

use std::path::Path;

use powerinfer_core::{
    CausalLm, Error as CoreError, FileDtype, Layout, Sparsity, Step, TensorInfo, TensorSource,
    WantedLogits, WeightStore,
};
use powerinfer_models::{
    ConvertOptions, Error, LoadOptions, PredictorOptions, PredictorSource, PredictorTensors,
    convert, load,
};
use powerinfer_ops::{LowBitFormat, WeightFormat};
use powerinfer_predictor::Error as PredictorError;
use run::{MAX_BYTES, pool, random_tokens};
use testing::pytorch::write_state_dict;
use testing::{Fixture, Seeded, assert_same_bits};

fn quantized(bits: LowBitFormat) -> PredictorOptions {
    PredictorOptions::new(PredictorSource::Quantized(Some(bits)))
}

fn load_with(fixture: &Fixture, predictor: PredictorOptions) -> Box<dyn CausalLm> {
    let options = LoadOptions::default().with_pytorch(MAX_BYTES).with_predictor(predictor);
    load(&fixture.model_dir, &options).unwrap_or_else(|error| panic!("{}: {error}", fixture.name))
}

/// Fixtures that fire for some neurons only.
fn sparse_fixtures() -> impl Iterator<Item = Fixture> {
    Fixture::all("").into_iter().filter(|fixture| run::modes(fixture).contains(&Sparsity::Exact))
}

#[test]
fn any_cut_of_the_tokens_and_any_number_of_threads_give_the_same_bits() {
    for (seed, fixture) in sparse_fixtures().enumerate() {
        let model = load_with(&fixture, quantized(LowBitFormat::Bits3));
        let tokens = random_tokens(&*model, model.info().max_context.min(90), seed as u64);
        let whole = run::run(&*model, &tokens, &[tokens.len()]);
        for cut in [vec![1; tokens.len()], Seeded::new(seed as u64).pieces(tokens.len(), 20)] {
            let pieces = run::run(&*model, &tokens, &cut);
            assert_same_bits(&pieces.logits, &whole.logits, &fixture.name);
            assert_eq!(pieces.stats.picked_per_layer, whole.stats.picked_per_layer);
            assert_eq!(pieces.stats.fired_per_layer, whole.stats.fired_per_layer);
        }
        let (mut cache, mut step) = (model.new_cache(), Step::default());
        step.wanted = WantedLogits::All;
        pool(3).install(|| model.forward(&tokens, &mut cache, &mut step)).unwrap();
        assert_same_bits(&step.logits, &whole.logits, &fixture.name);
    }
}

#[test]
fn a_predictor_that_lists_everything_that_fires_gives_the_exact_logits() {
    for fixture in sparse_fixtures() {
        // no error of an estimate is a thousand standard deviations
        let all = quantized(LowBitFormat::Bits2).with_shift(1000.0);
        let options = LoadOptions::default().with_pytorch(MAX_BYTES);
        let exact = load(&fixture.model_dir, &options).unwrap();
        let tokens = random_tokens(&*exact, exact.info().max_context.min(40), 3);
        let expected = run::run(&*exact, &tokens, &[tokens.len()]);
        let model = load_with(&fixture, all);
        // it saves nothing, which the model says
        assert_eq!(model.info().sparsity, Sparsity::Exact, "{}", fixture.name);
        assert!(model.info().notes.iter().any(|note| note.contains("nearly all neurons")));
        let found = run::run(&*model, &tokens, &[tokens.len()]);
        assert_same_bits(&found.logits, &expected.logits, &fixture.name);
    }
}

#[test]
fn a_trained_model_reads_less_and_keeps_what_matters() {
    for fixture in Fixture::trained() {
        for (bits, most) in
            [(LowBitFormat::Bits4, 1.5), (LowBitFormat::Bits3, 1.7), (LowBitFormat::Bits2, 2.2)]
        {
            let model = load_with(&fixture, quantized(bits));
            let info = model.info();
            assert_eq!(info.sparsity, Sparsity::Predicted);
            assert!(info.predictor.as_ref().unwrap().contains(&format!("{bits} bits")));
            let tokens: Vec<u32> = fixture.golden().prompts[0].input_ids.clone();
            let mut step = Step { measure_prediction: true, ..Step::default() };
            for prompt in &fixture.golden().prompts {
                model.forward(&prompt.input_ids, &mut model.new_cache(), &mut step).unwrap();
            }
            let found = step.stats.prediction().unwrap();
            let what = format!("{} {bits} bits: {found:?}", fixture.name);
            assert!(found.recall_mass() >= 0.97, "{what}");
            assert!(found.picked_density() <= most * found.fired_density(), "{what}");
            assert!((step.stats.picked_density() - found.picked_density()).abs() < 1e-12, "{what}");
            let mut decode = Step::default();
            let mut read = |sparsity| {
                decode.stats.clear();
                decode.sparsity = Some(sparsity);
                model.forward(&tokens[..1], &mut model.new_cache(), &mut decode).unwrap();
                decode.stats.weight_bytes
            };
            let [exact, predicted] = [Sparsity::Exact, Sparsity::Predicted].map(&mut read);
            assert!(predicted < exact, "{what}: {predicted} {exact}");
        }
    }
}

#[test]
fn each_layer_gets_the_copy_that_pays() {
    for fixture in Fixture::trained() {
        let loaded = |dtype, floor: Option<f64>| {
            let mut predictor = PredictorOptions::default();
            predictor.floor = floor;
            let options = LoadOptions::default().with_dtype(Some(dtype)).with_predictor(predictor);
            load(&fixture.model_dir, &options).unwrap()
        };
        let measured = |floor| {
            let model = loaded(WeightFormat::F16, floor);
            assert_eq!(model.info().sparsity, Sparsity::Predicted, "{:?}", model.info().notes);
            assert!(model.info().notes.iter().any(|note| note.contains("predict from")));
            let mut step = Step { measure_prediction: true, ..Step::default() };
            for prompt in &fixture.golden().prompts {
                model.forward(&prompt.input_ids, &mut model.new_cache(), &mut step).unwrap();
            }
            step.stats.prediction().unwrap()
        };
        let found = measured(None);
        let what = format!("{}: {found:?}", fixture.name);
        assert!(found.recall_mass() >= 0.98, "{what}");
        assert!(found.picked_density() <= 2.2 * found.fired_density(), "{what}");
        // more is listed where more is asked for
        let (little, much) = (measured(Some(0.95)), measured(Some(0.998)));
        assert!(little.recall_mass() < much.recall_mass(), "{what}: {little:?} {much:?}");
        assert!(much.recall_mass() >= 0.99, "{what}: {much:?}");

        // a copy of a gate of four bits costs more than the gate
        let narrow = loaded(WeightFormat::Q4_0, None);
        assert_eq!(narrow.info().sparsity, Sparsity::Exact);
        assert_eq!(narrow.info().predictor, None);
        let notes = narrow.info().notes.join("\n");
        assert!(notes.contains("run exactly: no copy of the gate"), "{notes}");
        let options = LoadOptions::default().with_dtype(Some(WeightFormat::Q4_0));
        let exact = load(&fixture.model_dir, &options).unwrap();
        let tokens = &fixture.golden().prompts[0].input_ids;
        let mut step = Step { wanted: WantedLogits::All, ..Step::default() };
        step.sparsity = Some(Sparsity::Predicted);
        narrow.forward(tokens, &mut narrow.new_cache(), &mut step).unwrap();
        let expected = run::run(&*exact, tokens, &[tokens.len()]).logits;
        assert_same_bits(&step.logits, &expected, &fixture.name);
    }
}

#[test]
fn a_layer_whose_predictor_misses_too_much_runs_exactly_and_the_model_says_so() {
    let fixture = Fixture::demo();
    let blind = quantized(LowBitFormat::Bits3).with_shift(-4.0).with_floor(0.99);
    let model = load_with(&fixture, blind);
    assert_eq!(model.info().sparsity, Sparsity::Exact);
    assert_eq!(model.info().predictor, None);
    let notes = model.info().notes.join("\n");
    assert!(notes.contains("[0, 1, 2, 3, 4, 5] run exactly"), "{notes}");
    let mut step = Step { sparsity: Some(Sparsity::Predicted), ..Step::default() };
    let error = model.forward(&[1], &mut model.new_cache(), &mut step).unwrap_err();
    assert!(matches!(error, CoreError::NoPredictor));
}

#[test]
fn auto_is_predicted_only_with_a_predictor_and_never_on_a_model_that_is_not_sparse() {
    let load_as = |name: &str, options: &LoadOptions| {
        load(&Fixture::micro(name).model_dir, options).map(|model| model.info().sparsity)
    };
    let auto = LoadOptions::default();
    let given = auto.clone().with_predictor(quantized(LowBitFormat::Bits3));
    assert_eq!(load_as("sparsellama-fatrelu", &auto).unwrap(), Sparsity::Exact);
    assert_eq!(load_as("sparsellama-fatrelu", &given).unwrap(), Sparsity::Predicted);
    let asked = auto.with_sparsity(Sparsity::Predicted);
    for options in [given.clone(), asked, given.with_sparsity(Sparsity::Dense)] {
        let error = load_as("mistral-silu", &options).unwrap_err();
        assert!(matches!(error, Error::NotSparse { .. }), "{error}");
    }
    for bad in [f32::NAN, f32::INFINITY] {
        let options =
            LoadOptions::default().with_predictor(PredictorOptions::default().with_shift(bad));
        let error = load_as("sparsellama-fatrelu", &options).unwrap_err();
        assert!(matches!(error, Error::PredictorOptions { .. }));
    }
}

/// The demo model's sizes.
const D_MODEL: usize = 256;
const D_FF: usize = 1024;
const N_LAYERS: usize = 6;

/// Writes predictors of rank 8 with these weights of `fc2`.
fn write_predictors(dir: &Path, fc2: &dyn Fn(usize) -> f32) {
    for layer in 0..N_LAYERS {
        let fc1 = Seeded::new(layer as u64).normal(8 * D_MODEL);
        let fc2 = (0..D_FF * 8).map(fc2).collect();
        let tensors = [("fc1.weight", vec![8, D_MODEL], fc1), ("fc2.weight", vec![D_FF, 8], fc2)];
        write_state_dict(&dir.join(format!("model_{layer}.pt")), &tensors);
    }
}

fn load_folder(dir: &Path) -> Result<Box<dyn CausalLm>, Error> {
    let predictor = PredictorOptions::new(PredictorSource::Folder(dir.to_owned()));
    load(&Fixture::demo().model_dir, &LoadOptions::default().with_predictor(predictor))
}

#[test]
fn a_folder_of_predictors_that_say_everything_nothing_or_what_is_not_a_number() {
    let dir = tempfile::tempdir().unwrap();
    write_predictors(dir.path(), &|_| 1.0);
    // sums of what passed the ReLU reach 0: everything
    let model = load_folder(dir.path()).unwrap();
    assert!(model.info().notes.iter().any(|note| note.contains("nearly all neurons")));

    std::fs::write(dir.path().join("config.json"), r#"{"sparse_threshold": 1e30}"#).unwrap();
    let error = load_folder(dir.path()).unwrap_err();
    assert!(matches!(error, Error::PredictorOfAnotherModel { .. }), "{error}");

    write_predictors(dir.path(), &|i| if i == 4711 { f32::NAN } else { 1.0 });
    let Error::Core(CoreError::Model(error)) = load_folder(dir.path()).unwrap_err() else {
        panic!("a predictor that holds no number is refused");
    };
    let error = error.downcast_ref::<PredictorError>();
    assert!(matches!(error, Some(PredictorError::NotFinite { what: "fc2.weight", row: 588 })));

    write_predictors(dir.path(), &|_| 1.0);
    std::fs::write(dir.path().join("config.json"), r#"{"sparse_threshold": "low"}"#).unwrap();
    let error = load_folder(dir.path()).unwrap_err();
    assert!(matches!(error, Error::Core(CoreError::Config { .. })), "{error}");
}

#[test]
fn a_folder_of_predictors_of_another_shape_is_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let file = |layer: usize| dir.path().join(format!("model_{layer}.pt"));
    write_predictors(dir.path(), &|_| 1.0);
    let fc1 = ("fc1.weight", vec![8, D_MODEL], vec![1.0; 8 * D_MODEL]);
    let fc2 = ("fc2.weight", vec![D_FF, 8], vec![1.0; D_FF * 8]);

    std::fs::remove_file(file(3)).unwrap();
    let error = load_folder(dir.path()).unwrap_err();
    assert!(matches!(error, Error::Core(CoreError::Io { path, .. }) if path == file(3)));

    let wide = ("fc1.weight", vec![8, D_MODEL + 1], vec![1.0; 8 * (D_MODEL + 1)]);
    write_state_dict(&file(3), &[wide, fc2.clone()]);
    let error = load_folder(dir.path()).unwrap_err();
    assert!(
        matches!(error, Error::Core(CoreError::TensorShape { name, .. }) if name == "fc1.weight")
    );

    write_state_dict(&file(3), &[fc1.clone(), ("fc2.weight", vec![512, 8], vec![1.0; 512 * 8])]);
    let error = load_folder(dir.path()).unwrap_err();
    assert!(
        matches!(error, Error::Core(CoreError::TensorShape { name, .. }) if name == "fc2.weight")
    );

    write_state_dict(&file(3), std::slice::from_ref(&fc1));
    let error = load_folder(dir.path()).unwrap_err();
    assert!(
        matches!(error, Error::Core(CoreError::MissingTensor { name, .. }) if name == "fc2.weight")
    );

    let bias = ("fc2.bias", vec![1], vec![1.0]);
    write_state_dict(&file(3), &[fc1.clone(), fc2.clone(), bias]);
    let error = load_folder(dir.path()).unwrap_err();
    assert!(matches!(error, Error::Core(CoreError::LeftoverTensors { .. })), "{error}");

    std::fs::write(file(3), b"not an archive").unwrap();
    let error = load_folder(dir.path()).unwrap_err();
    assert!(matches!(error, Error::Core(CoreError::PyTorch { .. })), "{error}");

    write_predictors(dir.path(), &|_| 1.0);
    write_state_dict(&file(N_LAYERS), &[fc1, fc2]);
    let error = load_folder(dir.path()).unwrap_err();
    assert!(matches!(error, Error::Core(CoreError::PredictorLayers { n_layers: N_LAYERS, .. })));
}

/// Weights of a layer's `fc1` and `fc2` with which the score of a neuron is its gate's product with
/// the residual stream: right as far as rounding and the norm let it be, which changes no sign.
fn right_predictor(layer: usize) -> [(&'static str, Vec<usize>, Vec<f32>); 2] {
    let mut store = WeightStore::open(&Fixture::demo().model_dir).unwrap();
    let name = format!("model.layers.{layer}.mlp.gate_proj.weight");
    let gate = store.matrix(&name, D_FF, D_MODEL, Layout::NeuronMajor, None).unwrap();
    let name = format!("model.layers.{layer}.post_attention_layernorm.weight");
    let scales = store.vector(&name, D_MODEL).unwrap();
    // the stream itself and its mirror image pass the ReLU
    let mut fc1 = vec![0.0; 2 * D_MODEL * D_MODEL];
    for i in 0..D_MODEL {
        fc1[i * D_MODEL + i] = 1.0;
        fc1[(D_MODEL + i) * D_MODEL + i] = -1.0;
    }
    let mut fc2 = Vec::new();
    let mut row = vec![0.0; D_MODEL];
    for neuron in 0..D_FF {
        gate.row_to_f32(neuron, &mut row);
        row.iter_mut().zip(&scales).for_each(|(w, scale)| *w *= scale);
        fc2.extend(row.iter().copied());
        fc2.extend(row.iter().map(|w| -w));
    }
    [("fc1.weight", vec![2 * D_MODEL, D_MODEL], fc1), ("fc2.weight", vec![D_FF, 2 * D_MODEL], fc2)]
}

/// The demo model's logits in this mode, and how well its predictors do.
fn run_demo(model: &dyn CausalLm) -> Step {
    let tokens = Fixture::demo().golden().prompts[0].input_ids.clone();
    let mut step = Step { measure_prediction: true, wanted: WantedLogits::All, ..Step::default() };
    model.forward(&tokens, &mut model.new_cache(), &mut step).unwrap();
    step
}

#[test]
fn right_predictors_out_of_a_folder_list_what_fires() {
    let dir = tempfile::tempdir().unwrap();
    for layer in 0..N_LAYERS {
        write_state_dict(&dir.path().join(format!("model_{layer}.pt")), &right_predictor(layer));
    }
    let model = load_folder(dir.path()).unwrap();
    assert_eq!(model.info().sparsity, Sparsity::Predicted, "{:?}", model.info().notes);
    let predicted = run_demo(&*model);
    let found = predicted.stats.prediction().unwrap();
    assert!(found.recall() > 0.999 && found.precision() > 0.999, "{found:?}");
    let exact = load(&Fixture::demo().model_dir, &LoadOptions::default()).unwrap();
    let distance = testing::tolerance::max_distance(&predicted.logits, &run_demo(&*exact).logits);
    assert!(distance < 0.05, "{distance}");
}

/// The right predictors as a converter takes them.
#[derive(Debug)]
struct RightPredictors;

impl TensorSource for RightPredictors {
    fn tensors(&self) -> Vec<TensorInfo> {
        let layer = |layer: usize| {
            right_predictor(layer).map(|(part, shape, _)| TensorInfo {
                name: format!("layers.{layer}.{part}"),
                dtype: FileDtype::Weights(WeightFormat::F32),
                shape,
            })
        };
        (0..N_LAYERS).flat_map(layer).collect()
    }

    fn read(&self, name: &str, offset: u64, out: &mut [u8]) -> powerinfer_core::Result<()> {
        let mut parts = name.split('.').skip(1);
        let layer = parts.next().unwrap().parse().unwrap();
        let [fc1, fc2] = right_predictor(layer).map(|(_, _, values)| values);
        let values = if parts.next() == Some("fc1") { fc1 } else { fc2 };
        let first = offset as usize / 4;
        for (bytes, value) in out.chunks_exact_mut(4).zip(&values[first..]) {
            bytes.copy_from_slice(&value.to_le_bytes());
        }
        Ok(())
    }

    fn path(&self, _: &str) -> std::path::PathBuf {
        "right predictors".into()
    }
}

#[test]
fn predictors_in_a_powerinfer_file_run_with_its_thresholds_unless_told_otherwise() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("demo.powerinfer.gguf");
    let written = |threshold: f32| {
        let options = ConvertOptions::default().with_powerinfer(true);
        let source = std::sync::Arc::new(RightPredictors);
        let predictor = PredictorTensors { source, thresholds: vec![threshold; N_LAYERS] };
        let options = options.with_predictor(predictor);
        convert(&Fixture::demo().model_dir, &file, &options, &mut |_, _| ()).unwrap();
    };
    let load_as = |sparsity| load(&file, &LoadOptions::default().with_sparsity(sparsity));
    written(0.0);
    assert_eq!(load_as(Sparsity::Auto).unwrap().info().sparsity, Sparsity::Predicted);
    assert_eq!(load_as(Sparsity::Exact).unwrap().info().sparsity, Sparsity::Exact);
    let model = load_as(Sparsity::Predicted).unwrap();
    assert!(model.info().predictor.as_ref().unwrap().contains("rank 512, threshold 0"));
    let all = run_demo(&*model).stats.prediction().unwrap();
    assert!(all.recall() > 0.99 && all.precision() > 0.99, "{all:?}");
    written(0.05);
    let fewer = run_demo(&*load_as(Sparsity::Predicted).unwrap()).stats.prediction().unwrap();
    assert!(fewer.picked < all.picked && fewer.recall_mass() > 0.5, "{fewer:?} {all:?}");
}
