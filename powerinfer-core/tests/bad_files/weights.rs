//! Broken `model.safetensors`.

use std::fs;

use powerinfer_core::{Error, Layout, WeightStore};

use crate::{Check, FILE, Folder, pattern, take_all, weights};

const HEADER: &str = r#"{"__metadata__":{"format":"pt"},
"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},
"b":{"dtype":"BF16","shape":[4],"data_offsets":[24,32]}}"#;
const DATA: usize = 32;

#[test]
fn weights_cut_or_grown_to_any_length_are_refused() {
    let folder = Folder::new();
    let whole = weights(HEADER, DATA);
    folder.write(FILE, &whole);
    take_all(folder.path()).expect("whole, it is read");

    for len in 0..whole.len() {
        let path = folder.write(FILE, &whole[..len]);
        let error = take_all(folder.path()).unwrap_err();
        let needed = if len < 8 { 8 } else { whole.len() as u64 };
        // before the header is whole, only its own length is known
        let needed =
            if (8..whole.len() - DATA).contains(&len) { needed - DATA as u64 } else { needed };
        assert!(
            matches!(&error, Error::FileLength { path: named, expected, found }
                if *named == path && *expected == needed && *found == len as u64),
            "{len}: {error}"
        );
    }
    for more in [1, 8, 1000] {
        folder.write(FILE, [whole.as_slice(), &vec![0; more]].concat());
        assert!(matches!(
            take_all(folder.path()),
            Err(Error::FileLength { expected, found, .. }) if found == expected + more as u64
        ));
    }
}

#[test]
fn weights_with_a_flipped_bit_in_the_header_are_read_or_refused_with_their_path() {
    let folder = Folder::new();
    let whole = weights(HEADER, DATA);
    let mut read = 0;
    for bit in 0..(8 + HEADER.len()) * 8 {
        let mut broken = whole.clone();
        broken[bit / 8] ^= 1 << (bit % 8);
        folder.write(FILE, &broken);
        match take_all(folder.path()) {
            Ok(()) => read += 1,
            Err(error) => {
                assert!(error.to_string().contains(FILE), "bit {bit}: {error}");
                assert!(
                    matches!(
                        error,
                        Error::HeaderTooLong { .. }
                            | Error::FileLength { .. }
                            | Error::Json { .. }
                            | Error::Safetensors { .. }
                            // F32 may turn into U32, which is a type of its own
                            | Error::TensorDtype { .. }
                    ),
                    "bit {bit}: {error:?}"
                );
            }
        }
    }
    // other names, other metadata, [2,3] as [3,2] and the like
    assert!(read < HEADER.len() * 2, "{read} of {} bits make no difference", HEADER.len() * 8);
}

#[test]
fn broken_weight_headers_have_their_errors() {
    let tensor = |dtype: &str, shape: &str, offsets: &str| {
        format!(r#"{{"a":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}}}"#)
    };
    let two = |first: &str, second: &str| {
        format!(
            r#"{{"a":{{"dtype":"U8","shape":[4],"data_offsets":{first}}},
                 "b":{{"dtype":"U8","shape":[4],"data_offsets":{second}}}}}"#
        )
    };
    let cases: Vec<(&str, String, usize, Check)> = vec![
        ("no header", String::new(), 0, pattern!(Error::Json { .. })),
        ("a list", "[]".into(), 0, pattern!(Error::Json { .. })),
        ("more after it", "{}{}".into(), 0, pattern!(Error::Json { .. })),
        ("data without tensors", "{}".into(), 1, pattern!(Error::FileLength { expected: 10, .. })),
        (
            "no dtype",
            r#"{"a":{"shape":[],"data_offsets":[0,4]}}"#.into(),
            4,
            pattern!(Error::Json { .. }),
        ),
        ("unknown dtype", tensor("F33", "[1]", "[0,4]"), 4, pattern!(Error::Json { .. })),
        ("negative shape", tensor("F32", "[-1]", "[0,4]"), 4, pattern!(Error::Json { .. })),
        ("float shape", tensor("F32", "[1.0]", "[0,4]"), 4, pattern!(Error::Json { .. })),
        ("three offsets", tensor("F32", "[1]", "[0,4,8]"), 8, pattern!(Error::Json { .. })),
        (
            "metadata of numbers",
            r#"{"__metadata__":{"a":1}}"#.into(),
            0,
            pattern!(Error::Json { .. }),
        ),
        (
            "a tensor twice",
            r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},
                "a":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}}"#
                .into(),
            8,
            pattern!(Error::Json { source, .. } if source.to_string().contains("key `a` comes twice")),
        ),
        (
            "shape over offsets",
            tensor("F32", "[2]", "[0,4]"),
            4,
            pattern!(Error::Safetensors { .. }),
        ),
        ("backwards", tensor("F32", "[1]", "[4,0]"), 4, pattern!(Error::Safetensors { .. })),
        ("not from 0", tensor("F32", "[1]", "[4,8]"), 8, pattern!(Error::Safetensors { .. })),
        ("a hole", two("[0,4]", "[5,9]"), 9, pattern!(Error::Safetensors { .. })),
        ("an overlap", two("[0,4]", "[2,6]"), 6, pattern!(Error::Safetensors { .. })),
        ("the same bytes", two("[0,4]", "[0,4]"), 4, pattern!(Error::Safetensors { .. })),
        (
            "elements overflow",
            tensor("U8", "[4294967296,4294967296,4294967296]", "[0,0]"),
            0,
            pattern!(Error::Safetensors { .. }),
        ),
        (
            "bits overflow",
            tensor("F32", "[4611686018427387904]", "[0,0]"),
            0,
            pattern!(Error::Safetensors { .. }),
        ),
        (
            "an exbibyte",
            tensor("U8", "[1152921504606846976]", "[0,1152921504606846976]"),
            4,
            pattern!(Error::FileLength { .. }),
        ),
        ("F4 half a byte", tensor("F4", "[1]", "[0,1]"), 1, pattern!(Error::Safetensors { .. })),
        (
            "F64",
            tensor("F64", "[1]", "[0,8]"),
            8,
            pattern!(Error::TensorDtype { found, .. } if found == "F64"),
        ),
        ("I32", tensor("I32", "[1,1]", "[0,4]"), 4, pattern!(Error::TensorDtype { .. })),
    ];
    let folder = Folder::new();
    for (what, header, data_len, check) in cases {
        folder.write(FILE, weights(&header, data_len));
        let error = take_all(folder.path()).expect_err(what);
        assert!(check(&error), "{what}: {error:?}");
        assert!(error.to_string().contains(FILE), "{what}: {error}");
    }

    for (len, check) in [
        (u64::MAX, pattern!(Error::HeaderTooLong { .. }) as Check),
        (u64::MAX - 7, pattern!(Error::HeaderTooLong { .. })),
        (1 << 63, pattern!(Error::HeaderTooLong { .. })),
        (100_000_001, pattern!(Error::HeaderTooLong { max_bytes: 100_000_000, .. })),
        (100_000_000, pattern!(Error::FileLength { expected: 100_000_008, .. })),
        (25, pattern!(Error::FileLength { expected: 33, found: 32, .. })),
        (24, pattern!(Error::Json { .. })),
    ] {
        let mut bytes = len.to_le_bytes().to_vec();
        bytes.resize(32, 0);
        folder.write(FILE, bytes);
        let error = take_all(folder.path()).expect_err("a length that lies");
        assert!(check(&error), "{len}: {error:?}");
    }
}

#[test]
fn tensors_without_numbers_are_read() {
    let folder = Folder::new();
    let header = r#"{"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},
        "b":{"dtype":"F16","shape":[3,0],"data_offsets":[0,0]},
        "c":{"dtype":"F16","shape":[],"data_offsets":[0,2]}}"#;
    folder.write(FILE, weights(header, 2));
    take_all(folder.path()).expect("read");
    folder.write(FILE, weights("{}", 0));
    take_all(folder.path()).expect("read");
}

#[test]
fn weights_cut_after_opening_are_an_error_and_not_a_crash() {
    let folder = Folder::new();
    let path = folder.write(FILE, weights(HEADER, DATA));
    let mut store = WeightStore::open(folder.path()).expect("whole");
    let file = fs::File::options().write(true).open(&path).expect("the file");
    file.set_len((8 + HEADER.len() + 4) as u64).expect("cut");
    let error = store.matrix("a", 2, 3, Layout::NeuronMajor, None).unwrap_err();
    assert!(matches!(error, Error::Io { path: named, .. } if named == path));
}
