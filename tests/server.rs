//! The server example over its socket: what clients get, together and when they go away.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

#[path = "support/example.rs"]
mod example;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use powerinfer::{ChatMessage, Engine, GenerateOptions, Sampling};
use serde_json::{Value, json};
use testing::Fixture;

const PROMPT: &str = "It was a truth";

/// A server that ends with the test.
struct Server {
    child: Child,
    address: String,
}

impl Server {
    fn start(flags: &[&str]) -> Self {
        let mut child = example::example("server")
            .args(["--port", "0", "--threads", "2"])
            .args(flags)
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stderr.as_mut().unwrap()).read_line(&mut line).unwrap();
        let address = line.trim().strip_prefix("listening on http://").unwrap().to_owned();
        Self { child, address }
    }

    fn send(&self, method: &str, path: &str, body: &str) -> TcpStream {
        let mut socket = TcpStream::connect(&self.address).unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
        let head = format!(
            "{method} {path} HTTP/1.1\r\nhost: test\r\nconnection: close\r\n\
             content-length: {}\r\n\r\n",
            body.len()
        );
        socket.write_all(head.as_bytes()).unwrap();
        // a body that is too long is not read to its end
        let _ = socket.write_all(body.as_bytes());
        socket
    }

    /// Status and body of an answer.
    fn ask(&self, method: &str, path: &str, body: &str) -> (u16, String) {
        let mut answer = String::new();
        let _ = self.send(method, path, body).read_to_string(&mut answer);
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        let chunked = head.to_ascii_lowercase().contains("transfer-encoding: chunked");
        (status, if chunked { without_chunk_sizes(body) } else { body.to_owned() })
    }

    fn post(&self, path: &str, body: &Value) -> Value {
        let (status, answer) = self.ask("POST", path, &body.to_string());
        assert_eq!(status, 200, "{answer}");
        serde_json::from_str(&answer).unwrap()
    }

    /// The chunks of a streamed answer, of which the last said that it was the last.
    fn stream(&self, path: &str, mut body: Value) -> Vec<Value> {
        body["stream"] = true.into();
        let (status, answer) = self.ask("POST", path, &body.to_string());
        assert_eq!(status, 200, "{answer}");
        let mut data: Vec<&str> =
            answer.lines().filter_map(|line| line.strip_prefix("data: ")).collect();
        assert_eq!(data.pop(), Some("[DONE]"));
        data.iter().map(|data| serde_json::from_str(data).unwrap()).collect()
    }

    fn health(&self) -> Value {
        serde_json::from_str(&self.ask("GET", "/health", "").1).unwrap()
    }

    fn resident_bytes(&self) -> u64 {
        let path = format!("/proc/{}/status", self.child.id());
        let status = std::fs::read_to_string(path).unwrap_or_default();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let kib = line.and_then(|line| line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok());
        kib.unwrap_or(0) * 1024
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn without_chunk_sizes(body: &str) -> String {
    let (mut rest, mut text) = (body, String::new());
    while let Some((size, after)) = rest.split_once("\r\n") {
        let size = usize::from_str_radix(size.trim(), 16).unwrap();
        text.push_str(&after[..size]);
        rest = after[size..].trim_start_matches("\r\n");
    }
    text
}

fn demo() -> Engine {
    Engine::builder().model(Fixture::demo().model_dir).threads(2).build().unwrap()
}

fn greedy(prompt: &str, n: usize) -> Value {
    json!({"prompt": prompt, "max_tokens": n, "temperature": 0})
}

#[test]
fn a_completion_is_the_engine_s_text_whole_and_streamed() {
    let (server, engine) = (Server::start(&[]), demo());
    let options = GenerateOptions::default().with_max_tokens(12);
    let expected = engine.session().unwrap().generate_text(PROMPT, &options).unwrap();

    let answer = server.post("/v1/completions", &greedy(PROMPT, 12));
    assert_eq!(answer["object"], "text_completion");
    assert_eq!(answer["choices"][0]["text"], expected.text);
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
    let usage = &answer["usage"];
    assert_eq!((&usage["prompt_tokens"], &usage["completion_tokens"]), (&5.into(), &12.into()));
    assert_eq!(usage["total_tokens"], 17);

    let mut body = greedy(PROMPT, 12);
    body["stream_options"] = json!({"include_usage": true});
    let chunks = server.stream("/v1/completions", body);
    let text: String =
        chunks.iter().filter_map(|chunk| chunk["choices"][0]["text"].as_str()).collect();
    assert_eq!(text, expected.text);
    let last = chunks.last().unwrap();
    assert_eq!(last["usage"]["completion_tokens"], 12);
    assert_eq!(last["usage"]["prompt_tokens_details"]["cached_tokens"], 4);
    assert_eq!(chunks[chunks.len() - 2]["choices"][0]["finish_reason"], "length");

    let mut body = greedy(PROMPT, 12);
    body["stop"] = json!(["e, th", "never"]);
    let stopped = server.post("/v1/completions", &body);
    assert_eq!(stopped["choices"][0]["text"], " to b");
    assert_eq!(stopped["choices"][0]["finish_reason"], "stop");
    body["prompt"] = json!(expected.prompt_ids);
    assert_eq!(server.post("/v1/completions", &body)["choices"][0]["text"], " to b");
}

#[test]
fn a_chat_is_the_engine_s_answer_and_a_second_turn_runs_its_own_tokens() {
    let (server, engine) = (Server::start(&[]), demo());
    let mut messages = vec![json!({"role": "user", "content": PROMPT})];
    let mut own = vec![ChatMessage::user(PROMPT)];
    let mut session = engine.session().unwrap();
    let options = GenerateOptions::default().with_max_tokens(10);
    for turn in 0..2 {
        let expected = session.chat(&own, &options).unwrap().finish().unwrap();
        let body = json!({"messages": messages, "max_completion_tokens": 10, "temperature": 0});
        let chunks = server.stream("/v1/chat/completions", body.clone());
        assert_eq!(chunks[0]["choices"][0]["delta"]["role"], "assistant");
        let text: String = chunks
            .iter()
            .filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str())
            .collect();
        assert_eq!(text, expected.text);
        let whole = server.post("/v1/chat/completions", &body);
        assert_eq!(whole["choices"][0]["message"]["content"], expected.text);
        let cached = whole["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
        let prompt_tokens = whole["usage"]["prompt_tokens"].as_u64().unwrap();
        assert_eq!(cached, prompt_tokens - 1, "turn {turn}");
        messages.push(json!({"role": "assistant", "content": text}));
        messages.push(json!({"role": "user", "content": [{"type": "text", "text": "And then?"}]}));
        own.extend([ChatMessage::assistant(text), ChatMessage::user("And then?")]);
    }
}

#[test]
fn log_probabilities_come_in_both_forms() {
    let server = Server::start(&[]);
    let mut body = greedy(PROMPT, 4);
    body["logprobs"] = 2.into();
    let choice = server.post("/v1/completions", &body)["choices"][0].clone();
    let logprobs = &choice["logprobs"];
    let tokens: String = logprobs["tokens"]
        .as_array()
        .unwrap()
        .iter()
        .map(|token| token.as_str().unwrap())
        .collect();
    assert_eq!(tokens, choice["text"].as_str().unwrap());
    assert!(logprobs["token_logprobs"][0].as_f64().unwrap() < 0.0);
    assert_eq!(logprobs["top_logprobs"][3].as_object().unwrap().len(), 2);
    assert_eq!(logprobs["text_offset"][1], 3);

    let messages = json!([{"role": "user", "content": PROMPT}]);
    let body = json!({"messages": messages, "max_tokens": 3, "temperature": 0, "logprobs": true,
                      "top_logprobs": 5});
    let answer = server.post("/v1/chat/completions", &body);
    let content = answer["choices"][0]["logprobs"]["content"].as_array().unwrap();
    assert_eq!((content.len(), content[0]["top_logprobs"].as_array().unwrap().len()), (3, 5));
    assert_eq!(content[0]["top_logprobs"][0]["logprob"], content[0]["logprob"]);
}

#[test]
fn errors_are_json_with_the_right_status() {
    let server = Server::start(&["--max-body", "64KiB"]);
    let long = format!(r#"{{"prompt": "{}"}}"#, "a b ".repeat(2000));
    let longer = format!(r#"{{"prompt": "{}"}}"#, "a".repeat(100_000));
    let cases = [
        ("POST", "/v1/completions", "{", 400, "invalid_value"),
        ("POST", "/v1/completions", r#"{"prompt": 5}"#, 400, "invalid_value"),
        ("POST", "/v1/completions", r#"{"prompt": ["a", "b"]}"#, 400, "invalid_value"),
        ("POST", "/v1/completions", r#"{"prompt": "a", "n": 2}"#, 400, "unsupported_parameter"),
        ("POST", "/v1/completions", r#"{"prompt": "a", "temperature": -1}"#, 400, "invalid_value"),
        ("POST", "/v1/completions", r#"{"prompt": "a", "logprobs": 21}"#, 400, "invalid_value"),
        ("POST", "/v1/completions", r#"{"prompt": "a", "stop": ""}"#, 400, "invalid_value"),
        ("POST", "/v1/completions", r#"{"prompt": "a", "model": "b"}"#, 404, "model_not_found"),
        ("POST", "/v1/completions", &long, 400, "context_length_exceeded"),
        ("POST", "/v1/completions", &longer, 413, "body"),
        ("POST", "/v1/chat/completions", r#"{"messages": []}"#, 400, "invalid_value"),
        (
            "POST",
            "/v1/chat/completions",
            r#"{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}"#,
            400,
            "invalid_value",
        ),
        ("GET", "/v1/completions", "", 405, "not_found"),
        ("GET", "/v1/models/other", "", 404, "model_not_found"),
        ("GET", "/nowhere", "", 404, "not_found"),
    ];
    for (method, path, body, status, code) in cases {
        let (found, answer) = server.ask(method, path, body);
        let answer: Value = serde_json::from_str(&answer).unwrap();
        let error = &answer["error"];
        assert_eq!((found, error["code"].as_str()), (status, Some(code)), "{body}: {answer}");
        assert!(!error["message"].as_str().unwrap().is_empty());
    }
    let models = server.ask("GET", "/v1/models", "").1;
    let models: Value = serde_json::from_str(&models).unwrap();
    assert_eq!(models["data"][0]["id"], "llama-relu-tiny");
    assert_eq!(server.health()["running"], 0);
}

#[test]
fn thirty_two_clients_at_once_get_what_each_would_get_alone() {
    let (server, engine) = (Server::start(&["--parallel", "8"]), demo());
    let beginnings = [PROMPT, "The captain stood", "And God said", "naïve 日本"];
    std::thread::scope(|scope| {
        let clients: Vec<_> = (0..32u64)
            .map(|client| {
                let prompt = format!("{} {}", beginnings[client as usize % 4], client / 8);
                let (server, engine) = (&server, engine.clone());
                scope.spawn(move || {
                    let sampling = Sampling::default().with_temperature(0.9).with_seed(client);
                    let options =
                        GenerateOptions::default().with_max_tokens(24).with_sampling(sampling);
                    let mut body = greedy(&prompt, 24);
                    body["temperature"] = json!(0.9);
                    body["seed"] = client.into();
                    let chunks = server.stream("/v1/completions", body);
                    let texts =
                        chunks.iter().filter_map(|chunk| chunk["choices"][0]["text"].as_str());
                    let expected = engine.session().unwrap().generate_text(prompt, &options);
                    assert_eq!(
                        texts.collect::<String>(),
                        expected.unwrap().text,
                        "client {client}"
                    );
                })
            })
            .collect();
        for client in clients {
            client.join().unwrap();
        }
    });
    let health = server.health();
    assert_eq!((&health["running"], &health["finished"]), (&0.into(), &32.into()));
}

#[test]
fn fifty_clients_that_go_away_leave_no_work_and_no_memory() {
    let server = Server::start(&["--parallel", "4"]);
    let reference = server.post("/v1/completions", &greedy(PROMPT, 16));
    let mut body = greedy(PROMPT, 480);
    body["ignore_eos"] = true.into();
    // sessions of all seats have grown once
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| server.post("/v1/completions", &body));
        }
    });
    let finished = server.health()["finished"].as_u64().unwrap();
    let before = server.resident_bytes();

    for client in 0..50 {
        // half of them wait for a whole answer; some are gone before they are served
        body["stream"] = (client % 2 == 0).into();
        let mut socket = server.send("POST", "/v1/completions", &body.to_string());
        if client % 4 == 0 {
            socket.read_exact(&mut [0; 100]).unwrap();
        }
    }
    let began = Instant::now();
    let idle = loop {
        let health = server.health();
        if (&health["running"], &health["waiting"]) == (&0.into(), &0.into()) {
            break health;
        }
        assert!(began.elapsed() < Duration::from_secs(60), "still at work: {health}");
        std::thread::sleep(Duration::from_millis(5));
    };
    assert_eq!(idle["finished"], finished, "nobody was there to finish for");
    let grown = server.resident_bytes().saturating_sub(before);
    assert!(grown < 24 << 20, "{grown} bytes more than before");

    let again = server.post("/v1/completions", &greedy(PROMPT, 16));
    assert_eq!(again["choices"], reference["choices"]);
}
