//! The examples as scripts drive them: flags, JSON, exit status. Runs the examples that were built
//! with the tests.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

#[path = "support/example.rs"]
mod example;

use std::io::Write;
use std::process::Stdio;

use example::{example, json, run};
use safetensors::SafeTensors;
use serde_json::Value;
use testing::Fixture;

fn assert_fields(value: &Value, fields: &str) {
    for field in fields.split_whitespace() {
        assert!(value.get(field).is_some(), "no field {field} in {value}");
    }
}

fn ids(value: &Value) -> Vec<u32> {
    serde_json::from_value(value.clone()).unwrap()
}

fn comma_separated(ids: &[u32]) -> String {
    ids.iter().map(u32::to_string).collect::<Vec<_>>().join(",")
}

#[test]
fn generate_gives_the_reference_text_with_every_field() {
    let prompt = Fixture::demo().golden().prompts.remove(0);
    let text = prompt.text.unwrap();
    let found = json(&["generate", &text, "--max-tokens", "32", "--ignore-eos"]);
    assert_fields(
        &found,
        "prompt_ids ids text finish_reason prefill_tokens prefill_seconds decode_tokens \
         decode_seconds decode_tokens_per_second ffn_density ffn_density_per_layer picked_density \
         weight_bytes_per_token weight_bytes_resident predictor_seconds sparsity dtype",
    );
    assert_eq!(found["text"], prompt.greedy_text.unwrap());
    assert_eq!(ids(&found["ids"]), prompt.greedy_ids);
    assert_eq!(ids(&found["prompt_ids"]), prompt.input_ids);
    assert_eq!(found["finish_reason"], "max_tokens");
    assert_eq!((&found["sparsity"], &found["dtype"]), (&"exact".into(), &"f16".into()));
    assert_eq!(found["ffn_density_per_layer"].as_array().unwrap().len(), 6);

    let fed = comma_separated(&prompt.input_ids);
    let by_ids = json(&["generate", "--prompt-ids", &fed, "--max-tokens", "32", "--ignore-eos"]);
    assert_eq!(by_ids["ids"], found["ids"]);
}

#[test]
fn a_fast_device_writes_the_same_text_and_says_what_it_did() {
    let line = |more: &[&'static str]| {
        let common = ["generate", "It was a truth", "--max-tokens", "12", "--threads", "2"];
        [&common[..], more].concat()
    };
    let alone = json(&line(&[]));
    assert_eq!(alone["fast_device"], Value::Null);
    assert_eq!(alone["split"], Value::Null);
    for more in [
        &["--device", "hybrid"][..],
        &["--device", "hybrid", "--vram-budget", "4MiB", "--sparsity", "dense"],
    ] {
        let split = json(&line(more));
        assert_eq!(split["ids"], alone["ids"], "{more:?}");
        assert!(split["fast_device"].is_string());
        assert!(split["fast_bytes"].as_u64().unwrap() > 1 << 20);
        let shares = &split["split"];
        assert_fields(shares, "fast_bytes_per_token cold_seconds fast_seconds wait_seconds");
        assert!(shares["hit_rate"].as_f64().unwrap() > 0.5, "{shares}");
    }
    // no room for anything is no error: all neurons are cold
    let cold = json(&line(&["--device", "hybrid", "--vram-budget", "1KiB"]));
    assert_eq!((&cold["ids"], &cold["fast_bytes"]), (&alone["ids"], &0.into()));
    let refused = run(&line(&["--device", "hybrid", "--plan", "no-such-plan.json"]));
    assert_eq!(refused.status.code(), Some(1));
    assert!(String::from_utf8(refused.stderr).unwrap().starts_with("error: no-such-plan.json"));
}

#[test]
fn generate_streams_the_text_to_stdout_and_nothing_else() {
    let output = run(&["generate", "It was a truth", "--max-tokens", "8", "--stop", "e, th"]);
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(String::from_utf8(output.stdout).unwrap(), " to b\n");
    assert!(String::from_utf8(output.stderr).unwrap().contains("stop_string"));
}

#[test]
fn chat_answers_each_line_and_keeps_its_cache() {
    let mut child = example("chat")
        .args(["It was a truth", "--system", "Speak.", "--max-tokens", "6", "--json"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(b"And then?\n\nWhere?").unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    let found: Value = serde_json::from_slice(&output.stdout).unwrap();
    let roles: Vec<&str> =
        found["messages"].as_array().unwrap().iter().map(|m| m["role"].as_str().unwrap()).collect();
    assert_eq!(roles.join(" "), "system user assistant user assistant user assistant");
    let turns = found["turns"].as_array().unwrap();
    let tokens = |turn: usize, field: &str| turns[turn][field].as_u64().unwrap();
    assert_eq!(tokens(0, "cached_tokens"), 0);
    assert!(tokens(2, "cached_tokens") >= tokens(1, "prompt_tokens"));

    let plain = run(&["chat", "It was a truth", "--max-tokens", "6"]);
    let text = String::from_utf8(plain.stdout).unwrap();
    let alone = json(&["chat", "It was a truth", "--max-tokens", "6"]);
    assert_eq!(text.trim_end_matches('\n'), alone["turns"][0]["text"]);
}

#[test]
fn generate_draws_the_same_text_from_the_same_seed() {
    let draw = |seed| {
        let seeded =
            ["--temperature", "0.9", "--top-k", "50", "--top-p", "0.95", "--min-p", "0.01"];
        let line = ["generate", "--max-tokens", "20", "--repeat-penalty", "1.1", "--seed", seed];
        json(&[&line[..], &seeded].concat())["text"].clone()
    };
    assert_eq!(draw("7"), draw("7"));
    assert_ne!(draw("7"), draw("8"));
}

#[test]
fn logits_are_the_same_in_any_pieces_and_written_as_safetensors() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let (whole, parts) = (path("whole.safetensors"), path("parts.safetensors"));
    let line = ["logits", "--ids", "1,1388,342,261,1988,287,9", "--out"];
    let found = json(&[&line[..], &[&whole]].concat());
    let cut = json(&[&line[..], &[&parts, "--chunks", "5,1,1"]].concat());
    assert_fields(&found, "n_tokens vocab_size top1");
    assert_eq!((&found["n_tokens"], &found["vocab_size"]), (&7.into(), &4096.into()));
    assert_eq!(ids(&found["top1"]).len(), 7);
    assert_eq!(cut["top1"], found["top1"]);

    let (whole, parts) = (std::fs::read(whole).unwrap(), std::fs::read(parts).unwrap());
    let whole = SafeTensors::deserialize(&whole).unwrap();
    let parts = SafeTensors::deserialize(&parts).unwrap();
    for (name, shape) in [("logits", &[7, 4096][..]), ("ffn_active", &[6])] {
        let tensor = whole.tensor(name).unwrap();
        assert_eq!(tensor.shape(), shape);
        assert!(tensor.data() == parts.tensor(name).unwrap().data(), "{name} differs");
    }
}

#[test]
fn perplexity_is_the_same_dense_and_exact() {
    let line = ["perplexity", "--context", "64", "--max-tokens", "300", "--sparsity"];
    let exact = json(&[&line[..], &["exact"]].concat());
    let dense = json(&[&line[..], &["dense"]].concat());
    assert_fields(&exact, "perplexity tokens ffn_density picked_density tokens_per_second");
    assert_eq!(exact["tokens"], 256);
    assert_eq!(exact["perplexity"], dense["perplexity"]);
    assert_eq!(dense["ffn_density"], 1.0);
    assert!(exact["ffn_density"].as_f64().unwrap() < 0.2);
}

#[test]
fn perplexity_is_the_reference_s() {
    let text = testing::fixture::HELD_OUT_TEXTS[1];
    let path = testing::fixture::text_path(text);
    for model in Fixture::trained() {
        let dir = model.model_dir.to_str().unwrap();
        let found = json(&["perplexity", "--model", dir, "--text", path.to_str().unwrap()]);
        let expected = testing::fixture::reference_perplexity(&model.name, text);
        assert_eq!(found["tokens"], expected.tokens, "{}", model.name);
        let ratio = found["perplexity"].as_f64().unwrap() / expected.perplexity;
        assert!((ratio - 1.0).abs() < 1e-3, "{}: {ratio}", model.name);
    }
}

#[test]
fn predicted_perplexity_is_nearly_the_dense_one() {
    let text = concat!(env!("CARGO_MANIFEST_DIR"), "/assets/text/moby.val.txt");
    let line = ["perplexity", "--max-tokens", "2048", "--text", text];
    for model in Fixture::trained() {
        let line = [&line[..], &["--model", model.model_dir.to_str().unwrap()]].concat();
        let dense = json(&line)["perplexity"].as_f64().unwrap();
        for (bits, most) in [("quantized:4", 0.002), ("quantized:2", 0.006)] {
            let found = json(&[&line[..], &["--predictor", bits]].concat());
            assert_fields(&found, "recall recall_mass picked_density ffn_density");
            let loss = found["perplexity"].as_f64().unwrap() / dense - 1.0;
            assert!(loss < most, "{} {bits}: {loss}", model.name);
            assert!(found["recall_mass"].as_f64().unwrap() > 0.97, "{} {bits}", model.name);
            assert!(found["picked_density"].as_f64().unwrap() < 0.2, "{} {bits}", model.name);
            assert_eq!(found["sparsity"], "predicted");
        }
    }
}

#[test]
fn a_profile_goes_on_where_it_stopped_and_plots() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let (whole, parts, plot) = (at("whole.safetensors"), at("parts.safetensors"), at("plot.svg"));
    let line = ["profile", "--context", "100", "--max-tokens"];
    let found = json(&[&line[..], &["500", "--out", &whole, "--report", &plot]].concat());
    assert_fields(&found, "tokens density_per_layer hot_share_80_per_layer hot_share_80");
    assert_eq!(
        (&found["tokens"], found["density_per_layer"].as_array().unwrap().len()),
        (&500.into(), 6)
    );
    // few neurons do most of the work
    assert!(found["hot_share_80"].as_f64().unwrap() < 0.5, "{found}");
    json(&[&line[..], &["300", "--out", &parts]].concat());
    json(&[&line[..], &["500", "--resume", "--out", &parts]].concat());
    assert!(std::fs::read(&whole).unwrap() == std::fs::read(&parts).unwrap());
    let shown = json(&["inspect", &whole]);
    assert_eq!((&shown["tokens"], &shown["architecture"]), (&500.into(), &"llama".into()));
    let merged = json(&[&line[..], &["500", "--merge", &whole]].concat());
    assert_eq!(merged["tokens"], 1000);
    assert_eq!(merged["hot_share_80"], found["hot_share_80"]);
    let plot = std::fs::read_to_string(plot).unwrap();
    assert_eq!(plot.matches("<polyline").count(), 6);
    assert!(plot.starts_with("<svg") && plot.trim_end().ends_with("</svg>"));
}

#[test]
fn a_plan_keeps_its_budget_and_is_shown() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let (file, plot) = (at("plan.json"), at("plan.svg"));
    let line = ["plan", "--vram-budget", "3MiB", "--out", &file, "--report", &plot];
    let found = json(&line);
    let fields = "hot_neurons_per_layer bytes_fast bytes_host hit_rate predicted_tokens_per_second";
    assert_fields(&found, fields);
    assert!(found["bytes_fast"].as_u64().unwrap() <= 3 << 20, "{found}");
    // a third of the neurons makes more than half of the activations
    assert!(found["hit_rate"].as_f64().unwrap() > 0.5, "{found}");
    let shown = json(&["inspect", &file]);
    assert_fields(&shown, fields);
    assert_eq!(shown["hot_neurons_per_layer"], found["hot_neurons_per_layer"]);
    let plot = std::fs::read_to_string(plot).unwrap();
    assert_eq!(plot.matches("<polyline").count(), 4);
    let synthetic = "plan --synthetic llama-7b --hardware rtx-4090 --offload everything \
                     --sparsity predicted --vram-budget 8GiB";
    let synthetic = json(&synthetic.split_whitespace().collect::<Vec<_>>());
    let faster = |field: &str| synthetic[field].as_f64().unwrap();
    assert!(faster("predicted_tokens_per_second") > faster("layer_split_tokens_per_second"));
}

#[test]
fn inspect_counts_what_is_there() {
    let found = json(&["inspect"]);
    assert_fields(&found, "architecture parameters tensors dtypes activation predictor threshold");
    assert_eq!(
        (&found["architecture"], &found["parameters"]),
        (&"llama".into(), &6_950_144.into())
    );
    let sharded = Fixture::micro("llama-mha-untied-sharded").model_dir;
    let text = run(&["inspect", sharded.to_str().unwrap()]);
    let text = String::from_utf8(text.stdout).unwrap();
    assert!(text.contains("lm_head.weight") && text.contains("relu, sparse"), "{text}");
}

#[test]
fn bench_compares_modes_and_measures_the_machine() {
    let line = "bench --synthetic tiny --density 0.2 --compare dense,exact,predicted:quantized \
                --repetitions 1 -p 16 -n 4 --context 20,5 --threads 1 --kv-dtype f16";
    let found = json(&line.split_whitespace().collect::<Vec<_>>());
    assert_fields(&found, "runs read_bandwidth_bytes_per_second page_kind");
    let runs = found["runs"].as_array().unwrap();
    let modes: Vec<_> = runs.iter().map(|run| &run["mode"]).collect();
    assert_eq!(modes, ["dense", "dense", "exact", "exact", "predicted", "predicted"]);
    let contexts: Vec<_> = runs.iter().map(|run| &run["context"]).collect();
    assert_eq!(contexts, [20, 5, 20, 5, 20, 5]);
    for run in runs {
        assert_eq!(run["kv_dtype"], "f16");
        assert_fields(
            run,
            "mode dtype threads batch prefill_tokens_per_second decode_tokens_per_second \
             weight_bytes_per_token ffn_density picked_density predictor_seconds",
        );
        assert!(run["decode_tokens_per_second"].as_f64().unwrap() > 0.0);
    }
    let density = runs[2]["ffn_density"].as_f64().unwrap();
    assert!((density / 0.2 - 1.0).abs() < 0.1, "{density}");
    let number = |run: usize, field: &str| runs[run][field].as_f64().unwrap();
    assert!(number(4, "picked_density") < 0.4 && number(4, "predictor_seconds") > 0.0);
    assert!(number(4, "weight_bytes_per_token") < number(2, "weight_bytes_per_token"));

    let line = "bench --synthetic tiny --density 0.2 --compare predicted:trained,predicted:quantized \
                --predictor-rank 32 --predictor-dtype q4_0 --repetitions 1 -p 4 -n 4 --threads 1";
    let found = json(&line.split_whitespace().collect::<Vec<_>>());
    assert!(found["predictor"].as_str().unwrap().contains("rank 32"));
    for (run, name, predictor) in
        [(0, "predicted:trained", "rank 32"), (1, "predicted:quantized", "quantized gate")]
    {
        assert_eq!(found["runs"][run]["name"], name);
        assert!(found["runs"][run]["predictor"].as_str().unwrap().contains(predictor));
    }
    assert!(found["runs"][0]["predictor_seconds"].as_f64().unwrap() > 0.0);
}

#[test]
fn a_predictor_is_made_inspected_used_and_tuned() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("p.safetensors");
    let file = file.to_str().unwrap();
    let line = ["train_predictor", "--method", "svd", "--max-tokens", "6000", "--out", file];
    let made = json(&line);
    assert_fields(&made, "layers parameters share_of_model recall_mass density tokens seconds");
    let layers = made["layers"].as_array().unwrap();
    assert_eq!(layers.len(), 6);
    for layer in layers {
        assert_fields(layer, "rank threshold recall recall_mass density");
        assert!(layer["recall_mass"].as_f64().unwrap() >= 0.975);
    }
    assert!(made["share_of_model"].as_f64().unwrap() <= 0.1);

    let inspected = json(&["inspect", file]);
    assert_eq!((&inspected["method"], &inspected["n_layers"]), (&"svd".into(), &6.into()));
    assert_eq!(inspected["parameters"], made["parameters"]);
    let mut line = vec!["perplexity", "--predictor", file, "--max-tokens", "512"];
    let held = json(&line);
    assert_eq!(held["sparsity"], "predicted");
    assert!(held["recall_mass"].as_f64().unwrap() > 0.95);
    line.extend(["--predictor-dtype", "q8_0"]);
    let smaller = json(&line);
    assert!(smaller["recall_mass"].as_f64().unwrap() > 0.94);

    let plot = dir.path().join("curve.svg");
    let list = format!("{file},quantized:3");
    let plot_path = plot.to_str().unwrap();
    let line = [
        "tune",
        "--predictors",
        &list,
        "--shifts",
        "-0.5,0",
        "--max-tokens",
        "512",
        "-n",
        "4",
        "--repetitions",
        "1",
        "--report",
        plot_path,
    ];
    let tuned = json(&line);
    let points = tuned["points"].as_array().unwrap();
    let modes: Vec<_> = points.iter().map(|point| &point["mode"]).collect();
    assert_eq!(modes, ["dense", "exact", "predicted", "predicted", "predicted", "predicted"]);
    assert_eq!(points[0]["perplexity"], points[1]["perplexity"]);
    let number = |at: usize, field: &str| points[at][field].as_f64().unwrap();
    for first in [2, 4] {
        assert!(number(first, "picked_density") < number(first + 1, "picked_density"));
        assert!(number(first, "recall_mass") < number(first + 1, "recall_mass"));
    }
    assert!(std::fs::read_to_string(&plot).unwrap().contains("quantized:3"));

    let quantized =
        json(&["train_predictor", "--method", "quantized", "--bits", "3", "--max-tokens", "6000"]);
    assert!(quantized["recall_mass"].as_f64().unwrap() > 0.98);
    let opt = Fixture::trained().into_iter().find(|model| model.name.contains("opt")).unwrap();
    let opt = opt.model_dir.to_str().unwrap();
    let refused = run(&["perplexity", "--model", opt, "--predictor", file]);
    assert_eq!(refused.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("expected opt, found llama"));
}

#[test]
fn bench_writes_a_synthetic_model_that_loads() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path().to_str().unwrap();
    let written = json(&["bench", "--synthetic", "tiny", "--write", dir]);
    assert!(written["bytes"].as_u64().unwrap() > 15_000_000);
    let inspected = json(&["inspect", dir]);
    assert_eq!((&inspected["dtypes"][0], &inspected["d_ff"]), (&"f16".into(), &1024.into()));
}

#[test]
fn an_own_architecture_at_full_depth_writes_what_generate_writes() {
    let line = ["It was a truth", "--max-tokens", "12"];
    let own = json(&[&["own_architecture"][..], &line].concat());
    let known = json(&[&["generate"][..], &line].concat());
    assert_eq!(own["ids"], known["ids"]);
    let shallow = json(&[&["own_architecture"][..], &line, &["--depth", "2"]].concat());
    assert_ne!(shallow["ids"], known["ids"]);
}

#[test]
fn a_converted_model_writes_what_the_folder_writes() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("demo.gguf");
    let path = path.to_str().unwrap();
    let line = ["It was a truth", "--max-tokens", "12"];
    let folder = json(&[&["generate"][..], &line].concat());
    for kind in [&[][..], &["--powerinfer"]] {
        let converted = json(&[&["convert", "--out", path], kind].concat());
        assert_fields(&converted, "bytes tensors");
        assert_eq!(converted["bytes"], std::fs::metadata(path).unwrap().len());
        for holding in ["resident", "mapped"] {
            let model = ["--model", path, "--holding", holding];
            let file = json(&[&["generate"][..], &line, &model].concat());
            assert_eq!((&file["text"], &file["ids"]), (&folder["text"], &folder["ids"]));
        }
        let inspected = json(&["inspect", path]);
        assert_eq!(inspected["tensors"], converted["tensors"]);
        assert_eq!(
            (&inspected["architecture"], &inspected["activation"]),
            (&"llama".into(), &"relu".into())
        );
        let own = run(&["convert", "--model", path, "--out", path]);
        assert_eq!(own.status.code(), Some(1), "the file that is read is not written over");
    }
}

#[test]
fn wrong_usage_is_exit_status_2() {
    for line in [
        "generate --no-such-flag",
        "generate --max-tokens many",
        "generate --temperature hot",
        "generate prompt --prompt-ids 1,2",
        "generate --prompt-ids 1,-2",
        "generate --dtype int3",
        "generate --threads 0",
        "logits --ids one",
        "logits --ids 1,2 --chunks 1,2",
        "logits --ids 1,2 --chunks 0,2",
        "convert",
        "chat --stop",
        "server --parallel 0",
        "server --port 70000",
        "bench --density 0.1",
        "bench --synthetic gpt-5",
        "bench --repetitions 0",
        "bench --compare fast",
        "bench --compare dense --sparsity exact",
        "bench --compare predicted:trained",
        "bench --synthetic tiny --device hybrid",
        "bench --batch 2",
        "generate --vram-budget 1GiB",
        "generate --plan plan.json",
        "generate --top-k 0",
        "perplexity --context 0",
        "perplexity --max-tokens 0",
        "profile --context 0",
        "profile --max-tokens 0",
        "profile --device hybrid",
        "plan --context 0",
        "plan --plan plan.json",
        "plan --device hybrid",
        "tune --repetitions 0",
        "tune --context 0",
        "tune --max-tokens 0",
        "tune -n 0",
        "own_architecture --depth 0",
        "own_architecture --max-tokens 0",
        "server --max-context 0",
        "server --max-body 0",
        "sparse_op --calls 0",
        "sparse_op --density 2",
        "train_predictor --max-tokens 0",
        "train_predictor --method svd --bits 3",
        "train_predictor --method quantized --out x.safetensors",
        "train_predictor --out x.bin",
    ] {
        let output = run(&line.split_whitespace().collect::<Vec<_>>());
        assert_eq!(output.status.code(), Some(2), "{line}");
        assert!(output.stdout.is_empty(), "{line}");
        assert!(output.stderr.starts_with(b"error: "), "{line}");
    }
}

#[test]
fn a_plan_with_nothing_hot_hits_nothing() {
    let output = run(&["plan", "--vram-budget", "0"]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("all: 0.0 % of the activations are hot"), "{text}");
    assert!(!text.contains("-0.0"), "{text}");
}

#[test]
fn outputs_that_cannot_be_written_and_texts_without_an_end_fail_before_any_work() {
    let dir = tempfile::tempdir().unwrap();
    let (missing, folder) = (dir.path().join("missing/x.safetensors"), dir.path());
    let (missing, folder) = (missing.to_str().unwrap(), folder.to_str().unwrap());
    for (args, named) in [
        (vec!["train_predictor", "--out", missing], missing),
        (vec!["tune", "--report", missing], missing),
        (vec!["plan", "--out", folder], folder),
        (vec!["plan", "--report", missing], missing),
        (vec!["profile", "--out", folder], folder),
        (vec!["train_predictor", "--text", folder], folder),
        #[cfg(unix)]
        (vec!["train_predictor", "--text", "/dev/zero"], "/dev/zero"),
    ] {
        let output = run(&args);
        assert_eq!(output.status.code(), Some(1), "{args:?}");
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert!(stderr.starts_with("error: ") && stderr.contains(named), "{args:?}: {stderr}");
    }
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "nothing is left there");
}

#[test]
fn failures_are_exit_status_1_and_one_error_line() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    std::fs::write(&file, b"\xff not text").unwrap();
    let (dir, file) = (dir.path().to_str().unwrap(), file.to_str().unwrap());
    let micro = Fixture::micro("llama-mha-untied-sharded").model_dir;
    let micro = micro.to_str().unwrap();
    for (line, named) in [
        (vec!["generate", "--model", dir], "config.json"),
        (vec!["generate", "--model", file], "file"),
        (vec!["generate", "--model", "no-such.gguf"], "no-such.gguf"),
        (vec!["chat", "hi", "--model", micro], "chat template"),
        (vec!["chat", "hi", "--chat-template", file], file),
        (vec!["chat", "hi", "--chat-template", "no-such-file"], "no-such-file"),
        (vec!["server", "--host", "256.0.0.1"], "error"),
        (vec!["generate", "--model", micro], "tokenizer"),
        (vec!["generate", "--prompt-ids", "4096"], "4096"),
        (vec!["generate", "--temperature=-1"], "temperature"),
        (vec!["generate", "--predictor", "no-such-folder"], "model_0.pt"),
        (vec!["generate", "--predictor-shift=nan", "--predictor", "quantized"], "finite shift"),
        (vec!["generate", "--device", "cuda"], "cuda:0"),
        (vec!["logits", "--ids", "1,2", "--out", dir], dir),
        (vec!["logits", "--ids", "1,99999"], "99999"),
        (vec!["perplexity", "--text", file], file),
        (vec!["perplexity", "--text", "no-such-file"], "no-such-file"),
        (vec!["perplexity", "--max-tokens", "10"], "10 tokens"),
        (vec!["perplexity", "--context", "600"], "512"),
        (vec!["inspect", file], "begins with GGUF or PWRI"),
        (vec!["convert", "--out", "no/such/folder/m.gguf"], "m.gguf"),
        (vec!["bench", "-p", "600"], "632"),
        (vec!["plan", "--profile", file], file),
        (vec!["plan", "--hardware", "rtx-4090", "--vram-budget", "25GiB"], "the fast device"),
        (vec!["profile", "--text", "no-such-file"], "no-such-file"),
        (vec!["profile", "--activation-folder", dir], "activation_N.pt"),
        (vec!["own_architecture", "--model", dir], "config.json"),
    ] {
        let output = run(&line);
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{line:?}: {stderr}");
        assert!(output.stdout.is_empty(), "{line:?}");
        let errors = stderr.lines().filter(|line| line.starts_with("error: ")).count();
        assert!(errors == 1 && stderr.contains(named), "{line:?}: {stderr}");
        assert!(!stderr.contains("panicked"), "{line:?}: {stderr}");
    }
}

#[test]
fn a_reader_that_goes_away_is_no_failure() {
    let mut child = example("generate")
        .args(["--max-tokens", "400", "--ignore-eos"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    assert!(!String::from_utf8_lossy(&output.stderr).contains("error"));
}

#[test]
fn help_is_printed_for_every_example() {
    for name in [
        "generate",
        "chat",
        "server",
        "logits",
        "perplexity",
        "inspect",
        "convert",
        "bench",
        "profile",
        "train_predictor",
        "tune",
        "plan",
        "own_architecture",
    ] {
        let output = run(&[name, "--help"]);
        assert_eq!(output.status.code(), Some(0), "{name}");
        assert!(String::from_utf8(output.stdout).unwrap().contains("--model"), "{name}");
    }
}
