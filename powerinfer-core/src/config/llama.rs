//! The keys of LLaMA and its kin: Mistral, ProSparse (`sparsellama`), Bamboo and TurboSparse.

use powerinfer_ops::Activation;

use super::field::Fields;
use super::{
    BlockOrder, MAX_CONTEXT, MAX_LAYERS, MAX_WIDTH, ModelConfig, PositionConfig, RotaryConfig,
    activation, check_turned_head, divided_head,
};
use crate::error::Result;

/// What the model types of this family differ in.
struct Kin {
    /// Whether `sliding_window` and `num_key_value_heads` must be stated: the libraries that these
    /// models come from do not agree on what their absence means.
    windowed: bool,
    /// Whether the activation is applied to the up products, too.
    activates_up: bool,
}

impl Kin {
    fn of(model_type: &str) -> Self {
        Self {
            windowed: matches!(model_type, "mistral" | "bamboo" | "turbosparse"),
            activates_up: matches!(model_type, "bamboo" | "turbosparse"),
        }
    }
}

pub(super) fn read(model_type: &str, fields: &Fields<'_>) -> Result<ModelConfig> {
    let kin = Kin::of(model_type);
    let d_model = fields.count("hidden_size", MAX_WIDTH)?;
    let n_heads = fields.count("num_attention_heads", MAX_WIDTH)?;
    let activation = thresholded(fields)?;
    Ok(ModelConfig {
        model_type: String::new(),
        d_model,
        d_embedding: d_model,
        d_ff: fields.count("intermediate_size", MAX_WIDTH)?,
        n_layers: fields.count("num_hidden_layers", MAX_LAYERS)?,
        n_heads,
        n_kv_heads: n_kv_heads(&kin, fields, n_heads)?,
        d_head: d_head(fields, d_model, n_heads)?,
        vocab_size: fields.count("vocab_size", MAX_WIDTH)?,
        max_context: fields.count("max_position_embeddings", MAX_CONTEXT)?,
        window: window(&kin, fields)?,
        block_order: BlockOrder::PreNorm,
        norm_eps: fields.positive("rms_norm_eps")?,
        norm_affine: true,
        final_norm: true,
        activation,
        up_activation: kin.activates_up.then_some(activation),
        position: PositionConfig::Rotary(RotaryConfig::read(fields)?),
        attention_bias: fields.flag("attention_bias")?,
        mlp_bias: fields.flag("mlp_bias")?,
        tie_word_embeddings: fields.flag("tie_word_embeddings")?,
        bos_token_id: None,
        eos_token_ids: Vec::new(),
    })
}

/// `hidden_act`, for `fatrelu` with its threshold, `hidden_act_param`.
fn thresholded(fields: &Fields<'_>) -> Result<Activation> {
    let param = "hidden_act_param";
    if fields.text("hidden_act")? == "fatrelu" {
        return Ok(Activation::FatRelu { threshold: fields.not_negative(param)? as f32 });
    }
    let activation = activation(fields, "hidden_act")?;
    match fields.optional_number(param)? {
        None | Some(0.0) => Ok(activation),
        Some(_) => Err(fields.error(param, format!("nothing (`{activation}` has no threshold)"))),
    }
}

fn n_kv_heads(kin: &Kin, fields: &Fields<'_>, n_heads: usize) -> Result<usize> {
    let name = "num_key_value_heads";
    let n_kv_heads = match fields.optional_count(name, MAX_WIDTH)? {
        Some(n_kv_heads) => n_kv_heads,
        None if kin.windowed => fields.count(name, MAX_WIDTH)?,
        None => n_heads,
    };
    if n_heads.is_multiple_of(n_kv_heads) {
        return Ok(n_kv_heads);
    }
    Err(fields.error(name, format!("a divisor of num_attention_heads, {n_heads}")))
}

fn window(kin: &Kin, fields: &Fields<'_>) -> Result<Option<usize>> {
    let name = "sliding_window";
    if !kin.windowed {
        fields.refuse(name, "nothing or null (models of this type have no window)")?;
        return Ok(None);
    }
    if !fields.has(name) {
        return Err(fields.error(name, "a number of positions, or null for all"));
    }
    fields.optional_count(name, MAX_CONTEXT)
}

fn d_head(fields: &Fields<'_>, d_model: usize, n_heads: usize) -> Result<usize> {
    let (name, d_head) = match fields.optional_count("head_dim", MAX_WIDTH)? {
        Some(d_head) => ("head_dim", d_head),
        None => ("num_attention_heads", divided_head(fields, d_model, n_heads)?),
    };
    check_turned_head(fields, name, d_head)?;
    if n_heads.checked_mul(d_head).is_none_or(|width| width > MAX_WIDTH) {
        let expected = format!("heads of together at most {MAX_WIDTH} values");
        return Err(fields.error(name, expected));
    }
    Ok(d_head)
}
