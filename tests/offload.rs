//! What goes to the fast device, as command lines ask for it, and the script that compares it on a GPU, rehearsed on
//! the stand-in. Runs the examples that were built with the tests.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::env::consts::EXE_SUFFIX;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;

fn example(name: &str) -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let profile = test.parent().and_then(Path::parent).unwrap();
    let path = profile.join("examples").join(format!("{name}{EXE_SUFFIX}"));
    assert!(path.is_file(), "{}: run `cargo build --examples` first", path.display());
    path
}

fn run(line: &str) -> Output {
    let mut words = line.split_whitespace();
    Command::new(example(words.next().unwrap())).args(words).output().unwrap()
}

fn json(line: &str) -> Value {
    let output = run(&format!("{line} --json"));
    assert_eq!(output.status.code(), Some(0), "{line}: {}", text(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn whatever_goes_to_the_device_the_text_is_the_same() {
    let line = "generate --prompt-ids 1,1388,342 --max-tokens 16 --ignore-eos";
    let alone = json(line);
    for offload in ["neurons", "everything", "dense", "layers", "whole"] {
        for budget in ["6MiB", "40MiB"] {
            if (offload, budget) == ("whole", "6MiB") {
                continue;
            }
            let flags = format!("--device hybrid --vram-budget {budget} --offload {offload}");
            let found = json(&format!("{line} {flags} --device-context 64"));
            assert_eq!(found["ids"], alone["ids"], "{flags}");
            assert!(found["fast_bytes"].as_u64().unwrap() > 1 << 20, "{flags}");
        }
    }
}

#[test]
fn a_whole_model_that_does_not_fit_is_refused_with_figures() {
    let line = "generate x --max-tokens 1 --device hybrid --offload whole --vram-budget 1MiB";
    let refused = run(line);
    assert_eq!(refused.status.code(), Some(1));
    let said = text(&refused.stderr);
    assert!(said.contains("the fast device") && said.contains("1048576"), "{said}");
}

#[test]
fn what_makes_no_sense_is_refused() {
    for (line, word) in [
        ("generate x --offload layers", "--offload"),
        ("perplexity --device-context 100", "--device-context"),
        ("generate x --device hybrid --offload all", "whole"),
        ("generate x --device hybrid --offload whole --plan p.json", "--plan"),
        ("plan --device-context 100", "--device-context"),
        ("bench --synthetic tiny --arrangements layers/dense", "--device"),
        (
            "bench --synthetic tiny --device hybrid --arrangements layers/predicted",
            "dense or exact",
        ),
        ("bench --arrangements layers/dense", "--synthetic"),
    ] {
        let refused = run(line);
        assert_eq!(refused.status.code(), Some(2), "{line}");
        assert!(text(&refused.stderr).contains(word), "{line}: {}", text(&refused.stderr));
    }
}

#[test]
fn a_context_that_outgrows_the_device_is_an_error_that_says_so() {
    let flags = "--device hybrid --vram-budget 5MiB --offload everything --device-context 64";
    let line = format!("generate --prompt-ids 1,1388 --max-tokens 500 --ignore-eos {flags}");
    let refused = run(&line);
    assert_eq!(refused.status.code(), Some(1), "{}", text(&refused.stdout));
    assert!(text(&refused.stderr).contains("stand-in"), "{}", text(&refused.stderr));
}

#[test]
fn arrangements_are_compared_under_each_budget() {
    let line = "bench --synthetic tiny --density 0.03 --hot-share 0.17 --distinct-layers 2 --device hybrid \
                --budgets 40,70 --arrangements everything/exact,layers/dense,layers/exact,dense/exact,cpu/exact \
                --repetitions 1 -p 4 -n 2";
    let found = json(line);
    let arrangements = found["arrangements"].as_array().unwrap();
    let names: Vec<_> = arrangements.iter().map(|a| a["name"].as_str().unwrap()).collect();
    let expected = [
        "everything at 40 %",
        "layers at 40 %",
        "dense at 40 %",
        "cpu",
        "everything at 70 %",
        "layers at 70 %",
        "dense at 70 %",
    ];
    assert_eq!(names, expected);
    let model_bytes = found["model_bytes"].as_u64().unwrap();
    for arrangement in arrangements {
        for run in arrangement["runs"].as_array().unwrap() {
            assert!(run["decode_tokens_per_second"].as_f64().unwrap() > 0.0, "{arrangement}");
            let density = run["ffn_density"].as_f64().unwrap();
            assert!(
                if run["mode"] == "dense" { density == 1.0 } else { density < 0.1 },
                "{density}"
            );
        }
        let Some(percent) = arrangement["budget_percent"].as_u64() else { continue };
        let peak = arrangement["fast_peak_bytes"].as_u64().unwrap();
        assert!(peak > 0 && peak <= model_bytes / 100 * percent, "{arrangement}");
    }
    assert_eq!(arrangements[1]["runs"].as_array().unwrap().len(), 2);
    let none = json(&format!("{line} --seconds 0"));
    assert_eq!(none["left_out"].as_array().unwrap().len(), 7);
}

/// The device script, on the stand-in, with an environment variable set.
#[cfg(unix)]
fn rehearse(variable: Option<&str>) -> Output {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/testing/cuda/device.sh");
    let mut command = Command::new("bash");
    command.args([script, "rehearse"]).arg(example("bench"));
    command.envs(variable.map(|name| (name, "1"))).output().unwrap()
}

#[cfg(unix)]
#[test]
fn the_device_script_does_all_its_steps_and_says_what_failed() {
    let done = rehearse(None);
    assert_eq!(done.status.code(), Some(0), "{}", text(&done.stderr));
    let found: Value = serde_json::from_slice(&done.stdout).unwrap();
    assert_eq!(found["device"]["device"], "rehearsal");
    assert_eq!(
        (&found["parity"]["rehearsed"], found["sweep"].as_array().unwrap().len()),
        (&true.into(), 1)
    );
    let cases = found["bench"].as_array().unwrap();
    assert_eq!(cases.len(), 7);
    for case in cases {
        let arrangements = case["result"]["arrangements"].as_array().unwrap();
        assert!(
            arrangements.len() >= 2 && case["result"]["left_out"].as_array().unwrap().is_empty()
        );
    }
}

#[cfg(unix)]
#[test]
fn the_device_script_ends_clearly_without_a_gpu_and_keeps_to_six_minutes() {
    let missing = rehearse(Some("NO_GPU"));
    assert_eq!(missing.status.code(), Some(3));
    assert!(text(&missing.stderr).contains("no GPU: rehearsed"), "{}", text(&missing.stderr));
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/testing/cuda/device.sh");
    let list = Command::new("bash").args([script, "list"]).output().unwrap();
    let list = text(&list.stdout);
    let total = list.lines().find_map(|line| line.strip_prefix("total: at most ")).unwrap();
    let seconds: u64 = total.strip_suffix(" s").unwrap().parse().unwrap();
    assert!((100..360).contains(&seconds), "{list}");
}
