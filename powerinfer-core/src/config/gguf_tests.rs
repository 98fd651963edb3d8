use super::*;
use crate::weights::{GgufMetadata, GgufValue};

fn llama() -> Vec<(&'static str, GgufValue)> {
    vec![
        ("general.architecture", GgufValue::String("llama".to_owned())),
        ("llama.context_length", GgufValue::U32(128)),
        ("llama.embedding_length", GgufValue::U32(40)),
        ("llama.feed_forward_length", GgufValue::U32(96)),
        ("llama.block_count", GgufValue::U32(3)),
        ("llama.attention.head_count", GgufValue::U32(4)),
        ("llama.attention.layer_norm_rms_epsilon", GgufValue::F32(1e-5)),
    ]
}

fn text(text: &str) -> GgufValue {
    GgufValue::String(text.to_owned())
}

fn read(changed: &[(&'static str, GgufValue)], context: GgufContext) -> Result<ModelConfig> {
    let keys = llama().into_iter().chain(changed.iter().cloned());
    let keys = keys.map(|(key, value)| (key.to_owned(), value));
    ModelConfig::from_gguf(&GgufMetadata::new("m.gguf", keys), context)
}

fn plain(changed: &[(&'static str, GgufValue)]) -> Result<ModelConfig> {
    read(changed, GgufContext::new(false, 160))
}

#[test]
fn what_is_not_stated_is_what_the_engines_of_these_files_assume() {
    let config = plain(&[]).unwrap();
    assert_eq!((config.d_head, config.n_kv_heads, config.vocab_size), (10, 4, 160));
    assert_eq!(config.norm_eps, 1e-5, "the decimal, not its 32 bits");
    let rotary = RotaryConfig { theta: 10_000.0, scaling: RopeScaling::None };
    assert_eq!(config.position, PositionConfig::Rotary(rotary));
    assert_eq!((config.activation, config.up_activation), (Activation::Silu, None));
    assert_eq!((config.bos_token_id, config.eos_token_ids), (None, vec![]));
}

#[test]
fn the_activation_is_the_caller_s_then_the_key_s_then_the_magic_s() {
    let powerinfer = GgufContext::new(true, 160);
    let activation = |keys: &[_], context| read(keys, context).unwrap().activation;
    assert_eq!(activation(&[], powerinfer), Activation::Relu);
    let silu = [("powerinfer.activation", text("silu"))];
    assert_eq!(activation(&silu, powerinfer), Activation::Silu);
    let chosen = powerinfer.with_activation(Some(Activation::Gelu));
    assert_eq!(activation(&silu, chosen), Activation::Gelu);
    let threshold = ("powerinfer.fatrelu_threshold", GgufValue::F32(0.25));
    let fatrelu = [("powerinfer.activation", text("fatrelu")), threshold.clone()];
    assert_eq!(activation(&fatrelu, powerinfer), Activation::FatRelu { threshold: 0.25 });

    assert!(matches!(
        plain(&fatrelu[..1]),
        Err(Error::Metadata { key, .. }) if key == "powerinfer.fatrelu_threshold"
    ));
    assert!(matches!(
        plain(&[threshold]),
        Err(Error::Metadata { key, .. }) if key == "powerinfer.activation"
    ));
    assert!(matches!(
        plain(&[("powerinfer.activation", text("swish"))]),
        Err(Error::UnknownActivation { found, .. }) if found == "swish"
    ));
}

#[test]
fn stated_settings_are_taken() {
    let config = plain(&[
        ("llama.attention.key_length", GgufValue::U32(16)),
        ("llama.attention.value_length", GgufValue::U32(16)),
        ("llama.attention.head_count_kv", GgufValue::U32(2)),
        ("llama.attention.sliding_window", GgufValue::U32(7)),
        ("llama.rope.dimension_count", GgufValue::U32(16)),
        ("llama.rope.freq_base", GgufValue::F32(20_000.0)),
        ("llama.rope.scaling.type", text("linear")),
        ("llama.rope.scaling.factor", GgufValue::F32(2.1)),
        ("tokenizer.ggml.bos_token_id", GgufValue::U32(1)),
        ("tokenizer.ggml.eos_token_id", GgufValue::U32(2)),
        ("tokenizer.ggml.eot_token_id", GgufValue::U32(0)),
    ])
    .unwrap();
    assert_eq!((config.d_head, config.n_kv_heads, config.window), (16, 2, Some(7)));
    let scaling = RopeScaling::Linear { factor: 2.1 };
    let rotary = RotaryConfig { theta: 20_000.0, scaling };
    assert_eq!(config.position, PositionConfig::Rotary(rotary));
    assert_eq!((config.bos_token_id, config.eos_token_ids), (Some(1), vec![0, 2]));
}

#[test]
fn what_is_not_known_is_refused_by_name() {
    let cases: &[(&str, GgufValue)] = &[
        ("llama.expert_count", GgufValue::U32(8)),
        ("llama.attention.scale", GgufValue::F32(0.1)),
        ("llama.logit_scale", GgufValue::F32(0.1)),
        ("llama.attention.causal", GgufValue::Bool(false)),
        ("llama.attention.head_count_kv", GgufValue::U32(3)),
        ("llama.attention.head_count_kv", GgufValue::i32s(&[4, 4, 2])),
        ("llama.attention.value_length", GgufValue::U32(12)),
        ("llama.rope.dimension_count", GgufValue::U32(4)),
        ("llama.rope.scaling.attn_factor", GgufValue::F32(1.5)),
        ("llama.rope.freq_base", GgufValue::F32(f32::NAN)),
        ("llama.block_count", GgufValue::U32(0)),
        ("llama.block_count", GgufValue::U32(1 << 13)),
        ("llama.embedding_length", GgufValue::U32(u32::MAX)),
        ("llama.attention.head_count", GgufValue::U32(7)),
        ("llama.vocab_size", GgufValue::U32(161)),
        ("llama.attention.layer_norm_rms_epsilon", GgufValue::F32(0.0)),
        ("tokenizer.ggml.eos_token_id", GgufValue::U32(160)),
    ];
    for (key, value) in cases {
        let error = plain(&[(key, value.clone())]).unwrap_err();
        let named = matches!(&error, Error::Metadata { key: named, .. } if named == key);
        assert!(named, "{key}: {error}");
    }
    for name in ["yarn", "longrope", "LINEAR"] {
        let keys = [
            ("llama.rope.scaling.type", text(name)),
            ("llama.rope.scaling.factor", GgufValue::F32(2.0)),
        ];
        let error = plain(&keys).unwrap_err();
        assert!(matches!(error, Error::UnknownRopeType { found, .. } if found == name));
    }
    let error = plain(&[("general.architecture", text("gemma"))]).unwrap_err();
    assert!(matches!(error, Error::UnknownModelType { found, .. } if found == "gemma"));
}

#[test]
fn opt_counts_the_rows_of_its_positions_as_context() {
    let keys = llama().into_iter().map(|(key, value)| {
        let value = if key == "general.architecture" { text("opt") } else { value };
        (key.replace("llama.", "opt."), value)
    });
    let metadata = GgufMetadata::new("m.gguf", keys);
    let config = ModelConfig::from_gguf(&metadata, GgufContext::new(false, 160)).unwrap();
    assert_eq!(config.max_context, 126);
    assert_eq!(config.position, PositionConfig::Learned { offset: 2 });
    assert_eq!((config.activation, config.norm_eps), (Activation::Relu, 1e-5));
    assert!(config.attention_bias && config.mlp_bias && config.final_norm);
}
