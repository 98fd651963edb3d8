//! Layers that repeat the values of others, kept once made: a model of any depth in the time of a few layers.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

/// Bytes that one thread copies at a time.
const PIECE_BYTES: usize = 1 << 20;

/// How many layers differ, and the tensors of those that were made.
#[derive(Debug, Clone)]
pub(super) struct Repeated {
    n_layers: usize,
    made: Arc<Mutex<BTreeMap<String, Arc<Vec<u8>>>>>,
}

impl Repeated {
    pub(super) fn new(n_layers: usize) -> Self {
        Self { n_layers: n_layers.max(1), made: Arc::default() }
    }

    /// The name of the tensor whose values another layer's has; `None` outside of the layers.
    pub(super) fn original(&self, name: &str) -> Option<String> {
        let mut parts: Vec<String> = name.split('.').map(str::to_owned).collect();
        let layer = parts.iter_mut().find(|part| part.parse::<usize>().is_ok())?;
        let number: usize = layer.parse().ok()?;
        *layer = (number % self.n_layers).to_string();
        Some(parts.join("."))
    }

    /// Copies `out` from `offset` of the tensor of that name, which `make` makes the first time.
    pub(super) fn copy(
        &self,
        key: String,
        (offset, out): (usize, &mut [u8]),
        make: impl FnOnce() -> Vec<u8>,
    ) {
        let made = {
            // an entry is whole or not there
            let mut made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
            Arc::clone(made.entry(key).or_insert_with(|| Arc::new(make())))
        };
        powerinfer_ops::par_fill(out, PIECE_BYTES, |piece, out| {
            let first = offset + piece * PIECE_BYTES;
            out.copy_from_slice(&made[first..first + out.len()]);
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_outside_of_layers_have_no_original() {
        let repeated = Repeated::new(4);
        let original = |name| repeated.original(name);
        assert_eq!(original("model.layers.9.mlp.w.weight").unwrap(), "model.layers.1.mlp.w.weight");
        assert_eq!(original("model.layers.3.x").unwrap(), "model.layers.3.x");
        assert_eq!(original("lm_head.weight"), None);
    }
}
