//! What templates expect of Python: functions and filters that transformers gives them.

use std::fmt::Write;

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Error, ErrorKind, State, Value};

/// Deeper JSON is taken for an attack; tool descriptions have some ten levels.
const MAX_DEPTH: usize = 64;

/// `raise_exception(message)`: the template refuses the messages.
pub(super) fn raise_exception(message: String) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, message))
}

/// `strftime_now(format)`: the time in UTC, for whose zone nobody asked the system.
pub(super) fn strftime_now(format: String) -> Result<String, Error> {
    let now = jiff::Timestamp::now().to_zoned(jiff::tz::TimeZone::UTC);
    jiff::fmt::strtime::format(&format, &now).map_err(|error| {
        Error::new(ErrorKind::InvalidOperation, "strftime_now failed").with_source(error)
    })
}

/// `x | tojson`, as `json.dumps` writes it for transformers: nothing escaped for HTML, a space after
/// `,` and `:`, and characters beyond ASCII as they are.
pub(super) fn tojson(state: &State, value: &Value, options: Kwargs) -> Result<String, Error> {
    let indent: Option<usize> = options.get("indent")?;
    let separators: Option<Vec<String>> = options.get("separators")?;
    let sort_keys: Option<bool> = options.get("sort_keys")?;
    let ensure_ascii: Option<bool> = options.get("ensure_ascii")?;
    options.assert_all_used()?;
    let item_end = if indent.is_some() { "," } else { ", " };
    let [item_end, key_end] = match separators.as_deref() {
        None => [item_end, ": "],
        Some([item, key]) => [item.as_str(), key.as_str()],
        Some(_) => return Err(invalid("separators are two texts")),
    };
    let mut json = Json {
        state,
        out: String::new(),
        indent: indent.map(|indent| indent.min(16)),
        item_end,
        key_end,
        sort_keys: sort_keys.unwrap_or(false),
        ensure_ascii: ensure_ascii.unwrap_or(false),
    };
    json.value(value, 0)?;
    Ok(json.out)
}

struct Json<'a> {
    state: &'a State<'a, 'a>,
    out: String,
    indent: Option<usize>,
    item_end: &'a str,
    key_end: &'a str,
    sort_keys: bool,
    ensure_ascii: bool,
}

impl Json<'_> {
    fn value(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        // a value may hold another many times over, so what is written is not bounded by memory
        self.state.consume_fuel(1 + value.as_str().map_or(0, str::len) as u64 / 64)?;
        if depth > MAX_DEPTH {
            return Err(invalid("tojson: too deeply nested"));
        }
        match value.kind() {
            ValueKind::None => self.out.push_str("null"),
            ValueKind::Bool => self.out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => self.out.push_str(&value.to_string()),
            ValueKind::String => self.text(value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Value> = value.try_iter()?.collect();
                self.items(['[', ']'], &items, depth, |json, item| json.value(item, depth + 1))?;
            }
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                if self.sort_keys {
                    keys.sort();
                }
                self.items(['{', '}'], &keys, depth, |json, key| {
                    json.text(&key.to_string());
                    json.out.push_str(json.key_end);
                    json.value(&value.get_item(key)?, depth + 1)
                })?;
            }
            _ => return Err(invalid("tojson: a value without a JSON form")),
        }
        Ok(())
    }

    fn items(
        &mut self,
        [open, close]: [char; 2],
        items: &[Value],
        depth: usize,
        mut write: impl FnMut(&mut Self, &Value) -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.out.push(open);
        for (index, item) in items.iter().enumerate() {
            if index > 0 {
                self.out.push_str(self.item_end);
            }
            self.line(depth + 1);
            write(self, item)?;
        }
        if !items.is_empty() {
            self.line(depth);
        }
        self.out.push(close);
        Ok(())
    }

    fn line(&mut self, depth: usize) {
        if let Some(indent) = self.indent {
            self.out.push('\n');
            self.out.extend(std::iter::repeat_n(' ', indent * depth));
        }
    }

    fn text(&mut self, text: &str) {
        self.out.push('"');
        for c in text.chars() {
            match c {
                '"' => self.out.push_str("\\\""),
                '\\' => self.out.push_str("\\\\"),
                '\n' => self.out.push_str("\\n"),
                '\r' => self.out.push_str("\\r"),
                '\t' => self.out.push_str("\\t"),
                '\u{8}' => self.out.push_str("\\b"),
                '\u{c}' => self.out.push_str("\\f"),
                c if c < ' ' || (self.ensure_ascii && !c.is_ascii()) => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        let _ = write!(self.out, "\\u{unit:04x}");
                    }
                }
                c => self.out.push(c),
            }
        }
        self.out.push('"');
    }
}

fn invalid(what: &'static str) -> Error {
    Error::new(ErrorKind::InvalidOperation, what)
}

#[cfg(test)]
mod tests {
    use minijinja::Environment;

    use super::*;

    fn eval(expression: &str) -> String {
        let mut environment = Environment::new();
        environment.set_fuel(Some(10_000));
        environment.add_filter("tojson", tojson);
        environment.add_function("strftime_now", strftime_now);
        environment.render_str(&format!("{{{{ {expression} }}}}"), ()).unwrap()
    }

    // expected strings: json.dumps of Python 3.11 with ensure_ascii=False
    #[test]
    fn json_is_python_s() {
        let value = "{'b': [1, 2.5, true, none], 'a': {'<&>': 'é\"\\n'}, 'e': [], 'f': {}}";
        assert_eq!(
            eval(&format!("{value} | tojson")),
            r#"{"b": [1, 2.5, true, null], "a": {"<&>": "é\"\n"}, "e": [], "f": {}}"#
        );
        assert_eq!(
            eval(&format!("{value} | tojson(indent=2)")),
            "{\n  \"b\": [\n    1,\n    2.5,\n    true,\n    null\n  ],\n  \"a\": {\n    \"<&>\": \"é\\\"\\n\"\n  },\n  \"e\": [],\n  \"f\": {}\n}"
        );
        assert_eq!(
            eval(&format!("{value} | tojson(separators=[',', ':'], sort_keys=true)")),
            r#"{"a":{"<&>":"é\"\n"},"b":[1,2.5,true,null],"e":[],"f":{}}"#
        );
        assert_eq!(eval("'🐋é' | tojson(ensure_ascii=true)"), r#""\ud83d\udc0b\u00e9""#);
    }

    #[test]
    fn the_date_is_today_s() {
        let date = eval("strftime_now('%Y-%m-%d')");
        assert_eq!(date.len(), 10);
        assert!(date.starts_with("20"), "{date}");
        assert_eq!(eval("strftime_now('%d %b %Y')").split(' ').count(), 3);
    }
}
