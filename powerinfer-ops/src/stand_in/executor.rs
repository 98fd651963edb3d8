//! The thread that does the work.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender};
use std::thread;
use std::time::{Duration, Instant};

use super::exchange::{Asked, Exchange};
use super::rows::HeldRows;
use super::{ModelledSpeed, StandInFailure, failed};
use crate::error::OpError;
use crate::fast_device::HeldRun;
use crate::ffn::{FfnCounts, Neurons, ffn_into};
use crate::workspace::Workspace;

/// Tokens that are computed at once, so that scratch memory has a bound. Where a prompt is cut
/// changes no bit.
pub(super) const TOKENS_AT_ONCE: usize = 32;
/// A sleeping thread wakes up late by about so much; the last of a modelled time is spun away.
const WAKING: Duration = Duration::from_micros(80);

/// What a piece of work comes to.
pub(super) type Answer = Result<Exchange, OpError>;

/// A piece of work.
pub(super) struct Job {
    pub(super) rows: Arc<HeldRows>,
    pub(super) exchange: Exchange,
    pub(super) answer: Sender<Answer>,
    #[cfg(test)]
    pub(super) fault: Option<super::tests::Fault>,
}

/// Does one piece of work after the other until nobody can ask for more. A panic ends it, and with
/// the queue all who wait and all who come later are told that it is gone.
pub(super) fn serve(jobs: &Receiver<Job>, speed: Option<ModelledSpeed>, scratch_used: &AtomicU64) {
    let mut workspace = Workspace::default();
    while let Ok(job) = jobs.recv() {
        #[cfg(test)]
        if matches!(job.fault, Some(super::tests::Fault::Death)) {
            return;
        }
        let Job { rows, mut exchange, answer, .. } = job;
        let done = catch_unwind(AssertUnwindSafe(|| {
            #[cfg(test)]
            if matches!(job.fault, Some(super::tests::Fault::Panic)) {
                panic!("planted");
            }
            run(&rows, &mut exchange, &mut workspace, speed)
        }));
        // memory first: who has the answer may look at the books
        drop(rows);
        scratch_used.store(workspace.size_bytes() as u64, Ordering::Relaxed);
        let panicked = done.is_err();
        let message = match done {
            Ok(done) => done.map(|()| exchange),
            Err(panic) => Err(failed(StandInFailure::Panicked(text(panic.as_ref())))),
        };
        // who gave the work up does not listen
        let _ = answer.send(message);
        if panicked {
            return;
        }
    }
}

/// Fills in what the work gives, and takes as long as the model says.
fn run(
    rows: &HeldRows,
    exchange: &mut Exchange,
    workspace: &mut Workspace,
    speed: Option<ModelledSpeed>,
) -> Result<(), OpError> {
    let began = Instant::now();
    let d_model = rows.weights.d_model().max(1);
    let n_tokens = exchange.x.len() / d_model;
    let mut counts = FfnCounts::default();
    let Exchange { asked, x, picks, hidden, y, .. } = exchange;
    y.clear();
    y.resize(x.len(), 0.0);
    let rank = hidden.len() / n_tokens.max(1);
    for first in (0..n_tokens).step_by(TOKENS_AT_ONCE) {
        let tokens = first..n_tokens.min(first + TOKENS_AT_ONCE);
        let values = tokens.start * d_model..tokens.end * d_model;
        let neurons = match (&asked, rows.predictor.get()) {
            (Asked::All, _) => Neurons::All,
            // the same bits, and a stream of rows is read faster than scattered ones
            (Asked::Firing, _) if rows.is_dense => Neurons::All,
            (Asked::FiringOf, _) => Neurons::FiringOf(&picks[tokens]),
            (Asked::Predicted, Some(predictor)) => {
                predictor.neurons(&hidden[tokens.start * rank..tokens.end * rank])
            }
            _ => Neurons::Firing,
        };
        let y = &mut y[values.clone()];
        counts.add(ffn_into(&rows.weights, neurons, &x[values], workspace, y)?);
    }
    if let Some(speed) = speed {
        wait_until(began, speed.duration(counts.bytes, exchange.link_bytes(n_tokens)));
    }
    exchange.run = HeldRun::new(counts, crate::ffn::nanoseconds(began));
    Ok(())
}

fn wait_until(began: Instant, duration: Duration) {
    if let Some(long) = duration.checked_sub(began.elapsed() + WAKING) {
        thread::sleep(long);
    }
    while began.elapsed() < duration {
        std::hint::spin_loop();
    }
}

/// What a panic said.
fn text(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("no message").to_owned()
}
