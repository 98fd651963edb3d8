//! Broken `config.json`.

use std::fs;
use std::path::Path;

use powerinfer_core::{Error, ModelConfig};
use testing::Fixture;

use crate::{Check, Folder, pattern};

const LLAMA: &[&str] = &["llama"];

#[test]
fn a_config_cut_anywhere_is_broken_json() {
    let config =
        fs::read_to_string(Fixture::micro("llama-rope-llama3").model_dir.join("config.json"))
            .expect("the fixture");
    for len in 0..config.trim_end().len() {
        let error = ModelConfig::from_json(Path::new("c.json"), &config[..len], LLAMA).unwrap_err();
        assert!(matches!(error, Error::Json { .. }), "{len}: {error}");
    }
}

#[test]
fn a_config_with_a_flipped_bit_is_read_or_refused_with_its_path() {
    let folder = Folder::of("llama-rope-llama3");
    let config = folder.read("config.json");
    let mut refused = 0;
    for bit in 0..config.len() * 8 {
        let mut broken = config.clone();
        broken[bit / 8] ^= 1 << (bit % 8);
        folder.write("config.json", &broken);
        if let Err(error) = ModelConfig::from_dir(folder.path(), LLAMA) {
            assert!(error.to_string().contains("config.json"), "bit {bit}: {error}");
            refused += 1;
        }
    }
    assert!(refused > config.len() * 2, "{refused} of {} bits refused", config.len() * 8);
}

#[test]
fn a_config_with_a_line_left_out_or_repeated_is_read_or_refused_by_name() {
    let path = Fixture::micro("llama-rope-llama3").model_dir.join("config.json");
    let config = fs::read_to_string(path).expect("the fixture");
    let lines: Vec<&str> = config.lines().collect();
    for at in 1..lines.len() - 1 {
        for times in [0, 2] {
            let mut broken = lines.clone();
            broken.splice(at..=at, vec![lines[at]; times]);
            let read = ModelConfig::from_json(Path::new("c.json"), &broken.join("\n"), LLAMA);
            if times == 2 {
                assert!(matches!(read, Err(Error::Json { .. })), "{}", lines[at]);
            } else if let Err(error) = read {
                let named = error.to_string().starts_with("c.json: ");
                assert!(named && matches!(error, Error::Config { .. } | Error::Json { .. }));
            }
        }
    }
}

#[test]
fn broken_configs_have_their_errors() {
    let with = |field: &str, value: &str| {
        let path = Fixture::micro("llama-mha-untied-sharded").model_dir.join("config.json");
        let text = fs::read_to_string(path).expect("the fixture");
        let line =
            text.lines().find(|line| line.contains(&format!("\"{field}\""))).expect("a line");
        let comma = if line.ends_with(',') { "," } else { "" };
        text.replace(line, &format!(" \"{field}\": {value}{comma}"))
    };
    let field = |error: &Error, name: &str| {
        matches!(error, Error::Config { path, field, .. }
            if path == Path::new("c.json") && field == name)
    };
    for (name, values) in [
        ("hidden_size", &["0", "-32", "32.0", "\"32\"", "[32]", "null", "1e2", "99999999"][..]),
        ("num_attention_heads", &["0", "32", "18446744073709551616"]),
        ("num_key_value_heads", &["0", "3", "8", "4.5"]),
        ("vocab_size", &["0", "-1", "9223372036854775808"]),
        ("max_position_embeddings", &["0", "-1", "4294967296"]),
        ("num_hidden_layers", &["0", "5000", "true"]),
        ("rms_norm_eps", &["0", "-1e-5", "null", "\"small\""]),
        ("rope_theta", &["0", "-1", "[]"]),
        ("rope_scaling", &["[]", "1", "\"linear\""]),
        ("eos_token_id", &["-1", "160", "2.0", "[2, -1]", "[[2]]", "{}"]),
        ("bos_token_id", &["160", "[1]"]),
        ("tie_word_embeddings", &["0", "\"false\""]),
        ("hidden_act", &["null", "1"]),
        ("model_type", &["null", "1"]),
    ] {
        for value in values {
            let text = with(name, value);
            let error = ModelConfig::from_json(Path::new("c.json"), &text, LLAMA).unwrap_err();
            assert!(field(&error, name), "{name}: {value}: {error}");
        }
    }

    let cases: [(&str, &str, Check); 9] = [
        ("model_type", "\"mistral\"", pattern!(Error::UnknownModelType { .. })),
        ("hidden_act", "\"gelu_new\"", pattern!(Error::UnknownActivation { .. })),
        ("rope_scaling", "{\"type\": \"yarn\"}", pattern!(Error::UnknownRopeType { .. })),
        ("rms_norm_eps", "NaN", pattern!(Error::Json { .. })),
        ("rms_norm_eps", "Infinity", pattern!(Error::Json { .. })),
        ("rms_norm_eps", "1e999", pattern!(Error::Json { .. })),
        ("hidden_size", "32, \"hidden_size\": 64", pattern!(Error::Json { .. })),
        ("rope_scaling", "{\"type\": \"linear\", \"type\": 1}", pattern!(Error::Json { .. })),
        ("rope_scaling", &"[".repeat(10_000), pattern!(Error::Json { .. })),
    ];
    for (name, value, check) in cases {
        let text = with(name, value);
        let error = ModelConfig::from_json(Path::new("c.json"), &text, LLAMA).unwrap_err();
        assert!(check(&error), "{name}: {value:.80}: {error}");
    }
}

#[test]
fn a_config_that_is_no_real_file_or_far_too_long_is_refused_unread() {
    let folder = Folder::of("llama-mha-untied-sharded");
    let config = folder.path().join("config.json");
    fs::File::create(&config).and_then(|file| file.set_len(1 << 40)).expect("a sparse file");
    let error = ModelConfig::from_dir(folder.path(), LLAMA).unwrap_err();
    assert!(matches!(error, Error::FileTooLong { path, .. } if path == config));

    folder.write("config.json", vec![b' '; 2 << 20]);
    let error = ModelConfig::from_dir(folder.path(), LLAMA).unwrap_err();
    assert!(matches!(error, Error::Json { .. }));

    folder.write("config.json", [0xFF, 0xFE, b'{', b'}']);
    assert!(matches!(ModelConfig::from_dir(folder.path(), LLAMA), Err(Error::Json { .. })));

    fs::remove_file(&config).expect("removed");
    assert!(matches!(ModelConfig::from_dir(folder.path(), LLAMA), Err(Error::Io { path, .. })
        if path == config));
    fs::create_dir(&config).expect("a folder");
    assert!(matches!(ModelConfig::from_dir(folder.path(), LLAMA), Err(Error::Io { .. })));
}
