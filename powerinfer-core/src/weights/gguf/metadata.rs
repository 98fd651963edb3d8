//! Typed access to the keys of a GGUF file, with errors that name file and key.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::value::{GgufArray, GgufElement, GgufValue};
use crate::error::{Error, Result};

/// The keys of a GGUF file.
///
/// A key that is there with a value of another type is always an error, for `optional_…`, too;
/// whole numbers are taken from any integer type that holds them, since writers do not agree on
/// one.
///
/// # Examples
/// ```
/// use powerinfer_core::{GgufMetadata, GgufValue};
/// let keys = [
///     ("llama.block_count".to_owned(), GgufValue::U32(22)),
///     ("tokenizer.ggml.tokens".to_owned(), GgufValue::strings(["<s>", "a"])),
/// ];
/// let metadata = GgufMetadata::new("m.gguf", keys);
/// assert_eq!(metadata.u32("llama.block_count")?, 22);
/// assert_eq!(metadata.strings("tokenizer.ggml.tokens")?, ["<s>", "a"]);
/// assert_eq!(metadata.optional_bool("tokenizer.ggml.add_bos_token")?, None);
/// let error = metadata.str("llama.block_count").unwrap_err();
/// assert_eq!(error.to_string(), "m.gguf: key `llama.block_count`: expected a string, found 22");
/// # Ok::<(), powerinfer_core::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct GgufMetadata {
    path: PathBuf,
    values: BTreeMap<String, GgufValue>,
}

impl GgufMetadata {
    /// Keys as `path` has them; `path` is only named in errors. Of two with the same name the last
    /// is used.
    pub fn new(
        path: impl Into<PathBuf>,
        values: impl IntoIterator<Item = (String, GgufValue)>,
    ) -> Self {
        Self { path: path.into(), values: values.into_iter().collect() }
    }

    /// The file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The value of a key.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&GgufValue> {
        self.values.get(key)
    }

    /// Every key with its value, sorted by key.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &GgufValue)> {
        self.values.iter().map(|(key, value)| (key.as_str(), value))
    }

    /// The error for a key whose value is not `expected`.
    pub fn error(&self, key: &str, expected: impl Into<String>) -> Error {
        let found = self.get(key).map_or_else(|| "nothing".to_owned(), GgufValue::shown);
        self.error_found(key, expected, found)
    }

    pub(super) fn error_found(
        &self,
        key: &str,
        expected: impl Into<String>,
        found: impl Into<String>,
    ) -> Error {
        Error::Metadata {
            path: self.path.clone(),
            key: key.to_owned(),
            expected: expected.into(),
            found: found.into(),
        }
    }

    /// A whole number.
    ///
    /// # Errors
    /// [`Error::Metadata`] if it is absent, no whole number or out of range, as for all accessors
    /// below.
    pub fn u32(&self, key: &str) -> Result<u32> {
        self.required(key, "a whole number below 2³²", Self::optional_u32)
    }

    /// A whole number, if it is there.
    ///
    /// # Errors
    /// [`Error::Metadata`].
    pub fn optional_u32(&self, key: &str) -> Result<Option<u32>> {
        let number =
            |value: &GgufValue| value.integer().and_then(|value| u32::try_from(value).ok());
        self.optional(key, "a whole number below 2³²", number)
    }

    /// A whole number that may be large.
    ///
    /// # Errors
    /// [`Error::Metadata`].
    pub fn u64(&self, key: &str) -> Result<u64> {
        let number =
            |value: &GgufValue| value.integer().and_then(|value| u64::try_from(value).ok());
        let expected = "a whole number below 2⁶⁴";
        self.optional(key, expected, number)?.ok_or_else(|| self.error(key, expected))
    }

    /// A floating-point number.
    ///
    /// # Errors
    /// [`Error::Metadata`].
    pub fn f32(&self, key: &str) -> Result<f32> {
        self.required(key, "a floating-point number", Self::optional_f32)
    }

    /// A floating-point number, if it is there.
    ///
    /// # Errors
    /// [`Error::Metadata`].
    pub fn optional_f32(&self, key: &str) -> Result<Option<f32>> {
        self.optional(key, "a floating-point number", |value| match *value {
            GgufValue::F32(value) => Some(value),
            GgufValue::F64(value) => Some(value as f32),
            _ => None,
        })
    }

    /// True or false.
    ///
    /// # Errors
    /// [`Error::Metadata`].
    pub fn bool(&self, key: &str) -> Result<bool> {
        self.required(key, "true or false", Self::optional_bool)
    }

    /// True or false, if it is there.
    ///
    /// # Errors
    /// [`Error::Metadata`].
    pub fn optional_bool(&self, key: &str) -> Result<Option<bool>> {
        self.optional(key, "true or false", |value| match *value {
            GgufValue::Bool(value) => Some(value),
            _ => None,
        })
    }

    /// A string.
    ///
    /// # Errors
    /// [`Error::Metadata`].
    pub fn str(&self, key: &str) -> Result<&str> {
        self.optional_str(key)?.ok_or_else(|| self.error(key, "a string"))
    }

    /// A string, if it is there.
    ///
    /// # Errors
    /// [`Error::Metadata`].
    pub fn optional_str(&self, key: &str) -> Result<Option<&str>> {
        match self.get(key) {
            None => Ok(None),
            Some(GgufValue::String(text)) => Ok(Some(text)),
            Some(_) => Err(self.error(key, "a string")),
        }
    }

    /// An array, if it is there.
    ///
    /// # Errors
    /// [`Error::Metadata`].
    pub fn optional_array(&self, key: &str) -> Result<Option<&GgufArray>> {
        match self.get(key) {
            None => Ok(None),
            Some(GgufValue::Array(array)) => Ok(Some(array)),
            Some(_) => Err(self.error(key, "an array")),
        }
    }

    /// An array of strings.
    ///
    /// # Errors
    /// [`Error::Metadata`], also for one that is not UTF-8.
    pub fn strings(&self, key: &str) -> Result<Vec<&str>> {
        self.optional_strings(key)?.ok_or_else(|| self.error(key, "an array of strings"))
    }

    /// An array of strings, if it is there.
    ///
    /// # Errors
    /// [`Error::Metadata`], also for one that is not UTF-8.
    pub fn optional_strings(&self, key: &str) -> Result<Option<Vec<&str>>> {
        let expected = "an array of strings";
        let Some(array) = self.optional_array_of(key, expected, GgufElement::String)? else {
            return Ok(None);
        };
        let strings = array.byte_strings().enumerate().map(|(index, bytes)| {
            std::str::from_utf8(bytes).map_err(|_| {
                let found = format!("other bytes in string {index}");
                self.error_found(key, "strings in UTF-8", found)
            })
        });
        strings.collect::<Result<_>>().map(Some)
    }

    /// An array of 32-bit floating-point numbers.
    ///
    /// # Errors
    /// [`Error::Metadata`].
    pub fn f32s(&self, key: &str) -> Result<Vec<f32>> {
        self.required(key, "an array of F32", Self::optional_f32s)
    }

    /// An array of 32-bit floating-point numbers, if it is there.
    ///
    /// # Errors
    /// [`Error::Metadata`].
    pub fn optional_f32s(&self, key: &str) -> Result<Option<Vec<f32>>> {
        let array = self.optional_array_of(key, "an array of F32", GgufElement::F32)?;
        Ok(array.map(|array| {
            let (values, _) = array.bytes().as_chunks::<4>();
            values.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
        }))
    }

    /// An array of whole numbers.
    ///
    /// # Errors
    /// [`Error::Metadata`].
    pub fn i32s(&self, key: &str) -> Result<Vec<i32>> {
        self.required(key, "an array of whole numbers", Self::optional_i32s)
    }

    /// An array of whole numbers, if it is there.
    ///
    /// # Errors
    /// [`Error::Metadata`].
    pub fn optional_i32s(&self, key: &str) -> Result<Option<Vec<i32>>> {
        self.optional_integers(key)
    }

    /// An array of whole numbers that are not negative.
    ///
    /// # Errors
    /// [`Error::Metadata`].
    pub fn u32s(&self, key: &str) -> Result<Vec<u32>> {
        self.required(key, "an array of whole numbers", Self::optional_u32s)
    }

    /// An array of whole numbers that are not negative, if it is there.
    ///
    /// # Errors
    /// [`Error::Metadata`].
    pub fn optional_u32s(&self, key: &str) -> Result<Option<Vec<u32>>> {
        self.optional_integers(key)
    }

    fn optional_integers<T: TryFrom<i128>>(&self, key: &str) -> Result<Option<Vec<T>>> {
        let Some(array) = self.optional_array(key)? else {
            return Ok(None);
        };
        let integers = array.integers();
        let integers = integers.ok_or_else(|| self.error(key, "an array of whole numbers"))?;
        let converted = integers.enumerate().map(|(index, value)| {
            T::try_from(value).map_err(|_| {
                let found = format!("{value} at {index}");
                self.error_found(
                    key,
                    format!("numbers that fit {}", std::any::type_name::<T>()),
                    found,
                )
            })
        });
        converted.collect::<Result<_>>().map(Some)
    }

    fn optional_array_of(
        &self,
        key: &str,
        expected: &str,
        element: GgufElement,
    ) -> Result<Option<&GgufArray>> {
        match self.get(key) {
            None => Ok(None),
            Some(GgufValue::Array(array)) if array.element() == element => Ok(Some(array)),
            Some(_) => Err(self.error(key, expected)),
        }
    }

    fn optional<T>(
        &self,
        key: &str,
        expected: &str,
        convert: impl Fn(&GgufValue) -> Option<T>,
    ) -> Result<Option<T>> {
        match self.get(key) {
            None => Ok(None),
            Some(value) => convert(value).map(Some).ok_or_else(|| self.error(key, expected)),
        }
    }

    fn required<T>(
        &self,
        key: &str,
        expected: &str,
        optional: impl Fn(&Self, &str) -> Result<Option<T>>,
    ) -> Result<T> {
        optional(self, key)?.ok_or_else(|| self.error(key, expected))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn metadata(value: GgufValue) -> GgufMetadata {
        GgufMetadata::new("f", [("k".to_owned(), value)])
    }

    fn found(error: Error) -> String {
        match error {
            Error::Metadata { key, found, .. } if key == "k" => found,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn whole_numbers_come_from_any_integer_that_fits() {
        let values = [GgufValue::U8(7), GgufValue::I16(7), GgufValue::I32(7), GgufValue::U64(7)];
        for value in values {
            assert_eq!(metadata(value).u32("k").unwrap(), 7);
        }
        for (value, shown) in [
            (GgufValue::I32(-1), "-1"),
            (GgufValue::U64(1 << 32), "4294967296"),
            (GgufValue::F32(7.0), "7"),
            (GgufValue::Bool(true), "true"),
            (GgufValue::strings(["7"]), "an array of 1 String"),
        ] {
            assert_eq!(found(metadata(value.clone()).u32("k").unwrap_err()), shown);
            assert_eq!(found(metadata(value).optional_u32("k").unwrap_err()), shown);
        }
    }

    #[test]
    fn arrays_keep_their_signs_and_order() {
        let numbers = metadata(GgufValue::i32s(&[3, -1, i32::MIN]));
        assert_eq!(numbers.i32s("k").unwrap(), [3, -1, i32::MIN]);
        assert_eq!(found(numbers.u32s("k").unwrap_err()), "-1 at 1");
        assert_eq!(metadata(GgufValue::f32s(&[0.5, -2.0])).f32s("k").unwrap(), [0.5, -2.0]);
        assert_eq!(
            metadata(GgufValue::strings(["", "ä", "b"])).strings("k").unwrap(),
            ["", "ä", "b"]
        );
        assert!(metadata(GgufValue::f32s(&[0.5])).i32s("k").is_err());
    }

    #[test]
    fn bytes_that_are_no_text_are_named_by_their_place() {
        let bytes = [&1u64.to_le_bytes()[..], b"a", &1u64.to_le_bytes(), b"\xFF"].concat();
        let array = GgufArray::new(GgufElement::String, 2, bytes);
        let metadata = metadata(GgufValue::Array(array.clone()));
        assert_eq!(found(metadata.strings("k").unwrap_err()), "other bytes in string 1");
        assert_eq!(array.byte_strings().collect::<Vec<_>>(), [b"a", b"\xFF"]);
    }

    #[test]
    fn what_is_absent_is_none_or_an_error() {
        let empty = GgufMetadata::new("f", []);
        assert_eq!(empty.optional_strings("k").unwrap(), None);
        assert_eq!(empty.optional_i32s("k").unwrap(), None);
        assert_eq!(found(empty.str("k").unwrap_err()), "nothing");
        assert_eq!(found(empty.f32s("k").unwrap_err()), "nothing");
    }

    #[test]
    fn errors_never_repeat_a_long_value() {
        let metadata = metadata(GgufValue::String("ä".repeat(1 << 20)));
        assert!(found(metadata.bool("k").unwrap_err()).len() < 200);
    }
}
