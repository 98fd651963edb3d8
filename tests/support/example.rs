//! Running the examples that were built with the tests.
#![allow(dead_code, reason = "each test uses a part")]

use std::env::consts::EXE_SUFFIX;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use serde_json::Value;

/// An example without arguments and without anything to read.
pub(crate) fn example(name: &str) -> Command {
    let test = std::env::current_exe().unwrap();
    let profile = test.parent().and_then(Path::parent).unwrap();
    let path = profile.join("examples").join(format!("{name}{EXE_SUFFIX}"));
    assert!(path.is_file(), "{}: run `cargo build --examples` first", path.display());
    let mut command = Command::new(path);
    command.current_dir(std::env::temp_dir()); // the defaults must not need a certain folder
    command.stdin(Stdio::null());
    command
}

/// What comes of an example, its name first, with these arguments.
pub(crate) fn run(line: &[&str]) -> Output {
    example(line[0]).args(&line[1..]).output().unwrap()
}

/// The JSON object that a run prints, and nothing else.
pub(crate) fn json(line: &[&str]) -> Value {
    let output = run(&[line, &["--json"]].concat());
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(0), "{line:?}: {stderr}");
    let value: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(value.is_object());
    value
}
