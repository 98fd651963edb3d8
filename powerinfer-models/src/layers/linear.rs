//! Dense projections.

use candle_core::Tensor;
use powerinfer_core::Result;
use powerinfer_ops::{DensePart, NeuronMatrix, OpError, Workspace, linear, linears};

/// `y = x · Wᵀ + b`.
#[derive(Debug, Clone)]
pub struct Linear {
    weights: NeuronMatrix,
    bias: Option<Vec<f32>>,
}

impl Linear {
    /// A projection with `weights` `[n_out, n_in]` and `bias` `[n_out]`.
    ///
    /// # Errors
    /// [`OpError::Shape`] if the bias has another length.
    pub fn new(weights: NeuronMatrix, bias: Option<Vec<f32>>) -> Result<Self> {
        if let Some(bias) = bias.as_ref().filter(|bias| bias.len() != weights.n_neurons()) {
            let (expected, found) = (vec![weights.n_neurons()], vec![bias.len()]);
            return Err(OpError::Shape { op: "Linear", what: "bias", expected, found }.into());
        }
        Ok(Self { weights, bias })
    }

    /// Projects `x` `[n_tokens, n_in]` to `[n_tokens, n_out]`.
    ///
    /// # Errors
    /// [`OpError`] naming what is wrong with `x`.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        Ok(linear(&self.weights, self.bias.as_deref(), x)?)
    }

    /// What several projections make of the same `x`, with less to do between them.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn forward_all<const N: usize>(
        projections: [&Self; N],
        x: &Tensor,
        workspace: &mut Workspace,
    ) -> Result<[Tensor; N]> {
        let projections = projections.map(|linear| (&linear.weights, linear.bias.as_deref()));
        Ok(linears(projections, x, workspace)?)
    }

    /// As a device takes it.
    pub(crate) fn part(&self) -> DensePart<'_> {
        DensePart { weights: &self.weights, bias: self.bias.as_deref() }
    }

    /// Bytes that a pass reads.
    #[must_use]
    pub fn size_bytes(&self) -> usize {
        self.weights.size_bytes() + self.bias.as_deref().map_or(0, size_of_val)
    }
}
