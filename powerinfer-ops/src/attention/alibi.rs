//! ALiBi: a bias on scores in place of positions.

/// The slopes of ALiBi (Press et al., "Train Short, Test Long") as Falcon has them: a geometric
/// sequence over the largest power of two of heads, and for the heads beyond it every other
/// member of the sequence that is twice as dense. Rounded to bf16.
///
/// # Examples
/// ```
/// use powerinfer_ops::attention::alibi_slopes;
/// assert_eq!(alibi_slopes(8)[..3], [0.5, 0.25, 0.125]);
/// assert_eq!(alibi_slopes(6).len(), 6);
/// assert!(alibi_slopes(0).is_empty());
/// ```
#[must_use]
pub fn alibi_slopes(n_heads: usize) -> Vec<f32> {
    let whole = n_heads.checked_ilog2().map_or(0, |log2| 1usize << log2);
    let slope = |step: usize, n: usize| (-8.0 * step as f64 / n as f64).exp2();
    let regular = (1..=whole).map(|head| slope(head, whole));
    let between = (0..n_heads - whole).map(|head| slope(2 * head + 1, 2 * whole));
    regular.chain(between).map(|slope| to_bf16(slope as f32)).collect()
}

/// What ALiBi adds to a score: slope times position of the key, in the arithmetic that Falcon was
/// trained in, where position and product are bf16 numbers.
#[must_use]
pub fn alibi_bias(slope: f32, position: usize) -> f32 {
    to_bf16(slope * to_bf16(position as f32))
}

fn to_bf16(x: f32) -> f32 {
    half::bf16::from_f32(x).to_f32()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slopes_follow_the_definition() {
        assert_eq!(alibi_slopes(4), [0.25, 0.0625, 0.015_625, 0.003_906_25]);
        let six = alibi_slopes(6);
        assert_eq!(six[..4], alibi_slopes(4)[..]);
        assert_eq!(six[4..], [0.5, 0.125]);
        // 2^(-1/4) has no short binary form
        assert_eq!(alibi_slopes(32)[0], 0.839_843_75);
    }

    #[test]
    fn a_bias_is_rounded_to_bf16() {
        assert_eq!(alibi_bias(0.25, 12), 3.0);
        assert_eq!(alibi_bias(0.839_843_75, 3), 2.515_625);
    }
}
