//! Which neurons a trained predictor picks, on the device: two products and a threshold.

use super::queue::{Address, Queue};
use super::steps::{DeviceInput, DeviceRows, Finish, Rows, Then, Values, matvec, quantize};
use crate::Activation;

/// The two layers of a predictor on the device.
#[derive(Debug, Clone, Copy)]
pub struct DeviceMlp {
    /// `[rank, d_model]`
    pub first: DeviceRows,
    /// `[rank]` f32, or null.
    pub bias: Address,
    /// What is applied between the layers.
    pub activation: Option<Activation>,
    /// `[n_neurons, rank]`
    pub rows: DeviceRows,
    /// The least score of a neuron that is picked.
    pub threshold: f32,
}

impl DeviceMlp {
    /// Values between the layers.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.first.n_rows
    }
}

/// `picks[t, i]`: 1 where neuron `i` is picked for token `t` of `x`, else 0. `hidden` are tokens as wide
/// as the rank, for what lies between. `x` has been [rounded](super::steps::quantize) where the first
/// layer takes whole numbers; `hidden` may share its memory for them.
///
/// Scores are sums in the order of the device: a score that is the threshold but for rounding may fall
/// to the other side of it than the CPU's.
///
/// # Errors
/// The queue's.
pub fn mlp_picks<Q: Queue>(
    queue: &Q,
    mlp: &DeviceMlp,
    [x, hidden]: [&DeviceInput; 2],
    picks: Address,
) -> Result<(), Q::Error> {
    let then = mlp.activation.map_or(Then::Nothing, Then::Activation);
    let finish = Finish { bias: mlp.bias, then, ..Finish::NOTHING };
    let out = |address, stride| Values { address, stride, by_row: false };
    matvec(queue, &mlp.first, Rows::All, x, finish, out(hidden.values, mlp.rank()))?;
    if mlp.rows.layout.takes_numbers() {
        quantize(queue, hidden, Address::NULL)?;
    }
    let finish = Finish { then: Then::Reaches(mlp.threshold), ..Finish::NOTHING };
    matvec(queue, &mlp.rows, Rows::All, hidden, finish, out(picks, mlp.rows.n_rows))
}
