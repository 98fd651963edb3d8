//! Typed access to the fields of a JSON object, with errors that name file and field.

use std::path::Path;

use serde_json::{Map, Value};

use crate::error::{Error, Result};

/// How much of a wrong value an error repeats.
const SHOWN_CHARS: usize = 60;

/// The fields of one object; nested ones carry the path to them.
pub(crate) struct Fields<'a> {
    path: &'a Path,
    prefix: String,
    map: &'a Map<String, Value>,
}

impl<'a> Fields<'a> {
    pub(crate) fn new(path: &'a Path, map: &'a Map<String, Value>) -> Self {
        Self { path, prefix: String::new(), map }
    }

    /// An object in a list, `name` being what errors call it.
    pub(crate) fn in_list(path: &'a Path, name: &str, map: &'a Map<String, Value>) -> Self {
        Self { path, prefix: format!("{name}."), map }
    }

    pub(crate) fn path(&self) -> &'a Path {
        self.path
    }

    /// A field that is there and not `null`.
    fn get(&self, name: &str) -> Option<&'a Value> {
        self.map.get(name).filter(|value| !value.is_null())
    }

    /// Whether the field is there, be it `null`.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.map.contains_key(name)
    }

    /// Whether `name` is there and nothing else is.
    pub(crate) fn has_only(&self, name: &str) -> bool {
        self.get(name).is_some() && self.map.len() == 1
    }

    /// Fails if there is a field of any other name.
    pub(crate) fn only_keys(&self, keys: &[&str]) -> Result<()> {
        match self.map.keys().find(|key| !keys.contains(&key.as_str())) {
            Some(unknown) => Err(self.error(unknown, format!("one of {}", keys.join(", ")))),
            None => Ok(()),
        }
    }

    /// A number of bytes, from 0.
    pub(crate) fn bytes(&self, name: &str) -> Result<u64> {
        let bytes = self.get(name).and_then(Value::as_u64);
        bytes.ok_or_else(|| self.error(name, "a whole number of bytes from 0"))
    }

    /// The error for a field whose value is not `expected`.
    pub(crate) fn error(&self, name: &str, expected: impl Into<String>) -> Error {
        Error::Config {
            path: self.path.to_owned(),
            field: format!("{}{name}", self.prefix),
            expected: expected.into(),
            found: self.map.get(name).map_or_else(|| "nothing".to_owned(), shown),
        }
    }

    /// Fails if the field is there.
    pub(crate) fn refuse(&self, name: &str, expected: &str) -> Result<()> {
        self.get(name).map_or(Ok(()), |_| Err(self.error(name, expected)))
    }

    /// A whole number from 1 to `max`.
    pub(crate) fn count(&self, name: &str, max: usize) -> Result<usize> {
        self.optional_count(name, max)?.ok_or_else(|| self.error(name, whole_number(max)))
    }

    pub(crate) fn optional_count(&self, name: &str, max: usize) -> Result<Option<usize>> {
        let Some(value) = self.get(name) else {
            return Ok(None);
        };
        let count = value.as_u64().and_then(|count| usize::try_from(count).ok());
        match count.filter(|count| (1..=max).contains(count)) {
            Some(count) => Ok(Some(count)),
            None => Err(self.error(name, whole_number(max))),
        }
    }

    /// A finite number above 0.
    pub(crate) fn positive(&self, name: &str) -> Result<f64> {
        self.optional_positive(name)?.ok_or_else(|| self.error(name, POSITIVE))
    }

    pub(crate) fn optional_positive(&self, name: &str) -> Result<Option<f64>> {
        let Some(value) = self.get(name) else {
            return Ok(None);
        };
        // it is computed with in f32
        let fits = |number: &f64| (*number as f32).is_finite() && *number as f32 > 0.0;
        match value.as_f64().filter(fits) {
            Some(number) => Ok(Some(number)),
            None => Err(self.error(name, POSITIVE)),
        }
    }

    /// True or false; false if absent.
    pub(crate) fn flag(&self, name: &str) -> Result<bool> {
        self.flag_or(name, false)
    }

    /// True or false; `default` if absent.
    pub(crate) fn flag_or(&self, name: &str, default: bool) -> Result<bool> {
        Ok(self.optional_flag(name)?.unwrap_or(default))
    }

    pub(crate) fn optional_flag(&self, name: &str) -> Result<Option<bool>> {
        let Some(value) = self.get(name) else {
            return Ok(None);
        };
        value.as_bool().map(Some).ok_or_else(|| self.error(name, "true or false"))
    }

    /// Fails if a flag is there and not `expected`.
    pub(crate) fn only(&self, name: &str, expected: bool, why: &str) -> Result<()> {
        match self.optional_flag(name)? {
            Some(found) if found != expected => {
                Err(self.error(name, format!("{expected} ({why})")))
            }
            _ => Ok(()),
        }
    }

    /// A whole number under any of its names; two that differ are an error. Gives the name, too.
    pub(crate) fn optional_count_of<'n>(
        &self,
        names: &[&'n str],
        max: usize,
    ) -> Result<Option<(&'n str, usize)>> {
        let mut found: Option<(&str, usize)> = None;
        for &name in names {
            match (self.optional_count(name, max)?, found) {
                (Some(count), None) => found = Some((name, count)),
                (Some(count), Some((first, other))) if count != other => {
                    return Err(self.error(name, format!("the same as {first}, {other}")));
                }
                _ => {}
            }
        }
        Ok(found)
    }

    /// A whole number that has to be there, under any of its names.
    pub(crate) fn count_of(&self, names: &[&str], max: usize) -> Result<usize> {
        let found = self.optional_count_of(names, max)?;
        found.map(|(_, count)| count).ok_or_else(|| self.error(names[0], whole_number(max)))
    }

    /// Any finite number.
    pub(crate) fn optional_number(&self, name: &str) -> Result<Option<f64>> {
        let Some(value) = self.get(name) else {
            return Ok(None);
        };
        let number = value.as_f64().filter(|number| number.is_finite());
        number.map(Some).ok_or_else(|| self.error(name, "a finite number"))
    }

    /// A finite number from 0.
    pub(crate) fn not_negative(&self, name: &str) -> Result<f64> {
        let value = self.get(name).and_then(Value::as_f64);
        let number = value.filter(|number| number.is_finite() && *number >= 0.0);
        number.ok_or_else(|| self.error(name, "a finite number from 0"))
    }

    pub(crate) fn text(&self, name: &str) -> Result<&'a str> {
        self.optional_text(name)?.ok_or_else(|| self.error(name, "a string"))
    }

    pub(crate) fn optional_text(&self, name: &str) -> Result<Option<&'a str>> {
        let Some(value) = self.get(name) else {
            return Ok(None);
        };
        value.as_str().map(Some).ok_or_else(|| self.error(name, "a string"))
    }

    /// A list of at most `max` strings.
    pub(crate) fn texts(&self, name: &str, max: usize) -> Result<Vec<String>> {
        let list = self.get(name).and_then(Value::as_array).filter(|list| list.len() <= max);
        let text = |value: &Value| value.as_str().map(str::to_owned);
        let texts = list.and_then(|list| list.iter().map(text).collect());
        texts.ok_or_else(|| self.error(name, format!("a list of at most {max} strings")))
    }

    /// A nested object.
    pub(crate) fn object(&self, name: &str) -> Result<Option<Fields<'a>>> {
        let Some(value) = self.get(name) else {
            return Ok(None);
        };
        let map = value.as_object().ok_or_else(|| self.error(name, "an object"))?;
        Ok(Some(Fields { path: self.path, prefix: format!("{}{name}.", self.prefix), map }))
    }

    /// A token id.
    pub(crate) fn token_id(&self, name: &str, vocab_size: usize) -> Result<Option<u32>> {
        let Some(value) = self.get(name) else {
            return Ok(None);
        };
        match token_id(value, vocab_size) {
            Some(id) => Ok(Some(id)),
            None => Err(self.error(name, format!("a token id below vocab_size, {vocab_size}"))),
        }
    }

    /// A token id or a list of them; none if absent.
    pub(crate) fn token_ids(&self, name: &str, vocab_size: usize) -> Result<Vec<u32>> {
        let values = match self.get(name) {
            None => return Ok(Vec::new()),
            Some(Value::Array(values)) => values.as_slice(),
            Some(value) => std::slice::from_ref(value),
        };
        let ids: Option<Vec<u32>> = values.iter().map(|id| token_id(id, vocab_size)).collect();
        ids.ok_or_else(|| {
            let expected = format!("a token id below vocab_size, {vocab_size}, or a list of them");
            self.error(name, expected)
        })
    }
}

const POSITIVE: &str = "a finite number above 0";

fn whole_number(max: usize) -> String {
    format!("a whole number from 1 to {max}")
}

fn token_id(value: &Value, vocab_size: usize) -> Option<u32> {
    let id = u32::try_from(value.as_u64()?).ok()?;
    ((id as usize) < vocab_size).then_some(id)
}

/// A value as an error shows it.
fn shown(value: &Value) -> String {
    match value {
        // their text can be as long as the file
        Value::Array(values) => format!("a list of {}", values.len()),
        Value::Object(map) => format!("an object of {} fields", map.len()),
        Value::String(text) => {
            let mut start: String = text.chars().take(SHOWN_CHARS).collect();
            if start.len() < text.len() {
                start.push('…');
            }
            format!("{start:?}")
        }
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn shown_in_error(value: Value) -> String {
        let map = Map::from_iter([("x".to_owned(), value)]);
        match Fields::new(Path::new("c"), &map).error("x", "another") {
            Error::Config { found, .. } => found,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn errors_show_the_value_but_never_much_of_it() {
        assert_eq!(shown_in_error(json!(-1)), "-1");
        assert_eq!(shown_in_error(json!(null)), "null");
        assert_eq!(shown_in_error(json!("gelu")), "\"gelu\"");
        assert_eq!(shown_in_error(json!([1, 2])), "a list of 2");
        assert!(shown_in_error(json!("ä".repeat(1 << 20))).len() < 200);
    }

    #[test]
    fn null_is_absent() {
        let map = Map::from_iter([("x".to_owned(), Value::Null)]);
        let fields = Fields::new(Path::new("c"), &map);
        assert_eq!(fields.optional_count("x", 9).unwrap(), None);
        assert!(fields.token_ids("x", 9).unwrap().is_empty());
        assert!(!fields.flag("x").unwrap());
        assert!(
            matches!(fields.count("x", 9), Err(Error::Config { found, .. }) if found == "null")
        );
    }

    #[test]
    fn nested_fields_are_named_with_their_path() {
        let map = Map::from_iter([("a".to_owned(), json!({ "b": { "c": 0 } }))]);
        let outer = Fields::new(Path::new("c"), &map).object("a").unwrap().unwrap();
        let inner = outer.object("b").unwrap().unwrap();
        assert!(
            matches!(inner.count("c", 9), Err(Error::Config { field, .. }) if field == "a.b.c")
        );
    }
}
