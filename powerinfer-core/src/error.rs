//! The one error type of this crate.

use std::path::PathBuf;

use powerinfer_ops::OpError;

/// The result of everything in this crate that can fail.
pub type Result<T> = std::result::Result<T, Error>;

/// What can go wrong between the files of a model and its tokens: a variant a cause, with what
/// was expected, what was found, and where.
///
/// Broken files and impossible requests always end here and never in a panic.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An operator refused its operands.
    #[error(transparent)]
    Op(#[from] OpError),
    /// candle refused an operation.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
    /// A model of one's own failed; wrap its error in this variant to return it from
    /// [`CausalLm::forward`](crate::CausalLm::forward).
    #[error(transparent)]
    Model(Box<dyn std::error::Error + Send + Sync>),
    /// The system did not give the memory.
    #[error("cannot allocate {bytes} bytes for {what}")]
    Allocation {
        /// What the memory is for.
        what: &'static str,
        /// Bytes that were asked for, saturated.
        bytes: usize,
    },

    /// A pass was to run what a predictor picks, and the model has no predictor.
    #[error("sparsity `predicted` needs a predictor, and the model was loaded without one")]
    NoPredictor,

    /// A folder of predictors has a file for a layer that the model does not have.
    #[error("{path}: the model has {n_layers} layers, so this predictor is that of another")]
    PredictorLayers {
        /// The file.
        path: PathBuf,
        /// Layers of the model.
        n_layers: usize,
    },

    /// A predictor in a model's file has thresholds for another number of layers.
    #[error("expected one threshold or one for each of {n_layers} layers, found {found}")]
    PredictorThresholds {
        /// Thresholds that there are.
        found: usize,
        /// Layers of the model.
        n_layers: usize,
    },
    /// A field of a predictor's file is missing, broken, or that of another model.
    #[error("{path}: {field}: expected {expected}, found {found}")]
    PredictorField {
        /// The file.
        path: PathBuf,
        /// The field.
        field: &'static str,
        /// What it should say.
        expected: String,
        /// What it says.
        found: String,
    },
    /// A profile is that of another model.
    #[error("profile: expected {what} {expected}, found {found}")]
    ProfileMismatch {
        /// What differs.
        what: &'static str,
        /// What the model has.
        expected: String,
        /// What the profile has.
        found: String,
    },
    /// A profile holds a number that cannot be: negative, no number, or more often than there were
    /// tokens.
    #[error("{path}: {what} holds {found}")]
    ProfileValue {
        /// The file.
        path: PathBuf,
        /// The tensor.
        what: &'static str,
        /// The number.
        found: String,
    },
    /// A folder of the original's statistics does not have one file a layer.
    #[error("{path}: expected one activation_N.pt for each layer, found {what} for layer {layer}")]
    ProfileFolder {
        /// The folder.
        path: PathBuf,
        /// The layer.
        layer: usize,
        /// What there is for it.
        what: String,
    },

    /// A file could not be opened or read.
    #[error("{path}: cannot be read")]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's answer.
        #[source]
        source: std::io::Error,
    },
    /// A file could not be written.
    #[error("{path}: cannot be written")]
    Write {
        /// The file.
        path: PathBuf,
        /// The system's answer.
        #[source]
        source: std::io::Error,
    },
    /// A JSON file is longer than any real one, or a PyTorch file than the caller allowed, so it is
    /// not read.
    #[error("{path}: expected at most {max_bytes} bytes, found {found_bytes}")]
    FileTooLong {
        /// The file.
        path: PathBuf,
        /// The longest that is read.
        max_bytes: u64,
        /// Its length.
        found_bytes: u64,
    },
    /// A weight file is shorter or longer than its header says: cut short, or not what it claims.
    #[error("{path}: the header asks for a file of {expected} bytes, found {found}")]
    FileLength {
        /// The file.
        path: PathBuf,
        /// Bytes that the file must have.
        expected: u64,
        /// Bytes that it has.
        found: u64,
    },
    /// The header of a weight file is longer than the format allows.
    #[error("{path}: expected a header of at most {max_bytes} bytes, found {found_bytes}")]
    HeaderTooLong {
        /// The file.
        path: PathBuf,
        /// The limit of the format.
        max_bytes: u64,
        /// The length that the file states.
        found_bytes: u64,
    },
    /// Not JSON, a key that comes twice, or JSON of another form than the file should have.
    #[error("{path}: broken JSON")]
    Json {
        /// The file.
        path: PathBuf,
        /// Line, column and cause; it names the key where there is one.
        #[source]
        source: serde_json::Error,
    },
    /// The header of a weight file contradicts itself.
    #[error("{path}: broken safetensors header")]
    Safetensors {
        /// The file.
        path: PathBuf,
        /// What the check found.
        #[source]
        source: safetensors::SafeTensorError,
    },
    /// A PyTorch file is not the archive of tensors that it should be.
    #[error("{path}: {what}")]
    PyTorch {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        what: &'static str,
        /// What the reader found, where it was the reader that failed.
        #[source]
        source: Option<Box<dyn std::error::Error + Send + Sync>>,
    },

    /// A file that should be GGUF begins with other bytes.
    #[error("{path}: expected a file that begins with GGUF or PWRI, found {:?}", .found.escape_ascii().to_string())]
    NotGguf {
        /// The file.
        path: PathBuf,
        /// What it begins with.
        found: [u8; 4],
    },
    /// A GGUF file of a version that is not read. Version 3 with its bytes in big-endian order shows
    /// as 50331648.
    #[error("{path}: expected GGUF version 2 or 3 in little-endian order, found {found}")]
    GgufVersion {
        /// The file.
        path: PathBuf,
        /// The version that it states.
        found: u32,
    },
    /// The header of a GGUF file contradicts itself, the file or the format.
    #[error("{path}: {field}: expected {expected}, found {found}")]
    GgufHeader {
        /// The file.
        path: PathBuf,
        /// What the number belongs to: a count, a key, a tensor.
        field: String,
        /// What would have been right.
        expected: String,
        /// What is there.
        found: String,
    },
    /// Two tensors share bytes.
    #[error("{path}: tensor `{second}` overlaps tensor `{first}`")]
    TensorOverlap {
        /// The file.
        path: PathBuf,
        /// The tensor that begins first.
        first: String,
        /// The other.
        second: String,
    },
    /// A key of a GGUF file is missing, has the wrong type, lies outside its range, contradicts
    /// another or asks for something that is not supported.
    #[error("{path}: key `{key}`: expected {expected}, found {found}")]
    Metadata {
        /// The file.
        path: PathBuf,
        /// The key.
        key: String,
        /// What would have been right.
        expected: String,
        /// What is there, or `nothing`.
        found: String,
    },

    /// A field of a configuration is missing, has the wrong type, lies outside its range,
    /// contradicts another or asks for something that is not supported.
    #[error("{path}: field `{field}`: expected {expected}, found {found}")]
    Config {
        /// The file.
        path: PathBuf,
        /// The field, nested ones with a dot: `rope_scaling.factor`.
        field: String,
        /// What would have been right.
        expected: String,
        /// What is there, as JSON, or `nothing`.
        found: String,
    },
    /// The configuration is that of another architecture.
    #[error("{path}: unknown model_type {found:?}, supported: {supported}")]
    UnknownModelType {
        /// The file.
        path: PathBuf,
        /// The name in the file.
        found: String,
        /// The names that are known, separated by commas.
        supported: String,
    },
    /// The feed-forward network uses an activation function that no operator computes.
    #[error("{path}: unknown {field} {found:?}, supported: {supported}")]
    UnknownActivation {
        /// The file.
        path: PathBuf,
        /// The field that names it, which differs between architectures.
        field: &'static str,
        /// The name in the file.
        found: String,
        /// The names that are known, separated by commas.
        supported: &'static str,
    },
    /// The rotary embedding is scaled in a way that is not known. Guessing would give text that
    /// degrades only when it gets long.
    #[error("{path}: unknown rope_type {found:?}, supported: {supported}")]
    UnknownRopeType {
        /// The file.
        path: PathBuf,
        /// The name in the file.
        found: String,
        /// The names that are known, separated by commas.
        supported: &'static str,
    },

    /// A folder holds no weights in a form that is read; PyTorch files are one only where the
    /// caller asked for them.
    #[error(
        "{path}: neither model.safetensors nor model.safetensors.index.json is there\
         {}", if *.pytorch { "; pytorch_model.bin is, and is read on request only" } else { "" }
    )]
    NoWeights {
        /// The folder.
        path: PathBuf,
        /// Whether PyTorch files are there.
        pytorch: bool,
    },
    /// The shard index, or the count of a split GGUF file, names a file that is not there.
    #[error("{path}: shard {shard:?} is not there")]
    MissingShard {
        /// The index, or the shard that was opened.
        path: PathBuf,
        /// The name in the index.
        shard: String,
    },
    /// The shard index names something else than a file beside it.
    #[error("{path}: shard {shard:?} is not a plain file name")]
    ShardName {
        /// The index.
        path: PathBuf,
        /// The name in the index.
        shard: String,
    },
    /// A tensor that the model needs, or that the shard index promises, is not in the file.
    #[error("{path}: tensor `{name}` is missing")]
    MissingTensor {
        /// The file that should hold it.
        path: PathBuf,
        /// The tensor.
        name: String,
    },
    /// A shard holds a tensor that the shard index does not know.
    #[error("{path}: tensor `{name}` is not in the shard index")]
    UnlistedTensor {
        /// The shard.
        path: PathBuf,
        /// The tensor.
        name: String,
    },
    /// Two shards hold a tensor of the same name.
    #[error("{second}: tensor `{name}` is also in {first}")]
    DuplicateTensor {
        /// The tensor.
        name: String,
        /// The shard that was read first.
        first: PathBuf,
        /// The shard that was read after it.
        second: PathBuf,
    },
    /// A tensor has another shape than the configuration asks for.
    #[error("{path}: tensor `{name}`: expected shape {expected:?}, found {found:?}")]
    TensorShape {
        /// The file.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// The shape that the configuration asks for, as the file should state it.
        expected: Vec<usize>,
        /// The shape in the file.
        found: Vec<usize>,
    },
    /// A tensor is stored in a type that weights cannot be read from.
    #[error("{path}: tensor `{name}`: expected one of {expected}, found {found}")]
    TensorDtype {
        /// The file.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// The types that are read, separated by commas.
        expected: &'static str,
        /// The type in the file.
        found: String,
    },
    /// A number in a tensor cannot be computed with.
    #[error("{path}: tensor `{name}`: expected {expected}, found {found}")]
    TensorValue {
        /// The file.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// What would have been right.
        expected: &'static str,
        /// A number that is there.
        found: f32,
    },
    /// A tensor cannot be held in the format that was asked for.
    #[error("{path}: tensor `{name}`: {source}")]
    TensorFormat {
        /// The file.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// What the format asks for.
        source: Box<OpError>,
    },
    /// The blocks of a quantised tensor run across neurons, so that no neuron's part of it can be
    /// taken alone.
    #[error(
        "{path}: tensor `{name}`: blocks of {format} run across neurons, so they cannot be split \
         into shards; ask for it to be quantised anew by neuron"
    )]
    AcrossNeurons {
        /// The file.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// Its type.
        format: &'static str,
    },
    /// A read would leave the bytes of its tensor.
    #[error("{path}: tensor `{name}` has {size} bytes, cannot read {len} at {offset}")]
    TensorRange {
        /// The file.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// First byte asked for, counted from the start of the tensor.
        offset: u64,
        /// Bytes asked for.
        len: u64,
        /// Bytes of the tensor.
        size: u64,
    },
    /// The file holds tensors that the architecture does not use, so it is not the model that
    /// its configuration claims.
    #[error("{path}: {} tensors are not part of the model: {}", .names.len(), listed(.names))]
    LeftoverTensors {
        /// The file or the shard index.
        path: PathBuf,
        /// The tensors, sorted.
        names: Vec<String>,
    },

    /// The tokens do not fit the context.
    #[error("the context holds {max} tokens: {have} are used, {requested} more do not fit")]
    ContextExceeded {
        /// Tokens in the cache.
        have: usize,
        /// Tokens that were to be added.
        requested: usize,
        /// Tokens that fit.
        max: usize,
    },
    /// The keys and values of a context have outgrown the budget of the fast device that they lie on.
    #[error(
        "a context of {n_tokens} tokens outgrows the fast device: set `device_context` to as many as all \
         sessions at once have together, so that the budget leaves room for them, or give it a larger \
         budget"
    )]
    DeviceContext {
        /// Tokens that the context was to have.
        n_tokens: usize,
        /// What the device says.
        source: powerinfer_ops::OpError,
    },
    /// More room is asked for on a fast device than a context can take, or none.
    #[error(
        "device_context: expected 1 to {max_context} tokens, the longest context, found {found}"
    )]
    DeviceContextRange {
        /// Tokens of the model's longest context.
        max_context: usize,
        /// Tokens that were asked for.
        found: usize,
    },
    /// Keys or values for the cache have another size than its shape says.
    #[error("kv cache: {what}: expected {expected}, found {found}")]
    CacheShape {
        /// What is wrong.
        what: &'static str,
        /// The size that the cache asks for; for a layer, the number of layers it must be below.
        expected: usize,
        /// The size that was given.
        found: usize,
    },
    /// The cache holds another number of tokens than the history lists, or than a forward pass
    /// should have left in it.
    #[error("kv cache: expected {expected} tokens in it, found {found}")]
    CacheLength {
        /// Tokens that should be there.
        expected: usize,
        /// Tokens that are there.
        found: usize,
    },
    /// A model wrote another number of logits than was asked for.
    #[error("the model gave {found} logits, expected {expected}")]
    LogitsLength {
        /// Rows wanted × vocabulary.
        expected: usize,
        /// Logits that came.
        found: usize,
    },
    /// A placement is that of another model.
    #[error("placement: expected {expected} {what}, found {found}")]
    PlacementShape {
        /// What differs.
        what: &'static str,
        /// How many the model has.
        expected: usize,
        /// How many the placement has.
        found: usize,
    },
    /// A plan is that of another model.
    #[error("plan: expected {what} {expected}, found {found}")]
    PlanMismatch {
        /// What differs.
        what: &'static str,
        /// What the model has.
        expected: String,
        /// What the plan has.
        found: String,
    },
    /// A plan was made from another profile than the one given.
    #[error("plan: expected one of the profile {expected}, found one of {found}; plan anew")]
    PlanStale {
        /// Digest of the profile.
        expected: String,
        /// Digest in the plan.
        found: String,
    },
    /// A plan asks for more memory than there is.
    #[error("plan: {device}: expected at most {budget_bytes} bytes, found {needed_bytes}")]
    PlanOverBudget {
        /// Whose memory it is.
        device: &'static str,
        /// Bytes that are asked for.
        needed_bytes: u64,
        /// Bytes that there are.
        budget_bytes: u64,
    },
    /// A description of hardware that does not exist.
    #[error("unknown hardware {found:?}, expected a file or one of {supported}")]
    UnknownHardware {
        /// The name that was given.
        found: String,
        /// The names that are known, separated by commas.
        supported: String,
    },
    /// There is nothing to continue.
    #[error("the prompt is empty, expected at least one token")]
    EmptyPrompt,
    /// A token id that the vocabulary does not have.
    #[error("token id {token} is out of range, the vocabulary has {vocab_size} tokens")]
    TokenOutOfRange {
        /// The id.
        token: u32,
        /// Ids below this exist.
        vocab_size: usize,
    },
    /// Logits that no token can be chosen from: NaN or +∞ among them, or none above −∞. A layer
    /// that gives a NaN or an infinity ends the pass at once, as no logits could come of it.
    #[error(
        "the logits after position {position} are not finite{}",
        .layer.map_or(String::new(), |layer| format!(", from layer {layer} on"))
    )]
    NonFiniteLogits {
        /// Position in the context of the token that the logits follow.
        position: usize,
        /// The first layer whose output is not finite; `None` if all layers' were, or if the model
        /// does not say.
        layer: Option<usize>,
    },
    /// Somebody cancelled the [`CancelToken`](crate::CancelToken) of this work.
    #[error("cancelled")]
    Cancelled,
    /// A sampling setting outside its range.
    #[error("sampling: {field}: expected {expected}, found {found}")]
    InvalidSampling {
        /// The setting.
        field: &'static str,
        /// Its range.
        expected: &'static str,
        /// The value that was given.
        found: String,
    },
    /// A sparsity mode that does not exist.
    #[error("unknown sparsity {found:?}, supported: {supported}")]
    UnknownSparsity {
        /// The name that was given.
        found: String,
        /// The names that are known, separated by commas.
        supported: &'static str,
    },
    /// There is no such way to choose what goes to a fast device.
    #[error("unknown offload {found:?}, supported: {supported}")]
    UnknownOffload {
        /// The name that was given.
        found: String,
        /// The names there are, separated by commas.
        supported: &'static str,
    },
}

/// How many names an error message lists before it only counts them.
const LISTED: usize = 8;

fn listed(names: &[String]) -> String {
    let mut text = names[..names.len().min(LISTED)].join(", ");
    if names.len() > LISTED {
        text.push_str(", …");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_travel_between_threads_and_stay_small() {
        fn check<T: std::error::Error + Send + Sync + 'static>() {}
        check::<Error>();
        assert!(size_of::<Error>() <= 128, "{} bytes", size_of::<Error>());
    }

    #[test]
    fn text_says_where_what_was_expected_and_what_was_found() {
        let error = Error::TensorShape {
            path: "m/model.safetensors".into(),
            name: "lm_head.weight".to_owned(),
            expected: vec![160, 32],
            found: vec![160, 40],
        };
        assert_eq!(
            error.to_string(),
            "m/model.safetensors: tensor `lm_head.weight`: expected shape [160, 32], found [160, 40]"
        );
    }

    #[test]
    fn a_long_list_of_leftovers_is_cut() {
        let names = (0..20).map(|i| format!("t{i}")).collect();
        let text = Error::LeftoverTensors { path: "m".into(), names }.to_string();
        assert_eq!(
            text,
            "m: 20 tensors are not part of the model: t0, t1, t2, t3, t4, t5, t6, t7, …"
        );
    }
}
