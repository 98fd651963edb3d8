//! Which neurons a low-bit copy of the gate lets fire.

use std::sync::Arc;

use rayon::prelude::*;

use crate::activation::Activation;
use crate::cpu::low_bit::{GROUP_ROWS, LowBitKernels};
use crate::cpu::{RowKernels, rows};
use crate::error::OpError;
use crate::format::low_bit::LowBitFormat;
use crate::low_bit_matrix::{LowBitInput, LowBitMatrix};
use crate::mask::NeuronIds;
use crate::matrix::NeuronMatrix;

/// A low-bit copy of a gate, and where each neuron begins to fire.
///
/// A neuron is picked if its estimate exceeds what it must exceed to fire, less a margin. The
/// margin is counted in standard deviations of the estimate's error, `‖x‖ · ‖row − copy‖ / √d_model`,
/// so that it means the same for every neuron, token and number of bits.
///
/// # Examples
/// ```
/// use powerinfer_ops::{Activation, GateEstimate, LowBitFormat, NeuronMatrix, WeightFormat};
/// let gate = NeuronMatrix::from_f32(WeightFormat::F32, 2, 2, &[1., 1., -1., -1.])?;
/// let estimate = GateEstimate::new(LowBitFormat::Bits2, &gate, None, Activation::Relu)?;
/// let mut picks = Vec::new();
/// estimate.pick(&[3., 4.], 0.5, &mut picks);
/// assert_eq!(picks[0].as_slice(), &[0]);
/// # Ok::<(), powerinfer_ops::OpError>(())
/// ```
#[derive(Debug, Clone)]
pub struct GateEstimate {
    rows: LowBitMatrix,
    /// What a product must exceed, `[n_neurons]` and padded to whole groups.
    cuts: Arc<[f32]>,
    /// Standard deviation of a product's error for an input of norm 1, likewise.
    deviations: Arc<[f32]>,
}

impl GateEstimate {
    /// The estimate of a gate `[n_neurons, d_model]` with its bias. Runs on the current pool.
    ///
    /// # Errors
    /// [`OpError::NotSparse`] if nothing is zero under `activation`, [`OpError::Shape`] if the bias
    /// has another length, [`OpError::TooLarge`], [`OpError::Allocation`].
    pub fn new(
        format: LowBitFormat,
        gate: &NeuronMatrix,
        bias: Option<&[f32]>,
        activation: Activation,
    ) -> Result<Self, OpError> {
        let threshold = match activation {
            Activation::Relu => 0.0,
            Activation::FatRelu { threshold } => threshold,
            _ => return Err(OpError::NotSparse { activation: activation.name() }),
        };
        let n_neurons = gate.n_neurons();
        if let Some(bias) = bias.filter(|bias| bias.len() != n_neurons) {
            let (expected, found) = (vec![n_neurons], vec![bias.len()]);
            return Err(OpError::Shape { op: "GateEstimate", what: "bias", expected, found });
        }
        let rows = LowBitMatrix::new(format, gate)?;
        let padded = n_neurons.next_multiple_of(GROUP_ROWS);
        let mut cuts = vec![threshold; padded];
        for (cut, bias) in cuts.iter_mut().zip(bias.unwrap_or_default()) {
            *cut -= bias;
        }
        let root = (gate.d_model().max(1) as f32).sqrt();
        let mut deviations: Vec<f32> = rows.errors().iter().map(|error| error / root).collect();
        deviations.resize(padded, 0.0);
        Ok(Self { rows, cuts: cuts.into(), deviations: deviations.into() })
    }

    /// The low-bit copy.
    #[must_use]
    pub fn rows(&self) -> &LowBitMatrix {
        &self.rows
    }

    /// The estimate of some of the neurons, copied: it picks exactly those of them that this one
    /// picks.
    ///
    /// # Errors
    /// [`OpError::IdOutOfRange`] if an id is beyond the rows, [`OpError::Allocation`].
    pub fn pick_rows(&self, ids: &NeuronIds) -> Result<Self, OpError> {
        let rows = self.rows.pick_rows(ids)?;
        let padded = ids.len().next_multiple_of(GROUP_ROWS);
        let pick = |values: &[f32]| {
            let mut picked: Vec<f32> =
                ids.as_slice().iter().map(|&id| values[id as usize]).collect();
            picked.resize(padded, 0.0);
            picked.into()
        };
        Ok(Self { rows, cuts: pick(&self.cuts), deviations: pick(&self.deviations) })
    }

    /// Bytes in memory, padding included.
    #[must_use]
    pub fn resident_bytes(&self) -> usize {
        let values = (self.cuts.len() + self.deviations.len()) * size_of::<f32>();
        self.rows.resident_bytes() + values
    }

    /// What the product of each neuron must exceed, `[n_neurons]`.
    #[must_use]
    pub fn cuts(&self) -> &[f32] {
        &self.cuts[..self.rows.n_rows()]
    }

    /// The standard deviation of each product's error for an input of norm 1, `[n_neurons]`.
    #[must_use]
    pub fn deviations(&self) -> &[f32] {
        &self.deviations[..self.rows.n_rows()]
    }

    /// Bytes that picking for a token reads.
    #[must_use]
    pub fn size_bytes(&self) -> usize {
        self.rows.size_bytes() + (self.cuts.len() + self.deviations.len()) * size_of::<f32>()
    }

    /// Replaces `picks` by one list of neurons a token of `x`, `[n_tokens, d_model]`. A neuron whose
    /// estimate is not a number is picked: its true gate will show it.
    ///
    /// # Panics
    /// If `x` does not hold whole tokens.
    pub fn pick(&self, x: &[f32], margin: f32, picks: &mut Vec<NeuronIds>) {
        let d_model = self.rows.n_columns();
        assert!(x.len().is_multiple_of(d_model.max(1)), "whole tokens");
        let inputs: Vec<LowBitInput> = x
            .chunks_exact(d_model.max(1))
            .map(|x| {
                let mut input = LowBitInput::default();
                input.round(RowKernels::best(), x);
                input
            })
            .collect();
        picks.resize_with(inputs.len(), NeuronIds::new);
        picks.iter_mut().for_each(NeuronIds::clear);
        let n_groups = self.rows.n_rows().div_ceil(GROUP_ROWS);
        let mut bits = vec![0u16; n_groups * inputs.len()];
        let n_tasks = rows::n_tasks(self.size_bytes() * inputs.len());
        let kernels = LowBitKernels::best();
        let groups_per_task = n_groups.div_ceil(n_tasks.max(1)).max(1);
        let task = |(at, bits): (usize, &mut [u16])| {
            for (group, bits) in bits.chunks_exact_mut(inputs.len().max(1)).enumerate() {
                for (bits, input) in bits.iter_mut().zip(&inputs) {
                    *bits = self.group(kernels, at * groups_per_task + group, input, margin);
                }
            }
        };
        let tasks = bits.par_chunks_mut((groups_per_task * inputs.len()).max(1)).enumerate();
        tasks.for_each(task);
        for (group, bits) in bits.chunks_exact(inputs.len().max(1)).enumerate() {
            for (ids, &bits) in picks.iter_mut().zip(bits) {
                for_each_bit(bits, |r| ids.push((group * GROUP_ROWS) as u32 + r));
            }
        }
    }

    /// The neurons of the groups `groups` that are picked, into `ids`; returns how many.
    pub(crate) fn pick_groups(
        &self,
        kernels: LowBitKernels,
        groups: std::ops::Range<usize>,
        (input, margin): (&LowBitInput, f32),
        ids: &mut [u32],
    ) -> usize {
        let mut n = 0;
        for group in groups {
            for_each_bit(self.group(kernels, group, input, margin), |r| {
                ids[n] = (group * GROUP_ROWS) as u32 + r;
                n += 1;
            });
        }
        n
    }

    /// A bit for each neuron of a group.
    fn group(&self, kernels: LowBitKernels, group: usize, input: &LowBitInput, margin: f32) -> u16 {
        let products = self.rows.estimate_group(kernels, group, input);
        let reach = margin * input.norm;
        let first = group * GROUP_ROWS;
        let n_rows = (self.rows.n_rows() - first).min(GROUP_ROWS);
        let (cuts, deviations) = (&self.cuts[first..], &self.deviations[first..]);
        let mut bits = 0;
        for (r, product) in products.iter().enumerate().take(n_rows) {
            // not `>`: what is not a number is picked
            let stays = product + reach * deviations[r] <= cuts[r];
            bits |= u16::from(!stays) << r;
        }
        bits
    }
}

fn for_each_bit(mut bits: u16, mut with: impl FnMut(u32)) {
    while bits != 0 {
        with(bits.trailing_zeros());
        bits &= bits - 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::WeightFormat;
    use testing::Seeded;

    fn gate(n: usize, d: usize) -> NeuronMatrix {
        let values = Seeded::new(1).normal(n * d);
        NeuronMatrix::from_f32(WeightFormat::F32, n, d, &values).unwrap()
    }

    #[test]
    fn picks_are_the_rows_whose_estimate_exceeds_the_cut_less_the_margin() {
        let (n, d, n_tokens) = (75, 70, 3);
        let gate = gate(n, d);
        let mut random = Seeded::new(2);
        let (bias, x) = (random.normal(n), random.normal(n_tokens * d));
        for format in LowBitFormat::ALL {
            let estimate = GateEstimate::new(
                format,
                &gate,
                Some(&bias),
                Activation::FatRelu { threshold: 0.5 },
            )
            .unwrap();
            for margin in [-1.0, 0.0, 0.7] {
                let mut picks = vec![NeuronIds::all(9); 7];
                estimate.pick(&x, margin, &mut picks);
                assert_eq!(picks.len(), n_tokens);
                for (picks, x) in picks.iter().zip(x.chunks_exact(d)) {
                    let mut products = vec![0.0; n];
                    estimate.rows().estimate(x, &mut products);
                    let norm = x.iter().map(|x| x * x).sum::<f32>().sqrt();
                    let expected: Vec<u32> = (0..n)
                        .filter(|&i| {
                            let error = estimate.rows().errors()[i] / (d as f32).sqrt();
                            products[i] + margin * norm * error > 0.5 - bias[i]
                        })
                        .map(|i| i as u32)
                        .collect();
                    assert_eq!(picks.as_slice(), expected, "{format} {margin}");
                }
            }
        }
    }

    #[test]
    fn a_part_of_the_rows_picks_its_part_of_the_neurons() {
        let (n, d, n_tokens) = (75, 70, 4);
        let x = Seeded::new(2).normal(n_tokens * d);
        let bias = Seeded::new(4).normal(n);
        for (format, share) in LowBitFormat::ALL.into_iter().zip([0.3, 0.5, 0.9]) {
            let gate = gate(n, d);
            let whole = GateEstimate::new(format, &gate, Some(&bias), Activation::Relu).unwrap();
            let ids = NeuronIds::from_sorted(Seeded::new(3).ids(n, share)).unwrap();
            let part = whole.pick_rows(&ids).unwrap();
            let (mut all, mut some) = (Vec::new(), Vec::new());
            whole.pick(&x, 0.5, &mut all);
            part.pick(&x, 0.5, &mut some);
            let restricted: Vec<NeuronIds> = all.iter().map(|all| all.restrict(&ids)).collect();
            assert_eq!(some, restricted, "{format}");
            assert!(part.resident_bytes() >= part.size_bytes());
        }
        let whole =
            GateEstimate::new(LowBitFormat::Bits2, &gate(n, d), None, Activation::Relu).unwrap();
        let beyond = NeuronIds::from_sorted(vec![75]).unwrap();
        assert!(matches!(whole.pick_rows(&beyond), Err(OpError::IdOutOfRange { id: 75, .. })));
    }

    #[test]
    fn what_is_not_a_number_is_picked() {
        let estimate =
            GateEstimate::new(LowBitFormat::Bits2, &gate(20, 40), None, Activation::Relu).unwrap();
        let mut picks = Vec::new();
        estimate.pick(&[f32::NAN; 40], 0.0, &mut picks);
        assert_eq!(picks[0], NeuronIds::all(20));
    }

    #[test]
    fn a_gate_that_is_never_zero_and_a_bias_of_another_length_are_refused() {
        let new = |bias: Option<&[f32]>, activation| {
            GateEstimate::new(LowBitFormat::Bits4, &gate(3, 32), bias, activation)
        };
        assert!(matches!(new(None, Activation::Silu), Err(OpError::NotSparse { .. })));
        assert!(matches!(new(Some(&[0.0; 2]), Activation::Relu), Err(OpError::Shape { .. })));
    }
}
