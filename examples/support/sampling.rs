//! The flags that say how text is written, and what becomes of them.

use clap::Args;
use powerinfer::{GenerateOptions, Sampling};

use super::flags::at_least_one;
use super::report::{Outcome, wrong_usage};

/// How tokens are chosen and when a text ends.
#[derive(Debug, Clone, Args)]
pub(crate) struct SamplingFlags {
    /// Most tokens to write; 0 only runs the prompt
    #[arg(long, value_name = "N", default_value_t = 128)]
    pub(crate) max_tokens: usize,
    /// Divides the logits; 0 always takes the likeliest token
    #[arg(long, value_name = "X", default_value_t = 0.0)]
    pub(crate) temperature: f32,
    /// Draw from the K likeliest tokens only
    #[arg(long, value_name = "K", value_parser = at_least_one)]
    pub(crate) top_k: Option<usize>,
    /// Draw from the fewest tokens that have this probability together
    #[arg(long, value_name = "X", default_value_t = 1.0)]
    pub(crate) top_p: f32,
    /// Draw from tokens of at least this share of the likeliest one's probability
    #[arg(long, value_name = "X", default_value_t = 0.0)]
    pub(crate) min_p: f32,
    /// Above 1 makes tokens that occurred lately less likely
    #[arg(long, value_name = "X", default_value_t = 1.0)]
    pub(crate) repeat_penalty: f32,
    /// The same seed draws the same text
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) seed: u64,
    /// Text that ends the writing; may be given several times
    #[arg(long, value_name = "STR", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    pub(crate) stop: Vec<String>,
    /// Write on over the model's end tokens
    #[arg(long)]
    pub(crate) ignore_eos: bool,
}

impl SamplingFlags {
    /// The options of a request, unless flags say how to draw and nothing is drawn.
    pub(crate) fn options(&self) -> Outcome<GenerateOptions> {
        let given = [
            ("--top-k", self.top_k.is_some()),
            ("--top-p", self.top_p != 1.0),
            ("--min-p", self.min_p != 0.0),
            ("--seed", self.seed != 0),
        ];
        let greedy = self.temperature == 0.0;
        if let Some((flag, _)) = given.into_iter().find(|(_, given)| *given && greedy) {
            return wrong_usage(&format!(
                "{flag} needs a --temperature above 0, without which the likeliest token is taken"
            ));
        }
        let sampling = Sampling::default()
            .with_temperature(self.temperature)
            .with_top_k(self.top_k)
            .with_top_p(self.top_p)
            .with_min_p(self.min_p)
            .with_repetition_penalty(self.repeat_penalty)
            .with_seed(self.seed);
        Ok(GenerateOptions::default()
            .with_max_tokens(self.max_tokens)
            .with_sampling(sampling)
            .with_stop(&self.stop)
            .with_ignore_eos(self.ignore_eos))
    }
}
