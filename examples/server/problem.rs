//! What went wrong, as OpenAI's clients understand it.

use axum::Json;
use axum::extract::rejection::BytesRejection;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use powerinfer::{Error, core};
use serde_json::{Value, json};

/// An error of one request.
#[derive(Debug)]
pub(crate) struct Problem {
    status: StatusCode,
    message: String,
    param: Option<String>,
    code: Option<&'static str>,
}

impl Problem {
    /// The request asks for something wrong in `param`.
    pub(crate) fn invalid(param: &str, message: impl Into<String>) -> Self {
        let (status, param) = (StatusCode::BAD_REQUEST, Some(param.to_owned()));
        Self { status, message: message.into(), param, code: Some("invalid_value") }
    }

    /// The request asks for something that this server does not do.
    pub(crate) fn unsupported(param: &str) -> Self {
        let message = format!("{param}: not supported by this server");
        Self { code: Some("unsupported_parameter"), ..Self::invalid(param, message) }
    }

    pub(crate) fn not_found(message: impl Into<String>) -> Self {
        let (status, message) = (StatusCode::NOT_FOUND, message.into());
        Self { status, message, param: None, code: Some("not_found") }
    }

    pub(crate) fn wrong_method() -> Self {
        let status = StatusCode::METHOD_NOT_ALLOWED;
        Self { status, ..Self::not_found("this address takes another method") }
    }

    pub(crate) fn no_such_model(found: &str, served: &str) -> Self {
        let message = format!("no model {found:?} here; expected {served:?}");
        let not_found = Self::not_found(message);
        Self { param: Some("model".to_owned()), code: Some("model_not_found"), ..not_found }
    }

    pub(crate) fn busy() -> Self {
        let (status, message) =
            (StatusCode::SERVICE_UNAVAILABLE, "too many requests wait".to_owned());
        Self { status, message, param: None, code: Some("busy") }
    }

    pub(crate) fn internal(what: impl Into<String>) -> Self {
        let status = StatusCode::INTERNAL_SERVER_ERROR;
        Self { status, message: what.into(), param: None, code: Some("internal_error") }
    }

    /// The body of the answer.
    pub(crate) fn as_json(&self) -> Value {
        let kind =
            if self.status.is_client_error() { "invalid_request_error" } else { "server_error" };
        json!({"error": {
            "message": self.message,
            "type": kind,
            "param": self.param,
            "code": self.code,
        }})
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        (self.status, Json(self.as_json())).into_response()
    }
}

impl From<BytesRejection> for Problem {
    fn from(rejection: BytesRejection) -> Self {
        let (status, message) = (rejection.status(), rejection.body_text());
        Self { status, message, param: None, code: Some("body") }
    }
}

impl From<Error> for Problem {
    fn from(error: Error) -> Self {
        let message = with_causes(&error);
        match error {
            Error::Core(core::Error::ContextExceeded { .. }) | Error::PromptTooLong { .. } => {
                Self { code: Some("context_length_exceeded"), ..Self::invalid("messages", message) }
            }
            Error::Core(
                core::Error::TokenOutOfRange { .. }
                | core::Error::EmptyPrompt
                | core::Error::InvalidSampling { .. },
            )
            | Error::InvalidOption { .. }
            | Error::ChatTemplate { .. }
            | Error::NoChatTemplate
            | Error::NoTokenizer { .. }
            | Error::Tokenizer { .. } => Self { param: None, ..Self::invalid("", message) },
            _ => Self::internal(message),
        }
    }
}

fn with_causes(error: &Error) -> String {
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(error) = cause {
        text.push_str(": ");
        text.push_str(&error.to_string());
        cause = error.source();
    }
    text
}
