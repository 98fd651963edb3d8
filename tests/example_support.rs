//! What the examples share: flags, sizes, exit states, scoring, medians.
#![allow(clippy::unwrap_used, reason = "a test may panic")]
#![allow(dead_code, reason = "the examples use the rest")]

#[path = "../examples/support/corpus.rs"]
mod corpus;
#[path = "../examples/support/flags.rs"]
mod flags;
#[path = "../examples/support/measure.rs"]
mod measure;
#[path = "../examples/support/report.rs"]
mod report;
#[path = "../examples/support/score.rs"]
mod score;
#[path = "../examples/support/split.rs"]
mod split;
#[path = "../examples/support/svg.rs"]
mod svg;

use clap::Parser;
use powerinfer::{Engine, Tokenizer};
use testing::Fixture;

use flags::{CommonFlags, parse_size};
use score::{NoWindow, Score, log_probability, windows};

#[derive(Debug, Parser)]
struct Flags {
    #[command(flatten)]
    common: CommonFlags,
}

fn parse(line: &str) -> Result<CommonFlags, clap::Error> {
    let words = ["example"].into_iter().chain(line.split_whitespace());
    Flags::try_parse_from(words).map(|flags| flags.common)
}

fn failure(error: &(dyn std::error::Error + 'static)) -> String {
    let mut stderr = Vec::new();
    let _ = report::failure_status(error, &mut stderr);
    String::from_utf8(stderr).unwrap()
}

#[test]
fn sizes_are_numbers_with_decimal_or_binary_units() {
    for (text, bytes) in [
        ("8GiB", 8 << 30),
        ("512MiB", 512 << 20),
        ("3KiB", 3072),
        ("1TiB", 1 << 40),
        ("7", 7),
        ("7B", 7),
        ("3K", 3000),
        ("3KB", 3000),
        ("8GB", 8_000_000_000),
        ("12MB", 12_000_000),
        ("2TB", 2_000_000_000_000),
        ("1.5GiB", 3 << 29),
        ("0.25MB", 250_000),
        ("1.0001KiB", 1024),
        ("0", 0),
        ("16777215TiB", 16_777_215 << 40),
    ] {
        assert_eq!(parse_size(text), Ok(bytes), "{text}");
    }
    for text in [
        "",
        "GiB",
        "-1GiB",
        "+1GiB",
        "8 GiB",
        "1.5",
        "1.5B",
        "1.GiB",
        ".5GiB",
        "1.2.3GiB",
        "1e3",
        "8gib",
        "8GIB",
        "8G",
        "0x8GiB",
        "99999999999999999999",
        "99999999TiB",
        "16777216TiB",
        "1.0000000000001GiB",
    ] {
        let said = parse_size(text).unwrap_err();
        for unit in ["B,", "KB", "MB", "GB", "TB", "KiB", "MiB", "GiB", "TiB"] {
            assert!(said.contains(unit), "{text}: {said}");
        }
        assert!(said.ends_with(&format!("found {text:?}")), "{said}");
    }
}

#[test]
fn every_common_flag_of_the_contract_parses() {
    let line = "--model m --dtype bf16 --threads 2 --device hybrid --vram-budget 8GiB --plan p.json \
                --sparsity predicted --predictor quantized --json";
    let flags = parse(line).unwrap();
    assert_eq!(flags.vram_budget, Some(8 << 30));
    for device in ["cpu", "cuda", "cuda:3", "hybrid"] {
        assert!(parse(&format!("--device {device}")).is_ok(), "{device}");
    }
    for dtype in ["f32", "f16", "bf16", "q8_0", "q4_0", "auto"] {
        assert!(parse(&format!("--dtype {dtype}")).is_ok(), "{dtype}");
    }
}

#[test]
fn predictors_are_made_with_so_many_bits_or_lie_in_a_folder() {
    use powerinfer::{LowBitFormat, PredictorSource};
    let source = |line| parse(line).unwrap().predictor().map(|options| options.source);
    assert_eq!(source(""), None);
    let quantized = |bits| Some(PredictorSource::Quantized(bits));
    // the library chooses: what the model holds, or else a copy of its gate
    assert_eq!(source("--sparsity predicted"), None);
    assert_eq!(source("--predictor quantized"), quantized(None));
    assert_eq!(source("--predictor quantized:2"), quantized(Some(LowBitFormat::Bits2)));
    assert_eq!(source("--predictor a/b"), Some(PredictorSource::Folder("a/b".into())));
    let file = PredictorSource::File("a/b.safetensors".into());
    assert_eq!(source("--predictor a/b.safetensors"), Some(file));
    let shifted = parse("--predictor quantized --predictor-shift=-0.25").unwrap().predictor();
    assert_eq!(shifted.unwrap().shift, -0.25);
}

#[test]
fn values_that_no_version_knows_are_wrong_usage() {
    for line in [
        "--dtype int3",
        "--threads 0",
        "--threads x",
        "--threads 100000",
        "--device tpu",
        "--device cuda:x",
        "--vram-budget lots",
        "--sparsity some",
        "--predictor quantized:5",
        "--predictor quantized:",
        "--predictor-shift some",
    ] {
        assert_eq!(parse(line).unwrap_err().exit_code(), 2, "{line}");
    }
}

#[test]
fn a_device_that_is_not_there_and_flags_for_none_are_refused_by_name() {
    let refused = |line: &str, expected: &str| {
        let error = parse(line).unwrap().builder().unwrap_err();
        assert!(failure(error.as_ref()).starts_with(&format!("error: {expected}")), "{error}");
    };
    refused("--vram-budget 1GiB", "--vram-budget needs --device hybrid or cuda\n");
    refused("--plan p.json", "--plan needs --device hybrid or cuda\n");
    // an example that runs no model says so
    let error = parse("--device hybrid").unwrap().refuse_fast_device().unwrap_err();
    let text = failure(error.as_ref());
    assert_eq!(text, "error: --device hybrid here is not supported yet; use cpu\n");
    for index in [0, 7] {
        if let Err(error) = powerinfer::open_cuda(index, None) {
            refused(&format!("--device cuda:{index}"), &error.to_string());
        }
    }
}

#[test]
fn a_stand_in_takes_one_of_the_threads() {
    let device = powerinfer::StandIn::new(powerinfer::StandInOptions::new(0)).unwrap();
    for (threads, left) in [(1, 1), (2, 1), (4, 3)] {
        let flags = parse(&format!("--threads {threads} --device hybrid")).unwrap();
        assert_eq!(flags.threads_beside(&device).unwrap().get(), left);
    }
}

#[test]
fn a_failure_is_one_line_and_its_causes() {
    let error = Engine::builder().model("no/such/folder").build().unwrap_err();
    let text = failure(&error);
    let lines: Vec<&str> = text.lines().collect();
    assert!(lines[0].starts_with("error: no/such/folder"), "{text}");
    assert!(lines.len() > 1 && lines[1..].iter().all(|line| line.starts_with("  caused by: ")));
}

#[test]
fn a_nul_byte_is_the_end_of_a_document() {
    let tokenizer = Tokenizer::from_file(Fixture::demo().model_dir.join("tokenizer.json")).unwrap();
    let ids = |text: &str| tokenizer.encode(text, false).unwrap();
    let found = corpus::tokenize(&tokenizer, "one\0two\0", Some(2)).unwrap();
    assert_eq!(found, [ids("one"), vec![2], ids("two"), vec![2]].concat());
    let plain = corpus::tokenize(&tokenizer, "one two", None).unwrap();
    assert_eq!(plain, ids("one two"));
}

#[test]
fn a_plot_says_any_text_in_characters_that_xml_has() {
    let name = "a<b>&\"c\"\u{0}\u{1b}[2J\n\u{85}\u{ffff}é";
    let mut plot = svg::begin(10.0, 10.0);
    svg::text(&mut plot, (0.0, 0.0), "start", 1, name);
    svg::upright(&mut plot, (0.0, 0.0), name);
    svg::curve(&mut plot, [(0.0, 0.0)], "", name);
    let escaped = "a&lt;b&gt;&amp;\"c\"\\u{0}\\u{1b}[2J\\n\\u{85}\\u{ffff}é<";
    assert_eq!(plot.matches(escaped).count(), 3, "{plot}");
    assert!(plot.chars().all(|c| c == '\n' || !c.is_control()), "{plot}");
}

#[test]
fn windows_are_fed_one_token_behind_and_the_rest_is_dropped() {
    let ids = [10, 11, 12, 13, 14, 15, 16];
    let with = windows(&ids, 3, Some(1)).unwrap();
    assert_eq!(with.len(), 2);
    assert_eq!((&with[1].fed[..], with[1].scored), (&[1, 13, 14][..], &[13, 14, 15][..]));
    let without = windows(&ids, 3, None).unwrap();
    assert_eq!((&without[1].fed[..], without[1].scored), (&[13, 14][..], &[14, 15][..]));
    assert_eq!(windows(&ids, 8, Some(1)), Err(NoWindow::TextTooShort { found: 7, expected: 8 }));
    assert_eq!(windows(&ids, 0, Some(1)), Err(NoWindow::ContextTooShort { found: 0, expected: 1 }));
    assert_eq!(windows(&ids, 1, None), Err(NoWindow::ContextTooShort { found: 1, expected: 2 }));
}

#[test]
fn log_probabilities_are_stable_and_add_up_to_one() {
    let row = [1e4, 1e4 - 1.0, -1e4, f32::NEG_INFINITY];
    let total: f64 = (0..row.len()).map(|id| log_probability(&row, id).exp()).sum();
    assert!((total - 1.0).abs() < 1e-12);
    assert_eq!(log_probability(&row, 3), f64::NEG_INFINITY);
    assert_eq!(log_probability(&row, 4), f64::NEG_INFINITY);
    let even = [0.25f32; 8];
    assert!((log_probability(&even, 5) - (1.0f64 / 8.0).ln()).abs() < 1e-12);
}

#[test]
fn perplexity_of_the_demo_model_on_a_few_tokens_is_that_of_its_logits() {
    let engine = Engine::builder().model(Fixture::demo().model_dir).threads(1).build().unwrap();
    let ids = engine.tokenizer().unwrap().encode("It was a truth", false).unwrap();
    let windows = windows(&ids, 4, Some(1)).unwrap();
    let logits = engine.session().unwrap().logits(&windows[0].fed).unwrap();
    let mut score = Score::default();
    score.add(&logits, windows[0].scored);
    let mean: f64 = ids
        .iter()
        .enumerate()
        .map(|(i, &id)| log_probability(logits.row(i), id as usize))
        .sum::<f64>()
        / 4.0;
    assert_eq!(score.tokens, 4);
    assert!((score.perplexity() / (-mean).exp() - 1.0).abs() < 1e-12);
    assert!(score.perplexity() > 1.0 && score.perplexity() < 4096.0);
}

#[test]
fn medians_are_the_middle() {
    assert_eq!(measure::median(&[3.0, 1.0, 2.0]), 2.0);
    assert_eq!(measure::median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
    assert_eq!(measure::median(&[]), 0.0);
}

#[test]
fn benchmark_ids_exist_in_the_vocabulary() {
    assert!(measure::some_ids(1000, 160).iter().all(|&id| id < 160));
    assert_eq!(measure::some_ids(3, 0), [0, 0, 0]);
}
