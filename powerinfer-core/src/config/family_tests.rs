//! The keys of OPT, Falcon and LLaMA's kin: what published files say, and what none may say.

use super::*;
use serde_json::{Value, json};
use testing::Fixture;

const PATH: &str = "model/config.json";
const TYPES: [&str; 9] = [
    "llama",
    "sparsellama",
    "mistral",
    "bamboo",
    "turbosparse",
    "opt",
    "falcon",
    "RefinedWeb",
    "RefinedWebModel",
];

/// A published configuration, as far as it says what is computed.
fn published(name: &str) -> Value {
    match name {
        "opt-350m" => json!({
            "model_type": "opt", "activation_function": "relu", "hidden_size": 1024,
            "ffn_dim": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
            "vocab_size": 50272, "max_position_embeddings": 2048, "word_embed_proj_dim": 512,
            "do_layer_norm_before": false, "bos_token_id": 2, "eos_token_id": 2
        }),
        "falcon-7b" => json!({
            "model_type": "falcon", "alibi": false, "bias": false, "hidden_size": 4544,
            "layer_norm_epsilon": 1e-5, "multi_query": true, "new_decoder_architecture": false,
            "num_attention_heads": 71, "num_hidden_layers": 32, "num_kv_heads": 71,
            "parallel_attn": true, "vocab_size": 65024, "bos_token_id": 11, "eos_token_id": 11,
            "apply_residual_connection_post_layernorm": false
        }),
        "falcon-40b" => json!({
            "model_type": "falcon", "alibi": false, "bias": false, "hidden_size": 8192,
            "layer_norm_epsilon": 1e-5, "new_decoder_architecture": true,
            "num_attention_heads": 128, "num_hidden_layers": 60, "num_kv_heads": 8,
            "parallel_attn": true, "vocab_size": 65024, "bos_token_id": 11, "eos_token_id": 11
        }),
        "falcon-40b, first" => json!({
            "model_type": "RefinedWeb", "alibi": false, "bias": false, "hidden_size": 8192,
            "layer_norm_epsilon": 1e-5, "n_head": 128, "n_head_kv": 8, "n_layer": 60,
            "parallel_attn": true, "vocab_size": 65024, "bos_token_id": 11, "eos_token_id": 11
        }),
        "falcon-rw-1b, first" => json!({
            "model_type": "RefinedWebModel", "alibi": true, "bias": true, "hidden_size": 2048,
            "layer_norm_epsilon": 1e-5, "multi_query": false, "n_head": 32, "n_layer": 24,
            "parallel_attn": false, "vocab_size": 50304, "bos_token_id": 1, "eos_token_id": 2
        }),
        "prosparse-7b" => json!({
            "model_type": "sparsellama", "hidden_act": "fatrelu", "hidden_act_param": 0.01,
            "hidden_size": 4096, "intermediate_size": 11008, "max_position_embeddings": 4096,
            "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
            "rms_norm_eps": 1e-5, "rope_scaling": null, "tie_word_embeddings": false,
            "vocab_size": 32000, "bos_token_id": 1, "eos_token_id": 2
        }),
        "bamboo-7b" => json!({
            "model_type": "bamboo", "hidden_act": "relu", "hidden_size": 4096,
            "intermediate_size": 14336, "max_position_embeddings": 32768,
            "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "sliding_window": 4096,
            "tie_word_embeddings": false, "vocab_size": 32000, "bos_token_id": 1, "eos_token_id": 2
        }),
        _ => panic!("no configuration {name}"),
    }
}

/// A published configuration with some fields replaced; the string "absent" removes one.
fn with(name: &str, changes: &Value) -> Result<ModelConfig> {
    let mut fields = published(name);
    for (key, value) in changes.as_object().unwrap() {
        if value == "absent" {
            fields.as_object_mut().unwrap().remove(key);
        } else {
            fields[key] = value.clone();
        }
    }
    ModelConfig::from_json(Path::new(PATH), &fields.to_string(), &TYPES)
}

fn read(name: &str) -> ModelConfig {
    with(name, &json!({})).unwrap_or_else(|error| panic!("{name}: {error}"))
}

#[test]
fn every_fixture_is_read() {
    for fixture in Fixture::all("") {
        let config = ModelConfig::from_dir(&fixture.model_dir, &TYPES);
        assert!(config.is_ok(), "{}: {config:?}", fixture.name);
    }
}

#[test]
fn opt_is_read_as_its_files_mean_it() {
    let opt = read("opt-350m");
    assert_eq!((opt.d_model, opt.d_embedding, opt.d_ff, opt.d_head), (1024, 512, 4096, 64));
    assert_eq!((opt.block_order, opt.final_norm), (BlockOrder::PostNorm, false));
    assert_eq!(opt.position, PositionConfig::Learned { offset: 2 });
    assert_eq!((opt.norm_eps, opt.norm_affine), (1e-5, true));
    assert!(opt.attention_bias && opt.mlp_bias && opt.tie_word_embeddings);
    let later = with("opt-350m", &json!({ "do_layer_norm_before": true })).unwrap();
    assert_eq!((later.block_order, later.final_norm), (BlockOrder::PreNorm, true));
    let changes = json!({ "do_layer_norm_before": true, "_remove_final_layer_norm": true,
        "enable_bias": false, "layer_norm_elementwise_affine": false });
    let bare = with("opt-350m", &changes).unwrap();
    assert!(!bare.final_norm && !bare.mlp_bias && !bare.norm_affine);
}

#[test]
fn falcon_is_read_in_the_keys_of_every_release() {
    let small = read("falcon-7b");
    assert_eq!((small.n_kv_heads, small.d_ff, small.d_head), (1, 18176, 64));
    assert_eq!((small.block_order, small.max_context), (BlockOrder::ParallelOneNorm, 2048));
    assert_eq!(small.activation, Activation::Gelu);
    let large = read("falcon-40b");
    assert_eq!((large.n_kv_heads, large.block_order), (8, BlockOrder::ParallelTwoNorms));
    let mut first = read("falcon-40b, first");
    first.model_type.clone_from(&large.model_type);
    assert_eq!(first, large);
    let one = with("falcon-40b", &json!({ "num_ln_in_parallel_attn": 1 })).unwrap();
    assert_eq!(one.block_order, BlockOrder::ParallelOneNorm);
    let rw = read("falcon-rw-1b, first");
    assert_eq!((rw.n_kv_heads, rw.block_order), (32, BlockOrder::PreNorm));
    assert_eq!((rw.position, rw.attention_bias), (PositionConfig::Alibi, true));
    for changes in [
        json!({ "activation": "relu" }),
        json!({ "hidden_act": "relu" }),
        json!({ "hidden_act": "relu", "activation": "relu" }),
    ] {
        assert_eq!(with("falcon-40b", &changes).unwrap().activation, Activation::Relu);
    }
}

#[test]
fn kin_of_llama_are_read_as_their_files_mean_it() {
    let prosparse = read("prosparse-7b");
    assert_eq!(prosparse.activation, Activation::FatRelu { threshold: 0.01 });
    assert_eq!((prosparse.up_activation, prosparse.window), (None, None));
    let bamboo = read("bamboo-7b");
    assert_eq!(bamboo.up_activation, Some(Activation::Relu));
    assert_eq!((bamboo.window, bamboo.n_kv_heads), (Some(4096), 8));
    let mistral = json!({ "model_type": "mistral", "hidden_act": "silu", "sliding_window": null });
    let mistral = with("bamboo-7b", &mistral).unwrap();
    assert_eq!((mistral.activation, mistral.up_activation), (Activation::Silu, None));
    assert_eq!(mistral.window, None);
}

#[test]
fn contradictions_and_what_is_not_supported_name_their_field() {
    let falcon = ["falcon-7b", "falcon-40b", "falcon-40b, first", "falcon-rw-1b, first"];
    let cases = [
        ("opt-350m", json!({ "ffn_dim": "absent" }), "ffn_dim"),
        ("opt-350m", json!({ "ffn_dim": 0 }), "ffn_dim"),
        ("opt-350m", json!({ "num_attention_heads": 15 }), "num_attention_heads"),
        ("opt-350m", json!({ "word_embed_proj_dim": 0 }), "word_embed_proj_dim"),
        ("opt-350m", json!({ "word_embed_proj_dim": "wide" }), "word_embed_proj_dim"),
        ("opt-350m", json!({ "do_layer_norm_before": 1 }), "do_layer_norm_before"),
        ("opt-350m", json!({ "enable_bias": "yes" }), "enable_bias"),
        ("opt-350m", json!({ "scale_embeddings": true }), "scale_embeddings"),
        ("opt-350m", json!({ "learned_embeddings": false }), "learned_embeddings"),
        ("opt-350m", json!({ "activation_function": "absent" }), "activation_function"),
        ("opt-350m", json!({ "max_position_embeddings": "absent" }), "max_position_embeddings"),
        ("opt-350m", json!({ "quantization_config": {} }), "quantization_config"),
        ("opt-350m", json!({ "bos_token_id": 50272 }), "bos_token_id"),
        (falcon[0], json!({ "n_head": 64 }), "n_head"),
        (falcon[0], json!({ "n_layer": 24 }), "n_layer"),
        (falcon[0], json!({ "n_embed": 4096 }), "n_embed"),
        (falcon[0], json!({ "n_head_kv": 8 }), "n_head_kv"),
        (falcon[0], json!({ "num_attention_heads": "absent" }), "num_attention_heads"),
        (falcon[0], json!({ "head_dim": 128 }), "head_dim"),
        (falcon[0], json!({ "multi_query": false, "num_kv_heads": 8 }), "num_kv_heads"),
        (falcon[0], json!({ "num_ln_in_parallel_attn": 2 }), "num_ln_in_parallel_attn"),
        (falcon[0], json!({ "ffn_hidden_size": 0 }), "ffn_hidden_size"),
        (falcon[0], json!({ "layer_norm_epsilon": 0 }), "layer_norm_epsilon"),
        (falcon[0], json!({ "activation": "relu", "hidden_act": "gelu" }), "hidden_act"),
        (
            falcon[0],
            json!({ "apply_residual_connection_post_layernorm": true }),
            "apply_residual_connection_post_layernorm",
        ),
        (falcon[1], json!({ "parallel_attn": false }), "parallel_attn"),
        (falcon[1], json!({ "num_kv_heads": 7 }), "num_kv_heads"),
        (falcon[1], json!({ "num_ln_in_parallel_attn": 3 }), "num_ln_in_parallel_attn"),
        (falcon[1], json!({ "partial_rotary_factor": 0.5 }), "partial_rotary_factor"),
        (falcon[2], json!({ "bias": "absent" }), "bias"),
        (falcon[2], json!({ "n_head_kv": 5 }), "n_head_kv"),
        (falcon[3], json!({ "multi_query": "absent" }), "multi_query"),
        (falcon[3], json!({ "alibi": "absent" }), "alibi"),
        (falcon[3], json!({ "parallel_attn": "absent" }), "parallel_attn"),
        (falcon[3], json!({ "num_ln_in_parallel_attn": 1 }), "num_ln_in_parallel_attn"),
        (falcon[3], json!({ "rope_scaling": { "type": "linear", "factor": 2 } }), "rope_scaling"),
        ("prosparse-7b", json!({ "hidden_act_param": "absent" }), "hidden_act_param"),
        ("prosparse-7b", json!({ "hidden_act_param": -0.01 }), "hidden_act_param"),
        ("prosparse-7b", json!({ "hidden_act_param": "0.01" }), "hidden_act_param"),
        ("prosparse-7b", json!({ "hidden_act": "relu" }), "hidden_act_param"),
        ("prosparse-7b", json!({ "sliding_window": 4096 }), "sliding_window"),
        ("bamboo-7b", json!({ "sliding_window": "absent" }), "sliding_window"),
        ("bamboo-7b", json!({ "sliding_window": 0 }), "sliding_window"),
        ("bamboo-7b", json!({ "num_key_value_heads": "absent" }), "num_key_value_heads"),
        ("bamboo-7b", json!({ "num_key_value_heads": 5 }), "num_key_value_heads"),
    ];
    for (name, changes, expected) in cases {
        match with(name, &changes) {
            Err(Error::Config { path, field, .. }) if path == Path::new(PATH) => {
                assert_eq!(field, expected, "{name} {changes}");
            }
            other => panic!("{name} {changes}: {other:?}"),
        }
    }
}

#[test]
fn unknown_names_are_repeated_in_the_error() {
    for (name, field, unknown) in [
        ("opt-350m", "activation_function", "gelu_new"),
        ("opt-350m", "activation_function", "fatrelu"),
        ("falcon-40b", "activation", "swish"),
        ("falcon-7b", "hidden_act", "relu2"),
        ("prosparse-7b", "hidden_act", "shiftrelu"),
        ("bamboo-7b", "hidden_act", "drelu"),
    ] {
        match with(name, &json!({ field: unknown })) {
            Err(Error::UnknownActivation { field: named, found, .. }) => {
                assert_eq!((named, found.as_str()), (field, unknown), "{name}");
            }
            other => panic!("{name} {field} {unknown}: {other:?}"),
        }
    }
    let yarn = json!({ "rope_scaling": { "type": "yarn", "factor": 2 } });
    for name in ["falcon-7b", "bamboo-7b"] {
        assert!(matches!(with(name, &yarn), Err(Error::UnknownRopeType { found, .. })
            if found == "yarn"));
    }
    let other = json!({ "model_type": "falcon_h1" });
    assert!(matches!(with("falcon-7b", &other), Err(Error::UnknownModelType { found, .. })
        if found == "falcon_h1"));
}
