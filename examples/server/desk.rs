//! Who is served now, who waits, and the sessions that they take turns with.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use powerinfer::{Engine, GenerateOptions, Generated, PieceStream, Session};
use serde_json::{Value, json};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::problem::Problem;

/// More clients than this that wait at once are sent away.
const MAX_WAITING: usize = 512;

/// Seats for requests that run, and sessions between two requests.
#[derive(Debug)]
pub(crate) struct Desk {
    engine: Engine,
    seats: Arc<Semaphore>,
    n_seats: usize,
    waiting: AtomicUsize,
    /// Requests that came to their end.
    finished: AtomicUsize,
    /// The one that was used last is at the end.
    idle: Mutex<Vec<Session>>,
}

/// The right to run one request; dropping it lets the next one in.
#[derive(Debug)]
pub(crate) struct Seat {
    desk: Arc<Desk>,
    _permit: OwnedSemaphorePermit,
}

impl Desk {
    pub(crate) fn new(engine: Engine, n_seats: usize) -> Self {
        let seats = Arc::new(Semaphore::new(n_seats));
        let (waiting, finished) = (AtomicUsize::new(0), AtomicUsize::new(0));
        Self { engine, seats, n_seats, waiting, finished, idle: Mutex::new(Vec::new()) }
    }

    /// Waits for a seat.
    pub(crate) async fn seat(self: &Arc<Self>) -> Result<Seat, Problem> {
        let waiting = Waiting::new(&self.waiting);
        if waiting.before > MAX_WAITING {
            return Err(Problem::busy());
        }
        let permit = Arc::clone(&self.seats).acquire_owned().await;
        let permit = permit.map_err(|_| Problem::internal("the server stops"))?;
        Ok(Seat { desk: Arc::clone(self), _permit: permit })
    }

    pub(crate) fn as_json(&self) -> Value {
        json!({
            "status": "ok",
            "parallel": self.n_seats,
            "running": self.n_seats - self.seats.available_permits(),
            "waiting": self.waiting.load(Ordering::Relaxed),
            "finished": self.finished.load(Ordering::Relaxed),
            "idle_sessions": self.idle().len(),
        })
    }

    fn idle(&self) -> MutexGuard<'_, Vec<Session>> {
        // nothing that runs under the lock panics
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The idle session that shares most with the prompt, or a new one while there are fewer than
    /// seats.
    fn session(&self, prompt: &[u32]) -> Result<Session, Problem> {
        let mut idle = self.idle();
        let shared = |session: &Session| {
            session.ids().iter().zip(prompt).take_while(|(a, b)| a == b).count()
        };
        let best = (0..idle.len()).max_by_key(|&index| shared(&idle[index]));
        let useful = best.filter(|&index| shared(&idle[index]) > 1);
        if let Some(index) = useful {
            return Ok(idle.remove(index));
        }
        if idle.len() < self.n_seats {
            return Ok(self.engine.session()?);
        }
        let mut oldest = idle.remove(0);
        oldest.reset();
        Ok(oldest)
    }
}

impl Seat {
    /// Starts a request.
    pub(crate) fn start(
        self,
        prompt: Vec<u32>,
        options: &GenerateOptions,
    ) -> Result<(PieceStream, Self), Problem> {
        let session = self.desk.session(&prompt)?;
        Ok((session.into_stream_whole(prompt, options)?, self))
    }

    /// Ends a request whose last piece has come; its session keeps its context for the next.
    pub(crate) fn finish(self, pieces: PieceStream) -> Result<Generated, Problem> {
        let (generated, session) = pieces.finish()?;
        self.desk.finished.fetch_add(1, Ordering::Relaxed);
        let mut idle = self.desk.idle();
        idle.push(session);
        if idle.len() > self.desk.n_seats {
            idle.remove(0);
        }
        drop(idle);
        Ok(generated)
    }
}

/// Counts one who waits, also if he goes away.
struct Waiting<'a> {
    count: &'a AtomicUsize,
    before: usize,
}

impl<'a> Waiting<'a> {
    fn new(count: &'a AtomicUsize) -> Self {
        Self { before: count.fetch_add(1, Ordering::Relaxed), count }
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.count.fetch_sub(1, Ordering::Relaxed);
    }
}
