//! Lists of several tokens as the device takes them: one list, and which of its neurons each token
//! picks.

/// The Euclidean norm of a token, as the CPU computes it: picks depend on its last bit.
#[must_use]
pub fn norm(values: &[f32]) -> f32 {
    values.iter().map(|value| value * value).sum::<f32>().sqrt()
}

/// The neurons that any token picks, ascending, into `union`; and for each token 1 where it picks
/// the neuron of that place and 0 elsewhere into `mask`, `[n_tokens, stride]`, which is not touched
/// for a single token: its list is the union.
///
/// # Panics
/// If a list is longer than `stride`.
pub fn union_of<'a>(
    picks: impl Iterator<Item = &'a [u32]> + Clone,
    union: &mut Vec<u32>,
    mask: &mut [f32],
    stride: usize,
) {
    union.clear();
    picks.clone().for_each(|ids| union.extend_from_slice(ids));
    if picks.clone().nth(1).is_none() {
        return;
    }
    union.sort_unstable();
    union.dedup();
    for (ids, mask) in picks.zip(mask.chunks_exact_mut(stride.max(1))) {
        let mut ids = ids.iter().peekable();
        for (id, place) in union.iter().zip(mask) {
            *place = if ids.next_if_eq(&id).is_some() { 1.0 } else { 0.0 };
        }
    }
}

/// Likewise for many tokens: `mask` has for each token 1 in the places of the neurons that it picks.
///
/// # Panics
/// If an id is not below `stride`.
pub fn union_by_row<'a>(
    picks: impl Iterator<Item = &'a [u32]> + Clone,
    union: &mut Vec<u32>,
    mask: &mut [f32],
    stride: usize,
) {
    union.clear();
    mask.fill(0.0);
    for (ids, mask) in picks.zip(mask.chunks_exact_mut(stride.max(1))) {
        union.extend_from_slice(ids);
        ids.iter().for_each(|&id| mask[id as usize] = 1.0);
    }
    union.sort_unstable();
    union.dedup();
}
