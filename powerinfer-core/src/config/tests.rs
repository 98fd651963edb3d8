use super::*;
use serde_json::{Value, json};
use testing::Fixture;

const PATH: &str = "model/config.json";

/// A complete configuration with some fields replaced; `null` removes one.
fn with(changes: Value) -> Result<ModelConfig> {
    let mut fields = json!({
        "model_type": "llama", "hidden_act": "relu", "hidden_size": 48, "intermediate_size": 96,
        "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2,
        "vocab_size": 160, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
        "bos_token_id": 1, "eos_token_id": 2
    });
    for (name, value) in changes.as_object().unwrap() {
        fields[name] = value.clone();
    }
    ModelConfig::from_json(Path::new(PATH), &fields.to_string(), &["llama"])
}

/// The field that is at fault.
fn faulty(changes: Value) -> String {
    match with(changes.clone()) {
        Err(Error::Config { path, field, .. }) if path == Path::new(PATH) => field,
        other => panic!("{changes}: {other:?}"),
    }
}

fn rotary(changes: Value) -> RotaryConfig {
    rotary_of(&with(changes).unwrap())
}

fn rotary_of(config: &ModelConfig) -> RotaryConfig {
    match &config.position {
        PositionConfig::Rotary(rotary) => rotary.clone(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn every_llama_fixture_is_read() {
    for fixture in Fixture::micros("llama") {
        let config = ModelConfig::from_dir(&fixture.model_dir, &["llama"]).unwrap();
        assert_eq!(config.vocab_size, 160, "{}", fixture.name);
        assert_eq!(config.activation, Activation::Relu, "{}", fixture.name);
        assert_eq!(config.eos_token_ids, [2], "{}", fixture.name);
    }
    let config =
        ModelConfig::from_dir(&Fixture::micro("llama-headdim-mqa-bf16").model_dir, &["llama"]);
    let config = config.unwrap();
    assert_eq!((config.d_model, config.n_heads, config.d_head), (40, 4, 16));
    assert_eq!((config.n_kv_heads, rotary_of(&config).theta), (1, 20_000.0));
    let config = ModelConfig::from_dir(&Fixture::micro("llama-rope-llama3").model_dir, &["llama"]);
    assert_eq!(
        rotary_of(&config.unwrap()).scaling,
        RopeScaling::Llama3 {
            factor: 4.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_context: 32
        }
    );
    let config =
        ModelConfig::from_dir(&Fixture::micro("llama-rope-linear-bias").model_dir, &["llama"]);
    let config = config.unwrap();
    assert_eq!(rotary_of(&config).scaling, RopeScaling::Linear { factor: 2.5 });
    assert!(config.attention_bias && config.mlp_bias && !config.tie_word_embeddings);
}

#[test]
fn what_is_absent_has_its_documented_meaning() {
    let config = with(json!({
        "num_key_value_heads": null, "bos_token_id": null, "eos_token_id": null, "head_dim": null
    }))
    .unwrap();
    assert_eq!((config.n_kv_heads, config.d_head), (6, 8));
    assert_eq!((config.bos_token_id, config.eos_token_ids.len()), (None, 0));
    let plain = RotaryConfig { theta: 10_000.0, scaling: RopeScaling::None };
    assert_eq!(rotary_of(&config), plain);
    assert!(!config.attention_bias && !config.mlp_bias && !config.tie_word_embeddings);
    assert_eq!(
        config.kv_shape(),
        KvShape { n_layers: 3, n_kv_heads: 6, d_head: 8, max_context: 128, dtype: KvDtype::F32 }
    );
}

#[test]
fn model_type_is_looked_at_before_anything_else() {
    let text = r#"{"model_type": "mamba", "hidden_size": -1}"#;
    let error = ModelConfig::from_json(Path::new(PATH), text, &["llama", "opt"]).unwrap_err();
    assert!(matches!(error, Error::UnknownModelType { found, supported, .. }
        if found == "mamba" && supported == "llama, opt"));
    assert_eq!(faulty(json!({ "model_type": null })), "model_type");
    assert_eq!(faulty(json!({ "model_type": 3 })), "model_type");
}

#[test]
fn every_size_is_a_positive_whole_number_within_its_cap() {
    let sizes = [
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "vocab_size",
        "max_position_embeddings",
    ];
    let wrong = [json!(0), json!(-1), json!(32.0), json!("32"), json!([32]), json!(1e3)];
    for name in sizes {
        assert_eq!(faulty(json!({ name: null })), name);
        for value in wrong.iter().chain([&json!(u64::MAX), &json!(1u64 << 32)]) {
            assert_eq!(faulty(json!({ name: value })), name);
        }
    }
    for name in ["num_key_value_heads", "head_dim"] {
        for value in &wrong {
            assert_eq!(faulty(json!({ name: value })), name);
        }
    }
    let large = json!({ "max_position_embeddings": MAX_CONTEXT, "vocab_size": MAX_WIDTH });
    assert!(with(large).is_ok());
}

#[test]
fn heads_fit_together() {
    assert_eq!(faulty(json!({ "num_key_value_heads": 4 })), "num_key_value_heads");
    assert_eq!(faulty(json!({ "num_key_value_heads": 12 })), "num_key_value_heads");
    assert_eq!(faulty(json!({ "head_dim": 7 })), "head_dim");
    assert_eq!(faulty(json!({ "head_dim": 1 << 23 })), "head_dim");
    let five = json!({ "num_attention_heads": 5, "num_key_value_heads": null });
    assert_eq!(faulty(five), "num_attention_heads");
    let odd = json!({ "num_attention_heads": 16, "num_key_value_heads": null });
    assert_eq!(faulty(odd), "num_attention_heads");
    let explicit = json!({ "num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": 6 });
    assert_eq!(with(explicit).unwrap().d_head, 6);
}

#[test]
fn only_known_activations_are_taken() {
    assert_eq!(with(json!({ "hidden_act": "silu" })).unwrap().activation, Activation::Silu);
    for name in ["gelu_new", "swiglu", "Relu", ""] {
        let error = with(json!({ "hidden_act": name })).unwrap_err();
        assert!(matches!(&error, Error::UnknownActivation { found, supported, .. }
            if found == name && supported.contains("relu") && supported.contains("silu")));
    }
    assert_eq!(faulty(json!({ "hidden_act": null })), "hidden_act");
}

#[test]
fn what_would_change_the_result_and_is_not_supported_is_refused_by_name() {
    assert_eq!(faulty(json!({ "quantization_config": {} })), "quantization_config");
    assert_eq!(faulty(json!({ "partial_rotary_factor": 0.5 })), "partial_rotary_factor");
    let nested =
        json!({ "rope_parameters": { "rope_type": "default", "partial_rotary_factor": 0.5 } });
    assert_eq!(faulty(nested), "rope_parameters.partial_rotary_factor");
    assert!(with(json!({ "partial_rotary_factor": 1 })).is_ok());
}

#[test]
fn numbers_are_finite_and_positive_and_flags_are_flags() {
    for value in [json!(0), json!(-1e-5), json!("1e-5"), json!(true)] {
        assert_eq!(faulty(json!({ "rms_norm_eps": value })), "rms_norm_eps");
        assert_eq!(faulty(json!({ "rope_theta": value })), "rope_theta");
    }
    assert_eq!(faulty(json!({ "rms_norm_eps": null })), "rms_norm_eps");
    for name in ["attention_bias", "mlp_bias", "tie_word_embeddings"] {
        assert_eq!(faulty(json!({ name: 1 })), name);
        assert!(with(json!({ name: true })).is_ok());
    }
}

#[test]
fn both_forms_of_rope_settings_are_read() {
    let linear = RopeScaling::Linear { factor: 2.0 };
    for dict in [
        json!({ "type": "linear", "factor": 2 }),
        json!({ "rope_type": "linear", "factor": 2.0 }),
        json!({ "type": "linear", "rope_type": "linear", "factor": 2.0, "rope_theta": 5e5 }),
    ] {
        for name in ["rope_scaling", "rope_parameters"] {
            assert_eq!(rotary(json!({ name: dict })).scaling, linear);
        }
        let both = json!({ "rope_scaling": dict, "rope_parameters": dict, "rope_theta": null });
        assert_eq!(rotary(both).scaling, linear);
    }
    let only_theta = json!({ "rope_parameters": { "rope_theta": 7 } });
    assert_eq!(rotary(only_theta), RotaryConfig { theta: 7.0, scaling: RopeScaling::None });
    let default = json!({ "rope_scaling": { "rope_type": "default" }, "rope_theta": 3 });
    assert_eq!(rotary(default), RotaryConfig { theta: 3.0, scaling: RopeScaling::None });
}

#[test]
fn rope_settings_in_conflict_are_an_error() {
    let linear = |factor: f64| json!({ "rope_type": "linear", "factor": factor });
    let both = json!({ "rope_scaling": linear(2.0), "rope_parameters": linear(3.0) });
    assert_eq!(faulty(both), "rope_scaling");
    let both = json!({ "rope_scaling": linear(2.0), "rope_parameters": { "rope_theta": 1e4 } });
    assert_eq!(faulty(both), "rope_scaling");
    let types = json!({ "rope_scaling": { "type": "linear", "rope_type": "llama3", "factor": 2 } });
    assert_eq!(faulty(types), "rope_scaling.type");
    let thetas = json!({ "rope_theta": 1e4, "rope_parameters": { "rope_theta": 2e4 } });
    assert_eq!(faulty(thetas), "rope_theta");
}

#[test]
fn rope_settings_are_complete_and_known() {
    for name in ["yarn", "dynamic", "longrope", "Linear"] {
        let error = with(json!({ "rope_scaling": { "type": name, "factor": 2 } })).unwrap_err();
        assert!(matches!(error, Error::UnknownRopeType { found, .. } if found == name));
    }
    let cases = [
        (json!({}), "rope_scaling.rope_type"),
        (json!({ "factor": 2 }), "rope_scaling.rope_type"),
        (json!({ "rope_type": 1 }), "rope_scaling.rope_type"),
        (json!({ "type": "linear" }), "rope_scaling.factor"),
        (json!({ "type": "linear", "factor": 0 }), "rope_scaling.factor"),
        (json!([]), "rope_scaling"),
        (json!("linear"), "rope_scaling"),
    ];
    for (dict, field) in cases {
        assert_eq!(faulty(json!({ "rope_scaling": dict })), field);
    }
    let llama3 = json!({
        "rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4,
        "original_max_position_embeddings": 64
    });
    assert!(with(json!({ "rope_scaling": llama3 })).is_ok());
    for name in llama3.as_object().unwrap().keys().filter(|name| *name != "rope_type") {
        for value in [Value::Null, json!(0), json!(-1), json!("4")] {
            let mut dict = llama3.clone();
            dict[name] = value;
            assert_eq!(faulty(json!({ "rope_scaling": dict })), format!("rope_scaling.{name}"));
        }
    }
    let mut dict = llama3.clone();
    dict["high_freq_factor"] = json!(1);
    assert_eq!(faulty(json!({ "rope_scaling": dict })), "rope_scaling.high_freq_factor");
}

#[test]
fn token_ids_lie_in_the_vocabulary() {
    for value in [json!(160), json!(-1), json!(1.0), json!("2"), json!(true), json!(1u64 << 40)] {
        assert_eq!(faulty(json!({ "bos_token_id": value })), "bos_token_id");
        assert_eq!(faulty(json!({ "eos_token_id": value })), "eos_token_id");
        assert_eq!(faulty(json!({ "eos_token_id": [2, value] })), "eos_token_id");
    }
    assert_eq!(faulty(json!({ "bos_token_id": [1] })), "bos_token_id");
    assert_eq!(with(json!({ "eos_token_id": [9, 3, 9] })).unwrap().eos_token_ids, [3, 9]);
    assert!(with(json!({ "eos_token_id": [] })).unwrap().eos_token_ids.is_empty());
}

#[test]
fn end_ids_are_the_union_of_both_files() {
    let dir = tempfile::tempdir().unwrap();
    let config = Fixture::micro("llama-gqa-tied-theta").model_dir.join("config.json");
    std::fs::copy(config, dir.path().join("config.json")).unwrap();
    let read = |text: &str| {
        std::fs::write(dir.path().join("generation_config.json"), text).unwrap();
        ModelConfig::from_dir(dir.path(), &["llama"])
    };
    assert_eq!(
        read(r#"{"eos_token_id": [7, 2, 5], "top_p": 0.1}"#).unwrap().eos_token_ids,
        [2, 5, 7]
    );
    assert_eq!(read(r#"{"eos_token_id": 3}"#).unwrap().eos_token_ids, [2, 3]);
    assert_eq!(read("{}").unwrap().eos_token_ids, [2]);
    assert!(matches!(read("{"), Err(Error::Json { path, .. })
        if path.ends_with("generation_config.json")));
    assert!(matches!(read(r#"{"eos_token_id": 160}"#), Err(Error::Config { path, field, .. })
        if path.ends_with("generation_config.json") && field == "eos_token_id"));
}
