//! Writing a file so that it is there whole or not at all.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

/// Names that are tried for the file beside the one to be written.
const NAMES: u32 = 100;

/// Has `write` fill a new file beside `path`, and puts it in the place of `path` once it is complete.
/// A link is followed and stays. If `write` fails, the new file is removed and what was there remains.
///
/// # Errors
/// [`Error::Write`] naming `path` as [`check_output`] does, and what `write` fails with.
///
/// # Examples
/// ```
/// use powerinfer_core::{Error, replace_file};
/// let dir = tempfile::tempdir().expect("a folder");
/// let path = dir.path().join("plan.json");
/// let failed = |source| Error::Write { path: path.clone(), source };
/// replace_file(&path, |new| std::fs::write(new, "{}").map_err(failed))?;
/// assert_eq!(std::fs::read(&path).expect("it is there"), b"{}");
/// # Ok::<(), Error>(())
/// ```
pub fn replace_file<E: From<Error>>(
    path: &Path,
    write: impl FnOnce(&Path) -> std::result::Result<(), E>,
) -> std::result::Result<(), E> {
    let (target, new) = prepare(path)?;
    let written = write(&new).and_then(|()| {
        let failed = |source| E::from(Error::Write { path: path.to_owned(), source });
        fs::rename(&new, &target).map_err(failed)
    });
    if written.is_err() {
        // nothing more can be done about a file that cannot be removed either
        let _ = fs::remove_file(&new);
    }
    written
}

/// Fails if `path` could not be written: before work whose result is to go there.
///
/// # Errors
/// [`Error::Write`] if something other than a regular file is there, such as a folder or a device,
/// or its folder is missing or may not be written.
pub fn check_output(path: &Path) -> Result<()> {
    let (_, new) = prepare(path)?;
    fs::remove_file(&new).map_err(|source| Error::Write { path: path.to_owned(), source })
}

/// The file that is meant, and a new, empty one beside it.
fn prepare(path: &Path) -> Result<(PathBuf, PathBuf)> {
    let prepare = || {
        let target = match fs::symlink_metadata(path) {
            // a link to nothing is an error here
            Ok(found) if found.is_symlink() => fs::canonicalize(path)?,
            Ok(_) => path.to_owned(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => path.to_owned(),
            Err(error) => return Err(error),
        };
        if target.exists() && !target.is_file() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
        }
        let Some(name) = target.file_name() else {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "not the name of a file"));
        };
        for number in 0..NAMES {
            let mut beside = name.to_owned();
            beside.push(format!(".{}-{number}.part", std::process::id()));
            let new = target.with_file_name(beside);
            match File::create_new(&new) {
                Ok(_) => return Ok((target, new)),
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(error),
            }
        }
        Err(io::Error::new(io::ErrorKind::AlreadyExists, "no name is free beside it"))
    };
    prepare().map_err(|source| Error::Write { path: path.to_owned(), source })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn save(path: &Path, text: &str) -> Result<()> {
        let failed = |source| Error::Write { path: path.to_owned(), source };
        replace_file(path, |new| fs::write(new, text).map_err(failed))
    }

    fn names(dir: &Path) -> Vec<String> {
        let entries = fs::read_dir(dir).unwrap();
        let mut names: Vec<String> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn a_file_is_replaced_and_its_neighbours_stay() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("keep.json");
        fs::write(dir.path().join("keep.part"), "mine").unwrap();
        for text in ["one", "two"] {
            check_output(&path).unwrap();
            save(&path, text).unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), text);
        }
        assert_eq!(fs::read_to_string(dir.path().join("keep.part")).unwrap(), "mine");
        assert_eq!(names(dir.path()), ["keep.json", "keep.part"]);
    }

    #[test]
    fn what_was_there_stays_if_writing_fails() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        save(&path, "before").unwrap();
        let failed = replace_file(&path, |new| {
            fs::write(new, "half").unwrap();
            Err(Error::EmptyPrompt)
        });
        assert!(matches!(failed, Err(Error::EmptyPrompt)));
        assert_eq!(fs::read_to_string(&path).unwrap(), "before");
        assert_eq!(names(dir.path()), ["file"]);
    }

    #[test]
    fn folders_missing_folders_and_nameless_paths_are_refused_and_leave_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let inner = dir.path().join("inner");
        fs::create_dir(&inner).unwrap();
        for path in [inner.clone(), dir.path().join("missing/file"), inner.join("..")] {
            for result in [check_output(&path), save(&path, "text")] {
                assert!(matches!(result, Err(Error::Write { path: named, .. }) if named == path));
            }
        }
        assert_eq!(names(dir.path()), ["inner"]);
    }

    #[cfg(unix)]
    #[test]
    fn a_link_stays_one_and_a_device_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let (file, link) = (dir.path().join("file"), dir.path().join("link"));
        save(&file, "before").unwrap();
        std::os::unix::fs::symlink("file", &link).unwrap();
        save(&link, "after").unwrap();
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(fs::read_to_string(&file).unwrap(), "after");
        let nowhere = dir.path().join("nowhere");
        std::os::unix::fs::symlink("gone", &nowhere).unwrap();
        assert!(save(&nowhere, "text").is_err());
        // asked only, so that a fault of this function does no harm
        assert!(check_output(Path::new("/dev/null")).is_err());
    }
}
