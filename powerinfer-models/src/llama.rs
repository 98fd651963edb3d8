//! LLaMA and its kin: pre-norm blocks of grouped-query attention and a gated feed-forward network.
//! Mistral adds a window, ProSparse a threshold, Bamboo and TurboSparse a second ReLU.

use powerinfer_core::ModelConfig;

use crate::error::Result;
use crate::layers::{
    Attention, AttentionHeads, Block, BlockNorms, Decoder, Embedding, Head, Position, Projections,
};
use crate::loader::{FfnTensors, Loader};

/// Builds the model from `model.embed_tokens`, `model.layers.N`, `model.norm` and `lm_head`.
pub(crate) fn build(config: &ModelConfig, loader: &mut Loader<'_>) -> Result<Decoder> {
    let (d_model, eps) = (config.d_model, config.norm_eps);
    let embedding =
        Embedding::new(loader.matrix("model.embed_tokens.weight", config.vocab_size, d_model)?);
    let position = Position::new(&config.position, config.d_head, None);
    let mut blocks = Vec::new();
    for layer in 0..config.n_layers {
        let block = block(config, layer, loader)?;
        blocks.push(loader.place(layer, block, &embedding, &position)?);
    }
    let norm = loader.rms_norm("model.norm", d_model, eps)?;
    let head = Head::load("lm_head.weight", &embedding, config.tie_word_embeddings, loader)?;
    Ok(Decoder::new(embedding, position, blocks, Some(norm.into()), head))
}

fn block(config: &ModelConfig, layer: usize, loader: &mut Loader<'_>) -> Result<Block> {
    let (d_model, eps) = (config.d_model, config.norm_eps);
    let name = |part: &str| format!("model.layers.{layer}.{part}");
    let heads = AttentionHeads::new(config.n_heads, config.n_kv_heads, config.d_head);
    let (q, kv, bias) = (heads.query_width(), heads.kv_width(), config.attention_bias);
    let attention_norm = loader.rms_norm(&name("input_layernorm"), d_model, eps)?;
    let projections = Projections {
        query: loader.linear(&name("self_attn.q_proj"), q, d_model, bias)?,
        key: loader.linear(&name("self_attn.k_proj"), kv, d_model, bias)?,
        value: loader.linear(&name("self_attn.v_proj"), kv, d_model, bias)?,
        output: loader.linear(&name("self_attn.o_proj"), d_model, q, bias)?,
    };
    let attention = Attention::new(projections, heads).with_window(config.window);
    let ffn_norm = loader.rms_norm(&name("post_attention_layernorm"), d_model, eps)?;
    let ffn = loader.ffn(FfnTensors {
        gate: &name("mlp.gate_proj"),
        up: Some(&name("mlp.up_proj")),
        down: &name("mlp.down_proj"),
        d_ff: config.d_ff,
        d_model,
        bias: config.mlp_bias,
        activation: config.activation,
        up_activation: config.up_activation,
    })?;
    let norms = BlockNorms::Before { attention: attention_norm.into(), ffn: ffn_norm.into() };
    Ok(Block { norms, attention, ffn })
}

/// Rotary tables that old exporters stored beside the weights, and the predictors that
/// TurboSparse's files hold.
pub(crate) fn is_ignorable(name: &str) -> bool {
    let in_layer = name.starts_with("model.");
    in_layer && (name.ends_with("rotary_emb.inv_freq") || name.contains(".mlp.predictor."))
}
