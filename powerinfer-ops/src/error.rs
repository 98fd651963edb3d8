//! The one error type of this crate.

use candle_core::DType;

/// What can be wrong with the arguments of an operator.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpError {
    /// Two operands disagree on a dimension.
    #[error("{op}: {what} has shape {found:?}, expected {expected:?}")]
    Shape {
        /// The operator that was called.
        op: &'static str,
        /// The operand that is wrong.
        what: &'static str,
        /// The shape that the other operands ask for.
        expected: Vec<usize>,
        /// The shape that was given.
        found: Vec<usize>,
    },
    /// An activation tensor does not hold f32.
    #[error("{op}: {what} is {found:?}, expected {expected:?}")]
    Dtype {
        /// The operator that was called.
        op: &'static str,
        /// The operand that is wrong.
        what: &'static str,
        /// The only type that is accepted.
        expected: DType,
        /// The type that was given.
        found: DType,
    },
    /// An operand lies on another device than the weights.
    #[error("{op}: {what} lies on {found}, expected {expected}")]
    Device {
        /// The operator that was called.
        op: &'static str,
        /// The operand that is wrong.
        what: &'static str,
        /// Where the weights are.
        expected: &'static str,
        /// Where the operand is.
        found: String,
    },
    /// An operand is strided; operators read rows as slices.
    #[error("{op}: {what} is not contiguous (strides {strides:?}); call .contiguous() first")]
    NotContiguous {
        /// The operator that was called.
        op: &'static str,
        /// The operand that is wrong.
        what: &'static str,
        /// Its strides, in elements.
        strides: Vec<usize>,
    },
    /// A neuron or token id beyond the rows of a matrix.
    #[error("{op}: id {id} is out of range, the matrix has {n_rows} rows")]
    IdOutOfRange {
        /// The operator that was called.
        op: &'static str,
        /// The id that was given.
        id: u32,
        /// Rows of the matrix.
        n_rows: usize,
    },
    /// A list of neuron ids is not strictly ascending.
    #[error("neuron ids must be strictly ascending: {id} follows {previous} at index {index}")]
    IdsNotAscending {
        /// Index of the offending id.
        index: usize,
        /// The id before it.
        previous: u32,
        /// The offending id.
        id: u32,
    },
    /// A row length that the format cannot hold.
    #[error("{format} rows hold a multiple of {block_len} values, found {n_columns}")]
    RowLength {
        /// Name of the weight format.
        format: &'static str,
        /// Values in a block of that format.
        block_len: usize,
        /// Values that a row should hold.
        n_columns: usize,
    },
    /// A product of sizes does not fit the address space.
    #[error("a matrix of {n_rows} rows of {row_bytes} bytes does not fit the address space")]
    TooLarge {
        /// Rows of the matrix.
        n_rows: usize,
        /// Bytes of a row.
        row_bytes: usize,
    },
    /// A buffer of weights has another length than its shape says.
    #[error("{what} holds {found} bytes, expected {expected}")]
    ByteLength {
        /// What was given.
        what: &'static str,
        /// Bytes that shape and format ask for.
        expected: usize,
        /// Bytes that were given.
        found: usize,
    },
    /// The system did not give the memory for a matrix.
    #[error("cannot allocate {bytes} bytes for weights")]
    Allocation {
        /// Bytes that were asked for.
        bytes: usize,
        /// The system's answer.
        #[source]
        source: std::io::Error,
    },
    /// An activation function that no operator computes.
    #[error("unknown activation {found:?}, supported: {supported}")]
    UnknownActivation {
        /// The name that was given.
        found: String,
        /// The names that are known.
        supported: &'static str,
    },
    /// A weight format that no operator computes.
    #[error("unknown weight format {found:?}, supported: {supported}")]
    UnknownFormat {
        /// The name that was given.
        found: String,
        /// The names that are known.
        supported: &'static str,
    },
    /// A type that no key-value cache holds.
    #[error("unknown type of a key-value cache {found:?}, supported: {supported}")]
    UnknownKvDtype {
        /// The name that was given.
        found: String,
        /// The names that are known.
        supported: &'static str,
    },
    /// Neurons can only be left out when the activation is zero for most of them.
    #[error("{activation} fires for every neuron, so there is nothing to skip")]
    NotSparse {
        /// The activation of the layer.
        activation: &'static str,
    },
    /// A down projection is stored by output, in blocks that run across neurons, so that no neuron
    /// of it can be picked.
    #[error("{op}: down is stored by output, its neurons cannot be picked")]
    DownByOutput {
        /// The operator that was called.
        op: &'static str,
    },
    /// More worker threads than make sense.
    #[error("expected at most {max} worker threads, found {found}")]
    ThreadCount {
        /// Threads that were asked for.
        found: usize,
        /// The most there can be.
        max: usize,
    },
    /// The worker threads could not be started.
    #[error("cannot start {n_threads} worker threads")]
    ThreadPool {
        /// Threads that were asked for.
        n_threads: usize,
        /// The cause.
        #[source]
        source: rayon::ThreadPoolBuildError,
    },
    /// A fast device has no room for what it was to hold.
    #[error(
        "{device} is asked for {asked_bytes} bytes and holds {held_bytes}, its budget is {budget_bytes}"
    )]
    DeviceBudget {
        /// Name of the device.
        device: String,
        /// Bytes that were asked for.
        asked_bytes: u64,
        /// Bytes that it holds.
        held_bytes: u64,
        /// Bytes that it may hold.
        budget_bytes: u64,
    },
    /// A fast device failed or is gone.
    #[error("{device} failed")]
    DeviceFailed {
        /// Name of the device.
        device: String,
        /// The cause.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A fast device was to run a predictor whose rows it does not hold.
    #[error("{device} does not hold the rows of a predictor")]
    NoHeldPredictor {
        /// Name of the device.
        device: String,
    },
    /// A fast device was to run norms, attention or a head, and only runs networks.
    #[error("{device} runs feed-forward networks only")]
    NoDenseParts {
        /// Name of the device.
        device: String,
    },
    /// A part that one device holds was to run on a sequence of another.
    #[error("the part is on {device}, the sequence is not")]
    ForeignSequence {
        /// Name of the part's device.
        device: String,
    },
    /// A device that this build was made without.
    #[error("{device} needs a build with the feature `{feature}`")]
    FeatureOff {
        /// Name of the device.
        device: String,
        /// The feature that is off.
        feature: &'static str,
    },
    /// candle refused an operation.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
}

impl OpError {
    /// Fails with [`OpError::Shape`] unless `found` is what was expected.
    pub(crate) fn check_shape(
        op: &'static str,
        what: &'static str,
        expected: &[usize],
        found: &[usize],
    ) -> Result<(), Self> {
        crate::check::check_shape(op, what, expected, found)
    }
}
