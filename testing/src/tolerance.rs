//! The one tolerance rule: error at most a multiple of machine epsilon × Σ|w·x|.
//!
//! Two correct ways of adding the same products differ only by rounding. Each addition rounds by
//! at most half an epsilon of the running sum, and no running sum exceeds Σ|w·x| by more than
//! rounding; so Σ|w·x|, and not the result, is the scale of the error: a sum that cancels to
//! nearly nothing is allowed the error of the large terms it is made of.

use std::fmt::Write;

/// How many epsilons of Σ|w·x| two orders of summation may lie apart.
///
/// A plain loop over n terms of one sign, the hardest case there is in practice, drifts by about
/// √n half-epsilons of the sum: 64 epsilons are √n / 2 for rows of 16 384 terms, the length of
/// the longest rows in real models. That is still far below what one missing or doubled term of
/// such a row causes, 1 / 16 384 or some 500 epsilons.
pub const EPSILONS: f64 = 64.0;

/// The smallest tolerance for logits, which are the end of a chain and not one sum.
pub const LOGIT_FLOOR: f32 = 1e-4;

/// How many mismatches a failed assertion lists before it only counts them.
const LISTED: usize = 5;

/// How far each element may lie from the expected one.
#[derive(Debug, Clone, Copy)]
pub enum Bound<'a> {
    /// The same absolute distance for every element.
    All(f32),
    /// One absolute distance an element.
    Each(&'a [f32]),
}

impl From<f32> for Bound<'_> {
    fn from(bound: f32) -> Self {
        Self::All(bound)
    }
}

impl<'a> From<&'a [f32]> for Bound<'a> {
    fn from(bounds: &'a [f32]) -> Self {
        Self::Each(bounds)
    }
}

impl<'a> From<&'a Vec<f32>> for Bound<'a> {
    fn from(bounds: &'a Vec<f32>) -> Self {
        Self::Each(bounds)
    }
}

impl Bound<'_> {
    fn at(&self, i: usize) -> f32 {
        match self {
            Self::All(bound) => *bound,
            Self::Each(bounds) => bounds[i],
        }
    }
}

/// The distance allowed to a sum whose absolute terms add up to `magnitude`.
#[must_use]
pub fn sum_bound(magnitude: f64) -> f32 {
    sum_bound_times(EPSILONS, magnitude)
}

/// [`sum_bound`] with another multiple than [`EPSILONS`].
///
/// For a chain of sums, say, whose errors add up; the caller states why.
#[must_use]
pub fn sum_bound_times(epsilons: f64, magnitude: f64) -> f32 {
    // The smallest normal number keeps sums of subnormal terms comparable.
    (epsilons * f64::from(f32::EPSILON) * magnitude + f64::from(f32::MIN_POSITIVE)) as f32
}

/// Σ|w·x|, in f64.
///
/// # Panics
/// If the lengths differ.
#[must_use]
pub fn dot_magnitude(w: &[f32], x: &[f32]) -> f64 {
    assert_eq!(w.len(), x.len(), "dot product of different lengths");
    w.iter().zip(x).map(|(w, x)| (f64::from(*w) * f64::from(*x)).abs()).sum()
}

/// The distance allowed to the dot product of `w` and `x`.
///
/// # Panics
/// If the lengths differ.
#[must_use]
pub fn dot_bound(w: &[f32], x: &[f32]) -> f32 {
    sum_bound(dot_magnitude(w, x))
}

/// The distances allowed to each column of Σ_i `scale[i]` · `rows[i]`.
///
/// # Shapes
/// `scales` `[n]` · `rows` `[n, n_columns]`, row after row · result `[n_columns]`
///
/// # Panics
/// If `rows` does not hold `scales.len()` rows of `n_columns`.
#[must_use]
pub fn weighted_sum_bounds(scales: &[f32], rows: &[f32], n_columns: usize) -> Vec<f32> {
    assert_eq!(rows.len(), scales.len() * n_columns, "rows and scales disagree");
    let mut magnitudes = vec![0f64; n_columns];
    for (i, scale) in scales.iter().enumerate() {
        let row = &rows[i * n_columns..(i + 1) * n_columns];
        for (magnitude, value) in magnitudes.iter_mut().zip(row) {
            *magnitude += (f64::from(*scale) * f64::from(*value)).abs();
        }
    }
    magnitudes.into_iter().map(sum_bound).collect()
}

/// The absolute distance allowed to f32 logits of a fixture.
///
/// `reference_error` is the reference's own error on that fixture, f32 against f64
/// ([`Golden::max_abs_err_fp32_vs_fp64`](crate::Golden::max_abs_err_fp32_vs_fp64)): another order
/// of the same sums cannot be asked to come closer than some multiple of it.
#[must_use]
pub fn logit_bound(reference_error: f64) -> f32 {
    ((20.0 * reference_error) as f32).max(LOGIT_FLOOR)
}

/// Checks that each element of `found` lies within `bound` of the one in `expected`.
///
/// NaN is close to nothing; an infinity is close to itself only. `what` says in the failure
/// message what was compared.
///
/// # Panics
/// If an element lies too far off, or if the lengths differ.
#[track_caller]
pub fn assert_close<'a>(
    found: &[f32],
    expected: &[f32],
    bound: impl Into<Bound<'a>>,
    what: impl AsRef<str>,
) {
    let bound = bound.into();
    let what = what.as_ref();
    assert_eq!(found.len(), expected.len(), "{what}: lengths differ");
    if let Bound::Each(bounds) = bound {
        assert_eq!(bounds.len(), expected.len(), "{what}: as many bounds as elements");
    }
    let far = |i: usize| !is_close(found[i], expected[i], bound.at(i));
    let describe = |i: usize| {
        format!(
            "found {:e}, expected {:e}, distance {:e}, allowed {:e}",
            found[i],
            expected[i],
            (f64::from(found[i]) - f64::from(expected[i])).abs(),
            bound.at(i)
        )
    };
    report(what, found.len(), far, describe);
}

/// Checks that two slices hold the same bits: signs of zero and payloads of NaN included.
///
/// # Panics
/// If a bit differs, or if the lengths do.
#[track_caller]
pub fn assert_same_bits(found: &[f32], expected: &[f32], what: impl AsRef<str>) {
    let what = what.as_ref();
    assert_eq!(found.len(), expected.len(), "{what}: lengths differ");
    let differs = |i: usize| found[i].to_bits() != expected[i].to_bits();
    let describe = |i: usize| {
        format!(
            "found {:e} ({:#010x}), expected {:e} ({:#010x})",
            found[i],
            found[i].to_bits(),
            expected[i],
            expected[i].to_bits()
        )
    };
    report(what, found.len(), differs, describe);
}

/// The largest distance between two slices, for figures in messages.
///
/// # Panics
/// If the lengths differ.
#[must_use]
pub fn max_distance(found: &[f32], expected: &[f32]) -> f64 {
    assert_eq!(found.len(), expected.len(), "lengths differ");
    found
        .iter()
        .zip(expected)
        .map(|(found, expected)| (f64::from(*found) - f64::from(*expected)).abs())
        .fold(0.0, |largest, distance| if distance > largest { distance } else { largest })
}

fn is_close(found: f32, expected: f32, bound: f32) -> bool {
    // The subtraction of equal infinities would give NaN.
    found == expected || (f64::from(found) - f64::from(expected)).abs() <= f64::from(bound)
}

#[track_caller]
fn report(
    what: &str,
    len: usize,
    fails: impl Fn(usize) -> bool,
    describe: impl Fn(usize) -> String,
) {
    let failed: Vec<usize> = (0..len).filter(|&i| fails(i)).collect();
    if failed.is_empty() {
        return;
    }
    let mut message = format!("{what}: {} of {len} elements differ", failed.len());
    for &i in failed.iter().take(LISTED) {
        let _ = write!(message, "\n  [{i}] {}", describe(i));
    }
    if failed.len() > LISTED {
        let _ = write!(
            message,
            "\n  … the last of them:\n  [{0}] {1}",
            failed[failed.len() - 1],
            describe(failed[failed.len() - 1])
        );
    }
    panic!("{message}");
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::seeded::Seeded;

    fn message_of(check: impl FnOnce() + std::panic::UnwindSafe) -> String {
        let payload = std::panic::catch_unwind(check).expect_err("the check should fail");
        payload.downcast_ref::<String>().expect("a formatted message").clone()
    }

    #[test]
    fn two_orders_of_a_long_sum_stay_in_bound() {
        for (seed, n) in [(1, 1), (2, 31), (3, 1000), (4, 11_008)] {
            let mut data = Seeded::new(seed);
            for positive in [false, true] {
                let mut w = data.normal(n);
                let mut x = data.normal(n);
                if positive {
                    w.iter_mut().chain(&mut x).for_each(|v| *v = v.abs());
                }
                let exact: f64 = w.iter().zip(&x).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum();
                let naive: f32 = w.iter().zip(&x).map(|(w, x)| w * x).sum();
                assert_close(&[naive], &[exact as f32], dot_bound(&w, &x), format!("{n} terms"));
            }
        }
    }

    #[test]
    fn a_missing_term_is_out_of_bound() {
        let mut data = Seeded::new(5);
        let (w, x) = (data.uniform(4096, 0.5, 1.5), data.uniform(4096, 0.5, 1.5));
        let whole: f32 = w.iter().zip(&x).map(|(w, x)| w * x).sum();
        let short: f32 = w[1..].iter().zip(&x[1..]).map(|(w, x)| w * x).sum();
        assert!(!is_close(short, whole, dot_bound(&w, &x)));
    }

    #[test]
    fn bounds_of_columns_are_those_of_dot_products() {
        let mut data = Seeded::new(6);
        let (scales, rows) = (data.normal(7), data.normal(7 * 5));
        for (j, bound) in weighted_sum_bounds(&scales, &rows, 5).into_iter().enumerate() {
            let column: Vec<f32> = (0..7).map(|i| rows[i * 5 + j]).collect();
            assert_eq!(bound.to_bits(), dot_bound(&scales, &column).to_bits());
        }
    }

    #[test]
    fn nan_is_close_to_nothing_and_infinity_to_itself() {
        assert!(!is_close(f32::NAN, f32::NAN, f32::INFINITY));
        assert!(!is_close(0.0, f32::NAN, 1.0));
        assert!(is_close(f32::INFINITY, f32::INFINITY, 0.0));
        assert!(!is_close(f32::INFINITY, f32::NEG_INFINITY, 1.0));
        assert!(!is_close(f32::INFINITY, f32::MAX, 1.0));
    }

    #[test]
    fn a_failure_names_what_where_and_how_far() {
        let message = message_of(|| assert_close(&[1.0, 2.5], &[1.0, 2.0], 0.25, "logits of p0"));
        assert_eq!(
            message,
            "logits of p0: 1 of 2 elements differ\n  \
             [1] found 2.5e0, expected 2e0, distance 5e-1, allowed 2.5e-1"
        );
    }

    #[test]
    fn a_long_failure_is_cut_short() {
        let message = message_of(|| assert_same_bits(&[1.0; 100], &[2.0; 100], "all"));
        assert!(message.starts_with("all: 100 of 100 elements differ\n  [0] "), "{message}");
        assert!(message.contains("[99]") && message.lines().count() < 10, "{message}");
    }

    #[test]
    fn same_bits_tells_the_zeros_apart() {
        assert_same_bits(&[f32::NAN, 0.0], &[f32::NAN, 0.0], "itself");
        let message = message_of(|| assert_same_bits(&[0.0], &[-0.0], "zeros"));
        assert!(message.contains("0x00000000") && message.contains("0x80000000"), "{message}");
    }

    #[test]
    fn lengths_are_compared_first() {
        let message = message_of(|| assert_close(&[1.0], &[], 1.0, "row 3"));
        assert!(message.contains("row 3: lengths differ"), "{message}");
    }

    #[test]
    fn logit_bound_has_a_floor() {
        assert_eq!(logit_bound(0.0), LOGIT_FLOOR);
        assert_eq!(logit_bound(1e-5), 2e-4);
    }
}
