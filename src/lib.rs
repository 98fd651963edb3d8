//! Runs ReLU language models by computing only the neurons that fire.
//!
//! In a feed-forward network with a ReLU most neurons give zero for most tokens, and which ones
//! changes from token to token. PowerInfer finds the neurons that fire and leaves the rest of the
//! weights unread: a gated network of which a tenth fires reads two fifths of its weights and gives
//! the same logits, bit for bit. This crate is the front door: text in, text out.
//!
//! # Load a model and stream text
//!
//! ```
//! use powerinfer::{Engine, GenerateOptions};
//!
//! let engine = Engine::builder().model("assets/llama-relu-tiny").build()?;
//! let mut session = engine.session()?;
//! let mut text = String::new();
//! for piece in session.generate("It was a truth", &GenerateOptions::default().with_max_tokens(12))? {
//!     text.push_str(&piece?.text); // a program prints it
//! }
//! assert_eq!(text, " to be, that she was not in the least to be");
//! # Ok::<(), powerinfer::Error>(())
//! ```
//!
//! A model is a folder in Hugging Face layout: `config.json`, `model.safetensors` (or shards with
//! their index), and `tokenizer.json`. Known architectures: LLaMA, OPT, Falcon.
//!
//! - An [`Engine`] holds the weights, the tokenizer and the threads. Clone it freely: clones share.
//! - A [`Session`] holds one context. Each [`generate`](Session::generate) continues it;
//!   [`reset`](Session::reset) starts afresh.
//! - A [`TextStream`] yields [`Piece`]s of whole characters. Drop it to cancel.
//!
//! ```text
//! EngineBuilder ─build→ Engine ─session→ Session ─generate, chat→ TextStream ─next→ Piece …
//!  folder, dtype,       weights,         keys and values          cancel,            text, ids,
//!  threads, budget      tokenizer,       of one context           stop strings       log-probabilities
//!                       threads             │
//!                                           └─into_stream→ PieceStream: the same for async programs
//! ```
//!
//! # Choose how tokens are drawn
//!
//! The default is greedy. [`Sampling`] has temperature, top-k, top-p, min-p, repetition penalty,
//! logit bias, and a seed for each request: the same seed gives the same text.
//! [`GenerateOptions`] has stop strings, which may span tokens, stop ids and the length.
//!
//! ```
//! use powerinfer::{Engine, FinishReason, GenerateOptions, Sampling};
//!
//! # let engine = Engine::builder().model("assets/llama-relu-tiny").build()?;
//! let options = GenerateOptions::default()
//!     .with_sampling(Sampling::default().with_temperature(0.8).with_top_p(0.9).with_seed(7))
//!     .with_stop([".", "!"])
//!     .with_max_tokens(100);
//! let sentence = engine.session()?.generate_text("Emma was very much surprised", &options)?;
//! assert!(!sentence.text.contains(['.', '!']));
//! # Ok::<(), powerinfer::Error>(())
//! ```
//!
//! [`GenerateOptions::with_logits_hook`] is a say of one's own in what comes next, up to a whole
//! sampler, and [`GenerateOptions::with_logprobs`] gives how likely each token was.
//!
//! # Chat
//!
//! A chat model brings a template that turns messages into a prompt. [`Session::chat`] renders it,
//! keeps what the session has of the conversation already, and streams the answer:
//!
//! ```
//! use powerinfer::{ChatMessage, Engine, GenerateOptions};
//!
//! let engine = Engine::builder().model("assets/llama-relu-tiny").build()?;
//! let mut session = engine.session()?;
//! let options = GenerateOptions::default().with_max_tokens(12);
//! let mut messages = vec![ChatMessage::system("Be brief."), ChatMessage::user("It was a truth")];
//! let answer = session.chat(&messages, &options)?.finish()?;
//! messages.push(ChatMessage::assistant(answer.text));
//! messages.push(ChatMessage::user("And then?"));
//! let second = session.chat(&messages, &options)?.finish()?;
//! assert!(second.cached_tokens > 0);
//! # Ok::<(), powerinfer::Error>(())
//! ```
//!
//! The template is `chat_template.jinja` or `chat_template` of `tokenizer_config.json`, or one given
//! to [`EngineBuilder::chat_template`]; [`ChatTemplate`] renders without an engine, too.
//!
//! # Go back, branch off, reuse
//!
//! [`Session::append`] runs a text and writes nothing, [`Session::truncate`] takes back,
//! [`Session::fork`] makes a second session that shares the past, and [`Session::generate_whole`]
//! takes a whole prompt and runs what the session does not have of it. A prompt that does not fit
//! the context is an error, unless [`ContextPolicy`] says what to forget.
//!
//! # Cancel
//!
//! Drop the stream, or from another thread cancel the [`CancelToken`] that the request or
//! [`EngineBuilder::cancel`] was given: work stops before the next layer or tensor, what was written
//! stays, and the session goes on.
//!
//! ```
//! use powerinfer::{CancelToken, Engine, FinishReason, GenerateOptions};
//!
//! # let engine = Engine::builder().model("assets/llama-relu-tiny").build()?;
//! let cancel = CancelToken::new();
//! let options = GenerateOptions::default().with_cancel(&cancel);
//! std::thread::spawn(move || cancel.cancel()).join().expect("the thread does not panic");
//! let cut = engine.session()?.generate_text("It was a truth", &options)?;
//! assert_eq!(cut.finish_reason, FinishReason::Cancelled);
//! # Ok::<(), powerinfer::Error>(())
//! ```
//!
//! # Stream in async programs
//!
//! [`Session::into_stream`] gives a [`PieceStream`], which is a `futures_core::Stream` on no runtime:
//! a thread of its own runs the request, and any executor can poll it. Dropping it cancels.
//! `examples/server` serves OpenAI's HTTP interface with it.
//!
//! # Choose which neurons run
//!
//! | [`Sparsity`] | gate | up and down | logits |
//! |---|---|---|---|
//! | `Dense` | all neurons | all neurons | the model's |
//! | `Exact` | all neurons | those that fire | the same, bit for bit |
//! | `Predicted` | what a predictor lists | those of it that fire | nearly the model's |
//! | `Auto` | `Exact` where the activation function gives zeros (ReLU), `Dense` elsewhere (SiLU) | | the same |
//!
//! [`EngineBuilder::predictor`] chooses the predictor; without a choice, `Predicted` makes one from
//! the gates themselves ([`predictor::QuantizedGate`]).
//!
//! [`Engine::info`] says what `Auto` came to, and [`GenerationStats`] how many neurons really ran
//! and how many bytes of weights that took. A SiLU model fires everywhere: expect no gain from it.
//!
//! # Choose threads and memory
//!
//! [`EngineBuilder::threads`] sets the worker threads of this engine; nothing computes outside of
//! them but a fast device that it was given, and a text does not depend on how many there are. [`EngineBuilder::dtype`] sets what the
//! weights are held as ([`Dtype`]); they are in memory once, and loading takes at most one tensor
//! beside them.
//!
//! [`EngineBuilder::estimate`] says what a model takes before it is loaded, and
//! [`EngineBuilder::memory_budget`] refuses one that takes more; [`EngineBuilder::max_context`] makes
//! contexts smaller, which are what sessions take memory for:
//!
//! ```
//! use powerinfer::{Engine, Error};
//!
//! let demo = || Engine::builder().model("assets/llama-relu-tiny");
//! let memory = demo().estimate()?;
//! println!("{memory}"); // weights 13.3 MiB, a session of 512 tokens …
//! assert!(memory.total_bytes(4, 512) > memory.weight_bytes);
//! assert!(matches!(demo().memory_budget(1 << 20).build(), Err(Error::OverBudget { .. })));
//! # Ok::<(), powerinfer::Error>(())
//! ```
//!
//! Sessions on one engine may run from several threads at once:
//!
//! ```
//! use powerinfer::{Engine, GenerateOptions};
//!
//! let engine = Engine::builder().model("assets/llama-relu-tiny").threads(2).build()?;
//! let options = GenerateOptions::default().with_max_tokens(8);
//! let texts = std::thread::scope(|scope| {
//!     let tell = |prompt| {
//!         let (engine, options) = (engine.clone(), &options);
//!         scope.spawn(move || engine.session()?.generate_text(prompt, options))
//!     };
//!     let tellers = ["It was a truth", "The captain stood"].map(tell);
//!     tellers.map(|teller| teller.join().expect("the thread does not panic"))
//! });
//! for generated in texts {
//!     assert_eq!(generated?.ids.len(), 8);
//! }
//! # Ok::<(), powerinfer::Error>(())
//! ```
//!
//! # Split the work with a fast device
//!
//! [`EngineBuilder::fast_device`] puts the neurons that fire most on a device and lets it compute them
//! while the CPU computes the others, layer by layer; [`EngineBuilder::offload`] puts attention and head
//! there, too, or the whole model. [`open_cuda`] gives a GPU, in a build that has
//! them; a [`StandIn`] is one made of threads of its own, which come on top of the engine's, to build
//! and test on. The device keeps to its budget, and what it cannot hold is refused while the model
//! is loaded; a device that fails later makes the request an error. The logits are those of the
//! CPU alone but for rounding. [`StepStats::split`] says what each side took and how long the CPU
//! waited, so whether the split is a good one.
//!
//! # Handle errors
//!
//! Everything that can fail returns an [`Error`] that says where, what was expected and what was
//! found; its [`source`](std::error::Error::source)s give the causes. Broken files, impossible
//! prompts and full contexts are errors, never panics. After an error in the middle of a stream
//! the text so far is still there ([`TextStream::text`]; [`Error::Interrupted`] where all was asked
//! for at once) and the session goes on.
//!
//! ```
//! use powerinfer::{Engine, Error, GenerateOptions, core};
//!
//! # let engine = Engine::builder().model("assets/llama-relu-tiny").build()?;
//! let prompt = vec![7; 1000]; // the context of this model is 512
//! let refused = engine.session()?.generate_text(prompt, &GenerateOptions::default());
//! assert!(matches!(
//!     refused,
//!     Err(Error::Core(core::Error::ContextExceeded { requested: 1000, max: 512, .. }))
//! ));
//! # Ok::<(), powerinfer::Error>(())
//! ```
//!
//! # Bring a model of your own
//!
//! Anything that turns token ids into logits is a [`CausalLm`] and enters by
//! [`EngineBuilder::causal_lm`]; streaming, sampling, stop strings and statistics come with it.
//! The page of [`core`] has a complete one in forty lines, [`models::layers`] has the layers to
//! build a real one from, and `examples/own_architecture.rs` does so. The operators themselves are
//! in [`ops`].
//!
//! # Features
//!
//! - `cuda` (off): NVIDIA GPUs hold the hot rows of feed-forward networks. It needs CUDA's compiler. The
//!   interface is the same without it: asking for such a device is an error. Nothing has run on a
//!   GPU yet.
//!
//! # Platforms and limits
//!
//! Tested on Linux x86-64, with AVX2 and AVX-512 kernels chosen at run time and portable code
//! where neither is there. Weights are f32, f16 and bf16 from safetensors, or those of a GGUF file,
//! plain or PowerInfer's, held as they are or as Q8_0 or Q4_0; no GPU yet. The library prints nothing, reads no environment variable
//! and opens no socket. (The tokenizer library panics over some broken files; the panic is caught
//! and becomes an error, but Rust's panic hook may print it first.)
#![cfg_attr(docsrs, feature(doc_cfg))]
#![forbid(unsafe_code)]

mod chat;
mod engine;
mod error;
mod options;
mod piece_stream;
mod session;
mod stream;
mod text;

pub use chat::{ChatMessage, ChatOptions, ChatTemplate};
pub use engine::{Engine, EngineBuilder};
pub use error::{Error, Result};
pub use options::{ContextPolicy, Dtype, GenerateOptions, Prompt};
pub use piece_stream::PieceStream;
pub use session::{Logits, Session};
pub use stream::{FinishReason, Generated, Piece, TextStream};
pub use text::{Tokenizer, tokenizer_keys};

pub use powerinfer_ops::attention::KvDtype;
pub use powerinfer_ops::{
    DeviceMemory, FastDevice, LowBitFormat, ModelledSpeed, StandIn, StandInFailure, StandInOptions,
    open_cuda,
};

pub use powerinfer_core::{
    ActivationProfile, CancelToken, CausalLm, GenerationStats, LogitsHook, ModelInfo, Offload,
    Placement, Plan, PredictionCounts, Sampling, Sparsity, SplitStats, StepStats, TokenLogprobs,
};

pub use powerinfer_models::{MemoryEstimate, PredictorOptions, PredictorSource};

/// The crates below this one, for models and operators of one's own. Their types change faster
/// than those of this crate.
#[doc(inline)]
pub use {
    powerinfer_core as core, powerinfer_models as models, powerinfer_ops as ops,
    powerinfer_predictor as predictor,
};

/// The programs in README.md, compiled and run with the tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
