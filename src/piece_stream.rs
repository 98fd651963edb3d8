//! A stream of text for async programs: a thread works, whoever polls is woken.

use std::collections::VecDeque;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use futures_core::Stream;
use powerinfer_core::CancelToken;

use crate::error::{Error, Result};
use crate::options::{GenerateOptions, Prompt};
use crate::session::{Request, Session};
use crate::stream::{Generated, Piece};

/// Pieces of text that come by themselves: a [`Stream`] for async programs, on no runtime.
///
/// A thread of its own runs the request. It needs no runtime, and any will do: the stream wakes
/// whoever polls it. Dropping the stream cancels the request before its next layer. Pieces wait in
/// memory until they are taken; there are at most as many as tokens were asked for.
///
/// # Examples
/// Polled by hand here; a program writes `while let Some(piece) = stream.next().await`.
/// ```
/// use std::pin::pin;
/// use std::task::{Context, Poll, Waker};
///
/// use futures_core::Stream;
/// use powerinfer::{Engine, GenerateOptions};
///
/// let engine = Engine::builder().model("assets/llama-relu-tiny").build()?;
/// let options = GenerateOptions::default().with_max_tokens(4);
/// let mut stream = pin!(engine.session()?.into_stream("It was a truth", &options)?);
/// let mut text = String::new();
/// loop {
///     match stream.as_mut().poll_next(&mut Context::from_waker(Waker::noop())) {
///         Poll::Ready(Some(piece)) => text.push_str(&piece?.text),
///         Poll::Ready(None) => break,
///         Poll::Pending => std::thread::yield_now(),
///     }
/// }
/// assert_eq!(text, " to be, that");
/// # Ok::<(), powerinfer::Error>(())
/// ```
#[must_use = "dropping the stream cancels the request"]
pub struct PieceStream {
    shared: Arc<Shared>,
    cancel: CancelToken,
    prompt_ids: Vec<u32>,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    ended: Condvar,
}

#[derive(Debug, Default)]
struct State {
    pieces: VecDeque<Result<Piece>>,
    waker: Option<Waker>,
    /// What the thread leaves behind.
    end: Option<Result<(Generated, Box<Session>)>>,
}

impl Session {
    /// As [`generate`](Self::generate), on a thread of its own, for async programs. The session
    /// comes back from [`PieceStream::finish`].
    ///
    /// # Errors
    /// Those of [`generate`](Self::generate), and [`Error::Thread`]; the session is then gone.
    pub fn into_stream(
        mut self,
        prompt: impl Into<Prompt>,
        options: &GenerateOptions,
    ) -> Result<PieceStream> {
        let request = self.request(prompt.into(), options)?;
        PieceStream::start(self, request)
    }

    /// As [`generate_whole`](Self::generate_whole), on a thread of its own.
    ///
    /// # Errors
    /// As [`into_stream`](Self::into_stream).
    pub fn into_stream_whole(
        mut self,
        prompt: impl Into<Prompt>,
        options: &GenerateOptions,
    ) -> Result<PieceStream> {
        let request = self.whole_request(prompt.into(), options)?;
        PieceStream::start(self, request)
    }
}

impl PieceStream {
    fn start(session: Session, mut request: Request) -> Result<Self> {
        let cancel = request.options.cancel.child();
        request.options.cancel = cancel.clone();
        let prompt_ids = request.prompt_ids.clone();
        let shared = Arc::new(Shared::default());
        let for_thread = Arc::clone(&shared);
        std::thread::Builder::new()
            .name("powerinfer-request".to_owned())
            .spawn(move || for_thread.run(session, request))
            .map_err(|source| Error::Thread { source })?;
        Ok(Self { shared, cancel, prompt_ids })
    }

    /// The prompt as the model gets it, special tokens included.
    #[must_use]
    pub fn prompt_ids(&self) -> &[u32] {
        &self.prompt_ids
    }

    /// Waits for the end, and returns the whole and the session. Blocks the thread unless the stream
    /// has ended, so an async program calls it after the last piece. After an error the finish reason
    /// is [`Failed`](crate::FinishReason::Failed); the error itself came as a piece.
    ///
    /// # Errors
    /// [`Error::Panicked`]; there is no session then.
    pub fn finish(self) -> Result<(Generated, Session)> {
        let mut state = self.shared.lock();
        loop {
            if let Some(end) = state.end.take() {
                return end.map(|(generated, session)| (generated, *session));
            }
            state = self.shared.ended.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // nothing that runs under the lock panics
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The life of the thread.
    fn run(&self, mut session: Session, request: Request) {
        let ran = catch_unwind(AssertUnwindSafe(|| {
            let prompt_ids = request.prompt_ids.clone();
            let mut stream = match session.start(request) {
                Ok(stream) => stream,
                Err(error) => {
                    self.push(Err(error));
                    return Ok(Generated::failed(prompt_ids));
                }
            };
            stream.by_ref().for_each(|piece| self.push(piece));
            stream.finish()
        }));
        let end = match ran {
            Ok(generated) => generated.map(|generated| (generated, Box::new(session))),
            Err(_) => {
                self.push(Err(Error::Panicked));
                Err(Error::Panicked)
            }
        };
        let mut state = self.lock();
        state.end = Some(end);
        let waker = state.waker.take();
        drop(state);
        self.ended.notify_all();
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    fn push(&self, piece: Result<Piece>) {
        let mut state = self.lock();
        state.pieces.push_back(piece);
        let waker = state.waker.take();
        drop(state);
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

impl Stream for PieceStream {
    type Item = Result<Piece>;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Piece>>> {
        let mut state = self.shared.lock();
        if let Some(piece) = state.pieces.pop_front() {
            return Poll::Ready(Some(piece));
        }
        if state.end.is_some() {
            return Poll::Ready(None);
        }
        state.waker = Some(context.waker().clone());
        Poll::Pending
    }
}

impl Drop for PieceStream {
    fn drop(&mut self) {
        self.cancel.cancel();
    }
}

impl fmt::Debug for PieceStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PieceStream")
            .field("n_prompt_tokens", &self.prompt_ids.len())
            .field("cancelled", &self.cancel.is_cancelled())
            .finish_non_exhaustive()
    }
}
