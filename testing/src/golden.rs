//! Reference results: what another implementation computed with a stored model.

use std::fmt::Debug;
use std::path::Path;

use safetensors::tensor::{Dtype, SafeTensors};
use serde_json::Value;

use crate::file::{array, number, read, read_json};

/// What the reference implementation computed with a model, in f32.
#[derive(Debug, Clone)]
pub struct Golden {
    /// Largest difference between the reference's own f32 and f64 logits on the longest prompt.
    pub max_abs_err_fp32_vs_fp64: f64,
    /// Standard deviation of the logits: the scale that errors are to be seen against.
    pub logit_std: f64,
    /// One entry a prompt, in the stored order.
    pub prompts: Vec<Prompt>,
}

/// The results for one prompt.
///
/// Shapes: `n` tokens, `L` layers, `F` neurons of the feed-forward network, `d` the width of the
/// residual stream, `V` the vocabulary, `P` stored positions, `G` generated tokens. A neuron is
/// active where the value after the ReLU is above zero; in a gated network that is the gate's.
#[derive(Debug, Clone)]
pub struct Prompt {
    /// `[n]` ids that go in, the one that begins a text included where the model has one.
    pub input_ids: Vec<u32>,
    /// `[V]` logits after the last token.
    pub logits_last: Vec<f32>,
    /// `[P]` positions whose logits are stored.
    pub positions: Vec<usize>,
    /// `[P, V]` logits at these positions.
    pub logits_at: Array<f32>,
    /// `[G]` greedy continuation; an end id does not stop it.
    pub greedy_ids: Vec<u32>,
    /// `[G]` by how much the winning logit of each step exceeded the next one.
    pub greedy_margin: Vec<f32>,
    /// `[L, n]` active neurons of each prompt token.
    pub active_per_token: Array<i32>,
    /// `[L, F]` for how many of the prompt's tokens each neuron is active.
    pub active_per_neuron: Array<i32>,
    /// `[L, G]` active neurons at the positions whose logits gave the greedy ids: the prompt's
    /// last token and all generated tokens but the last.
    pub greedy_active_per_token: Array<i32>,
    /// `[L]` pre-activations over the prompt so near zero that rounding may flip them: by so much
    /// may a count differ.
    pub borderline: Vec<i32>,
    /// `[L, n, F]` 1 where a neuron is active; micro models only.
    pub active_mask: Option<Array<u8>>,
    /// `[L, n, d]` residual stream at the entry of each layer; micro models only.
    pub hidden: Option<Array<f32>>,
    /// `[L, d]` the same at the last position; trained models only.
    pub hidden_last: Option<Array<f32>>,
    /// The prompt as text; trained models only.
    pub text: Option<String>,
    /// The continuation as text; trained models only.
    pub greedy_text: Option<String>,
}

impl Golden {
    /// Reads `golden.json` and `golden.safetensors` in `dir`.
    ///
    /// # Panics
    /// If one is missing, or a tensor is missing or of another type or shape than documented.
    #[must_use]
    pub fn read(dir: &Path) -> Self {
        let meta_path = dir.join("golden.json");
        let meta = read_json(&meta_path);
        let tensors_path = dir.join("golden.safetensors");
        let bytes = read("file", &tensors_path, |path| std::fs::read(path));
        let tensors = Tensors {
            path: &tensors_path,
            tensors: read("safetensors file", &tensors_path, |_| SafeTensors::deserialize(&bytes)),
        };
        let prompts = array(&meta_path, &meta, "prompts")
            .iter()
            .enumerate()
            .map(|(k, meta)| Prompt::read(&tensors, k, meta))
            .collect();
        Self {
            max_abs_err_fp32_vs_fp64: number(&meta_path, &meta, "max_abs_err_fp32_vs_fp64"),
            logit_std: number(&meta_path, &meta, "logit_std"),
            prompts,
        }
    }

    /// The absolute distance allowed to f32 logits: [`logit_bound`](crate::tolerance::logit_bound)
    /// of the reference's own error.
    #[must_use]
    pub fn logit_bound(&self) -> f32 {
        crate::tolerance::logit_bound(self.max_abs_err_fp32_vs_fp64)
    }
}

impl Prompt {
    fn read(tensors: &Tensors<'_>, k: usize, meta: &Value) -> Self {
        let name = |field: &str| format!("p{k}.{field}");
        let text = |field: &str| meta.get(field).and_then(Value::as_str).map(str::to_owned);
        let prompt = Self {
            input_ids: unsigned(tensors.i32s(&name("input_ids"), &[None])),
            logits_last: tensors.f32s(&name("logits_last"), &[None]).values,
            positions: unsigned(tensors.i32s(&name("positions"), &[None])),
            logits_at: tensors.f32s(&name("logits_at"), &[None, None]),
            greedy_ids: unsigned(tensors.i32s(&name("greedy_ids"), &[None])),
            greedy_margin: tensors.f32s(&name("greedy_margin"), &[None]).values,
            active_per_token: tensors.i32s(&name("active_per_token"), &[None, None]),
            active_per_neuron: tensors.i32s(&name("active_per_neuron"), &[None, None]),
            greedy_active_per_token: tensors.i32s(&name("greedy_active_per_token"), &[None, None]),
            borderline: tensors.i32s(&name("borderline"), &[None]).values,
            active_mask: tensors
                .has(&name("active_mask"))
                .then(|| tensors.u8s(&name("active_mask"), &[None, None, None])),
            hidden: tensors
                .has(&name("hidden"))
                .then(|| tensors.f32s(&name("hidden"), &[None, None, None])),
            hidden_last: tensors
                .has(&name("hidden_last"))
                .then(|| tensors.f32s(&name("hidden_last"), &[None, None])),
            text: text("text"),
            greedy_text: text("greedy_text"),
        };
        prompt.check_shapes(tensors.path, k);
        prompt
    }

    fn check_shapes(&self, path: &Path, k: usize) {
        let (n, layers) = (self.input_ids.len(), self.borderline.len());
        let (vocab, generated) = (self.logits_last.len(), self.greedy_ids.len());
        let d_ff = self.active_per_neuron.shape[1];
        let expected: [(&str, &[usize], Vec<usize>); 4] = [
            ("logits_at", &self.logits_at.shape, vec![self.positions.len(), vocab]),
            ("active_per_token", &self.active_per_token.shape, vec![layers, n]),
            ("active_per_neuron", &self.active_per_neuron.shape, vec![layers, d_ff]),
            (
                "greedy_active_per_token",
                &self.greedy_active_per_token.shape,
                vec![layers, generated],
            ),
        ];
        for (field, found, expected) in expected {
            assert_eq!(found, expected, "shape of p{k}.{field} in {}", path.display());
        }
        if let Some(mask) = &self.active_mask {
            assert_eq!(mask.shape, [layers, n, d_ff], "shape of p{k}.active_mask");
        }
    }

    /// Active neurons of each layer, summed over the prompt's tokens.
    #[must_use]
    pub fn active_per_layer(&self) -> Vec<u64> {
        sums(&self.active_per_token)
    }

    /// Active neurons of each layer, summed over the positions that gave the greedy ids.
    #[must_use]
    pub fn greedy_active_per_layer(&self) -> Vec<u64> {
        sums(&self.greedy_active_per_token)
    }
}

/// An array as it is stored: its shape, outermost first, and its elements in that order.
#[derive(Debug, Clone, PartialEq)]
pub struct Array<T> {
    /// Lengths of the dimensions.
    pub shape: Vec<usize>,
    /// The elements, the last dimension running fastest.
    pub values: Vec<T>,
}

impl<T> Array<T> {
    /// The `i`-th part along the first dimension: a row of a matrix.
    ///
    /// # Panics
    /// If the array has no dimension or no such part.
    #[must_use]
    pub fn row(&self, i: usize) -> &[T] {
        let len: usize = self.shape[1..].iter().product();
        &self.values[i * len..(i + 1) * len]
    }

    /// All parts along the first dimension.
    pub fn rows(&self) -> impl Iterator<Item = &[T]> {
        (0..self.shape[0]).map(|i| self.row(i))
    }
}

/// An open `golden.safetensors`; `None` in an expected shape stands for any length.
struct Tensors<'a> {
    path: &'a Path,
    tensors: SafeTensors<'a>,
}

impl Tensors<'_> {
    fn has(&self, name: &str) -> bool {
        self.tensors.tensor(name).is_ok()
    }

    fn f32s(&self, name: &str, shape: &[Option<usize>]) -> Array<f32> {
        self.array(name, Dtype::F32, shape, f32::from_le_bytes)
    }

    fn i32s(&self, name: &str, shape: &[Option<usize>]) -> Array<i32> {
        self.array(name, Dtype::I32, shape, i32::from_le_bytes)
    }

    fn u8s(&self, name: &str, shape: &[Option<usize>]) -> Array<u8> {
        self.array(name, Dtype::U8, shape, u8::from_le_bytes)
    }

    fn array<T, const N: usize>(
        &self,
        name: &str,
        dtype: Dtype,
        shape: &[Option<usize>],
        decode: fn([u8; N]) -> T,
    ) -> Array<T> {
        let tensor = read("tensor", &self.path.join(name), |_| self.tensors.tensor(name));
        let place = format!("{name} in {}", self.path.display());
        assert_eq!(tensor.dtype(), dtype, "type of {place}");
        assert_eq!(tensor.shape().len(), shape.len(), "number of dimensions of {place}");
        let (elements, rest) = tensor.data().as_chunks::<N>();
        assert!(rest.is_empty(), "length of {place}");
        Array {
            shape: tensor.shape().to_vec(),
            values: elements.iter().map(|bytes| decode(*bytes)).collect(),
        }
    }
}

fn sums(counts: &Array<i32>) -> Vec<u64> {
    counts.rows().map(|row| unsigned::<u64>(row.to_vec()).into_iter().sum()).collect()
}

fn unsigned<T: TryFrom<i32>>(values: impl Into<Vec<i32>>) -> Vec<T>
where
    T::Error: Debug,
{
    let values = values.into().into_iter();
    values
        .map(|value| T::try_from(value).expect("ids, positions and counts are not negative"))
        .collect()
}

impl From<Array<i32>> for Vec<i32> {
    fn from(array: Array<i32>) -> Self {
        array.values
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::Fixture;

    #[test]
    fn golden_results_agree_with_themselves() {
        for fixture in Fixture::micros("").into_iter().chain([Fixture::demo()]) {
            let golden = fixture.golden();
            assert!(golden.logit_bound() >= 1e-4, "{}", fixture.name);
            for prompt in &golden.prompts {
                assert_eq!(prompt.positions.last(), Some(&(prompt.input_ids.len() - 1)));
                let last = prompt.logits_at.rows().last().expect("a position");
                assert_eq!(last, prompt.logits_last, "{}", fixture.name);
                assert_eq!(prompt.active_per_layer(), sums(&prompt.active_per_neuron));
                let best = (0..last.len()).max_by(|a, b| last[*a].total_cmp(&last[*b]));
                assert_eq!(best, prompt.greedy_ids.first().map(|id| *id as usize));
            }
        }
    }

    #[test]
    fn masks_add_up_to_the_counts() {
        for fixture in Fixture::micros("") {
            for prompt in fixture.golden().prompts {
                let mask = prompt.active_mask.expect("micro models store masks");
                let per_layer: Vec<u64> = mask
                    .rows()
                    .map(|layer| layer.iter().map(|bit| u64::from(*bit)).sum())
                    .collect();
                let counts = sums(&prompt.active_per_token);
                assert_eq!(per_layer, counts, "{}", fixture.name);
            }
        }
    }

    #[test]
    fn only_the_demo_model_has_text() {
        let demo = Fixture::demo().golden();
        let texts: Vec<_> = demo.prompts.iter().map(|prompt| prompt.text.as_deref()).collect();
        assert_eq!(texts[0], Some("It was a truth"));
        assert!(demo.prompts.iter().all(|p| p.hidden_last.is_some() && p.hidden.is_none()));
        let micro = Fixture::micro("llama-gqa-tied-theta").golden();
        assert!(
            micro.prompts.iter().all(|prompt| prompt.text.is_none() && prompt.hidden.is_some())
        );
    }

    #[test]
    fn rows_cut_the_first_dimension() {
        let array = Array { shape: vec![2, 3], values: vec![1, 2, 3, 4, 5, 6] };
        assert_eq!(array.row(1), [4, 5, 6]);
        assert_eq!(array.rows().count(), 2);
    }
}
