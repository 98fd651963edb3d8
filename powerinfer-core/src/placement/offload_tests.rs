//! What each way to offload puts where.

use super::plan_tests::{machine, profile, sizes};
use super::*;

#[test]
fn what_is_read_for_every_token_comes_first() {
    let sizes = sizes(2, 1000, vec![256, 256, 256]);
    let (profile, machine) = (profile(&sizes), machine());
    let request = |budget| {
        let request = PlanRequest::new(&sizes, &profile, &machine, budget).with_sync_rule(false);
        plan(&request.with_offload(Offload::Everything).with_context(64)).unwrap()
    };
    let devices = |plan: &Plan| -> Vec<[bool; 2]> {
        let fast = |device| device == PlannedDevice::Fast;
        let of_layer = |l: &PlannedLayer| [fast(l.attention), fast(l.predictor)];
        plan.layers.iter().map(of_layer).collect()
    };
    let all = request(10_000_000);
    assert_eq!(devices(&all), [[true; 2]; 2]);
    assert_eq!((all.head, all.hit_rate), (PlannedDevice::Fast, 1.0));
    assert_eq!(all.bytes_host, sizes.embedding_bytes);
    let placement = all.placement(&sizes.model).unwrap();
    assert!(placement.fast_head() && placement.n_fast_attention() == 2);
    let one = request(110_000);
    assert_eq!(devices(&one), [[true, true], [false; 2]]);
    // attention goes with its keys and values, or not at all
    let kv_bytes = sizes.layer_kv_bytes(64);
    assert!(kv_bytes > 10_000);
    assert!(!devices(&request(70_000 + 16 * 255 + kv_bytes))[0][0]);
    assert_eq!(devices(&request(0)), [[false; 2]; 2]);
}

#[test]
fn layers_go_whole_and_the_last_come_first() {
    let sizes = sizes(3, 1000, vec![256, 256, 256]);
    let (profile, machine) = (profile(&sizes), machine());
    let request = |budget| {
        let request = PlanRequest::new(&sizes, &profile, &machine, budget).with_context(64);
        plan(&request.with_offload(Offload::Layers)).unwrap()
    };
    // attention, keys and values, and 16 groups of 64 neurons with a bias and an id each
    let layer = 70_000 + 16_384 + 2 * 16 * 255 + 16 * 64 * (3 * 256 + 2 * 4);
    assert_eq!(request(layer - 1).hot_neurons_per_layer(), [0, 0, 0]);
    let one = request(layer);
    assert_eq!(one.hot_neurons_per_layer(), [0, 0, 1000]);
    assert_eq!((one.head, one.hit_rate > 0.3), (PlannedDevice::Host, true));
    // a head that fits goes though another layer does not
    let with_head = request(2 * layer - 1);
    assert_eq!(with_head.hot_neurons_per_layer(), [0, 0, 1000]);
    assert_eq!(with_head.head, PlannedDevice::Fast);
    assert_eq!(request(2 * layer).hot_neurons_per_layer(), [0, 1000, 1000]);
}

#[test]
fn a_whole_model_fits_or_is_refused_with_what_it_takes() {
    let sizes = sizes(3, 1000, vec![256, 256, 256]);
    let (profile, machine) = (profile(&sizes), machine());
    let request = |budget| {
        let request = PlanRequest::new(&sizes, &profile, &machine, budget).with_context(64);
        plan(&request.with_workspace_bytes(5000).with_offload(Offload::Whole))
    };
    let whole = request(10_000_000).unwrap();
    assert_eq!((whole.hot_neurons_per_layer(), whole.hit_rate), (vec![1000; 3], 1.0));
    assert_eq!(whole.bytes_host, sizes.embedding_bytes);
    let placement = whole.placement(&sizes.model).unwrap();
    assert_eq!(placement, Placement::all_fast(3, 1000));
    assert_eq!(request(whole.bytes_fast).unwrap().bytes_fast, whole.bytes_fast);
    let refused = request(whole.bytes_fast - 1).unwrap_err();
    let needed = whole.bytes_fast;
    assert!(
        matches!(refused, Error::PlanOverBudget { needed_bytes, budget_bytes, .. }
            if needed_bytes == needed && budget_bytes == needed - 1),
        "{refused}"
    );
}

#[test]
fn hot_and_cold_never_make_fewer_hits_than_whole_layers() {
    let sizes = sizes(4, 1000, vec![256, 256, 256]);
    let (profile, machine) = (profile(&sizes), machine());
    for budget in (0..40).map(|i| i * 100_000) {
        let hit_rate = |offload| {
            let request = PlanRequest::new(&sizes, &profile, &machine, budget);
            let request = request.with_sync_rule(false).with_whole_predictors(false);
            plan(&request.with_context(64).with_offload(offload)).unwrap().hit_rate
        };
        let neurons = hit_rate(Offload::Neurons);
        assert!(neurons >= hit_rate(Offload::Layers), "{budget}");
        assert!(neurons >= hit_rate(Offload::Everything), "{budget}");
        assert_eq!(hit_rate(Offload::DenseParts), 0.0);
    }
}
