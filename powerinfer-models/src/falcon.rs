//! Falcon: one tensor for queries, keys and values, and an ungated feed-forward network beside the
//! attention or after it.

use powerinfer_core::{BlockOrder, ModelConfig, PositionConfig, Result as CoreResult};

use crate::error::Result;
use crate::layers::{
    Attention, AttentionHeads, Block, BlockNorms, Decoder, Embedding, Head, Norm, Position,
    Projections,
};
use crate::loader::{FfnTensors, Loader};

/// Builds the model from `transformer.word_embeddings`, `transformer.h.N`, `transformer.ln_f` and
/// `lm_head`.
pub(crate) fn build(config: &ModelConfig, loader: &mut Loader<'_>) -> Result<Decoder> {
    let (vocab_size, d_model) = (config.vocab_size, config.d_model);
    let table = loader.matrix("transformer.word_embeddings.weight", vocab_size, d_model)?;
    let embedding = Embedding::new(table);
    let position = Position::new(&config.position, config.d_head, None);
    let mut blocks = Vec::new();
    for layer in 0..config.n_layers {
        let block = block(config, layer, loader)?;
        blocks.push(loader.place(layer, block, &embedding, &position)?);
    }
    let norm = norm(config, "transformer.ln_f", loader)?;
    let head = Head::load("lm_head.weight", &embedding, config.tie_word_embeddings, loader)?;
    Ok(Decoder::new(embedding, position, blocks, Some(norm), head))
}

fn block(config: &ModelConfig, layer: usize, loader: &mut Loader<'_>) -> Result<Block> {
    let d_model = config.d_model;
    let name = |part: &str| format!("transformer.h.{layer}.{part}");
    let heads = AttentionHeads::new(config.n_heads, config.n_kv_heads, config.d_head);
    let (width, bias) = (heads.query_width(), config.attention_bias);
    let fused = name("self_attention.query_key_value");
    let [query, key, value] = loader.fused_qkv(&fused, heads, d_model, bias)?;
    let output = loader.linear(&name("self_attention.dense"), d_model, width, bias)?;
    let attention = Attention::new(Projections { query, key, value, output }, heads)
        .with_alibi(config.position == PositionConfig::Alibi);
    let ffn = loader.ffn(FfnTensors {
        gate: &name("mlp.dense_h_to_4h"),
        up: None,
        down: &name("mlp.dense_4h_to_h"),
        d_ff: config.d_ff,
        d_model,
        bias: config.mlp_bias,
        activation: config.activation,
        up_activation: None,
    })?;
    let mut norm = |part: &str| norm(config, &name(part), loader);
    let norms = match config.block_order {
        BlockOrder::ParallelTwoNorms => {
            BlockNorms::Parallel { attention: norm("ln_attn")?, ffn: Some(norm("ln_mlp")?) }
        }
        BlockOrder::ParallelOneNorm => {
            BlockNorms::Parallel { attention: norm("input_layernorm")?, ffn: None }
        }
        _ => BlockNorms::Before {
            attention: norm("input_layernorm")?,
            ffn: norm("post_attention_layernorm")?,
        },
    };
    Ok(Block { norms, attention, ffn })
}

fn norm(config: &ModelConfig, prefix: &str, loader: &mut Loader<'_>) -> CoreResult<Norm> {
    Ok(loader.layer_norm(prefix, config.d_model, config.norm_eps, config.norm_affine)?.into())
}

/// Rotary tables that old exporters stored beside the weights.
pub(crate) fn is_ignorable(name: &str) -> bool {
    name.starts_with("transformer.h.") && name.ends_with("rotary_emb.inv_freq")
}
