//! Flags that nothing would come of, which are wrong usage.
#![allow(dead_code, reason = "each example uses a part")]

use powerinfer::core::PlannedDevice;
use powerinfer::{FastDevice, Offload, Plan, PredictorSource, StandIn};

use super::super::report::{Outcome, wrong_usage};
use super::{CommonFlags, DeviceFlag, DtypeFlag, HoldingFlag, KvDtypeFlag, SparsityFlag, not_yet};

impl CommonFlags {
    /// An error if nothing of a context lies on the fast device, whatever fits.
    pub(crate) fn check_device_context(
        &self,
        plan: Option<&Plan>,
        device: &dyn FastDevice,
    ) -> Outcome<()> {
        let Some(n_tokens) = self.device_context else { return Ok(()) };
        let on_device =
            |plan: &Plan| plan.layers.iter().any(|layer| layer.attention == PlannedDevice::Fast);
        let neurons_by_default = self.offload().is_none() && device.name() == StandIn::NAME;
        let instead = match plan {
            Some(plan) if !on_device(plan) => "--plan, which puts no attention on the fast device",
            Some(_) => return Ok(()),
            None if self.offload() == Some(Offload::Neurons) => "--offload neurons",
            None if neurons_by_default => {
                "--device hybrid without a GPU unless --offload says more than neurons"
            }
            None => return Ok(()),
        };
        wrong_usage(&format!(
            "--device-context {n_tokens} is for keys and values on the fast device: it does not go with {instead}"
        ))
    }

    /// An error for flags that say what a GGUF file does not, with a model folder.
    pub(crate) fn refuse_what_only_gguf_needs(&self) -> Outcome<()> {
        let is_gguf = self.model.as_ref().is_some_and(|path| !path.is_dir());
        let given = [
            ("--activation", self.activation.is_some()),
            ("--requantise-down", self.requantise_down),
        ];
        match given.into_iter().find(|(_, given)| *given && !is_gguf) {
            Some((flag, _)) => wrong_usage(&format!("{flag} needs a GGUF file in --model")),
            None => Ok(()),
        }
    }

    fn has_trained_predictor(&self) -> bool {
        !matches!(self.predictor, None | Some(PredictorSource::Quantized(_)))
    }

    /// An error for flags of a predictor that would not be asked.
    pub(crate) fn refuse_predictor_flags(&self) -> Outcome<()> {
        if self.predictor_dtype.is_some() && !self.has_trained_predictor() {
            return wrong_usage("--predictor-dtype needs a trained predictor in --predictor");
        }
        let sparsity = match self.sparsity {
            SparsityFlag::Auto | SparsityFlag::Predicted => return Ok(()),
            SparsityFlag::Dense => "dense",
            SparsityFlag::Exact => "exact",
        };
        let given = [
            ("--predictor", self.predictor.is_some()),
            ("--predictor-shift", self.predictor_shift != 0.0),
        ];
        match given.into_iter().find(|(_, given)| *given) {
            Some((flag, _)) => wrong_usage(&format!(
                "{flag} does not go with --sparsity {sparsity}, which asks none"
            )),
            None => Ok(()),
        }
    }

    /// An error for each of these flags that was given: an example has no use for them.
    pub(crate) fn refuse_unused(&self, unused: &[&str]) -> Outcome<()> {
        let given = [
            ("--model", self.model.is_some()),
            ("--holding", self.holding != HoldingFlag::Resident),
            ("--activation", self.activation.is_some()),
            ("--requantise-down", self.requantise_down),
            ("--kv-dtype", self.kv_dtype != KvDtypeFlag::f32),
            ("--dtype", self.dtype != DtypeFlag::auto),
            ("--threads", self.threads.is_some()),
            ("--sparsity", self.sparsity != SparsityFlag::Auto),
            ("--predictor", self.predictor.is_some()),
            ("--predictor-shift", self.predictor_shift != 0.0),
            ("--predictor-dtype", self.predictor_dtype.is_some()),
        ];
        match given.into_iter().find(|(flag, given)| *given && unused.contains(flag)) {
            Some((flag, _)) => wrong_usage(&format!("{flag} changes nothing here")),
            None => Ok(()),
        }
    }

    /// An error for flags that nothing comes of on the CPU alone.
    pub(super) fn refuse_device_flags(&self) -> Outcome<()> {
        let given = [
            ("--vram-budget", self.vram_budget.is_some()),
            ("--plan", self.plan.is_some()),
            ("--offload", self.offload.is_some()),
            ("--device-context", self.device_context.is_some()),
        ];
        match given.into_iter().find(|(_, given)| *given) {
            Some((flag, _)) => wrong_usage(&format!("{flag} needs --device hybrid or cuda")),
            None => Ok(()),
        }
    }

    /// An error for each flag of a fast device, in an example that runs no model on one.
    pub(crate) fn refuse_fast_device(&self) -> Outcome<()> {
        match self.device {
            DeviceFlag::Cpu => self.refuse_device_flags(),
            DeviceFlag::Cuda(n) => not_yet(&format!("--device cuda:{n} here"), "; use cpu"),
            DeviceFlag::Hybrid => not_yet("--device hybrid here", "; use cpu"),
        }
    }
}
