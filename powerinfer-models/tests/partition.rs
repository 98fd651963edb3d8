//! The laws of the sparse feed-forward network: any hot/cold partition gives the same logits, and
//! predicting with the oracle is dense inference.

use std::sync::Arc;

use candle_core::{Device, Tensor};
use powerinfer_core::{Placement, Sparsity, Step};
use powerinfer_models::layers::{FfnShard, SparseFfn};
use powerinfer_models::{LoadOptions, load};
use powerinfer_ops::{Activation, FfnWeights, NeuronIds, NeuronMatrix, WeightFormat};
use powerinfer_predictor::{All, FfnInputs, Oracle};
use testing::tolerance::max_distance;
use testing::{Fixture, Seeded, assert_same_bits};

#[test]
fn any_partition_gives_the_same_logits() {
    for fixture in Fixture::all("") {
        let golden = fixture.golden();
        let bound = f64::from(golden.logit_bound());
        let run = |options: &LoadOptions| {
            let model = load(&fixture.model_dir, options).unwrap();
            let (mut cache, mut step) = (model.new_cache(), Step::default());
            let tokens: Vec<u32> = golden.prompts[0].input_ids.clone();
            model.forward(&tokens, &mut cache, &mut step).unwrap();
            (step.logits, step.stats.fired_per_layer, model.info().clone())
        };
        let f32s = LoadOptions::default().with_dtype(Some(WeightFormat::F32)).with_pytorch(1 << 20);
        let (whole, fired, info) = run(&f32s);
        for (share, seed) in [(0.0, 1), (0.1, 2), (0.5, 3), (0.9, 4), (1.0, 5)] {
            let mut random = Seeded::new(seed);
            let hot = (0..info.n_layers)
                .map(|_| NeuronIds::from_sorted(random.ids(info.d_ff, share)).unwrap())
                .collect();
            let placement = Placement::new(hot, info.d_ff).unwrap();
            for sparsity in [Sparsity::Dense, Sparsity::Auto] {
                let options = f32s.clone().with_sparsity(sparsity);
                let (split, split_fired, _) = run(&options.with_placement(placement.clone()));
                let distance = max_distance(&split, &whole);
                assert!(distance <= bound, "{} {share} {sparsity}: {distance}", fixture.name);
                assert_eq!(split_fired, fired, "{} {share} {sparsity}", fixture.name);
            }
        }
    }
}

#[test]
fn a_placement_of_another_model_is_refused() {
    let fixture = Fixture::demo();
    let placement = Placement::new(vec![NeuronIds::new(); 2], 1024).unwrap();
    assert!(load(&fixture.model_dir, &LoadOptions::default().with_placement(placement)).is_err());
}

#[test]
fn oracle_mask_equals_dense() {
    for format in WeightFormat::ALL {
        let (n, d, n_tokens) = (96, 64usize.next_multiple_of(format.block_len()), 5);
        let m = |seed| {
            let values = Seeded::new(seed).normal(n * d);
            NeuronMatrix::from_f32(format, n, d, &values).unwrap()
        };
        let gate_bias = Seeded::new(4).normal(n);
        let weights = FfnWeights::new(m(1), Some(m(2)), m(3), Activation::Relu)
            .unwrap()
            .with_biases(Some(gate_bias.clone()), Some(Seeded::new(5).normal(n)))
            .unwrap();
        let x = Seeded::new(6).normal(n_tokens * d);
        let x = Tensor::from_vec(x, (n_tokens, d), &Device::Cpu).unwrap();
        let inputs = FfnInputs { residual: &x, normed: &x };
        let down_bias = Seeded::new(7).normal(d);
        let run = |ffn: &SparseFfn, sparsity| {
            let y = ffn.forward(&inputs, sparsity, 0, &mut Step::default()).unwrap();
            y.flatten_all().unwrap().to_vec1::<f32>().unwrap()
        };
        let whole = vec![FfnShard::whole(weights.clone())];
        let ffn = SparseFfn::new(whole, Some(down_bias.clone())).unwrap();
        let dense = run(&ffn, Sparsity::Dense);
        assert_same_bits(&run(&ffn, Sparsity::Exact), &dense, "exact");

        let oracle = Oracle::new(weights.gate.clone(), Some(gate_bias), Activation::Relu).unwrap();
        let oracle = ffn.clone().with_predictor(Arc::new(oracle));
        assert_same_bits(&run(&oracle, Sparsity::Predicted), &dense, "oracle");
        let all = ffn.with_predictor(Arc::new(All::new(n)));
        assert_same_bits(&run(&all, Sparsity::Predicted), &dense, "all");

        // two shards: each gets its own part of the oracle's lists
        let hot = NeuronIds::from_sorted(Seeded::new(8).ids(n, 0.4)).unwrap();
        let placement = Placement::new(vec![hot.clone()], n).unwrap();
        let shards = [hot, placement.cold(0)].map(|ids| FfnShard::pick(&weights, ids).unwrap());
        let oracle = Oracle::new(weights.gate.clone(), weights.gate_bias.clone(), Activation::Relu);
        let split = SparseFfn::new(shards.to_vec(), Some(down_bias))
            .unwrap()
            .with_predictor(Arc::new(oracle.unwrap()));
        let largest = dense.iter().fold(0f32, |largest, y| largest.max(y.abs()));
        let distance = max_distance(&run(&split, Sparsity::Predicted), &dense);
        assert!(distance <= 2e-6 * f64::from(largest), "{format}: {distance} of {largest}");
    }
}

#[test]
fn a_width_that_is_no_whole_blocks_is_an_error_that_names_the_tensor() {
    let fixture = Fixture::micro("llama-headdim-mqa-bf16");
    let options = LoadOptions::default().with_dtype(Some(WeightFormat::Q8_0));
    let error = load(&fixture.model_dir, &options).unwrap_err().to_string();
    assert!(
        error.contains("model.embed_tokens.weight") && error.contains("multiple of 32"),
        "{error}"
    );
}
