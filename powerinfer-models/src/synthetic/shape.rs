//! The shapes of synthetic models, and what each of their tensors is for.

use std::fmt;
use std::str::FromStr;

use crate::error::{Error, Result};

/// The shapes there are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum SyntheticShape {
    /// 6 layers, 256 wide: the shape of the demo model.
    Tiny,
    /// 22 layers, 2048 wide, 1.1 billion parameters.
    Llama1b,
    /// 32 layers, 4096 wide, 6.7 billion parameters.
    Llama7b,
    /// OPT: 24 layers, 2048 wide, 1.3 billion parameters, no gate.
    Opt1b,
    /// OPT: 32 layers, 4096 wide, 6.7 billion parameters, no gate.
    Opt6b,
    /// OPT: 48 layers, 7168 wide, 30 billion parameters, no gate.
    Opt30b,
    /// Falcon: 32 layers, 4544 wide, 6.9 billion parameters, no gate, one key-value head.
    Falcon7b,
}

/// What a tensor is for, which decides its size and its values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    /// A row a token.
    Embedding,
    /// A row a position.
    Positions { n_rows: usize },
    /// Reads the normed stream, a row an output.
    Reads { n_rows: usize },
    /// Reads it and decides which neurons fire.
    Fires { n_rows: usize },
    /// Writes to the stream what `n_columns` inputs give, of which few are not zero if `sparse`.
    Writes { n_columns: usize, sparse: bool },
    /// The scales of a norm.
    Ones,
    /// A bias or the shifts of a norm.
    Zeros { len: usize },
}

/// The sizes of a shape.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sizes {
    pub(super) n_layers: usize,
    pub(super) d_model: usize,
    pub(super) d_ff: usize,
    pub(super) n_heads: usize,
    pub(super) n_kv_heads: usize,
    pub(super) vocab_size: usize,
    pub(super) max_context: usize,
}

impl SyntheticShape {
    /// Every shape.
    pub const ALL: [Self; 7] = [
        Self::Tiny,
        Self::Llama1b,
        Self::Llama7b,
        Self::Opt1b,
        Self::Opt6b,
        Self::Opt30b,
        Self::Falcon7b,
    ];

    /// The name on command lines.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Tiny => "tiny",
            Self::Llama1b => "llama-1b",
            Self::Llama7b => "llama-7b",
            Self::Opt1b => "opt-1.3b",
            Self::Opt6b => "opt-6.7b",
            Self::Opt30b => "opt-30b",
            Self::Falcon7b => "falcon-7b",
        }
    }

    fn is_opt(self) -> bool {
        matches!(self, Self::Opt1b | Self::Opt6b | Self::Opt30b)
    }

    pub(super) fn sizes(self) -> Sizes {
        let [n_layers, d_model, d_ff, n_heads, n_kv_heads, vocab_size, max_context] = match self {
            Self::Tiny => [6, 256, 1024, 8, 4, 4096, 512],
            Self::Llama1b => [22, 2048, 5632, 32, 4, 32000, 4096],
            Self::Llama7b => [32, 4096, 11008, 32, 32, 32000, 4096],
            Self::Opt1b => [24, 2048, 8192, 32, 32, 50272, 2048],
            Self::Opt6b => [32, 4096, 16384, 32, 32, 50272, 2048],
            Self::Opt30b => [48, 7168, 28672, 56, 56, 50272, 2048],
            Self::Falcon7b => [32, 4544, 18176, 71, 1, 65024, 2048],
        };
        Sizes { n_layers, d_model, d_ff, n_heads, n_kv_heads, vocab_size, max_context }
    }

    pub(super) fn config_json(self) -> String {
        let Sizes { n_layers, d_model, d_ff, n_heads, n_kv_heads, vocab_size, max_context } =
            self.sizes();
        let of_family = match self {
            Self::Opt1b | Self::Opt6b | Self::Opt30b => format!(
                r#"  "architectures": ["OPTForCausalLM"],
  "model_type": "opt",
  "activation_function": "relu",
  "ffn_dim": {d_ff},
  "word_embed_proj_dim": {d_model},
  "do_layer_norm_before": true,"#
            ),
            Self::Falcon7b => format!(
                r#"  "architectures": ["FalconForCausalLM"],
  "model_type": "falcon",
  "activation": "relu",
  "ffn_hidden_size": {d_ff},
  "multi_query": true,
  "parallel_attn": true,
  "new_decoder_architecture": false,
  "alibi": false,
  "bias": false,
  "layer_norm_epsilon": 1e-05,"#
            ),
            _ => format!(
                r#"  "architectures": ["LlamaForCausalLM"],
  "model_type": "llama",
  "hidden_act": "relu",
  "intermediate_size": {d_ff},
  "num_key_value_heads": {n_kv_heads},
  "rms_norm_eps": 1e-05,
  "rope_theta": 10000.0,"#
            ),
        };
        let tied = self.is_opt() || matches!(self, Self::Falcon7b);
        format!(
            r#"{{
{of_family}
  "hidden_size": {d_model},
  "num_hidden_layers": {n_layers},
  "num_attention_heads": {n_heads},
  "vocab_size": {vocab_size},
  "max_position_embeddings": {max_context},
  "tie_word_embeddings": {tied},
  "bos_token_id": 1,
  "eos_token_id": 2
}}
"#
        )
    }

    /// Every tensor by its name, those of a layer for each layer.
    pub(super) fn tensors(self) -> Vec<(String, Role)> {
        let (layers, outer) = match self {
            Self::Falcon7b => ("transformer.h", self.falcon_outer()),
            _ if self.is_opt() => ("model.decoder.layers", self.opt_outer()),
            _ => ("model.layers", self.llama_outer()),
        };
        let inner = match self {
            Self::Falcon7b => self.falcon_layer(),
            _ if self.is_opt() => self.opt_layer(),
            _ => self.llama_layer(),
        };
        let of_layer = |layer: usize| {
            let name = move |part: &str| format!("{layers}.{layer}.{part}");
            inner.iter().map(move |(part, role)| (name(part), *role))
        };
        let outer = outer.into_iter().map(|(name, role)| (name.to_owned(), role));
        outer.chain((0..self.sizes().n_layers).flat_map(of_layer)).collect()
    }

    fn llama_outer(self) -> Vec<(&'static str, Role)> {
        vec![
            ("model.embed_tokens.weight", Role::Embedding),
            ("model.norm.weight", Role::Ones),
            ("lm_head.weight", Role::Reads { n_rows: self.sizes().vocab_size }),
        ]
    }

    fn llama_layer(self) -> Vec<(&'static str, Role)> {
        let Sizes { d_model, d_ff, n_heads, n_kv_heads, .. } = self.sizes();
        let kv_width = d_model / n_heads * n_kv_heads;
        vec![
            ("input_layernorm.weight", Role::Ones),
            ("self_attn.q_proj.weight", Role::Reads { n_rows: d_model }),
            ("self_attn.k_proj.weight", Role::Reads { n_rows: kv_width }),
            ("self_attn.v_proj.weight", Role::Reads { n_rows: kv_width }),
            ("self_attn.o_proj.weight", Role::Writes { n_columns: d_model, sparse: false }),
            ("post_attention_layernorm.weight", Role::Ones),
            ("mlp.gate_proj.weight", Role::Fires { n_rows: d_ff }),
            ("mlp.up_proj.weight", Role::Reads { n_rows: d_ff }),
            ("mlp.down_proj.weight", Role::Writes { n_columns: d_ff, sparse: true }),
        ]
    }

    fn opt_outer(self) -> Vec<(&'static str, Role)> {
        let Sizes { d_model, max_context, .. } = self.sizes();
        vec![
            ("model.decoder.embed_tokens.weight", Role::Embedding),
            ("model.decoder.embed_positions.weight", Role::Positions { n_rows: max_context + 2 }),
            ("model.decoder.final_layer_norm.weight", Role::Ones),
            ("model.decoder.final_layer_norm.bias", Role::Zeros { len: d_model }),
        ]
    }

    fn opt_layer(self) -> Vec<(&'static str, Role)> {
        let Sizes { d_model, d_ff, .. } = self.sizes();
        let (reads, zeros) = (Role::Reads { n_rows: d_model }, Role::Zeros { len: d_model });
        vec![
            ("self_attn_layer_norm.weight", Role::Ones),
            ("self_attn_layer_norm.bias", zeros),
            ("self_attn.q_proj.weight", reads),
            ("self_attn.q_proj.bias", zeros),
            ("self_attn.k_proj.weight", reads),
            ("self_attn.k_proj.bias", zeros),
            ("self_attn.v_proj.weight", reads),
            ("self_attn.v_proj.bias", zeros),
            ("self_attn.out_proj.weight", Role::Writes { n_columns: d_model, sparse: false }),
            ("self_attn.out_proj.bias", zeros),
            ("final_layer_norm.weight", Role::Ones),
            ("final_layer_norm.bias", zeros),
            ("fc1.weight", Role::Fires { n_rows: d_ff }),
            ("fc1.bias", Role::Zeros { len: d_ff }),
            ("fc2.weight", Role::Writes { n_columns: d_ff, sparse: true }),
            ("fc2.bias", zeros),
        ]
    }

    fn falcon_outer(self) -> Vec<(&'static str, Role)> {
        vec![
            ("transformer.word_embeddings.weight", Role::Embedding),
            ("transformer.ln_f.weight", Role::Ones),
            ("transformer.ln_f.bias", Role::Zeros { len: self.sizes().d_model }),
        ]
    }

    fn falcon_layer(self) -> Vec<(&'static str, Role)> {
        let Sizes { d_model, d_ff, n_heads, n_kv_heads, .. } = self.sizes();
        let fused = d_model + 2 * d_model / n_heads * n_kv_heads;
        vec![
            ("input_layernorm.weight", Role::Ones),
            ("input_layernorm.bias", Role::Zeros { len: d_model }),
            ("self_attention.query_key_value.weight", Role::Reads { n_rows: fused }),
            ("self_attention.dense.weight", Role::Writes { n_columns: d_model, sparse: false }),
            ("mlp.dense_h_to_4h.weight", Role::Fires { n_rows: d_ff }),
            ("mlp.dense_4h_to_h.weight", Role::Writes { n_columns: d_ff, sparse: true }),
        ]
    }
}
impl fmt::Display for SyntheticShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for SyntheticShape {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        Self::ALL.into_iter().find(|shape| shape.name() == name).ok_or_else(|| {
            Error::UnknownSynthetic {
                found: name.to_owned(),
                supported: Self::ALL.map(Self::name).join(", "),
            }
        })
    }
}
