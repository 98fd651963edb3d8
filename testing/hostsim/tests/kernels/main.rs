//! Every kernel against the CPU's operators, and every planted fault against the same checks.
#![cfg(not(no_shim))]
#![allow(clippy::unwrap_used, reason = "tests")]

mod attention;
mod device;
mod estimate;
mod ffn;
mod list;
mod many;
mod mlp;
mod mutant;
mod norm;
mod product;
mod stream;
mod sum;
