//! The feed-forward network of a layer, densely or only for the neurons that fire.
//!
//! `y[t] = Σ_i h[t, i] · down[i]` with `h[t, i] = act(gate[i] · x[t]) · (up[i] · x[t])`, or without
//! the second factor where there is no up projection. A neuron fires for a token if its
//! activation is not zero; only then do its up and down rows matter. Because every product is
//! one sum in a fixed order, leaving the others out changes no bit of the result.

use candle_core::{Device, Tensor};

use crate::activation::Activation;
use crate::cpu::{RowKernels, rows};
use crate::error::OpError;
use crate::mask::NeuronIds;
use crate::matrix::NeuronMatrix;
use crate::tensor::with_rows;
use crate::workspace::Workspace;

/// Rows read token by token, as a share of all rows, above which reading all rows once is faster
/// for several tokens. Scattered rows take about a third longer than a stream.
const SCATTERED_SHARE: f64 = 0.75;

/// The matrices of a feed-forward network, or of some of its neurons.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct FfnWeights {
    /// `[n_neurons, d_model]`; the only first matrix where there is no up projection.
    pub gate: NeuronMatrix,
    /// `[n_neurons, d_model]` of a gated network.
    pub up: Option<NeuronMatrix>,
    /// `[n_neurons, d_model]`: the down projection, transposed.
    pub down: NeuronMatrix,
    /// `[n_neurons]`, added before the activation.
    pub gate_bias: Option<Vec<f32>>,
    /// `[n_neurons]`, added to the up products.
    pub up_bias: Option<Vec<f32>>,
    /// What is applied to the gate products.
    pub activation: Activation,
    /// What is applied to the up products; `None` takes them as they are.
    pub up_activation: Option<Activation>,
}

impl FfnWeights {
    /// A network without biases.
    ///
    /// # Errors
    /// [`OpError::Shape`] if the matrices disagree.
    pub fn new(
        gate: NeuronMatrix,
        up: Option<NeuronMatrix>,
        down: NeuronMatrix,
        activation: Activation,
    ) -> Result<Self, OpError> {
        for (what, matrix) in [("up", up.as_ref()), ("down", Some(&down))] {
            let Some(matrix) = matrix else { continue };
            let expected = vec![gate.n_neurons(), gate.d_model()];
            let found = vec![matrix.n_neurons(), matrix.d_model()];
            if expected != found {
                return Err(OpError::Shape { op: "FfnWeights", what, expected, found });
            }
        }
        Ok(Self { gate, up, down, gate_bias: None, up_bias: None, activation, up_activation: None })
    }

    /// Adds biases to the gate and up products.
    ///
    /// # Errors
    /// [`OpError::Shape`] if a bias does not have one value a neuron.
    pub fn with_biases(
        mut self,
        gate: Option<Vec<f32>>,
        up: Option<Vec<f32>>,
    ) -> Result<Self, OpError> {
        for (what, bias) in [("gate bias", &gate), ("up bias", &up)] {
            let Some(bias) = bias else { continue };
            if bias.len() != self.n_neurons() {
                let (expected, found) = (vec![self.n_neurons()], vec![bias.len()]);
                return Err(OpError::Shape { op: "FfnWeights", what, expected, found });
            }
        }
        (self.gate_bias, self.up_bias) = (gate, up);
        Ok(self)
    }

    /// Applies a function to the up products, too: with ReLU on both sides this is dReLU (Song et
    /// al., "Turbo Sparse").
    #[must_use]
    pub fn with_up_activation(mut self, up_activation: Option<Activation>) -> Self {
        self.up_activation = up_activation;
        self
    }

    /// `up · x + bias` as it enters the product with the gate.
    fn activated_up(&self, up: f32) -> f32 {
        self.up_activation.map_or(up, |activation| activation.apply(up))
    }

    /// The network of some of the neurons, copied: one side of a placement.
    ///
    /// # Errors
    /// [`OpError::IdOutOfRange`], [`OpError::Allocation`].
    pub fn pick(&self, ids: &NeuronIds) -> Result<Self, OpError> {
        let pick = |bias: &Option<Vec<f32>>| {
            let bias = bias.as_ref()?;
            Some(ids.as_slice().iter().map(|&id| bias[id as usize]).collect())
        };
        Ok(Self {
            gate: self.gate.pick_rows(ids)?,
            up: self.up.as_ref().map(|up| up.pick_rows(ids)).transpose()?,
            down: self.down.pick_rows(ids)?,
            gate_bias: pick(&self.gate_bias),
            up_bias: pick(&self.up_bias),
            activation: self.activation,
            up_activation: self.up_activation,
        })
    }

    /// Neurons held here.
    #[must_use]
    pub fn n_neurons(&self) -> usize {
        self.gate.n_neurons()
    }

    /// Values of a token.
    #[must_use]
    pub fn d_model(&self) -> usize {
        self.gate.d_model()
    }

    /// Bytes of all matrices.
    #[must_use]
    pub fn size_bytes(&self) -> usize {
        let up = self.up.as_ref().map_or(0, NeuronMatrix::size_bytes);
        self.gate.size_bytes() + up + self.down.size_bytes()
    }
}

/// Which neurons a feed-forward network computes.
#[derive(Debug, Clone, Copy)]
pub enum Neurons<'a> {
    /// All of them: every row of every matrix is read.
    All,
    /// Those that fire, found by computing the whole gate.
    Firing,
    /// Those of the given ones that fire; one list a token, ids local to the weights.
    FiringOf(&'a [NeuronIds]),
}

/// What a feed-forward network did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct FfnCounts {
    /// Neurons whose activation was not zero, summed over tokens.
    pub fired: u64,
    /// Neurons that ran to the end, summed over tokens: all of them, or those that fired.
    pub ran: u64,
    /// Bytes of weights that were read.
    pub bytes: u64,
}

/// Computes a feed-forward network.
///
/// Results do not depend, to the bit, on whether [`Neurons::All`] or [`Neurons::Firing`] computes
/// them, on how tokens are grouped into calls, or on the number of threads.
///
/// # Shapes
/// `x` and the result `[n_tokens, d_model]` f32.
/// # Cost
/// For one token and [`Neurons::Firing`]: all gate rows, and the up and down rows of the neurons
/// that fire. Allocates the result only.
/// # Errors
/// [`OpError::NotSparse`] if neurons are to be left out under an activation that is never zero,
/// [`OpError::Shape`] or [`OpError::IdOutOfRange`] for the lists of ids, and as
/// [`linear`](crate::linear) for `x`.
/// # Examples
/// ```
/// use candle_core::{Device, Tensor};
/// use powerinfer_ops::{Activation, FfnWeights, NeuronMatrix, Neurons, WeightFormat, Workspace, ffn};
/// let m = |values: &[f32]| NeuronMatrix::from_f32(WeightFormat::F32, 2, 2, values);
/// let weights = FfnWeights::new(
///     m(&[1., 0., -1., 0.])?, Some(m(&[0., 1., 0., 1.])?), m(&[1., 1., 5., 5.])?, Activation::Relu)?;
/// let x = Tensor::new(&[[2f32, 3.]], &Device::Cpu)?;
/// let (y, counts) = ffn(&weights, Neurons::Firing, &x, &mut Workspace::default())?;
/// assert_eq!(y.to_vec2::<f32>()?, [[6., 6.]]); // relu(2) · 3 · [1, 1]; the second does not fire
/// assert_eq!(counts.fired, 1);
/// # Ok::<(), powerinfer_ops::OpError>(())
/// ```
pub fn ffn(
    weights: &FfnWeights,
    neurons: Neurons<'_>,
    x: &Tensor,
    workspace: &mut Workspace,
) -> Result<(Tensor, FfnCounts), OpError> {
    let activation = weights.activation;
    if !matches!(neurons, Neurons::All) && !activation.is_sparse() {
        return Err(OpError::NotSparse { activation: activation.name() });
    }
    with_rows("ffn", "x", x, weights.d_model(), |values| {
        let mut y = vec![0.0; values.len()];
        let run = Run { weights, kernels: RowKernels::best(), x: values };
        let counts = match neurons {
            Neurons::All => run.all(workspace, &mut y),
            Neurons::Firing => {
                run.gate(workspace);
                let (fired, read) = run.collect_fired(workspace);
                run.firing(fired, read, workspace, &mut y)
            }
            Neurons::FiringOf(picks) => {
                let (fired, read) = run.gate_of(picks, workspace)?;
                run.firing(fired, read, workspace, &mut y)
            }
        };
        Ok((Tensor::from_vec(y, x.shape(), &Device::Cpu)?, counts))
    })
}

/// One call on slices.
struct Run<'a> {
    weights: &'a FfnWeights,
    kernels: RowKernels,
    x: &'a [f32],
}

impl Run<'_> {
    fn n_tokens(&self) -> usize {
        self.x.len() / self.weights.d_model().max(1)
    }

    fn token(&self, t: usize) -> &[f32] {
        &self.x[t * self.weights.d_model()..][..self.weights.d_model()]
    }

    /// Every row of every matrix.
    fn all(&self, workspace: &mut Workspace, y: &mut [f32]) -> FfnCounts {
        self.gate(workspace);
        let fired = workspace.h.iter().filter(|&&h| h != 0.0).count() as u64;
        self.up_everywhere(workspace);
        rows::axpy(self.kernels, &self.weights.down, &workspace.h, &mut workspace.sums, y);
        FfnCounts { fired, ran: workspace.h.len() as u64, bytes: self.weights.size_bytes() as u64 }
    }

    /// `h = act(gate · x + bias)` of all neurons.
    fn gate(&self, workspace: &mut Workspace) {
        let weights = self.weights;
        let h = &mut workspace.h;
        h.resize(self.n_tokens() * weights.n_neurons(), 0.0);
        rows::matvec(self.kernels, &weights.gate, self.x, h);
        for h in h.chunks_exact_mut(weights.n_neurons().max(1)) {
            add_bias(h, weights.gate_bias.as_deref());
            h.iter_mut().for_each(|h| *h = weights.activation.apply(*h));
        }
    }

    /// `h *= up · x + bias` of all neurons.
    fn up_everywhere(&self, workspace: &mut Workspace) {
        let Some(matrix) = &self.weights.up else { return };
        let Workspace { h, up, .. } = workspace;
        up.resize(h.len(), 0.0);
        rows::matvec(self.kernels, matrix, self.x, up);
        let n_neurons = matrix.n_neurons().max(1);
        for (h, up) in h.chunks_exact_mut(n_neurons).zip(up.chunks_exact_mut(n_neurons)) {
            add_bias(up, self.weights.up_bias.as_deref());
            // a neuron that does not fire stays at zero, whatever its up product is
            let product =
                |h: f32, up| if h == 0.0 { 0.0 } else { h * self.weights.activated_up(up) };
            h.iter_mut().zip(up).for_each(|(h, up)| *h = product(*h, *up));
        }
    }

    /// Lists the neurons that fire, from `h`. Returns their number and the bytes of the gate.
    fn collect_fired(&self, workspace: &mut Workspace) -> (u64, u64) {
        let Workspace { h, fired, scales, ends, .. } = workspace;
        fired.clear();
        scales.clear();
        ends.clear();
        for h in h.chunks_exact(self.weights.n_neurons().max(1)) {
            for (id, &value) in h.iter().enumerate() {
                if value != 0.0 {
                    fired.push(id as u32);
                    scales.push(value);
                }
            }
            ends.push(fired.len());
        }
        (fired.len() as u64, self.weights.gate.size_bytes() as u64)
    }

    /// Gate and activation of the picked neurons; lists those that fire. Returns their number and
    /// the bytes of the gate rows that were read.
    fn gate_of(
        &self,
        picks: &[NeuronIds],
        workspace: &mut Workspace,
    ) -> Result<(u64, u64), OpError> {
        let weights = self.weights;
        if picks.len() != self.n_tokens() {
            let (expected, found) = (vec![self.n_tokens()], vec![picks.len()]);
            return Err(OpError::Shape { op: "ffn", what: "lists of ids", expected, found });
        }
        let Workspace { h, fired, scales, ends, .. } = workspace;
        fired.clear();
        scales.clear();
        ends.clear();
        let mut n_picked = 0;
        for (t, picks) in picks.iter().enumerate() {
            weights.gate.check_ids("ffn", picks)?;
            h.resize(picks.len(), 0.0);
            let ids = picks.as_slice();
            rows::matvec_picked(self.kernels, &weights.gate, ids, self.token(t), h);
            for (&id, &product) in ids.iter().zip(h.iter()) {
                let bias = weights.gate_bias.as_ref().map_or(0.0, |bias| bias[id as usize]);
                let value = weights.activation.apply(product + bias);
                if value != 0.0 {
                    fired.push(id);
                    scales.push(value);
                }
            }
            n_picked += picks.len();
            ends.push(fired.len());
        }
        Ok((fired.len() as u64, (n_picked * weights.gate.row_bytes()) as u64))
    }

    /// Up and down of the neurons that fire, listed in the workspace. For many tokens, whose
    /// lists together cover most neurons, reads every row once instead.
    fn firing(
        &self,
        fired: u64,
        gate_bytes: u64,
        workspace: &mut Workspace,
        y: &mut [f32],
    ) -> FfnCounts {
        let weights = self.weights;
        let row_bytes =
            weights.up.as_ref().map_or(0, NeuronMatrix::row_bytes) + weights.down.row_bytes();
        let scattered = fired as f64 > SCATTERED_SHARE * weights.n_neurons() as f64;
        if self.n_tokens() > 1 && scattered {
            self.scatter(workspace);
            self.up_everywhere(workspace);
            rows::axpy(self.kernels, &weights.down, &workspace.h, &mut workspace.sums, y);
            let bytes = gate_bytes + (weights.n_neurons() * row_bytes) as u64;
            return FfnCounts { fired, ran: fired, bytes };
        }
        let Workspace { up, fired: ids, scales, sums, ends, .. } = workspace;
        let mut start = 0;
        for (t, &end) in ends.iter().enumerate() {
            let (ids, scales) = (&ids[start..end], &mut scales[start..end]);
            if let Some(matrix) = &weights.up {
                up.resize(ids.len(), 0.0);
                rows::matvec_picked(self.kernels, matrix, ids, self.token(t), up);
                for ((scale, up), &id) in scales.iter_mut().zip(up.iter()).zip(ids) {
                    let bias = weights.up_bias.as_ref().map_or(0.0, |bias| bias[id as usize]);
                    *scale *= weights.activated_up(up + bias);
                }
            }
            let y = &mut y[t * weights.d_model()..][..weights.d_model()];
            rows::axpy_picked(self.kernels, &weights.down, (ids, scales), sums, y);
            start = end;
        }
        FfnCounts { fired, ran: fired, bytes: gate_bytes + fired * row_bytes as u64 }
    }

    /// Spreads the listed activations over `h`, zero elsewhere.
    fn scatter(&self, workspace: &mut Workspace) {
        let n_neurons = self.weights.n_neurons();
        let Workspace { h, fired, scales, ends, .. } = workspace;
        h.clear();
        h.resize(self.n_tokens() * n_neurons, 0.0);
        let mut start = 0;
        for (h, &end) in h.chunks_exact_mut(n_neurons.max(1)).zip(ends.iter()) {
            for (&id, &scale) in fired[start..end].iter().zip(&scales[start..end]) {
                h[id as usize] = scale;
            }
            start = end;
        }
    }
}

fn add_bias(values: &mut [f32], bias: Option<&[f32]>) {
    if let Some(bias) = bias {
        values.iter_mut().zip(bias).for_each(|(value, bias)| *value += bias);
    }
}
