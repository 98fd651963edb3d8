//! The feed-forward network of a layer, densely or only for the neurons that fire.
//!
//! `y[t] = Σ_i h[t, i] · down[i]` with `h[t, i] = act(gate[i] · x[t]) · (up[i] · x[t])`, or without
//! the second factor where there is no up projection. A neuron fires for a token if its
//! activation is not zero; only then do its up and down rows matter. Because every product is
//! one sum in a fixed order, leaving the others out changes no bit of the result.

mod activations;
pub(crate) mod down_by_output;
mod many_tokens;
pub(crate) mod one_token;
pub(crate) mod predictor;

use std::time::Instant;

use candle_core::{Device, Tensor};

use crate::activation::Activation;
use crate::cpu::RowKernels;
use crate::cpu::product::Inputs;
use crate::error::OpError;
use crate::format::WeightFormat;
use crate::gate_estimate::GateEstimate;
use crate::mask::NeuronIds;
use crate::matrix::NeuronMatrix;
use crate::tensor::with_rows;
use crate::workspace::Workspace;

pub use activations::ffn_activations;
pub(crate) use predictor::nanoseconds;

/// The matrices of a feed-forward network, or of some of its neurons.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct FfnWeights {
    /// `[n_neurons, d_model]`; the only first matrix where there is no up projection.
    pub gate: NeuronMatrix,
    /// `[n_neurons, d_model]` of a gated network.
    pub up: Option<NeuronMatrix>,
    /// `[n_neurons, d_model]`: the down projection, transposed. Without rows where it is stored by
    /// output.
    pub down: NeuronMatrix,
    /// `[d_model, n_neurons]`: the down projection of a file whose blocks run across neurons.
    pub down_by_output: Option<NeuronMatrix>,
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
        Ok(Self {
            gate,
            up,
            down,
            down_by_output: None,
            gate_bias: None,
            up_bias: None,
            activation,
            up_activation: None,
        })
    }

    /// A network whose `down` is `[d_model, n_neurons]`, as a quantised file holds it. It is
    /// computed in full in every mode, and neurons can neither be picked nor split into shards.
    ///
    /// # Errors
    /// [`OpError::Shape`] if the matrices disagree.
    pub fn with_down_by_output(
        gate: NeuronMatrix,
        up: Option<NeuronMatrix>,
        down: NeuronMatrix,
        activation: Activation,
    ) -> Result<Self, OpError> {
        let [expected, found] =
            [[gate.d_model(), gate.n_neurons()], [down.n_neurons(), down.d_model()]];
        if expected != found {
            let (expected, found) = (expected.to_vec(), found.to_vec());
            return Err(OpError::Shape { op: "FfnWeights", what: "down", expected, found });
        }
        let without_rows = NeuronMatrix::from_f32(WeightFormat::F32, 0, gate.d_model(), &[])?;
        let same = gate.clone();
        let checked = Self::new(gate, up, same, activation)?;
        Ok(Self { down: without_rows, down_by_output: Some(down), ..checked })
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

    /// The network of some of the neurons, copied: one side of a placement.
    ///
    /// # Errors
    /// [`OpError::IdOutOfRange`], [`OpError::Allocation`], [`OpError::DownByOutput`].
    pub fn pick(&self, ids: &NeuronIds) -> Result<Self, OpError> {
        self.pick_with(ids, NeuronMatrix::pick_rows)
    }

    /// [`pick`](Self::pick) that copies also the rows of a mapped file.
    pub(crate) fn copy(&self, ids: &NeuronIds) -> Result<Self, OpError> {
        self.pick_with(ids, NeuronMatrix::copy_rows)
    }

    fn pick_with(
        &self,
        ids: &NeuronIds,
        rows: impl Fn(&NeuronMatrix, &NeuronIds) -> Result<NeuronMatrix, OpError>,
    ) -> Result<Self, OpError> {
        if self.down_by_output.is_some() {
            return Err(OpError::DownByOutput { op: "FfnWeights::pick" });
        }
        let gate = rows(&self.gate, ids)?;
        let pick = |bias: &Option<Vec<f32>>| {
            let bias = bias.as_ref()?;
            Some(ids.as_slice().iter().map(|&id| bias[id as usize]).collect())
        };
        Ok(Self {
            gate,
            up: self.up.as_ref().map(|up| rows(up, ids)).transpose()?,
            down: rows(&self.down, ids)?,
            down_by_output: None,
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

    /// Gate products, with their bias, to activations.
    fn activate(&self, neuron: usize, product: f32) -> f32 {
        let bias = self.gate_bias.as_ref().map_or(0.0, |bias| bias[neuron]);
        self.activation.apply(product + bias)
    }

    /// An activation times the up product of its neuron.
    fn gated(&self, neuron: usize, activation: f32, product: f32) -> f32 {
        let bias = self.up_bias.as_ref().map_or(0.0, |bias| bias[neuron]);
        let up = self.up_activation.map_or(product + bias, |up| up.apply(product + bias));
        // a neuron that does not fire stays at zero, whatever its up product is
        if activation == 0.0 { 0.0 } else { activation * up }
    }

    /// Bytes of all matrices.
    #[must_use]
    pub fn size_bytes(&self) -> usize {
        let up = self.up.as_ref().map_or(0, NeuronMatrix::size_bytes);
        let down = self.down_by_output.as_ref().unwrap_or(&self.down);
        self.gate.size_bytes() + up + down.size_bytes()
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
    /// Those that fire of the ones that a low-bit copy of the gate lets through, with a margin in
    /// standard deviations of its error.
    Estimated(&'a GateEstimate, f32),
    /// Those that fire of the ones that a predictor's last layer picks.
    Scored(NeuronScores<'a>),
}

/// The last layer of a predictor: a neuron is picked if its score reaches the threshold.
///
/// Each task computes the scores of its own neurons and goes on with those that it picks, so that
/// no list of all neurons is ever made.
#[derive(Debug, Clone, Copy)]
pub struct NeuronScores<'a> {
    /// `[n_neurons, rank]`
    pub rows: &'a NeuronMatrix,
    /// What the rows are multiplied with, `[n_tokens, rank]`.
    pub hidden: &'a [f32],
    /// The least score of a neuron that runs. A score that is not a number counts as reaching it.
    pub threshold: f32,
}

/// What a feed-forward network did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct FfnCounts {
    /// Neurons whose activation was not zero, summed over tokens.
    pub fired: u64,
    /// Neurons that ran to the end, summed over tokens: all of them, or those that fired and whose
    /// up product did not make them zero after all.
    pub ran: u64,
    /// Bytes of weights that were read, those of a predictor included.
    pub bytes: u64,
    /// Neurons whose gate was computed, summed over tokens: all of them, or those that were picked.
    pub picked: u64,
    /// Time that finding out which took, in nanoseconds, where it happens here: a task's time
    /// divided by the number of threads.
    pub predictor_ns: u64,
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
/// that fire. Allocates the result and a flag a thread.
/// # Errors
/// [`OpError::NotSparse`] if neurons are to be left out under an activation that is never zero,
/// [`OpError::DownByOutput`] if some are picked and down is not stored by neuron,
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
    with_rows("ffn", "x", x, weights.d_model(), |values| {
        let mut y = vec![0.0; values.len()];
        let counts = ffn_into(weights, neurons, values, workspace, &mut y)?;
        Ok((Tensor::from_vec(y, x.shape(), &Device::Cpu)?, counts))
    })
}

/// [`ffn`] on slices: adds the output for `x` `[n_tokens, d_model]` to `y`, which is as long.
pub(crate) fn ffn_into(
    weights: &FfnWeights,
    neurons: Neurons<'_>,
    x: &[f32],
    workspace: &mut Workspace,
    y: &mut [f32],
) -> Result<FfnCounts, OpError> {
    let activation = weights.activation;
    if !matches!(neurons, Neurons::All) && !activation.is_sparse() {
        return Err(OpError::NotSparse { activation: activation.name() });
    }
    let kernels = RowKernels::best();
    let Workspace { inputs, activations, step, by_output, predictor, .. } = workspace;
    let formats = [Some(&weights.gate), weights.up.as_ref()];
    let formats = formats.map(|matrix| matrix.unwrap_or(&weights.gate).format());
    let inputs = Inputs::new(kernels, &formats, weights.d_model(), x, inputs);
    let run = Run { weights, kernels, x: inputs };
    if let Some(down) = &weights.down_by_output {
        return run.down_by_output(down, neurons, by_output, y);
    }
    run.check(neurons)?;
    Ok(match (inputs.n_tokens(), neurons) {
        (0, _) => FfnCounts::default(),
        (1, _) => {
            let seen = predictor.prepare(kernels, neurons, x);
            run.one_token(neurons, seen, step, y)
        }
        (_, Neurons::Estimated(..) | Neurons::Scored(_)) => {
            let began = Instant::now();
            let bytes = predictor.pick(kernels, neurons, x);
            let elapsed_ns = nanoseconds(began);
            let neurons = Neurons::FiringOf(&predictor.picks);
            let mut counts = run.many_tokens(neurons, activations, y);
            counts.predictor_ns += elapsed_ns;
            counts.bytes += bytes as u64;
            counts
        }
        _ => run.many_tokens(neurons, activations, y),
    })
}

/// One call on slices.
struct Run<'a> {
    weights: &'a FfnWeights,
    kernels: RowKernels,
    x: Inputs<'a>,
}

impl Run<'_> {
    /// Fails unless there is a list of ids a token, all of them within the weights, or a predictor's
    /// rows are one a neuron.
    fn check(&self, neurons: Neurons<'_>) -> Result<(), OpError> {
        let n_tokens = self.x.n_tokens();
        let check = |what, expected: &[usize], found: &[usize]| {
            OpError::check_shape("ffn", what, expected, found)
        };
        match neurons {
            Neurons::All | Neurons::Firing => Ok(()),
            Neurons::FiringOf(picks) => {
                check("lists of ids", &[n_tokens], &[picks.len()])?;
                picks.iter().try_for_each(|picks| self.weights.gate.check_ids("ffn", picks))
            }
            Neurons::Estimated(estimate, _) => {
                let rows = estimate.rows();
                let expected = [self.weights.n_neurons(), self.weights.d_model()];
                check("the low-bit copy", &expected, &[rows.n_rows(), rows.n_columns()])
            }
            Neurons::Scored(NeuronScores { rows, hidden, .. }) => {
                let (n_neurons, rank) = (rows.n_neurons(), rows.d_model());
                let expected = [self.weights.n_neurons(), rank];
                check("the predictor's rows", &expected, &[n_neurons, rank])?;
                let expected = n_tokens * rank;
                check("the predictor's hidden values", &[expected], &[hidden.len()])
            }
        }
    }
}

impl FfnCounts {
    pub(crate) fn add(&mut self, other: Self) {
        self.fired += other.fired;
        self.ran += other.ran;
        self.bytes += other.bytes;
        self.picked += other.picked;
        self.predictor_ns += other.predictor_ns;
    }

    fn sum(mut self, other: Self) -> Self {
        self.add(other);
        self
    }
}
