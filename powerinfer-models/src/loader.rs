//! Takes layers out of a weight store and keeps count of what they hold.

mod place;

use powerinfer_core::{
    CancelToken, Error, FileDtype, Holding, Layout, Placement, Result, WeightStore,
};
use powerinfer_ops::{Activation, FastDevice, FfnWeights, NeuronIds, NeuronMatrix, WeightFormat};

use crate::gguf_names::by_neuron;
use crate::layers::{AttentionHeads, FfnShard, LayerNorm, Linear, RmsNorm, SparseFfn};
use crate::predictor::{PredictorNotes, Predictors};

/// Takes layers out of a [`WeightStore`], in the format and placement that the caller chose.
#[derive(Debug)]
pub struct Loader<'a> {
    store: &'a mut WeightStore,
    dtype: Option<WeightFormat>,
    placement: Option<&'a Placement>,
    fast_device: Option<&'a dyn FastDevice>,
    /// Shares of the hot neurons of each layer that are expected to fire, if known.
    hot_densities: &'a [f64],
    predictors: Option<Predictors<'a>>,
    holding: Holding,
    requantise_down: bool,
    cancel: CancelToken,
    loaded: Loaded,
}

/// A down projection, as it is held.
enum Down {
    /// `[d_ff, d_model]`
    ByNeuron(NeuronMatrix),
    /// `[d_model, d_ff]`
    ByOutput(NeuronMatrix),
}

/// What was loaded.
#[derive(Debug, Clone, Default)]
pub(crate) struct Loaded {
    pub(crate) n_parameters: u64,
    pub(crate) weight_bytes: u64,
    pub(crate) dtypes: Vec<WeightFormat>,
    pub(crate) notes: Vec<String>,
}

/// Names and sizes of a feed-forward network's tensors.
#[derive(Debug, Clone, Copy)]
pub struct FfnTensors<'a> {
    /// Prefix of the gate, `[d_ff, d_model]`: `.weight` and `.bias` are appended.
    pub gate: &'a str,
    /// Prefix of the up projection, `[d_ff, d_model]`, of a gated network.
    pub up: Option<&'a str>,
    /// Prefix of the down projection, `[d_model, d_ff]`.
    pub down: &'a str,
    /// Neurons.
    pub d_ff: usize,
    /// Values of a token.
    pub d_model: usize,
    /// Whether the three have biases.
    pub bias: bool,
    /// What is applied to the gate products.
    pub activation: Activation,
    /// What is applied to the up products, if anything.
    pub up_activation: Option<Activation>,
}

impl<'a> Loader<'a> {
    /// A loader that holds matrices as `dtype`, or as the file does.
    #[must_use]
    pub fn new(
        store: &'a mut WeightStore,
        dtype: Option<WeightFormat>,
        placement: Option<&'a Placement>,
    ) -> Self {
        let (holding, loaded) = (Holding::Resident, Loaded::default());
        let cancel = CancelToken::default();
        Self {
            store,
            dtype,
            placement,
            fast_device: None,
            hot_densities: &[],
            holding,
            requantise_down: false,
            cancel,
            predictors: None,
            loaded,
        }
    }

    /// Puts the hot neurons of the placement on a device. `hot_densities` has the share of them that
    /// is expected to fire, one a layer, or is empty if nothing is known.
    #[must_use]
    pub fn with_fast_device(
        mut self,
        fast_device: Option<&'a dyn FastDevice>,
        hot_densities: &'a [f64],
    ) -> Self {
        (self.fast_device, self.hot_densities) = (fast_device, hot_densities);
        self
    }

    /// Gives each feed-forward network a predictor.
    pub(crate) fn with_predictors(mut self, predictors: Predictors<'a>) -> Self {
        self.predictors = Some(predictors);
        self
    }

    /// Says whether matrices are copied into memory; only for the layout that down projections are
    /// held in, since the store knows the rest.
    #[must_use]
    pub fn with_holding(mut self, holding: Holding) -> Self {
        self.holding = holding;
        self
    }

    /// Quantises down projections anew whose blocks run across neurons.
    #[must_use]
    pub fn with_requantised_down(mut self, requantise: bool) -> Self {
        self.requantise_down = requantise;
        self
    }

    /// Takes no more tensors once `cancel` is cancelled.
    #[must_use]
    pub fn with_cancel(mut self, cancel: CancelToken) -> Self {
        self.cancel = cancel;
        self
    }

    /// Whether the store has a tensor of that name.
    #[must_use]
    pub fn contains(&self, name: &str) -> bool {
        self.store.contains(name)
    }

    /// Adds a sentence to the notes of the model.
    pub fn note(&mut self, note: impl Into<String>) {
        self.loaded.notes.push(note.into());
    }

    /// Takes a matrix `[n_neurons, d_model]` that the file holds the same way.
    ///
    /// # Errors
    /// As [`WeightStore::matrix`].
    pub fn matrix(&mut self, name: &str, n_neurons: usize, d_model: usize) -> Result<NeuronMatrix> {
        self.take(name, n_neurons, d_model, Layout::NeuronMajor)
    }

    /// Takes `{prefix}.weight`, `[n_out, n_in]`, and `{prefix}.bias` if there is to be one.
    ///
    /// # Errors
    /// As [`WeightStore::matrix`].
    pub fn linear(
        &mut self,
        prefix: &str,
        n_out: usize,
        n_in: usize,
        bias: bool,
    ) -> Result<Linear> {
        let weights = self.matrix(&format!("{prefix}.weight"), n_out, n_in)?;
        Linear::new(weights, self.bias(prefix, n_out, bias)?)
    }

    /// Takes the scales of a norm, `{prefix}.weight`, `[d_model]`.
    ///
    /// # Errors
    /// As [`WeightStore::vector`].
    pub fn rms_norm(&mut self, prefix: &str, d_model: usize, eps: f64) -> Result<RmsNorm> {
        RmsNorm::new(self.vector(&format!("{prefix}.weight"), d_model)?, eps)
    }

    /// Takes the weights of a norm, `{prefix}.weight` and `{prefix}.bias`, `[d_model]`, if it has
    /// any.
    ///
    /// # Errors
    /// As [`WeightStore::vector`].
    pub fn layer_norm(
        &mut self,
        prefix: &str,
        d_model: usize,
        eps: f64,
        affine: bool,
    ) -> Result<LayerNorm> {
        if !affine {
            return LayerNorm::plain(d_model, eps);
        }
        let scale = self.vector(&format!("{prefix}.weight"), d_model)?;
        LayerNorm::new(scale, self.vector(&format!("{prefix}.bias"), d_model)?, eps)
    }

    /// Takes a table `[n_rows, d_model]` in the file's own type, whatever matrices are held as:
    /// its rows are added to the stream, where rounding them would be heard in every layer.
    ///
    /// # Errors
    /// As [`WeightStore::matrix`].
    pub fn table(&mut self, name: &str, n_rows: usize, d_model: usize) -> Result<NeuronMatrix> {
        self.take_as(name, [n_rows, d_model], Layout::NeuronMajor, None)
    }

    /// Takes queries, keys and values that one tensor holds: for each key-value head the rows of
    /// its query heads, then those of its key and of its value.
    ///
    /// # Errors
    /// As [`WeightStore::matrix`].
    pub fn fused_qkv(
        &mut self,
        prefix: &str,
        heads: AttentionHeads,
        d_model: usize,
        bias: bool,
    ) -> Result<[Linear; 3]> {
        let AttentionHeads { n_heads, n_kv_heads, d_head } = heads;
        let group = n_heads / n_kv_heads.max(1);
        let rows = heads.query_width() + 2 * heads.kv_width();
        let fused = self.matrix(&format!("{prefix}.weight"), rows, d_model)?;
        let fused_bias = self.bias(prefix, rows, bias)?;
        let part = |first: usize, n: usize| -> Result<Linear> {
            let of_head = |head: usize| (head * (group + 2) + first) * d_head;
            let ids = (0..n_kv_heads).flat_map(|head| of_head(head)..of_head(head) + n * d_head);
            let ids = NeuronIds::from_sorted(ids.map(|id| id as u32).collect())?;
            let bias = fused_bias.as_ref().map(|bias| {
                ids.as_slice().iter().map(|&id| bias[id as usize]).collect::<Vec<f32>>()
            });
            Linear::new(fused.pick_rows(&ids)?, bias)
        };
        Ok([part(0, group)?, part(group, 1)?, part(group + 1, 1)?])
    }

    /// Takes the feed-forward network of a layer, whole: [`place`](Self::place) gives it its predictor
    /// and splits it.
    ///
    /// # Errors
    /// As [`WeightStore::matrix`].
    pub fn ffn(&mut self, tensors: FfnTensors<'_>) -> Result<SparseFfn> {
        let FfnTensors { d_ff, d_model, bias, .. } = tensors;
        let weight = |prefix: &str| format!("{prefix}.weight");
        let gate = self.matrix(&weight(tensors.gate), d_ff, d_model)?;
        let up = tensors.up.map(|up| self.matrix(&weight(up), d_ff, d_model)).transpose()?;
        let (down, is_by_output) = self.down(tensors.down, d_ff, d_model)?;
        let gate_bias = self.bias(tensors.gate, d_ff, bias)?;
        let up_bias = match tensors.up {
            Some(up) => self.bias(up, d_ff, bias)?,
            None => None,
        };
        let down_bias = self.bias(tensors.down, d_model, bias)?;
        let weights = match down {
            Down::ByNeuron(down) => FfnWeights::new(gate, up, down, tensors.activation)?,
            Down::ByOutput(down) => {
                FfnWeights::with_down_by_output(gate, up, down, tensors.activation)?
            }
        };
        let weights =
            weights.with_biases(gate_bias, up_bias)?.with_up_activation(tensors.up_activation);
        let ffn = SparseFfn::new(vec![FfnShard::whole(weights)], down_bias)?;
        Ok(if is_by_output { ffn.never_predicted() } else { ffn })
    }

    /// Takes a down projection, whichever way the file holds it; and whether it would be held by output
    /// if nothing were split, so that no neuron's part of it could be read alone.
    fn down(&mut self, prefix: &str, d_ff: usize, d_model: usize) -> Result<(Down, bool)> {
        let by_neuron = format!("{}.weight", by_neuron(prefix));
        if self.contains(&by_neuron) {
            let down = self.take(&by_neuron, d_ff, d_model, Layout::NeuronMajor)?;
            return Ok((Down::ByNeuron(down), false));
        }
        let name = format!("{prefix}.weight");
        let turned = |loader: &mut Self| {
            loader.take(&name, d_ff, d_model, Layout::Transposed).map(Down::ByNeuron)
        };
        let from = match self.store.info(&name).map(|info| &info.dtype) {
            Some(FileDtype::Weights(format)) => *format,
            // missing or of another type: taking it says which
            _ => return Ok((turned(self)?, false)),
        };
        let to = self.dtype.unwrap_or(from);
        let is_quantised = |format: WeightFormat| format.block_len() > 1;
        let across = is_quantised(from) && is_quantised(to);
        let mapped = self.holding == Holding::Mapped && from == to;
        let is_split = self.placement.is_some();
        if across && self.requantise_down {
            self.note_once(format!(
                "down projections were {from} by output and are {to} by neuron: rounded twice"
            ));
        } else if across && is_split {
            let (path, format) = (self.store.source().path(&name), from.name());
            return Err(Error::AcrossNeurons { path, name, format });
        } else if (across || mapped) && !is_split {
            self.note_once(
                "down projections are stored by output: they are computed in full, whatever fires"
                    .to_owned(),
            );
            let down = self.take(&name, d_model, d_ff, Layout::NeuronMajor)?;
            return Ok((Down::ByOutput(down), true));
        } else if mapped {
            if self.predictors.is_some() {
                self.note_once(
                    "down projections are stored by output: neurons of a mapped file are not predicted"
                        .to_owned(),
                );
            }
            return Ok((turned(self)?, true));
        }
        Ok((turned(self)?, false))
    }

    /// Adds a note that every layer would add.
    fn note_once(&mut self, note: String) {
        if !self.loaded.notes.contains(&note) {
            self.loaded.notes.push(note);
        }
    }

    /// What was loaded, with the predictors that the layers got, if they were to get any.
    ///
    /// # Errors
    /// As [`Predictors::finish`].
    pub(crate) fn finish(self) -> crate::Result<(Loaded, Option<PredictorNotes>)> {
        let mut loaded = self.loaded;
        let predictors = self.predictors.map(Predictors::finish).transpose()?;
        if let Some(PredictorNotes { of_file, .. }) = &predictors {
            loaded.notes.extend(of_file.iter().cloned());
        }
        Ok((loaded, predictors))
    }

    fn take(
        &mut self,
        name: &str,
        n_neurons: usize,
        d_model: usize,
        layout: Layout,
    ) -> Result<NeuronMatrix> {
        self.take_as(name, [n_neurons, d_model], layout, self.dtype)
    }

    fn take_as(
        &mut self,
        name: &str,
        [n_neurons, d_model]: [usize; 2],
        layout: Layout,
        dtype: Option<WeightFormat>,
    ) -> Result<NeuronMatrix> {
        self.cancel.check()?;
        let matrix = self.store.matrix(name, n_neurons, d_model, layout, dtype)?;
        self.loaded.n_parameters += (n_neurons * d_model) as u64;
        self.loaded.weight_bytes += matrix.size_bytes() as u64;
        if !self.loaded.dtypes.contains(&matrix.format()) {
            self.loaded.dtypes.push(matrix.format());
        }
        Ok(matrix)
    }

    fn vector(&mut self, name: &str, len: usize) -> Result<Vec<f32>> {
        self.cancel.check()?;
        let values = self.store.vector(name, len)?;
        self.loaded.n_parameters += len as u64;
        self.loaded.weight_bytes += size_of_val(values.as_slice()) as u64;
        Ok(values)
    }

    fn bias(&mut self, prefix: &str, len: usize, wanted: bool) -> Result<Option<Vec<f32>>> {
        wanted.then(|| self.vector(&format!("{prefix}.bias"), len)).transpose()
    }

    /// Forgets a matrix that turned out to be a copy of another.
    pub(crate) fn uncount(&mut self, matrix: &NeuronMatrix) {
        self.loaded.n_parameters -= (matrix.n_neurons() * matrix.d_model()) as u64;
        self.loaded.weight_bytes -= matrix.size_bytes() as u64;
    }
}
