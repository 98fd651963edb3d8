//! Fitting one layer's predictor.
//!
//! The loss of a token and neuron is the logistic one: `−ln σ(s)` times a weight for a neuron that fires
//! and `−ln(1 − σ(s))` for one that does not. The weight is [`FIRING`] for firing at all plus
//! [`MASS`] times the activation's share of the mean one: one neuron in ten fires, so the weight
//! also balances the classes, and missing a loud one costs more than missing a faint one.
//!
//! Forward and backward pass are written out, four products of matrices and a loop: candle's own
//! backward pass makes a tensor of every step between, in threads of its own, and its AdamW does not
//! let its moments out, so that no checkpoint could be exact.

use super::FfnSamples;
use crate::dense::Dense;
use crate::error::{Error, Result};
use crate::mlp::{MlpHidden, MlpWeights};
use crate::random::Random;

/// What a firing neuron weighs, and what it weighs per mean activation beside.
const FIRING: f32 = 0.25;
const MASS: f32 = 2.0;
/// AdamW's: the shares of the past in the means of gradients and of their squares, and what keeps from
/// dividing by zero.
const BETAS: [f64; 2] = [0.9, 0.98];
const EPSILON: f32 = 1e-8;
/// Steps in which the rate grows to its full height.
const WARM_UP: u64 = 50;

/// How a layer is fitted.
///
/// # Examples
/// ```
/// use powerinfer_predictor::FitOptions;
/// let options = FitOptions { seed: 3, ..FitOptions::default() };
/// assert_eq!(options.batch, FitOptions::default().batch);
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FitOptions {
    /// The height of the learning rate, which falls to zero towards the last step: what a weight moves in
    /// a step, as a share of the mean one.
    pub rate: f32,
    /// What a weight loses in a step, times the rate.
    pub decay: f32,
    /// Tokens of a step.
    pub batch: usize,
    /// Steps that are planned.
    pub n_steps: u64,
    /// Decides the order of tokens.
    pub seed: u64,
}

impl Default for FitOptions {
    fn default() -> Self {
        Self { rate: 0.02, decay: 0.0, batch: 512, n_steps: 1000, seed: 0 }
    }
}

/// A layer's predictor while it is fitted.
///
/// # Examples
/// ```
/// use powerinfer_predictor::{FfnSamples, FitOptions, LayerFit, MlpForm, MlpWeights};
/// let weights = MlpWeights {
///     form: MlpForm::LOW_RANK,
///     fc1: vec![0.1, 0.2],
///     bias: None,
///     fc2: vec![0.3, -0.1],
///     rank: 1,
///     threshold: 0.0,
/// };
/// let mut samples = FfnSamples::new(2, 2, 4);
/// samples.push(&[1., 0., 0., 1., -1., 0., 0., -1.], &[1., 0., 1., 0., 0., 1., 0., 1.])?;
/// let mut fit = LayerFit::new(weights, FitOptions { batch: 4, ..FitOptions::default() })?;
/// let first = fit.learn(&samples)?;
/// for _ in 0..100 {
///     fit.learn(&samples)?;
/// }
/// assert!(fit.learn(&samples)? < first);
/// # Ok::<(), powerinfer_predictor::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct LayerFit {
    weights: MlpWeights,
    options: FitOptions,
    n_steps: u64,
    /// Means of the gradients and of their squares, of `fc1`, the bias and `fc2`.
    moments: [Moments; 3],
    /// How loud the values of each were at the beginning: what the rate is in units of, so that it
    /// fits inputs of any scale.
    scales: [f32; 3],
}

#[derive(Debug, Clone, Default, PartialEq)]
struct Moments {
    first: Vec<f32>,
    second: Vec<f32>,
}

impl Moments {
    fn new(len: usize) -> Self {
        Self { first: vec![0.0; len], second: vec![0.0; len] }
    }
}

impl LayerFit {
    /// Begins with these weights. Their bias is fitted where there is one.
    ///
    /// # Errors
    /// As [`MlpWeights::check`].
    pub fn new(weights: MlpWeights, options: FitOptions) -> Result<Self> {
        weights.check()?;
        let n_biases = weights.bias.as_ref().map_or(0, Vec::len);
        let moments = [weights.fc1.len(), n_biases, weights.fc2.len()].map(Moments::new);
        let bias = weights.bias.as_deref().unwrap_or(&[]);
        let scales = [&weights.fc1[..], bias, &weights.fc2].map(loudness);
        Ok(Self { weights, options, n_steps: 0, moments, scales })
    }

    /// The weights as they are.
    #[must_use]
    pub fn weights(&self) -> &MlpWeights {
        &self.weights
    }

    /// Steps that were made.
    #[must_use]
    pub fn n_steps(&self) -> u64 {
        self.n_steps
    }

    /// Everything that a later step depends on, by name: weights and moments.
    #[must_use]
    pub fn state(&self) -> Vec<(&'static str, &[f32])> {
        let weights = &self.weights;
        let [fc1, bias, fc2] = &self.moments;
        vec![
            ("fc1.weight", weights.fc1.as_slice()),
            ("fc1.weight.first", &fc1.first),
            ("fc1.weight.second", &fc1.second),
            ("fc1.bias", weights.bias.as_deref().unwrap_or(&[])),
            ("fc1.bias.first", &bias.first),
            ("fc1.bias.second", &bias.second),
            ("fc2.weight", &weights.fc2),
            ("fc2.weight.first", &fc2.first),
            ("fc2.weight.second", &fc2.second),
        ]
    }

    /// Goes on from a [`state`](Self::state) after `n_steps` steps; `read` gives the values of a name.
    ///
    /// # Errors
    /// Whatever `read` fails with; [`Error::NotFinite`].
    pub fn restore<E: From<Error>>(
        &mut self,
        n_steps: u64,
        mut read: impl FnMut(&'static str, &mut [f32]) -> std::result::Result<(), E>,
    ) -> std::result::Result<(), E> {
        let weights = &mut self.weights;
        let [fc1, bias, fc2] = &mut self.moments;
        let parts: [(&'static str, &mut [f32]); 9] = [
            ("fc1.weight", &mut weights.fc1),
            ("fc1.weight.first", &mut fc1.first),
            ("fc1.weight.second", &mut fc1.second),
            ("fc1.bias", weights.bias.as_deref_mut().unwrap_or(&mut [])),
            ("fc1.bias.first", &mut bias.first),
            ("fc1.bias.second", &mut bias.second),
            ("fc2.weight", &mut weights.fc2),
            ("fc2.weight.first", &mut fc2.first),
            ("fc2.weight.second", &mut fc2.second),
        ];
        for (name, values) in parts {
            if !values.is_empty() {
                read(name, values)?;
            }
            if let Some(row) = values.iter().position(|value| !value.is_finite()) {
                return Err(Error::NotFinite { what: name, row }.into());
            }
        }
        self.n_steps = n_steps;
        Ok(())
    }

    /// One pass over the samples in an order that the seed and the number of steps decide; returns the
    /// mean loss of a neuron. Tokens that are no whole batch are left out, unless there is none.
    /// Runs on the current pool.
    ///
    /// # Errors
    /// [`Error::NotFinite`] if the loss is not a number; [`Error::Op`] if the samples are those of
    /// another layer; [`Error::NoSamples`] if there are none.
    pub fn learn(&mut self, samples: &FfnSamples) -> Result<f64> {
        let d_model = samples.d_model();
        let batch = self.options.batch.min(samples.n_tokens());
        if batch == 0 {
            return Err(Error::NoSamples);
        }
        let order = Random::new(self.options.seed, self.n_steps).order(samples.n_tokens());
        let mean = samples.mean_magnitude();
        let (mut loss, mut n_batches) = (0.0, 0.0);
        let mut inputs = Vec::with_capacity(batch * d_model);
        for tokens in order.chunks_exact(batch) {
            inputs.clear();
            for &token in tokens {
                inputs.extend_from_slice(&samples.inputs()[token * d_model..][..d_model]);
            }
            loss += self.step(&inputs, tokens, samples, mean)?;
            n_batches += 1.0;
        }
        Ok(loss / n_batches)
    }

    /// One step over the tokens of a batch; returns the loss before it.
    fn step(
        &mut self,
        inputs: &[f32],
        tokens: &[usize],
        samples: &FfnSamples,
        mean: f32,
    ) -> Result<f64> {
        let weights = &self.weights;
        let (d, n, rank, batch) =
            (weights.d_model(), weights.n_neurons(), weights.rank, tokens.len());
        let x = Dense::new(inputs, batch, d);
        let hidden = hide(weights, inputs)?;
        let h = Dense::new(&hidden, batch, rank);
        let fc2 = Dense::new(&weights.fc2, n, rank);
        let mut slopes = h.matmul(fc2.t())?;
        let mut loss = 0.0;
        let scale = 1.0 / (batch as f32 * (n as f32).sqrt());
        for (scores, &token) in slopes.chunks_exact_mut(n.max(1)).zip(tokens) {
            let (ids, magnitudes) = samples.fired(token);
            loss += slopes_of_token(scores, ids, magnitudes, mean, scale);
        }
        if !loss.is_finite() {
            return Err(Error::NotFinite { what: "loss", row: 0 });
        }
        let s = Dense::new(&slopes, batch, n);
        let to_fc2 = s.t().matmul(h)?;
        let mut to_hidden = s.matmul(fc2)?;
        if weights.form.hidden == MlpHidden::Relu {
            for (slope, hidden) in to_hidden.iter_mut().zip(&hidden) {
                if *hidden <= 0.0 {
                    *slope = 0.0;
                }
            }
        }
        let to_fc1 = Dense::new(&to_hidden, batch, rank).t().matmul(x)?;
        let mut to_bias = vec![0.0; weights.bias.as_ref().map_or(0, Vec::len)];
        for slopes in to_hidden.chunks_exact(rank) {
            to_bias.iter_mut().zip(slopes).for_each(|(sum, slope)| *sum += slope);
        }
        self.adjust([&to_fc1, &to_bias, &to_fc2]);
        Ok(loss / (batch * n) as f64)
    }

    /// AdamW's step along the gradients.
    fn adjust(&mut self, gradients: [&[f32]; 3]) {
        self.n_steps += 1;
        let step = self.n_steps;
        let FitOptions { rate, decay, n_steps, .. } = self.options;
        let left = 1.0 - step as f32 / (n_steps + 1) as f32;
        let rate = rate * (step as f32 / WARM_UP as f32).min(1.0) * left.max(0.0);
        // powers by multiplication: platforms round `powf` differently
        let correction = BETAS.map(|beta| {
            let power = i32::try_from(step).unwrap_or(i32::MAX);
            (1.0 - beta.powi(power)) as f32
        });
        let bias = self.weights.bias.as_deref_mut().unwrap_or(&mut []);
        let parts = [&mut self.weights.fc1[..], bias, &mut self.weights.fc2];
        let [b1, b2] = BETAS.map(|beta| beta as f32);
        let decay_rate = rate * decay;
        let rates = self.scales.map(|scale| rate * scale);
        let parts = parts.into_iter().zip(gradients).zip(&mut self.moments).zip(rates);
        for (((values, gradients), moments), rate) in parts {
            let moments = moments.first.iter_mut().zip(&mut moments.second);
            for ((value, gradient), (first, second)) in
                values.iter_mut().zip(gradients).zip(moments)
            {
                *first = b1 * *first + (1.0 - b1) * gradient;
                *second = b2 * *second + (1.0 - b2) * gradient * gradient;
                let (mean, square) = (*first / correction[0], *second / correction[1]);
                *value -= rate * mean / (square.sqrt() + EPSILON) + decay_rate * *value;
            }
        }
    }
}

/// The root of the mean square; 1 of nothing or of zeros.
fn loudness(values: &[f32]) -> f32 {
    let squares: f64 = values.iter().map(|&x| f64::from(x) * f64::from(x)).sum();
    let loudness = (squares / values.len().max(1) as f64).sqrt() as f32;
    if loudness > 0.0 { loudness } else { 1.0 }
}

/// Replaces the scores of a token by the slopes of its loss; returns the loss.
fn slopes_of_token(
    scores: &mut [f32],
    ids: &[u32],
    magnitudes: &[f32],
    mean: f32,
    scale: f32,
) -> f64 {
    // first as if no neuron fired: the loop has no branch and the compiler makes vectors of it
    let mut loss = 0.0f32;
    let fired: Vec<f32> = ids.iter().map(|&id| scores[id as usize]).collect();
    for score in scores.iter_mut() {
        let (sigmoid, minus_log) = logistic(*score);
        loss += minus_log;
        *score = scale * sigmoid;
    }
    let mut loss = f64::from(loss);
    for ((&id, &magnitude), &score) in ids.iter().zip(magnitudes).zip(&fired) {
        let weight = FIRING + MASS * magnitude / mean;
        let (sigmoid, minus_log) = logistic(score);
        // −ln σ(s) = −ln(1 − σ(s)) − s
        loss += f64::from(weight * (minus_log - score) - minus_log);
        scores[id as usize] = scale * weight * (sigmoid - 1.0);
    }
    loss
}

/// `σ(s)` and `−ln(1 − σ(s))`.
fn logistic(score: f32) -> (f32, f32) {
    let small = exp(-score.abs());
    let inverse = 1.0 / (1.0 + small);
    let sigmoid = if score >= 0.0 { inverse } else { small * inverse };
    (sigmoid, score.max(0.0) + ln_1p(small))
}

/// `e^x` for `x` from −87 to 0 within some units of the last place, in plain arithmetic: vectors can be
/// made of it, and no platform has another.
fn exp(x: f32) -> f32 {
    let x = x.max(-87.0);
    let power = (x * std::f32::consts::LOG2_E).round();
    // ln 2 in two parts
    let rest = (x - power * 0.693_359_4) + power * 2.121_944_4e-4;
    let series = 1.0
        + rest
            * (1.0
                + rest
                    * (0.5
                        + rest
                            * (0.166_666_67
                                + rest
                                    * (0.041_666_67
                                        + rest * (0.008_333_334 + rest * 0.001_388_889)))));
    series * f32::from_bits(((power as i32 + 127) << 23) as u32)
}

/// `ln(1 + x)` for `x` from 0 to 1 within 1e-5: only the loss that is reported needs it.
fn ln_1p(x: f32) -> f32 {
    x * (0.999_495_56
        + x * (-0.491_908_96 + x * (0.289_474_8 + x * (-0.136_062_75 + x * 0.032_158_45))))
}

/// What the second layer reads, `[n_tokens, rank]`.
fn hide(weights: &MlpWeights, inputs: &[f32]) -> Result<Vec<f32>> {
    let (d, rank) = (weights.d_model(), weights.rank);
    let n_tokens = inputs.len() / d.max(1);
    let mut hidden =
        Dense::new(inputs, n_tokens, d).matmul(Dense::new(&weights.fc1, rank, d).t())?;
    if let Some(bias) = &weights.bias {
        for hidden in hidden.chunks_exact_mut(rank.max(1)) {
            hidden.iter_mut().zip(bias).for_each(|(value, bias)| *value += bias);
        }
    }
    if weights.form.hidden == MlpHidden::Relu {
        hidden.iter_mut().filter(|value| **value < 0.0).for_each(|value| *value = 0.0);
    }
    Ok(hidden)
}

/// Scores of all neurons, `[n_tokens, n_neurons]`.
pub(super) fn scores(weights: &MlpWeights, inputs: &[f32]) -> Result<Vec<f32>> {
    let hidden = hide(weights, inputs)?;
    let n_tokens = inputs.len() / weights.d_model().max(1);
    let fc2 = Dense::new(&weights.fc2, weights.n_neurons(), weights.rank);
    Dense::new(&hidden, n_tokens, weights.rank).matmul(fc2.t())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slopes_are_those_of_the_loss() {
        let scores = [-30.0f32, -2.0, -0.1, 0.0, 0.7, 3.0, 25.0, 1.5];
        let (ids, magnitudes) = ([1, 4, 6], [0.5, 2.0, 1.0]);
        let loss = |scores: &[f32]| {
            let exact = |score: f64| (score.max(0.0)) + (-score.abs()).exp().ln_1p();
            let each = scores.iter().enumerate().map(|(id, &score)| {
                let score = f64::from(score);
                match ids.iter().position(|&own| own as usize == id) {
                    Some(at) => {
                        f64::from(FIRING + MASS * magnitudes[at] / 1.5) * (exact(score) - score)
                    }
                    None => exact(score),
                }
            });
            each.sum::<f64>()
        };
        let mut slopes = scores;
        let found = slopes_of_token(&mut slopes, &ids, &magnitudes, 1.5, 0.5);
        assert!((found - loss(&scores)).abs() < 1e-4, "{found} {}", loss(&scores));
        for (id, slope) in slopes.iter().enumerate() {
            let moved = |by: f32| {
                let mut scores = scores;
                scores[id] += by;
                loss(&scores)
            };
            let expected = 0.5 * (moved(1e-2) - moved(-1e-2)) / 2e-2;
            assert!((f64::from(*slope) - expected).abs() < 1e-4, "{id}: {slope} {expected}");
        }
    }

    #[test]
    fn the_exponential_is_that_of_the_library() {
        for i in 0..=8700 {
            let x = -0.01 * i as f32;
            let (found, expected) = (exp(x), x.exp());
            assert!((found - expected).abs() <= 1e-6 * expected, "{x}: {found} {expected}");
        }
        assert!(exp(f32::NEG_INFINITY) < 1e-37);
    }
}
