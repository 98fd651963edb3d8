//! What the tensors of each family of architectures are called in the two kinds of file.

use powerinfer_core::{BlockOrder, ModelConfig};

pub(crate) const EMBEDDING: &str = "token_embd.weight";
pub(crate) const HEAD: &str = "output.weight";
pub(crate) const ROPE_FACTORS: &str = "rope_freqs.weight";

/// Where a part of a model lies in a Hugging Face file and where in a GGUF file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Part {
    /// Without `blk.N.` and `.weight` or `.bias`.
    gguf: &'static str,
    /// Without the prefix of the layer.
    hf: &'static str,
    rows: Rows,
}

/// How the rows of a tensor are arranged in a GGUF file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Rows {
    /// As in a Hugging Face file.
    Same,
    /// Those of queries: in each head, the pairs that turn together lie side by side.
    Pairs,
    /// Queries, keys and values: all of each together.
    Fused,
}

/// What is called what in a family of architectures.
#[derive(Debug)]
pub(crate) struct Family {
    /// Parts that are there once.
    model: &'static [Part],
    /// What the names of a layer's parts begin with, before and after its number.
    layer: (&'static str, &'static str),
    parts: &'static [Part],
    /// The down projection: its prefix in a layer.
    down: &'static str,
}

const fn part(gguf: &'static str, hf: &'static str) -> Part {
    Part { gguf, hf, rows: Rows::Same }
}

const fn arranged(gguf: &'static str, hf: &'static str, rows: Rows) -> Part {
    Part { gguf, hf, rows }
}

const LLAMA: Family = Family {
    model: &[
        part("token_embd", "model.embed_tokens"),
        part("output_norm", "model.norm"),
        part("output", "lm_head"),
    ],
    layer: ("model.layers.", "."),
    parts: &[
        part("attn_norm", "input_layernorm"),
        arranged("attn_q", "self_attn.q_proj", Rows::Pairs),
        arranged("attn_k", "self_attn.k_proj", Rows::Pairs),
        part("attn_v", "self_attn.v_proj"),
        part("attn_output", "self_attn.o_proj"),
        part("ffn_norm", "post_attention_layernorm"),
        part("ffn_gate", "mlp.gate_proj"),
        part("ffn_up", "mlp.up_proj"),
    ],
    down: "mlp.down_proj",
};

const OPT: Family = Family {
    model: &[
        part("token_embd", "model.decoder.embed_tokens"),
        part("position_embd", "model.decoder.embed_positions"),
        part("output_norm", "model.decoder.final_layer_norm"),
        part("output", "lm_head"),
    ],
    layer: ("model.decoder.layers.", "."),
    parts: &[
        part("attn_norm", "self_attn_layer_norm"),
        part("attn_q", "self_attn.q_proj"),
        part("attn_k", "self_attn.k_proj"),
        part("attn_v", "self_attn.v_proj"),
        part("attn_output", "self_attn.out_proj"),
        part("ffn_norm", "final_layer_norm"),
        part("ffn_up", "fc1"),
    ],
    down: "fc2",
};

macro_rules! falcon {
    ($($norm:expr),+) => {
        Family {
            model: &[
                part("token_embd", "transformer.word_embeddings"),
                part("output_norm", "transformer.ln_f"),
                part("output", "lm_head"),
            ],
            layer: ("transformer.h.", "."),
            parts: &[
                $($norm,)+
                arranged("attn_qkv", "self_attention.query_key_value", Rows::Fused),
                part("attn_output", "self_attention.dense"),
                part("ffn_up", "mlp.dense_h_to_4h"),
            ],
            down: "mlp.dense_4h_to_h",
        }
    };
}

const FALCON_ONE_NORM: Family = falcon!(part("attn_norm", "input_layernorm"));
const FALCON_TWO_NORMS: Family =
    falcon!(part("attn_norm", "ln_mlp"), part("attn_norm_2", "ln_attn"));

impl Family {
    pub(crate) fn of(config: &ModelConfig) -> &'static Self {
        match (config.model_type.as_str(), config.block_order) {
            ("opt", _) => &OPT,
            _ if !Self::is_falcon(config) => &LLAMA,
            (_, BlockOrder::ParallelTwoNorms) => &FALCON_TWO_NORMS,
            _ => &FALCON_ONE_NORM,
        }
    }

    /// Whether a model is a Falcon, under any of the names that these have had.
    pub(crate) fn is_falcon(config: &ModelConfig) -> bool {
        matches!(config.model_type.as_str(), "falcon" | "RefinedWeb" | "RefinedWebModel")
    }

    /// The Hugging Face name of a tensor and how its rows are arranged; `None` if it has none.
    pub(crate) fn given_name(&self, name: &str, powerinfer: bool) -> Option<(String, Rows)> {
        let (prefix, kind) = name.rsplit_once('.')?;
        if !matches!(kind, "weight" | "bias") {
            return None;
        }
        let Some(rest) = prefix.strip_prefix("blk.") else {
            let part = self.model.iter().find(|part| part.gguf == prefix)?;
            return Some((format!("{}.{kind}", part.hf), part.rows));
        };
        let (layer, prefix) = rest.split_once('.')?;
        let (before, after) = self.layer;
        let in_layer = |part: &str| format!("{before}{layer}{after}{part}.{kind}");
        match (prefix, powerinfer) {
            ("ffn_down_t", true) if kind == "weight" => {
                Some((in_layer(&by_neuron(self.down)), Rows::Same))
            }
            ("ffn_down_t", true) | ("ffn_down", false) => Some((in_layer(self.down), Rows::Same)),
            _ => {
                let part = self.parts.iter().find(|part| part.gguf == prefix)?;
                Some((in_layer(part.hf), part.rows))
            }
        }
    }

    /// Where a tensor goes that has a Hugging Face name; `None` if it is no part of the model.
    pub(crate) fn target(&self, name: &str) -> Option<Target> {
        let (prefix, kind) = name.rsplit_once('.')?;
        if !matches!(kind, "weight" | "bias") {
            return None;
        }
        if let Some(part) = self.model.iter().find(|part| part.hf == prefix) {
            let name = format!("{}.{kind}", part.gguf);
            return Some(Target { name, rows: part.rows, down: None });
        }
        let (before, after) = self.layer;
        let (layer, prefix) = prefix.strip_prefix(before)?.split_once(after)?;
        let layer: usize = layer.parse().ok()?;
        let by_neuron = prefix == by_neuron(self.down);
        if by_neuron || prefix == self.down {
            // completed by whoever knows the kind of file
            let name = format!("blk.{layer}.ffn_down");
            let down = (kind == "weight").then_some(by_neuron);
            return Some(Target { name: format!("{name}.{kind}"), rows: Rows::Same, down });
        }
        let part = self.parts.iter().find(|part| part.hf == prefix)?;
        Some(Target {
            name: format!("blk.{layer}.{}.{kind}", part.gguf),
            rows: part.rows,
            down: None,
        })
    }

    /// The weights that every model of the family has, by their names in a GGUF file.
    pub(crate) fn required(&self, n_layers: usize) -> impl Iterator<Item = String> {
        let model = self.model.iter().map(|part| format!("{}.weight", part.gguf));
        let parts = self.parts.iter().map(|part| part.gguf).chain(["ffn_down"]);
        let layers = (0..n_layers).flat_map(move |layer| {
            parts.clone().map(move |part| format!("blk.{layer}.{part}.weight"))
        });
        model.filter(|name| name != HEAD).chain(layers)
    }
}

/// Where a tensor goes in a GGUF file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Target {
    /// Its name in a plain file.
    pub(crate) name: String,
    pub(crate) rows: Rows,
    /// For the weights of a down projection: whether they are `[d_ff, d_model]`.
    pub(crate) down: Option<bool>,
}

/// What the names of a down projection begin with that a file holds as `[d_ff, d_model]`: no
/// Hugging Face file does.
pub(crate) fn by_neuron(down: &str) -> String {
    format!("{down}.by_neuron")
}

/// Whether a tensor belongs to a file's predictor.
pub(crate) fn is_predictor(name: &str) -> bool {
    let rest = name.strip_prefix("blk.").and_then(|rest| rest.split_once('.'));
    rest.is_some_and(|(_, part)| matches!(part, "fc1.weight" | "fc2.weight"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_the_loaders() {
        let name = |family: &Family, name, powerinfer| {
            family.given_name(name, powerinfer).map(|(given, _)| given)
        };
        let some = |text: &str| Some(text.to_owned());
        assert_eq!(
            name(&LLAMA, "blk.12.attn_q.weight", false),
            some("model.layers.12.self_attn.q_proj.weight")
        );
        assert_eq!(
            name(&LLAMA, "blk.1.ffn_down.weight", false),
            some("model.layers.1.mlp.down_proj.weight")
        );
        assert_eq!(name(&LLAMA, "blk.1.ffn_down.weight", true), None);
        assert_eq!(
            name(&OPT, "blk.1.ffn_down_t.weight", true),
            some("model.decoder.layers.1.fc2.by_neuron.weight")
        );
        assert_eq!(
            name(&OPT, "blk.1.ffn_down_t.bias", true),
            some("model.decoder.layers.1.fc2.bias")
        );
        assert_eq!(
            name(&FALCON_TWO_NORMS, "blk.0.attn_norm.bias", false),
            some("transformer.h.0.ln_mlp.bias")
        );
        for unknown in ["blk.0.fc1.weight", "blk.0.attn_q", "blk.weight", "x", "blk.0.attn_q.scale"]
        {
            assert_eq!(name(&LLAMA, unknown, true), None, "{unknown}");
        }
    }
}
