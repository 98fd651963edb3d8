//! Files that are split: `name-00001-of-00003.gguf` and so on, each with a header of its own.

use std::io;
use std::path::PathBuf;

use super::metadata::GgufMetadata;
use crate::error::{Error, Result};
use crate::regular_file::RegularFile;

const NUMBER: &str = "split.no";
const COUNT: &str = "split.count";
const TENSORS: &str = "split.tensors.count";
const DIGITS: usize = 5;
const MAX_PARTS: u32 = 1 << 12;

/// The paths of all parts if a file is one of several.
pub(super) fn parts(metadata: &GgufMetadata) -> Result<Option<Vec<PathBuf>>> {
    let count = match metadata.optional_u32(COUNT)? {
        None | Some(0 | 1) => return Ok(None),
        Some(count) if count <= MAX_PARTS => count,
        Some(_) => return Err(metadata.error(COUNT, format!("at most {MAX_PARTS}"))),
    };
    let path = metadata.path();
    let file_name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let number = u64::from(metadata.u32(NUMBER)?) + 1;
    let ending = |number| format!("-{number:0DIGITS$}-of-{count:0DIGITS$}.gguf");
    let Some(stem) = file_name.strip_suffix(&ending(number)) else {
        let expected = format!("a file whose name ends in {}", ending(number));
        return Err(metadata.error_found(COUNT, expected, format!("{count}, in {file_name:?}")));
    };
    let part = |number| path.with_file_name(format!("{stem}{}", ending(number)));
    Ok(Some((1..=u64::from(count)).map(part).collect()))
}

/// Opens a part; a missing one is an error that names the first.
pub(super) fn open_part(parts: &[PathBuf], number: usize) -> Result<RegularFile> {
    let path = &parts[number];
    RegularFile::open(path).map_err(|error| match error {
        Error::Io { source, .. } if source.kind() == io::ErrorKind::NotFound => {
            let name = path.file_name().unwrap_or_default();
            let shard = name.to_string_lossy().into_owned();
            Error::MissingShard { path: parts[0].clone(), shard }
        }
        other => other,
    })
}

/// Fails if a part says that it is another.
pub(super) fn check_part(metadata: &GgufMetadata, number: usize, count: usize) -> Result<()> {
    for (key, expected) in [(NUMBER, number), (COUNT, count)] {
        if metadata.u32(key)? as usize != expected {
            return Err(metadata.error(key, format!("{expected}, as the name of the file says")));
        }
    }
    Ok(())
}

/// Fails if the parts hold another number of tensors than the first says.
pub(super) fn check_whole(metadata: &GgufMetadata, n_tensors: usize) -> Result<()> {
    match metadata.optional_u32(TENSORS)? {
        Some(stated) if stated as usize != n_tensors => {
            Err(metadata.error(TENSORS, format!("{n_tensors}, the tensors of all parts")))
        }
        _ => Ok(()),
    }
}
