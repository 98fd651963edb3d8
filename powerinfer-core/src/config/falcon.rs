//! The keys of Falcon, the present ones and those of its first releases.

use powerinfer_ops::Activation;

use super::field::Fields;
use super::{
    BlockOrder, MAX_CONTEXT, MAX_LAYERS, MAX_WIDTH, ModelConfig, PositionConfig, RotaryConfig,
    activation, activation_named, check_turned_head, divided_head,
};
use crate::error::Result;

// What files mean that do not say it; the first releases never do.
const NORM_EPS: f64 = 1e-5;
const CONTEXT: usize = 2048;

/// Flags that decide between the layouts of the family.
struct Layout {
    /// The layout of the 40b: grouped keys and values, `multi_query` has no meaning.
    grouped: bool,
    multi_query: bool,
    parallel: bool,
    alibi: bool,
    bias: bool,
}

pub(super) fn read(model_type: &str, fields: &Fields<'_>) -> Result<ModelConfig> {
    let layout = Layout::read(model_type, fields)?;
    let d_model = fields.count_of(&["hidden_size", "n_embed"], MAX_WIDTH)?;
    let n_heads = fields.count_of(&["num_attention_heads", "n_head"], MAX_WIDTH)?;
    let d_head = divided_head(fields, d_model, n_heads)?;
    if fields.optional_count("head_dim", MAX_WIDTH)?.is_some_and(|stated| stated != d_head) {
        return Err(fields.error("head_dim", format!("hidden_size / heads, {d_head}")));
    }
    Ok(ModelConfig {
        model_type: String::new(),
        d_model,
        d_embedding: d_model,
        d_ff: d_ff(fields, d_model)?,
        n_layers: fields.count_of(&["num_hidden_layers", "n_layer"], MAX_LAYERS)?,
        n_heads,
        n_kv_heads: layout.n_kv_heads(fields, n_heads)?,
        d_head,
        vocab_size: fields.count("vocab_size", MAX_WIDTH)?,
        max_context: fields
            .optional_count("max_position_embeddings", MAX_CONTEXT)?
            .unwrap_or(CONTEXT),
        window: None,
        block_order: layout.block_order(fields)?,
        norm_eps: fields.optional_positive("layer_norm_epsilon")?.unwrap_or(NORM_EPS),
        norm_affine: true,
        final_norm: true,
        activation: falcon_activation(fields)?,
        up_activation: None,
        position: layout.position(fields, d_head)?,
        attention_bias: layout.bias,
        mlp_bias: layout.bias,
        tie_word_embeddings: fields.flag_or("tie_word_embeddings", true)?,
        bos_token_id: None,
        eos_token_ids: Vec::new(),
    })
}

impl Layout {
    fn read(model_type: &str, fields: &Fields<'_>) -> Result<Self> {
        fields.only(
            "apply_residual_connection_post_layernorm",
            false,
            "the stream is what is added to, not its norm",
        )?;
        let must = |name: &str| {
            let flag = fields.optional_flag(name)?;
            flag.ok_or_else(|| fields.error(name, "true or false"))
        };
        // The first releases' own defaults differ from the later ones, so they have to say.
        let (parallel, alibi, bias) = match model_type {
            "falcon" => (
                fields.flag_or("parallel_attn", true)?,
                fields.flag("alibi")?,
                fields.flag("bias")?,
            ),
            _ => (must("parallel_attn")?, must("alibi")?, must("bias")?),
        };
        // the 40b's first release has a type of its own and no flag
        let grouped = fields.flag_or("new_decoder_architecture", model_type == "RefinedWeb")?;
        let multi_query = match model_type {
            "RefinedWebModel" if !grouped => must("multi_query")?,
            _ => fields.flag_or("multi_query", true)?,
        };
        if grouped && !parallel {
            let expected = "true (there is no sequential form of new_decoder_architecture)";
            return Err(fields.error("parallel_attn", expected));
        }
        Ok(Self { grouped, multi_query, parallel, alibi, bias })
    }

    fn n_kv_heads(&self, fields: &Fields<'_>, n_heads: usize) -> Result<usize> {
        let stated = fields.optional_count_of(&["num_kv_heads", "n_head_kv"], MAX_WIDTH)?;
        let (name, n_kv_heads) = stated.unwrap_or(("num_kv_heads", n_heads));
        match (self.grouped, self.multi_query) {
            (true, _) if n_heads.is_multiple_of(n_kv_heads) => Ok(n_kv_heads),
            (true, _) => Err(fields.error(name, format!("a divisor of the {n_heads} heads"))),
            // published files state any number here
            (false, true) => Ok(1),
            (false, false) if n_kv_heads == n_heads => Ok(n_heads),
            (false, false) => {
                let expected = format!("one a head, {n_heads}, without multi_query");
                Err(fields.error(name, expected))
            }
        }
    }

    fn block_order(&self, fields: &Fields<'_>) -> Result<BlockOrder> {
        let name = "num_ln_in_parallel_attn";
        match (fields.optional_count(name, MAX_LAYERS)?, self.grouped, self.parallel) {
            (None | Some(2), true, _) => Ok(BlockOrder::ParallelTwoNorms),
            (Some(1), true, _) | (None | Some(1), false, true) => Ok(BlockOrder::ParallelOneNorm),
            (None, false, false) => Ok(BlockOrder::PreNorm),
            (_, true, _) => Err(fields.error(name, "1 or 2")),
            (_, false, true) => Err(fields.error(name, "1 without new_decoder_architecture")),
            (_, false, false) => Err(fields.error(name, "nothing without parallel_attn")),
        }
    }

    fn position(&self, fields: &Fields<'_>, d_head: usize) -> Result<PositionConfig> {
        if self.alibi {
            fields.refuse("rope_scaling", "nothing beside alibi")?;
            return Ok(PositionConfig::Alibi);
        }
        check_turned_head(fields, "num_attention_heads", d_head)?;
        Ok(PositionConfig::Rotary(RotaryConfig::read(fields)?))
    }
}

fn d_ff(fields: &Fields<'_>, d_model: usize) -> Result<usize> {
    let name = "ffn_hidden_size";
    match fields.optional_count(name, MAX_WIDTH)? {
        Some(d_ff) => Ok(d_ff),
        None if 4 * d_model <= MAX_WIDTH => Ok(4 * d_model),
        None => Err(fields.error(name, format!("at most {MAX_WIDTH}, and it is 4 · hidden_size"))),
    }
}

/// `activation`, or `hidden_act` as models made sparse have it, or what all others mean.
fn falcon_activation(fields: &Fields<'_>) -> Result<Activation> {
    let (own, shared) = ("activation", "hidden_act");
    match (fields.optional_text(own)?, fields.optional_text(shared)?) {
        (Some(one), Some(other)) if one != other => {
            Err(fields.error(shared, format!("the same as {own}, {one:?}")))
        }
        (Some(_), _) => activation(fields, own),
        (None, Some(_)) => activation(fields, shared),
        (None, None) => activation_named(fields, own, "gelu"),
    }
}
