//! An exponential that gives the same bits everywhere, which the standard library's does not
//! promise from one platform or release to the next.

use std::f64::consts::LOG2_E;

/// ln 2 in two parts, the first with enough zeros at its end that small multiples are exact
/// (as in FreeBSD's `e_exp.c`).
const LN_2: [f64; 2] =
    [f64::from_bits(0x3FE6_2E42_FEE0_0000), f64::from_bits(0x3DEA_39EF_3579_3C76)];

/// 1/n! for n = 0, 1, …
const COEFFICIENTS: [f64; 14] = {
    let mut coefficients = [1.0; 14];
    let mut n = 1;
    while n < coefficients.len() {
        coefficients[n] = coefficients[n - 1] / n as f64;
        n += 1;
    }
    coefficients
};

/// Below this the result would be subnormal, and is 0.
const LEAST: f64 = -708.0;

/// `e^x` for `x ≤ 0`, to a few units in the last place, by additions and multiplications only.
///
/// `x = k · ln 2 + r` with `|r| ≤ ln 2 / 2`; the Taylor series of `e^r` up to `r¹³` misses less
/// than 5·10⁻¹⁸; its product with `2^k` is exact.
pub(super) fn exp_nonpositive(x: f64) -> f64 {
    if x < LEAST {
        return 0.0;
    }
    let k = (x * LOG2_E).round();
    let r = (x - k * LN_2[0]) - k * LN_2[1];
    let series = COEFFICIENTS.iter().rev().fold(0.0, |sum, coefficient| sum * r + coefficient);
    // k is from -1022 to 0
    series * f64::from_bits(((1023 + k as i64) as u64) << 52)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equals_the_exponential_to_a_few_units_in_the_last_place() {
        for i in 0..100_000 {
            let x = -f64::from(i) * 0.00709;
            if x >= LEAST {
                let (found, expected) = (exp_nonpositive(x), x.exp());
                assert!((found / expected - 1.0).abs() < 1e-15, "{x}: {found} {expected}");
            }
        }
    }

    #[test]
    fn the_ends_are_right() {
        assert_eq!(exp_nonpositive(0.0), 1.0);
        assert_eq!(exp_nonpositive(-0.0), 1.0);
        assert!(exp_nonpositive(-f64::MIN_POSITIVE) == 1.0);
        assert!(exp_nonpositive(LEAST).is_normal());
        for x in [-708.1, -1e300, f64::NEG_INFINITY] {
            assert_eq!(exp_nonpositive(x), 0.0);
        }
    }

    #[test]
    fn falls_with_its_argument() {
        let mut last = 1.0;
        for i in 1..10_000 {
            let next = exp_nonpositive(-f64::from(i) * 1e-3);
            assert!(next < last);
            last = next;
        }
    }
}
