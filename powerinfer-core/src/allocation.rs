//! Memory whose size comes from outside: running out of it is an error, not the end of the process.

use crate::error::{Error, Result};

/// `len` default values, which for numbers are zeros.
///
/// # Errors
/// [`Error::Allocation`], naming `what` the memory was for.
pub(crate) fn try_zeroed<T: Clone + Default>(what: &'static str, len: usize) -> Result<Vec<T>> {
    let mut values = Vec::new();
    values
        .try_reserve_exact(len)
        .map_err(|_| Error::Allocation { what, bytes: len.saturating_mul(size_of::<T>()) })?;
    values.resize(len, T::default());
    Ok(values)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_zeroed() {
        assert_eq!(try_zeroed::<f32>("a test", 3).unwrap(), [0.0; 3]);
        assert!(try_zeroed::<f32>("a test", 0).unwrap().is_empty());
    }

    #[test]
    fn more_than_the_address_space_is_an_error_with_its_size() {
        for (len, expected) in [(usize::MAX, usize::MAX), (1 << 61, 1 << 63)] {
            assert!(matches!(
                try_zeroed::<f32>("a test", len),
                Err(Error::Allocation { what: "a test", bytes }) if bytes == expected
            ));
        }
    }
}
