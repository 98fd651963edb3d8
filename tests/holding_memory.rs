//! What it takes to open a GGUF file of two gibibytes, mapped and copied.
//!
//! Ignored, because it writes the file and wants a quiet machine:
//!
//! ```text
//! cargo test --release --test holding_memory -- --ignored --nocapture
//! ```
//!
//! Each way of holding weights runs in a process of its own, which this test starts as itself, so
//! that its peak is its own.
#![allow(
    clippy::unwrap_used,
    clippy::print_stderr,
    reason = "a test may panic, and says what it saw"
)]

use std::fs::File;
use std::io::{copy, sink};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use powerinfer::core::Holding;
use powerinfer::{Engine, GenerateOptions, Prompt};
use powerinfer_models::synthetic::{Synthetic, SyntheticShape};
use powerinfer_models::{ConvertOptions, convert};
use powerinfer_ops::WeightFormat;

/// Where the child finds the model.
const MODEL: &str = "POWERINFER_TEST_MODEL";
/// How the child is to hold it.
const HOLDING: &str = "POWERINFER_TEST_HOLDING";
/// What begins the line in which the child reports.
const REPORT: &str = "report:";

/// A value of `/proc/self/status`, in bytes.
fn status_bytes(field: &str) -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(field)).unwrap();
    let kib: f64 = line.trim().strip_suffix("kB").unwrap().trim().parse().unwrap();
    kib * 1024.0
}

/// Opens the model and writes one token; time and memory, to the parent.
#[test]
#[ignore = "started by the other test of this file"]
fn child() {
    let Some(model) = std::env::var_os(MODEL) else { return };
    let mapped = std::env::var(HOLDING).is_ok_and(|holding| holding == "mapped");
    let holding = if mapped { Holding::Mapped } else { Holding::Resident };
    let began = Instant::now();
    let builder = Engine::builder().model(model).holding(holding);
    let said = builder.estimate().unwrap().total_bytes(1, 5);
    let engine = builder.build().unwrap();
    let opened = began.elapsed();
    let mut session = engine.session().unwrap();
    let options = GenerateOptions::default().with_max_tokens(2).with_ignore_eos(true);
    let generated = session.generate_text(Prompt::Ids(vec![1, 2, 3]), &options).unwrap();
    assert_eq!(generated.ids.len(), 2);
    let wrote = began.elapsed();
    let (now, peak) = (status_bytes("VmRSS:"), status_bytes("VmHWM:"));
    eprintln!("{REPORT} {} {} {now} {peak} {said}", opened.as_secs_f64(), wrote.as_secs_f64());
}

/// What a child saw.
struct Report {
    opened: Duration,
    wrote: Duration,
    resident_bytes: f64,
    peak_bytes: f64,
    /// What the builder said that it would be.
    estimated_bytes: f64,
}

fn report(model: &Path, holding: &str) -> Report {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["child", "--exact", "--ignored", "--nocapture"])
        .env(MODEL, model)
        .env(HOLDING, holding)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{holding}: {said}");
    let line = said.lines().find_map(|line| line.split_once(REPORT)).unwrap().1;
    let values: Vec<f64> = line.split_whitespace().map(|value| value.parse().unwrap()).collect();
    Report {
        opened: Duration::from_secs_f64(values[0]),
        wrote: Duration::from_secs_f64(values[1]),
        resident_bytes: values[2],
        peak_bytes: values[3],
        estimated_bytes: values[4],
    }
}

#[test]
#[ignore = "writes four gibibytes and wants a quiet machine"]
fn two_gibibytes_mapped_speak_within_a_second_and_copied_take_little_more_than_the_file() {
    let dir = tempfile::tempdir().unwrap();
    let (folder, file) = (dir.path().join("model"), dir.path().join("model.gguf"));
    let model = Synthetic::new(SyntheticShape::Llama1b, 0.1, 7).unwrap();
    model.write(&folder, WeightFormat::F16).unwrap();
    let options = ConvertOptions::default().with_powerinfer(true);
    let file_bytes = convert(&folder, &file, &options, &mut |_, _| ()).unwrap().bytes as f64;
    std::fs::remove_dir_all(&folder).unwrap();
    assert!(file_bytes > 2f64.powi(31) * 0.95, "{file_bytes}");
    // into the page cache
    copy(&mut File::open(&file).unwrap(), &mut sink()).unwrap();

    let mapped = report(&file, "mapped");
    let resident = report(&file, "resident");
    for (what, seen) in [("mapped", &mapped), ("resident", &resident)] {
        eprintln!(
            "{what}: open after {:.2?}, second token after {:.2?}, resident {:.1} %, peak {:.1} % \
             of a file of {:.2} GiB, estimated {:.1} %",
            seen.opened,
            seen.wrote,
            100.0 * seen.resident_bytes / file_bytes,
            100.0 * seen.peak_bytes / file_bytes,
            file_bytes / 2f64.powi(30),
            100.0 * seen.estimated_bytes / file_bytes
        );
    }
    assert!(mapped.wrote < Duration::from_secs(1), "{:?}", mapped.wrote);
    assert!(mapped.peak_bytes <= 1.05 * file_bytes, "{}", mapped.peak_bytes);
    assert!(resident.peak_bytes <= 1.10 * file_bytes, "{}", resident.peak_bytes);
    let off = resident.peak_bytes / resident.estimated_bytes;
    assert!((0.9..1.05).contains(&off), "{off} of the estimate");
}
