//! Messages to a prompt, by the template that a chat model comes with.

mod files;
mod gguf;
mod python;

use std::collections::BTreeMap;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use minijinja::{Environment, Error as TemplateError, Value};
use minijinja_contrib::pycompat::unknown_method_callback;
use serde::Serialize;

use crate::error::{Error, Result};

/// Steps that a template may take over nothing; each message and its bytes add to it. A template
/// is a program out of a model's files: it gets to end, and gets no memory beyond 64 bytes a step.
const BASE_FUEL: u64 = 50_000;
const FUEL_PER_MESSAGE: u64 = 2_000;
/// Macros and includes inside each other; real templates use two or three.
const MAX_RECURSION: usize = 50;

/// One message of a conversation.
///
/// # Examples
/// ```
/// use powerinfer::ChatMessage;
///
/// let message = ChatMessage::user("Where is the whale?");
/// assert_eq!((message.role.as_str(), message.content.as_str()), ("user", "Where is the whale?"));
/// ```
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct ChatMessage {
    /// Who speaks: `system`, `user`, `assistant`, or what else the template knows.
    pub role: String,
    /// What is said.
    pub content: String,
    /// More that a template may read.
    fields: BTreeMap<String, Value>,
}

impl ChatMessage {
    /// A message of `role`.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self { role: role.into(), content: content.into(), fields: BTreeMap::new() }
    }

    /// Instructions.
    pub fn system(content: impl Into<String>) -> Self {
        Self::new("system", content)
    }

    /// What the user says.
    pub fn user(content: impl Into<String>) -> Self {
        Self::new("user", content)
    }

    /// What the model said.
    pub fn assistant(content: impl Into<String>) -> Self {
        Self::new("assistant", content)
    }

    /// Adds what else a template may read from a message, such as `tool_calls`.
    #[must_use]
    pub fn with_field(mut self, name: impl Into<String>, value: impl Serialize) -> Self {
        self.fields.insert(name.into(), Value::from(Serde(value)));
        self
    }

    fn to_value(&self) -> Value {
        let own = [("role", Value::from(&self.role)), ("content", Value::from(&self.content))];
        let own = own.into_iter().map(|(name, value)| (name.to_owned(), value));
        let more = self.fields.iter().map(|(name, value)| (name.clone(), value.clone()));
        Value::from_pairs(own.chain(more))
    }
}

/// What a template is told beside the messages.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct ChatOptions {
    /// Whether the prompt ends with what introduces an answer. Default true.
    pub add_generation_prompt: bool,
    variables: BTreeMap<String, Value>,
}

impl Default for ChatOptions {
    fn default() -> Self {
        Self { add_generation_prompt: true, variables: BTreeMap::new() }
    }
}

impl ChatOptions {
    /// Sets [`add_generation_prompt`](Self::add_generation_prompt).
    #[must_use]
    pub fn with_add_generation_prompt(mut self, add: bool) -> Self {
        self.add_generation_prompt = add;
        self
    }

    /// Tells the template which tools there are, a list of JSON-like objects.
    #[must_use]
    pub fn with_tools(self, tools: impl Serialize) -> Self {
        self.with_variable("tools", tools)
    }

    /// Sets any variable that a template may read, such as `enable_thinking` or `date_string`.
    #[must_use]
    pub fn with_variable(mut self, name: impl Into<String>, value: impl Serialize) -> Self {
        self.variables.insert(name.into(), Value::from(Serde(value)));
        self
    }
}

/// A chat template: the Jinja program that a chat model's files bring to write its prompts.
///
/// It renders as Hugging Face's transformers renders it: blocks trimmed, Python's methods of
/// strings, lists and dicts, `raise_exception`, `strftime_now` (in UTC), `tojson`, loop controls,
/// the tokenizer's special tokens as `bos_token`, `eos_token` and so on, `tools` and `documents`
/// none unless given. It reads no file and runs no code, and its steps are limited.
///
/// # Examples
/// ```
/// use powerinfer::{ChatMessage, ChatOptions, ChatTemplate};
///
/// let template = ChatTemplate::new(
///     "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m['content'].strip() }}\n{% endfor %}",
/// )?
/// .with_token("bos_token", "<s>");
/// let messages = [ChatMessage::system("Be brief."), ChatMessage::user(" Hello ")];
/// let prompt = template.render(&messages, &ChatOptions::default())?;
/// assert_eq!(prompt, "<s>[system] Be brief.\n[user] Hello\n");
///
/// let error = ChatTemplate::new("{% for m in messages %}").unwrap_err();
/// assert_eq!(error.to_string(), "chat template: the chat template failed");
/// # Ok::<(), powerinfer::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChatTemplate {
    text: String,
    /// For conversations with tools, where the model has another one for them.
    tool_text: Option<String>,
    /// Where it came from, for errors.
    origin: String,
    tokens: BTreeMap<String, String>,
}

impl ChatTemplate {
    /// A template of this text, without special tokens.
    ///
    /// # Errors
    /// [`Error::ChatTemplate`] if it cannot be parsed.
    pub fn new(text: impl Into<String>) -> Result<Self> {
        let template = Self::unchecked(text.into(), "chat template".to_owned());
        template.environment(&template.text, 0).map_err(|error| template.failed(error))?;
        Ok(template)
    }

    fn unchecked(text: String, origin: String) -> Self {
        Self { text, tool_text: None, origin, tokens: BTreeMap::new() }
    }

    /// Sets a special token that the template may write, such as `bos_token`.
    #[must_use]
    pub fn with_token(mut self, name: impl Into<String>, token: impl Into<String>) -> Self {
        self.tokens.insert(name.into(), token.into());
        self
    }

    /// A special token as it is written, by its name: `bos_token`, `eos_token`.
    #[must_use]
    pub fn token(&self, name: &str) -> Option<&str> {
        self.tokens.get(name).map(String::as_str)
    }

    /// The text of the template.
    #[must_use]
    pub fn text(&self) -> &str {
        &self.text
    }

    /// The prompt that `messages` make.
    ///
    /// Special tokens that a message spells out become those tokens, as in transformers: whoever
    /// takes messages from strangers must look for them.
    ///
    /// # Errors
    /// [`Error::ChatTemplate`] if the template cannot be parsed, fails, calls `raise_exception` or
    /// does not end within the steps that it gets.
    pub fn render(&self, messages: &[ChatMessage], options: &ChatOptions) -> Result<String> {
        let has_tools = options.variables.get("tools").is_some_and(|tools| !tools.is_none());
        let text = self.tool_text.as_deref().filter(|_| has_tools).unwrap_or(&self.text);
        let bytes: usize = messages.iter().map(|message| message.content.len()).sum();
        let fuel = FUEL_PER_MESSAGE.saturating_mul(messages.len() as u64);
        let fuel = BASE_FUEL.saturating_add(fuel).saturating_add(bytes as u64);

        let mut context: BTreeMap<String, Value> = BTreeMap::new();
        for absent in ["tools", "documents"] {
            context.insert(absent.to_owned(), Value::from(()));
        }
        context.extend(self.tokens.iter().map(|(name, token)| (name.clone(), token.into())));
        context.extend(options.variables.iter().map(|(name, value)| (name.clone(), value.clone())));
        context.insert("add_generation_prompt".to_owned(), options.add_generation_prompt.into());
        let messages: Vec<Value> = messages.iter().map(ChatMessage::to_value).collect();
        context.insert("messages".to_owned(), messages.into());

        let rendered = self
            .environment(text, fuel)
            .and_then(|environment| environment.get_template("chat")?.render(context));
        rendered.map_err(|error| self.failed(error))
    }

    /// The template in the surroundings that transformers gives one.
    fn environment(
        &self,
        text: &str,
        fuel: u64,
    ) -> std::result::Result<Environment<'static>, TemplateError> {
        let mut environment = Environment::new();
        environment
            .set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
        environment.set_fuel(Some(fuel));
        environment.set_recursion_limit(MAX_RECURSION);
        environment.set_unknown_method_callback(unknown_method_callback);
        environment.add_filter("tojson", python::tojson);
        environment.add_function("raise_exception", python::raise_exception);
        environment.add_function("strftime_now", python::strftime_now);
        environment.add_template_owned("chat", without_generation_tags(text))?;
        Ok(environment)
    }

    fn failed(&self, error: TemplateError) -> Error {
        Error::ChatTemplate { origin: self.origin.clone(), source: Box::new(error) }
    }
}

/// `{% generation %}` marks what a model is trained on and writes nothing; a condition that always
/// holds keeps its effect on white space.
fn without_generation_tags(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(start) = rest.find("{%") {
        let (before, tag) = rest.split_at(start);
        out.push_str(before);
        let end = tag.find("%}").map_or(tag.len(), |end| end + 2);
        let (tag, after) = tag.split_at(end);
        let name = tag.trim_start_matches(['{', '%', '-', '+']);
        let name = name.trim_end_matches(['}', '%', '-', '+']).trim();
        match name {
            "generation" => out.push_str(&tag.replacen("generation", "if true", 1)),
            "endgeneration" => out.push_str(&tag.replacen("endgeneration", "endif", 1)),
            _ => out.push_str(tag),
        }
        rest = after;
    }
    out + rest
}

#[cfg(test)]
mod tests {
    use std::error::Error as _;

    use super::*;

    fn render(template: &str) -> Result<String> {
        let template = ChatTemplate::new(template)?;
        template.render(&[ChatMessage::user("hi")], &ChatOptions::default())
    }

    fn cause(template: &str) -> String {
        let error = render(template).unwrap_err();
        assert!(matches!(error, Error::ChatTemplate { .. }));
        error.source().unwrap().to_string()
    }

    #[test]
    fn blocks_are_trimmed_as_transformers_trims_them() {
        let text = "{% for m in messages %}\n  {% if m.role == 'user' %}\nU:{{ m.content }}\n  {% endif %}\n{% endfor %}\nend\n";
        assert_eq!(render(text).unwrap(), "U:hi\nend");
    }

    #[test]
    fn generation_marks_write_nothing() {
        let text =
            "a{% generation %}b{% endgeneration %}\n{%- generation -%} c {%- endgeneration %}";
        assert_eq!(render(text).unwrap(), "abc");
        assert_eq!(without_generation_tags("a {% b"), "a {% b");
        assert_eq!(without_generation_tags("{{ x }} {# {% #}"), "{{ x }} {# {% #}");
    }

    #[test]
    fn what_is_broken_or_refused_is_a_typed_error() {
        assert!(cause("{% if %}").contains("syntax error"));
        assert!(
            cause("{{ raise_exception('roles must alternate') }}").contains("roles must alternate")
        );
        assert!(cause("{{ no_such_function() }}").contains("no_such_function"));
        assert!(cause("{{ messages[0].content.no_such_method() }}").contains("no_such_method"));
        assert!(
            cause("{% include 'chat' %}").contains("include"),
            "{}",
            cause("{% include 'chat' %}")
        );
    }

    #[test]
    fn templates_that_would_not_end_or_take_all_memory_run_out_of_fuel() {
        let loops = "{% for a in range(1000) %}{% for b in range(1000) %}{% for c in range(1000) %}x{% endfor %}{% endfor %}{% endfor %}";
        let doubling = "{% set ns = namespace(x='aaaaaaaa') %}{% for a in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}";
        let nested = "{% set ns = namespace(x=[]) %}{% for a in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x | tojson }}";
        for text in [loops, doubling, nested] {
            let cause = cause(text);
            assert!(cause.contains("fuel") || cause.contains("nested"), "{cause}");
        }
        assert!(cause("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}").contains("recursion"));
        let _ = render(
            "{% set ns = namespace(x=[]) %}{% for a in range(9999) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x }}",
        );
    }

    #[test]
    fn a_long_conversation_has_fuel_enough() {
        let text = "{% for m in messages %}{% if m['role'] not in ['user', 'assistant'] %}{{ raise_exception('no') }}{% endif %}{{ '<|' + m['role'] + '|>\n' + m['content'] | trim + '\n' }}{% endfor %}";
        let template = ChatTemplate::new(text).unwrap();
        let messages = vec![ChatMessage::user("x".repeat(1000)); 2000];
        let prompt = template.render(&messages, &ChatOptions::default()).unwrap();
        assert_eq!(prompt.len(), 2000 * (9 + 1000 + 1));
    }
}
