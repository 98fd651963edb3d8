//! The neurons of a layer that lie on a fast device.

use std::sync::Arc;

use powerinfer_core::{Error, Result};
use powerinfer_ops::{HeldFfn, NeuronIds};

/// Gate, up and down rows of a layer's hot neurons on a fast device; the cold ones are an
/// [`FfnShard`](super::FfnShard).
#[derive(Debug, Clone)]
pub struct HotShard {
    held: Arc<dyn HeldFfn>,
    ids: NeuronIds,
}

impl HotShard {
    /// Rows that a device holds, with their ids in the layer.
    ///
    /// # Errors
    /// [`Error::PlacementShape`] if there are more or fewer ids than rows.
    pub fn new(held: Arc<dyn HeldFfn>, ids: NeuronIds) -> Result<Self> {
        let (expected, found) = (held.n_neurons(), ids.len());
        if expected != found {
            return Err(Error::PlacementShape { what: "hot neurons", expected, found });
        }
        Ok(Self { held, ids })
    }

    /// The rows on the device.
    #[must_use]
    pub fn held(&self) -> &dyn HeldFfn {
        self.held.as_ref()
    }

    /// The layer's ids of the rows.
    #[must_use]
    pub fn ids(&self) -> &NeuronIds {
        &self.ids
    }

    /// Neurons held there.
    #[must_use]
    pub fn n_neurons(&self) -> usize {
        self.ids.len()
    }
}
