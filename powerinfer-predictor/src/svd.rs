//! Low-rank factors of the gate: a predictor without training.
//!
//! A gate `G` of `n` neurons is to be replaced by `U · V`, `U` of few columns, so that `G x` and
//! `U V x` differ as little as can be for the inputs `x` that really come. With `C` the second moment of the
//! inputs, the mean of `x xᵀ`, the squared difference is the trace of `(G − U V) C (G − U V)ᵀ`. It is
//! least if the columns of `U` are the first eigenvectors of `G C Gᵀ` and `V = Uᵀ G` (reduced-rank
//! regression). Neither a root nor an inverse of `C` is needed, and the eigenvectors come from a few
//! rounds of multiplying a thin block of columns with `G C Gᵀ` and making it orthonormal again.
//!
//! Each neuron is scaled to the same variance first, so that loud neurons do not take all the rank. What
//! the rank leaves out of each neuron is known from the eigenvalues. A score is the approximate gate product
//! divided by the deviation of that, so one threshold serves all neurons: it says by how many standard
//! deviations a neuron may be missed, as the margin of a [`QuantizedGate`](crate::QuantizedGate) does.

mod eigen;

use powerinfer_ops::{Activation, FfnWeights};

use crate::dense::Dense;
use crate::error::{Error, Result};
use crate::mlp::{MlpForm, MlpWeights};
use crate::random::Random;

/// Rounds of multiplication.
const ROUNDS: usize = 8;
/// Columns beside those asked for, which make the last of these converge.
const SPARE: usize = 8;
/// The least share of a neuron's deviation that counts as left out: no text is long enough to trust
/// less.
const LEAST_LEFT_OUT: f32 = 0.03;

/// The second moment of the inputs of a network, `[d_model, d_model]`: the mean of `x xᵀ`.
#[derive(Debug, Clone)]
pub struct SecondMoment {
    d_model: usize,
    sum: Vec<f64>,
    n_tokens: u64,
}

impl SecondMoment {
    /// That of no inputs yet.
    #[must_use]
    pub fn new(d_model: usize) -> Self {
        Self { d_model, sum: vec![0.0; d_model * d_model], n_tokens: 0 }
    }

    /// Adds inputs, `[n_tokens, d_model]`.
    ///
    /// # Errors
    /// [`Error::NotFinite`] naming the token, of which nothing is added then.
    pub fn add(&mut self, inputs: &[f32]) -> Result<()> {
        let n_tokens = inputs.len() / self.d_model.max(1);
        if let Some(at) = inputs.iter().position(|x| !x.is_finite()) {
            return Err(Error::NotFinite { what: "input", row: at / self.d_model.max(1) });
        }
        let inputs = Dense::new(inputs, n_tokens, self.d_model);
        let product = inputs.t().matmul(inputs)?;
        self.sum.iter_mut().zip(&product).for_each(|(sum, x)| *sum += f64::from(*x));
        self.n_tokens += n_tokens as u64;
        Ok(())
    }

    fn mean(&self) -> Vec<f32> {
        let n = self.n_tokens.max(1) as f64;
        self.sum.iter().map(|sum| (sum / n) as f32).collect()
    }
}

/// Factors of a gate, the most important first.
///
/// # Examples
/// ```
/// use powerinfer_ops::{Activation, FfnWeights, NeuronMatrix, WeightFormat};
/// use powerinfer_predictor::{LowRankGate, SecondMoment};
/// // four neurons that all look along one direction
/// let gate = NeuronMatrix::from_f32(
///     WeightFormat::F32, 4, 2, &[1., 1., -1., -1., 2., 2., -3., -3.])?;
/// let weights = FfnWeights::new(gate.clone(), None, gate, Activation::Relu)?;
/// let mut moment = SecondMoment::new(2);
/// moment.add(&[1.0, 0.5, -0.3, 1.0, 0.2, -1.0])?;
/// let factors = LowRankGate::new(&weights, &moment, 1, 7)?;
/// // one unit for the direction, one for the biases
/// let predictor = factors.weights(2)?.predictor(WeightFormat::F32)?;
/// assert_eq!((predictor.rank(), predictor.n_neurons()), (2, 4));
/// # Ok::<(), powerinfer_predictor::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct LowRankGate {
    n_neurons: usize,
    d_model: usize,
    /// `[rank, d_model]`, scaled so that what each gives has variance 1.
    fc1: Vec<f32>,
    /// `[n_neurons, rank]`, of gates scaled to variance 1.
    fc2: Vec<f32>,
    /// `[n_neurons]`: a gate's bias, less what it must exceed, in its deviations.
    bias: Vec<f32>,
}

impl LowRankGate {
    /// The first `max_rank` factors of the gate of `weights` under inputs of that second moment. The
    /// same arguments give the same factors.
    ///
    /// # Cost
    /// A few products of `[n_neurons, d_model]` and `[d_model, d_model]` with a block of `max_rank`
    /// columns. Runs on the current pool.
    ///
    /// # Errors
    /// [`Error::Op`] if nothing is zero under the activation, [`Error::NotFinite`] if the gate holds
    /// something that is not a number.
    pub fn new(
        weights: &FfnWeights,
        moment: &SecondMoment,
        max_rank: usize,
        seed: u64,
    ) -> Result<Self> {
        let (n, d) = (weights.n_neurons(), weights.d_model());
        let must_exceed = match weights.activation {
            Activation::Relu => 0.0,
            Activation::FatRelu { threshold } => threshold,
            other => {
                return Err(powerinfer_ops::OpError::NotSparse { activation: other.name() }.into());
            }
        };
        let moment = moment.mean();
        let mut gate = vec![0.0; n * d];
        for (row, values) in gate.chunks_exact_mut(d.max(1)).enumerate() {
            weights.gate.row_to_f32(row, values);
            if !values.iter().all(|value| value.is_finite()) {
                return Err(Error::NotFinite { what: "gate", row });
            }
        }
        let seen = Dense::new(&gate, n, d).matmul(Dense::new(&moment, d, d))?;
        let deviations: Vec<f32> = gate
            .chunks_exact(d.max(1))
            .zip(seen.chunks_exact(d.max(1)))
            .map(|(row, seen)| dot(row, seen).max(1e-20).sqrt())
            .collect();
        for (row, deviation) in gate.chunks_exact_mut(d.max(1)).zip(&deviations) {
            row.iter_mut().for_each(|value| *value /= deviation);
        }
        let bias_of = |id: usize| weights.gate_bias.as_ref().map_or(0.0, |bias| bias[id]);
        let bias = deviations.iter().enumerate();
        let bias = bias.map(|(id, deviation)| (bias_of(id) - must_exceed) / deviation).collect();
        let rank = max_rank.min(d).min(n);
        let columns = (rank + SPARE).min(d).min(n);
        let (fc1, fc2) = factors(&gate, &moment, (n, d), (rank, columns), seed)?;
        Ok(Self { n_neurons: n, d_model: d, fc1, fc2, bias })
    }

    /// The most units that [`weights`](Self::weights) can give, that of the biases included.
    #[must_use]
    pub fn max_rank(&self) -> usize {
        1 + self.fc1.len() / self.d_model.max(1)
    }

    /// The weights of a predictor of so many units on the normed input, one of which gives each neuron
    /// its bias. Scores are in standard deviations of what the rank leaves out, the threshold is 0.
    ///
    /// # Errors
    /// [`Error::Rank`] if `rank` is 0 or above [`max_rank`](Self::max_rank).
    pub fn weights(&self, rank: usize) -> Result<MlpWeights> {
        if rank == 0 || rank > self.max_rank() {
            return Err(Error::Rank { max: self.max_rank(), found: rank });
        }
        let (kept, all) = (rank - 1, self.max_rank() - 1);
        let mut fc1 = self.fc1[..kept * self.d_model].to_vec();
        fc1.resize(rank * self.d_model, 0.0);
        let mut fc2 = Vec::with_capacity(self.n_neurons * rank);
        let rows = self.fc2.chunks_exact(all.max(1));
        // a gate of no factors has no rows of them either
        let rows = rows.chain(std::iter::repeat(&[][..])).take(self.n_neurons);
        let mut squares = 0.0;
        for (row, bias) in rows.zip(&self.bias) {
            let row = &row[..kept.min(row.len())];
            let left_out = (1.0 - dot(row, row)).max(LEAST_LEFT_OUT * LEAST_LEFT_OUT).sqrt();
            fc2.extend(row.iter().map(|value| value / left_out));
            fc2.push(bias / left_out);
            squares += (bias / left_out).powi(2);
        }
        // as loud as the others, since few bits are shared with them
        let typical = fc2.iter().map(|value| value * value).sum::<f32>() - squares;
        let typical = (typical / (self.n_neurons * kept.max(1)).max(1) as f32).sqrt();
        let own = (squares / self.n_neurons.max(1) as f32).sqrt();
        let scale = if own > 0.0 && typical > 0.0 { own / typical } else { 1.0 };
        for row in fc2.chunks_exact_mut(rank) {
            row[kept] /= scale;
        }
        let mut bias = vec![0.0; rank];
        bias[kept] = scale;
        let form = MlpForm::LOW_RANK;
        Ok(MlpWeights { form, fc1, bias: Some(bias), fc2, rank, threshold: 0.0 })
    }
}

/// The first eigenvectors of `gate · moment · gateᵀ` as two layers.
fn factors(
    gate: &[f32],
    moment: &[f32],
    (n, d): (usize, usize),
    (rank, columns): (usize, usize),
    seed: u64,
) -> Result<(Vec<f32>, Vec<f32>)> {
    let mut random = Random::new(seed, 0);
    // a column of the block is a row here, so that it is contiguous
    let mut block: Vec<f32> = (0..columns * n).map(|_| random.normal()).collect();
    let gate = Dense::new(gate, n, d);
    let moment = Dense::new(moment, d, d);
    for _ in 0..ROUNDS {
        eigen::orthonormalise(&mut block, n);
        let inner = Dense::new(&block, columns, n).matmul(gate)?;
        let inner = Dense::new(&inner, columns, d).matmul(moment)?;
        block = Dense::new(&inner, columns, d).matmul(gate.t())?;
    }
    eigen::orthonormalise(&mut block, n);
    let inner = Dense::new(&block, columns, n).matmul(gate)?;
    let seen = Dense::new(&inner, columns, d).matmul(moment)?;
    let small = Dense::new(&seen, columns, d).matmul(Dense::new(&inner, columns, d).t())?;
    let (values, vectors) = eigen::symmetric(&small, columns);
    let vectors = Dense::new(&vectors[..rank * columns], rank, columns);
    let mut fc1 = vectors.matmul(Dense::new(&inner, columns, d))?;
    let mut fc2 = Dense::new(&block, columns, n).t().matmul(vectors.t())?;
    for (unit, value) in values.iter().take(rank).enumerate() {
        let deviation = value.max(1e-12).sqrt();
        fc1[unit * d..][..d].iter_mut().for_each(|value| *value /= deviation);
        fc2.iter_mut().skip(unit).step_by(rank).for_each(|value| *value *= deviation);
    }
    Ok((fc1, fc2))
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}
