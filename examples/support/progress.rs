//! Progress on stderr: a bar once work has lasted two seconds, on a terminal only.
#![allow(dead_code, reason = "each example uses a part")]

use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

const QUIET_TIME: Duration = Duration::from_secs(2);
const REDRAW: Duration = Duration::from_millis(200);

/// A bar that appears late or never and goes when dropped.
#[derive(Debug)]
pub(crate) struct Progress {
    bar: ProgressBar,
    done: Option<Sender<()>>,
    watcher: Option<JoinHandle<()>>,
}

impl Progress {
    /// A bar over `n_steps` steps; 0 steps: a spinner for work of unknown length.
    pub(crate) fn new(label: &'static str, n_steps: u64) -> Self {
        let bar = ProgressBar::with_draw_target(Some(n_steps), ProgressDrawTarget::hidden());
        let template = if n_steps == 0 {
            "{msg} {spinner} {elapsed}"
        } else {
            "{msg} {wide_bar} {pos}/{len} {eta}"
        };
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style);
        }
        bar.set_message(label);
        let (done, quiet) = channel();
        let shown = bar.clone();
        let watch = move || {
            if quiet.recv_timeout(QUIET_TIME) == Err(RecvTimeoutError::Timeout) {
                // indicatif draws nothing where stderr is no terminal.
                shown.set_draw_target(ProgressDrawTarget::stderr());
                shown.enable_steady_tick(REDRAW);
            }
        };
        // Without a thread to spare there is no bar, and the work goes on.
        let watcher = std::thread::Builder::new().spawn(watch).ok();
        Self { bar, done: Some(done), watcher }
    }

    /// Counts `n` steps.
    pub(crate) fn advance(&self, n: u64) {
        self.bar.inc(n);
    }

    /// Has done so many of so many steps.
    pub(crate) fn reach(&self, done: u64, of: u64) {
        self.bar.set_length(of);
        self.bar.set_position(done);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        drop(self.done.take());
        if let Some(watcher) = self.watcher.take() {
            let _ = watcher.join();
        }
        self.bar.finish_and_clear();
    }
}
