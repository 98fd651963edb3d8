//! A queue that runs each kernel at once, on the calling thread.

use std::cell::Cell;
use std::ffi::{CStr, CString, c_char, c_void};

use crate::queue::{Arg, Launch, Queue};

type Entry = unsafe extern "C" fn(
    name: *const c_char,
    grid: *const u32,
    block: *const u32,
    shared_bytes: usize,
    args: *mut *mut c_void,
    order: u64,
) -> *const c_char;

/// Declares the functions that `build.rs` compiled, and the list of the planted faults.
macro_rules! mutants {
    ($($variant:ident = $entry:ident, $doc:literal;)*) => {
        unsafe extern "C" {
            $(fn $entry(
                name: *const c_char,
                grid: *const u32,
                block: *const u32,
                shared_bytes: usize,
                args: *mut *mut c_void,
                order: u64,
            ) -> *const c_char;)*
        }

        /// Kernels with a planted fault, to prove that tests see it.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum Mutant {
            $(#[doc = $doc] $variant,)*
        }

        impl Mutant {
            /// Every one.
            pub const ALL: &[Self] = &[$(Self::$variant,)*];

            fn entry(self) -> Entry {
                match self {
                    $(Self::$variant => $entry,)*
                }
            }
        }
    };
}

mutants! {
    None = hostsim_kernels, "The kernels as they are.";
    MatvecGuard = hostsim_sparse_matvec_missing_guard, "Reads past the end of rows and inputs.";
    MatvecReduction = hostsim_sparse_matvec_short_reduction, "Half of a warp is left out of sums.";
    PicksNan = hostsim_sparse_matvec_unpicked_nan, "A score that is no number picks nothing.";
    PicksThreshold = hostsim_sparse_matvec_strict_threshold, "A score must exceed the threshold.";
    AxpyGuard = hostsim_sparse_axpy_missing_guard, "Reads and writes past the last column.";
    AxpyPart = hostsim_sparse_axpy_wrong_part, "A part begins where the one before does.";
    CompactBarrier = hostsim_compact_missing_barrier, "Votes are counted before they are cast.";
    CompactGuard = hostsim_compact_missing_guard, "Entries beyond the last count.";
    CompactTally = hostsim_compact_wrong_tally, "An eighth of the tokens does not count.";
    QuantizeBarrier = hostsim_quantize_missing_barrier, "A sum is read before it is written.";
    QuantizeReduction = hostsim_quantize_short_reduction, "Half of a block decides its scale.";
    EstimateOrder = hostsim_gate_estimate_wrong_order, "Adds blocks in another order than the CPU.";
    NormBarrier = hostsim_norm_missing_barrier, "A sum is read before it is written.";
    ResidualGuard = hostsim_residual_missing_guard, "Adds to what lies behind the last token.";
    TokenNormsBarrier = hostsim_token_norms_missing_barrier, "Squares are added before they are there.";
    RotaryGuard = hostsim_rotary_missing_guard, "Turns what lies behind the last head.";
    AttentionBarrier = hostsim_attention_missing_barrier, "Scores are read before they are written.";
    AttentionReduction = hostsim_attention_short_reduction, "Half of a head is multiplied.";
    AttentionFuture = hostsim_attention_future_seen, "Tokens see those that run beside them.";
    TiledMatvecBarrier = hostsim_tiled_matvec_missing_barrier, "Multiplies what is not there yet.";
    TiledMatvecGuard = hostsim_tiled_matvec_missing_guard, "Writes past the last row of a list.";
    TiledMatvecOrder = hostsim_tiled_matvec_wrong_order, "Adds in another order than for one token.";
    TiledAxpyBarrier = hostsim_tiled_axpy_missing_barrier, "Adds what is not there yet.";
    TiledAxpyGuard = hostsim_tiled_axpy_missing_guard, "Writes past the last column.";
    TiledAxpyGroup = hostsim_tiled_axpy_wrong_group, "A part is added to two groups.";
}

/// Why a kernel did not end as it should.
#[derive(Debug, thiserror::Error)]
#[error("{kernel}: {reason}")]
pub struct LaunchError {
    kernel: String,
    reason: String,
}

/// Runs each kernel when it is appended.
#[derive(Debug)]
pub struct HostQueue {
    order: u64,
    mutant: Mutant,
    launches: Cell<usize>,
}

impl HostQueue {
    /// Threads of a block run in the given order between two barriers: 0 ascending, 1 descending, any
    /// other number a random order that it is the seed of.
    #[must_use]
    pub fn new(order: u64) -> Self {
        Self::of_mutant(Mutant::None, order)
    }

    /// A queue of kernels with a planted fault; other files' kernels are as they should be.
    #[must_use]
    pub fn of_mutant(mutant: Mutant, order: u64) -> Self {
        Self { order, mutant, launches: Cell::new(0) }
    }

    /// Kernels that were run.
    #[must_use]
    pub fn launches(&self) -> usize {
        self.launches.get()
    }
}

impl Queue for HostQueue {
    type Error = LaunchError;

    fn launch(&self, launch: &Launch<'_>) -> Result<(), LaunchError> {
        self.launches.set(self.launches.get() + 1);
        // a mutant is one file, and other kernels are not in it
        match run(self.mutant, self.order, launch) {
            Err(reason) if reason == UNKNOWN && self.mutant != Mutant::None => {
                run(Mutant::None, self.order, launch)
            }
            other => other,
        }
        .map_err(|reason| LaunchError { kernel: launch.kernel.to_owned(), reason })
    }
}

/// What `host.cpp` says of a name that it does not know.
const UNKNOWN: &str = "no kernel of that name";

fn run(mutant: Mutant, order: u64, launch: &Launch<'_>) -> Result<(), String> {
    let mut values: Vec<u64> = launch.args.iter().map(bits_of).collect();
    let mut args: Vec<*mut c_void> =
        values.iter_mut().map(|value| (&raw mut *value).cast()).collect();
    let name = CString::new(launch.kernel).map_err(|error| error.to_string())?;
    let block = [launch.threads, 1, 1];
    // SAFETY: `args` has a parameter for each that the kernel has, and they point at memory that lives
    // while it runs: the sequences under test are held to that, and guards show where they are not.
    let answer = unsafe {
        (mutant.entry())(
            name.as_ptr(),
            launch.grid.as_ptr(),
            block.as_ptr(),
            0,
            args.as_mut_ptr(),
            order,
        )
    };
    if answer.is_null() {
        return Ok(());
    }
    // SAFETY: an answer that is not null is a string literal.
    Err(unsafe { CStr::from_ptr(answer) }.to_string_lossy().into_owned())
}

/// A parameter as its first bytes, which is where a kernel looks.
fn bits_of(arg: &Arg) -> u64 {
    let mut bytes = [0; 8];
    match *arg {
        Arg::Address(address) => bytes = address.0.to_ne_bytes(),
        Arg::Size(size) => bytes = size.to_ne_bytes(),
        Arg::Int(value) => bytes[..4].copy_from_slice(&value.to_ne_bytes()),
        Arg::Float(value) => bytes[..4].copy_from_slice(&value.to_ne_bytes()),
    }
    u64::from_ne_bytes(bytes)
}
