//! Makes the predictors of layers, or reads them.

use std::sync::Arc;

use powerinfer_core::{
    Error as CoreError, Layout, ModelConfig, Result, TensorInfo, TensorSource, WeightStore,
};
use powerinfer_ops::{FfnWeights, NeuronMatrix, WeightFormat};
use powerinfer_predictor::{
    ActivationPredictor, MlpPredictor, PredictorFile, QuantizedGate, gate_digest,
};

use super::folder::{FolderTensors, PredictorFolder};
use super::random::random_predictor;
use super::{PredictorOptions, PredictorSource, bits_that_pay, core_error, model_error};

/// Makes or reads the predictors that options name.
#[derive(Debug)]
pub(super) struct Maker<'a> {
    options: &'a PredictorOptions,
    folder: Option<PredictorFolder>,
    file: Option<PredictorFile>,
    /// Layers whose gate is another than the file's.
    other_gates: Vec<usize>,
}

impl<'a> Maker<'a> {
    /// Opens what predictors for a model of `n_layers` layers are read from, if they are.
    pub(super) fn open(options: &'a PredictorOptions, n_layers: usize) -> Result<Self> {
        let (mut folder, mut file) = (None, None);
        match &options.source {
            PredictorSource::File(path) => {
                file = Some(PredictorFile::open(path).map_err(core_error)?);
            }
            PredictorSource::Folder(dir) => folder = Some(PredictorFolder::open(dir, n_layers)?),
            PredictorSource::InModel { thresholds }
                if ![1, n_layers].contains(&thresholds.len()) =>
            {
                return Err(CoreError::PredictorThresholds { found: thresholds.len(), n_layers });
            }
            _ => {}
        }
        Ok(Self { options, folder, file, other_gates: Vec::new() })
    }

    /// Fails if the predictors are in a file that names another model.
    pub(super) fn check_model(&self, config: &ModelConfig) -> Result<()> {
        let Some(file) = &self.file else { return Ok(()) };
        file.check_model(config.n_layers, &config.model_type, config.activation.name())
    }

    /// What is worth knowing of what was read.
    pub(super) fn notes(self) -> Vec<String> {
        let layers = self.other_gates;
        if let Some(file) = self.file.filter(|file| file.model().digests.is_empty()) {
            return vec![format!(
                "{}: no digests, so nothing says that the predictor was made for these weights",
                file.path().display()
            )];
        }
        if layers.is_empty() {
            return Vec::new();
        }
        vec![format!(
            "the predictor was made for other weights in layers {layers:?}, or for the same in \
             another type"
        )]
    }

    /// The predictor of a layer with these weights, out of the model's store if it lies there.
    pub(super) fn made_for(
        &mut self,
        layer: usize,
        weights: &FfnWeights,
        store: &mut WeightStore,
    ) -> Result<Arc<dyn ActivationPredictor>> {
        let PredictorOptions { source, shift, dtype, .. } = self.options;
        if let Some(file) = &self.file {
            let read = file.layer(layer, *dtype).map_err(core_error)?;
            check_shape(file, &read, weights)?;
            if file.model().digests.get(layer).is_some_and(|said| *said != gate_digest(weights)) {
                self.other_gates.push(layer);
            }
            return Ok(Arc::new(read.with_threshold_shift(-shift)));
        }
        if let Some(folder) = &self.folder {
            let read = folder.of_layer(layer, weights, *dtype)?;
            return Ok(Arc::new(read.with_threshold_shift(-shift)));
        }
        if let PredictorSource::InModel { thresholds } = source {
            let names = ["fc1", "fc2"].map(|part| format!("blk.{layer}.{part}.weight"));
            // one for all, or one a layer
            let threshold = thresholds[layer.min(thresholds.len() - 1)];
            let read = read_layers(store, &names, weights, *dtype)?;
            let made = MlpPredictor::new(read.0, read.1, threshold).map_err(model_error)?;
            return Ok(Arc::new(made.with_threshold_shift(-shift)));
        }
        let bits = match source {
            &PredictorSource::Random { rank, density } => {
                let made = random_predictor(layer, weights, (rank, density), *dtype)?;
                return Ok(Arc::new(made.with_threshold_shift(-shift)));
            }
            PredictorSource::Quantized(Some(bits)) => *bits,
            _ => bits_that_pay(
                8.0 * weights.gate.row_bytes() as f64 / weights.d_model().max(1) as f64,
            ),
        };
        let made = QuantizedGate::new(weights, bits).map_err(model_error)?;
        let margin = made.margin() + shift;
        Ok(Arc::new(made.with_margin(margin)))
    }
}

/// What predictors in a file or a folder of their own take at most; 0 for those of other sources.
///
/// # Errors
/// Those of opening them, and of predictors that were made for another model.
pub(crate) fn file_bytes(config: &ModelConfig, options: &PredictorOptions) -> Result<u64> {
    let maker = Maker::open(options, config.n_layers)?;
    maker.check_model(config)?;
    let source: Arc<dyn TensorSource> = match (&maker.file, &options.source) {
        (Some(file), _) => file.source(),
        (None, PredictorSource::Folder(dir)) => {
            Arc::new(FolderTensors::open(dir, config.n_layers)?)
        }
        _ => return Ok(0),
    };
    let held = |info: &TensorInfo| {
        let (width, n_rows) = match info.shape.as_slice() {
            [n_rows, width] => (*width, *n_rows),
            other => (other.iter().product(), 1),
        };
        let row_bytes = options.dtype.and_then(|dtype| dtype.row_bytes(width).ok());
        // of f16 at least, and of f32 at most
        row_bytes.unwrap_or(width * size_of::<f32>()) as u64 * n_rows as u64
    };
    Ok(source.tensors().iter().map(held).sum())
}

/// Fails if a predictor in a file is that of a layer of another width.
fn check_shape(file: &PredictorFile, read: &MlpPredictor, weights: &FfnWeights) -> Result<()> {
    let (expected, found) =
        ([weights.d_model(), weights.n_neurons()], [read.d_model(), read.n_neurons()]);
    if expected == found {
        return Ok(());
    }
    let text = |[d_model, d_ff]: [usize; 2]| format!("d_model {d_model} and d_ff {d_ff}");
    Err(CoreError::PredictorField {
        path: file.path().to_owned(),
        field: "shape",
        expected: text(expected),
        found: text(found),
    })
}

/// The two layers of a trained predictor, whose rank is the file's to say.
pub(super) fn read_layers(
    store: &mut WeightStore,
    [fc1, fc2]: &[String; 2],
    weights: &FfnWeights,
    dtype: Option<WeightFormat>,
) -> Result<(NeuronMatrix, NeuronMatrix)> {
    let first = store.tensors().find(|tensor| tensor.name == *fc1);
    let rank = first.and_then(|tensor| tensor.shape.first().copied()).unwrap_or(0);
    let (d_ff, d_model) = (weights.n_neurons(), weights.d_model());
    Ok((
        store.matrix(fc1, rank, d_model, Layout::NeuronMajor, dtype)?,
        store.matrix(fc2, d_ff, rank, Layout::NeuronMajor, dtype)?,
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;

    use powerinfer_core::{FileDtype, TensorInfo, TensorSource};
    use powerinfer_ops::Activation;

    /// Predictors of rank 3 for layers of 5 neurons and width 4, all ones.
    #[derive(Debug)]
    struct Ones;

    impl TensorSource for Ones {
        fn tensors(&self) -> Vec<TensorInfo> {
            let dtype = || FileDtype::Weights(WeightFormat::F32);
            let layer = |layer: usize| {
                let info = |part: &str, shape| {
                    let name = format!("blk.{layer}.{part}.weight");
                    TensorInfo { name, dtype: dtype(), shape }
                };
                [info("fc1", vec![3, 4]), info("fc2", vec![5, 3])]
            };
            (0..2).flat_map(layer).collect()
        }

        fn read(&self, _: &str, _: u64, out: &mut [u8]) -> Result<()> {
            out.chunks_exact_mut(4).for_each(|value| value.copy_from_slice(&1f32.to_le_bytes()));
            Ok(())
        }

        fn path(&self, _: &str) -> PathBuf {
            "ones".into()
        }
    }

    #[test]
    fn predictors_in_a_model_s_file_have_a_threshold_for_all_layers_or_one_a_layer() {
        let matrix = NeuronMatrix::from_f32(WeightFormat::F32, 5, 4, &[1.0; 20]).unwrap();
        let weights = FfnWeights::new(matrix.clone(), None, matrix, Activation::Relu).unwrap();
        let read = |thresholds: &[f32]| -> Result<Vec<String>> {
            let thresholds = thresholds.to_vec();
            let options =
                PredictorOptions::new(PredictorSource::InModel { thresholds }).with_shift(0.25);
            let mut predictors = Maker::open(&options, 2)?;
            let mut store = WeightStore::from_source(Box::new(Ones));
            let mut made_for = |layer| predictors.made_for(layer, &weights, &mut store);
            let found = [made_for(0)?, made_for(1)?].map(|predictor| predictor.describe());
            store.finish(&|_| false)?;
            Ok(found.to_vec())
        };
        let threshold = |x: f32| format!("two layers of rank 3, threshold {x}");
        assert_eq!(read(&[1.0]).unwrap(), [threshold(0.75), threshold(0.75)]);
        assert_eq!(read(&[1.0, 2.0]).unwrap(), [threshold(0.75), threshold(1.75)]);
        for wrong in [&[][..], &[1.0, 2.0, 3.0]] {
            let error = read(wrong).unwrap_err();
            assert!(matches!(error, CoreError::PredictorThresholds { n_layers: 2, .. }));
        }
    }
}
