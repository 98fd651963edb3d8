//! Reading files in tests: what is missing or malformed is a panic that names file and field.

use std::fmt::Display;
use std::path::Path;

use serde_json::Value;

pub(crate) fn read<T, E: Display>(
    kind: &str,
    path: &Path,
    read: impl FnOnce(&Path) -> Result<T, E>,
) -> T {
    read(path).unwrap_or_else(|error| panic!("{kind} {}: {error}", path.display()))
}

pub(crate) fn read_json(path: &Path) -> Value {
    let text = read("file", path, |path| std::fs::read_to_string(path));
    read("JSON file", path, |_| serde_json::from_str(&text))
}

pub(crate) fn field<'a>(path: &Path, value: &'a Value, name: &str) -> &'a Value {
    value.get(name).unwrap_or_else(|| panic!("{}: no field {name}", path.display()))
}

pub(crate) fn array<'a>(path: &Path, value: &'a Value, name: &str) -> &'a [Value] {
    let list = field(path, value, name).as_array();
    list.unwrap_or_else(|| panic!("{}: {name} is not a list", path.display()))
}

pub(crate) fn number(path: &Path, value: &Value, name: &str) -> f64 {
    let number = field(path, value, name).as_f64();
    number.unwrap_or_else(|| panic!("{}: {name} is not a number", path.display()))
}

pub(crate) fn text(path: &Path, value: &Value, name: &str) -> String {
    let text = field(path, value, name).as_str();
    text.unwrap_or_else(|| panic!("{}: {name} is not a text", path.display())).to_owned()
}

pub(crate) fn ids(path: &Path, value: &Value, name: &str) -> Vec<u32> {
    array(path, value, name)
        .iter()
        .map(|id| id.as_u64().and_then(|id| u32::try_from(id).ok()))
        .map(|id| id.unwrap_or_else(|| panic!("{}: {name} holds no ids", path.display())))
        .collect()
}
