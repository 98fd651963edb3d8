use super::*;
use proptest::prelude::*;
use testing::Seeded;

fn sampler(sampling: Sampling) -> Sampler {
    Sampler::new(sampling).unwrap()
}

fn greedy(logits: &[f32]) -> Result<u32> {
    sampler(Sampling::default()).sample(&mut logits.to_vec(), &[])
}

/// How often each token comes in `n` draws.
fn counts(sampling: Sampling, logits: &[f32], n: usize) -> Vec<usize> {
    let mut sampler = sampler(sampling);
    let mut counts = vec![0; logits.len()];
    for _ in 0..n {
        counts[sampler.sample(&mut logits.to_vec(), &[]).unwrap() as usize] += 1;
    }
    counts
}

/// The tokens that come at all.
fn support(sampling: Sampling, logits: &[f32]) -> Vec<usize> {
    let counts = counts(sampling, logits, 2000);
    (0..counts.len()).filter(|id| counts[*id] > 0).collect()
}

fn hot() -> Sampling {
    Sampling::default().with_temperature(1.0)
}

#[test]
fn greedy_takes_the_largest_and_of_equal_ones_the_lowest_id() {
    assert_eq!(greedy(&[-1.0, 3.0, 2.0]).unwrap(), 1);
    assert_eq!(greedy(&[2.0, 5.0, 5.0, 5.0]).unwrap(), 1);
    assert_eq!(greedy(&[-0.0, 0.0]).unwrap(), 0);
    assert_eq!(greedy(&[f32::NEG_INFINITY, f32::MIN]).unwrap(), 1);
    assert_eq!(greedy(&[7.0]).unwrap(), 0);
}

#[test]
fn logits_that_are_not_finite_are_an_error_with_their_position() {
    let (nan, inf) = (f32::NAN, f32::INFINITY);
    for logits in
        [&[1.0, nan][..], &[nan, 1.0], &[1.0, inf], &[-inf, -inf], &[nan, nan], &[-nan, 0.0], &[]]
    {
        for sampling in [Sampling::default(), hot()] {
            let error = sampler(sampling).sample(&mut logits.to_vec(), &[0; 4]).unwrap_err();
            assert!(matches!(error, Error::NonFiniteLogits { position: 3, .. }), "{logits:?}");
        }
    }
}

#[test]
fn draws_follow_the_probabilities() {
    // chi-square with 4 degrees of freedom: above 18.5 in one of a thousand runs; the seed is fixed
    let logits = [0.0f32, 1.0, -1.0, 2.0, 0.5];
    for (temperature, seed) in [(1.0, 1), (0.5, 2), (2.0, 3)] {
        let sampling = hot().with_temperature(temperature).with_seed(seed);
        let n = 100_000;
        let counts = counts(sampling, &logits, n);
        let weights: Vec<f64> = logits.iter().map(|l| f64::from(l / temperature).exp()).collect();
        let total: f64 = weights.iter().sum();
        let chi_square: f64 = counts
            .iter()
            .zip(&weights)
            .map(|(count, weight)| {
                let expected = n as f64 * weight / total;
                (*count as f64 - expected).powi(2) / expected
            })
            .sum();
        assert!(chi_square < 18.5, "temperature {temperature}: {chi_square} {counts:?}");
    }
}

#[test]
fn the_sequence_of_a_seed_is_fixed_for_ever() {
    let mut sampler = sampler(hot().with_seed(42).with_top_p(0.95));
    let logits: Vec<f32> = (0..100).map(|i| ((i * 37 % 100) as f32).sqrt()).collect();
    let ids: Vec<u32> =
        (0..12).map(|_| sampler.sample(&mut logits.clone(), &[]).unwrap()).collect();
    assert_eq!(ids, [81, 32, 97, 70, 80, 56, 13, 59, 24, 91, 54, 83]);
}

#[test]
fn top_k_keeps_the_k_largest_and_of_equal_ones_the_lower_ids() {
    let logits = [1.0, 2.0, 1.0, 1.5, 1.0];
    for (k, expected) in [(1, &[1][..]), (2, &[1, 3]), (3, &[0, 1, 3]), (4, &[0, 1, 2, 3])] {
        assert_eq!(support(hot().with_top_k(Some(k)), &logits), expected);
    }
    for k in [5, 6, usize::MAX] {
        assert_eq!(support(hot().with_top_k(Some(k)), &logits), [0, 1, 2, 3, 4]);
    }
}

#[test]
fn top_p_keeps_the_fewest_that_reach_it() {
    // probabilities 0.1, 0.4, 0.2, 0.3
    let logits = [0.1f32.ln(), 0.4f32.ln(), 0.2f32.ln(), 0.3f32.ln()];
    for (p, expected) in [
        (0.0, &[1][..]),
        (0.39, &[1]),
        (0.41, &[1, 3]),
        (0.69, &[1, 3]),
        (0.71, &[1, 2, 3]),
        (0.91, &[0, 1, 2, 3]),
        (1.0, &[0, 1, 2, 3]),
    ] {
        assert_eq!(support(hot().with_top_p(p), &logits), expected, "top_p {p}");
    }
    // of what top_k left, 0.4 and 0.3, the likelier has 0.57
    assert_eq!(support(hot().with_top_k(Some(2)).with_top_p(0.55), &logits), [1]);
    assert_eq!(support(hot().with_top_p(0.5), &[1.0, 1.0, 1.0, 1.0]), [0, 1]);
}

#[test]
fn min_p_keeps_what_has_that_share_of_the_likeliest() {
    let logits = [0.1f32.ln(), 0.4f32.ln(), 0.2f32.ln(), 0.3f32.ln()];
    for (p, expected) in [
        (0.0, &[0, 1, 2, 3][..]),
        (0.24, &[0, 1, 2, 3]),
        (0.26, &[1, 2, 3]),
        (0.74, &[1, 3]),
        (1.0, &[1]),
    ] {
        assert_eq!(support(hot().with_min_p(p), &logits), expected, "min_p {p}");
    }
}

#[test]
fn the_penalty_weighs_on_each_recent_token_once() {
    let sampling = Sampling::default().with_repetition_penalty(2.0).with_repetition_window(3);
    let mut logits = [4.0, -1.0, 3.0, 8.0];
    let id = sampler(sampling.clone()).sample(&mut logits, &[3, 0, 1, 0]).unwrap();
    assert_eq!(logits, [2.0, -2.0, 3.0, 8.0]);
    assert_eq!(id, 3);
    let mut logits = [4.0, -1.0, 3.0, 8.0];
    sampler(sampling.with_repetition_window(0)).sample(&mut logits, &[3, 0]).unwrap();
    assert_eq!(logits, [4.0, -1.0, 3.0, 8.0]);
}

#[test]
fn a_bias_is_added_before_the_penalty_and_can_forbid_a_token() {
    let sampling = Sampling::default()
        .with_repetition_penalty(2.0)
        .with_logit_bias(vec![(0, 3.0), (1, f32::NEG_INFINITY)]);
    let mut logits = [1.0, 9.0, 1.5];
    let id = sampler(sampling).sample(&mut logits, &[0]).unwrap();
    assert_eq!(logits, [2.0, f32::NEG_INFINITY, 1.5]);
    assert_eq!(id, 0);

    let forbid_all = hot().with_logit_bias(vec![(0, f32::NEG_INFINITY)]);
    let error = sampler(forbid_all).sample(&mut [1.0], &[]).unwrap_err();
    assert!(matches!(error, Error::NonFiniteLogits { .. }));
}

#[test]
fn a_finite_bias_or_penalty_never_makes_a_logit_infinite() {
    let sampling = Sampling::default()
        .with_logit_bias(vec![(0, f32::MAX), (1, f32::MIN)])
        .with_repetition_penalty(f32::MIN_POSITIVE);
    let mut logits = [f32::MAX, f32::MIN, f32::MAX, f32::NEG_INFINITY];
    assert_eq!(sampler(sampling).sample(&mut logits, &[2, 3]).unwrap(), 0);
    assert_eq!(logits, [f32::MAX, f32::MIN, f32::MAX, f32::NEG_INFINITY]);
}

#[test]
fn ids_beyond_the_vocabulary_are_errors() {
    let biased = Sampling::default().with_logit_bias(vec![(2, 0.0)]);
    let penalized = Sampling::default().with_repetition_penalty(1.1);
    for (sampling, history) in [(biased, &[][..]), (penalized, &[0, 2])] {
        assert!(matches!(
            sampler(sampling).sample(&mut [0.0, 1.0], history),
            Err(Error::TokenOutOfRange { token: 2, vocab_size: 2 })
        ));
    }
}

#[test]
fn extreme_temperatures_are_the_limits_of_usual_ones() {
    let logits = [1.0, 1.1, 0.9];
    assert_eq!(support(hot().with_temperature(f32::MIN_POSITIVE), &logits), [1]);
    assert_eq!(support(hot().with_temperature(1e-45), &[f32::MIN, f32::MAX]), [1]);
    let counts = counts(hot().with_temperature(f32::MAX), &[f32::MAX, 0.0, -1e30], 3000);
    assert!(counts[1].abs_diff(counts[2]) < 200, "{counts:?}");
}

#[test]
fn a_large_vocabulary_is_sampled_as_a_small_one() {
    let logits = Seeded::new(1).normal(50_000);
    let mut best: Vec<u32> = (0..50_000).collect();
    best.sort_by(|a, b| logits[*b as usize].total_cmp(&logits[*a as usize]));
    for sampling in [hot().with_top_k(Some(20)), hot().with_top_k(Some(20)).with_top_p(0.999_99)] {
        let mut sampler = sampler(sampling);
        for _ in 0..50 {
            let id = sampler.sample(&mut logits.clone(), &[]).unwrap();
            assert!(best[..20].contains(&id));
        }
    }
}

fn any_logit() -> impl Strategy<Value = f32> {
    prop_oneof![
        8 => -10.0f32..10.0,
        2 => prop::sample::select(vec![0.0, -0.0, 1.0, f32::MAX, f32::MIN, 1e-40, f32::NEG_INFINITY]),
        1 => any::<f32>(),
    ]
}

fn any_sampling() -> impl Strategy<Value = Sampling> {
    let temperature = prop_oneof![Just(0.0f32), 0.0f32..3.0, Just(f32::MAX), Just(1e-45)];
    let top_k = prop_oneof![Just(None), (1usize..40).prop_map(Some), Just(Some(usize::MAX))];
    let share = || prop_oneof![Just(0.0f32), Just(1.0), 0.0f32..=1.0];
    let penalty = prop_oneof![Just(1.0f32), 0.1f32..10.0, Just(f32::MAX)];
    (temperature, top_k, share(), share(), penalty, 0usize..10, any::<u64>()).prop_map(
        |(temperature, top_k, top_p, min_p, penalty, window, seed)| {
            Sampling::default()
                .with_temperature(temperature)
                .with_top_k(top_k)
                .with_top_p(top_p)
                .with_min_p(min_p)
                .with_repetition_penalty(penalty)
                .with_repetition_window(window)
                .with_seed(seed)
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]

    #[test]
    fn never_a_token_of_zero_probability_and_the_same_seed_gives_the_same_ids(
        logits in prop::collection::vec(any_logit(), 0..40),
        sampling in any_sampling(),
        history in prop::collection::vec(0u32..40, 0..12),
    ) {
        let history: Vec<u32> =
            history.into_iter().filter(|id| (*id as usize) < logits.len()).collect();
        let usable = logits.iter().all(|logit| *logit < f32::INFINITY)
            && logits.iter().any(|logit| logit.is_finite());
        let mut one = sampler(sampling.clone());
        // one whose scratch memory holds another distribution
        let mut other = sampler(sampling);
        let mut earlier = [0.0; 60];
        other.sample(&mut earlier, &[]).unwrap();
        other.random = one.random.clone();
        for _ in 0..4 {
            let mut seen = logits.clone();
            let drawn = one.sample(&mut seen, &history);
            let again = other.sample(&mut logits.clone(), &history);
            match (drawn, again) {
                (Ok(id), Ok(same)) => {
                    prop_assert!(usable);
                    prop_assert_eq!(id, same);
                    prop_assert!(seen[id as usize].is_finite());
                }
                (Err(Error::NonFiniteLogits { .. }), Err(Error::NonFiniteLogits { .. })) => {
                    prop_assert!(!usable);
                }
                other => prop_assert!(false, "{other:?}"),
            }
        }
    }

    #[test]
    fn what_is_left_is_what_the_plain_definition_leaves(
        logits in prop::collection::vec(-6.0f32..6.0, 1..30),
        k in 1usize..30,
        p in 0.05f32..0.999,
        min_p in 0.0f32..0.5,
    ) {
        let mut sampler = sampler(hot().with_top_k(Some(k)).with_top_p(p).with_min_p(min_p));
        let id = sampler.sample(&mut logits.clone(), &[]).unwrap();

        let mut order: Vec<usize> = (0..logits.len()).collect();
        order.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]));
        order.truncate(k);
        let weight = |id: usize| f64::from(logits[id]).exp();
        let total: f64 = order.iter().map(|id| weight(*id)).sum();
        let mut sum = 0.0;
        let n = order.iter().position(|id| { sum += weight(*id); sum >= f64::from(p) * total });
        order.truncate(n.map_or(order.len(), |n| n + 1));
        let best = weight(order[0]);
        order.retain(|id| weight(*id) >= f64::from(min_p) * best);

        let mut left: Vec<u32> = sampler.candidates.iter().map(|candidate| candidate.id).collect();
        prop_assert!(left.contains(&id));
        left.sort_unstable();
        let mut expected: Vec<u32> = order.iter().map(|id| *id as u32).collect();
        expected.sort_unstable();
        prop_assert_eq!(left, expected);
    }
}
