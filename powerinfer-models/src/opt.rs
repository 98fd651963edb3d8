//! OPT: learned positions, norms before or after, an ungated feed-forward network.

use powerinfer_core::{BlockOrder, ModelConfig, PositionConfig};

use crate::error::Result;
use crate::layers::{
    Attention, AttentionHeads, Block, BlockNorms, Decoder, Embedding, Head, Position, Projections,
};
use crate::loader::{FfnTensors, Loader};

/// Builds the model from `decoder.embed_tokens`, `decoder.embed_positions`, `decoder.layers.N`,
/// `decoder.final_layer_norm` and `lm_head`, all but the last also under `model.`.
pub(crate) fn build(config: &ModelConfig, loader: &mut Loader<'_>) -> Result<Decoder> {
    let (d_model, d_embedding) = (config.d_model, config.d_embedding);
    let root = root(loader);
    let name = |part: &str| format!("{root}{part}");
    let table = loader.matrix(&name("embed_tokens.weight"), config.vocab_size, d_embedding)?;
    let (mut project_in, mut project_out) = (None, None);
    if d_embedding != d_model {
        project_in = Some(loader.linear(&name("project_in"), d_model, d_embedding, false)?);
        project_out = Some(loader.linear(&name("project_out"), d_embedding, d_model, false)?);
    }
    let embedding = Embedding::new(table).with_projection(project_in);
    let positions = match config.position {
        PositionConfig::Learned { offset } => {
            let n_rows = config.max_context + offset;
            Some(loader.table(&name("embed_positions.weight"), n_rows, d_model)?)
        }
        _ => None,
    };
    let position = Position::new(&config.position, config.d_head, positions);
    let mut blocks = Vec::new();
    for layer in 0..config.n_layers {
        let block = block(config, layer, loader)?;
        blocks.push(loader.place(layer, block, &embedding, &position)?);
    }
    let mut norm = None;
    if config.final_norm {
        let (eps, affine) = (config.norm_eps, config.norm_affine);
        norm = Some(loader.layer_norm(&name("final_layer_norm"), d_model, eps, affine)?.into());
    }
    let head = Head::load("lm_head.weight", &embedding, config.tie_word_embeddings, loader)?
        .with_projection(project_out);
    Ok(Decoder::new(embedding, position, blocks, norm, head))
}

/// What the names begin with: files of the bare decoder leave `model.` out.
fn root(loader: &Loader<'_>) -> &'static str {
    if loader.contains("decoder.embed_tokens.weight") { "decoder." } else { "model.decoder." }
}

fn block(config: &ModelConfig, layer: usize, loader: &mut Loader<'_>) -> Result<Block> {
    let (d_model, eps, affine) = (config.d_model, config.norm_eps, config.norm_affine);
    let root = root(loader);
    let name = |part: &str| format!("{root}layers.{layer}.{part}");
    let heads = AttentionHeads::new(config.n_heads, config.n_kv_heads, config.d_head);
    let (width, bias) = (heads.query_width(), config.attention_bias);
    let projections = Projections {
        query: loader.linear(&name("self_attn.q_proj"), width, d_model, bias)?,
        key: loader.linear(&name("self_attn.k_proj"), width, d_model, bias)?,
        value: loader.linear(&name("self_attn.v_proj"), width, d_model, bias)?,
        output: loader.linear(&name("self_attn.out_proj"), d_model, width, bias)?,
    };
    let attention = Attention::new(projections, heads);
    let ffn = loader.ffn(FfnTensors {
        gate: &name("fc1"),
        up: None,
        down: &name("fc2"),
        d_ff: config.d_ff,
        d_model,
        bias: config.mlp_bias,
        activation: config.activation,
        up_activation: None,
    })?;
    let attention_norm =
        loader.layer_norm(&name("self_attn_layer_norm"), d_model, eps, affine)?.into();
    let ffn_norm = loader.layer_norm(&name("final_layer_norm"), d_model, eps, affine)?.into();
    let norms = match config.block_order {
        BlockOrder::PostNorm => BlockNorms::After { attention: attention_norm, ffn: ffn_norm },
        _ => BlockNorms::Before { attention: attention_norm, ffn: ffn_norm },
    };
    Ok(Block { norms, attention, ffn })
}

/// Nothing: OPT's files hold what the model needs.
pub(crate) fn is_ignorable(_name: &str) -> bool {
    false
}
