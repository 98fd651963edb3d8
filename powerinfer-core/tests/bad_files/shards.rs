//! Broken `model.safetensors.index.json`, and shards that do not fit it.

use powerinfer_core::{Error, WeightStore};

use crate::{Check, Folder, INDEX, pattern, take_all, weights};

/// A small model in two shards.
fn shards() -> (Folder, Vec<u8>) {
    let folder = Folder::new();
    for name in ["a", "b"] {
        let header = format!(r#"{{"{name}":{{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}}}"#);
        folder.write(&format!("{name}.safetensors"), weights(&header, 4));
    }
    let index = r#"{"metadata": {"total_size": 8},
        "weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}"#;
    folder.write(INDEX, index);
    take_all(folder.path()).expect("whole, it is read");
    (folder, index.into())
}

#[test]
fn an_index_cut_anywhere_is_broken_json() {
    let (folder, index) = shards();
    for len in 0..index.len() {
        folder.write(INDEX, &index[..len]);
        let error = take_all(folder.path()).unwrap_err();
        assert!(
            matches!(&error, Error::Json { path, .. } if path.ends_with(INDEX)),
            "{len}: {error}"
        );
    }
}

#[test]
fn an_index_with_a_flipped_bit_is_read_or_refused() {
    let (folder, index) = shards();
    let mut read = 0;
    for bit in 0..index.len() * 8 {
        let mut broken = index.clone();
        broken[bit / 8] ^= 1 << (bit % 8);
        folder.write(INDEX, &broken);
        match WeightStore::open(folder.path()) {
            Ok(_) => read += 1,
            Err(error) => assert!(
                matches!(
                    error,
                    Error::Json { .. }
                        | Error::ShardName { .. }
                        | Error::MissingShard { .. }
                        | Error::MissingTensor { .. }
                        | Error::UnlistedTensor { .. }
                ),
                "bit {bit}: {error:?}"
            ),
        }
    }
    // those of white space and of the metadata, which nothing depends on
    assert!(read < index.len() * 2, "{read} of {} bits make no difference", index.len() * 8);
}

/// Two shards, one with the tensor `a`, one with `b`.
fn shards_of_one_byte() -> Folder {
    let folder = Folder::new();
    for (shard, name) in [("1.safetensors", "a"), ("2.safetensors", "b")] {
        folder.write(shard, weights(&tensors(&[name]), 1));
    }
    folder
}

/// The header of a file with these tensors of one byte each.
fn tensors(names: &[&str]) -> String {
    let entries = names.iter().enumerate().map(|(at, name)| {
        format!(r#""{name}":{{"dtype":"U8","shape":[1],"data_offsets":[{at},{}]}}"#, at + 1)
    });
    format!("{{{}}}", entries.collect::<Vec<_>>().join(","))
}

fn index(weight_map: &str) -> String {
    format!(r#"{{"metadata":{{"total_size":2}},"weight_map":{{{weight_map}}}}}"#)
}

const GOOD: &str = r#""a":"1.safetensors","b":"2.safetensors""#;

#[test]
fn a_broken_index_has_its_error() {
    let cases: [(&str, String, Check); 14] = [
        ("no map", "{}".into(), pattern!(Error::Json { .. })),
        ("a list for a map", r#"{"weight_map":[]}"#.into(), pattern!(Error::Json { .. })),
        ("a number for a shard", index(r#""a":1"#), pattern!(Error::Json { .. })),
        ("a tensor twice", index(&format!("{GOOD},{GOOD}")), pattern!(Error::Json { .. })),
        (
            "two maps",
            r#"{"weight_map":{},"weight_map":{"a":"1.safetensors"}}"#.into(),
            pattern!(Error::Json { .. }),
        ),
        ("a path up", index(r#""a":"../1.safetensors""#), pattern!(Error::ShardName { .. })),
        ("a path down", index(r#""a":"x/1.safetensors""#), pattern!(Error::ShardName { .. })),
        ("a path from the root", index(r#""a":"/etc/passwd""#), pattern!(Error::ShardName { .. })),
        ("no name", index(r#""a":"""#), pattern!(Error::ShardName { .. })),
        ("a NUL", index(r#""a":"1\u0000""#), pattern!(Error::ShardName { .. })),
        (
            "no such shard",
            index(r#""a":"3.safetensors""#),
            pattern!(Error::MissingShard { shard, .. } if shard == "3.safetensors"),
        ),
        (
            "a tensor that no shard has",
            index(&format!(r#"{GOOD},"c":"2.safetensors""#)),
            pattern!(Error::MissingTensor { name, path }
                if name == "c" && path.ends_with("2.safetensors")),
        ),
        (
            "a tensor that another shard has",
            index(r#""a":"2.safetensors","b":"1.safetensors""#),
            pattern!(Error::MissingTensor { name, path }
                if name == "a" && path.ends_with("2.safetensors")),
        ),
        (
            "a shard that is a folder",
            index(r#""a":"folder""#),
            pattern!(Error::Io { path, .. } if path.ends_with("folder")),
        ),
    ];
    let folder = shards_of_one_byte();
    std::fs::create_dir(folder.path().join("folder")).expect("created");
    for (what, text, check) in cases {
        folder.write(INDEX, text);
        let error = WeightStore::open(folder.path()).expect_err(what);
        assert!(check(&error), "{what}: {error:?}");
    }
    folder.write(INDEX, index(GOOD));
    let store = WeightStore::open(folder.path()).expect("read");
    assert!(store.contains("a") && store.contains("b"));
}

#[test]
fn shards_that_do_not_fit_the_index_have_their_errors() {
    let cases: [(&str, Vec<u8>, Check); 4] = [
        (
            "a tensor that the index does not list",
            weights(&tensors(&["b", "c"]), 2),
            pattern!(Error::UnlistedTensor { name, path }
                if name == "c" && path.ends_with("2.safetensors")),
        ),
        (
            "a tensor that the first shard has, too",
            weights(&tensors(&["b", "a"]), 2),
            pattern!(Error::DuplicateTensor { name, first, second } if name == "a"
                && first.ends_with("1.safetensors") && second.ends_with("2.safetensors")),
        ),
        (
            "no tensor",
            weights("{}", 0),
            pattern!(Error::MissingTensor { name, path }
                if name == "b" && path.ends_with("2.safetensors")),
        ),
        (
            "a byte short",
            weights(&tensors(&["b"]), 0),
            pattern!(Error::FileLength { path, .. } if path.ends_with("2.safetensors")),
        ),
    ];
    let folder = shards_of_one_byte();
    folder.write(INDEX, index(GOOD));
    for (what, shard, check) in cases {
        folder.write("2.safetensors", shard);
        let error = WeightStore::open(folder.path()).expect_err(what);
        assert!(check(&error), "{what}: {error:?}");
    }
}

#[test]
fn a_folder_without_weights_says_what_it_looked_for() {
    let folder = Folder::new();
    let error = WeightStore::open(folder.path()).unwrap_err();
    assert!(matches!(&error, Error::NoWeights { path, pytorch: false } if path == folder.path()));
    assert!(error.to_string().contains(INDEX));
    assert!(matches!(
        WeightStore::open(&folder.path().join("missing")),
        Err(Error::NoWeights { .. })
    ));
}
