//! What the tests of the workspace share.
//!
//! - [`tolerance`]: the one rule for how far two floating-point results may lie apart, and the
//!   assertions that apply it. Masks, ids and counts are compared exactly, with `assert_eq!`.
//! - [`seeded`]: a small generator of test data that gives the same bits on every platform.
//! - [`fixture`]: the micro models, the demo model, texts and tokenizer cases.
//! - [`blocks`]: quantised weights as ggml writes and reads them.
//! - [`golden`]: the reference results stored beside the models.
//!
//! This crate is not published and imports no crate of the workspace, so that a defect in the
//! library cannot hide in the means of testing it. Everything here is for tests: what cannot go
//! on panics, with a message that names the file, the tensor or the element.
//!
//! # Examples
//! ```
//! use testing::{seeded::Seeded, tolerance};
//!
//! let mut data = Seeded::new(1);
//! let (w, x) = (data.normal(1000), data.normal(1000));
//! let forward: f32 = w.iter().zip(&x).map(|(w, x)| w * x).sum();
//! let backward: f32 = w.iter().zip(&x).rev().map(|(w, x)| w * x).sum();
//!
//! let bound = tolerance::dot_bound(&w, &x);
//! tolerance::assert_close(&[forward], &[backward], bound, "dot product, two orders");
//! ```

pub mod blocks;
mod file;
pub mod fixture;
pub mod golden;
pub mod pytorch;
pub mod seeded;
pub mod tolerance;

pub use blocks::GgmlBlocks;
pub use fixture::Fixture;
pub use golden::{Golden, Prompt};
pub use seeded::Seeded;
pub use tolerance::{assert_close, assert_same_bits};
