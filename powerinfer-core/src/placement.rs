//! Which neurons are hot and which are cold, layer by layer, and where attention and head lie.

mod exact;
mod file;
mod firing;
mod hardware;
mod hot_set;
mod offload;
#[cfg(test)]
mod offload_tests;
#[cfg(test)]
mod paper_tests;
mod plan;
#[cfg(test)]
mod plan_tests;
mod planner;
mod simulate;
mod sizes;
mod skew;

use powerinfer_ops::NeuronIds;

use crate::error::{Error, Result};
pub use hardware::{DeviceMemorySpeed, Hardware};
pub use offload::Offload;
pub use plan::{Plan, PlannedDevice, PlannedLayer};
pub use planner::{PlanRequest, plan};
pub use simulate::{Arrangement, StepTimes, Workload, simulate};
pub use sizes::{LayerSizes, ModelSizes, PlannedModel};
pub use skew::Skew;

/// A partition of each layer's neurons into hot and cold (PowerInfer, "Neuron Placement Policy"), and what
/// of the rest lies on the fast device, too.
///
/// Whatever the partition, the logits are the same up to rounding: each side sums its own
/// neurons, and the two sums are added.
///
/// Attention with its norms and its keys and values is one part, never split; the head with the norm before
/// it is another. Without being told, both stay on the host, as embeddings always do.
///
/// # Examples
/// ```
/// use powerinfer_core::Placement;
/// use powerinfer_ops::NeuronIds;
/// let placement = Placement::new(vec![NeuronIds::from_sorted(vec![0, 2])?], 4)?;
/// assert_eq!(placement.hot(0).as_slice(), &[0, 2]);
/// assert_eq!(placement.cold(0).as_slice(), &[1, 3]);
/// assert!(!placement.fast_attention(0));
/// let placement = placement.with_fast_attention(vec![true])?.with_fast_head(true);
/// assert!(placement.fast_attention(0) && placement.fast_head());
/// # Ok::<(), powerinfer_core::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placement {
    hot: Vec<NeuronIds>,
    d_ff: usize,
    /// One a layer.
    fast_attention: Vec<bool>,
    fast_head: bool,
}

impl Placement {
    /// A partition of layers of `d_ff` neurons; `hot` has one list a layer. Attention and head stay on the
    /// host.
    ///
    /// # Errors
    /// [`Error::PlacementShape`] if a list names a neuron that is not below `d_ff`.
    pub fn new(hot: Vec<NeuronIds>, d_ff: usize) -> Result<Self> {
        for ids in &hot {
            if let Some(id) = ids.last().filter(|&id| id as usize >= d_ff) {
                let what = "neurons of a layer";
                return Err(Error::PlacementShape { what, expected: d_ff, found: id as usize + 1 });
            }
        }
        let fast_attention = vec![false; hot.len()];
        Ok(Self { hot, d_ff, fast_attention, fast_head: false })
    }

    /// Everything on the fast device that can lie there.
    #[must_use]
    pub fn all_fast(n_layers: usize, d_ff: usize) -> Self {
        let hot = vec![NeuronIds::all(d_ff); n_layers];
        Self { hot, d_ff, fast_attention: vec![true; n_layers], fast_head: true }
    }

    /// Says of each layer whether its attention lies on the fast device, with its norms and its keys and
    /// values.
    ///
    /// # Errors
    /// [`Error::PlacementShape`] if these are not as many as there are layers.
    pub fn with_fast_attention(mut self, layers: Vec<bool>) -> Result<Self> {
        let (expected, found) = (self.n_layers(), layers.len());
        if expected != found {
            return Err(Error::PlacementShape { what: "layers", expected, found });
        }
        self.fast_attention = layers;
        Ok(self)
    }

    /// Says whether the head lies on the fast device, with the norm before it.
    #[must_use]
    pub fn with_fast_head(mut self, fast: bool) -> Self {
        self.fast_head = fast;
        self
    }

    /// Whether the attention of a layer lies on the fast device.
    ///
    /// # Panics
    /// If there is no such layer.
    #[must_use]
    pub fn fast_attention(&self, layer: usize) -> bool {
        self.fast_attention[layer]
    }

    /// Layers whose attention lies on the fast device.
    #[must_use]
    pub fn n_fast_attention(&self) -> usize {
        self.fast_attention.iter().filter(|&&fast| fast).count()
    }

    /// Whether the head lies on the fast device.
    #[must_use]
    pub fn fast_head(&self) -> bool {
        self.fast_head
    }

    /// Layers of the partition.
    #[must_use]
    pub fn n_layers(&self) -> usize {
        self.hot.len()
    }

    /// Neurons of a layer.
    #[must_use]
    pub fn d_ff(&self) -> usize {
        self.d_ff
    }

    /// The hot neurons of a layer.
    ///
    /// # Panics
    /// If there is no such layer.
    #[must_use]
    pub fn hot(&self, layer: usize) -> &NeuronIds {
        &self.hot[layer]
    }

    /// The cold neurons of a layer: the others.
    ///
    /// # Panics
    /// If there is no such layer.
    #[must_use]
    pub fn cold(&self, layer: usize) -> NeuronIds {
        let mut cold = NeuronIds::new();
        let mut hot = self.hot[layer].as_slice().iter().peekable();
        for id in 0..self.d_ff {
            let id = u32::try_from(id).expect("neuron ids are u32: matrices have no more rows");
            if hot.next_if_eq(&&id).is_none() {
                cold.push(id);
            }
        }
        cold
    }

    /// Fails unless the partition is one of `n_layers` layers of `d_ff` neurons.
    ///
    /// # Errors
    /// [`Error::PlacementShape`] naming what differs.
    pub fn check(&self, n_layers: usize, d_ff: usize) -> Result<()> {
        for (what, expected, found) in
            [("layers", n_layers, self.n_layers()), ("neurons of a layer", d_ff, self.d_ff)]
        {
            if expected != found {
                return Err(Error::PlacementShape { what, expected, found });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hot_and_cold_are_each_neuron_once() {
        for hot in [vec![], vec![0], vec![4], vec![1, 2], vec![0, 1, 2, 3, 4]] {
            let hot = NeuronIds::from_sorted(hot).unwrap();
            let placement = Placement::new(vec![hot.clone()], 5).unwrap();
            let mut all = [hot.as_slice(), placement.cold(0).as_slice()].concat();
            all.sort_unstable();
            assert_eq!(all, [0, 1, 2, 3, 4]);
        }
    }

    #[test]
    fn a_partition_of_another_model_is_refused() {
        let beyond = NeuronIds::from_sorted(vec![5]).unwrap();
        assert!(matches!(
            Placement::new(vec![beyond], 5),
            Err(Error::PlacementShape { expected: 5, found: 6, .. })
        ));
        let placement = Placement::new(vec![NeuronIds::new(); 2], 5).unwrap();
        placement.check(2, 5).unwrap();
        assert!(matches!(placement.check(3, 5), Err(Error::PlacementShape { what: "layers", .. })));
        assert!(placement.check(2, 6).is_err());
        assert!(matches!(
            placement.with_fast_attention(vec![true]),
            Err(Error::PlacementShape { what: "layers", expected: 2, found: 1 })
        ));
    }

    #[test]
    fn attention_and_head_are_where_they_were_put() {
        let placement = Placement::new(vec![NeuronIds::new(); 3], 5).unwrap();
        assert_eq!((placement.n_fast_attention(), placement.fast_head()), (0, false));
        let placed = placement.with_fast_attention(vec![false, true, false]).unwrap();
        let found: Vec<bool> = (0..3).map(|layer| placed.fast_attention(layer)).collect();
        assert_eq!(found, [false, true, false]);
        assert!(placed.with_fast_head(true).fast_head());
        let all = Placement::all_fast(2, 5);
        all.check(2, 5).unwrap();
        assert!(all.fast_head() && all.n_fast_attention() == 2 && all.cold(1).is_empty());
    }
}
