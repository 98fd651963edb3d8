//! A network whose tokens lie in a sequence on a fast device.

use std::time::Instant;

use candle_core::Tensor;
use powerinfer_core::{Result, Sparsity, Step};
use powerinfer_ops::{
    DeviceSequence, HeldNeurons, HeldRun, Neurons, OpError, Slot, add_bias, with_f32,
};
use powerinfer_predictor::FfnInputs;

use super::{SparseFfn, nanoseconds, record};
use crate::layers::block::Pass;
use crate::layers::device_block::read_slot;
use crate::layers::{HotShard, SplitPredictor};
use crate::predictor::model_error;

/// A network that was started on the device.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StartedFfn {
    layer: usize,
    /// Hot neurons, summed over tokens.
    n_neurons: usize,
}

impl StartedFfn {
    /// Counts what it did.
    pub(crate) fn record(self, run: HeldRun, step: &mut Step) {
        record(step, self.layer, run.counts, self.n_neurons);
        let split = &mut step.stats.split;
        split.layers += 1;
        split.fired += run.counts.fired;
        split.fast_fired += run.counts.fired;
        split.fast_bytes += run.counts.bytes;
        split.fast_ns += run.busy_ns;
    }
}

/// Where the inputs of a network lie, and what was read of them.
#[derive(Debug)]
pub(crate) struct SlotInputs {
    n_tokens: usize,
    slot: Slot,
    residual: Option<Tensor>,
    normed: Option<Tensor>,
}

impl SlotInputs {
    /// The network reads `slot`; its residual stream is the sequence's.
    pub(crate) fn new(n_tokens: usize, slot: Slot) -> Self {
        Self { n_tokens, slot, residual: None, normed: None }
    }

    pub(crate) fn read_residual(&mut self, sequence: &mut dyn DeviceSequence) -> Result<()> {
        if self.residual.is_none() {
            self.residual = Some(read_slot(sequence, Slot::Residual, self.n_tokens)?);
        }
        Ok(())
    }

    fn normed(&mut self, sequence: &mut dyn DeviceSequence, step: &mut Step) -> Result<Tensor> {
        if let Some(normed) = &self.normed {
            return Ok(normed.clone());
        }
        let began = Instant::now();
        let normed = read_slot(sequence, self.slot, self.n_tokens)?;
        step.stats.split.wait_ns += nanoseconds(began);
        Ok(self.normed.insert(normed).clone())
    }

    /// Residual stream and normed input; in place of a stream that is not wanted the input again.
    fn both(
        &mut self,
        residual: bool,
        sequence: &mut dyn DeviceSequence,
        step: &mut Step,
    ) -> Result<[Tensor; 2]> {
        let normed = self.normed(sequence, step)?;
        if !residual || self.slot == Slot::Residual {
            return Ok([normed.clone(), normed]);
        }
        self.read_residual(sequence)?;
        Ok([self.residual.clone().unwrap_or_else(|| normed.clone()), normed])
    }
}

impl SparseFfn {
    /// Lets the device add the bias of down; where it does not, or has no room, the host does.
    pub(crate) fn hold_down_bias(&mut self) -> Result<()> {
        let (Some(hot), Some(bias)) = (&self.hot, &self.down_bias) else { return Ok(()) };
        self.bias_on_device = match hot.held().hold_down_bias(bias) {
            Err(OpError::DeviceBudget { .. }) => false,
            held => held?,
        };
        Ok(())
    }

    /// Whether the residual stream is read beside what the cold neurons are multiplied with.
    pub(crate) fn wants_residual(&self, sparsity: Sparsity, step: &Step) -> bool {
        let watches = step.measure_prediction || step.observer.is_some();
        watches || (sparsity == Sparsity::Predicted && self.reads_residual())
    }

    /// Adds to the sequence's stream what the network gives for a slot of it: the hot neurons are started
    /// first, then the host reads its input and computes the cold ones.
    pub(crate) fn forward_in(
        &self,
        sequence: &mut dyn DeviceSequence,
        mut inputs: SlotInputs,
        pass: Pass<'_>,
        step: &mut Step,
    ) -> Result<Option<StartedFfn>> {
        let Some(hot) = &self.hot else {
            let wanted = self.wants_residual(pass.sparsity, step);
            let [residual, normed] = inputs.both(wanted, sequence, step)?;
            let both = FfnInputs { residual: &residual, normed: &normed };
            let y = self.forward(&both, pass.sparsity, pass.layer, step)?;
            with_f32(&y, |y| sequence.finish_ffn(Some(y)))?;
            return Ok(None);
        };
        let n_neurons = hot.n_neurons() * inputs.n_tokens;
        let started = StartedFfn { layer: pass.layer, n_neurons };
        if step.measure_prediction || step.observer.is_some() {
            let [residual, normed] = inputs.both(true, sequence, step)?;
            self.watch(&FfnInputs { residual: &residual, normed: &normed }, pass.layer, step)?;
        }
        let split = self.split_predictor.as_deref();
        match (pass.sparsity, split, self.predictor.as_deref()) {
            (Sparsity::Dense, ..) => {
                hot.held().start_in(HeldNeurons::All, sequence, inputs.slot)?;
                self.finish_in(sequence, (inputs, Neurons::All), pass, step)?;
            }
            (Sparsity::Predicted, Some(split), _) => {
                self.predicted_in(sequence, (hot, split), inputs, pass, step)?;
            }
            (Sparsity::Predicted, None, Some(predictor)) => {
                let began = Instant::now();
                let [residual, normed] = inputs.both(self.reads_residual(), sequence, step)?;
                let mut picks = std::mem::take(&mut step.picks);
                let mut lists = std::mem::take(&mut step.split_picks);
                let both = FfnInputs { residual: &residual, normed: &normed };
                predictor.predict(&both, &mut picks).map_err(model_error)?;
                self.restrict_to_sides(hot, &picks, &mut lists);
                step.stats.predictor_ns += nanoseconds(began);
                step.stats.weight_bytes += predictor.size_bytes() as u64;
                let hot_neurons = HeldNeurons::FiringOf(&lists[0]);
                hot.held().start_in(hot_neurons, sequence, inputs.slot)?;
                let cold = Neurons::FiringOf(&lists[1]);
                self.finish_in(sequence, (inputs, cold), pass, step)?;
                (step.picks, step.split_picks) = (picks, lists);
            }
            _ => {
                hot.held().start_in(HeldNeurons::Firing, sequence, inputs.slot)?;
                self.finish_in(sequence, (inputs, Neurons::Firing), pass, step)?;
            }
        }
        Ok(Some(started))
    }

    /// [`forward_in`](Self::forward_in) with a part of the predictor for each side. A device that holds its
    /// part starts before the host has read anything.
    fn predicted_in(
        &self,
        sequence: &mut dyn DeviceSequence,
        (hot, predictor): (&HotShard, &SplitPredictor),
        mut inputs: SlotInputs,
        pass: Pass<'_>,
        step: &mut Step,
    ) -> Result<()> {
        let reads_residual = self.reads_residual();
        if hot.held().has_predictor() {
            let mut start = |residual: &[f32]| {
                hot.held().start_in(HeldNeurons::Predicted(residual), sequence, inputs.slot)
            };
            match &inputs.residual {
                // what the predictor is to see is the stream no more
                Some(residual) if reads_residual => with_f32(residual, start)?,
                _ => start(&[])?,
            }
            if self.shards[0].n_neurons() == 0 {
                return self.finish_in(sequence, (inputs, Neurons::All), pass, step);
            }
        }
        let [residual, normed] = inputs.both(reads_residual, sequence, step)?;
        let both = FfnInputs { residual: &residual, normed: &normed };
        let (mut hidden, mut lists) =
            (std::mem::take(&mut step.hidden), std::mem::take(&mut step.split_picks));
        let [hot_list, cold_list] = &mut lists;
        let scratch = (&mut hidden, hot_list, cold_list);
        let (hot_neurons, cold) = self.predicted_sides((hot, predictor), &both, scratch, step)?;
        if let Some(hot_neurons) = hot_neurons {
            hot.held().start_in(hot_neurons, sequence, inputs.slot)?;
        }
        self.finish_in(sequence, (inputs, cold), pass, step)?;
        (step.hidden, step.split_picks) = (hidden, lists);
        Ok(())
    }

    /// Computes the cold neurons, if there are any, and adds both sides to the stream.
    fn finish_in(
        &self,
        sequence: &mut dyn DeviceSequence,
        (mut inputs, cold_neurons): (SlotInputs, Neurons<'_>),
        pass: Pass<'_>,
        step: &mut Step,
    ) -> Result<()> {
        let (cold, n_tokens) = (&self.shards[0], inputs.n_tokens);
        let bias = self.down_bias.as_ref().filter(|_| !self.bias_on_device);
        let mut part = None;
        if cold.n_neurons() > 0 {
            let normed = inputs.normed(sequence, step)?;
            let began = Instant::now();
            let (sum, counts) = cold.run(&normed, cold_neurons, &mut step.workspace)?;
            step.stats.split.cold_ns += nanoseconds(began);
            step.stats.split.fired += counts.fired;
            record(step, pass.layer, counts, cold.n_neurons() * n_tokens);
            part = Some(match bias {
                Some(bias) => add_bias(&sum, bias)?,
                None => sum,
            });
        } else if let Some(bias) = bias {
            let bias = Tensor::from_slice(bias, (1, bias.len()), &candle_core::Device::Cpu)?;
            part = Some(bias.repeat((n_tokens, 1))?.contiguous()?);
        }
        let began = Instant::now();
        match part {
            Some(part) => with_f32(&part, |part| sequence.finish_ffn(Some(part)))?,
            None => sequence.finish_ffn(None)?,
        }
        step.stats.split.wait_ns += nanoseconds(began);
        Ok(())
    }
}
