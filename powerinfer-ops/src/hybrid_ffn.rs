//! A feed-forward network on two executors at once.

use std::time::Instant;

use candle_core::{Device, Tensor};

use crate::error::OpError;
use crate::fast_device::{HeldFfn, HeldNeurons, HeldRun};
use crate::ffn::{FfnCounts, FfnWeights, Neurons, ffn_into, nanoseconds};
use crate::tensor::with_rows;
use crate::workspace::Workspace;

/// What the two sides of a network did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct HybridRun {
    /// What the CPU did.
    pub cold: FfnCounts,
    /// What the fast device did.
    pub hot: HeldRun,
    /// Time that the CPU took for its rows, in nanoseconds.
    pub cold_ns: u64,
    /// Time that the CPU waited for the device after that, the merge included.
    pub wait_ns: u64,
}

/// Computes a feed-forward network whose hot rows lie on a fast device and whose cold rows are
/// `cold` (PowerInfer, "Neuron-aware Hybrid Execution").
///
/// The device's queue is filled first, then the CPU computes its rows, then the two partial outputs
/// are added, the device's to the CPU's: they are the only thing that crosses after the input.
///
/// # Shapes
/// `x` and the result `[n_tokens, d_model]` f32 on the CPU.
/// # Errors
/// As [`ffn`](crate::ffn) for the CPU's side, as [`HeldFfn::start`] and
/// [`PendingFfn::wait`](crate::PendingFfn::wait) for the other.
/// # Examples
/// ```
/// use candle_core::{Device, Tensor};
/// use powerinfer_ops::{
///     Activation, FastDevice, FfnWeights, HeldNeurons, HotRows, NeuronIds, NeuronMatrix, Neurons,
///     StandIn, StandInOptions, WeightFormat, Workspace, ffn, hybrid_ffn,
/// };
/// let m = |values: &[f32]| NeuronMatrix::from_f32(WeightFormat::F32, 2, 2, values);
/// let weights = FfnWeights::new(
///     m(&[1., 0., 0., 1.])?, Some(m(&[0., 1., 0., 1.])?), m(&[1., 1., 5., 5.])?, Activation::Relu)?;
/// let device = StandIn::new(StandInOptions::new(1 << 20))?;
/// let (hot, cold) = (NeuronIds::from_sorted(vec![1])?, NeuronIds::from_sorted(vec![0])?);
/// let held = device.hold(HotRows { weights: &weights, ids: &hot, density: None })?;
/// let (x, workspace) = (Tensor::new(&[[2f32, 3.]], &Device::Cpu)?, &mut Workspace::default());
/// let (whole, _) = ffn(&weights, Neurons::Firing, &x, workspace)?;
/// let (cold, hot) = (weights.pick(&cold)?, (held.as_ref(), HeldNeurons::Firing));
/// let (split, run) = hybrid_ffn((&cold, Neurons::Firing), hot, &x, workspace)?;
/// assert_eq!(split.to_vec2::<f32>()?, whole.to_vec2::<f32>()?);
/// assert_eq!((run.cold.fired, run.hot.counts.fired), (1, 1));
/// # Ok::<(), powerinfer_ops::OpError>(())
/// ```
pub fn hybrid_ffn(
    (cold, cold_neurons): (&FfnWeights, Neurons<'_>),
    (hot, hot_neurons): (&dyn HeldFfn, HeldNeurons<'_>),
    x: &Tensor,
    workspace: &mut Workspace,
) -> Result<(Tensor, HybridRun), OpError> {
    with_rows("hybrid_ffn", "x", x, cold.d_model(), |values| {
        let mut y = vec![0.0; values.len()];
        let pending = hot.start(hot_neurons, values)?;
        let began = Instant::now();
        let cold = ffn_into(cold, cold_neurons, values, workspace, &mut y)?;
        let cold_ns = nanoseconds(began);
        let began = Instant::now();
        let hot = pending.wait(&mut y)?;
        let run = HybridRun { cold, hot, cold_ns, wait_ns: nanoseconds(began) };
        Ok((Tensor::from_vec(y, x.shape(), &Device::Cpu)?, run))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::activation::Activation;
    use crate::fast_device::{FastDevice, HotRows, PendingFfn};
    use crate::format::WeightFormat;
    use crate::mask::NeuronIds;
    use crate::matrix::{NeuronMatrix, SharedBytes};
    use crate::stand_in::{StandIn, StandInOptions};
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::mpsc::{Receiver, Sender, channel};
    use std::sync::{Arc, Mutex};
    use std::thread;
    use std::time::Duration;
    use testing::Seeded;

    const N: usize = 40;
    const D: usize = 16;

    fn weights() -> FfnWeights {
        let m = |seed| {
            let values = Seeded::new(seed).normal(N * D);
            NeuronMatrix::from_f32(WeightFormat::F32, N, D, &values).unwrap()
        };
        FfnWeights::new(m(1), Some(m(2)), m(3), Activation::Relu).unwrap()
    }

    fn x(n_tokens: usize) -> Tensor {
        Tensor::from_vec(Seeded::new(4).normal(n_tokens * D), (n_tokens, D), &Device::Cpu).unwrap()
    }

    /// One end of a meeting: says that it is there, then waits for the other to say so.
    #[derive(Debug)]
    struct Meeting {
        here: Sender<()>,
        there: Mutex<Receiver<()>>,
    }

    impl Meeting {
        fn ends() -> [Arc<Self>; 2] {
            let ((a, from_a), (b, from_b)) = (channel(), channel());
            let end = |here, there| Arc::new(Self { here, there: Mutex::new(there) });
            [end(a, from_b), end(b, from_a)]
        }

        /// Whether the other came.
        fn meet(&self) -> bool {
            let _ = self.here.send(());
            self.there.lock().unwrap().recv_timeout(Duration::from_secs(20)).is_ok()
        }
    }

    /// A device whose thread meets the CPU in the middle of its work.
    #[derive(Debug)]
    struct Met(Arc<Meeting>);

    #[derive(Debug)]
    struct MetWork(thread::JoinHandle<bool>);

    impl HeldFfn for Met {
        fn n_neurons(&self) -> usize {
            N
        }
        fn d_model(&self) -> usize {
            D
        }
        fn size_bytes(&self) -> u64 {
            0
        }
        fn start(&self, _: HeldNeurons<'_>, _: &[f32]) -> Result<Box<dyn PendingFfn>, OpError> {
            let meeting = Arc::clone(&self.0);
            Ok(Box::new(MetWork(thread::spawn(move || meeting.meet()))))
        }
        fn read_back(&self) -> Result<FfnWeights, OpError> {
            Ok(weights())
        }
    }

    impl PendingFfn for MetWork {
        fn wait(self: Box<Self>, _: &mut [f32]) -> Result<HeldRun, OpError> {
            assert!(self.0.join().unwrap(), "the CPU worked while the device did");
            Ok(HeldRun::default())
        }
    }

    /// Rows that meet the device when they are first read after they were armed.
    struct MetRows {
        bytes: Vec<u8>,
        meeting: Arc<Meeting>,
        armed: AtomicBool,
    }

    impl AsRef<[u8]> for MetRows {
        fn as_ref(&self) -> &[u8] {
            if self.armed.swap(false, Ordering::SeqCst) {
                assert!(self.meeting.meet(), "the device worked while the CPU did");
            }
            &self.bytes
        }
    }

    #[test]
    fn both_sides_work_at_once() {
        let [meeting, device] = Meeting::ends();
        let len = N * D * size_of::<f32>();
        let rows = Arc::new(MetRows { bytes: vec![0; len], meeting, armed: false.into() });
        let shared = SharedBytes::new(Arc::clone(&rows) as Arc<_>, 0..len);
        let gate = NeuronMatrix::from_shared(WeightFormat::F32, [N, D], shared, None).unwrap();
        let cold = FfnWeights::new(gate.clone(), None, gate, Activation::Relu).unwrap();
        rows.armed.store(true, Ordering::SeqCst);
        // each side ends only if the other has begun
        let hot: (&dyn HeldFfn, _) = (&Met(device), HeldNeurons::Firing);
        let workspace = &mut Workspace::default();
        hybrid_ffn((&cold, Neurons::Firing), hot, &x(1), workspace).unwrap();
        assert!(!rows.armed.load(Ordering::SeqCst));
    }

    #[test]
    fn any_split_adds_up_to_the_whole() {
        let weights = weights();
        let device = StandIn::new(StandInOptions::new(1 << 20)).unwrap();
        for n_tokens in [1, 3, 40] {
            let x = x(n_tokens);
            let (whole, counts) =
                crate::ffn(&weights, Neurons::Firing, &x, &mut Workspace::default()).unwrap();
            let whole = whole.flatten_all().unwrap().to_vec1::<f32>().unwrap();
            for share in [0.0, 0.3, 1.0] {
                let hot = Seeded::new(9).ids(N, share);
                let cold = (0..N as u32).filter(|id| !hot.contains(id)).collect();
                let [hot, cold] = [hot, cold].map(|ids| NeuronIds::from_sorted(ids).unwrap());
                let rows = HotRows { weights: &weights, ids: &hot, density: None };
                let held = device.hold(rows).unwrap();
                let cold = weights.pick(&cold).unwrap();
                let (hot, workspace) =
                    ((held.as_ref(), HeldNeurons::Firing), &mut Workspace::default());
                let (y, run) = hybrid_ffn((&cold, Neurons::Firing), hot, &x, workspace).unwrap();
                let y = y.flatten_all().unwrap().to_vec1::<f32>().unwrap();
                assert!(testing::tolerance::max_distance(&y, &whole) < 1e-4);
                assert_eq!(run.cold.fired + run.hot.counts.fired, counts.fired);
                // the stand-in takes longer inputs in pieces, and reads a row once for each
                if n_tokens <= 32 {
                    assert_eq!(run.cold.bytes + run.hot.counts.bytes, counts.bytes);
                }
            }
        }
    }

    #[test]
    fn a_device_that_fails_is_an_error() {
        #[derive(Debug)]
        struct Failing(bool);
        #[derive(Debug)]
        struct FailingWork;
        fn failure() -> OpError {
            OpError::DeviceFailed { device: "x".into(), source: "unplugged".into() }
        }
        impl HeldFfn for Failing {
            fn n_neurons(&self) -> usize {
                N
            }
            fn d_model(&self) -> usize {
                D
            }
            fn size_bytes(&self) -> u64 {
                0
            }
            fn start(&self, _: HeldNeurons<'_>, _: &[f32]) -> Result<Box<dyn PendingFfn>, OpError> {
                if self.0 { Err(failure()) } else { Ok(Box::new(FailingWork)) }
            }
            fn read_back(&self) -> Result<FfnWeights, OpError> {
                Err(failure())
            }
        }
        impl PendingFfn for FailingWork {
            fn wait(self: Box<Self>, _: &mut [f32]) -> Result<HeldRun, OpError> {
                Err(failure())
            }
        }
        for at_start in [true, false] {
            let hot = Failing(at_start);
            let hot: (&dyn HeldFfn, _) = (&hot, HeldNeurons::All);
            let workspace = &mut Workspace::default();
            let error = hybrid_ffn((&weights(), Neurons::All), hot, &x(1), workspace).unwrap_err();
            assert!(matches!(error, OpError::DeviceFailed { .. }));
        }
    }
}
