//! Scoring a text window by window: the protocol behind every perplexity.

use powerinfer::{Logits, StepStats};

/// One window: what is fed, and the tokens that the rows of logits are asked about.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Window<'a> {
    pub(crate) fed: Vec<u32>,
    pub(crate) scored: &'a [u32],
}

/// A text that cannot be scored in windows of that size.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum NoWindow {
    #[error("the text has {found} tokens, expected at least {expected}, one --context")]
    TextTooShort { found: usize, expected: usize },
    #[error("--context {found}: expected at least {expected} tokens")]
    ContextTooShort { found: usize, expected: usize },
}

/// Cuts `ids` into windows of `context` tokens and drops the rest. With `begin` each window is fed
/// as `begin` and all its tokens but the last, and all are scored; without, the first token of a
/// window is not scored.
pub(crate) fn windows(
    ids: &[u32],
    context: usize,
    begin: Option<u32>,
) -> Result<Vec<Window<'_>>, NoWindow> {
    let shortest = if begin.is_some() { 1 } else { 2 };
    if context < shortest {
        return Err(NoWindow::ContextTooShort { found: context, expected: shortest });
    }
    if ids.len() < context {
        return Err(NoWindow::TextTooShort { found: ids.len(), expected: context });
    }
    let cut = |window: &'_ [u32]| {
        begin.into_iter().chain(window[..context - 1].iter().copied()).collect()
    };
    let skipped = usize::from(begin.is_none());
    Ok(ids
        .chunks_exact(context)
        .map(|window| Window { fed: cut(window), scored: &window[skipped..] })
        .collect())
}

/// The sum over the tokens scored so far.
#[derive(Debug, Default)]
pub(crate) struct Score {
    pub(crate) tokens: u64,
    pub(crate) stats: StepStats,
    log_probability: f64,
}

impl Score {
    /// Adds the tokens that followed the rows of `logits`.
    pub(crate) fn add(&mut self, logits: &Logits, scored: &[u32]) {
        let rows = logits.values.chunks_exact(logits.vocab_size.max(1));
        for (row, &id) in rows.zip(scored) {
            self.log_probability += log_probability(row, id as usize);
            self.tokens += 1;
        }
        self.stats.merge(&logits.stats);
    }

    /// The exponential of the mean negative log-likelihood.
    pub(crate) fn perplexity(&self) -> f64 {
        (-self.log_probability / self.tokens as f64).exp()
    }
}

/// `ln softmax(row)[id]` in f64, the largest logit taken out first so that no exponential
/// overflows; −∞ for an id without a logit.
pub(crate) fn log_probability(row: &[f32], id: usize) -> f64 {
    let Some(&logit) = row.get(id) else {
        return f64::NEG_INFINITY;
    };
    let top = f64::from(row.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    let sum: f64 = row.iter().map(|&x| (f64::from(x) - top).exp()).sum();
    f64::from(logit) - top - sum.ln()
}
