//! JSON that nobody vouches for: a key that comes twice is an error at any depth, because two
//! readers that pick different ones see different models.

use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;
use std::path::Path;

use serde::Deserialize;
use serde::de::{DeserializeOwned, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};

use crate::error::{Error, Result};

/// Parses `bytes`; `path` is for the error. Nesting beyond 128 levels is an error, too.
///
/// # Errors
/// [`Error::Json`].
pub(crate) fn parse<T: DeserializeOwned>(path: &Path, bytes: &[u8]) -> Result<T> {
    serde_json::from_slice(bytes).map_err(|source| Error::Json { path: path.to_owned(), source })
}

/// Parses a JSON object in which no key comes twice, however deep.
///
/// # Errors
/// [`Error::Json`].
pub(crate) fn parse_object(path: &Path, bytes: &[u8]) -> Result<Map<String, Value>> {
    match parse(path, bytes)? {
        UniqueValue(Value::Object(map)) => Ok(map),
        UniqueValue(other) => {
            let source =
                serde_json::Error::custom(format_args!("{}, expected an object", kind(&other)));
            Err(Error::Json { path: path.to_owned(), source })
        }
    }
}

/// The error for a key that comes twice in one object.
pub(crate) fn duplicate_key<E: serde::de::Error>(key: &str) -> E {
    E::custom(format_args!("key `{key}` comes twice"))
}

/// A JSON object as a sorted map.
#[derive(Debug)]
pub(crate) struct UniqueMap<V>(pub(crate) BTreeMap<String, V>);

impl<'de, V: Deserialize<'de>> Deserialize<'de> for UniqueMap<V> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct MapVisitor<V>(PhantomData<V>);

        impl<'de, V: Deserialize<'de>> Visitor<'de> for MapVisitor<V> {
            type Value = UniqueMap<V>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(
                self,
                mut access: A,
            ) -> std::result::Result<UniqueMap<V>, A::Error> {
                let mut map = BTreeMap::new();
                while let Some(key) = access.next_key::<String>()? {
                    if map.contains_key(&key) {
                        return Err(duplicate_key(&key));
                    }
                    let value = access.next_value()?;
                    map.insert(key, value);
                }
                Ok(UniqueMap(map))
            }
        }

        deserializer.deserialize_map(MapVisitor(PhantomData))
    }
}

/// Any JSON, checked for keys that come twice.
struct UniqueValue(Value);

impl<'de> Deserialize<'de> for UniqueValue {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        deserializer.deserialize_any(ValueVisitor)
    }
}

struct ValueVisitor;

impl<'de> Visitor<'de> for ValueVisitor {
    type Value = UniqueValue;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any JSON value")
    }

    fn visit_unit<E>(self) -> std::result::Result<UniqueValue, E> {
        Ok(UniqueValue(Value::Null))
    }

    fn visit_bool<E>(self, value: bool) -> std::result::Result<UniqueValue, E> {
        Ok(UniqueValue(value.into()))
    }

    fn visit_u64<E>(self, value: u64) -> std::result::Result<UniqueValue, E> {
        Ok(UniqueValue(value.into()))
    }

    fn visit_i64<E>(self, value: i64) -> std::result::Result<UniqueValue, E> {
        Ok(UniqueValue(value.into()))
    }

    fn visit_f64<E>(self, value: f64) -> std::result::Result<UniqueValue, E> {
        Ok(UniqueValue(value.into()))
    }

    fn visit_str<E>(self, value: &str) -> std::result::Result<UniqueValue, E> {
        Ok(UniqueValue(value.into()))
    }

    fn visit_seq<A: SeqAccess<'de>>(
        self,
        mut access: A,
    ) -> std::result::Result<UniqueValue, A::Error> {
        let mut values = Vec::new();
        while let Some(UniqueValue(value)) = access.next_element()? {
            values.push(value);
        }
        Ok(UniqueValue(Value::Array(values)))
    }

    fn visit_map<A: MapAccess<'de>>(
        self,
        mut access: A,
    ) -> std::result::Result<UniqueValue, A::Error> {
        let mut map = Map::new();
        while let Some(key) = access.next_key::<String>()? {
            if map.contains_key(&key) {
                return Err(duplicate_key(&key));
            }
            let UniqueValue(value) = access.next_value()?;
            map.insert(key, value);
        }
        Ok(UniqueValue(Value::Object(map)))
    }
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(text: &str) -> String {
        match parse_object(Path::new("x.json"), text.as_bytes()) {
            Err(Error::Json { path, source }) if path == Path::new("x.json") => source.to_string(),
            other => panic!("{text}: {other:?}"),
        }
    }

    #[test]
    fn what_is_read_is_what_serde_json_reads() {
        let text = r#"{"a": [1, -2, 3.5, "x", null, true, {}], "b": {"c": {"d": 1e300}}}"#;
        let map = parse_object(Path::new("x.json"), text.as_bytes()).unwrap();
        assert_eq!(Value::Object(map), serde_json::from_str::<Value>(text).unwrap());
    }

    #[test]
    fn a_key_that_comes_twice_is_named_at_any_depth() {
        assert!(message(r#"{"a": 1, "a": 1}"#).contains("key `a` comes twice at line 1"));
        assert!(message(r#"{"x": [{"y": {"b": 1, "b": 2}}]}"#).contains("key `b` comes twice"));
        // the same key by another spelling
        assert!(message(r#"{"a": 1, "\u0061": 1}"#).contains("key `a` comes twice"));
        assert!(parse::<UniqueMap<u8>>(Path::new("x"), br#"{"a": 1, "b": 2, "a": 3}"#).is_err());
    }

    #[test]
    fn what_is_not_an_object_is_an_error() {
        assert_eq!(message("[1]"), "a list, expected an object");
        for text in ["", "{", "{}x", "{\"a\": NaN}", "{\"a\": 1e999}", "{'a': 1}", "\u{feff}{}"] {
            assert!(!message(text).is_empty(), "{text}");
        }
    }

    #[test]
    fn deep_nesting_is_an_error_and_not_a_stack_overflow() {
        let text = format!("{{\"a\": {}", "[".repeat(100_000));
        assert!(message(&text).contains("recursion limit"));
    }
}
