//! The keys of OPT.

use super::field::Fields;
use super::{
    BlockOrder, MAX_CONTEXT, MAX_LAYERS, MAX_WIDTH, ModelConfig, PositionConfig, activation,
    divided_head,
};
use crate::error::Result;

/// No key states it; it is that of the library the models were trained with.
const NORM_EPS: f64 = 1e-5;

/// The position table begins with rows that an older padding scheme left behind.
const POSITION_OFFSET: usize = 2;

pub(super) fn read(fields: &Fields<'_>) -> Result<ModelConfig> {
    let d_model = fields.count("hidden_size", MAX_WIDTH)?;
    let n_heads = fields.count("num_attention_heads", MAX_WIDTH)?;
    let before = fields.flag_or("do_layer_norm_before", true)?;
    let removed = fields.flag("_remove_final_layer_norm")?;
    let bias = fields.flag_or("enable_bias", true)?;
    fields.only("scale_embeddings", false, "embeddings are not scaled")?;
    fields.only("learned_embeddings", true, "positions are learned")?;
    Ok(ModelConfig {
        model_type: String::new(),
        d_model,
        d_embedding: fields.optional_count("word_embed_proj_dim", MAX_WIDTH)?.unwrap_or(d_model),
        d_ff: fields.count("ffn_dim", MAX_WIDTH)?,
        n_layers: fields.count("num_hidden_layers", MAX_LAYERS)?,
        n_heads,
        n_kv_heads: n_heads,
        d_head: divided_head(fields, d_model, n_heads)?,
        vocab_size: fields.count("vocab_size", MAX_WIDTH)?,
        // the rows of the position table, offset included, stay below 2³²
        max_context: fields.count("max_position_embeddings", MAX_CONTEXT)?,
        window: None,
        block_order: if before { BlockOrder::PreNorm } else { BlockOrder::PostNorm },
        norm_eps: NORM_EPS,
        norm_affine: fields.flag_or("layer_norm_elementwise_affine", true)?,
        final_norm: before && !removed,
        activation: activation(fields, "activation_function")?,
        up_activation: None,
        position: PositionConfig::Learned { offset: POSITION_OFFSET },
        attention_bias: bias,
        mlp_bias: bias,
        tie_word_embeddings: fields.flag_or("tie_word_embeddings", true)?,
        bos_token_id: None,
        eos_token_ids: Vec::new(),
    })
}
