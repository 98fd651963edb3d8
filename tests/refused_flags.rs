//! A flag does what it says, or is refused by name: nothing that is asked for is silently left out. Runs the
//! examples that were built with the tests.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

#[path = "support/example.rs"]
mod example;

use example::{json, run};
use testing::Fixture;

/// Fails unless the line is wrong usage, and what is said names all of `words`.
fn refused(line: &str, words: &[&str]) {
    let output = run(&line.split_whitespace().collect::<Vec<_>>());
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{line}: {said}");
    assert!(output.stdout.is_empty(), "{line}");
    for word in words {
        assert!(said.contains(word), "{line}: {said}");
    }
}

#[test]
fn flags_that_need_another_name_it() {
    let demo = Fixture::demo().model_dir;
    let demo = demo.to_str().unwrap();
    for flag in [
        "--arrangements layers/dense",
        "--density 0.1",
        "--hot-share 0.2",
        "--distinct-layers 2",
        "--predictor-rank 8",
        "--write x",
    ] {
        let name = flag.split_once(' ').unwrap().0;
        refused(&format!("bench {flag}"), &[name, "--synthetic"]);
        refused(&format!("bench --model {demo} {flag}"), &[name, "--synthetic", "--model"]);
        refused(&format!("bench --model {demo} --device hybrid {flag}"), &[name, "--synthetic"]);
    }
    for flag in ["--seconds 3", "--budgets 40"] {
        let name = flag.split_once(' ').unwrap().0;
        for line in ["bench", "bench --compare dense", "bench --synthetic tiny"] {
            refused(&format!("{line} {flag}"), &[name, "--arrangements"]);
        }
    }
    for flag in ["--density 0.1", "--hot-share 0.2"] {
        let name = flag.split_once(' ').unwrap().0;
        refused(&format!("plan {flag}"), &[name, "--synthetic"]);
        refused(&format!("plan --model {demo} {flag}"), &[name, "--synthetic"]);
    }
    refused(
        "bench --synthetic tiny --predictor-rank 8",
        &["--predictor-rank", "predicted:trained"],
    );
    refused("generate x --predictor-dtype q4_0", &["--predictor-dtype", "--predictor"]);
    refused("generate x --activation relu", &["--activation", "GGUF"]);
    refused("generate x --requantise-down", &["--requantise-down", "GGUF"]);
}

#[test]
fn a_context_of_which_nothing_is_on_the_device_is_no_device_context() {
    let words = &["--device-context", "neurons"];
    refused("generate x --device hybrid --offload neurons --device-context 9", words);
    let bench = "bench --synthetic tiny --device hybrid --device-context 9";
    refused(&format!("{bench} --vram-budget 4MiB --offload neurons"), words);
    refused(&format!("{bench} --arrangements neurons/exact,cpu/exact"), words);
    refused("generate x --device hybrid --offload everything --device-context 0", &["at least 1"]);
    // more than the model's context is the library's to say, which knows the model
    let line = "generate x --device hybrid --offload everything --device-context 513";
    let output = run(&line.split_whitespace().collect::<Vec<_>>());
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(said.contains("device_context: expected 1 to 512") && said.contains("513"), "{said}");
}

#[test]
fn values_out_of_range_name_the_flag_and_what_it_takes() {
    let range = "0.001 to 0.999";
    for line in ["bench --synthetic tiny", "plan --synthetic tiny"] {
        for value in ["0", "1.5", "-1", "nan", "x"] {
            refused(&format!("{line} --density={value}"), &["--density", range, value]);
            refused(&format!("{line} --hot-share={value}"), &["--hot-share", range, value]);
        }
        // at half density 80 % of the activations take at least 40 % of the neurons
        for value in ["0.9", "0.2"] {
            let line = format!("{line} --density 0.5 --hot-share {value}");
            refused(&line, &["--hot-share", "0.8", value, "--density 0.5"]);
        }
    }
    refused("plan --hardware nosuch", &["--hardware", "nosuch", "rtx-4090", "rtx-2080ti"]);
    refused(
        "generate x --device hybrid --vram-budget 8gib",
        &["--vram-budget", "GiB", "GB", "8gib"],
    );
}

#[test]
fn what_an_example_has_no_use_for_is_refused() {
    let engine = "--holding mapped|--requantise-down|--kv-dtype f16|--sparsity dense|--predictor quantized|\
                  --predictor-shift 1|--predictor-dtype q8_0";
    for (program, flags) in [
        ("own_architecture", "--holding mapped|--predictor quantized|--predictor-shift 1"),
        (
            "convert --out x.gguf",
            "--holding mapped|--kv-dtype f16|--sparsity dense|--predictor-shift 1",
        ),
        ("profile", engine),
        ("train_predictor", engine),
        ("inspect", engine),
        ("inspect", "--dtype f16|--threads 1"),
        ("sparse_op", engine),
        ("sparse_op", "--model x|--activation relu"),
        ("plan", "--holding mapped|--requantise-down|--predictor-shift 1"),
        ("tune", "--sparsity dense|--predictor-shift 1"),
        ("bench --synthetic tiny", "--holding mapped|--activation relu"),
        ("bench --synthetic tiny --arrangements cpu/exact --device hybrid", "--sparsity dense"),
        ("bench --synthetic tiny --write x", "--compare dense|-p 3|--repetitions 2"),
    ] {
        for flag in flags.split('|') {
            let name = flag.split_whitespace().next().unwrap();
            refused(&format!("{program} {flag}"), &[name]);
        }
    }
}

#[test]
fn what_only_another_mode_reads_is_refused() {
    for line in
        ["generate x --sparsity exact", "perplexity --sparsity dense", "plan --sparsity exact"]
    {
        refused(&format!("{line} --predictor quantized:3"), &["--predictor", "--sparsity"]);
    }
    refused("generate x --sparsity exact --predictor-shift 1", &["--predictor-shift", "exact"]);
    refused("plan --predictor-dtype q8_0", &["--predictor-dtype", "--predictor"]);
    refused("plan --hardware rtx-4090 --threads 2", &["--threads", "--hardware"]);
    refused("plan --activation relu", &["--activation", "GGUF"]);
    for flag in ["--top-k 40", "--top-p 0.9", "--min-p 0.1", "--seed 7"] {
        let name = flag.split_whitespace().next().unwrap();
        refused(&format!("generate x {flag}"), &[name, "--temperature"]);
    }
}

#[test]
fn a_plan_for_a_predictor_that_is_not_there_is_refused() {
    let here = env!("CARGO_MANIFEST_DIR");
    let not_one = format!("{here}/Cargo.toml");
    for path in ["nosuch.safetensors", here, &not_one] {
        for mode in [&[][..], &["--sparsity", "predicted"]] {
            let output = run(&[&["plan", "--predictor", path], mode].concat());
            let said = String::from_utf8(output.stderr).unwrap();
            assert_ne!(output.status.code(), Some(0), "{path}: {said}");
            assert!(said.contains(path) && output.stdout.is_empty(), "{path}: {said}");
        }
    }
}

#[test]
fn a_dense_synthetic_model_is_planned_as_dense_as_it_is() {
    for density in ["0.05", "0.5", "0.9"] {
        let output = run(&["plan", "--synthetic", "tiny", "--density", density]);
        let text = String::from_utf8(output.stdout).unwrap();
        // layer, fires, %
        let first = text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
        let first = first.into_iter().find(|words| words.first() == Some(&"0")).unwrap();
        let (fires, density): (f64, f64) = (first[1].parse().unwrap(), density.parse().unwrap());
        assert!((fires / 100.0 / density - 1.0).abs() < 0.03, "{text}");
    }
}

#[test]
fn a_device_that_cannot_be_had_is_an_error_whatever_would_run_on_it() {
    if powerinfer::open_cuda(0, None).is_ok() {
        return;
    }
    for line in [
        "bench --synthetic tiny --device cuda --arrangements cpu/exact --json",
        "bench --synthetic tiny --device cuda --json",
        "generate x --device cuda --json",
    ] {
        let output = run(&line.split_whitespace().collect::<Vec<_>>());
        assert_eq!(output.status.code(), Some(1), "{line}");
        assert!(output.stdout.is_empty(), "{line}");
        assert!(String::from_utf8(output.stderr).unwrap().contains("cuda"), "{line}");
    }
}

#[test]
fn a_plan_runs_under_the_budget_that_it_was_made_for() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let write = "generate --prompt-ids 1,1388,342 --max-tokens 8 --ignore-eos --device hybrid";
    let with_plan = |file: &str, more: &str| {
        let line = format!("{write} --plan {file} {more} --json");
        run(&line.split_whitespace().collect::<Vec<_>>())
    };
    for (offload, budget) in [("neurons", "3MiB"), ("everything", "9MiB"), ("layers", "7MiB")] {
        let file = at("any-name");
        let line = ["plan", "--vram-budget", budget, "--offload", offload, "--out", &file];
        let made = json(&line);
        // without a budget it is the plan's
        let output = with_plan(&file, "");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(0), "{offload}: {said}");
        let found: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        let fast_bytes = found["fast_bytes"].as_u64().unwrap();
        assert!(fast_bytes > 1 << 20 && fast_bytes <= made["budget_bytes"].as_u64().unwrap());
        assert_eq!(with_plan(&file, &format!("--vram-budget {budget}")).status.code(), Some(0));
        let small = with_plan(&file, "--vram-budget 1MiB");
        assert_eq!(small.status.code(), Some(1));
        assert!(String::from_utf8(small.stderr).unwrap().contains("1048576"));
        // a plan is known by what is in it
        assert_eq!(json(&["inspect", &file])["bytes_fast"], made["bytes_fast"]);
    }
    let file = at("none.json");
    json(&["plan", "--vram-budget", "0", "--out", &file]);
    let output = with_plan(&file, "");
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(0), "{said}");
    assert!(said.contains("the plan puts nothing there"), "{said}");
    refused(&format!("generate x --device hybrid --plan {file} --device-context 9"), &["--plan"]);
}

/// Bits and margin, layer by layer, as a run says them.
fn choices(line: &str) -> (serde_json::Value, serde_json::Value, Vec<String>) {
    let line = format!("{line} --json");
    let output = run(&line.split_whitespace().collect::<Vec<_>>());
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(0), "{said}");
    let found: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let notes =
        said.lines().filter(|line| line.contains("predict from") || line.contains("exactly"));
    (found["ids"].clone(), found["sparsity"].clone(), notes.map(str::to_owned).collect())
}

#[test]
fn predicted_mode_is_the_same_with_a_device_and_says_so() {
    let line = "generate --prompt-ids 1,1388,342 --max-tokens 60 --ignore-eos --sparsity predicted";
    let alone = choices(line);
    assert!(!alone.2.is_empty());
    for more in [
        "",
        "--vram-budget 0",
        "--vram-budget 4MiB",
        "--vram-budget 9MiB --offload everything",
        "--vram-budget 40MiB --offload whole",
    ] {
        assert_eq!(choices(&format!("{line} --device hybrid {more}")), alone, "{more}");
    }
}
