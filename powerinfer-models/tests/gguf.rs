//! A model written as a GGUF file, plain or PowerInfer's, and read back is the same model.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

#[path = "support/run.rs"]
mod run;

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use powerinfer_core::{
    CausalLm, Error as CoreError, FfnObserver, FfnSeen, FileDtype, GgufFile, Holding, ModelConfig,
    Result as CoreResult, Sparsity, Step, TensorInfo, TensorSource,
};
use powerinfer_models::{
    ConvertOptions, Converted, Error, GgufPredictor, LoadOptions, MlpPredictorWeights,
    PredictorOptions, PredictorSource, PredictorTensors, convert, load, supported_model_types,
};
use powerinfer_ops::{NeuronMatrix, WeightFormat};
use powerinfer_predictor::{ActivationPredictor, FfnInputs, MlpPredictor};
use run::{MAX_BYTES, load_fixture_as, modes, random_tokens};
use tempfile::TempDir;
use testing::{Fixture, Seeded, assert_close, assert_same_bits};

/// What GGUF has no keys for.
const NOT_SAID: [&str; 4] = [
    "opt-350m-postln",
    "opt-nobias-noaffine",
    "falcon-rw-alibi-bias",
    "falcon-alibi-mq-parallel-bias",
];

fn options(powerinfer: bool, dtype: Option<WeightFormat>) -> ConvertOptions {
    let mut options = ConvertOptions::default().with_powerinfer(powerinfer).with_dtype(dtype);
    options.load = LoadOptions::default().with_pytorch(MAX_BYTES);
    options
}

fn write(fixture: &Fixture, options: &ConvertOptions) -> Result<(TempDir, PathBuf), Error> {
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("model.gguf");
    let Converted { bytes, n_tensors, .. } =
        convert(&fixture.model_dir, &path, options, &mut |_, _| ())?;
    let written = GgufFile::open(&path)?;
    assert_eq!(written.tensors().len(), n_tensors);
    assert_eq!(std::fs::metadata(&path).expect("the file").len(), bytes);
    Ok((dir, path))
}

/// Every fixture that such a file can say, with the kinds of file that can.
fn cases() -> impl Iterator<Item = (Fixture, bool)> {
    let fixtures = Fixture::all("").into_iter();
    let said = fixtures.filter(|fixture| !NOT_SAID.contains(&fixture.name.as_str()));
    said.flat_map(|fixture| {
        let kinds: &[bool] = if modes(&fixture).len() > 1 { &[false, true] } else { &[false] };
        kinds.iter().map(move |&powerinfer| (fixture.clone(), powerinfer))
    })
}

fn logits(model: &dyn CausalLm, seed: u64) -> Vec<f32> {
    let tokens = random_tokens(model, 20, seed);
    run::run(model, &tokens, &[7, 1, 12]).logits
}

#[test]
fn logits_are_those_of_the_folder_to_the_bit() {
    let mut families = std::collections::BTreeSet::new();
    for (fixture, powerinfer) in cases() {
        for dtype in [WeightFormat::F16, WeightFormat::F32] {
            let (_dir, path) = write(&fixture, &options(powerinfer, Some(dtype))).unwrap();
            for &sparsity in modes(&fixture) {
                let what =
                    format!("{}, powerinfer {powerinfer}, {dtype}, {sparsity}", fixture.name);
                let folder = load_fixture_as(&fixture, sparsity, Some(dtype));
                let file = load(&path, &LoadOptions::default().with_sparsity(sparsity));
                let file = file.unwrap_or_else(|error| panic!("{what}: {error}"));
                let (expected, found) = (logits(&*folder, 3), logits(&*file, 3));
                if fixture.name == "llama-rope-llama3" {
                    // its frequencies went through numbers of 32 bits
                    assert_close(&found, &expected, 1e-4, &what);
                } else {
                    assert_same_bits(&found, &expected, &what);
                }
                let (folder, file) = (folder.info(), file.info());
                assert_eq!(folder.eos_token_ids, file.eos_token_ids, "{what}");
                assert_eq!(folder.bos_token_id, file.bos_token_id, "{what}");
                assert_eq!(folder.max_context, file.max_context, "{what}");
                assert_eq!(folder.activation, file.activation, "{what}");
                families.insert(file.architecture.clone());
            }
        }
    }
    assert_eq!(families.into_iter().collect::<Vec<_>>(), ["bamboo", "falcon", "llama", "opt"]);
}

#[test]
fn every_matrix_of_a_powerinfer_file_is_that_of_the_folder() {
    for (fixture, powerinfer) in cases().filter(|(_, powerinfer)| *powerinfer) {
        let (_dir, path) = write(&fixture, &options(powerinfer, None)).unwrap();
        let file = GgufFile::open(&path).unwrap();
        let names = file.tensors();
        assert!(names.len() > 10);
        for info in names {
            let expected = match info.shape.len() {
                1 => WeightFormat::F32,
                // it keeps its own type
                _ if info.name == "position_embd.weight" => continue,
                _ => WeightFormat::F16,
            };
            assert_eq!(info.dtype, FileDtype::Weights(expected), "{}: {}", fixture.name, info.name);
        }
        assert!(file.tensor("blk.0.ffn_down_t.weight").is_some());
        assert!(file.tensor("blk.0.ffn_down.weight").is_none());
    }
}

#[test]
fn what_a_file_cannot_say_is_refused() {
    for name in NOT_SAID {
        for powerinfer in [false, true] {
            let error = write(&Fixture::micro(name), &options(powerinfer, None)).unwrap_err();
            assert!(matches!(error, Error::NotConvertible { .. }), "{name}: {error}");
        }
    }
    let error = write(&Fixture::micro("mistral-silu"), &options(true, None)).unwrap_err();
    assert!(matches!(error, Error::NotConvertible { format: "PowerInfer GGUF", .. }), "{error}");
}

/// A predictor of random weights, of another rank in each layer.
#[derive(Debug)]
struct RandomPredictor {
    ranks: Vec<usize>,
    d_model: usize,
    d_ff: usize,
}

impl RandomPredictor {
    fn values(&self, name: &str) -> Option<(Vec<usize>, Vec<f32>)> {
        let mut parts = name.split('.').skip(1);
        let layer: usize = parts.next()?.parse().ok()?;
        let rank = *self.ranks.get(layer)?;
        let shape = match parts.next()? {
            "fc1" => vec![rank, self.d_model],
            _ => vec![self.d_ff, rank],
        };
        let values = Seeded::new(layer as u64).normal(shape.iter().product());
        Some((shape, values))
    }
}

impl TensorSource for RandomPredictor {
    fn tensors(&self) -> Vec<TensorInfo> {
        let names = (0..self.ranks.len())
            .flat_map(|layer| ["fc1", "fc2"].map(|part| format!("layers.{layer}.{part}.weight")));
        let dtype = FileDtype::Weights(WeightFormat::F32);
        let info = |name: String| {
            let (shape, _) = self.values(&name).expect("a layer");
            TensorInfo { name, dtype: dtype.clone(), shape }
        };
        names.map(info).collect()
    }
    fn read(&self, name: &str, offset_bytes: u64, out: &mut [u8]) -> CoreResult<()> {
        let (_, values) = self.values(name).expect("a layer");
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        out.copy_from_slice(&bytes[offset_bytes as usize..][..out.len()]);
        Ok(())
    }
    fn path(&self, _name: &str) -> PathBuf {
        "a predictor".into()
    }
}

#[test]
fn predictors_of_mixed_ranks_go_with_the_file() {
    // 96 neurons: below 1000, and no multiple of 256
    let fixture = Fixture::micro("llama-gqa-tied-theta");
    let predictor = RandomPredictor { ranks: vec![5, 32, 41], d_model: 32, d_ff: 96 };
    let thresholds = vec![0.5, -0.25, 0.0];
    for dtype in [WeightFormat::F16, WeightFormat::Q8_0] {
        let predictor = RandomPredictor { ranks: predictor.ranks.clone(), ..predictor };
        let expected: Vec<_> =
            predictor.tensors().iter().map(|info| predictor.values(&info.name).unwrap()).collect();
        let source =
            PredictorTensors { source: Arc::new(predictor), thresholds: thresholds.clone() };
        let options = options(true, Some(dtype)).with_predictor(source);
        let (dir, path) = write(&fixture, &options).unwrap();
        let exact = LoadOptions::default().with_sparsity(Sparsity::Exact);
        let model = load(&path, &exact).unwrap();
        assert!(model.info().notes.iter().any(|note| note.contains("predictor, 6 matrices")));
        // left to itself a model runs the predictor that it holds, and this one knows nothing
        let error = load(&path, &LoadOptions::default()).unwrap_err();
        assert!(matches!(error, Error::PredictorOfAnotherModel { .. }), "{error}");

        // once more through our own reader: a file made of a file
        let again = dir.path().join("again.gguf");
        let keep = ConvertOptions::default().with_powerinfer(true);
        convert(&path, &again, &keep, &mut |_, _| ()).unwrap();
        for path in [&path, &again] {
            let predictor = GgufPredictor::open(path).unwrap().unwrap();
            assert_eq!(
                (predictor.thresholds(), predictor.ranks()),
                (&thresholds[..], &[5, 32, 41][..])
            );
            let found: Vec<_> = (0..3).map(|layer| predictor.layer(layer).unwrap()).collect();
            assert_eq!(found[1].threshold, thresholds[1]);
            for (layer, expected) in found.iter().zip(expected.chunks(2)) {
                for (matrix, (shape, values)) in [&layer.fc1, &layer.fc2].into_iter().zip(expected)
                {
                    assert_eq!([matrix.n_neurons(), matrix.d_model()], shape[..]);
                    let whole_blocks = shape[1].is_multiple_of(32);
                    let expected = if whole_blocks { dtype } else { WeightFormat::F16 };
                    assert_eq!(matrix.format(), expected);
                    let mut row = vec![0; matrix.row_bytes()];
                    expected.encode(&values[..shape[1]], &mut row);
                    assert_eq!(matrix.row(0), row);
                }
            }
            let keys = GgufFile::open(path).unwrap().metadata().clone();
            assert_eq!(keys.f32("powerinfer.sparse_threshold").unwrap(), -0.25);
        }
        let (first, second) = (load(&path, &exact), load(&again, &exact));
        assert_same_bits(&logits(&*first.unwrap(), 1), &logits(&*second.unwrap(), 1), "again");
    }
    assert!(GgufPredictor::open(&plain(&fixture)).unwrap().is_none());
}

/// Counts, pass by pass, the neurons that plain loops over a file's predictor list, having held the
/// lists to those of the predictor that runs.
#[derive(Debug)]
struct PlainLoops {
    layers: Vec<MlpPredictorWeights>,
    listed: Vec<u64>,
}

impl PlainLoops {
    /// `fc2 · relu(fc1 · x) ≥ threshold`, neuron by neuron, in f64.
    fn picks(weights: &MlpPredictorWeights, x: &[f32]) -> Vec<u32> {
        let product = |matrix: &NeuronMatrix, row: usize, x: &[f64]| -> f64 {
            let mut values = vec![0.0; matrix.d_model()];
            matrix.row_to_f32(row, &mut values);
            values.iter().zip(x).map(|(w, x)| f64::from(*w) * x).sum()
        };
        let MlpPredictorWeights { fc1, fc2, threshold, .. } = weights;
        let x: Vec<f64> = x.iter().map(|&x| f64::from(x)).collect();
        let hidden: Vec<f64> =
            (0..fc1.n_neurons()).map(|row| product(fc1, row, &x).max(0.0)).collect();
        let fires = |&row: &usize| product(fc2, row, &hidden) >= f64::from(*threshold);
        (0..fc2.n_neurons()).filter(fires).map(|row| row as u32).collect()
    }
}

impl FfnObserver for PlainLoops {
    fn observe(&mut self, seen: &FfnSeen<'_>) -> CoreResult<()> {
        let weights = &self.layers[seen.layer];
        let (fc1, fc2) = (weights.fc1.clone(), weights.fc2.clone());
        let running = MlpPredictor::new(fc1, fc2, weights.threshold).unwrap();
        let mut found = Vec::new();
        let inputs = FfnInputs { residual: seen.residual, normed: seen.normed };
        running.predict(&inputs, &mut found).unwrap();
        let tokens = seen.residual.to_vec2::<f32>().unwrap();
        assert_eq!(found.len(), tokens.len());
        for (found, x) in found.iter().zip(&tokens) {
            let expected = Self::picks(weights, x);
            assert_eq!(found.as_slice(), expected, "layer {}", seen.layer);
            self.listed[seen.layer] += expected.len() as u64;
        }
        Ok(())
    }
}

#[test]
fn picks_are_those_of_plain_loops_over_the_file_s_own_predictor() {
    for name in ["llama-gqa-tied-theta", "falcon-7b-mq", "opt-preln"] {
        let fixture = Fixture::micro(name);
        let config = ModelConfig::from_dir(&fixture.model_dir, &supported_model_types()).unwrap();
        let n = config.n_layers;
        let predictor = RandomPredictor {
            ranks: [5, 32, 41].into_iter().cycle().take(n).collect(),
            d_model: config.d_model,
            d_ff: config.d_ff,
        };
        let thresholds: Vec<f32> = [0.5, -0.25, 0.0].into_iter().cycle().take(n).collect();
        let source =
            PredictorTensors { source: Arc::new(predictor), thresholds: thresholds.clone() };
        let options = options(true, Some(WeightFormat::F16)).with_predictor(source);
        let (_dir, path) = write(&fixture, &options).unwrap();
        // it knows nothing, so it is not held to what fires
        let own = PredictorOptions::new(PredictorSource::InModel { thresholds }).with_floor(0.0);
        let model = loaded(&path, &LoadOptions::default().with_predictor(own));
        assert_eq!(model.info().sparsity, Sparsity::Predicted, "{:?}", model.info().notes);

        let stored = GgufPredictor::open(&path).unwrap().unwrap();
        let layers = (0..n).map(|layer| stored.layer(layer).unwrap()).collect();
        let plain = Arc::new(Mutex::new(PlainLoops { layers, listed: vec![0; n] }));
        let mut step = Step { observer: Some(plain.clone()), ..Step::default() };
        let mut cache = model.new_cache();
        let tokens = random_tokens(&*model, 12, 9);
        // a prompt, then one by one
        model.forward(&tokens[..5], &mut cache, &mut step).unwrap();
        for token in &tokens[5..] {
            model.forward(&[*token], &mut cache, &mut step).unwrap();
        }
        let listed = plain.lock().unwrap().listed.clone();
        assert_eq!(step.stats.picked_per_layer, listed, "{name}");
        let all = (config.d_ff * tokens.len()) as u64;
        assert!(listed.iter().all(|&n| n > all / 10 && n < all * 9 / 10), "{listed:?} of {all}");
    }
}

/// A plain file that stays until the process ends.
fn plain(fixture: &Fixture) -> PathBuf {
    let (dir, path) = write(fixture, &options(false, None)).unwrap();
    std::mem::forget(dir);
    path
}

#[test]
fn a_predictor_of_another_shape_is_refused() {
    let fixture = Fixture::micro("llama-gqa-tied-theta");
    let predictor = |ranks: &[usize], d_model, d_ff, n: usize| {
        let source = Arc::new(RandomPredictor { ranks: ranks.to_vec(), d_model, d_ff });
        options(true, None).with_predictor(PredictorTensors { source, thresholds: vec![0.0; n] })
    };
    for wrong in [
        predictor(&[5, 8], 32, 96, 3),
        predictor(&[5, 8, 9], 33, 96, 3),
        predictor(&[5, 8, 9], 32, 95, 3),
        predictor(&[5, 8, 9], 32, 96, 2),
    ] {
        assert!(matches!(write(&fixture, &wrong), Err(Error::Core(_))));
    }
}

#[test]
fn the_activation_is_the_callers_to_say() {
    let fixture = Fixture::micro("llama-mha-untied-sharded");
    let path = plain(&fixture);
    // as another writer would have left it: without our key
    let bytes = std::fs::read(&path).unwrap();
    let key = b"powerinfer.activation";
    let at = bytes.windows(key.len()).position(|window| window == key).unwrap();
    let mut without = bytes.clone();
    without[at..at + key.len()].copy_from_slice(b"somebodyelse.relation");
    let path = Path::new(&path).with_file_name("without.gguf");
    std::fs::write(&path, without).unwrap();
    let info = |options: &LoadOptions| load(&path, options).unwrap().info().clone();
    assert_eq!(info(&LoadOptions::default()).activation, "silu");
    let relu = LoadOptions::default().with_gguf_activation(powerinfer_ops::Activation::Relu);
    assert_eq!(info(&relu).activation, "relu");
    let (file, folder) = (load(&path, &relu), load(&fixture.model_dir, &LoadOptions::default()));
    assert_same_bits(&logits(&*file.unwrap(), 5), &logits(&*folder.unwrap(), 5), "relu");
}

/// The model of the fixture in a file of that kind, loaded that way.
fn loaded(path: &Path, options: &LoadOptions) -> Box<dyn CausalLm> {
    load(path, options).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

#[test]
fn mapped_and_resident_weights_give_the_same_logits() {
    let mapped = LoadOptions::default().with_holding(Holding::Mapped);
    for (fixture, powerinfer) in cases() {
        for dtype in [WeightFormat::F16, WeightFormat::Q8_0, WeightFormat::Q4_0] {
            let quantised = dtype.block_len() > 1;
            if quantised && !fits_blocks(&fixture) {
                continue;
            }
            let (_dir, path) = write(&fixture, &options(powerinfer, Some(dtype))).unwrap();
            for &sparsity in modes(&fixture) {
                let what =
                    format!("{}, powerinfer {powerinfer}, {dtype}, {sparsity}", fixture.name);
                let of = |options: LoadOptions| {
                    logits(&*loaded(&path, &options.with_sparsity(sparsity)), 8)
                };
                let (file, memory) = (of(mapped.clone()), of(LoadOptions::default()));
                if powerinfer || quantised {
                    assert_same_bits(&file, &memory, &what);
                } else {
                    // resident down projections are summed neuron by neuron
                    assert_close(&file, &memory, 1e-4, &what);
                }
            }
        }
    }
}

/// Whether all widths of the model are whole blocks.
fn fits_blocks(fixture: &Fixture) -> bool {
    let config = ModelConfig::from_dir(&fixture.model_dir, &supported_model_types()).unwrap();
    config.d_model.is_multiple_of(32) && config.d_ff.is_multiple_of(32)
}

/// Logits of a random model whose weights or activations were rounded in different places.
fn assert_close_on_average(found: &[f32], expected: &[f32], what: &str) {
    let distances = found.iter().zip(expected).map(|(a, b)| (a - b).abs());
    let mean = distances.sum::<f32>() / found.len() as f32;
    let size = expected.iter().map(|b| b.abs()).sum::<f32>() / expected.len() as f32;
    assert!(mean <= 0.1 * size, "{what}: {mean} of {size}");
}

#[test]
fn a_quantised_down_projection_runs_in_full_or_is_quantised_anew_on_request() {
    let fixture = Fixture::micro("llama-gqa-tied-theta");
    let (_dir, path) = write(&fixture, &options(false, Some(WeightFormat::Q8_0))).unwrap();
    let exact = LoadOptions::default().with_sparsity(Sparsity::Exact);
    let dense = LoadOptions::default().with_sparsity(Sparsity::Dense);
    let as_it_is = loaded(&path, &exact);
    let expected = logits(&*as_it_is, 2);
    assert_same_bits(&logits(&*loaded(&path, &dense), 2), &expected, "dense");
    let noted = |model: &dyn CausalLm, text: &str| {
        assert!(model.info().notes.iter().any(|note| note.contains(text)), "{text}");
    };
    noted(&*as_it_is, "stored by output");

    let anew = loaded(&path, &exact.clone().with_requantised_down(true));
    noted(&*anew, "rounded twice");
    let found = logits(&*anew, 2);
    // products round activations to eight bits, too, and not the same ones
    assert_close_on_average(&found, &expected, "quantised anew");
    assert_ne!(found, expected);

    // f32 holds what the file holds, so nothing is rounded and neurons can be skipped
    let wide = loaded(&path, &exact.clone().with_dtype(Some(WeightFormat::F32)));
    assert!(wide.info().notes.iter().all(|note| !note.contains("stored by output")));
    assert_close_on_average(&logits(&*wide, 2), &expected, "held as f32");

    let hot = powerinfer_ops::NeuronIds::from_sorted((0..40).collect()).unwrap();
    let placement = powerinfer_core::Placement::new(vec![hot; 3], 96).unwrap();
    let split = exact.with_placement(placement);
    let error = load(&path, &split).unwrap_err();
    assert!(matches!(error, Error::Core(CoreError::AcrossNeurons { format: "q8_0", .. })));
    let split = loaded(&path, &split.with_requantised_down(true));
    assert_close(&logits(&*split, 2), &found, 1e-4, "split");
}

#[test]
fn a_folder_can_be_mapped_too() {
    for name in ["llama-mha-untied-sharded", "falcon-40b-gqa", "opt-preln"] {
        let fixture = Fixture::micro(name);
        let mapped = LoadOptions::default().with_holding(Holding::Mapped);
        let (file, memory) = (
            loaded(&fixture.model_dir, &mapped),
            loaded(&fixture.model_dir, &LoadOptions::default()),
        );
        assert_close(&logits(&*file, 4), &logits(&*memory, 4), 1e-4, name);
    }
}

#[test]
fn a_file_requantised_is_the_folder_quantised() {
    let fixture = Fixture::micro("llama-gqa-tied-theta");
    let (dir, wide) = write(&fixture, &options(false, None)).unwrap();
    let narrow = dir.path().join("narrow.gguf");
    for dtype in [WeightFormat::Q8_0, WeightFormat::Q4_0] {
        let to = ConvertOptions::default().with_powerinfer(true).with_dtype(Some(dtype));
        convert(&wide, &narrow, &to, &mut |_, _| ()).unwrap();
        let folder = load_fixture_as(&fixture, Sparsity::Exact, Some(dtype));
        let file = loaded(&narrow, &LoadOptions::default());
        assert_same_bits(&logits(&*file, 6), &logits(&*folder, 6), format!("{dtype}"));
    }
}

#[test]
fn progress_goes_from_nothing_to_all() {
    // progress counts every byte once, in pieces that only grow
    let fixture = Fixture::demo();
    let dir = tempfile::tempdir().unwrap();
    let mut told = Vec::new();
    let converted = convert(
        &fixture.model_dir,
        &dir.path().join("m.gguf"),
        &options(true, Some(WeightFormat::Q8_0)),
        &mut |done, of| told.push((done, of)),
    )
    .unwrap();
    let (last, of) = *told.last().unwrap();
    assert_eq!(last, of);
    assert!(of < converted.bytes && told.windows(2).all(|pair| pair[0].0 < pair[1].0));
}

#[test]
fn factors_of_rotary_frequencies_are_checked() {
    let fixture = Fixture::micro("llama-rope-llama3");
    let (_dir, path) = write(&fixture, &options(false, None)).unwrap();
    let file = GgufFile::open(&path).unwrap();
    assert_eq!(file.tensor("rope_freqs.weight").unwrap().shape, [8]);
    // it is the last tensor, padded with nothing
    let whole = std::fs::read(&path).unwrap();
    for wrong in [0f32, -1.0, f32::NAN, f32::INFINITY] {
        let mut bytes = whole.clone();
        let at = bytes.len() - 4;
        bytes[at..].copy_from_slice(&wrong.to_le_bytes());
        std::fs::write(&path, bytes).unwrap();
        let error = load(&path, &LoadOptions::default()).unwrap_err();
        assert!(matches!(error, Error::Core(CoreError::TensorValue { .. })), "{wrong}: {error}");
    }
}

#[test]
fn a_file_is_never_written_over_what_it_is_made_of() {
    let dir = tempfile::tempdir().unwrap();
    let model = Fixture::micro("opt-preln").model_dir;
    for name in ["config.json", "model.safetensors"] {
        std::fs::copy(model.join(name), dir.path().join(name)).unwrap();
    }
    let out = dir.path().join("model.safetensors");
    let before = std::fs::read(&out).unwrap();
    let error = convert(dir.path(), &out, &ConvertOptions::default(), &mut |_, _| ()).unwrap_err();
    assert!(matches!(error, Error::Core(CoreError::Write { .. })), "{error}");
    assert_eq!(std::fs::read(&out).unwrap(), before);
}

#[test]
fn the_original_s_predictor_folder_goes_into_the_file() {
    let fixture = Fixture::micro("llama-gqa-tied-theta");
    let dir = tempfile::tempdir().unwrap();
    let random = RandomPredictor { ranks: vec![4, 9, 16], d_model: 32, d_ff: 96 };
    for layer in 0..3 {
        let tensor = |part: &'static str| {
            let (shape, values) =
                random.values(&format!("layers.{layer}.{part}")).expect("a layer");
            (part, shape, values)
        };
        let file = dir.path().join(format!("model_{layer}.pt"));
        testing::pytorch::write_state_dict(&file, &[tensor("fc1.weight"), tensor("fc2.weight")]);
    }
    std::fs::write(dir.path().join("config.json"), r#"{"sparse_threshold": 0.125}"#).unwrap();
    let predictor = PredictorTensors::from_folder(dir.path(), 3).unwrap();
    let options = options(true, Some(WeightFormat::F32)).with_predictor(predictor);
    let (_dir, path) = write(&fixture, &options).unwrap();
    let found = GgufPredictor::open(&path).unwrap().unwrap();
    assert_eq!((found.ranks(), found.thresholds()), (&[4, 9, 16][..], &[0.125; 3][..]));
    let (_, values) = random.values("layers.1.fc2.weight").unwrap();
    let mut row = [0.0; 9];
    found.layer(1).unwrap().fc2.row_to_f32(95, &mut row);
    assert_eq!(row, values[95 * 9..]);
    assert!(PredictorTensors::from_folder(dir.path(), 2).is_err(), "a file too many");
    assert!(PredictorTensors::from_folder(dir.path(), 4).is_err(), "a file too few");
}
