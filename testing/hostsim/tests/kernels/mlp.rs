//! The two layers of a trained predictor: `mlp_steps.rs`.

use hostsim::mlp_steps::{DeviceMlp, mlp_picks};
use hostsim::{HostBuffer, HostQueue};
use powerinfer_ops::{Activation, NeuronMatrix, WeightFormat};
use testing::Seeded;

use crate::device::{ORDERS, Tokens, Weights};

/// Small whole numbers, whose sums are the same in every order.
fn whole_numbers(n: usize, seed: u64) -> Vec<f32> {
    let mut random = Seeded::new(seed);
    (0..n).map(|_| random.below(7) as f32 - 3.0).collect()
}

/// Fails unless exactly the neurons are picked whose score reaches the threshold, which the score of one
/// is; of the last token, which is no number, all.
pub(crate) fn check(
    queue: &HostQueue,
    format: WeightFormat,
    [n, rank, d, n_tokens]: [usize; 4],
    picks_from: f64,
) -> Result<(), String> {
    let weights = |n: usize, d: usize, seed| {
        let values = whole_numbers(n * d, seed);
        Weights::of(NeuronMatrix::from_f32(format, n, d, &values).unwrap())
    };
    let (first, rows, bias) = (weights(rank, d, 1), weights(n, rank, 2), whole_numbers(rank, 3));
    let mut values = whole_numbers(n_tokens * d, 4);
    values[(n_tokens - 1) * d] = f32::NAN;
    let (x, hidden) = (Tokens::of(values, n_tokens, d), Tokens::random(n_tokens, rank, 5));
    let dot = |w: &[f32], x: &[f32]| -> f32 { w.iter().zip(x).map(|(w, x)| w * x).sum() };
    let score = |t: usize, row: usize| -> f32 {
        let between = |r: usize| Activation::Relu.apply(dot(&first.row(r), x.token(t)) + bias[r]);
        let hidden: Vec<f32> = (0..rank).map(between).collect();
        dot(&rows.row(row), &hidden)
    };
    let mut scores: Vec<f32> = (0..n).map(|row| score(0, row)).collect();
    scores.sort_by(f32::total_cmp);
    let threshold = scores[((n - 1) as f64 * picks_from) as usize];
    let biases = HostBuffer::of_f32(&bias);
    let mlp = DeviceMlp {
        first: first.rows(),
        bias: biases.address(),
        activation: Some(Activation::Relu),
        rows: rows.rows(),
        threshold,
    };
    let picks = HostBuffer::new(n_tokens * n * 4);
    mlp_picks(queue, &mlp, [&x.input(), &hidden.input()], picks.address())
        .map_err(|error| error.to_string())?;
    if picks.is_overrun() || hidden.buffers.iter().any(HostBuffer::is_overrun) {
        return Err("written beyond a buffer".to_owned());
    }
    for (at, pick) in picks.to_f32().into_iter().enumerate() {
        let score = score(at / n, at % n);
        let expected = score >= threshold || score.is_nan();
        if pick != if expected { 1.0 } else { 0.0 } {
            return Err(format!("place {at}: {pick} of score {score}, threshold {threshold}"));
        }
    }
    Ok(())
}

#[test]
fn a_score_that_reaches_the_threshold_picks_and_so_does_one_that_is_no_number() {
    for format in [WeightFormat::F32, WeightFormat::F16, WeightFormat::BF16] {
        for shape in [[1, 1, 1, 1], [33, 5, 31, 2], [70, 17, 40, 5], [9, 130, 257, 3]] {
            for picks_from in [0.0, 0.5, 1.0] {
                for order in ORDERS {
                    check(&HostQueue::new(order), format, shape, picks_from).unwrap();
                }
            }
        }
    }
}
