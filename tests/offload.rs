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
            // neurons alone have no context there
            let context = if offload == "neurons" { "" } else { "--device-context 64" };
            let found = json(&format!("{line} {flags} {context}"));
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
    let said = text(&refused.stderr);
    assert!(said.contains("stand-in") && said.contains("device_context"), "{said}");
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

/// The device script with arguments, and with a folder of programs before the system's.
#[cfg(unix)]
fn script(args: &[&str], programs: Option<&Path>) -> Output {
    let mut command = Command::new("bash");
    command.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/testing/cuda/device.sh")).args(args);
    for name in ["OUT", "NVCC", "NVCC_STUB", "CUDA_HOME"] {
        command.env_remove(name);
    }
    if let Some(programs) = programs {
        let path = std::env::var("PATH").unwrap();
        command.env("PATH", format!("{}:{path}", programs.display()));
    }
    command.output().unwrap()
}

/// A program that is a line of shell.
#[cfg(unix)]
fn write_program(path: &Path, line: &str) {
    use std::os::unix::fs::PermissionsExt;
    std::fs::write(path, format!("#!/bin/sh\n{line}\n")).unwrap();
    std::fs::set_permissions(path, PermissionsExt::from_mode(0o755)).unwrap();
}

#[cfg(unix)]
#[test]
fn the_device_script_says_what_is_wrong_with_a_call() {
    let empty = tempfile::tempdir().unwrap();
    let empty = empty.path().to_str().unwrap();
    for (args, said) in [
        (&[][..], "usage: device.sh pack FOLDER"),
        (&["foo"], "usage: "),
        (&["run"], "usage: "),
        (&["pack"], "usage: "),
        (&["rehearse"], "usage: "),
        (&["run", "a", "b"], "usage: "),
        (&["list", "a"], "usage: "),
        (&["run", "/no/where"], "/no/where is no folder"),
        (&["run", file!()], "offload.rs is no folder"),
        (&["run", empty], "no ops-tests in"),
        (&["pack", file!()], "offload.rs is no folder that can be written"),
        (&["rehearse", "/no/bench"], "/no/bench is no program"),
        (&["rehearse", file!()], "offload.rs is no program"),
    ] {
        let refused = script(args, None);
        assert_eq!(refused.status.code(), Some(2), "{args:?}");
        let lines = text(&refused.stderr);
        // a line of the script's own, and nothing of the shell's
        assert!(lines.starts_with("device.sh: ") && lines.contains(said), "{args:?}: {lines}");
        assert_eq!((lines.lines().count(), text(&refused.stdout).as_str()), (1, ""), "{lines}");
    }
}

#[cfg(unix)]
#[test]
fn the_device_script_names_the_library_that_is_missing() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    for name in ["ops-tests", "bench"] {
        write_program(&at(name), "exit 1");
    }
    let programs = tempfile::tempdir().unwrap();
    let run = |lines: &[&str]| {
        let said = lines.join("\\n");
        write_program(&programs.path().join("ldd"), &format!("printf '{said}\\n'"));
        let run = script(&["run", folder.path().to_str().unwrap()], Some(programs.path()));
        (run.status.code(), text(&run.stderr))
    };
    let (driver, blas) = ("\\tlibcuda.so.1 => not found", "\\tlibcublas.so.13 => not found");
    let c = "./bench: /lib/libc.so.6: version `GLIBC_9.9'\\'' not found (required by ./bench)";
    for (lines, status, name) in [
        (&[driver, blas][..], 3, "no NVIDIA driver: libcublas.so.13, libcuda.so.1"),
        (&[blas], 2, "need libcublas.so.13"),
        (&[c], 2, "need version `GLIBC_9.9' not found"),
    ] {
        let (found, said) = run(lines);
        assert!(found == Some(status) && said.contains(name), "{found:?}: {said}");
    }
    // with the stand-ins that `pack` makes it goes on, here to programs that find no GPU
    std::fs::create_dir(at("stand-ins")).unwrap();
    let ldd = format!("case $LD_LIBRARY_PATH in *stand-ins*) ;; *) printf '{blas}\\n' ;; esac");
    write_program(&programs.path().join("ldd"), &ldd);
    let went_on = script(&["run", folder.path().to_str().unwrap()], Some(programs.path()));
    let said = text(&went_on.stderr);
    assert_eq!(went_on.status.code(), Some(3), "{said}");
    assert!(
        said.contains("no libcublas.so.13: stand-ins") && said.contains("no GPU that"),
        "{said}"
    );
}
