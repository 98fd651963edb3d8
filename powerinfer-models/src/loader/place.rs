//! Where a block goes, and which predictor it gets before it does.

use std::sync::Arc;

use powerinfer_core::Result;
use powerinfer_ops::{FastDevice, HotRows, NeuronIds};
use powerinfer_predictor::ActivationPredictor;

use super::Loader;
use crate::layers::{
    Block, DeviceBlock, Embedding, FfnShard, HotShard, PlacedBlock, Position, SparseFfn,
    SplitPredictor, Whole,
};
use crate::predictor::model_error;

impl Loader<'_> {
    /// Gives the network of a block, which is to be whole, its predictor, if there are to be any and one
    /// is any good; then splits it and puts norms and attention where the placement says. Blocks come
    /// in their order, all from the first on.
    ///
    /// `embedding` and `position` are those of the model: a few tokens that predictors are tried on run
    /// along, before anything is split.
    ///
    /// # Errors
    /// As [`DeviceBlock::hold`], and those of the predictor and of a forward pass.
    pub fn place(
        &mut self,
        layer: usize,
        mut block: Block,
        embedding: &Embedding,
        position: &Position,
    ) -> Result<PlacedBlock> {
        let mut predictor = None;
        if let Some(predictors) = &mut self.predictors {
            predictor = predictors.choose(layer, &mut block, (embedding, position), self.store)?;
        }
        if let Some(predictor) = &predictor {
            self.loaded.weight_bytes += predictor.size_bytes() as u64;
        }
        block.ffn = self.split(layer, block.ffn, predictor)?;
        let (Some(placement), Some(device)) = (self.placement, self.fast_device) else {
            return Ok(block.into());
        };
        if !placement.fast_attention(layer) {
            return Ok(block.into());
        }
        let before = (0..layer).filter(|&layer| placement.fast_attention(layer)).count();
        let rotary = matches!(position, Position::Rotary(_));
        Ok(PlacedBlock::Device(Box::new(DeviceBlock::hold(block, device, before, rotary)?)))
    }

    /// A network with its predictor, its neurons where the placement says.
    fn split(
        &self,
        layer: usize,
        ffn: SparseFfn,
        predictor: Option<Arc<dyn ActivationPredictor>>,
    ) -> Result<SparseFfn> {
        let ffn = match predictor {
            Some(predictor) => ffn.with_predictor(predictor),
            None => ffn,
        };
        let Some(placement) = self.placement else { return Ok(ffn) };
        let (hot, cold) = (placement.hot(layer).clone(), placement.cold(layer));
        if self.fast_device.is_some() && hot.is_empty() {
            return Ok(ffn);
        }
        let whole = match ffn.into_whole() {
            Ok(whole) => whole,
            // an architecture of somebody's own, which has split it itself
            Err(ffn) => return Ok(*ffn),
        };
        if let Some(device) = self.fast_device {
            let density = self.hot_densities.get(layer).copied();
            return hybrid_ffn(whole, (hot, cold), density, device);
        }
        let (weights, down_bias, predictor) = whole;
        let shards = vec![FfnShard::pick(&weights, hot)?, FfnShard::pick(&weights, cold)?];
        let ffn = SparseFfn::new(shards, down_bias)?;
        Ok(match predictor {
            Some(predictor) => ffn.with_predictor(predictor),
            None => ffn,
        })
    }
}

/// A network whose hot rows go straight from the layer's weights to the device; what is left here when
/// the weights are dropped are the cold ones.
fn hybrid_ffn(
    (weights, down_bias, predictor): Whole,
    (hot, cold): (NeuronIds, NeuronIds),
    density: Option<f64>,
    device: &dyn FastDevice,
) -> Result<SparseFfn> {
    let split = predictor.as_deref().map(|whole| SplitPredictor::of(whole, &hot, &cold));
    let split = split.transpose().map_err(model_error)?.flatten();
    let held = device.hold(HotRows { weights: &weights, ids: &hot, density })?;
    let hot = HotShard::new(held.into(), hot)?;
    let ffn = SparseFfn::hybrid(FfnShard::pick(&weights, cold)?, hot, down_bias)?;
    Ok(match (split, predictor) {
        (Some(split), _) => ffn.with_split_predictor(split),
        (None, Some(whole)) => ffn.with_predictor(whole),
        (None, None) => ffn,
    })
}
