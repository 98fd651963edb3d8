//! Many tokens: `tiled_matvec.cu`, `tiled_axpy.cu` and what else runs for them. Each token gets what it gets
//! alone, to the bit, and that is the CPU's.

use hostsim::HostQueue;
use hostsim::row_layout::RowLayout;
use hostsim::steps::{Finish, Parts};
use hostsim::tiled_steps::{MANY_QUERIES, MANY_TOKENS};
use powerinfer_ops::WeightFormat;
use testing::{Seeded, assert_same_bits};

use crate::device::{ORDERS, Tokens, Weights, lists};
use crate::{attention, list, product, sum};

/// Below and above each edge of a tile, and none.
const COUNTS: [usize; 8] = [1, 15, 16, 17, 63, 64, 65, 130];

fn check_near(found: &[f32], expected: &[f32], bounds: &[f32]) -> Result<(), String> {
    let is_far = |i: &usize| found[*i].is_nan() || (found[*i] - expected[*i]).abs() > bounds[*i];
    match (0..expected.len()).find(is_far) {
        Some(at) => Err(format!("value {at} is {}, expected {}", found[at], expected[at])),
        None => Ok(()),
    }
}

fn same_bits(found: &[f32], expected: &[f32]) -> bool {
    let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
    bits(found) == bits(expected)
}

/// Fails unless products are the CPU's and each token's those that it has alone.
pub(crate) fn check_products(
    queue: &HostQueue,
    format: WeightFormat,
    [n, d, n_tokens]: [usize; 3],
    ids: Option<Vec<u32>>,
) -> Result<(), String> {
    let together = product::Case {
        weights: Weights::random(format, n, d, 1),
        x: Tokens::random(n_tokens, d, 2),
        ids,
    };
    let found = together.run(queue, Finish::NOTHING)?;
    let (expected, bounds) = together.expected();
    check_near(&found, &expected, &bounds)?;
    let len = found.len() / n_tokens;
    for t in [0, n_tokens / 2, n_tokens - 1] {
        let alone = product::Case {
            weights: Weights::of(together.weights.host.clone()),
            x: Tokens::of(together.x.token(t).to_vec(), 1, d),
            ids: together.ids.clone(),
        };
        let alone = alone.run(&HostQueue::new(0), Finish::NOTHING)?;
        if !same_bits(&alone, &found[t * len..][..len]) {
            return Err(format!("token {t} has other bits alone"));
        }
    }
    Ok(())
}

/// Likewise for sums over the rows that any token has a scale for, or over all.
pub(crate) fn check_sums(
    queue: &HostQueue,
    format: WeightFormat,
    [n, d, n_tokens]: [usize; 3],
    listed: bool,
) -> Result<(), String> {
    let weights = Weights::random(format, n, d, 3);
    let scales = sum::scales(n, n_tokens, 4);
    let found = sum::sums(queue, &weights, (&scales, n_tokens), listed, None)?;
    let (expected, bounds) = sum::expected(&weights, &scales, n_tokens);
    check_near(&found, &expected, &bounds)?;
    for t in [0, n_tokens / 2, n_tokens - 1] {
        let of_token = (&scales[t * n..][..n], 1);
        let alone = sum::sums(&HostQueue::new(0), &weights, of_token, listed, None)?;
        if !same_bits(&alone, &found[t * d..][..d]) {
            return Err(format!("token {t} has other bits alone"));
        }
    }
    Ok(())
}

#[test]
fn products_of_many_tokens_are_the_cpu_s_with_the_bits_of_one() {
    for (at, format) in RowLayout::FORMATS.into_iter().enumerate() {
        let odd = if format.block_len() == 1 { [1, 259, 1027] } else { [32, 544, 2080] };
        for (case, n_tokens) in COUNTS.into_iter().enumerate() {
            let (n, d) = ([1, 33, 47, 70][(at + case) % 4], odd[case % 3]);
            let lists = lists(n, case as u64);
            // none, one, some and all rows of a list, or all without one
            let ids = lists.into_iter().nth((at + case) % 5);
            let what = format!("{format}, {n} × {d}, {n_tokens} tokens");
            let queue = HostQueue::new(ORDERS[case % 4]);
            assert_eq!(check_products(&queue, format, [n, d, n_tokens], ids), Ok(()), "{what}");
        }
    }
}

#[test]
fn sums_for_many_tokens_are_the_definition_s_with_the_bits_of_one() {
    for (at, format) in RowLayout::FORMATS.into_iter().enumerate() {
        let odd = if format.block_len() == 1 { [1, 33, 259] } else { [32, 96, 160] };
        for (case, n_tokens) in COUNTS.into_iter().enumerate() {
            let (n, d) = ([1, 37, 130, 700][(at + case) % 4], odd[case % 3]);
            let what = format!("{format}, {n} × {d}, {n_tokens} tokens");
            let queue = HostQueue::new(ORDERS[case % 4]);
            let sums = check_sums(&queue, format, [n, d, n_tokens], case % 3 > 0);
            assert_eq!(sums, Ok(()), "{what}");
        }
    }
}

#[test]
fn no_rows_add_nothing_to_many_tokens() {
    for n in [0, 5] {
        let weights = Weights::random(WeightFormat::F16, n, 9, 1);
        let (queue, scales) = (HostQueue::new(0), vec![0.0; n * MANY_TOKENS]);
        let add = vec![1.5; 9 * MANY_TOKENS];
        for listed in [false, true] {
            // a list is made of what there is
            if listed && n == 0 {
                continue;
            }
            let found = sum::sums(&queue, &weights, (&scales, MANY_TOKENS), listed, Some(&add));
            assert_same_bits(&found.unwrap(), &add, "nothing fires");
        }
    }
}

#[test]
fn a_group_of_parts_takes_no_more_room_than_was_asked_for() {
    for n_tokens in [1, MANY_TOKENS - 1, MANY_TOKENS, 128] {
        let most = Parts::sums_bytes_at_most(n_tokens, 40);
        for n in [0, 1, 63, 64, 65, 5000] {
            assert!((1..=n_tokens).all(|t| Parts::of(n).sums_bytes(t, 40) <= most));
        }
    }
}

#[test]
fn lists_of_many_tokens_are_the_neurons_with_a_value() {
    for (case, n_tokens) in [MANY_TOKENS, 15, 16, 17, 65, 130].into_iter().enumerate() {
        for (n, density) in [(1, 1.0), (33, 0.01), (300, 0.0), (1000, 0.02), (9001, 0.004)] {
            let values = list::values(n_tokens, n, density, n as u64);
            let of = Seeded::new(5).ids(n, 0.4);
            for of in [None, Some(&of[..])] {
                let queue = HostQueue::new(ORDERS[case % 4]);
                let checked = list::check(&queue, (&values, n_tokens, n), of);
                assert_eq!(checked, Ok(()), "{n_tokens} tokens, {n} neurons");
            }
        }
    }
}

#[test]
fn attention_of_many_tokens_is_the_cpu_s_over_windows_heads_and_slopes() {
    for (at, (n_positions, n_tokens)) in
        [(MANY_QUERIES, MANY_QUERIES), (65, 33), (280, 35)].into_iter().enumerate()
    {
        for (kind, case) in attention::Case::kinds(n_positions, n_tokens).into_iter().enumerate() {
            let checked = case.check(&HostQueue::new(ORDERS[(at + kind) % 4]));
            assert_eq!(checked, Ok(()), "{case:?}");
        }
    }
    // several chunks, and more tokens than one
    for (n_positions, n_tokens) in [(530, 33), (258, 258)] {
        let case = attention::Case::plain(n_positions, n_tokens);
        assert_eq!(case.check(&HostQueue::new(0)), Ok(()), "{case:?}");
    }
}

#[test]
fn a_token_attends_among_many_with_the_bits_of_one() {
    for case in attention::Case::kinds(290, 41) {
        let all = case.run(&HostQueue::new(1)).unwrap();
        let width = all.len() / 41;
        for t in [0, 7, 8, 20, 40] {
            let alone = case.alone(t).run(&HostQueue::new(0)).unwrap();
            assert_same_bits(&alone, &all[t * width..][..width], format!("{case:?}, token {t}"));
        }
    }
}
