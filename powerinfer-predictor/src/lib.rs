//! Which neurons will fire: predictors, and what they are measured by.
//!
//! A predictor sees what a feed-forward network is about to see, [`FfnInputs`], and lists the
//! neurons worth running, one list a token (PowerInfer, "Adaptive Sparsity Predictors"). Neurons
//! that it leaves out count as not firing; those that it lists in vain cost time only.
//!
//! | predictor | lists | for |
//! |---|---|---|
//! | [`QuantizedGate`] | neurons whose gate product is positive going by 2 to 4 bits a weight | any ReLU model, without training |
//! | [`MlpPredictor`] | neurons that two thin layers score high | the original's predictors, and our own |
//! | [`Oracle`] | the neurons that fire | measuring all others |
//! | [`All`] | every neuron | dense inference along the same path |
//!
//! [`Quality`] tells how far a predictor is from the oracle.
//!
//! # Examples
//! ```
//! use candle_core::{Device, Tensor};
//! use powerinfer_ops::{Activation, ActivationMask, NeuronMatrix, WeightFormat};
//! use powerinfer_predictor::{ActivationPredictor, All, FfnInputs, Oracle, Quality};
//!
//! let gate = NeuronMatrix::from_f32(WeightFormat::F32, 2, 2, &[1., 0., -1., 0.])?;
//! let x = Tensor::new(&[[3f32, 1.]], &Device::Cpu)?;
//! let inputs = FfnInputs { residual: &x, normed: &x };
//!
//! let (mut truth, mut guess) = (Vec::new(), Vec::new());
//! Oracle::new(gate, None, Activation::Relu)?.predict(&inputs, &mut truth)?;
//! All::new(2).predict(&inputs, &mut guess)?;
//! assert_eq!(truth[0].as_slice(), &[0]);
//!
//! let mask = |ids: &[_]| ActivationMask::from_ids(ids, 2);
//! let quality = Quality::measure(&mask(&guess)?, &mask(&truth)?)?;
//! assert_eq!((quality.recall(), quality.precision(), quality.density()), (1.0, 0.5, 1.0));
//! # Ok::<(), powerinfer_predictor::Error>(())
//! ```
//!
//! # Making predictors
//!
//! [`QuantizedGate`] is made of the gate alone. [`LowRankGate`] factors the gate for the inputs that it
//! meets, with no training. [`LayerFit`] trains two layers, from these factors or from nothing, on
//! [`FfnSamples`] of what a layer saw and which of its neurons fired; [`allocate_ranks`] sizes them
//! layer by layer, and [`MlpWeights::set_threshold`] sets their thresholds on text held out. None of
//! it knows a model: `powerinfer-models` runs one and hands on what it did.
//!
//! # Limits
//!
//! Training runs on the CPU.
#![forbid(unsafe_code)]

mod all;
mod dense;
mod error;
mod file;
mod mlp;
mod oracle;
mod quality;
mod quantized;
mod random;
mod svd;
mod train;

use std::fmt;
use std::sync::Arc;

use candle_core::Tensor;
use powerinfer_ops::{NeuronIds, Neurons, RowPredictor};

pub use all::All;
pub use error::{Error, Result};
pub use file::{ModelPredictor, PredictedModel, PredictorFile, gate_digest};
pub use mlp::{MlpForm, MlpHidden, MlpInput, MlpPredictor, MlpWeights, UnknownName};
pub use oracle::Oracle;
pub use quality::Quality;
pub use quantized::QuantizedGate;
pub use svd::{LowRankGate, SecondMoment};
pub use train::{FfnSamples, FitOptions, LayerFit, PredictionTarget, RankCurve, allocate_ranks};

/// What a feed-forward network is about to see, each `[n_tokens, d_model]` f32.
#[derive(Debug, Clone, Copy)]
pub struct FfnInputs<'a> {
    /// The residual stream.
    pub residual: &'a Tensor,
    /// The same after the norm before the network: what gate and up are multiplied with.
    pub normed: &'a Tensor,
}

/// Lists the neurons that will fire.
pub trait ActivationPredictor: fmt::Debug + Send + Sync {
    /// Replaces `picks` by one list of neurons a token.
    ///
    /// # Errors
    /// [`Error::Op`] if the inputs have another shape than the predictor was made for.
    fn predict(&self, inputs: &FfnInputs<'_>, picks: &mut Vec<NeuronIds>) -> Result<()>;

    /// What a network of all the neurons of the layer is to run, so that the predictor's last step is
    /// done by the tasks that go on with what it picks. `hidden` is scratch memory. `None` if there
    /// is no such way, then [`predict`](Self::predict) is asked.
    ///
    /// # Errors
    /// As [`predict`](Self::predict).
    fn fused<'a>(
        &'a self,
        _inputs: &FfnInputs<'_>,
        _hidden: &'a mut Vec<f32>,
    ) -> Result<Option<Neurons<'a>>> {
        Ok(None)
    }

    /// The same predictor for some neurons of the layer, counted anew: it lists exactly those of them
    /// that this one lists. `None` if it cannot be taken apart; then its lists are.
    ///
    /// # Errors
    /// [`Error::Op`] if an id is out of range or memory is short.
    fn restrict(&self, _ids: &NeuronIds) -> Result<Option<Arc<dyn ActivationPredictor>>> {
        Ok(None)
    }

    /// The predictor as a device runs it that holds rows of the same neurons; `None` if it does not
    /// work row by row.
    fn rows(&self) -> Option<RowPredictor<'_>> {
        None
    }

    /// Which kind of predictor this is.
    fn kind(&self) -> PredictorKind;

    /// Bytes of its weights, all of which a token reads.
    fn size_bytes(&self) -> usize {
        0
    }

    /// Of these, the bytes that [`fused`](Self::fused) has read itself.
    fn bytes_before(&self) -> usize {
        0
    }

    /// The predictor in a few words.
    fn describe(&self) -> String {
        self.kind().to_string()
    }
}

/// The kinds of predictors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum PredictorKind {
    /// [`All`].
    All,
    /// [`Oracle`].
    Oracle,
    /// [`QuantizedGate`].
    QuantizedGate,
    /// [`MlpPredictor`].
    Mlp,
}

impl fmt::Display for PredictorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::All => "all",
            Self::Oracle => "oracle",
            Self::QuantizedGate => "quantized gate",
            Self::Mlp => "two layers",
        })
    }
}

/// Makes `picks` as long as there are tokens, all lists empty, keeping their memory.
fn clear_picks(picks: &mut Vec<NeuronIds>, n_tokens: usize) {
    picks.resize_with(n_tokens, NeuronIds::new);
    picks.iter_mut().for_each(NeuronIds::clear);
}
