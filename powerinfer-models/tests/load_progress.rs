//! What a caller hears while a model is loaded.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::path::Path;
use std::sync::{Arc, Mutex};

use powerinfer_core::{CancelToken, Error as CoreError, Holding};
use powerinfer_models::{ConvertOptions, Error, LoadOptions, convert, load};
use testing::Fixture;

type Heard = Arc<Mutex<Vec<(u64, u64)>>>;

/// Loads a model; gives all that was told, and what came of it.
fn heard(path: &Path, options: LoadOptions) -> (Vec<(u64, u64)>, Result<(), Error>) {
    let heard = Heard::default();
    let ear = heard.clone();
    let options = options.with_progress(move |done, total| ear.lock().unwrap().push((done, total)));
    let outcome = load(path, &options).map(|_| ());
    drop(options);
    (Arc::into_inner(heard).unwrap().into_inner().unwrap(), outcome)
}

fn assert_rises(heard: &[(u64, u64)]) {
    let (begin, total) = heard[0];
    assert_eq!(begin, 0);
    assert!(heard.is_sorted() && heard.iter().all(|&(done, of)| done <= total && of == total));
}

#[test]
fn bytes_go_from_none_to_all_however_weights_are_held() {
    for fixture in Fixture::micros("") {
        let dir = &fixture.model_dir;
        for holding in [Holding::Resident, Holding::Mapped] {
            let options = LoadOptions::default().with_pytorch(1 << 30).with_holding(holding);
            let (heard, outcome) = heard(dir, options);
            if holding == Holding::Mapped && outcome.is_err() {
                continue; // PyTorch files are not mapped
            }
            outcome.unwrap();
            assert_rises(&heard);
            assert_eq!(heard.last().unwrap().0, heard[0].1, "{}", fixture.name);
            assert!(heard.len() > 8, "{}: {} steps", fixture.name, heard.len());
        }
    }
}

#[test]
fn a_gguf_file_is_told_in_its_own_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    let source = Fixture::micro("llama-mha-untied-sharded").model_dir;
    convert(&source, &path, &ConvertOptions::default(), &mut |_, _| {}).unwrap();
    let (heard, outcome) = heard(&path, LoadOptions::default());
    outcome.unwrap();
    assert_rises(&heard);
    let (file_bytes, total) = (path.metadata().unwrap().len(), heard[0].1);
    assert_eq!(heard.last().unwrap().0, total);
    assert!(total < file_bytes && total > file_bytes / 2, "{total} of {file_bytes}");
}

#[test]
fn an_error_ends_it_before_the_total() {
    let fixture = Fixture::micro("llama-mha-untied-sharded");
    let heard = Heard::default();
    let (ear, cancel) = (heard.clone(), CancelToken::new());
    let stop = cancel.clone();
    let options = LoadOptions::default().with_cancel(cancel).with_progress(move |done, total| {
        let mut heard = ear.lock().unwrap();
        heard.push((done, total));
        if heard.len() == 4 {
            stop.cancel();
        }
    });
    let error = load(&fixture.model_dir, &options).err().unwrap();
    assert!(matches!(error, Error::Core(CoreError::Cancelled)), "{error}");
    let heard = heard.lock().unwrap();
    assert_rises(&heard);
    assert!(heard.len() == 4 && heard[3].0 < heard[3].1, "{heard:?}");
}
