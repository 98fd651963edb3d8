//! A stack of blocks between embeddings and head: the one `CausalLm` of all architectures.

use std::sync::Arc;

use candle_core::Tensor;
use powerinfer_core::{
    CausalLm, Error, KvCache, KvShape, ModelConfig, ModelInfo, Result, Sparsity, Step,
};
use powerinfer_ops::{FastDevice, HeldHead, OpError, Slot, with_f32};
use powerinfer_predictor::ActivationPredictor;

use crate::gguf_names::is_predictor;
use crate::layers::block::Pass;
use crate::layers::device_block::{read_slot, sequence_of};
use crate::layers::{Embedding, Head, Norm, PlacedBlock, Position, RotaryTable};
use crate::loader::Loaded;

/// A decoder-only transformer.
#[derive(Debug, Clone)]
pub struct Decoder {
    info: ModelInfo,
    embedding: Embedding,
    position: Position,
    blocks: Vec<PlacedBlock>,
    head: PlacedHead,
    /// Where blocks or the head lie that are not the host's.
    device: Option<Arc<dyn FastDevice>>,
    /// Predictors were to be chosen and none paid: predicted runs are exact ones.
    exact_pays: bool,
}

/// The head with the norm before it, wherever it lies.
#[derive(Debug, Clone)]
enum PlacedHead {
    Host(Box<HostHead>),
    Device { held: Arc<dyn HeldHead>, size_bytes: usize },
}

/// A head on the host.
#[derive(Debug, Clone)]
struct HostHead {
    norm: Option<Norm>,
    head: Head,
}

impl PlacedHead {
    fn size_bytes(&self) -> usize {
        match self {
            Self::Host(host) => {
                host.head.size_bytes() + host.norm.as_ref().map_or(0, Norm::size_bytes)
            }
            Self::Device { size_bytes, .. } => *size_bytes,
        }
    }
}

impl Decoder {
    /// Stacks `blocks`. Give it an [`info`](Self::with_info) before use.
    #[must_use]
    pub fn new(
        embedding: Embedding,
        position: Position,
        blocks: Vec<impl Into<PlacedBlock>>,
        norm: Option<Norm>,
        head: Head,
    ) -> Self {
        let info = ModelInfo::default();
        let blocks = blocks.into_iter().map(Into::into).collect();
        let head = PlacedHead::Host(Box::new(HostHead { norm, head }));
        Self { info, embedding, position, blocks, head, device: None, exact_pays: false }
    }

    /// Says on which device the blocks lie that are not the host's, and puts the head there, too.
    ///
    /// # Errors
    /// As [`FastDevice::hold_head`].
    pub(crate) fn put_on(&mut self, device: &Arc<dyn FastDevice>, with_head: bool) -> Result<()> {
        if let PlacedHead::Host(host) = &self.head
            && with_head
        {
            let HostHead { norm, head } = host.as_ref();
            let held: Arc<dyn HeldHead> = match norm {
                Some(norm) => {
                    norm.with_part(|norm| Ok(device.hold_head(head.part(Some(norm)))?))?
                }
                None => device.hold_head(head.part(None))?,
            }
            .into();
            self.head = PlacedHead::Device { held, size_bytes: self.head.size_bytes() };
        }
        self.device = self.runs_on_device().then(|| Arc::clone(device));
        Ok(())
    }

    /// Whether any block or the head lies on a device.
    fn runs_on_device(&self) -> bool {
        matches!(self.head, PlacedHead::Device { .. })
            || self.blocks.iter().any(PlacedBlock::is_on_device)
    }

    /// Says what the model is; [`ModelInfo::kv`] and [`ModelInfo::sparsity`] take effect.
    #[must_use]
    pub fn with_info(mut self, info: ModelInfo) -> Self {
        self.info = info;
        self
    }

    /// Fills in the info of a loaded model.
    pub(crate) fn describe(
        &mut self,
        config: &ModelConfig,
        kv: KvShape,
        sparsity: Sparsity,
        loaded: Loaded,
        ignored: &[String],
    ) {
        let mut notes = loaded.notes;
        if !config.activation.is_sparse() {
            notes.push(format!(
                "`{}` fires for every neuron: this model is not sparse and runs densely",
                config.activation
            ));
        }
        let (predictor, ignored): (Vec<&str>, Vec<&str>) =
            ignored.iter().map(String::as_str).partition(|name| is_predictor(name));
        if !predictor.is_empty() {
            let n = predictor.len();
            notes.push(format!("the file's own predictor, {n} matrices, is not used"));
        }
        if !ignored.is_empty() {
            notes.push(format!("tensors that are not needed: {}", ignored.join(", ")));
        }
        let mut info = ModelInfo::default();
        info.architecture.clone_from(&config.model_type);
        info.n_layers = config.n_layers;
        info.d_model = config.d_model;
        info.d_ff = config.d_ff;
        info.vocab_size = config.vocab_size;
        info.max_context = config.max_context;
        info.kv = kv;
        info.activation = config.activation.to_string();
        info.sparsity = sparsity;
        info.n_parameters = loaded.n_parameters;
        info.weight_bytes = loaded.weight_bytes;
        info.dtypes = loaded.dtypes.iter().map(ToString::to_string).collect();
        info.eos_token_ids.clone_from(&config.eos_token_ids);
        info.bos_token_id = config.bos_token_id;
        info.notes = notes;
        self.info = info;
    }

    /// Gives the device the predictors of the neurons that it holds, as far as there is room beside
    /// `free_bytes`, which are for a context, and says what it has.
    pub(crate) fn settle_on(&mut self, device: &dyn FastDevice, free_bytes: u64) -> Result<()> {
        let mut left = 0;
        for block in &self.blocks {
            left += usize::from(!block.ffn().hold_predictor(device.memory(), free_bytes)?);
        }
        if left > 0 {
            let (name, n_layers) = (device.name(), self.blocks.len());
            self.info.notes.push(format!(
                "the CPU runs the predictors of {left} of {n_layers} layers for {name}"
            ));
        }
        self.info.fast_device = Some(device.name().to_owned());
        let head = match &self.head {
            PlacedHead::Host(_) => 0,
            PlacedHead::Device { held, .. } => held.size_bytes(),
        };
        self.info.fast_bytes = head + self.blocks.iter().map(PlacedBlock::fast_bytes).sum::<u64>();
        Ok(())
    }

    /// Adds sentences to the notes.
    pub(crate) fn add_notes(&mut self, notes: Vec<String>) {
        self.info.notes.extend(notes);
    }

    /// Says which predictor there is. Where no layer has one predicted runs are exact ones by default, and
    /// if `exact_pays`, also where they are asked for.
    pub(crate) fn settle_predictors(&mut self, exact_pays: bool) {
        self.info.predictor = self.predictor().map(ActivationPredictor::describe);
        if self.info.predictor.is_none() {
            self.exact_pays = exact_pays;
            if self.info.sparsity == Sparsity::Predicted {
                self.info.sparsity = Sparsity::Exact;
            }
        }
    }

    /// The predictor of the first layer that has one.
    fn predictor(&self) -> Option<&dyn ActivationPredictor> {
        self.blocks.iter().find_map(|block| block.ffn().predictor())
    }
}

impl CausalLm for Decoder {
    fn info(&self) -> &ModelInfo {
        &self.info
    }

    fn new_cache(&self) -> KvCache {
        let on_device: Vec<bool> = self.blocks.iter().map(PlacedBlock::is_on_device).collect();
        let Some(device) = &self.device else { return KvCache::new(self.info.kv.clone()) };
        let (kv, device) = (self.info.kv.clone(), Arc::clone(device));
        // an info of other layers than there are is refused by the first pass
        KvCache::with_device(kv.clone(), self.info.d_model, device, &on_device)
            .unwrap_or_else(|_| KvCache::new(kv))
    }

    fn forward(&self, tokens: &[u32], cache: &mut KvCache, step: &mut Step) -> Result<()> {
        if tokens.is_empty() {
            return Err(Error::EmptyPrompt);
        }
        let x = self.embedding.forward(tokens)?;
        let n_tokens = cache.len() + tokens.len();
        cache.reserve(tokens.len()).map_err(|error| outgrown(error, n_tokens))?;
        let x = self.position.add(x, cache.len())?;
        let sparsity = step.sparsity.unwrap_or(self.info.sparsity);
        if sparsity == Sparsity::Predicted && self.predictor().is_none() && !self.exact_pays {
            return Err(Error::NoPredictor);
        }
        let rotary = self.position.rotary(cache.len(), tokens.len())?;
        if self.device.is_some() {
            begin(cache, rotary.as_ref()).map_err(|error| outgrown(error, n_tokens))?;
        }
        let (mut stream, mut started) = (Stream::Host(x), Vec::new());
        for (layer, block) in self.blocks.iter().enumerate() {
            let pass = Pass { layer, sparsity, rotary: rotary.as_ref() };
            match block {
                PlacedBlock::Host(block) => {
                    let x = block.forward(&stream.on_host(cache)?, pass, cache, step)?;
                    check_finite(&x, Some(layer), cache.len())?;
                    stream = Stream::Host(x);
                }
                PlacedBlock::Device(block) => {
                    stream.move_to_device(cache)?;
                    started.extend(block.forward(pass, cache, step)?);
                }
            }
            step.stats.weight_bytes += block.dense_bytes() as u64;
        }
        step.cancel.check()?;
        self.logits(stream, cache, step)?;
        if self.device.is_some() {
            let runs = sequence_of(cache)?.take_runs()?;
            started.into_iter().zip(runs).for_each(|(ffn, run)| ffn.record(run, step));
        }
        let position_bytes = tokens.len() * self.position.token_bytes();
        let embedding_bytes = self.embedding.pass_bytes(tokens.len());
        step.stats.weight_bytes += (embedding_bytes + position_bytes) as u64;
        step.stats.n_tokens += tokens.len() as u64;
        cache.commit();
        Ok(())
    }
}

impl Decoder {
    /// Checks the stream that came out of the last block and writes the logits that are wanted.
    fn logits(&self, mut stream: Stream, cache: &mut KvCache, step: &mut Step) -> Result<()> {
        let n_tokens = cache.reserved();
        let wanted = n_tokens - step.wanted.n_rows(n_tokens)..n_tokens;
        if let Stream::Device = stream {
            let first_position = cache.len();
            if let Some(token) = sequence_of(cache)?.first_broken_token()? {
                let position = first_position + token;
                return Err(Error::NonFiniteLogits { position, layer: None });
            }
        }
        if wanted.is_empty() {
            step.logits.clear();
            return Ok(());
        }
        match &self.head {
            PlacedHead::Host(host) => {
                let HostHead { norm, head } = host.as_ref();
                let mut last = stream.on_host(cache)?.narrow(0, wanted.start, wanted.len())?;
                if let Some(norm) = norm {
                    last = norm.forward(&last)?;
                }
                head.forward(&last, &mut step.logits)?;
            }
            PlacedHead::Device { held, .. } => {
                stream.move_to_device(cache)?;
                held.run(sequence_of(cache)?, wanted, &mut step.logits)?;
            }
        }
        step.stats.weight_bytes += self.head.size_bytes() as u64;
        Ok(())
    }
}

/// Where the residual stream is.
enum Stream {
    Host(Tensor),
    Device,
}

impl Stream {
    /// The stream `[n_tokens, d_model]` on the host, checked where it comes from the device.
    fn on_host(&self, cache: &mut KvCache) -> Result<Tensor> {
        if let Self::Host(x) = self {
            return Ok(x.clone());
        }
        let (n_tokens, first_position) = (cache.reserved(), cache.len());
        let x = read_slot(sequence_of(cache)?, Slot::Residual, n_tokens)?;
        check_finite(&x, None, first_position)?;
        Ok(x)
    }

    fn move_to_device(&mut self, cache: &mut KvCache) -> Result<()> {
        if let Self::Host(x) = self {
            let sequence = sequence_of(cache)?;
            with_f32(x, |x| -> std::result::Result<(), OpError> {
                sequence.write(Slot::Residual, x)
            })?;
            *self = Self::Device;
        }
        Ok(())
    }
}

/// The error of a device that has no room for a context of so many tokens says what is to be done.
fn outgrown(error: Error, n_tokens: usize) -> Error {
    match error {
        Error::Op(source @ OpError::DeviceBudget { .. }) => {
            Error::DeviceContext { n_tokens, source }
        }
        other => other,
    }
}

/// Begins a pass on the device.
fn begin(cache: &mut KvCache, rotary: Option<&RotaryTable>) -> Result<()> {
    let (first, n_tokens) = (cache.len(), cache.reserved());
    let sequence = sequence_of(cache)?;
    match rotary {
        Some(rotary) => {
            rotary.with_angles(|angles| Ok(sequence.begin(first, n_tokens, Some(angles))?))
        }
        None => Ok(sequence.begin(first, n_tokens, None)?),
    }
}

/// Fails at the first position of the residual stream `x` `[n_tokens, d_model]` that is not finite:
/// neither are the logits that come of it, and its keys and values would spoil all that follow.
pub(crate) fn check_finite(x: &Tensor, layer: Option<usize>, first_position: usize) -> Result<()> {
    let d_model = x.dim(1)?.max(1);
    let broken = powerinfer_ops::with_f32(x, |values| -> Result<Option<usize>> {
        Ok(values.iter().position(|value| !value.is_finite()))
    })?;
    match broken {
        Some(at) => Err(Error::NonFiniteLogits { position: first_position + at / d_model, layer }),
        None => Ok(()),
    }
}
