//! Making predictors of a model's neurons out of what it does over a text.
//!
//! 1. **Survey**: windows spread over the text run once. Those held out are kept; of the others each layer
//!    adds up the second moment of its inputs, out of which its gate is factored.
//! 2. **Sizes**: the factors are measured at a few ranks on what is held out, and what parameters there are
//!    go to the layers in which they save most.
//! 3. **Fitting**: the other windows run a few at a time, and each layer makes steps on what was seen, which
//!    is then forgotten. Every few pieces the layers are measured on what is held out; what was best is kept.
//! 4. **Thresholds**, on what is held out, of the weights as they are stored.

mod checkpoint;
mod options;
mod watch;

use std::ops::ControlFlow;

use powerinfer_core::{CausalLm, Error as CoreError, PredictionCounts};
use powerinfer_ops::WeightFormat;
use powerinfer_predictor::{
    FitOptions, LayerFit, LowRankGate, MlpForm, MlpWeights, ModelPredictor, PredictedModel,
    RankCurve, allocate_ranks,
};

use crate::calibrate;
use crate::error::{Error, Result};
use checkpoint::Checkpoint;
pub use options::{TrainMethod, TrainOptions, TrainStage};
use watch::{Collector, SurveyLayer, Surveyor};

/// Ranks are multiples of this, so that rows of the second layer are whole blocks of every format.
const RANK_STEP: usize = 32;
/// How much fewer neurons a fitted layer lists than its factors did before: what ranks are chosen by.
const FITTING_SAVES: f64 = 1.25;
/// What a layer may list at ranks that are chosen, for each neuron that fires.
const LISTED_PER_FIRING: f64 = 1.4;

/// A predictor, and how good it is on text that it was not made from.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct TrainedPredictor {
    /// The predictor.
    pub predictor: ModelPredictor,
    /// How what it lists compares with what fires, on the text held out, a layer at a time.
    pub counts: Vec<PredictionCounts>,
    /// Tokens of the text that it was fitted to; for a training-free one, that the moments are of.
    pub n_tokens: usize,
    /// Tokens held out.
    pub n_held_out: usize,
    /// Whether all of the text was used; false if fitting stopped as it made nothing better.
    pub finished: bool,
}

/// Makes a predictor for a model from `tokens`, of whose windows every so manieth is held out.
///
/// `progress` is told how far it is, and may break off. A run of the same arguments gives the same
/// predictor to the bit, also one that was broken off and went on from
/// [`TrainOptions::checkpoint`]. Runs on the current thread pool.
///
/// # Cost
/// Runs the model once over the tokens, watched, which takes two to three times as long as a plain
/// pass. Memory beside the model is bounded by [`TrainOptions::piece`] and
/// [`TrainOptions::held_out`], whatever the length of the text.
///
/// # Errors
/// [`Error::NotSparse`] if every neuron of the model fires; [`Error::Training`] for a text that is too
/// short, a model whose layers lie on two devices, and a budget that no rank fits; [`Error::Core`] with
/// [`Cancelled`](powerinfer_core::Error::Cancelled) when `progress` broke off;
/// [`Error::OtherRun`] for a checkpoint of another run.
///
/// # Examples
/// ```
/// use std::ops::ControlFlow;
/// use powerinfer_models::synthetic::{Synthetic, SyntheticShape};
/// use powerinfer_models::{LoadOptions, TrainMethod, TrainOptions, train_predictor};
///
/// let model = Synthetic::new(SyntheticShape::Tiny, 0.1, 7)?.load(&LoadOptions::default())?;
/// let tokens: Vec<u32> = (0..2000).map(|i| i * 7 % 250).collect();
/// let options = TrainOptions::new(TrainMethod::Svd).with_share_of_model(0.5);
/// let made = train_predictor(&*model, &tokens, &options, &mut |_| ControlFlow::Continue(()))?;
/// assert!(made.counts[0].recall_mass() >= 0.97);
/// # Ok::<(), powerinfer_models::Error>(())
/// ```
pub fn train_predictor(
    model: &dyn CausalLm,
    tokens: &[u32],
    options: &TrainOptions,
    progress: &mut dyn FnMut(&TrainStage) -> ControlFlow<()>,
) -> Result<TrainedPredictor> {
    options.check()?;
    let context = options.context.min(model.info().max_context);
    let windows = Windows::new(tokens.len(), context, options)?;
    let begun = options.checkpoint.as_ref().filter(|path| path.exists());
    if let Some(path) = begun.filter(|_| options.method == TrainMethod::Trained) {
        // before the work
        Checkpoint::check_run(path, &options.identity(model.info(), tokens))?;
    }
    let mut run = Run { model, tokens, context, options, progress };
    let surveys = run.survey(&windows)?;
    let factors = run.factor(&surveys)?;
    let ranks = run.ranks(&surveys, &factors)?;
    let first = run.first_weights(&surveys, &factors, &ranks)?;
    drop(factors);
    let (layers, n_tokens, finished) = match options.method {
        TrainMethod::Svd => (first, windows.survey.len() * context, true),
        TrainMethod::Trained => run.fit(&surveys, &windows, first)?,
    };
    let mut predictor = ModelPredictor {
        model: run.described(&surveys),
        method: options.method.name().to_owned(),
        layers: Vec::with_capacity(layers.len()),
    };
    let mut counts = Vec::with_capacity(layers.len());
    for (weights, survey) in layers.iter().zip(&surveys) {
        // as they are stored
        let mut weights = weights.rounded(WeightFormat::F16)?;
        counts.push(weights.set_threshold(&survey.held_out, &options.target)?);
        predictor.layers.push(weights);
    }
    let n_held_out = surveys.first().map_or(0, |survey| survey.held_out.n_tokens());
    Ok(TrainedPredictor { predictor, counts, n_tokens, n_held_out, finished })
}

/// Which windows of the text are for what; numbers of windows.
#[derive(Debug)]
struct Windows {
    held_out: Vec<usize>,
    survey: Vec<usize>,
    fit: Vec<usize>,
}

impl Windows {
    fn new(n_tokens: usize, context: usize, options: &TrainOptions) -> Result<Self> {
        let n = n_tokens / context.max(1);
        let n_held_out = (options.held_out / context.max(1)).clamp(1, n / 4 + 1);
        if n < 2 {
            let (expected, found) = (2 * context, n_tokens);
            let expected = format!("a text of at least {expected} tokens, two windows");
            return Err(Error::Training { expected, found: format!("{found} tokens") });
        }
        // spread over the text, whose parts may differ; none is at its very beginning
        let is_held_out =
            |window: usize| (0..n_held_out).any(|i| (2 * i + 1) * n / (2 * n_held_out) == window);
        let (held_out, fit): (Vec<usize>, Vec<usize>) = (0..n).partition(|&at| is_held_out(at));
        let n_survey = (options.survey / context.max(1)).clamp(1, fit.len());
        let survey = (0..n_survey).map(|i| fit[i * fit.len() / n_survey]).collect();
        Ok(Self { held_out, survey, fit })
    }
}

/// What all stages need.
struct Run<'a> {
    model: &'a dyn CausalLm,
    tokens: &'a [u32],
    context: usize,
    options: &'a TrainOptions,
    progress: &'a mut dyn FnMut(&TrainStage) -> ControlFlow<()>,
}

impl Run<'_> {
    /// Reports, and ends the run if that is wanted.
    fn report(&mut self, stage: &TrainStage) -> Result<()> {
        match (self.progress)(stage) {
            ControlFlow::Continue(()) => Ok(()),
            ControlFlow::Break(()) => Err(CoreError::Cancelled.into()),
        }
    }

    /// The tokens of some windows, one after the other.
    fn text(&self, windows: &[usize]) -> Vec<u32> {
        let window = |&at: &usize| &self.tokens[at * self.context..][..self.context];
        windows.iter().flat_map(window).copied().collect()
    }

    /// Runs the model over windows, before an observer.
    fn watch<O: powerinfer_core::FfnObserver + 'static>(
        &mut self,
        windows: &[usize],
        observer: O,
        stage: impl Fn(usize) -> TrainStage,
    ) -> Result<O> {
        let text = self.text(windows);
        let mut stopped = Ok(());
        let observer = calibrate(self.model, &text, self.context, observer, |_, done| {
            stopped = self.report(&stage(done));
            match stopped {
                Ok(()) => ControlFlow::Continue(()),
                Err(_) => ControlFlow::Break(()),
            }
        })?;
        stopped.map(|()| observer)
    }

    fn survey(&mut self, windows: &Windows) -> Result<Vec<SurveyLayer>> {
        let (n_survey, n_held_out) = (windows.survey.len(), windows.held_out.len());
        let of = (n_survey + n_held_out) * self.context;
        let surveyor = Surveyor::new(self.options.form().input, n_held_out * self.context);
        let surveyor =
            self.watch(&windows.survey, surveyor, |done| TrainStage::Survey { done, of })?;
        let before = n_survey * self.context;
        let surveyor = self.watch(&windows.held_out, surveyor.hold_out(), move |done| {
            TrainStage::Survey { done: before + done, of }
        })?;
        surveyor.finish(self.model.info().n_layers)
    }

    fn factor(&mut self, surveys: &[SurveyLayer]) -> Result<Vec<LowRankGate>> {
        let max_rank = self.most_per_layer(surveys);
        let mut factors = Vec::with_capacity(surveys.len());
        for (layer, survey) in surveys.iter().enumerate() {
            self.report(&TrainStage::Factors { layer, of: surveys.len() })?;
            let weights = &survey.weights;
            // one unit is that of the biases
            let rank = max_rank.saturating_sub(1).max(1);
            factors.push(LowRankGate::new(weights, &survey.moment, rank, self.options.seed)?);
        }
        Ok(factors)
    }

    /// Numbers in the weights of a predictor's unit.
    fn unit_parameters(&self, surveys: &[SurveyLayer]) -> usize {
        let shape = surveys
            .first()
            .map_or((1, 1), |survey| (survey.held_out.d_model(), survey.held_out.d_ff()));
        shape.0 + shape.1 + usize::from(self.options.form() != MlpForm::ORIGINAL)
    }

    /// All ranks together.
    fn rank_budget(&self, surveys: &[SurveyLayer]) -> usize {
        let parameters = self.model.info().n_parameters as f64 * self.options.share_of_model;
        (parameters / self.unit_parameters(surveys) as f64) as usize
    }

    /// The highest rank that a layer is tried at: what twice its share of the budget allows.
    fn most_per_layer(&self, surveys: &[SurveyLayer]) -> usize {
        let share = 2 * self.rank_budget(surveys) / surveys.len().max(1);
        let d_model = surveys.first().map_or(1, |survey| survey.held_out.d_model());
        let share = share.min(d_model);
        (share / RANK_STEP * RANK_STEP).max(RANK_STEP)
    }

    fn ranks(&mut self, surveys: &[SurveyLayer], factors: &[LowRankGate]) -> Result<Vec<usize>> {
        let budget = self.rank_budget(surveys);
        let least = RANK_STEP * surveys.len();
        if budget < least {
            let share = self.options.share_of_model;
            let unit = self.unit_parameters(surveys);
            return Err(Error::Training {
                expected: format!(
                    "room for {} parameters, rank {RANK_STEP} in each layer",
                    least * unit
                ),
                found: format!("{:.0}, {share} of the model", budget * unit),
            });
        }
        let mut curves = Vec::with_capacity(surveys.len());
        for (layer, (survey, factors)) in surveys.iter().zip(factors).enumerate() {
            self.report(&TrainStage::Ranks { layer, of: surveys.len() })?;
            let mut points = Vec::new();
            let n_steps = (self.most_per_layer(surveys) / RANK_STEP).max(1);
            for step in 1..=n_steps {
                let rank = (step * RANK_STEP).min(factors.max_rank());
                let mut weights = factors.weights(rank)?;
                let counts = weights.set_threshold(&survey.held_out, &self.options.target)?;
                points.push((step * RANK_STEP, counts.picked_density()));
            }
            curves.push(RankCurve { density: survey.held_out.density(), points });
        }
        let saves = match self.options.method {
            TrainMethod::Svd => 1.0,
            TrainMethod::Trained => FITTING_SAVES,
        };
        Ok(allocate_ranks(&curves, LISTED_PER_FIRING * saves, budget)?)
    }

    /// What fitting begins with.
    fn first_weights(
        &self,
        surveys: &[SurveyLayer],
        factors: &[LowRankGate],
        ranks: &[usize],
    ) -> Result<Vec<MlpWeights>> {
        let mut all = Vec::with_capacity(ranks.len());
        for (layer, ((survey, factors), &rank)) in
            surveys.iter().zip(factors).zip(ranks).enumerate()
        {
            all.push(match self.options.original {
                true => {
                    let seed = self.options.seed.wrapping_add(layer as u64);
                    MlpWeights::random(&survey.held_out, rank, seed)
                }
                false => factors.weights(rank.min(factors.max_rank()))?,
            });
        }
        Ok(all)
    }

    /// Fits the layers to the text; returns their best weights, the tokens used, and whether those are all.
    fn fit(
        &mut self,
        surveys: &[SurveyLayer],
        windows: &Windows,
        first: Vec<MlpWeights>,
    ) -> Result<(Vec<MlpWeights>, usize, bool)> {
        let options = self.options;
        let per_piece = (options.piece / self.context).max(1);
        let order = shuffled(&windows.fit, options.seed);
        let pieces: Vec<&[usize]> = order.chunks(per_piece).collect();
        let steps_of = |piece: &[usize]| {
            let n_tokens = piece.len() * self.context;
            (n_tokens / options.batch.min(n_tokens).max(1)) as u64
        };
        let n_steps: u64 = pieces.iter().map(|piece| steps_of(piece)).sum();
        let fit_options = FitOptions {
            rate: options.rate,
            batch: options.batch,
            n_steps: n_steps * options.passes as u64,
            seed: options.seed,
            ..FitOptions::default()
        };
        let fits: Result<Vec<LayerFit>> =
            first.into_iter().map(|weights| Ok(LayerFit::new(weights, fit_options)?)).collect();
        let mut state = Checkpoint::new(fits?, options.identity(self.model.info(), self.tokens));
        if let Some(path) = options.checkpoint.as_ref().filter(|path| path.exists()) {
            state.load(path)?;
        } else {
            state.measure(surveys, &options.target)?;
            if let Some(path) = &options.checkpoint {
                state.save(path)?;
            }
        }
        let of = order.len() * self.context;
        while state.n_pieces < pieces.len() && state.n_stale < options.patience {
            let piece = pieces[state.n_pieces];
            let before = state.n_pieces * per_piece * self.context;
            let listed = state.listed_per_firing;
            let collector =
                Collector::new(options.form().input, surveys.len(), piece.len() * self.context);
            let samples = self.watch(piece, collector, move |done| TrainStage::Fit {
                done: before + done,
                of,
                listed_per_firing: listed,
            })?;
            for (fit, samples) in state.fits.iter_mut().zip(samples.finish()?) {
                for _ in 0..options.passes {
                    fit.learn(&samples)?;
                }
            }
            state.n_pieces += 1;
            if state.n_pieces.is_multiple_of(options.measure_every)
                || state.n_pieces == pieces.len()
            {
                state.measure(surveys, &options.target)?;
            }
            if let Some(path) = &options.checkpoint {
                state.save(path)?;
            }
        }
        let n_tokens = (state.n_pieces * per_piece * self.context).min(of);
        Ok((state.best, n_tokens, state.n_pieces == pieces.len()))
    }

    fn described(&self, surveys: &[SurveyLayer]) -> PredictedModel {
        let info = self.model.info();
        let digests = surveys.iter().map(|survey| survey.digest).collect();
        // a threshold in it is the weights' own matter
        let activation = info.activation.split(' ').next().unwrap_or_default();
        PredictedModel::new(&info.architecture, activation, digests)
    }
}

/// The windows in an order that the seed decides.
fn shuffled(windows: &[usize], seed: u64) -> Vec<usize> {
    let mut order = windows.to_vec();
    let mut state = seed ^ 0x5DEE_CE66;
    for last in (1..order.len()).rev() {
        // Knuth's multiplier; the high half is the random one
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let other = ((u128::from(state) * (last as u128 + 1)) >> 64) as usize;
        order.swap(last, other);
    }
    order
}
