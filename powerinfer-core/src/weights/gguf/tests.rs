use std::fs;

use super::*;

#[test]
fn a_file_that_ends_within_its_header_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.gguf");
    fs::write(&path, b"GGUF").unwrap();
    assert!(matches!(GgufFile::open(&path), Err(Error::GgufHeader { .. })));
}
