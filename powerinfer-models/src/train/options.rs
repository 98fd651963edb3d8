//! What a predictor is to be like, and how far its making is.

use std::path::PathBuf;

use powerinfer_core::{Digest, ModelInfo};
use powerinfer_predictor::{MlpForm, PredictionTarget};

use crate::error::{Error, Result};

/// What run something is of: names and values.
pub(super) type Identity = Vec<(&'static str, String)>;

/// How a predictor is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum TrainMethod {
    /// Factors of the gates, with thresholds from text.
    Svd,
    /// Two layers that begin as these factors and are fitted to the text.
    Trained,
}

impl TrainMethod {
    /// The name in files and command lines.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Svd => "svd",
            Self::Trained => "trained",
        }
    }
}

/// How a predictor is made, and what it is to reach.
///
/// # Examples
/// ```
/// use powerinfer_models::{TrainMethod, TrainOptions};
/// let options = TrainOptions::new(TrainMethod::Trained).with_share_of_model(0.06).with_seed(3);
/// assert_eq!((options.share_of_model, options.seed), (0.06, 3));
/// ```
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct TrainOptions {
    /// How it is made.
    pub method: TrainMethod,
    /// What each layer's threshold is to reach.
    pub target: PredictionTarget,
    /// The most parameters, as a share of the model's.
    pub share_of_model: f64,
    /// Whether it is to be of the original's form, which its files and PowerInfer's GGUF can say.
    pub original: bool,
    /// Tokens of a window.
    pub context: usize,
    /// Tokens held out.
    pub held_out: usize,
    /// Tokens that the second moments are of.
    pub survey: usize,
    /// Tokens that are in memory at once.
    pub piece: usize,
    /// How often each piece is gone over before it is forgotten.
    pub passes: usize,
    /// Tokens of a step.
    pub batch: usize,
    /// The height of the learning rate.
    pub rate: f32,
    /// Pieces between two measurements.
    pub measure_every: usize,
    /// Measurements without anything better until it stops.
    pub patience: usize,
    /// Decides everything that is random.
    pub seed: u64,
    /// Where the state is kept, before the first piece and after each, and gone on from if it is there.
    pub checkpoint: Option<PathBuf>,
}

impl TrainOptions {
    /// The defaults: at most a tenth of the model's parameters, 97 % of the activation mass.
    #[must_use]
    pub fn new(method: TrainMethod) -> Self {
        Self {
            method,
            target: PredictionTarget::default(),
            share_of_model: 0.1,
            original: false,
            context: 512,
            held_out: 8192,
            survey: 16384,
            piece: 8192,
            passes: 2,
            batch: 512,
            rate: 0.02,
            measure_every: 4,
            patience: 4,
            seed: 0,
            checkpoint: None,
        }
    }

    /// Sets [`target`](Self::target).
    #[must_use]
    pub fn with_target(mut self, target: PredictionTarget) -> Self {
        self.target = target;
        self
    }

    /// Sets [`share_of_model`](Self::share_of_model).
    #[must_use]
    pub fn with_share_of_model(mut self, share: f64) -> Self {
        self.share_of_model = share;
        self
    }

    /// Asks for the original's form.
    #[must_use]
    pub fn with_original(mut self, original: bool) -> Self {
        self.original = original;
        self
    }

    /// Sets [`seed`](Self::seed).
    #[must_use]
    pub fn with_seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// Sets [`checkpoint`](Self::checkpoint).
    #[must_use]
    pub fn with_checkpoint(mut self, path: Option<PathBuf>) -> Self {
        self.checkpoint = path;
        self
    }

    pub(super) fn form(&self) -> MlpForm {
        if self.original { MlpForm::ORIGINAL } else { MlpForm::LOW_RANK }
    }

    pub(super) fn check(&self) -> Result<()> {
        let refuse = |expected: &str, found: String| {
            Err(Error::Training { expected: expected.to_owned(), found })
        };
        let share = |x: f64| x > 0.0 && x <= 1.0;
        if !share(self.share_of_model) {
            return refuse("a share of the model from 0 to 1", self.share_of_model.to_string());
        }
        if !share(self.target.recall_mass) {
            return refuse("a share of the mass from 0 to 1", self.target.recall_mass.to_string());
        }
        if !share(self.target.max_density) {
            return refuse("a density from 0 to 1", self.target.max_density.to_string());
        }
        if !self.rate.is_finite() || self.rate <= 0.0 {
            return refuse("a rate above 0", self.rate.to_string());
        }
        for (what, n) in [
            ("a window of tokens", self.context),
            ("a piece of tokens", self.piece),
            ("a pass or more", self.passes),
            ("a batch of tokens", self.batch),
            ("a measurement after some pieces", self.measure_every),
        ] {
            if n == 0 {
                return refuse(what, "0".to_owned());
            }
        }
        if self.original && self.method == TrainMethod::Svd {
            return refuse("low-rank factors in their own form", "the original's".to_owned());
        }
        Ok(())
    }

    /// What has to be the same for a checkpoint to be this run's.
    pub(super) fn identity(&self, info: &ModelInfo, tokens: &[u32]) -> Identity {
        // all of them, so that the compiler asks about a new one
        let Self {
            method,
            target: PredictionTarget { recall_mass, max_density },
            share_of_model,
            original,
            context,
            held_out,
            survey,
            piece,
            passes,
            batch,
            rate,
            measure_every,
            patience,
            seed,
            checkpoint: _,
        } = self;
        let mut text = Digest::default();
        tokens.iter().for_each(|token| text.update(&token.to_le_bytes()));
        vec![
            ("architecture", info.architecture.clone()),
            ("parameters", info.n_parameters.to_string()),
            ("tokens", tokens.len().to_string()),
            ("text", text.name()),
            ("method", method.name().to_owned()),
            ("recall_mass", recall_mass.to_string()),
            ("max_density", max_density.to_string()),
            ("share_of_model", share_of_model.to_string()),
            ("original", original.to_string()),
            ("context", context.to_string()),
            ("held_out", held_out.to_string()),
            ("survey", survey.to_string()),
            ("piece", piece.to_string()),
            ("passes", passes.to_string()),
            ("batch", batch.to_string()),
            ("rate", rate.to_string()),
            ("measure_every", measure_every.to_string()),
            ("patience", patience.to_string()),
            ("seed", seed.to_string()),
        ]
    }
}

/// How far a predictor's making is.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum TrainStage {
    /// Running the model over so many tokens to see what its layers see.
    Survey {
        /// Tokens done.
        done: usize,
        /// Of how many.
        of: usize,
    },
    /// Factoring the gate of a layer.
    Factors {
        /// The layer.
        layer: usize,
        /// Of how many.
        of: usize,
    },
    /// Trying ranks for a layer.
    Ranks {
        /// The layer.
        layer: usize,
        /// Of how many.
        of: usize,
    },
    /// Fitting.
    Fit {
        /// Tokens done.
        done: usize,
        /// Of how many.
        of: usize,
        /// Neurons listed for each that fires, on what is held out, when it was last measured.
        listed_per_firing: f64,
    },
}
