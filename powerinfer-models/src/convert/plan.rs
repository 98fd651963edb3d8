//! Which tensors go where, in which type.

use std::collections::BTreeSet;

use powerinfer_core::{
    BlockOrder, Error as CoreError, FileDtype, ModelConfig, PositionConfig, RopeScaling,
    RotaryConfig, TensorInfo, TensorSource,
};
use powerinfer_ops::{OpError, WeightFormat};

use super::ConvertOptions;
use crate::error::{Error, Result};
use crate::gguf_names::{self, EMBEDDING, Family, HEAD, ROPE_FACTORS, RowOrder};
use crate::layers::rotary_divisors;
use crate::registry;

/// Bytes that two tensors are compared by at once.
const COMPARE_BYTES: usize = 1 << 20;
const POSITIONS: &str = "position_embd.weight";

/// A tensor of the file to be written.
#[derive(Debug)]
pub(super) struct Planned {
    pub(super) info: TensorInfo,
    pub(super) format: WeightFormat,
    pub(super) from: Origin,
}

/// Where its numbers come from.
#[derive(Debug)]
pub(super) enum Origin {
    /// The rows of a tensor of the same shape, which begin with that of this number.
    Rows { name: String, format: WeightFormat, order: RowOrder },
    /// The columns of a tensor.
    Columns { name: String, format: WeightFormat },
    /// The same, from the predictor.
    Predictor { name: String, format: WeightFormat },
    /// No tensor.
    Values(Vec<f32>),
}

#[derive(Debug)]
pub(super) struct Plan {
    pub(super) tensors: Vec<Planned>,
    pub(super) notes: Vec<String>,
}

/// What goes where.
pub(super) fn plan(
    config: &ModelConfig,
    source: &dyn TensorSource,
    options: &ConvertOptions,
) -> Result<Plan> {
    check(config, options.powerinfer)?;
    let mut planner = Planner {
        config,
        source,
        options,
        plan: Plan { tensors: Vec::new(), notes: Vec::new() },
        left_out: Vec::new(),
    };
    planner.model()?;
    planner.head()?;
    planner.rope_factors();
    planner.predictor()?;
    planner.check_complete()?;
    let mut plan = planner.plan;
    if !planner.left_out.is_empty() {
        plan.notes.push(format!("left out: {}", planner.left_out.join(", ")));
    }
    Ok(plan)
}

/// Fails for what such a file cannot say.
fn check(config: &ModelConfig, powerinfer: bool) -> Result<()> {
    let refuse = |what| {
        let format = if powerinfer { "PowerInfer GGUF" } else { "GGUF" };
        Err(Error::NotConvertible { what, format })
    };
    let is_opt = matches!(config.position, PositionConfig::Learned { .. });
    match config {
        _ if powerinfer && !config.activation.is_sparse() => {
            refuse("an activation that is not zero for most neurons")
        }
        ModelConfig { position: PositionConfig::Alibi, .. } => refuse("ALiBi"),
        ModelConfig { block_order: BlockOrder::PostNorm, .. } => refuse("norms after the blocks"),
        ModelConfig { norm_affine: false, .. } => refuse("norms without weights"),
        ModelConfig { final_norm: false, .. } => refuse("a model without a final norm"),
        _ if config.d_embedding != config.d_model => refuse("projected embeddings"),
        _ if is_opt && !(config.attention_bias && config.mlp_bias) => refuse("OPT without biases"),
        _ if Family::is_falcon(config) && config.block_order == BlockOrder::PreNorm => {
            refuse("Falcon with attention and feed-forward network in sequence")
        }
        _ => Ok(()),
    }
}

struct Planner<'a> {
    config: &'a ModelConfig,
    source: &'a dyn TensorSource,
    options: &'a ConvertOptions,
    plan: Plan,
    left_out: Vec<String>,
}

impl Planner<'_> {
    /// Every tensor that is a part of the model.
    fn model(&mut self) -> Result<()> {
        let family = Family::of(self.config);
        let mut leftover = Vec::new();
        for info in self.source.tensors() {
            // OPT's bare decoder is stored without the root of its names
            let rooted = match info.name.strip_prefix("decoder.") {
                Some(rest) => format!("model.decoder.{rest}"),
                None => info.name.clone(),
            };
            let Some(target) = family.target(&rooted) else {
                if gguf_names::is_predictor(&info.name) {
                    continue;
                }
                match registry::find(&self.config.model_type) {
                    Some(known) if (known.is_ignorable)(&info.name) => {
                        self.left_out.push(info.name);
                    }
                    _ => leftover.push(info.name),
                }
                continue;
            };
            let format = self.format(self.source, &info)?;
            let name = self.down_name(target.name, target.down.is_some());
            let turned = target.down.is_some_and(|by_neuron| by_neuron != self.options.powerinfer);
            let mut shape = info.shape.clone();
            let from = if turned && shape.len() == 2 {
                shape.reverse();
                Origin::Columns { name: info.name, format }
            } else {
                let order = RowOrder::new(target.rows, self.config);
                Origin::Rows { name: info.name, format, order }
            };
            self.add(name, shape, from, format)?;
        }
        if leftover.is_empty() {
            return Ok(());
        }
        Err(CoreError::LeftoverTensors { path: self.source.path(""), names: leftover }.into())
    }

    /// The name of a part of a down projection: PowerInfer's has another, its bias too.
    fn down_name(&self, name: String, is_down: bool) -> String {
        let is_down = is_down || name.contains(".ffn_down.");
        if is_down && self.options.powerinfer {
            return name.replace(".ffn_down.", ".ffn_down_t.");
        }
        name
    }

    /// PowerInfer's engine asks for a head of its own, of OPT for none; a head that is the same as
    /// the embeddings it is tied to is left out otherwise.
    fn head(&mut self) -> Result<()> {
        let (tied, powerinfer) = (self.config.tie_word_embeddings, self.options.powerinfer);
        let is_opt = self.config.model_type == "opt";
        let at =
            |name: &str| self.plan.tensors.iter().position(|planned| planned.info.name == name);
        let (head, embedding) = (at(HEAD), at(EMBEDDING));
        if let (Some(head), Some(embedding)) = (head, embedding) {
            if tied && self.same(head, embedding)? && (is_opt || !powerinfer) {
                let head = self.plan.tensors.remove(head);
                self.left_out.push(format!("{} (tied)", head.info.name));
                return Ok(());
            }
            if is_opt && powerinfer {
                let what = "OPT with a head of its own";
                return Err(Error::NotConvertible { what, format: "PowerInfer GGUF" });
            }
        } else if let (None, Some(embedding), true) =
            (head, embedding, tied && powerinfer && !is_opt)
        {
            let embedding = &self.plan.tensors[embedding];
            if let Origin::Rows { name, format, order } = &embedding.from {
                let from = Origin::Rows { name: name.clone(), format: *format, order: *order };
                let (shape, format) = (embedding.info.shape.clone(), *format);
                self.add(HEAD.to_owned(), shape, from, format)?;
            }
        }
        Ok(())
    }

    /// Whether two tensors of the model are the same to the byte.
    fn same(&self, a: usize, b: usize) -> Result<bool> {
        let (a, b) = (&self.plan.tensors[a], &self.plan.tensors[b]);
        let (Origin::Rows { name: one, format, .. }, Origin::Rows { name: other, format: of, .. }) =
            (&a.from, &b.from)
        else {
            return Ok(false);
        };
        if format != of || a.info.shape != b.info.shape {
            return Ok(false);
        }
        let len = format.row_bytes(a.info.shape.iter().product())?;
        let mut pieces = [vec![0; COMPARE_BYTES.min(len)], vec![0; COMPARE_BYTES.min(len)]];
        for at in (0..len).step_by(COMPARE_BYTES) {
            let n = COMPARE_BYTES.min(len - at);
            let [first, second] = &mut pieces;
            self.source.read(one, at as u64, &mut first[..n])?;
            self.source.read(other, at as u64, &mut second[..n])?;
            if first[..n] != second[..n] {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn rope_factors(&mut self) {
        let PositionConfig::Rotary(RotaryConfig { theta, scaling }) = &self.config.position else {
            return;
        };
        let Some(divisors) = rotary_divisors(scaling, *theta, self.config.d_head) else { return };
        if self.options.powerinfer {
            let note = "the rotary frequencies are scaled one by one, which PowerInfer's own \
                        engine does not read";
            self.plan.notes.push(note.to_owned());
        }
        let info = TensorInfo {
            name: ROPE_FACTORS.to_owned(),
            dtype: FileDtype::Weights(WeightFormat::F32),
            shape: vec![divisors.len()],
        };
        let from = Origin::Values(divisors);
        self.plan.tensors.push(Planned { info, format: WeightFormat::F32, from });
    }

    /// The predictor that was given, or else the one that the model's file has.
    fn predictor(&mut self) -> Result<()> {
        let own: Vec<TensorInfo> = self.source.tensors().into_iter().collect();
        let own = own.into_iter().filter(|info| gguf_names::is_predictor(&info.name));
        if !self.options.powerinfer {
            if self.options.predictor.is_some() {
                let what = "a predictor";
                return Err(Error::NotConvertible { what, format: "GGUF" });
            }
            self.left_out.extend(own.map(|info| info.name));
            return Ok(());
        }
        let Some(predictor) = &self.options.predictor else {
            for info in own.collect::<Vec<_>>() {
                let format = self.format(self.source, &info)?;
                let order = RowOrder::Same;
                let from = Origin::Rows { name: info.name.clone(), format, order };
                self.add(info.name, info.shape, from, format)?;
            }
            return Ok(());
        };
        let source = predictor.source.as_ref();
        let tensors = source.tensors();
        let find = |name: &str| {
            let found = tensors.iter().find(|info| info.name == name);
            found.cloned().ok_or_else(|| CoreError::MissingTensor {
                path: source.path(name),
                name: name.to_owned(),
            })
        };
        for layer in 0..self.config.n_layers {
            let [fc1, fc2] = ["fc1", "fc2"].map(|part| format!("layers.{layer}.{part}.weight"));
            let (fc1, fc2) = (find(&fc1)?, find(&fc2)?);
            let rank = fc1.shape.first().copied().unwrap_or_default();
            let shapes = [[rank, self.config.d_model], [self.config.d_ff, rank]];
            for ((info, expected), part) in [fc1, fc2].into_iter().zip(shapes).zip(["fc1", "fc2"]) {
                if info.shape != expected {
                    return Err(CoreError::TensorShape {
                        path: source.path(&info.name),
                        name: info.name,
                        expected: expected.to_vec(),
                        found: info.shape,
                    }
                    .into());
                }
                let format = self.format(source, &info)?;
                let from = Origin::Predictor { name: info.name, format };
                self.add(format!("blk.{layer}.{part}.weight"), info.shape, from, format)?;
            }
        }
        if predictor.thresholds.len() != self.config.n_layers {
            let (expected, found) = (vec![self.config.n_layers], vec![predictor.thresholds.len()]);
            return Err(
                OpError::Shape { op: "convert", what: "thresholds", expected, found }.into()
            );
        }
        Ok(())
    }

    /// The format of a tensor of the model.
    fn format(&self, source: &dyn TensorSource, info: &TensorInfo) -> Result<WeightFormat> {
        match &info.dtype {
            FileDtype::Weights(format) => Ok(*format),
            FileDtype::Other(found) => Err(CoreError::TensorDtype {
                path: source.path(&info.name),
                name: info.name.clone(),
                expected: "a type that weights are read from",
                found: found.clone(),
            }
            .into()),
        }
    }

    /// Adds a tensor in the type that is right for it.
    fn add(
        &mut self,
        name: String,
        shape: Vec<usize>,
        from: Origin,
        own: WeightFormat,
    ) -> Result<()> {
        let to = self.stored_as(&name, &shape, own);
        let row_len = shape.last().copied().unwrap_or_default();
        let path = || match &from {
            Origin::Rows { name, .. } | Origin::Columns { name, .. } => self.source.path(name),
            _ => self.source.path(""),
        };
        to.row_bytes(row_len).map_err(|source| CoreError::TensorFormat {
            path: path(),
            name: name.clone(),
            source: Box::new(source),
        })?;
        if let Origin::Rows { order, .. } = &from
            && order.of_stored(shape.first().copied().unwrap_or_default()).is_none()
        {
            let width = self.config.n_heads * self.config.d_head;
            let (path, found) = (path(), shape);
            let expected = vec![width];
            return Err(CoreError::TensorShape { path, name, expected, found }.into());
        }
        if matches!(from, Origin::Columns { .. }) && own.block_len() > 1 {
            let note = format!("`{name}` is quantised anew, since its blocks run across its rows");
            self.plan.notes.push(note);
        }
        let info = TensorInfo { name, dtype: FileDtype::Weights(to), shape };
        self.plan.tensors.push(Planned { info, format: to, from });
        Ok(())
    }

    fn stored_as(&self, name: &str, shape: &[usize], own: WeightFormat) -> WeightFormat {
        if shape.len() < 2 {
            return WeightFormat::F32;
        }
        let is_float = |format: WeightFormat| format.block_len() == 1;
        let wanted = match self.options.dtype {
            Some(dtype) => dtype,
            None if self.options.powerinfer && is_float(own) => WeightFormat::F16,
            None => own,
        };
        let fits = shape.last().is_some_and(|len| len.is_multiple_of(wanted.block_len()));
        if name == POSITIONS && is_float(own) {
            // added to the stream, where rounding it would be heard in every layer
            let unread = self.options.powerinfer && own == WeightFormat::BF16;
            return if unread { WeightFormat::F32 } else { own };
        }
        if gguf_names::is_predictor(name) && !fits { WeightFormat::F16 } else { wanted }
    }

    /// Fails if a tensor is missing or comes twice.
    fn check_complete(&self) -> Result<()> {
        let mut names = BTreeSet::new();
        for Planned { info, .. } in &self.plan.tensors {
            if !names.insert(info.name.clone()) {
                let (name, path) = (info.name.clone(), self.source.path(""));
                let (first, second) = (path.clone(), path);
                return Err(CoreError::DuplicateTensor { name, first, second }.into());
            }
        }
        for name in Family::of(self.config).required(self.config.n_layers) {
            let name = self.down_name(name, false);
            if !names.contains(&name) {
                let path = self.source.path("");
                return Err(CoreError::MissingTensor { path, name }.into());
            }
        }
        Ok(())
    }
}

/// Whether all frequencies are scaled alike.
pub(super) fn linear_factor(scaling: &RopeScaling) -> Option<f64> {
    match scaling {
        RopeScaling::Linear { factor } => Some(*factor),
        _ => None,
    }
}
