//! The two layers of a trained predictor: `mlp_steps.rs`.

use hostsim::mlp_steps::{DeviceMlp, mlp_picks};
use hostsim::queue::Address;
use hostsim::steps::quantize;
use hostsim::{HostBuffer, HostQueue};
use powerinfer_ops::{Activation, NeuronMatrix, WeightFormat};
use testing::Seeded;
use testing::tolerance::dot_bound;

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

/// How far rounding may lead a product of a row of `format` from its definition.
fn product_bound(format: WeightFormat, w: &[f32], x: &[f32]) -> f64 {
    let mut bound = f64::from(dot_bound(w, x));
    if matches!(format, WeightFormat::Q8_0 | WeightFormat::Q4_0) {
        // values are rounded to eight bits, 32 at a time
        for (w, x) in w.chunks(32).zip(x.chunks(32)) {
            let largest = x.iter().fold(0f32, |largest, x| largest.max(x.abs()));
            let of_rows: f32 = w.iter().map(|w| w.abs()).sum();
            bound += f64::from(largest) / 254.0 * f64::from(of_rows);
        }
    }
    1.0001 * bound
}

/// A pick differs from that of exact arithmetic only where the score is the threshold but for rounding.
#[test]
fn only_scores_at_the_threshold_may_fall_to_either_side() {
    use WeightFormat::{BF16, F16, F32, Q4_0, Q8_0};
    for (format, least_decided) in
        [(F32, 0.99), (F16, 0.99), (BF16, 0.99), (Q8_0, 0.6), (Q4_0, 0.6)]
    {
        let (mut n_decided, mut n_scores) = (0, 0);
        for seed in 0..6 {
            let [n, rank, d, n_tokens] = [[70, 32, 96, 3], [33, 64, 160, 1]][seed as usize % 2];
            let first = Weights::random(format, rank, d, seed);
            let rows = Weights::random(format, n, rank, seed + 100);
            let x = Tokens::random(n_tokens, d, seed + 200);
            let hidden = Tokens::random(n_tokens, rank, seed + 300);
            // scores, and how far off each may be
            let mut scores = Vec::new();
            for t in 0..n_tokens {
                let (mut between, mut errors, mut largest) = (Vec::new(), Vec::new(), Vec::new());
                for r in 0..rank {
                    let (w, x) = (first.row(r), x.token(t));
                    let product: f64 = w.iter().zip(x).map(|(w, x)| f64::from(w * x)).sum();
                    between.push(product.max(0.0) as f32);
                    errors.push(product_bound(format, &w, x));
                    largest.push(between[r] + errors[r] as f32);
                }
                for row in 0..n {
                    let w = rows.row(row);
                    let exact = w.iter().zip(&between).map(|(w, h)| f64::from(*w) * f64::from(*h));
                    let passed_on = w.iter().zip(&errors).map(|(w, e)| f64::from(w.abs()) * e);
                    let bound = passed_on.sum::<f64>() + product_bound(format, &w, &largest);
                    scores.push((exact.sum::<f64>(), bound));
                }
            }
            let mut sorted: Vec<f64> = scores.iter().map(|(score, _)| *score).collect();
            sorted.sort_by(f64::total_cmp);
            let threshold = sorted[scores.len() * 9 / 10] as f32;
            let mlp = DeviceMlp {
                first: first.rows(),
                bias: Address::NULL,
                activation: Some(Activation::Relu),
                rows: rows.rows(),
                threshold,
            };
            let picks = HostBuffer::new(n_tokens * n * 4);
            let queue = HostQueue::new(seed);
            let (x, hidden) = (x.input(), hidden.input());
            if first.rows().layout.takes_numbers() {
                quantize(&queue, &x, Address::NULL).unwrap();
            }
            mlp_picks(&queue, &mlp, [&x, &hidden], picks.address()).unwrap();
            for (pick, (score, bound)) in picks.to_f32().into_iter().zip(scores) {
                let above = score - f64::from(threshold);
                n_scores += 1;
                if above.abs() > bound {
                    n_decided += 1;
                    assert_eq!(pick == 1.0, above > 0.0, "{format} {score} {threshold} {bound}");
                }
            }
        }
        let decided = f64::from(n_decided) / f64::from(n_scores);
        assert!(decided >= least_decided, "{format}: the bound decides {decided}");
    }
}
