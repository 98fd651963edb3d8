//! The simulator against figures of the paper. What the paper does not state is assumed as the docs of
//! `simulate` say.

use powerinfer_ops::attention::KvDtype;

use super::*;
use crate::kv_cache::KvShape;
use crate::model::Sparsity;

const D_HEAD: u64 = 64;
const F16: u64 = 2;

/// A model of the paper in f16.
struct Shape {
    n_layers: u64,
    d_model: u64,
    d_ff: u64,
    kv_width: u64,
    /// Matrices of a feed-forward network.
    n_matrices: u64,
    vocab_size: u64,
    tied: bool,
    /// Parameters of the predictors over those of the model.
    predictor: f64,
    skew: Skew,
}

const OPT: Skew = Skew { density: 0.03, hot_share_80: 0.26 };

impl Shape {
    fn opt([n_layers, d_model]: [u64; 2], predictor: f64) -> Self {
        let (d_ff, vocab_size) = (4 * d_model, 50272);
        Self {
            n_layers,
            d_model,
            d_ff,
            kv_width: d_model,
            n_matrices: 2,
            vocab_size,
            tied: true,
            predictor,
            skew: OPT,
        }
    }

    fn llama([n_layers, d_model, d_ff, kv_width]: [u64; 4], predictor: f64, density: f64) -> Self {
        let skew = Skew { density, hot_share_80: 0.43 };
        Self {
            n_layers,
            d_model,
            d_ff,
            kv_width,
            n_matrices: 3,
            vocab_size: 32000,
            tied: false,
            predictor,
            skew,
        }
    }

    fn falcon_40b() -> Self {
        Self {
            n_layers: 60,
            d_model: 8192,
            d_ff: 32768,
            kv_width: 512,
            n_matrices: 2,
            vocab_size: 65024,
            tied: true,
            predictor: 0.0868,
            skew: Skew { density: 0.05, ..OPT },
        }
    }

    fn sizes(&self) -> ModelSizes {
        let Self { n_layers, d_model, d_ff, kv_width, n_matrices, vocab_size, .. } = *self;
        let attention = 2 * d_model * (d_model + kv_width);
        let of_layer = attention + n_matrices * d_model * d_ff;
        let table = vocab_size * d_model;
        let n_tables = if self.tied { 1 } else { 2 };
        let predictors = self.predictor * (n_layers * of_layer + n_tables * table) as f64;
        let layer = LayerSizes {
            attention_bytes: F16 * attention,
            predictor_bytes: F16 * (predictors / n_layers as f64) as u64,
            neuron_rows: vec![F16 * d_model; n_matrices as usize],
            neuron_biases: 0,
        };
        let model = PlannedModel {
            n_layers: n_layers as usize,
            d_ff: d_ff as usize,
            d_model: d_model as usize,
            ..PlannedModel::default()
        };
        let kv = KvShape {
            n_layers: n_layers as usize,
            n_kv_heads: (kv_width / D_HEAD) as usize,
            d_head: D_HEAD as usize,
            max_context: 2048,
            dtype: KvDtype::F16,
        };
        ModelSizes {
            model,
            layers: vec![layer; n_layers as usize],
            embedding_bytes: F16 * table,
            head_bytes: F16 * table,
            tied_head: self.tied,
            kv,
        }
    }

    /// Tokens per second of the hot and cold split, and of llama.cpp's split by layers.
    fn tokens_per_second(&self, machine: &str) -> (f64, f64) {
        let hardware = Hardware::preset(machine).unwrap();
        let sizes = self.sizes();
        let profile = self.skew.profile(&sizes.model).unwrap();
        let budget_bytes = hardware.fast.capacity_bytes - (256 << 20);
        let request = PlanRequest::new(&sizes, &profile, &hardware, budget_bytes)
            .with_offload(Offload::Everything)
            .with_sparsity(Sparsity::Predicted)
            .with_context(128);
        let plan = plan(&request).unwrap();
        let workload = Workload { context: 128, sparsity: Sparsity::Dense };
        let split = Arrangement::LayerSplit { budget_bytes };
        let split = simulate(&sizes, &profile, &hardware, workload, split).tokens_per_second();
        eprintln!(
            "{} layers of {} on {machine}: {:.2} and {split:.2} tok/s, {:.2} times, hit rate {:.2}",
            self.n_layers,
            self.d_model,
            plan.predicted_tokens_per_second,
            plan.predicted_tokens_per_second / split,
            plan.hit_rate,
        );
        (plan.predicted_tokens_per_second, split)
    }
}

fn opt_30b() -> Shape {
    Shape::opt([48, 7168], 0.0488)
}

#[test]
fn the_efficiencies_give_the_two_figures_that_they_were_fitted_to() {
    let (hot_cold, split) = opt_30b().tokens_per_second("rtx-4090");
    assert!((hot_cold / 12.0 - 1.0).abs() < 0.03, "{hot_cold}");
    assert!((split / 1.1 - 1.0).abs() < 0.03, "{split}");
}

#[test]
fn falcon_40b_comes_out_within_a_quarter() {
    let (hot_cold, split) = Shape::falcon_40b().tokens_per_second("rtx-4090");
    let times = hot_cold / split;
    assert!((times / 11.69 - 1.0).abs() < 0.25, "{times}");
}

#[test]
fn the_mean_of_the_small_machine_comes_out_within_a_quarter() {
    let shapes = [
        Shape::opt([32, 4096], 0.0671),
        Shape::opt([40, 5120], 0.0671),
        opt_30b(),
        Shape::llama([32, 4096, 11008, 4096], 0.0808, 0.3),
        Shape::llama([40, 5120, 13824, 5120], 0.0808, 0.22),
        Shape::llama([32, 4096, 14336, 1024], 0.0709, 0.1),
    ];
    let times = shapes.iter().map(|shape| {
        let (hot_cold, split) = shape.tokens_per_second("rtx-2080ti");
        hot_cold / split
    });
    let mean = times.sum::<f64>() / shapes.len() as f64;
    eprintln!("mean {mean:.2}");
    assert!((mean / 4.71 - 1.0).abs() < 0.25, "{mean}");
}
