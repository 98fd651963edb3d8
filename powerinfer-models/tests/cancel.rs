//! A pass that is cancelled runs no further layer and leaves the cache as it was.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use powerinfer_core::{
    CancelToken, CausalLm, Error, ModelConfig, ModelInfo, Sparsity, Step, WeightStore,
};
use powerinfer_models::layers::{
    Attention, AttentionHeads, Block, BlockNorms, Decoder, Embedding, FfnTensors, Head, Position,
    Projections,
};
use powerinfer_models::{LoadOptions, Loader, load};
use powerinfer_ops::NeuronIds;
use powerinfer_predictor::{ActivationPredictor, FfnInputs, PredictorKind, Result};
use testing::Fixture;

/// Picks every neuron, and cancels when it has been asked `cancel_at` times, as another thread might.
#[derive(Debug)]
struct CancelsInTheMiddle {
    token: CancelToken,
    asked: AtomicUsize,
    cancel_at: usize,
    d_ff: u32,
}

impl ActivationPredictor for CancelsInTheMiddle {
    fn predict(&self, inputs: &FfnInputs<'_>, picks: &mut Vec<NeuronIds>) -> Result<()> {
        if self.asked.fetch_add(1, Ordering::Relaxed) + 1 == self.cancel_at {
            self.token.cancel();
        }
        let all = NeuronIds::from_sorted((0..self.d_ff).collect())?;
        picks.clear();
        picks.resize(inputs.normed.dim(0).unwrap(), all);
        Ok(())
    }

    fn kind(&self) -> PredictorKind {
        PredictorKind::All
    }
}

/// The demo model, whose layers ask `predictor`.
fn model(predictor: &Arc<CancelsInTheMiddle>, config: &ModelConfig) -> Decoder {
    let mut store = WeightStore::open(&Fixture::demo().model_dir).unwrap();
    let loader = &mut Loader::new(&mut store, None, None);
    let (d_model, eps) = (config.d_model, config.norm_eps);
    let table = loader.matrix("model.embed_tokens.weight", config.vocab_size, d_model).unwrap();
    let embedding = Embedding::new(table);
    let heads = AttentionHeads::new(config.n_heads, config.n_kv_heads, config.d_head);
    let blocks = (0..config.n_layers).map(|layer| {
        let name = |part: &str| format!("model.layers.{layer}.{part}");
        let mut linear =
            |part: &str, n_out, n_in| loader.linear(&name(part), n_out, n_in, false).unwrap();
        let projections = Projections {
            query: linear("self_attn.q_proj", heads.query_width(), d_model),
            key: linear("self_attn.k_proj", heads.kv_width(), d_model),
            value: linear("self_attn.v_proj", heads.kv_width(), d_model),
            output: linear("self_attn.o_proj", d_model, heads.query_width()),
        };
        let mut norm = |part: &str| loader.rms_norm(&name(part), d_model, eps).unwrap().into();
        let norms = BlockNorms::Before {
            attention: norm("input_layernorm"),
            ffn: norm("post_attention_layernorm"),
        };
        let tensors = FfnTensors {
            gate: &name("mlp.gate_proj"),
            up: Some(&name("mlp.up_proj")),
            down: &name("mlp.down_proj"),
            d_ff: config.d_ff,
            d_model,
            bias: false,
            activation: config.activation,
            up_activation: None,
        };
        let ffn = loader.ffn(tensors).unwrap().with_predictor(predictor.clone());
        Block { norms, attention: Attention::new(projections, heads), ffn }
    });
    let blocks = blocks.collect();
    let norm = loader.rms_norm("model.norm", d_model, eps).unwrap();
    let head = Head::load("lm_head.weight", &embedding, true, loader).unwrap();
    let position = Position::new(&config.position, config.d_head, None);
    let mut info = ModelInfo::default();
    info.vocab_size = config.vocab_size;
    info.kv = config.kv_shape();
    info.sparsity = Sparsity::Predicted;
    Decoder::new(embedding, position, blocks, Some(norm.into()), head).with_info(info)
}

#[test]
fn no_layer_runs_after_the_one_in_which_a_pass_is_cancelled() {
    let config = ModelConfig::from_dir(&Fixture::demo().model_dir, &["llama"]).unwrap();
    let whole = load(&Fixture::demo().model_dir, &LoadOptions::default()).unwrap();
    let mut expected = Step::default();
    whole.forward(&[1, 7, 9], &mut whole.new_cache(), &mut expected).unwrap();
    for tokens in [&[1, 7, 9][..], &[1]] {
        for cancel_at in 1..=config.n_layers {
            let token = CancelToken::new();
            let predictor = Arc::new(CancelsInTheMiddle {
                token: token.clone(),
                asked: AtomicUsize::new(0),
                cancel_at,
                d_ff: config.d_ff as u32,
            });
            let model = model(&predictor, &config);
            let (mut cache, mut step) = (model.new_cache(), Step::default());
            step.cancel = token;
            let error = model.forward(tokens, &mut cache, &mut step).unwrap_err();
            assert!(matches!(error, Error::Cancelled));
            assert_eq!(predictor.asked.load(Ordering::Relaxed), cancel_at);
            assert_eq!(cache.len(), 0);

            // and the next pass is whole
            step.cancel = CancelToken::new();
            model.forward(&[1, 7, 9], &mut cache, &mut step).unwrap();
            assert_eq!(step.logits, expected.logits);
        }
    }
}

#[test]
fn a_load_that_is_cancelled_takes_no_further_tensor() {
    let mut options = LoadOptions::default();
    options.cancel.cancel();
    let cancelled = load(&Fixture::demo().model_dir, &options).unwrap_err();
    assert!(matches!(cancelled, powerinfer_models::Error::Core(Error::Cancelled)));
    options.cancel = CancelToken::new();
    assert!(load(&Fixture::demo().model_dir, &options).is_ok());
}
