//! LLaMA: pre-norm blocks of grouped-query attention and a gated feed-forward network.

use powerinfer_core::ModelConfig;

use crate::error::Result;
use crate::layers::{Attention, AttentionHeads, Block, Decoder, Embedding, Head, Rotary};
use crate::loader::{FfnTensors, Loader};

/// Builds the model from `model.embed_tokens`, `model.layers.N`, `model.norm` and `lm_head`.
pub(crate) fn build(config: &ModelConfig, loader: &mut Loader<'_>) -> Result<Decoder> {
    let (d_model, eps) = (config.d_model, config.norm_eps);
    let embedding =
        Embedding::new(loader.matrix("model.embed_tokens.weight", config.vocab_size, d_model)?);
    let mut blocks = Vec::new();
    for layer in 0..config.n_layers {
        blocks.push(block(config, layer, loader)?);
    }
    let norm = loader.rms_norm("model.norm", d_model, eps)?;
    let head = Head::load("lm_head.weight", &embedding, config.tie_word_embeddings, loader)?;
    let rotary = Rotary::new(&config.rotary, config.d_head);
    Ok(Decoder::new(embedding, rotary, blocks, norm, head))
}

fn block(config: &ModelConfig, layer: usize, loader: &mut Loader<'_>) -> Result<Block> {
    let (d_model, eps) = (config.d_model, config.norm_eps);
    let name = |part: &str| format!("model.layers.{layer}.{part}");
    let heads = AttentionHeads::new(config.n_heads, config.n_kv_heads, config.d_head);
    let (q, kv, bias) = (heads.query_width(), heads.kv_width(), config.attention_bias);
    let attention_norm = loader.rms_norm(&name("input_layernorm"), d_model, eps)?;
    let attention = Attention {
        query: loader.linear(&name("self_attn.q_proj"), q, d_model, bias)?,
        key: loader.linear(&name("self_attn.k_proj"), kv, d_model, bias)?,
        value: loader.linear(&name("self_attn.v_proj"), kv, d_model, bias)?,
        output: loader.linear(&name("self_attn.o_proj"), d_model, q, bias)?,
        heads,
    };
    let ffn_norm = loader.rms_norm(&name("post_attention_layernorm"), d_model, eps)?;
    let ffn = loader.ffn(
        layer,
        FfnTensors {
            gate: &name("mlp.gate_proj"),
            up: Some(&name("mlp.up_proj")),
            down: &name("mlp.down_proj"),
            d_ff: config.d_ff,
            d_model,
            bias: config.mlp_bias,
            activation: config.activation,
        },
    )?;
    Ok(Block { attention_norm, attention, ffn_norm, ffn })
}

/// Rotary tables that old exporters stored beside the weights.
pub(crate) fn is_ignorable(name: &str) -> bool {
    name.starts_with("model.") && name.ends_with("rotary_emb.inv_freq")
}
