//! Rotary position embedding.

use candle_core::{Device, Tensor};
use powerinfer_core::{Result, RopeScaling, RotaryConfig};

/// Frequencies of a rotary embedding (Su et al., "RoFormer"): in each head the values `i` and
/// `i + d_head / 2` turn by `position · frequency[i]`.
#[derive(Debug, Clone)]
pub struct Rotary {
    frequencies: Vec<f32>,
}

/// Cosines and sines of some positions, each `[n_tokens, 1, d_head / 2]`.
#[derive(Debug, Clone)]
pub struct RotaryTable {
    cos: Tensor,
    sin: Tensor,
}

impl Rotary {
    /// The frequencies of heads of `d_head` values. Positions are unlimited: tables are computed
    /// for the tokens of a pass, none for a whole context.
    #[must_use]
    pub fn new(config: &RotaryConfig, d_head: usize) -> Self {
        let frequency = |i: usize| {
            let plain = config.theta.powf(-(2.0 * i as f64) / d_head as f64);
            match &config.scaling {
                RopeScaling::Factors { divisors } => {
                    (plain / divisors.get(i).map_or(1.0, |&divisor| f64::from(divisor))) as f32
                }
                scaling => scaled(plain, scaling) as f32,
            }
        };
        Self { frequencies: (0..d_head / 2).map(frequency).collect() }
    }

    /// The table of the positions `first .. first + n_tokens`.
    ///
    /// # Errors
    /// [`Error::Candle`](powerinfer_core::Error::Candle) if candle cannot hold it.
    pub fn table(&self, first: usize, n_tokens: usize) -> Result<RotaryTable> {
        let half = self.frequencies.len();
        let (mut cos, mut sin) = (Vec::new(), Vec::new());
        for position in first..first + n_tokens {
            for frequency in &self.frequencies {
                // the angle is rounded to f32, as the models were trained
                let (s, c) = f64::from(position as f32 * frequency).sin_cos();
                cos.push(c as f32);
                sin.push(s as f32);
            }
        }
        let tensor = |values| Tensor::from_vec(values, (n_tokens, 1, half), &Device::Cpu);
        Ok(RotaryTable { cos: tensor(cos)?, sin: tensor(sin)? })
    }
}

impl RotaryTable {
    /// Lends cosines and sines, `[n_tokens, d_head / 2]` each.
    pub(crate) fn with_angles<R>(&self, work: impl FnOnce([&[f32]; 2]) -> Result<R>) -> Result<R> {
        powerinfer_ops::with_f32(&self.cos, |cos| {
            powerinfer_ops::with_f32(&self.sin, |sin| work([cos, sin]))
        })
    }

    /// Turns the heads of `x` `[n_tokens, n_heads · d_head]`.
    ///
    /// # Errors
    /// [`Error::Candle`](powerinfer_core::Error::Candle) if `x` has another number of tokens or
    /// no whole number of heads.
    pub fn apply(&self, x: &Tensor) -> Result<Tensor> {
        let (n_tokens, width) = x.dims2()?;
        let d_head = self.cos.dim(2)? * 2;
        let heads = x.reshape((n_tokens, 1, width / d_head, d_head))?;
        let turned = candle_nn::rotary_emb::rope_thd(&heads, &self.cos, &self.sin)?;
        Ok(turned.reshape((n_tokens, width))?)
    }
}

/// By what each frequency of heads of `d_head` values is divided; `None` where that does not differ
/// from one frequency to another.
pub(crate) fn divisors(scaling: &RopeScaling, theta: f64, d_head: usize) -> Option<Vec<f32>> {
    match scaling {
        RopeScaling::Factors { divisors } => Some(divisors.clone()),
        RopeScaling::Llama3 { .. } => {
            let divisor = |i: usize| {
                let plain = theta.powf(-(2.0 * i as f64) / d_head as f64);
                (plain / scaled(plain, scaling)) as f32
            };
            Some((0..d_head / 2).map(divisor).collect())
        }
        _ => None,
    }
}

/// A frequency changed for contexts longer than the model was trained on.
fn scaled(frequency: f64, scaling: &RopeScaling) -> f64 {
    match *scaling {
        RopeScaling::Linear { factor } => frequency / factor,
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_context } => {
            // Full turns within the original context: many are kept, few are slowed by `factor`,
            // and between the two thresholds the change is gradual.
            let turns = original_max_context as f64 * frequency / std::f64::consts::TAU;
            let keep = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor);
            let keep = keep.clamp(0.0, 1.0);
            keep * frequency + (1.0 - keep) * frequency / factor
        }
        _ => frequency,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rotary(scaling: RopeScaling) -> Rotary {
        Rotary::new(&RotaryConfig { theta: 10_000.0, scaling }, 16)
    }

    #[test]
    fn linear_scaling_divides_positions() {
        let (plain, scaled) =
            (rotary(RopeScaling::None), rotary(RopeScaling::Linear { factor: 4.0 }));
        for (plain, scaled) in plain.frequencies.iter().zip(&scaled.frequencies) {
            assert_eq!(plain / 4.0, *scaled);
        }
    }

    #[test]
    fn llama3_scaling_keeps_fast_and_slows_slow_frequencies() {
        let plain = rotary(RopeScaling::None).frequencies;
        let scaled = rotary(RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_context: 64,
        })
        .frequencies;
        assert_eq!(plain[0], scaled[0]);
        assert_eq!(plain[7] / 8.0, scaled[7]);
        assert!(scaled.iter().zip(&plain).any(|(s, p)| *s < *p * 0.99 && *s > *p / 7.9));
    }

    #[test]
    fn turning_keeps_lengths_and_position_zero_changes_nothing() {
        let x: Vec<f32> = (0..2 * 48).map(|i| (i as f32).sin()).collect();
        let x = Tensor::from_vec(x, (2, 48), &Device::Cpu).unwrap();
        let turned = rotary(RopeScaling::None).table(0, 2).unwrap().apply(&x).unwrap();
        let (x, turned) = (x.to_vec2::<f32>().unwrap(), turned.to_vec2::<f32>().unwrap());
        assert_eq!(x[0], turned[0]);
        assert_ne!(x[1], turned[1]);
        for (a, b) in x[1].chunks(16).zip(turned[1].chunks(16)) {
            let norm = |v: &[f32]| v.iter().map(|v| v * v).sum::<f32>();
            assert!((norm(a) - norm(b)).abs() < 1e-5);
        }
    }
}
