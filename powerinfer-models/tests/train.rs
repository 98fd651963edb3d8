//! Making predictors of real models: what is made reaches its targets, is the same twice, goes on from
//! a checkpoint, is written in every form and is refused by other models.
#![allow(clippy::unwrap_used, reason = "helper functions of tests")]

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use powerinfer_core::{
    CausalLm, Error as CoreError, PredictionCounts, Sparsity, Step, WantedLogits,
};
use powerinfer_models::{
    ConvertOptions, Error, GgufPredictor, LoadOptions, PredictorOptions, PredictorSource,
    PredictorTensors, TrainMethod, TrainOptions, TrainStage, TrainedPredictor, convert, load,
    train_predictor,
};
use powerinfer_ops::WeightFormat;
use powerinfer_predictor::{MlpForm, ModelPredictor};
use testing::{Fixture, Seeded};

fn demo() -> PathBuf {
    Fixture::trained().into_iter().find(|model| model.name.contains("llama")).unwrap().model_dir
}

fn opt() -> PathBuf {
    Fixture::trained().into_iter().find(|model| model.name.contains("opt")).unwrap().model_dir
}

/// Tokens from all of the vocabulary, as those that predictors are tried on when they are loaded.
fn tokens(n: usize) -> Vec<u32> {
    let mut random = Seeded::new(5);
    (0..n).map(|_| random.below(4096) as u32).collect()
}

fn options(method: TrainMethod) -> TrainOptions {
    let mut options = TrainOptions::new(method);
    (options.context, options.held_out, options.survey) = (128, 1024, 1024);
    (options.piece, options.batch, options.measure_every) = (1024, 128, 1);
    options
}

fn make(dir: &Path, options: &TrainOptions) -> Result<TrainedPredictor, Error> {
    let model = load(dir, &LoadOptions::default()).unwrap();
    train_predictor(&*model, &tokens(6400), options, &mut |_| ControlFlow::Continue(()))
}

fn all(counts: &[PredictionCounts]) -> PredictionCounts {
    counts.iter().fold(PredictionCounts::default(), |mut sum, counts| {
        sum += *counts;
        sum
    })
}

/// How well the predictors of a model do on tokens that none was made from.
fn measured(model: &dyn CausalLm) -> PredictionCounts {
    let mut step = Step {
        wanted: WantedLogits::None,
        measure_prediction: true,
        sparsity: Some(Sparsity::Exact),
        ..Step::default()
    };
    let tokens = tokens(9000);
    model.forward(&tokens[8600..], &mut model.new_cache(), &mut step).unwrap();
    step.stats.prediction().unwrap()
}

fn load_with(dir: &Path, source: PredictorSource) -> Result<Box<dyn CausalLm>, Error> {
    load(dir, &LoadOptions::default().with_predictor(PredictorOptions::new(source)))
}

#[test]
fn what_is_made_reaches_its_targets_and_fitting_beats_factors() {
    let mut listed = Vec::new();
    for method in [TrainMethod::Svd, TrainMethod::Trained] {
        let made = make(&demo(), &options(method)).unwrap();
        for counts in &made.counts {
            assert!(counts.recall_mass() >= 0.97, "{counts:?}");
        }
        let n_parameters: u64 =
            made.predictor.layers.iter().map(|weights| weights.n_parameters()).sum();
        assert!(n_parameters <= 695_014, "a tenth of the model: {n_parameters}");
        let counts = all(&made.counts);
        listed.push(counts.picked as f64 / counts.fired as f64);

        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("p.safetensors");
        made.predictor.save(&path).unwrap();
        assert_eq!(ModelPredictor::load(&path).unwrap(), made.predictor);
        let model = load_with(&demo(), PredictorSource::File(path)).unwrap();
        assert_eq!(model.info().notes, Vec::<String>::new());
        let counts = measured(&*model);
        assert!(counts.recall_mass() > 0.93, "{counts:?}");
        assert!(counts.picked_density() < 3.0 * counts.fired_density(), "{counts:?}");
    }
    assert!(listed[1] < 0.9 * listed[0] && listed[1] < 2.0, "{listed:?}");
}

#[test]
fn a_run_that_was_broken_off_goes_on_to_the_same_bits() {
    let dir = tempfile::tempdir().unwrap();
    let whole = make(&demo(), &options(TrainMethod::Trained)).unwrap();
    let path = dir.path().join("checkpoint");
    let options = options(TrainMethod::Trained).with_checkpoint(Some(path.clone()));
    let model = load(&demo(), &LoadOptions::default()).unwrap();
    let mut stop = |stage: &TrainStage| match stage {
        TrainStage::Fit { done, .. } if *done > 2100 => ControlFlow::Break(()),
        _ => ControlFlow::Continue(()),
    };
    let error = train_predictor(&*model, &tokens(6400), &options, &mut stop).unwrap_err();
    assert!(matches!(error, Error::Core(CoreError::Cancelled)), "{error}");
    assert!(path.exists());
    let mut another = options.clone().with_seed(1);
    another.context = 64;
    let Error::OtherRun { differences, .. } = make(&demo(), &another).unwrap_err() else {
        panic!("a checkpoint of another run");
    };
    let context = options.context;
    assert_eq!(
        differences,
        [format!("context: expected 64, found {context}"), "seed: expected 1, found 0".to_owned()]
    );
    let resumed = make(&demo(), &options).unwrap();
    assert_eq!(resumed, whole);
}

#[test]
fn a_predictor_of_another_model_is_refused_and_that_of_another_type_or_of_none_noted() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("p.safetensors");
    make(&demo(), &options(TrainMethod::Svd)).unwrap().predictor.save(&path).unwrap();
    let source = || PredictorSource::File(path.clone());
    let error = load_with(&opt(), source()).unwrap_err();
    assert!(
        matches!(error, Error::Core(CoreError::PredictorField { field: "architecture", .. })),
        "{error}"
    );
    let options = LoadOptions::default()
        .with_dtype(Some(WeightFormat::Q8_0))
        .with_predictor(PredictorOptions::new(source()));
    let model = load(&demo(), &options).unwrap();
    assert!(model.info().notes.iter().any(|note| note.contains("other weights")));
    for dtype in [WeightFormat::F16, WeightFormat::Q8_0, WeightFormat::Q4_0] {
        let predictor = PredictorOptions::new(source()).with_dtype(Some(dtype));
        let model = load(&demo(), &LoadOptions::default().with_predictor(predictor)).unwrap();
        let counts = measured(&*model);
        assert!(counts.recall_mass() > 0.9, "{dtype}: {counts:?}");
        assert!(counts.picked_density() < 0.4, "{dtype}: {counts:?}");
    }
    let mut made = ModelPredictor::load(&path).unwrap();
    made.model.digests.clear();
    made.save(&path).unwrap();
    let notes = load_with(&demo(), source()).unwrap().info().notes.clone();
    assert!(notes.len() == 1 && notes[0].contains("no digests"), "{notes:?}");
    let nothing = load_with(&demo(), PredictorSource::File(dir.path().join("none"))).unwrap_err();
    assert!(matches!(nothing, Error::Core(CoreError::Io { .. })));
}

#[test]
fn the_original_s_form_goes_into_folders_and_powerinfer_files() {
    let dir = tempfile::tempdir().unwrap();
    let made = make(&demo(), &options(TrainMethod::Trained).with_original(true)).unwrap().predictor;
    assert_eq!(made.layers[0].form, MlpForm::ORIGINAL);
    let folder = dir.path().join("predictors");
    made.save_folder(&folder).unwrap();
    let from_folder =
        measured(&*load_with(&demo(), PredictorSource::Folder(folder.clone())).unwrap());
    assert!(from_folder.recall_mass() > 0.9, "{from_folder:?}");

    let (file, gguf) = (dir.path().join("p.safetensors"), dir.path().join("m.gguf"));
    made.save(&file).unwrap();
    let n_layers = made.layers.len();
    for tensors in [
        PredictorTensors::from_folder(&folder, n_layers).unwrap(),
        PredictorTensors::from_file(&file, n_layers).unwrap(),
    ] {
        let options = ConvertOptions::default().with_powerinfer(true).with_predictor(tensors);
        convert(&demo(), &gguf, &options, &mut |_, _| {}).unwrap();
        let read = GgufPredictor::open(&gguf).unwrap().unwrap();
        for (layer, weights) in made.layers.iter().enumerate() {
            let held = read.layer(layer).unwrap();
            assert_eq!(held.threshold, weights.threshold);
            for (matrix, values) in [(held.fc1, &weights.fc1), (held.fc2, &weights.fc2)] {
                let mut row = vec![0.0; matrix.d_model()];
                for (at, expected) in values.chunks_exact(row.len()).enumerate() {
                    matrix.row_to_f32(at, &mut row);
                    assert_eq!(row, expected);
                }
            }
        }
        let model = load(&gguf, &LoadOptions::default()).unwrap();
        assert_eq!(measured(&*model), from_folder);
    }
    let own = make(&demo(), &options(TrainMethod::Svd)).unwrap().predictor;
    own.save(&file).unwrap();
    assert!(matches!(
        PredictorTensors::from_file(&file, n_layers),
        Err(Error::Core(CoreError::PredictorField { field: "form", .. }))
    ));
}

#[test]
fn what_cannot_be_is_refused_before_any_work() {
    let model = load(&demo(), &LoadOptions::default()).unwrap();
    let refused = |tokens: &[u32], options: TrainOptions| {
        let made = train_predictor(&*model, tokens, &options, &mut |_| ControlFlow::Continue(()));
        matches!(made, Err(Error::Training { .. }))
    };
    let options = || options(TrainMethod::Svd);
    assert!(refused(&tokens(200), options()), "a text of one window");
    assert!(refused(&tokens(1000), options().with_share_of_model(0.001)));
    assert!(refused(&tokens(1000), options().with_share_of_model(f64::NAN)));
    assert!(refused(&tokens(1000), options().with_original(true)));
    let mut none = options();
    none.batch = 0;
    assert!(refused(&tokens(1000), none));
}
