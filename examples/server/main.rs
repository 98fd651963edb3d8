//! An OpenAI-compatible HTTP server over one engine.
//!
//! ```sh
//! cargo run --release --example server -- --port 8080 --parallel 4
//! curl http://127.0.0.1:8080/v1/completions -d '{"prompt": "It was a truth", "max_tokens": 20}'
//! ```
//!
//! `GET /v1/models`, `POST /v1/completions`, `POST /v1/chat/completions` (both with `stream`), and
//! `GET /health`. A client that goes away stops its request before the next layer. `--parallel`
//! requests run at once and share the engine's threads, the others wait; up to as many sessions keep
//! their context, so that a conversation that comes back runs its new messages only.

mod desk;
#[path = "../support/flags.rs"]
mod flags;
mod problem;
#[path = "../support/progress.rs"]
mod progress;
mod reply;
#[path = "../support/report.rs"]
mod report;
mod request;

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::extract::{DefaultBodyLimit, Path, State};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use clap::Parser;
use powerinfer::Engine;
use serde_json::{Value, json};

use desk::Desk;
use flags::{CommonFlags, at_least_one, parse_some_bytes};
use problem::Problem;
use progress::Progress;
use reply::Reply;
use report::{Outcome, note};
use request::{Ask, Kind};

/// Serves a model over HTTP, with OpenAI's interface.
#[derive(Debug, Parser)]
#[command(name = "server")]
struct Flags {
    /// The address to listen on
    #[arg(long, default_value = "127.0.0.1")]
    host: String,
    /// The port; 0 takes a free one, which is printed
    #[arg(long, default_value_t = 8080)]
    port: u16,
    /// Requests that run at once
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=1024))]
    parallel: u16,
    /// Longest body of a request, such as 1MiB
    #[arg(long, value_name = "SIZE", default_value = "1MiB", value_parser = parse_some_bytes)]
    max_body: u64,
    /// Tokens that a context may hold, if fewer than the model allows
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    max_context: Option<usize>,
    /// A file with a chat template, in place of the model's
    #[arg(long, value_name = "FILE")]
    chat_template: Option<std::path::PathBuf>,
    #[command(flatten)]
    common: CommonFlags,
}

/// What all requests share.
#[derive(Debug)]
struct Server {
    engine: Engine,
    desk: Arc<Desk>,
    model_id: String,
    began: u64,
    n_requests: AtomicU64,
}

fn main() -> ExitCode {
    report::run(serve)
}

fn serve(flags: Flags) -> Outcome<()> {
    let folder = flags.common.model_path();
    let engine = {
        let progress = Progress::loading();
        let mut builder = flags.common.builder()?.model(&folder);
        builder = builder.on_load_progress(progress.bytes());
        if let Some(max_context) = flags.max_context {
            builder = builder.max_context(max_context);
        }
        if let Some(path) = &flags.chat_template {
            builder = builder.chat_template(report::read_text(path)?);
        }
        builder.build()?
    };
    for line in &engine.info().notes {
        note(&format!("note: {line}"));
    }
    let name = folder.file_name().map(|name| name.to_string_lossy().into_owned());
    let server = Server {
        desk: Arc::new(Desk::new(engine.clone(), flags.parallel.into())),
        engine,
        model_id: name.unwrap_or_else(|| "model".to_owned()),
        began: seconds_now(),
        n_requests: AtomicU64::new(0),
    };
    let max_body = usize::try_from(flags.max_body).unwrap_or(usize::MAX);
    let routes = routes(Arc::new(server), max_body);
    // the engine's threads compute; this one only waits for sockets
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let listener = tokio::net::TcpListener::bind((flags.host.as_str(), flags.port)).await?;
        note(&format!("listening on http://{}", listener.local_addr()?));
        axum::serve(listener, routes).await?;
        Ok(())
    })
}

fn routes(server: Arc<Server>, max_body: usize) -> Router {
    Router::new()
        .route("/health", get(health))
        .route("/v1/models", get(models))
        .route("/v1/models/{id}", get(model))
        .route("/v1/completions", post(completions))
        .route("/v1/chat/completions", post(chat_completions))
        .fallback(|| async { Problem::not_found("there is nothing at this address") })
        .method_not_allowed_fallback(|| async { Problem::wrong_method() })
        .layer(DefaultBodyLimit::max(max_body))
        .with_state(server)
}

async fn health(State(server): State<Arc<Server>>) -> Json<Value> {
    Json(server.desk.as_json())
}

async fn models(State(server): State<Arc<Server>>) -> Json<Value> {
    Json(json!({"object": "list", "data": [server.as_json()]}))
}

async fn model(
    State(server): State<Arc<Server>>,
    Path(id): Path<String>,
) -> Result<Json<Value>, Problem> {
    server.check_model(Some(&id))?;
    Ok(Json(server.as_json()))
}

async fn completions(
    State(server): State<Arc<Server>>,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, Problem> {
    server.answer(Kind::Completion, body?).await
}

async fn chat_completions(
    State(server): State<Arc<Server>>,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, Problem> {
    server.answer(Kind::Chat, body?).await
}

impl Server {
    async fn answer(&self, kind: Kind, body: Bytes) -> Result<Response, Problem> {
        let number = self.n_requests.fetch_add(1, Ordering::Relaxed);
        let ask = Ask::parse(kind, &body, number)?;
        self.check_model(ask.model.as_deref())?;
        let stream = ask.stream;
        let seat = self.desk.seat().await?;
        // templates and tokenizers take their time over a long prompt
        let engine = self.engine.clone();
        let started = tokio::task::spawn_blocking(move || -> Result<_, Problem> {
            let prompt = ask.prompt_ids(&engine)?;
            let (pieces, seat) = seat.start(prompt, &ask.options(&engine))?;
            Ok((pieces, seat, ask))
        });
        let (pieces, seat, ask) = started.await.map_err(|_| Problem::internal("a panic"))??;
        let id = format!("{}-{}-{number}", kind.id_prefix(), self.began);
        let reply = Reply::new(self.engine.clone(), self.model_id.clone(), id, ask);
        if stream {
            return Ok(reply.events(pieces, seat).into_response());
        }
        Ok(Json(reply.whole(pieces, seat).await?).into_response())
    }

    fn check_model(&self, id: Option<&str>) -> Result<(), Problem> {
        match id {
            Some(id) if id != self.model_id => Err(Problem::no_such_model(id, &self.model_id)),
            _ => Ok(()),
        }
    }

    fn as_json(&self) -> Value {
        json!({
            "id": self.model_id,
            "object": "model",
            "created": self.began,
            "owned_by": "powerinfer",
            "max_context": self.engine.max_context(),
        })
    }
}

fn seconds_now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
