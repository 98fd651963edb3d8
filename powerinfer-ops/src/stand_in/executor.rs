//! The thread that does the work.

use std::any::Any;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender};
use std::thread;
use std::time::{Duration, Instant};

use super::dense_steps::{AttentionValues, DenseScratch, HeadValues, NormValues};
use super::exchange::{Asked, Exchange};
use super::rows::HeldRows;
use super::tokens::Tokens;
use super::{ModelledSpeed, StandInFailure, failed};
use crate::error::OpError;
use crate::fast_device::{HeldRun, Slot};
use crate::ffn::{FfnCounts, Neurons, ffn_into};
use crate::workspace::Workspace;

/// Tokens that are computed at once, so that scratch memory has a bound. Where a prompt is cut
/// changes no bit.
pub(super) const TOKENS_AT_ONCE: usize = 32;
/// A sleeping thread wakes up late by about so much; the last of a modelled time is spun away.
const WAKING: Duration = Duration::from_micros(80);

/// What a network comes to.
pub(super) type Answer = Result<Exchange, OpError>;

/// A piece of work.
pub(super) struct Job {
    pub(super) work: Work,
    #[cfg(test)]
    pub(super) fault: Option<super::tests::Fault>,
}

/// What is to be done, and who is told.
pub(super) enum Work {
    Network { rows: Arc<HeldRows>, exchange: Exchange, answer: Sender<Answer> },
    Step { step: Step, tokens: Box<Tokens>, answer: Sender<Result<Done, OpError>> },
}

/// A step on the tokens of a sequence.
pub(super) enum Step {
    Norm { norm: Arc<NormValues>, from: Slot, to: Slot },
    Attention { attention: Arc<AttentionValues>, layer: usize, from: Slot },
    Head { head: Arc<HeadValues>, wanted: Range<usize>, logits: Vec<f32> },
}

/// What a step comes to.
pub(super) struct Done {
    pub(super) tokens: Box<Tokens>,
    /// Of a head.
    pub(super) logits: Vec<f32>,
    pub(super) result: Result<(), OpError>,
}

/// What work is done in.
#[derive(Default)]
struct Executor {
    workspace: Workspace,
    scratch: DenseScratch,
    /// Values between the layers of a predictor.
    hidden: Vec<f32>,
    speed: Option<ModelledSpeed>,
}

/// Does one piece of work after the other until nobody can ask for more. A panic ends it, and with
/// the queue all who wait and all who come later are told that it is gone.
pub(super) fn serve(jobs: &Receiver<Job>, speed: Option<ModelledSpeed>, scratch_used: &AtomicU64) {
    let mut executor = Executor { speed, ..Executor::default() };
    while let Ok(job) = jobs.recv() {
        #[cfg(test)]
        if matches!(job.fault, Some(super::tests::Fault::Death)) {
            return;
        }
        let lives = match job.work {
            Work::Network { rows, mut exchange, answer } => {
                let done = unless_it_panics(|| {
                    #[cfg(test)]
                    super::tests::strike(job.fault);
                    executor.network(&rows, &mut exchange)
                });
                // memory first: who has the answer may look at the books
                drop(rows);
                executor.count(scratch_used);
                let lives = done.is_ok();
                // who gave the work up does not listen
                let _ = answer.send(done.and_then(|done| done).map(|()| exchange));
                lives
            }
            Work::Step { step, tokens, answer } => {
                let done = unless_it_panics(|| {
                    #[cfg(test)]
                    super::tests::strike(job.fault);
                    executor.step(step, tokens)
                });
                executor.count(scratch_used);
                let lives = done.is_ok();
                let _ = answer.send(done);
                lives
            }
        };
        if !lives {
            return;
        }
    }
}

/// What `work` gives, or what its panic said.
fn unless_it_panics<T>(work: impl FnOnce() -> T) -> Result<T, OpError> {
    catch_unwind(AssertUnwindSafe(work))
        .map_err(|panic| failed(StandInFailure::Panicked(text(panic.as_ref()))))
}

impl Executor {
    fn count(&self, scratch_used: &AtomicU64) {
        let hidden = self.hidden.capacity() * size_of::<f32>();
        let bytes = self.workspace.size_bytes() + self.scratch.size_bytes() + hidden;
        scratch_used.store(bytes as u64, Ordering::Relaxed);
    }

    /// Fills in what the network gives, and takes as long as the model says.
    fn network(&mut self, rows: &HeldRows, exchange: &mut Exchange) -> Result<(), OpError> {
        let began = Instant::now();
        let d_model = rows.weights.d_model().max(1);
        let n_tokens = exchange.x.len() / d_model;
        let mut counts = FfnCounts::default();
        let Exchange { asked, x, picks, residual, y, .. } = exchange;
        y.clear();
        y.resize(x.len(), 0.0);
        for first in (0..n_tokens).step_by(TOKENS_AT_ONCE) {
            let tokens = first..n_tokens.min(first + TOKENS_AT_ONCE);
            let values = tokens.start * d_model..tokens.end * d_model;
            let neurons = match (&asked, rows.predictor.get()) {
                (Asked::All, _) => Neurons::All,
                // the same bits, and a stream of rows is read faster than scattered ones
                (Asked::Firing, _) if rows.is_dense => Neurons::All,
                (Asked::FiringOf, _) => Neurons::FiringOf(&picks[tokens]),
                (Asked::Predicted, Some(predictor)) => {
                    let residual = residual.get(values.clone()).unwrap_or_default();
                    let inputs = [residual, &x[values.clone()]];
                    let began = Instant::now();
                    let read = predictor.begin(inputs, &mut self.workspace, &mut self.hidden);
                    counts.bytes += read;
                    counts.predictor_ns += crate::ffn::nanoseconds(began);
                    predictor.neurons(&self.hidden)
                }
                _ => Neurons::Firing,
            };
            let y = &mut y[values.clone()];
            counts.add(ffn_into(&rows.weights, neurons, &x[values], &mut self.workspace, y)?);
        }
        if let Some(speed) = self.speed {
            wait_until(began, exchange.duration(speed, counts.bytes, n_tokens));
        }
        exchange.run = HeldRun::new(counts, crate::ffn::nanoseconds(began));
        Ok(())
    }

    /// Does a step, and takes as long as the model says.
    fn step(&mut self, step: Step, mut tokens: Box<Tokens>) -> Done {
        let began = Instant::now();
        let scratch = (&mut self.workspace, &mut self.scratch);
        let (mut bytes, mut given, mut result) = (0, Vec::new(), Ok(()));
        match step {
            Step::Norm { norm, from, to } => {
                norm.run(&mut tokens, from, to);
                bytes += norm.read_bytes();
            }
            Step::Attention { attention, layer, from } => {
                result = attention.run(&mut tokens, (layer, from), scratch);
                bytes += attention.read_bytes() + tokens.layer_bytes(layer);
            }
            Step::Head { head, wanted, mut logits } => {
                head.run(&tokens, wanted, scratch, &mut logits);
                bytes += head.read_bytes();
                given = logits;
            }
        }
        if let Some(speed) = self.speed {
            wait_until(began, speed.work(bytes));
        }
        Done { tokens, logits: given, result }
    }
}

/// Lets the rest of a modelled time pass.
pub(super) fn wait_until(began: Instant, duration: Duration) {
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
