//! Ctrl-C while an example works: what was done is kept, and the next run goes on from there.
#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "a test may panic")]

#[path = "support/example.rs"]
mod example;

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use example::{example, json};

fn start(line: &[&str]) -> Child {
    example(line[0]).args(&line[1..]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// What comes of a process that gets what a terminal sends at Ctrl-C.
fn interrupted(child: Child) -> Output {
    // built into every shell, where a minimal system has no such program
    let kill = format!("kill -INT {}", child.id());
    assert!(Command::new("sh").args(["-c", &kill]).status().unwrap().success());
    child.wait_with_output().unwrap()
}

fn assert_says(output: &Output, named: &[&str]) {
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(stderr.starts_with("error: interrupted; "), "{stderr}");
    assert!(named.iter().all(|text| stderr.contains(text)), "{stderr}");
    assert!(output.stdout.is_empty());
}

#[test]
fn training_goes_on_from_its_checkpoint_to_the_same_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let (whole, parts, kept) = (at("whole.safetensors"), at("parts.safetensors"), at("kept"));
    let line = ["train_predictor", "--max-tokens", "6000", "--out"];
    json(&[&line[..], &[&whole]].concat());
    let line = [&line[..], &[&parts, "--checkpoint", &kept]].concat();
    let child = start(&line);
    let began = Instant::now();
    while !dir.path().join("kept").exists() {
        assert!(began.elapsed() < Duration::from_secs(300), "no checkpoint");
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_says(&interrupted(child), &[&kept, "the same command goes on"]);
    assert!(!dir.path().join("parts.safetensors").exists());
    json(&line);
    assert!(std::fs::read(&whole).unwrap() == std::fs::read(&parts).unwrap());
}

#[test]
fn counting_goes_on_from_its_profile_to_the_same_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let (whole, parts) = (at("whole.safetensors"), at("parts.safetensors"));
    let text = concat!(env!("CARGO_MANIFEST_DIR"), "/assets/text/austen.train.txt");
    let line = ["profile", "--context", "100", "--text", text, "--out"];
    let counting = [&line[..], &[&parts, "--resume"]].concat();
    json(&[&counting[..], &["--max-tokens", "300"]].concat());
    // between its note and its first look at signals, Ctrl-C ends it as it ends any process
    let mut wait = Duration::from_millis(200);
    let output = loop {
        let mut child = start(&counting);
        let mut note = String::new();
        BufReader::new(child.stderr.as_mut().unwrap()).read_line(&mut note).unwrap();
        assert!(note.starts_with("note: 300 tokens are counted already"), "{note}");
        std::thread::sleep(wait);
        let output = interrupted(child);
        if output.status.code().is_some() {
            break output;
        }
        wait *= 2;
        assert!(wait < Duration::from_secs(10), "it never counts");
    };
    assert_says(&output, &[&parts, "--resume"]);
    let counted = json(&["inspect", &parts])["tokens"].as_u64().unwrap();
    assert!(counted > 300 && counted.is_multiple_of(100), "{counted}");
    let more = (counted + 300).to_string();
    json(&[&counting[..], &["--max-tokens", &more]].concat());
    json(&[&line[..], &[&whole, "--max-tokens", &more]].concat());
    assert!(std::fs::read(&whole).unwrap() == std::fs::read(&parts).unwrap());
}
