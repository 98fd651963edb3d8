//! PyTorch files: read on request, with a cap, and never trusted to be what they should be.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::fs;
use std::path::Path;

use powerinfer_core::{CausalLm, Error as CoreError, Step};
use powerinfer_models::{Error, LoadOptions, load};
use testing::{Fixture, Seeded, assert_same_bits};

const CAP: u64 = 1 << 20;
const SHARD: &str = "pytorch_model-00001-of-00002.bin";

fn fixture() -> Fixture {
    Fixture::micro("opt-bin-sharded")
}

fn logits(model: &dyn CausalLm) -> Vec<f32> {
    let (mut cache, mut step) = (model.new_cache(), Step::default());
    model.forward(&[2, 5, 9, 70], &mut cache, &mut step).unwrap();
    step.logits
}

fn error(dir: &Path, options: &LoadOptions) -> CoreError {
    match load(dir, options).unwrap_err() {
        Error::Core(error) => error,
        other => panic!("{other}"),
    }
}

/// A copy of the fixture to break.
fn copy() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(fixture().model_dir).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, dir.path().join(path.file_name().unwrap())).unwrap();
    }
    dir
}

#[test]
fn a_pytorch_copy_gives_the_same_bits() {
    let original = load(&Fixture::micro("opt-preln").model_dir, &LoadOptions::default()).unwrap();
    let copy = load(&fixture().model_dir, &LoadOptions::default().with_pytorch(CAP)).unwrap();
    assert_same_bits(&logits(&*copy), &logits(&*original), "logits");
}

#[test]
fn pytorch_files_are_read_on_request_only_and_up_to_a_cap() {
    let dir = fixture().model_dir;
    let refused = error(&dir, &LoadOptions::default());
    assert!(matches!(refused, CoreError::NoWeights { pytorch: true, .. }), "{refused}");
    assert!(refused.to_string().contains("on request"), "{refused}");
    let long = error(&dir, &LoadOptions::default().with_pytorch(1000));
    assert!(matches!(long, CoreError::FileTooLong { max_bytes: 1000, .. }), "{long}");
}

#[test]
fn broken_pytorch_files_are_errors() {
    let options = LoadOptions::default().with_pytorch(CAP);
    let dir = copy();
    let path = dir.path().join(SHARD);
    let whole = fs::read(&path).unwrap();
    for len in [0, 1, 100, whole.len() / 2, whole.len() - 1] {
        fs::write(&path, &whole[..len]).unwrap();
        let error = error(dir.path(), &options);
        assert!(matches!(error, CoreError::PyTorch { .. }), "{len}: {error}");
    }
    let mut random = Seeded::new(1);
    for _ in 0..300 {
        let mut broken = whole.clone();
        for _ in 0..4 {
            let at = random.below(broken.len().min(4000));
            broken[at] ^= 1 << random.below(8);
        }
        fs::write(&path, &broken).unwrap();
        // read or refused, and no panic
        let _ = load(dir.path(), &options);
    }
}
