//! Fitting predictors to what a model did, without knowing any model.
//!
//! The parts, which whoever runs a model puts together (`powerinfer-models` has one that does):
//! [`FfnSamples`] holds what a layer saw and gave for a bounded number of tokens, [`LayerFit`] fits two
//! layers to them, [`MlpWeights::set_threshold`] sets the threshold on others, and [`RankCurve`]
//! shares out what parameters there are among the layers (PowerInfer, "Adaptive Sparsity Predictors").

mod layer;
mod rank;
mod samples;
mod threshold;

pub use layer::{FitOptions, LayerFit};
pub use rank::{RankCurve, allocate_ranks};
pub use samples::FfnSamples;
pub use threshold::PredictionTarget;

#[cfg(test)]
mod tests;
