//! Writing the original's folders.

use std::fs;
use std::path::Path;

use powerinfer_core::{Error as CoreError, write_pytorch};
use powerinfer_ops::WeightFormat;

use super::tensors::LayerTensors;
use super::{ModelPredictor, field};
use crate::error::Result;
use crate::mlp::MlpForm;

impl ModelPredictor {
    /// Writes the original's form into a folder, which is made if it is not there: `model_0.pt`,
    /// `model_1.pt`, … with `fc1.weight` and `fc2.weight` in f16, and `config.json` with
    /// `sparse_threshold`, the one threshold that the original knows, which is the least of the layers',
    /// and `sparse_thresholds`, which is ours.
    ///
    /// # Errors
    /// [`Error::Core`](crate::Error::Core): [`PredictorField`](CoreError::PredictorField) for a form that
    /// the original does not have, [`Write`](CoreError::Write).
    pub fn save_folder(&self, dir: &Path) -> Result<()> {
        let form = self.form(dir)?;
        if form != MlpForm::ORIGINAL || self.layers.iter().any(|weights| weights.bias.is_some()) {
            let expected = "two layers without biases on the residual stream, with a ReLU between, \
                            which is all that the original's files can say";
            let bias = self.layers.iter().any(|weights| weights.bias.is_some());
            let bias = if bias { ", with biases" } else { "" };
            let found = format!("{} on the {} stream{bias}", form.hidden, form.input);
            return Err(field(dir, "form", expected, &found).into());
        }
        let failed = |path: &Path| {
            let path = path.to_owned();
            move |source| CoreError::Write { path, source }
        };
        fs::create_dir_all(dir).map_err(failed(dir))?;
        for (layer, weights) in self.layers.iter().enumerate() {
            let path = dir.join(format!("model_{layer}.pt"));
            let tensors = LayerTensors::of_original(&path, weights, WeightFormat::F16);
            write_pytorch(&path, &tensors)?;
        }
        let thresholds = || self.layers.iter().map(|weights| weights.threshold);
        let least = thresholds().fold(f32::INFINITY, f32::min);
        let least = if least.is_finite() { least } else { 0.0 };
        let all: Vec<String> = thresholds().map(|threshold| threshold.to_string()).collect();
        let all = all.join(", ");
        let text = format!("{{\"sparse_threshold\": {least}, \"sparse_thresholds\": [{all}]}}\n");
        let path = dir.join("config.json");
        Ok(fs::write(&path, text).map_err(failed(&path))?)
    }
}
