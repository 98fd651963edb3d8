//! The values that the keys of a GGUF file can have.

/// How much of a wrong value an error repeats.
const SHOWN_CHARS: usize = 60;

/// The value of a key.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
#[allow(missing_docs, reason = "each variant is the type that it is named for")]
pub enum GgufValue {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    U64(u64),
    I64(i64),
    F32(f32),
    F64(f64),
    Bool(bool),
    String(String),
    Array(GgufArray),
}

/// The type of the elements of an array.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
#[allow(missing_docs, reason = "each variant is the type that it is named for")]
pub enum GgufElement {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    U64,
    I64,
    F32,
    F64,
    Bool,
    String,
}

/// An array, held in the bytes of the file: a vocabulary takes no more memory than it does there.
#[derive(Debug, Clone, PartialEq)]
pub struct GgufArray {
    element: GgufElement,
    len: usize,
    /// As in the file, the length of each string before its bytes; whole elements.
    bytes: Vec<u8>,
}

impl GgufElement {
    /// Bytes of an element; `None` where they differ from one to the next.
    pub(super) fn size(self) -> Option<usize> {
        match self {
            Self::U8 | Self::I8 | Self::Bool => Some(1),
            Self::U16 | Self::I16 => Some(2),
            Self::U32 | Self::I32 | Self::F32 => Some(4),
            Self::U64 | Self::I64 | Self::F64 => Some(8),
            Self::String => None,
        }
    }
}

impl GgufValue {
    /// An array of strings.
    pub fn strings<'a>(strings: impl IntoIterator<Item = &'a str>) -> Self {
        let (mut bytes, mut len) = (Vec::new(), 0);
        for string in strings {
            bytes.extend((string.len() as u64).to_le_bytes());
            bytes.extend(string.as_bytes());
            len += 1;
        }
        Self::Array(GgufArray { element: GgufElement::String, len, bytes })
    }

    /// An array of 32-bit floating-point numbers.
    #[must_use]
    pub fn f32s(values: &[f32]) -> Self {
        let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        Self::Array(GgufArray { element: GgufElement::F32, len: values.len(), bytes })
    }

    /// An array of 32-bit integers.
    #[must_use]
    pub fn i32s(values: &[i32]) -> Self {
        let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        Self::Array(GgufArray { element: GgufElement::I32, len: values.len(), bytes })
    }

    /// A whole number of any type.
    #[must_use]
    pub fn integer(&self) -> Option<i128> {
        Some(match *self {
            Self::U8(value) => value.into(),
            Self::I8(value) => value.into(),
            Self::U16(value) => value.into(),
            Self::I16(value) => value.into(),
            Self::U32(value) => value.into(),
            Self::I32(value) => value.into(),
            Self::U64(value) => value.into(),
            Self::I64(value) => value.into(),
            _ => return None,
        })
    }

    /// As an error shows it.
    pub(super) fn shown(&self) -> String {
        match self {
            Self::F32(value) => value.to_string(),
            Self::F64(value) => value.to_string(),
            Self::Bool(value) => value.to_string(),
            Self::Array(array) => format!("an array of {} {:?}", array.len, array.element),
            // its text can be as long as the file
            Self::String(text) => {
                let mut start: String = text.chars().take(SHOWN_CHARS).collect();
                if start.len() < text.len() {
                    start.push('…');
                }
                format!("{start:?}")
            }
            other => other.integer().unwrap_or_default().to_string(),
        }
    }
}

impl GgufArray {
    /// An array whose `bytes` hold exactly `len` elements.
    pub(super) fn new(element: GgufElement, len: usize, bytes: Vec<u8>) -> Self {
        Self { element, len, bytes }
    }

    /// The type of its elements.
    #[must_use]
    pub fn element(&self) -> GgufElement {
        self.element
    }

    /// Number of elements.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no elements.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// As in the file.
    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The strings of an array of strings, as bytes: the format asks for UTF-8, not every writer
    /// gives it. Nothing if the elements are no strings.
    pub fn byte_strings(&self) -> impl Iterator<Item = &[u8]> {
        let mut rest: &[u8] =
            if self.element == GgufElement::String { &self.bytes } else { Default::default() };
        std::iter::from_fn(move || {
            let (len, after) = rest.split_first_chunk::<8>()?;
            let (string, after) = after.split_at_checked(u64::from_le_bytes(*len) as usize)?;
            rest = after;
            Some(string)
        })
    }

    /// The numbers of an array of integers of any type.
    pub(super) fn integers(&self) -> Option<impl Iterator<Item = i128>> {
        use GgufElement::{I8, I16, I32, I64, U8, U16, U32, U64};
        let element = self.element;
        if !matches!(element, U8 | I8 | U16 | I16 | U32 | I32 | U64 | I64) {
            return None;
        }
        let signed = matches!(element, I8 | I16 | I32 | I64);
        Some(self.bytes.chunks_exact(element.size()?).map(move |bytes| {
            let fill =
                if signed && bytes.last().is_some_and(|&byte| byte >= 0x80) { 0xFF } else { 0 };
            let mut wide = [fill; 16];
            wide[..bytes.len()].copy_from_slice(bytes);
            i128::from_le_bytes(wide)
        }))
    }
}
