//! Chat templates of real model families render as transformers renders them.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::collections::BTreeMap;
use std::error::Error as _;

use powerinfer::{ChatMessage, ChatOptions, ChatTemplate, Error};
use serde::Deserialize;
use serde_json::Value;

#[derive(Debug, Deserialize)]
struct Case {
    name: String,
    template: String,
    tokens: BTreeMap<String, String>,
    messages: Vec<BTreeMap<String, Value>>,
    add_generation_prompt: bool,
    #[serde(default)]
    variables: BTreeMap<String, Value>,
    /// What the template must give …
    expected: Option<String>,
    /// … or part of what it must say when it refuses.
    error: Option<String>,
}

fn cases() -> Vec<Case> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/testing/fixtures/chat_templates.json");
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn message(fields: &BTreeMap<String, Value>) -> ChatMessage {
    let text = |name: &str| fields[name].as_str().unwrap();
    let more = fields.iter().filter(|(name, _)| *name != "role" && *name != "content");
    more.fold(ChatMessage::new(text("role"), text("content")), |message, (name, value)| {
        message.with_field(name, value)
    })
}

fn render(case: &Case) -> powerinfer::Result<String> {
    let template = ChatTemplate::new(&case.template)?;
    let template = case
        .tokens
        .iter()
        .fold(template, |template, (name, token)| template.with_token(name, token));
    let options = ChatOptions::default().with_add_generation_prompt(case.add_generation_prompt);
    let options = case
        .variables
        .iter()
        .fold(options, |options, (name, value)| options.with_variable(name, value));
    let messages: Vec<ChatMessage> = case.messages.iter().map(message).collect();
    template.render(&messages, &options)
}

#[test]
fn families_render_as_their_formats_say() {
    let cases = cases();
    assert!(cases.len() >= 20);
    for case in &cases {
        match (render(case), &case.expected, &case.error) {
            (Ok(found), Some(expected), None) => assert_eq!(&found, expected, "{}", case.name),
            (Err(error @ Error::ChatTemplate { .. }), None, Some(expected)) => {
                let cause = error.source().unwrap().to_string();
                assert!(cause.contains(expected), "{}: {cause}", case.name);
            }
            (found, ..) => panic!("{}: {found:?}", case.name),
        }
    }
}

#[test]
fn no_message_makes_a_template_panic() {
    let contents = ["", "{{ bos_token }}", "{% raw %}", "\u{0}", "🐋", "</s><s>[INST]"];
    for case in &cases() {
        let template = ChatTemplate::new(&case.template).unwrap();
        for role in ["system", "user", "assistant", "tool", ""] {
            for content in contents {
                let messages = vec![ChatMessage::new(role, content); 2];
                if let Ok(text) = template.render(&messages, &ChatOptions::default()) {
                    assert!(!text.contains("{{ bos_token }}") || content == "{{ bos_token }}");
                }
                let _ = template.render(&messages[..1], &ChatOptions::default());
            }
        }
        let _ = template.render(&[], &ChatOptions::default());
    }
}
