//! What of a model lies on a fast device: the part of the builder that says so.

use std::sync::Arc;

use powerinfer_core::{ActivationProfile, Offload, Placement, Plan};
use powerinfer_ops::FastDevice;

use super::EngineBuilder;

impl EngineBuilder {
    /// A device that holds the hot neurons of every feed-forward network and computes them while the
    /// threads of the engine compute the others, and that runs attention and head if it can: a GPU
    /// ([`open_cuda`](crate::open_cuda)) or a [`StandIn`](crate::StandIn). Only for a model folder or file.
    ///
    /// What lies there is what [`placement`](Self::placement) or [`plan`](Self::plan) says, and without
    /// either what [`offload`](Self::offload) does, as much as the device's budget allows; a note of
    /// [`ModelInfo::notes`](crate::ModelInfo::notes) says what came of it. Hot neurons are those that fire most, going by the
    /// profile beside the model (`activation_counts.safetensors` in its folder, or
    /// `NAME.activation_counts.safetensors` beside `NAME.gguf`); without one all count alike, and
    /// a note says so.
    ///
    /// The logits are those of the CPU alone but for rounding. [`StepStats::split`] tells whether the
    /// two sides are balanced.
    ///
    /// # Examples
    /// ```
    /// use std::sync::Arc;
    /// use powerinfer::{Engine, FastDevice, GenerateOptions, StandIn, StandInOptions};
    ///
    /// let device = Arc::new(StandIn::new(StandInOptions::new(4 << 20))?);
    /// let engine = Engine::builder()
    ///     .model("assets/llama-relu-tiny")
    ///     .fast_device(device.clone())
    ///     .build()?;
    /// assert_eq!(engine.info().fast_device.as_deref(), Some("stand-in"));
    /// assert!(device.memory().held_bytes <= 4 << 20);
    ///
    /// let options = GenerateOptions::default().with_max_tokens(3);
    /// let generated = engine.session()?.generate_text("It was a truth", &options)?;
    /// assert_eq!(generated.text, " to be,");
    /// // a quarter to a third of the neurons make most of the activations
    /// assert!(generated.stats.decode.split.hit_rate() > 0.5);
    /// # Ok::<(), powerinfer::Error>(())
    /// ```
    ///
    /// [`StepStats::split`]: crate::StepStats::split
    pub fn fast_device(mut self, device: Arc<dyn FastDevice>) -> Self {
        self.fast_device = Some(device);
        self
    }

    /// What goes to the fast device. The default is [`Offload::Everything`] on a GPU that runs attention and
    /// head, and [`Offload::Neurons`] on one that does not and on a [`StandIn`](crate::StandIn), which is no
    /// faster than the CPU. A placement or a plan goes before it. Only for a model folder or file.
    ///
    /// # Examples
    /// ```
    /// use std::sync::Arc;
    /// use powerinfer::{Engine, Offload, StandIn, StandInOptions};
    ///
    /// let device = Arc::new(StandIn::new(StandInOptions::new(4 << 20))?);
    /// let builder = Engine::builder().model("assets/llama-relu-tiny").fast_device(device);
    /// let memory = builder.offload(Offload::Neurons).estimate()?;
    /// assert!(memory.fast_bytes > 3 << 20);
    /// # Ok::<(), powerinfer::Error>(())
    /// ```
    pub fn offload(mut self, offload: Offload) -> Self {
        self.offload = Some(offload);
        self
    }

    /// Tokens whose keys and values the fast device's budget is to have room for, those of all sessions
    /// taken together, from 1 to as many as the model's longest context has. The default is what the
    /// [`plan`](Self::plan) leaves room for, else [`max_context`](Self::max_context) if that was set, else
    /// 2048; or what the model allows if that is less. A context that outgrows the budget is refused with
    /// [`DeviceContext`](powerinfer_core::Error::DeviceContext).
    pub fn device_context(mut self, n_tokens: usize) -> Self {
        self.device_context = Some(n_tokens);
        self
    }

    /// What lies on the fast device, as a plan says; it is refused if it is that of another model or takes
    /// more than the fast device has. Only for a model folder or file.
    pub fn plan(mut self, plan: Plan) -> Self {
        self.plan = Some(plan);
        self
    }

    /// How often each neuron fires, to choose hot ones by, in place of the profile beside the model.
    /// Only for a model folder or file.
    pub fn profile(mut self, profile: ActivationProfile) -> Self {
        self.profile = Some(profile);
        self
    }

    /// What lies on the fast device, going before a plan. Only for a model folder or file.
    pub fn placement(mut self, placement: Placement) -> Self {
        self.placement = Some(placement);
        self
    }
}
