//! How the work was shared with a fast device, for those who read the results.
#![allow(dead_code, reason = "each example uses a part")]

use powerinfer::StepStats;
use serde_json::{Value, json};

/// The shares of the two sides; null where there is one side only.
pub(crate) fn split_json(stats: &StepStats) -> Value {
    let split = stats.split;
    if split.layers == 0 {
        return Value::Null;
    }
    json!({
        "hit_rate": split.hit_rate(),
        "fast_bytes_per_token": split.fast_bytes.checked_div(stats.n_tokens).unwrap_or(0),
        "cold_seconds": split.cold_ns as f64 * 1e-9,
        "fast_seconds": split.fast_ns as f64 * 1e-9,
        "wait_seconds": split.wait_ns as f64 * 1e-9,
    })
}

/// The same on a line.
pub(crate) fn split_line(stats: &StepStats) -> Option<String> {
    let split = stats.split;
    let per_layer = |ns: u64| ns as f64 * 1e-3 / split.layers as f64;
    (split.layers > 0).then(|| {
        format!(
            "{:.0} % of those that fire are hot, a layer takes the fast device {:.0} µs and the CPU \
             {:.0} µs, which then waits {:.0} µs",
            100.0 * split.hit_rate(),
            per_layer(split.fast_ns),
            per_layer(split.cold_ns),
            per_layer(split.wait_ns),
        )
    })
}
