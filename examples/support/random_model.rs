//! The synthetic model that a command line asks for.

use powerinfer::models::LoadOptions;
use powerinfer::models::synthetic::{Synthetic, SyntheticShape};
use powerinfer::ops::WeightFormat;

use super::report::Outcome;
use super::skew::skewed;

/// Names of the shapes.
pub(crate) const SHAPES: [&str; 7] =
    ["llama-1b", "llama-7b", "opt-1.3b", "opt-6.7b", "opt-30b", "falcon-7b", "tiny"];

/// A synthetic model that would push this machine out of memory.
#[derive(Debug, thiserror::Error)]
#[error("--synthetic {name} takes {needed} bytes, and {available} are available")]
struct TooLarge {
    name: String,
    needed: u64,
    available: u64,
}

/// A model of that shape, unless it is too large for this machine.
pub(crate) fn random_model(
    name: &str,
    density: f64,
    hot_share_80: Option<f64>,
    distinct_layers: Option<usize>,
    dtype: Option<WeightFormat>,
) -> Outcome<Synthetic> {
    let mut synthetic = Synthetic::new(name.parse::<SyntheticShape>()?, density, 1)?;
    if let Some(hot_share_80) = hot_share_80 {
        synthetic = skewed(synthetic, hot_share_80)?;
    }
    if let Some(n_layers) = distinct_layers {
        synthetic = synthetic.with_distinct_layers(n_layers);
    }
    let needed = synthetic.sizes(&LoadOptions::default().with_dtype(dtype))?.total_bytes();
    match available_bytes().filter(|&available| needed > available) {
        Some(available) => Err(TooLarge { name: name.to_owned(), needed, available }.into()),
        None => Ok(synthetic),
    }
}

/// Memory that the system could give, where it says so.
fn available_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix(" kB")?.parse().ok()?;
    kib.checked_mul(1 << 10)
}
