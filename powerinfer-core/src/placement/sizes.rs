//! What each part of a model takes in memory: what a placement is counted with.

use crate::error::{Error, Result};
use crate::kv_cache::KvShape;
use crate::model::ModelInfo;

/// Neurons are planned in groups of so many (PowerInfer, "Neuron Placement Policy").
pub(crate) const GROUP_NEURONS: usize = 64;

/// Which model a plan is for.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PlannedModel {
    /// Layers.
    pub n_layers: usize,
    /// Neurons of a layer.
    pub d_ff: usize,
    /// Width of the residual stream.
    pub d_model: usize,
    /// Its `model_type`.
    pub architecture: String,
    /// Its activation function.
    pub activation: String,
    /// Names of the tensors of a feed-forward network, sorted, without what says which layer it is.
    pub ffn_tensors: Vec<String>,
    /// Digest of the weights, which differs between dtypes of one model; empty if it was not made.
    pub digest: String,
}

impl PlannedModel {
    /// Fails unless `other`, what a plan names, is the same model in whatever format; says so in words
    /// where only the weights' digest differs or is missing.
    ///
    /// # Errors
    /// [`Error::PlanMismatch`] naming what differs.
    pub fn check(&self, other: &Self) -> Result<Option<String>> {
        for (what, expected, found) in [
            ("layers", self.n_layers.to_string(), other.n_layers.to_string()),
            ("neurons of a layer", self.d_ff.to_string(), other.d_ff.to_string()),
            ("width", self.d_model.to_string(), other.d_model.to_string()),
            ("architecture", self.architecture.clone(), other.architecture.clone()),
            ("activation", self.activation.clone(), other.activation.clone()),
            ("tensors", self.ffn_tensors.join(", "), other.ffn_tensors.join(", ")),
        ] {
            if expected != found {
                return Err(Error::PlanMismatch { what, expected, found });
            }
        }
        let warning = match (self.digest.as_str(), other.digest.as_str()) {
            ("", _) => None,
            (_, "") => {
                Some("the plan has no digest, so nothing says that it was made for these weights")
            }
            (own, others) if own == others => None,
            _ => Some(
                "the plan was made for other weights of this shape: another dtype, or another model",
            ),
        };
        Ok(warning.map(str::to_owned))
    }

    /// What a profile says about this model.
    #[must_use]
    pub(crate) fn info(&self) -> ModelInfo {
        let mut info = ModelInfo::default();
        (info.n_layers, info.d_ff, info.d_model) = (self.n_layers, self.d_ff, self.d_model);
        info.architecture = self.architecture.clone();
        info.activation = self.activation.clone();
        info
    }
}

/// What the parts of a model take in memory, in the formats that it is to be held in.
///
/// `powerinfer_models::model_sizes` reads them off the headers of a model.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ModelSizes {
    /// Which model it is.
    pub model: PlannedModel,
    /// Its layers.
    pub layers: Vec<LayerSizes>,
    /// The table of embeddings, of which one row is read for a token, and of positions.
    pub embedding_bytes: u64,
    /// The head with the norm before it, all of which is read.
    pub head_bytes: u64,
    /// Whether the head is the table of embeddings.
    pub tied_head: bool,
    /// Keys and values.
    pub kv: KvShape,
}

/// What the parts of a layer take in memory, in bytes, rows padded to whole cache lines.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LayerSizes {
    /// Attention, norms, and what else there is beside the neurons.
    pub attention_bytes: u64,
    /// The predictor; 0 if there is none.
    pub predictor_bytes: u64,
    /// A neuron's row of each matrix: the gate first, or what decides where there is no gate.
    pub neuron_rows: Vec<u64>,
    /// A neuron's biases, of four bytes each.
    pub neuron_biases: u64,
}

impl LayerSizes {
    /// Bytes of a neuron.
    #[must_use]
    pub fn neuron_bytes(&self) -> u64 {
        self.neuron_rows.iter().sum::<u64>() + 4 * self.neuron_biases
    }

    /// Bytes of a neuron that are read for a token on average, if it fires for a share of `firing` of
    /// the tokens.
    #[must_use]
    pub(crate) fn read_bytes(&self, firing: f64, reads: NeuronReads) -> f64 {
        let (all, gate) = (self.neuron_bytes(), self.neuron_rows.first().copied().unwrap_or(0));
        match reads {
            NeuronReads::All => all as f64,
            NeuronReads::GateOfAll => gate as f64 + firing * (all - gate) as f64,
            NeuronReads::Firing => firing * all as f64,
        }
    }

    /// Bytes that a group of hot neurons takes on a device that allocates in multiples of
    /// `alignment_bytes`: rows and biases, the list of ids, and if asked for a predictor's rows.
    #[must_use]
    pub(crate) fn group_bytes(&self, alignment_bytes: u64, predictor_row_bytes: u64) -> u64 {
        let of_group = |bytes: u64| {
            let bytes = bytes.saturating_mul(GROUP_NEURONS as u64);
            bytes.checked_next_multiple_of(alignment_bytes.max(1)).unwrap_or(u64::MAX)
        };
        let values = (self.neuron_biases + 1).saturating_mul(of_group(4));
        let rows = self.neuron_rows.iter().chain([&predictor_row_bytes]);
        rows.fold(values, |sum, &row| sum.saturating_add(of_group(row)))
    }
}

/// What of a layer's neurons a token reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NeuronReads {
    /// Everything.
    All,
    /// The gates of all, the rest of those that fire.
    GateOfAll,
    /// Those that fire.
    Firing,
}

impl ModelSizes {
    /// Keys and values of `context` tokens in one layer, in whole pages.
    #[must_use]
    pub fn layer_kv_bytes(&self, context: usize) -> u64 {
        let of_layer = KvShape { n_layers: 1, ..self.kv.clone() };
        of_layer.size_bytes(context) as u64
    }

    /// All weights and predictors.
    #[must_use]
    pub fn total_bytes(&self) -> u64 {
        let neurons = self.model.d_ff as u64;
        let of_layer = |layer: &LayerSizes| {
            layer.attention_bytes + layer.predictor_bytes + neurons * layer.neuron_bytes()
        };
        let head = if self.tied_head { 0 } else { self.head_bytes };
        self.layers.iter().map(of_layer).sum::<u64>() + self.embedding_bytes + head
    }

    /// Fails if the parts are not those of the model that they name.
    ///
    /// # Errors
    /// [`Error::PlanMismatch`].
    pub(crate) fn check(&self) -> Result<()> {
        if self.layers.len() == self.model.n_layers {
            return Ok(());
        }
        let (expected, found) = (self.model.n_layers.to_string(), self.layers.len().to_string());
        Err(Error::PlanMismatch { what: "sizes of layers", expected, found })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plan_of_other_weights_or_of_nobody_knows_which_is_accepted_with_a_warning() {
        let named = |digest: &str| PlannedModel { digest: digest.to_owned(), ..Default::default() };
        let warning = |own: &str, plan: &str| named(own).check(&named(plan)).unwrap();
        assert_eq!(warning("a", "a"), None);
        assert!(warning("a", "b").is_some_and(|said| said.contains("other weights")));
        assert!(warning("a", "").is_some_and(|said| said.contains("no digest")));
        assert_eq!(warning("", ""), None);
    }
}
