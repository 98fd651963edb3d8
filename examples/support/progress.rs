//! Progress on stderr: a bar once work has lasted two seconds, on a terminal only.
#![allow(dead_code, reason = "each example uses a part")]

use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

const SPINNER: &str = "{msg} {spinner} {elapsed}";
const STEPS: &str = "{msg} {wide_bar} {pos}/{len} {eta}";
const BYTES: &str = "{msg} {wide_bar} {bytes}/{total_bytes} {eta}";
const QUIET_TIME: Duration = Duration::from_secs(2);
/// A smaller model is loaded before a bar would say anything.
const LARGE_BYTES: u64 = 500 << 20;
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
        style(&bar, if n_steps == 0 { SPINNER } else { STEPS });
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

    /// While a model is loaded: a bar over its bytes if it is a large one and
    /// [`bytes`](Self::bytes) is told of them, else a spinner.
    pub(crate) fn loading() -> Self {
        Self::new("loading", 0)
    }

    /// What is to be told how many bytes of how many are done.
    pub(crate) fn bytes(&self) -> impl Fn(u64, u64) + Send + Sync + 'static {
        let bar = self.bar.clone();
        move |done_bytes, total_bytes| {
            if total_bytes < LARGE_BYTES {
                return;
            }
            if done_bytes == 0 {
                style(&bar, BYTES);
                bar.set_length(total_bytes);
            }
            bar.set_position(done_bytes);
        }
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

fn style(bar: &ProgressBar, template: &str) {
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style);
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
