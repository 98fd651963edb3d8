//! Which neurons run: a sorted list of ids for one token, a bit mask for many.

use crate::error::OpError;

/// Ids of neurons, strictly ascending: the form that operators walk.
///
/// # Examples
/// ```
/// use powerinfer_ops::NeuronIds;
/// let fired = NeuronIds::from_sorted(vec![1, 4, 6])?;
/// let hot = NeuronIds::from_sorted(vec![0, 4, 5, 6])?;
/// // positions within `hot` of the neurons that fired and are hot
/// assert_eq!(fired.restrict(&hot).as_slice(), &[1, 3]);
/// # Ok::<(), powerinfer_ops::OpError>(())
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NeuronIds(Vec<u32>);

impl NeuronIds {
    /// No neurons.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes ids that are strictly ascending.
    ///
    /// # Errors
    /// [`OpError::IdsNotAscending`] naming the first id that is not.
    pub fn from_sorted(ids: Vec<u32>) -> Result<Self, OpError> {
        for (index, pair) in ids.windows(2).enumerate() {
            if pair[1] <= pair[0] {
                return Err(OpError::IdsNotAscending {
                    index: index + 1,
                    previous: pair[0],
                    id: pair[1],
                });
            }
        }
        Ok(Self(ids))
    }

    /// The ids `0..n_neurons`.
    #[must_use]
    pub fn all(n_neurons: usize) -> Self {
        Self((0..n_neurons).map(|id| id as u32).collect())
    }

    /// The ids, ascending.
    #[must_use]
    pub fn as_slice(&self) -> &[u32] {
        &self.0
    }

    /// How many ids there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The largest id.
    #[must_use]
    pub fn last(&self) -> Option<u32> {
        self.0.last().copied()
    }

    /// Forgets all ids and keeps the memory.
    pub fn clear(&mut self) {
        self.0.clear();
    }

    /// Appends an id.
    ///
    /// # Panics
    /// If `id` is not larger than the last one: the caller walks neurons in order.
    pub fn push(&mut self, id: u32) {
        assert!(self.last().is_none_or(|last| last < id), "neuron ids are pushed in order");
        self.0.push(id);
    }

    /// Replaces the ids by those of another list, in the memory that there is.
    pub(crate) fn copy_from(&mut self, ids: &NeuronIds) {
        self.0.clear();
        self.0.extend_from_slice(&ids.0);
    }

    /// Fails if an id is beyond `n_rows` rows.
    pub(crate) fn check_below(&self, op: &'static str, n_rows: usize) -> Result<(), OpError> {
        crate::check::check_below(op, self, n_rows)
    }

    /// Positions within `to` of the ids that are in both: a shard that holds the neurons `to`
    /// runs these of its rows.
    #[must_use]
    pub fn restrict(&self, to: &NeuronIds) -> NeuronIds {
        let mut local = NeuronIds::new();
        self.restrict_into(to, &mut local);
        local
    }

    /// [`restrict`](Self::restrict) into a list that is reused.
    pub fn restrict_into(&self, to: &NeuronIds, local: &mut NeuronIds) {
        local.clear();
        let mut mine = self.0.iter().peekable();
        for (position, id) in to.0.iter().enumerate() {
            while mine.next_if(|next| *next < id).is_some() {}
            if mine.next_if_eq(&id).is_some() {
                local.0.push(position as u32);
            }
        }
    }
}

/// One bit per token and neuron: the form for many tokens and for tests.
///
/// # Examples
/// ```
/// use powerinfer_ops::ActivationMask;
/// let mut mask = ActivationMask::new(2, 100);
/// mask.set(1, 70);
/// assert!(mask.get(1, 70) && !mask.get(0, 70));
/// assert_eq!(mask.ids(1).as_slice(), &[70]);
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ActivationMask {
    words: Vec<u64>,
    words_per_token: usize,
    n_tokens: usize,
    n_neurons: usize,
}

impl ActivationMask {
    /// A mask in which nothing fires.
    #[must_use]
    pub fn new(n_tokens: usize, n_neurons: usize) -> Self {
        let words_per_token = n_neurons.div_ceil(64);
        Self { words: vec![0; n_tokens * words_per_token], words_per_token, n_tokens, n_neurons }
    }

    /// One token's ids a row.
    ///
    /// # Errors
    /// [`OpError::IdOutOfRange`] if an id is not below `n_neurons`.
    pub fn from_ids(ids: &[NeuronIds], n_neurons: usize) -> Result<Self, OpError> {
        let mut mask = Self::new(ids.len(), n_neurons);
        for (token, ids) in ids.iter().enumerate() {
            if let Some(id) = ids.last().filter(|&id| id as usize >= n_neurons) {
                return Err(OpError::IdOutOfRange { op: "ActivationMask", id, n_rows: n_neurons });
            }
            for &id in ids.as_slice() {
                mask.set(token, id as usize);
            }
        }
        Ok(mask)
    }

    /// Tokens, that is rows.
    #[must_use]
    pub fn n_tokens(&self) -> usize {
        self.n_tokens
    }

    /// Neurons, that is bits in a row.
    #[must_use]
    pub fn n_neurons(&self) -> usize {
        self.n_neurons
    }

    /// Lets a neuron run for a token.
    ///
    /// # Panics
    /// If token or neuron is out of range.
    pub fn set(&mut self, token: usize, neuron: usize) {
        let (word, bit) = self.place(token, neuron);
        self.words[word] |= 1 << bit;
    }

    /// Whether a neuron runs for a token.
    ///
    /// # Panics
    /// If token or neuron is out of range.
    #[must_use]
    pub fn get(&self, token: usize, neuron: usize) -> bool {
        let (word, bit) = self.place(token, neuron);
        self.words[word] >> bit & 1 == 1
    }

    /// Neurons that run for a token.
    ///
    /// # Panics
    /// If the token is out of range.
    #[must_use]
    pub fn count(&self, token: usize) -> usize {
        self.row(token).iter().map(|word| word.count_ones() as usize).sum()
    }

    /// The neurons that run for a token, ascending.
    ///
    /// # Panics
    /// If the token is out of range.
    #[must_use]
    pub fn ids(&self, token: usize) -> NeuronIds {
        let mut ids = NeuronIds::new();
        for (index, &word) in self.row(token).iter().enumerate() {
            let mut rest = word;
            while rest != 0 {
                ids.0.push(index as u32 * 64 + rest.trailing_zeros());
                rest &= rest - 1;
            }
        }
        ids
    }

    fn row(&self, token: usize) -> &[u64] {
        assert!(token < self.n_tokens, "token {token} of {}", self.n_tokens);
        &self.words[token * self.words_per_token..][..self.words_per_token]
    }

    fn place(&self, token: usize, neuron: usize) -> (usize, usize) {
        assert!(token < self.n_tokens, "token {token} of {}", self.n_tokens);
        assert!(neuron < self.n_neurons, "neuron {neuron} of {}", self.n_neurons);
        (token * self.words_per_token + neuron / 64, neuron % 64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn mask_and_ids_are_two_forms_of_one_thing(set in proptest::collection::btree_set(0u32..200, 0..60)) {
            let ids = NeuronIds::from_sorted(set.into_iter().collect()).unwrap();
            let mask = ActivationMask::from_ids(&[NeuronIds::new(), ids.clone()], 200).unwrap();
            prop_assert_eq!(mask.count(0), 0);
            prop_assert_eq!(mask.count(1), ids.len());
            prop_assert_eq!(mask.ids(1), ids);
        }

        #[test]
        fn a_partition_restricts_every_id_exactly_once(
            set in proptest::collection::btree_set(0u32..100, 0..60),
            hot in proptest::collection::btree_set(0u32..100, 0..60),
        ) {
            let ids = NeuronIds::from_sorted(set.into_iter().collect()).unwrap();
            let cold = NeuronIds::from_sorted((0..100).filter(|id| !hot.contains(id)).collect()).unwrap();
            let hot = NeuronIds::from_sorted(hot.into_iter().collect()).unwrap();
            let mut back: Vec<u32> = [&hot, &cold].iter().flat_map(|side| {
                ids.restrict(side).as_slice().iter().map(|&at| side.as_slice()[at as usize]).collect::<Vec<_>>()
            }).collect();
            back.sort_unstable();
            prop_assert_eq!(back.as_slice(), ids.as_slice());
        }
    }

    #[test]
    fn ids_out_of_order_are_refused() {
        for bad in [vec![1, 1], vec![2, 1], vec![0, 5, 3]] {
            assert!(matches!(NeuronIds::from_sorted(bad), Err(OpError::IdsNotAscending { .. })));
        }
        let beyond = NeuronIds::from_sorted(vec![3]).unwrap();
        assert!(matches!(
            ActivationMask::from_ids(&[beyond], 3),
            Err(OpError::IdOutOfRange { id: 3, n_rows: 3, .. })
        ));
    }
}
