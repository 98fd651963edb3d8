//! Laws of plans: whatever the sizes, the budget is kept, and a file is believed only as far as it is right.

use powerinfer_ops::attention::KvDtype;
use proptest::prelude::*;

use super::sizes::GROUP_NEURONS;
use super::*;
use crate::kv_cache::KvShape;
use crate::model::Sparsity;
use crate::profile::ActivationProfile;

pub(super) fn sizes(n_layers: usize, d_ff: usize, rows: Vec<u64>) -> ModelSizes {
    let model = PlannedModel {
        n_layers,
        d_ff,
        d_model: 128,
        architecture: "llama".to_owned(),
        activation: "relu".to_owned(),
        ffn_tensors: vec!["mlp.down_proj.weight".to_owned(), "mlp.gate_proj.weight".to_owned()],
        digest: "0123456789abcdef".to_owned(),
    };
    let layer = LayerSizes {
        attention_bytes: 70_000,
        predictor_bytes: 9_000,
        neuron_rows: rows,
        neuron_biases: 1,
    };
    let kv =
        KvShape { n_layers, n_kv_heads: 2, d_head: 16, max_context: 4096, dtype: KvDtype::F32 };
    let (embedding_bytes, head_bytes) = (123_456, 99_000);
    ModelSizes {
        model,
        layers: vec![layer; n_layers],
        embedding_bytes,
        head_bytes,
        tied_head: false,
        kv,
    }
}

pub(super) fn profile(sizes: &ModelSizes) -> ActivationProfile {
    Skew { density: 0.2, hot_share_80: 0.4 }.profile(&sizes.model).unwrap()
}

pub(super) fn machine() -> Hardware {
    Hardware::preset("rtx-4090").unwrap()
}

/// Some plan of a small model.
fn some_plan() -> (ModelSizes, ActivationProfile, Plan) {
    let sizes = sizes(3, 1000, vec![256, 256, 256]);
    let profile = profile(&sizes);
    let machine = machine();
    let request = PlanRequest::new(&sizes, &profile, &machine, 900_000).with_sync_rule(false);
    let plan = plan(&request).unwrap();
    (sizes, profile, plan)
}

/// What an allocator takes that puts one tensor after another, each at a multiple of `alignment`: the
/// parts in `n_tensors` pieces, the rows of a layer's hot neurons a matrix each.
fn allocated(plan: &Plan, sizes: &ModelSizes, n_tensors: u64) -> u64 {
    let mut end = 0u64;
    let mut allocate = |bytes: u64| {
        end = end.next_multiple_of(plan.alignment_bytes) + bytes;
    };
    let pieces = |bytes: u64| {
        (0..n_tensors).map(move |i| (bytes * (i + 1) / n_tensors) - bytes * i / n_tensors)
    };
    let on_fast = |device, bytes| if device == PlannedDevice::Fast { bytes } else { 0 };
    for (planned, layer) in plan.layers.iter().zip(&sizes.layers) {
        pieces(on_fast(planned.attention, layer.attention_bytes)).for_each(&mut allocate);
        pieces(on_fast(planned.predictor, layer.predictor_bytes)).for_each(&mut allocate);
        allocate(on_fast(planned.attention, sizes.layer_kv_bytes(plan.context)));
        let n_hot = planned.n_hot() as u64;
        layer.neuron_rows.iter().for_each(|row| allocate(n_hot * row));
        (0..=layer.neuron_biases).for_each(|_| allocate(4 * n_hot));
        allocate(n_hot * plan.predictor_row_bytes);
    }
    pieces(on_fast(plan.head, sizes.head_bytes)).for_each(&mut allocate);
    end + plan.workspace_bytes
}

proptest! {
    #[test]
    fn the_budget_is_never_exceeded(
        n_layers in 1usize..5,
        d_ff in 1usize..700,
        rows in proptest::collection::vec((1u64..20).prop_map(|lines| 64 * lines), 1..4),
        log_alignment in 0u32..13,
        budget_bytes in 0u64..3_000_000,
        context in 0usize..600,
        workspace_bytes in 0u64..100_000,
        predictor_row_bytes in prop_oneof![Just(0u64), 1u64..100],
        offload in proptest::sample::select(vec![
            Offload::Neurons, Offload::Everything, Offload::DenseParts, Offload::Layers,
        ]),
        whole_predictors in any::<bool>(),
        sync_rule in any::<bool>(),
        n_tensors in 1u64..=16,
    ) {
        let sizes = sizes(n_layers, d_ff, rows);
        let profile = profile(&sizes);
        let mut machine = machine();
        machine.alignment_bytes = 1 << log_alignment;
        let request = PlanRequest::new(&sizes, &profile, &machine, budget_bytes)
            .with_context(context)
            .with_offload(offload)
            .with_workspace_bytes(workspace_bytes)
            .with_hot_predictor(predictor_row_bytes)
            .with_whole_predictors(whole_predictors)
            .with_sync_rule(sync_rule);
        let again = super::plan(&request).unwrap();
        let plan = plan(&request).unwrap();
        prop_assert_eq!(&again, &plan);
        prop_assert!(plan.bytes_fast <= budget_bytes);
        if plan.bytes_fast > 0 {
            prop_assert!(allocated(&plan, &sizes, n_tensors) <= plan.bytes_fast);
        } else {
            prop_assert_eq!(plan.hot_neurons_per_layer(), vec![0; n_layers]);
        }
        prop_assert_eq!(plan.check(&sizes, budget_bytes).unwrap(), None);
        let fast = |device| device == PlannedDevice::Fast;
        for layer in &plan.layers {
            let (attention, n_hot) = (fast(layer.attention), layer.n_hot());
            prop_assert!(whole_predictors || !fast(layer.predictor));
            match offload {
                Offload::Neurons => prop_assert!(!attention && !fast(layer.predictor)),
                Offload::DenseParts => prop_assert_eq!(n_hot, 0),
                Offload::Layers => prop_assert_eq!(n_hot, if attention { d_ff } else { 0 }),
                _ => {}
            }
        }
        prop_assert!((0.0..=1.0).contains(&plan.hit_rate));
        let placement = plan.placement(&sizes.model).unwrap();
        for layer in 0..n_layers {
            // groups, but for the last of a layer
            let n_hot = placement.hot(layer).len();
            prop_assert!(n_hot.is_multiple_of(GROUP_NEURONS) || n_hot == d_ff);
        }
        let read = Plan::from_json("p.json".as_ref(), plan.to_json().as_bytes()).unwrap();
        prop_assert_eq!(read, plan);
    }
}

#[test]
fn the_hot_neurons_are_those_that_fire_most() {
    let (sizes, profile, plan) = some_plan();
    let placement = plan.placement(&sizes.model).unwrap();
    for layer in 0..3 {
        let hot = placement.hot(layer);
        assert!(!hot.is_empty());
        let counts = profile.counts(layer);
        let least = hot.as_slice().iter().map(|&id| counts[id as usize]).min().unwrap();
        let cold = placement.cold(layer);
        assert!(cold.as_slice().iter().all(|&id| counts[id as usize] <= least));
    }
}

#[test]
fn more_budget_never_makes_fewer_hits() {
    let sizes = sizes(3, 1000, vec![256, 256, 256]);
    let (profile, machine) = (profile(&sizes), machine());
    let mut before = 0.0;
    for budget in (0..30).map(|i| i * 100_000) {
        let request = PlanRequest::new(&sizes, &profile, &machine, budget);
        let hit_rate = plan(&request.with_sync_rule(false)).unwrap().hit_rate;
        assert!(hit_rate >= before, "{budget}: {hit_rate} {before}");
        before = hit_rate;
    }
    assert_eq!(before, 1.0);
}

#[test]
fn neurons_that_do_not_pay_for_a_synchronisation_stay_cold() {
    let sizes = sizes(2, 1000, vec![256, 256, 256]);
    let (profile, mut machine) = (profile(&sizes), machine());
    let request =
        |machine: &Hardware| plan(&PlanRequest::new(&sizes, &profile, machine, 5_000_000)).unwrap();
    // the layer's 1000 × 772 bytes, of which the gates are always read, save microseconds
    machine.sync_seconds = 1e-6;
    let some = request(&machine);
    assert!(some.layers.iter().all(|layer| layer.n_hot() == 1000), "{some:?}");
    machine.sync_seconds = 1e-3;
    let none = request(&machine);
    assert_eq!(none.hot_neurons_per_layer(), [0, 0]);
    assert_eq!(none.bytes_fast, 0);
    // a device that is no faster saves nothing
    machine.sync_seconds = 0.0;
    machine.fast = machine.host;
    assert_eq!(request(&machine).hot_neurons_per_layer(), [0, 0]);
}

#[test]
fn more_than_there_is_is_refused() {
    let sizes = sizes(2, 1000, vec![256, 256, 256]);
    let (profile, mut machine) = (profile(&sizes), machine());
    let refused = plan(&PlanRequest::new(&sizes, &profile, &machine, 25 << 30)).unwrap_err();
    assert!(matches!(refused, Error::PlanOverBudget { device: "the fast device", .. }));
    machine.host.capacity_bytes = 100_000;
    let refused = plan(&PlanRequest::new(&sizes, &profile, &machine, 0)).unwrap_err();
    assert!(matches!(refused, Error::PlanOverBudget { device: "the host", .. }));
}

#[test]
fn foreign_stale_and_large_plans_are_refused() {
    let (sizes, profile, plan) = some_plan();
    assert_eq!(plan.check(&sizes, plan.bytes_fast).unwrap(), None);
    plan.check_profile(&profile).unwrap();
    let refused = plan.check(&sizes, plan.bytes_fast - 1).unwrap_err();
    assert!(matches!(refused, Error::PlanOverBudget { .. }));
    // the same model in a format of wider rows
    let mut wider = sizes.clone();
    wider.layers.iter_mut().for_each(|layer| layer.neuron_rows = vec![512; 3]);
    wider.model.digest = "fedcba9876543210".to_owned();
    assert!(matches!(plan.check(&wider, 900_000), Err(Error::PlanOverBudget { .. })));
    assert!(plan.check(&wider, 2_000_000).unwrap().is_some_and(|text| text.contains("weights")));
    type Change = fn(&mut ModelSizes);
    let changes: [(&str, Change); 5] = [
        ("neurons of a layer", |sizes| sizes.model.d_ff = 1001),
        ("width", |sizes| sizes.model.d_model = 64),
        ("architecture", |sizes| sizes.model.architecture = "opt".to_owned()),
        ("activation", |sizes| sizes.model.activation = "fatrelu".to_owned()),
        ("tensors", |sizes| sizes.model.ffn_tensors.push("mlp.up_proj.weight".to_owned())),
    ];
    for (what, change) in changes {
        let mut other = sizes.clone();
        change(&mut other);
        let refused = plan.check(&other, u64::MAX).unwrap_err();
        assert!(matches!(refused, Error::PlanMismatch { what: named, .. } if named == what));
        assert!(plan.placement(&other.model).is_err());
    }
    let other = Skew { density: 0.3, hot_share_80: 0.4 }.profile(&sizes.model).unwrap();
    assert!(matches!(plan.check_profile(&other), Err(Error::PlanStale { .. })));
}

#[test]
fn each_thing_that_can_be_wrong_in_a_file_is_named() {
    let (_, _, plan) = some_plan();
    let text = plan.to_json();
    let good: serde_json::Value = serde_json::from_str(&text).unwrap();
    let hot = good["layers"][0]["hot"].as_str().unwrap().to_owned();
    for (pointer, value, field) in [
        ("/powerinfer_plan", "2", "powerinfer_plan"),
        ("/model", "[]", "model"),
        ("/model/n_layers", "4", "hot_neurons_per_layer"),
        ("/model/n_layers", "4611686018427387904", "model.n_layers"),
        ("/model/d_ff", "16777216", "layers[0].hot"),
        ("/model/d_ff", "0", "model.d_ff"),
        ("/model/d_ff", "1e99", "model.d_ff"),
        ("/model/d_model", "-1", "model.d_model"),
        ("/model/activation", "null", "model.activation"),
        ("/model/ffn_tensors", "[1]", "model.ffn_tensors"),
        ("/hot_neurons_per_layer", "[1, 2]", "hot_neurons_per_layer"),
        ("/hot_neurons_per_layer/0", "-1", "hot_neurons_per_layer"),
        ("/hot_neurons_per_layer/0", "1", "layers[0]"),
        ("/layers", "{}", "layers"),
        ("/layers/1", "7", "layers[1]"),
        ("/layers/1/hot", "\"all\"", "layers[1]"),
        ("/layers/1/hot", "\"AA\"", "layers[1].hot"),
        ("/layers/1/hot", "[]", "layers[1].hot"),
        ("/layers/1/hot_density", "1.5", "layers[1].hot_density"),
        ("/layers/1/attention", "\"moon\"", "layers[1].attention"),
        ("/layers/1/attention", "\"fast\"", "layers[1].kv_cache"),
        ("/budget_bytes", "-1", "budget_bytes"),
        ("/bytes_fast", "0.5", "bytes_fast"),
        ("/hit_rate", "2", "hit_rate"),
        ("/predicted_tokens_per_second", "\"NaN\"", "predicted_tokens_per_second"),
        ("/alignment_bytes", "0", "alignment_bytes"),
        ("/alignment_bytes", "96", "alignment_bytes"),
        ("/head", "1", "head"),
    ] {
        let mut bad = good.clone();
        *bad.pointer_mut(pointer).unwrap() = serde_json::from_str(value).unwrap();
        let error = Plan::from_json("p.json".as_ref(), bad.to_string().as_bytes()).unwrap_err();
        assert!(
            matches!(&error, Error::Config { field: named, .. } if named == field),
            "{pointer} {value}: {error}"
        );
    }
    // NaN is no JSON, and neither is half a file
    for bad in [text.replace("\"hit_rate\":", "\"hit_rate\":NaN,\"x\":"), text[..500].to_owned()] {
        let error = Plan::from_json("p.json".as_ref(), bad.as_bytes()).unwrap_err();
        assert!(matches!(error, Error::Json { .. }), "{error}");
    }
    // a layer of neurons that are all hot takes no memory until a model confirms its width
    let wide = text.replace(&hot, "all").replace("\"d_ff\":1000", "\"d_ff\":16777216");
    assert!(Plan::from_json("p.json".as_ref(), wide.as_bytes()).is_err());
}

#[test]
fn a_plan_for_70_billion_parameters_is_a_small_file_made_in_no_time() {
    let sizes = sizes(80, 28672, vec![16384; 3]);
    let (profile, machine) = (profile(&sizes), machine());
    let began = std::time::Instant::now();
    let plan = plan(&PlanRequest::new(&sizes, &profile, &machine, 20 << 30)).unwrap();
    let seconds = began.elapsed().as_secs_f64();
    eprintln!("planned in {seconds:.3} s, hit rate {:.3}", plan.hit_rate);
    // far more than it takes, for busy machines
    assert!(seconds < 10.0, "{seconds} s");
    assert!(plan.to_json().len() < 450_000, "{} bytes", plan.to_json().len());
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("plan.json");
    plan.save(&path).unwrap();
    assert_eq!(Plan::load(&path).unwrap(), plan);
}

#[test]
fn simulated_time_is_that_of_the_bytes() {
    let mut sizes = sizes(2, 1000, vec![256, 256, 256]);
    sizes.kv.n_kv_heads = 0;
    let (profile, mut machine) = (profile(&sizes), machine());
    machine.host =
        DeviceMemorySpeed { bytes_per_second: 2e9, efficiency: 0.5, capacity_bytes: 1 << 40 };
    let dense = Workload { context: 0, sparsity: Sparsity::Dense };
    let times = simulate(&sizes, &profile, &machine, dense, Arrangement::DenseHost);
    let neurons = 2 * 1000 * (3 * 256 + 4);
    assert!((times.ffn * 1e9 - f64::from(neurons)).abs() < 1.0);
    assert!((times.attention * 1e9 - 140_000.0).abs() < 1.0);
    assert_eq!((times.sync, times.ffn_fast, times.predictor), (0.0, 0.0, 0.0));
    // all on a device ten times as fast: a tenth, and the way there and back
    machine.fast = DeviceMemorySpeed { bytes_per_second: 10e9, efficiency: 1.0, ..machine.host };
    let split = Arrangement::LayerSplit { budget_bytes: 10_000_000 };
    let fast = simulate(&sizes, &profile, &machine, dense, split);
    let moved = fast.transfer + fast.sync;
    assert!((moved - 2.0 * (machine.sync_seconds + 512.0 / 64e9)).abs() < 1e-12);
    assert!(((fast.total() - moved) / times.total() - 0.1).abs() < 1e-9);
    // exact mode reads the gates of all, and the rest of a fifth
    let exact = Workload { context: 0, sparsity: Sparsity::Exact };
    let times =
        simulate(&sizes, &profile, &machine, exact, Arrangement::LayerSplit { budget_bytes: 0 });
    assert!(times.ffn > 0.0);
    let request = PlanRequest::new(&sizes, &profile, &machine, 0).with_sparsity(Sparsity::Exact);
    let cold = plan(&request.with_context(0)).unwrap();
    let times = simulate(&sizes, &profile, &machine, exact, Arrangement::HotCold(&cold));
    let expected = 2.0 * 1000.0 * (256.0 + 0.2 * 516.0);
    assert!((times.ffn * 1e9 / expected - 1.0).abs() < 0.01, "{times:?}");
}
