//! Plans as JSON files. Nobody vouches for what is in one: a number is only believed where the file itself
//! is long enough for it, or the model confirms it.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use super::hot_set::HotSet;
use super::plan::{Plan, PlannedDevice, PlannedLayer};
use super::sizes::PlannedModel;
use crate::config::field::Fields;
use crate::error::{Error, Result};
use crate::json;
use crate::regular_file::RegularFile;
use crate::replace_file::replace_file;

/// The key that says that this is a plan, and its value, the version of the form.
const VERSION_KEY: &str = "powerinfer_plan";
const VERSION: u64 = 1;
/// Longest file that is read: that of a model of 175 billion parameters has one mebibyte.
const MAX_BYTES: u64 = 8 << 20;
const MAX_LAYERS: usize = 1 << 12;
const MAX_WIDTH: usize = 1 << 24;
const MAX_CONTEXT: usize = 1 << 31;
/// Most tensors of a feed-forward network, and letters of a name.
const MAX_TENSORS: usize = 16;
const MAX_TEXT: usize = 200;

impl Plan {
    /// Reads a plan. Whether it is one of a certain model is for [`check`](Self::check) to say.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::FileTooLong`], [`Error::Json`], and [`Error::Config`] for a field that is
    /// missing, has the wrong type, lies outside its range or contradicts another.
    pub fn load(path: &Path) -> Result<Self> {
        let bytes = RegularFile::open(path)?.read_all("a plan", MAX_BYTES)?;
        Self::from_json(path, &bytes)
    }

    /// Reads a plan; `path` is for errors.
    ///
    /// # Errors
    /// As [`load`](Self::load).
    pub fn from_json(path: &Path, bytes: &[u8]) -> Result<Self> {
        let map = json::parse_object(path, bytes)?;
        let fields = Fields::new(path, &map);
        if fields.bytes(VERSION_KEY)? != VERSION {
            return Err(fields.error(VERSION_KEY, VERSION.to_string()));
        }
        let model_fields = fields.object("model")?;
        let model_fields = model_fields.ok_or_else(|| fields.error("model", "an object"))?;
        let model = read_model(&model_fields)?;
        let n_hot = numbers(&fields, "hot_neurons_per_layer", model.n_layers, &map)?;
        let list = map.get("layers").and_then(Value::as_array);
        let list = list.filter(|list| list.len() == model.n_layers).ok_or_else(|| {
            fields.error("layers", format!("a list of {} objects", model.n_layers))
        })?;
        let mut layers = Vec::new();
        for (index, (value, n_hot)) in list.iter().zip(n_hot).enumerate() {
            let name = format!("layers[{index}]");
            let wrong = |expected: &str| Error::Config {
                path: path.to_owned(),
                field: name.clone(),
                expected: expected.to_owned(),
                found: "another value".to_owned(),
            };
            let map = value.as_object().ok_or_else(|| wrong("an object"))?;
            let layer = read_layer(&Fields::in_list(path, &name, map), model.d_ff)?;
            if layer.n_hot() as u64 != n_hot {
                return Err(wrong("as many neurons as hot_neurons_per_layer says"));
            }
            layers.push(layer);
        }
        let alignment = fields.count("alignment_bytes", 4096)?;
        if !alignment.is_power_of_two() {
            return Err(fields.error("alignment_bytes", "a power of two up to 4096"));
        }
        Ok(Self {
            model,
            profile_digest: text(&fields, "profile_digest")?,
            hardware: text(&fields, "hardware")?,
            budget_bytes: fields.bytes("budget_bytes")?,
            context: fields.optional_count("context", MAX_CONTEXT)?.unwrap_or(0),
            alignment_bytes: alignment as u64,
            workspace_bytes: fields.bytes("workspace_bytes")?,
            predictor_row_bytes: fields.bytes("predictor_row_bytes")?,
            layers,
            head: device(&fields, "head")?,
            bytes_fast: fields.bytes("bytes_fast")?,
            bytes_host: fields.bytes("bytes_host")?,
            hit_rate: share(&fields, "hit_rate")?,
            predicted_tokens_per_second: fields.not_negative("predicted_tokens_per_second")?,
        })
    }

    /// The plan as JSON.
    #[must_use]
    pub fn to_json(&self) -> String {
        let layer = |layer: &PlannedLayer| {
            json!({
                "attention": layer.attention.name(),
                "predictor": layer.predictor.name(),
                "kv_cache": layer.attention.name(),
                "hot_density": layer.hot_density,
                "hot": layer.hot.to_text(),
            })
        };
        let model = &self.model;
        let mut json = json!({
            VERSION_KEY: VERSION,
            "model": {
                "n_layers": model.n_layers,
                "d_ff": model.d_ff,
                "d_model": model.d_model,
                "architecture": model.architecture,
                "activation": model.activation,
                "ffn_tensors": model.ffn_tensors,
                "digest": model.digest,
            },
            "profile_digest": self.profile_digest,
            "hardware": self.hardware,
            "budget_bytes": self.budget_bytes,
            "alignment_bytes": self.alignment_bytes,
            "workspace_bytes": self.workspace_bytes,
            "predictor_row_bytes": self.predictor_row_bytes,
            "hot_neurons_per_layer": self.hot_neurons_per_layer(),
            "layers": self.layers.iter().map(layer).collect::<Vec<_>>(),
            "head": self.head.name(),
            "bytes_fast": self.bytes_fast,
            "bytes_host": self.bytes_host,
            "hit_rate": self.hit_rate,
            "predicted_tokens_per_second": self.predicted_tokens_per_second,
        });
        if self.context > 0 {
            json["context"] = self.context.into();
        }
        format!("{json}\n")
    }

    /// Writes the plan, replacing what is at `path` only once all is written.
    ///
    /// # Errors
    /// [`Error::Write`].
    pub fn save(&self, path: &Path) -> Result<()> {
        let failed = |source| Error::Write { path: path.to_owned(), source };
        replace_file(path, |new| fs::write(new, self.to_json()).map_err(failed))
    }
}

impl PlannedDevice {
    /// The name in files.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Fast => "fast",
        }
    }
}

fn read_model(fields: &Fields<'_>) -> Result<PlannedModel> {
    Ok(PlannedModel {
        n_layers: fields.count("n_layers", MAX_LAYERS)?,
        d_ff: fields.count("d_ff", MAX_WIDTH)?,
        d_model: fields.count("d_model", MAX_WIDTH)?,
        architecture: text(fields, "architecture")?,
        activation: text(fields, "activation")?,
        ffn_tensors: fields.texts("ffn_tensors", MAX_TENSORS)?,
        digest: text(fields, "digest")?,
    })
}

fn read_layer(fields: &Fields<'_>, d_ff: usize) -> Result<PlannedLayer> {
    let hot = HotSet::from_text(fields.text("hot")?, d_ff)
        .ok_or_else(|| fields.error("hot", format!("none, all, or {d_ff} bits in base64")))?;
    let attention = device(fields, "attention")?;
    if device(fields, "kv_cache")? != attention {
        let name = attention.name();
        return Err(fields.error("kv_cache", format!("{name}, where the attention is")));
    }
    Ok(PlannedLayer {
        attention,
        predictor: device(fields, "predictor")?,
        hot_density: share(fields, "hot_density")?,
        hot,
    })
}

fn numbers(
    fields: &Fields<'_>,
    name: &str,
    len: usize,
    map: &serde_json::Map<String, Value>,
) -> Result<Vec<u64>> {
    let values = map.get(name).and_then(Value::as_array).filter(|values| values.len() == len);
    let numbers = values.and_then(|values| values.iter().map(Value::as_u64).collect());
    numbers.ok_or_else(|| fields.error(name, format!("a list of {len} whole numbers")))
}

fn text(fields: &Fields<'_>, name: &str) -> Result<String> {
    let text = fields.text(name)?;
    if text.len() > MAX_TEXT {
        return Err(fields.error(name, format!("a string of at most {MAX_TEXT} bytes")));
    }
    Ok(text.to_owned())
}

fn device(fields: &Fields<'_>, name: &str) -> Result<PlannedDevice> {
    match fields.text(name)? {
        "host" => Ok(PlannedDevice::Host),
        "fast" => Ok(PlannedDevice::Fast),
        _ => Err(fields.error(name, "host or fast")),
    }
}

fn share(fields: &Fields<'_>, name: &str) -> Result<f64> {
    let share = fields.not_negative(name)?;
    if share > 1.0 {
        return Err(fields.error(name, "a number from 0 to 1"));
    }
    Ok(share)
}
