//! How an example begins and ends: arguments in, exit status out, one place for both.
#![allow(dead_code, reason = "each example uses a part")]

use std::error::Error;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Parser;

/// What an example's `main` function returns on its way to the exit status.
pub(crate) type Outcome<T> = Result<T, Box<dyn Error>>;

/// Parses the command line, runs `body` and turns what comes of it into the exit status:
/// 0 done, 1 failed, 2 wrong usage.
pub(crate) fn run<Flags: Parser>(body: impl FnOnce(Flags) -> Outcome<()>) -> ExitCode {
    let flags = match Flags::try_parse() {
        Ok(flags) => flags,
        Err(usage) => return usage_status(&usage),
    };
    // A library panics over some tokenizers and the panic is caught; nobody wants to read it.
    std::panic::set_hook(Box::new(|_| {}));
    match std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| body(flags))) {
        Ok(Ok(())) => ExitCode::SUCCESS,
        Ok(Err(failure)) => failure_status(failure.as_ref(), &mut io::stderr()),
        Err(panic) => {
            let text = panic.downcast_ref::<String>().map(String::as_str);
            let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
            note(&format!("error: this is a bug: {}", text.unwrap_or("a panic without a text")));
            ExitCode::FAILURE
        }
    }
}

/// Reads a UTF-8 text file.
pub(crate) fn read_text(path: &Path) -> Outcome<String> {
    let read = || {
        // a device may have no end, a pipe no writer
        if !std::fs::metadata(path)?.is_file() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
        }
        std::fs::read_to_string(path)
    };
    let text = read().map_err(|source| Unreadable { path: path.to_path_buf(), source })?;
    Ok(text)
}

/// Fails if a file that is to be written at the end could not be: before the work.
#[allow(dead_code, reason = "not every example writes files")]
pub(crate) fn check_outputs(paths: &[&Option<PathBuf>]) -> Outcome<()> {
    for path in paths.iter().filter_map(|path| path.as_ref()) {
        powerinfer::core::check_output(path)?;
    }
    Ok(())
}

/// Writes a text file, whole or not at all.
#[allow(dead_code, reason = "not every example writes files")]
pub(crate) fn write_text(path: &Path, text: &str) -> Outcome<()> {
    use powerinfer::core::{Error, replace_file};
    let failed = |source| Error::Write { path: path.to_owned(), source };
    Ok(replace_file(path, |new| std::fs::write(new, text).map_err(failed))?)
}

/// Wrong usage that flags cannot express: exit status 2.
#[allow(dead_code, reason = "not every example has any")]
pub(crate) fn wrong_usage<T>(text: &str) -> Outcome<T> {
    let kind = clap::error::ErrorKind::ArgumentConflict;
    Err(clap::Error::raw(kind, format!("{text}\n")).into())
}

/// Writes one JSON object and a line end to stdout.
pub(crate) fn print_json(object: &serde_json::Value) -> Outcome<()> {
    writeln!(io::stdout(), "{object}").map_err(Stdout)?;
    Ok(())
}

/// Writes text to stdout at once, so that a stream of text is seen as it comes.
pub(crate) fn print(text: &str) -> Outcome<()> {
    let mut stdout = io::stdout().lock();
    stdout.write_all(text.as_bytes()).map_err(Stdout)?;
    stdout.flush().map_err(Stdout)?;
    Ok(())
}

/// Writes a note to stderr; a closed stderr loses it and nothing else.
pub(crate) fn note(text: &str) {
    let _ = writeln!(io::stderr(), "{}", printable(text));
}

/// Writes text to stderr without a line end, for a reader at a terminal.
pub(crate) fn echo(text: &str) {
    let _ = write!(io::stderr(), "{text}");
}

#[derive(Debug, thiserror::Error)]
#[error("cannot read the text file {}", path.display())]
struct Unreadable {
    path: PathBuf,
    source: std::io::Error,
}

/// Writing to stdout failed. Whoever closes the pipe early has read enough: no failure of ours.
#[derive(Debug, thiserror::Error)]
#[error("cannot write to stdout")]
struct Stdout(#[source] io::Error);

fn usage_status(usage: &clap::Error) -> ExitCode {
    let _ = usage.print();
    usage_code(usage)
}

fn usage_code(usage: &clap::Error) -> ExitCode {
    ExitCode::from(u8::try_from(usage.exit_code()).unwrap_or(2))
}

/// Writes `error: …` and its causes to `stderr`, each on its own line.
pub(crate) fn failure_status(failure: &(dyn Error + 'static), stderr: &mut dyn Write) -> ExitCode {
    if let Some(usage) = failure.downcast_ref::<clap::Error>() {
        let _ = write!(stderr, "{}", usage.render());
        return usage_code(usage);
    }
    let closed = failure.downcast_ref::<Stdout>();
    if closed.is_some_and(|Stdout(source)| source.kind() == io::ErrorKind::BrokenPipe) {
        return ExitCode::SUCCESS;
    }
    let _ = writeln!(stderr, "error: {}", one_line(failure));
    let mut cause = failure.source();
    while let Some(error) = cause {
        let _ = writeln!(stderr, "  caused by: {}", one_line(error));
        cause = error.source();
    }
    ExitCode::FAILURE
}

/// An error's text may quote a file or a prompt.
fn one_line(error: &dyn Error) -> String {
    printable(&error.to_string())
}

/// A text out of a file on one line of a terminal: control characters, which could end the line or
/// command the terminal, are spelled out.
pub(crate) fn printable(text: &str) -> String {
    text.chars().fold(String::new(), |mut line, c| {
        if c.is_control() {
            line.extend(c.escape_default())
        } else {
            line.push(c)
        }
        line
    })
}
