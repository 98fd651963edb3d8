//! The two sides of a split: hot neurons on a fast device, cold ones here, at the same time.

use std::sync::Arc;
use std::time::Instant;

use candle_core::Tensor;
use powerinfer_core::{Error, Result, Step};
use powerinfer_ops::{
    DeviceMemory, HeldNeurons, MlpLayers, NeuronIds, NeuronScores, Neurons, OpError, RowPredictor,
    hybrid_ffn, with_f32,
};
use powerinfer_predictor::FfnInputs;

use super::{SparseFfn, nanoseconds, record};
use crate::layers::ffn_shard::LayerNeurons;
use crate::layers::{FfnShard, HotShard, SplitPredictor};
use crate::predictor::model_error;

impl SparseFfn {
    /// A network whose hot neurons lie on a fast device and whose others, `cold`, run here at the
    /// same time.
    ///
    /// # Errors
    /// [`Error::PlacementShape`] if a neuron is on both sides or on none.
    pub fn hybrid(cold: FfnShard, hot: HotShard, down_bias: Option<Vec<f32>>) -> Result<Self> {
        let d_ff = cold.n_neurons() + hot.n_neurons();
        let mut sides = vec![0; d_ff];
        let cold_ids = cold.ids().map(NeuronIds::as_slice).unwrap_or_default();
        for &id in hot.ids().as_slice().iter().chain(cold_ids) {
            let wrong =
                Error::PlacementShape { what: "neurons", expected: d_ff, found: id as usize + 1 };
            *sides.get_mut(id as usize).ok_or(wrong)? += 1;
        }
        if let Some(&found) = sides.iter().find(|&&sides| sides != 1) {
            return Err(Error::PlacementShape { what: "sides of a neuron", expected: 1, found });
        }
        let mut ffn = Self::new(vec![cold], down_bias)?;
        ffn.hot = Some(hot);
        Ok(ffn)
    }

    /// [`with_predictor`](Self::with_predictor) for both sides of a split.
    pub(crate) fn with_split_predictor(mut self, predictor: SplitPredictor) -> Self {
        let predictor = Arc::new(predictor);
        self.split_predictor = Some(Arc::clone(&predictor));
        self.with_predictor(predictor)
    }

    /// Lets the fast device run its part of the predictor; `false` if there is such a part and it
    /// stays on the CPU, as it does where it would leave the device less than `free_bytes` of `memory`.
    pub(crate) fn hold_predictor(&self, memory: DeviceMemory, free_bytes: u64) -> Result<bool> {
        let Some(hot) = &self.hot else { return Ok(true) };
        let Some(rows) = self.split_predictor.as_ref().and_then(|split| split.hot.rows()) else {
            return Ok(self.predictor.is_none());
        };
        let left = memory.budget_bytes.saturating_sub(memory.held_bytes);
        if free_bytes > 0 && left.saturating_sub(rows.size_bytes() as u64) < free_bytes {
            return Ok(false);
        }
        match hot.held().hold_predictor(rows) {
            Err(OpError::DeviceBudget { .. }) => Ok(false),
            held => Ok(held?),
        }
    }

    /// Memory that the hot neurons take on the fast device.
    pub(crate) fn fast_bytes(&self) -> u64 {
        self.hot.as_ref().map_or(0, |hot| hot.held().size_bytes())
    }

    /// The sum over both sides.
    pub(super) fn sum_of_both_sides(
        &self,
        hot: &HotShard,
        normed: &Tensor,
        neurons: LayerNeurons<'_>,
        layer: usize,
        step: &mut Step,
    ) -> Result<Tensor> {
        let mut lists = std::mem::take(&mut step.split_picks);
        let sides = match neurons {
            LayerNeurons::All => (HeldNeurons::All, Neurons::All),
            LayerNeurons::Firing => (HeldNeurons::Firing, Neurons::Firing),
            LayerNeurons::FiringOf(picks) => {
                self.restrict_to_sides(hot, picks, &mut lists);
                (HeldNeurons::FiringOf(&lists[0]), Neurons::FiringOf(&lists[1]))
            }
        };
        let sum = self.both_sides(hot, normed, sides, layer, step);
        step.split_picks = lists;
        sum
    }

    /// The sum over the hot neurons, on the fast device, and the cold ones, here, at the same time.
    fn both_sides(
        &self,
        hot: &HotShard,
        normed: &Tensor,
        (hot_neurons, cold_neurons): (HeldNeurons<'_>, Neurons<'_>),
        layer: usize,
        step: &mut Step,
    ) -> Result<Tensor> {
        let cold = &self.shards[0];
        let (cold_side, hot_side) = ((cold.weights(), cold_neurons), (hot.held(), hot_neurons));
        let (sum, run) = hybrid_ffn(cold_side, hot_side, normed, &mut step.workspace)?;
        let n_tokens = normed.dim(0)?;
        record(step, layer, run.cold, cold.n_neurons() * n_tokens);
        record(step, layer, run.hot.counts, hot.n_neurons() * n_tokens);
        let split = &mut step.stats.split;
        split.layers += 1;
        split.fired += run.cold.fired + run.hot.counts.fired;
        split.fast_fired += run.hot.counts.fired;
        split.fast_bytes += run.hot.counts.bytes;
        split.cold_ns += run.cold_ns;
        split.fast_ns += run.hot.busy_ns;
        split.wait_ns += run.wait_ns;
        Ok(sum)
    }

    /// [`predicted`](Self::predicted) with a part of the predictor for each side. A device that holds
    /// its part runs it; that costs no time on the CPU, and no list crosses. Else the CPU picks for
    /// the device before it starts.
    pub(super) fn predicted_on_both_sides(
        &self,
        (hot, predictor): (&HotShard, &SplitPredictor),
        inputs: &FfnInputs<'_>,
        layer: usize,
        step: &mut Step,
    ) -> Result<Tensor> {
        let mut run = |residual: &[f32]| {
            let (mut hidden, mut lists) =
                (std::mem::take(&mut step.hidden), std::mem::take(&mut step.split_picks));
            let [hot_list, cold_list] = &mut lists;
            let scratch = (&mut hidden, hot_list, cold_list);
            let (hot_neurons, cold) =
                self.predicted_sides((hot, predictor), inputs, scratch, step)?;
            let hot_neurons = hot_neurons.unwrap_or(HeldNeurons::Predicted(residual));
            let sum = self.both_sides(hot, inputs.normed, (hot_neurons, cold), layer, step);
            (step.hidden, step.split_picks) = (hidden, lists);
            sum
        };
        match hot.held().has_predictor() && self.reads_residual() {
            true => with_f32(inputs.residual, run),
            false => run(&[]),
        }
    }

    /// What each side is to run, without the hot one where the device picks; scratch memory for hidden
    /// values and the lists of both.
    pub(super) fn predicted_sides<'a>(
        &self,
        (hot, predictor): (&HotShard, &'a SplitPredictor),
        inputs: &FfnInputs<'_>,
        (hidden, hot_list, cold_list): (
            &'a mut Vec<f32>,
            &'a mut Vec<NeuronIds>,
            &'a mut Vec<NeuronIds>,
        ),
        step: &mut Step,
    ) -> Result<(Option<HeldNeurons<'a>>, Neurons<'a>)> {
        let on_device = hot.held().has_predictor();
        if on_device && self.shards[0].n_neurons() == 0 {
            return Ok((None, Neurons::All));
        }
        let began = Instant::now();
        let mut bytes = predictor.cold.bytes_before();
        let cold = match predictor.cold.fused(inputs, hidden).map_err(model_error)? {
            Some(neurons) => neurons,
            None => {
                predictor.cold.predict(inputs, cold_list).map_err(model_error)?;
                bytes = predictor.cold.size_bytes();
                Neurons::FiringOf(cold_list)
            }
        };
        let hot_neurons = match (cold, predictor.hot.rows()) {
            _ if on_device => None,
            (Neurons::Scored(scores), Some(RowPredictor::Scored(layers))) => {
                let MlpLayers { rows, threshold, .. } = layers;
                NeuronScores { rows, hidden: scores.hidden, threshold }.pick(hot_list);
                bytes += rows.size_bytes();
                Some(HeldNeurons::FiringOf(hot_list))
            }
            _ => {
                predictor.hot.predict(inputs, hot_list).map_err(model_error)?;
                bytes += predictor.hot.size_bytes();
                Some(HeldNeurons::FiringOf(hot_list))
            }
        };
        step.stats.predictor_ns += nanoseconds(began);
        step.stats.weight_bytes += bytes as u64;
        Ok((hot_neurons, cold))
    }

    /// The part of each list that is hot, and the part that is cold, in their own ids.
    pub(super) fn restrict_to_sides(
        &self,
        hot: &HotShard,
        picks: &[NeuronIds],
        lists: &mut [Vec<NeuronIds>; 2],
    ) {
        let sides = [Some(hot.ids()), self.shards[0].ids()];
        for (lists, ids) in lists.iter_mut().zip(sides) {
            restrict(picks, ids, lists);
        }
    }
}

/// The part of each list that a side holds, in its own ids; `None` holds all.
fn restrict(picks: &[NeuronIds], ids: Option<&NeuronIds>, local: &mut Vec<NeuronIds>) {
    local.resize_with(picks.len(), NeuronIds::new);
    for (picks, local) in picks.iter().zip(local) {
        match ids {
            Some(ids) => picks.restrict_into(ids, local),
            None => local.clone_from(picks),
        }
    }
}
