//! A set of neurons in little room: a bit each, or a word for all or none.

use powerinfer_ops::NeuronIds;

/// A set of neurons of a layer of a known width.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct HotSet {
    d_ff: usize,
    n_hot: usize,
    /// A bit a neuron, the lowest first; none beyond `d_ff`.
    bits: Bits,
}

/// Layers that are all hot or all cold take no room, whatever width a file claims.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Bits {
    None,
    All,
    Some(Vec<u8>),
}

const NONE: &str = "none";
const ALL: &str = "all";

impl HotSet {
    /// The set of these ids, each below `d_ff`.
    pub(crate) fn from_ids(ids: &[u32], d_ff: usize) -> Self {
        let mut bytes = vec![0u8; d_ff.div_ceil(8)];
        for &id in ids {
            bytes[id as usize / 8] |= 1 << (id % 8);
        }
        Self::from_bits(bytes, d_ff)
    }

    fn from_bits(bytes: Vec<u8>, d_ff: usize) -> Self {
        let n_hot = bytes.iter().map(|byte| byte.count_ones() as usize).sum();
        let bits = match n_hot {
            0 => Bits::None,
            n if n == d_ff => Bits::All,
            _ => Bits::Some(bytes),
        };
        Self { d_ff, n_hot, bits }
    }

    /// Neurons in the set.
    pub(crate) fn len(&self) -> usize {
        self.n_hot
    }

    pub(crate) fn contains(&self, id: usize) -> bool {
        match &self.bits {
            Bits::None => false,
            Bits::All => id < self.d_ff,
            Bits::Some(bytes) => bytes.get(id / 8).is_some_and(|byte| byte >> (id % 8) & 1 == 1),
        }
    }

    /// The ids in a list, of up to four bytes for each neuron of the layer.
    pub(crate) fn ids(&self) -> NeuronIds {
        let mut ids = NeuronIds::new();
        // a placement's ids are u32, and `d_ff` was held to that of a model
        (0..self.d_ff).filter(|&id| self.contains(id)).for_each(|id| ids.push(id as u32));
        ids
    }

    /// The set as a word, `none` or `all`, or its bits in base64, the
    /// lowest neuron's the lowest of the first byte.
    pub(crate) fn to_text(&self) -> String {
        match &self.bits {
            Bits::None => NONE.to_owned(),
            Bits::All => ALL.to_owned(),
            Bits::Some(bytes) => encode(bytes),
        }
    }

    /// The set of a text of [`to_text`](Self::to_text); `None` if it is not that of a layer of `d_ff`
    /// neurons. Takes no more memory than the text.
    pub(crate) fn from_text(text: &str, d_ff: usize) -> Option<Self> {
        match text {
            NONE => Some(Self { d_ff, n_hot: 0, bits: Bits::None }),
            ALL => Some(Self { d_ff, n_hot: d_ff, bits: Bits::All }),
            _ => {
                let bytes = decode(text)?;
                if bytes.len() != d_ff.div_ceil(8) {
                    return None;
                }
                let beyond = bytes
                    .last()
                    .is_some_and(|last| !d_ff.is_multiple_of(8) && last >> (d_ff % 8) != 0);
                (!beyond).then(|| Self::from_bits(bytes, d_ff))
            }
        }
    }
}

/// The digits of base64 (RFC 4648), six bits each.
const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

fn encode(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for three in bytes.chunks(3) {
        let word = three.iter().fold(0u32, |word, &byte| word << 8 | u32::from(byte));
        let word = word << (8 * (3 - three.len()));
        for digit in 0..=three.len() {
            text.push(DIGITS[(word >> (18 - 6 * digit)) as usize & 63] as char);
        }
    }
    text
}

/// The bytes of a text without padding; `None` if it is not one that [`encode`] gives.
fn decode(text: &str) -> Option<Vec<u8>> {
    let mut bytes = Vec::with_capacity(text.len() / 4 * 3 + 2);
    for four in text.as_bytes().chunks(4) {
        let mut word = 0u32;
        for &digit in four {
            let value = match digit {
                b'A'..=b'Z' => digit - b'A',
                b'a'..=b'z' => digit - b'a' + 26,
                b'0'..=b'9' => digit - b'0' + 52,
                b'+' => 62,
                b'/' => 63,
                _ => return None,
            };
            word = word << 6 | u32::from(value);
        }
        word <<= 6 * (4 - four.len());
        let n_bytes = four.len() - 1;
        // one digit alone is no byte, and what no byte takes is zero
        if n_bytes == 0 || word & (0xFF_FFFF >> (8 * n_bytes)) != 0 {
            return None;
        }
        bytes.extend_from_slice(&word.to_be_bytes()[1..=n_bytes]);
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn bytes_are_those_of_the_standard() {
        for (bytes, text) in [("f", "Zg"), ("fo", "Zm8"), ("foo", "Zm9v"), ("foobar", "Zm9vYmFy")] {
            assert_eq!(encode(bytes.as_bytes()), text);
            assert_eq!(decode(text).unwrap(), bytes.as_bytes());
        }
        for bad in ["Z", "Zh", "Zm9", "Zm8=", "Z g", "Zm9vY"] {
            assert_eq!(decode(bad), None, "{bad}");
        }
    }

    #[test]
    fn texts_of_other_layers_are_refused() {
        let text = HotSet::from_ids(&[0, 9], 10).to_text();
        assert!(HotSet::from_text(&text, 10).is_some());
        for d_ff in [7, 8, 9, 17, 0] {
            assert_eq!(HotSet::from_text(&text, d_ff), None, "{d_ff}");
        }
        assert_eq!(HotSet::from_text("all", 10).unwrap().len(), 10);
        assert_eq!(HotSet::from_text("", 10), None);
    }

    proptest! {
        #[test]
        fn a_set_is_its_text(set in proptest::collection::btree_set(0u32..100, 0..100), wide in 0usize..20) {
            let ids: Vec<u32> = set.into_iter().collect();
            let d_ff = ids.last().map_or(0, |&last| last as usize + 1) + wide;
            let hot = HotSet::from_ids(&ids, d_ff);
            prop_assert_eq!(HotSet::from_text(&hot.to_text(), d_ff).unwrap(), hot.clone());
            prop_assert_eq!(hot.len(), ids.len());
            let back = hot.ids();
            prop_assert_eq!(back.as_slice(), ids.as_slice());
        }
    }
}
