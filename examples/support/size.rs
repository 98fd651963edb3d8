//! Sizes as people write them.

/// What is accepted, for messages.
const EXPECTED: &str = "expected a size such as 8GiB, 1.5GiB or 512MB: a number of bytes, or one with B, K, KB, \
                        MB, GB or TB (powers of 1000) or KiB, MiB, GiB or TiB (powers of 1024)";

/// A size that is not 0.
pub(crate) fn parse_some_bytes(text: &str) -> Result<u64, String> {
    parse_size(text).and_then(|bytes| match bytes {
        0 => Err("expected at least 1 byte".to_owned()),
        bytes => Ok(bytes),
    })
}

/// Reads `8GiB`, `1.5GiB`, `512MB` or a plain number of bytes. A fraction of a byte is left out.
pub(crate) fn parse_size(text: &str) -> Result<u64, String> {
    read(text).ok_or_else(|| format!("{EXPECTED}; found {text:?}"))
}

fn read(text: &str) -> Option<u64> {
    let end = text.bytes().take_while(|byte| byte.is_ascii_digit() || *byte == b'.').count();
    let (number, unit) = text.split_at(end);
    let unit: u64 = match unit {
        "" | "B" => 1,
        "K" | "KB" | "kB" => 1000,
        "MB" => 1000_u64.pow(2),
        "GB" => 1000_u64.pow(3),
        "TB" => 1000_u64.pow(4),
        "KiB" => 1 << 10,
        "MiB" => 1 << 20,
        "GiB" => 1 << 30,
        "TiB" => 1 << 40,
        _ => return None,
    };
    let (whole, fraction) = match number.split_once('.') {
        // half a byte is nothing that anybody means
        Some((_, fraction)) if unit == 1 || fraction.is_empty() => return None,
        Some((whole, fraction)) => (whole, fraction),
        None => (number, ""),
    };
    let bytes = whole.parse::<u64>().ok()?.checked_mul(unit)?;
    if fraction.is_empty() {
        return Some(bytes);
    }
    if fraction.len() > 12 || !fraction.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    // at most 12 digits times at most 40 bits
    let scaled = u128::from(fraction.parse::<u64>().ok()?) * u128::from(unit);
    let of = 10_u128.pow(u32::try_from(fraction.len()).ok()?);
    bytes.checked_add(u64::try_from(scaled / of).ok()?)
}
