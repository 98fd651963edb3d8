//! What goes to a device that runs dense parts, and what one that does not is spared.

use std::sync::Arc;

use powerinfer_core::{CausalLm, Error as CoreError, Holding};
use powerinfer_ops::{DeviceMemory, HeldFfn, HotRows, StandInOptions};
use testing::Fixture;

use super::*;
use crate::load::open;
use crate::{Error, estimate, load};

/// A device that can be planned for, and holds nothing.
#[derive(Debug)]
struct Drawn {
    budget_bytes: u64,
    dense_parts: bool,
}

const WORKSPACE: u64 = 10_000;
/// What a sequence takes beside its keys and values.
const STREAM: u64 = 4096;

impl FastDevice for Drawn {
    fn name(&self) -> &str {
        "drawn"
    }

    fn memory(&self) -> DeviceMemory {
        DeviceMemory::new(self.budget_bytes)
    }

    fn workspace_bytes(&self, _n_neurons: usize, _d_model: usize, _rank: usize) -> u64 {
        WORKSPACE
    }

    fn hold(&self, _rows: HotRows<'_>) -> std::result::Result<Box<dyn HeldFfn>, OpError> {
        Err(OpError::NoDenseParts { device: "drawn".to_owned() })
    }

    fn runs_dense_parts(&self) -> bool {
        self.dense_parts
    }

    fn sequence_bytes(&self, shape: SequenceShape, n_tokens: usize, pass_tokens: usize) -> u64 {
        assert!(pass_tokens <= n_tokens);
        let pages = n_tokens.div_ceil(64) * shape.n_layers;
        STREAM + (pages * shape.kv.page_bytes()) as u64
    }
}

fn drawn(budget_bytes: u64) -> LoadOptions {
    let device = Drawn { budget_bytes, dense_parts: true };
    LoadOptions::default().with_fast_device(Arc::new(device))
}

fn find(options: &LoadOptions) -> Result<Placed> {
    let folder = Fixture::demo().model_dir;
    let (config, store) = open(&folder, options).unwrap();
    let profile = profile_beside(&folder).unwrap();
    let options = LoadOptions { profile, ..options.clone() };
    Placed::find(&config, &store, &options, None).map(|placed| placed.expect("there is a device"))
}

fn n_hot(placed: &Placed) -> usize {
    let placement = &placed.placement;
    (0..placement.n_layers()).map(|layer| placement.hot(layer).len()).sum()
}

#[test]
fn a_gpu_gets_everything_and_a_stand_in_neurons_unless_told() {
    let placed = find(&drawn(1 << 30)).unwrap();
    assert_eq!(placed.placement, Placement::all_fast(6, 1024));
    assert_eq!(
        placed.notes,
        ["drawn has all neurons, all attention and the head, the CPU the embeddings"]
    );
    let neurons = find(&drawn(1 << 30).with_offload(Offload::Neurons)).unwrap();
    assert_eq!((n_hot(&neurons), neurons.placement.n_fast_attention()), (6 * 1024, 0));
    assert_eq!(neurons.context_bytes, 0);
    for device in [
        Arc::new(Drawn { budget_bytes: 1 << 30, dense_parts: false }) as Arc<dyn FastDevice>,
        Arc::new(StandIn::new(StandInOptions::new(1 << 30)).unwrap()),
    ] {
        assert_eq!(default_offload(device.as_ref()), Offload::Neurons);
        let placed = find(&LoadOptions::default().with_fast_device(device)).unwrap();
        assert_eq!(placed.placement, neurons.placement);
    }
}

#[test]
fn the_context_that_is_planned_is_left_of_the_budget() {
    let placed = find(&drawn(1 << 30)).unwrap();
    // six layers, keys and values of four heads of 32 f32 each, of all 512 tokens of the model
    let kv_bytes = |n_tokens: u64| 6 * 2 * 4 * 32 * 4 * n_tokens;
    assert_eq!(placed.context_bytes, STREAM + kv_bytes(512));
    // a budget that is just enough for the model and this context
    let mut budget = 12 << 20;
    let whole = |budget, context| {
        find(&drawn(budget).with_offload(Offload::Whole).with_device_context(context))
    };
    while whole(budget, 64).is_err() {
        budget += 4096;
    }
    let refused = whole(budget, 65).unwrap_err();
    assert!(
        matches!(refused, CoreError::PlanOverBudget { needed_bytes, budget_bytes, .. }
            if budget_bytes == budget && needed_bytes <= budget + kv_bytes(64)),
        "{refused}"
    );
    assert!(whole(budget + kv_bytes(64), 65).is_ok());
    // nobody gets room for more than the model's context, and who asks for it by name is told so
    let longest = drawn(budget + kv_bytes(448)).with_offload(Offload::Whole);
    assert!(find(&longest.with_max_context(usize::MAX)).is_ok());
    for wrong in [0, 513, usize::MAX] {
        let refused = whole(1 << 30, wrong).unwrap_err();
        assert!(
            matches!(refused, CoreError::DeviceContextRange { max_context: 512, found } if found == wrong),
            "{refused}"
        );
    }
}

#[test]
fn each_way_to_offload_puts_its_parts_there() {
    let budget = 5 << 20;
    let found = |offload| {
        let placed = find(&drawn(budget).with_offload(offload).with_device_context(64)).unwrap();
        let sentence = placed.notes[0].clone();
        (
            n_hot(&placed),
            placed.placement.n_fast_attention(),
            placed.placement.fast_head(),
            sentence,
        )
    };
    let (hot, attention, head, sentence) = found(Offload::Everything);
    assert!((1..3 * 1024).contains(&hot) && attention == 6 && head, "{sentence}");
    let (hot, attention, head, sentence) = found(Offload::DenseParts);
    assert_eq!((hot, attention, head), (0, 6, true));
    assert!(sentence.starts_with("drawn has all attention"), "{sentence}");
    let (hot, attention, _, sentence) = found(Offload::Layers);
    assert_eq!(hot, attention * 1024);
    assert!((1..6).contains(&attention), "{sentence}");
    assert!(sentence.contains(&format!("the attention of {attention} of 6 layers")), "{sentence}");
}

#[test]
fn a_device_is_not_given_what_it_cannot_run() {
    let device = || Arc::new(Drawn { budget_bytes: 1 << 30, dense_parts: false });
    let options = || LoadOptions::default().with_fast_device(device());
    for options in [
        options().with_offload(Offload::Everything),
        options().with_placement(Placement::all_fast(6, 1024)),
    ] {
        let refused = load(&Fixture::demo().model_dir, &options).unwrap_err();
        let is_named = matches!(
            &refused,
            Error::Core(CoreError::Op(OpError::NoDenseParts { device })) if device == "drawn"
        );
        assert!(is_named, "{refused}");
    }
    // without a device all of a placement is the CPU's
    let options = LoadOptions::default().with_placement(Placement::all_fast(6, 1024));
    let model = load(&Fixture::demo().model_dir, &options).unwrap();
    assert_eq!(model.info().fast_device, None);
}

#[test]
fn an_estimate_leaves_out_what_is_on_the_device_or_in_the_file() {
    let folder = Fixture::demo().model_dir;
    let all = estimate(&folder, &LoadOptions::default()).unwrap();
    assert_eq!((all.fast_bytes, all.mapped_bytes), (0, 0));
    let estimated = |options: LoadOptions| {
        let found = estimate(&folder, &options).unwrap();
        assert_eq!(found.model_bytes(), all.model_bytes(), "{options:?}");
        found
    };
    let whole = estimated(drawn(1 << 30));
    // the embeddings stay
    assert_eq!(whole.weight_bytes, 4096 * 256 * 2);
    assert_eq!(whole.cache_bytes_per_token, 0);
    assert!(whole.load_bytes > all.load_bytes);
    // as many rows of 3 · 256 f16 as fit, of which the hot ones are not here
    let some = estimated(drawn(WORKSPACE + (2 << 20)).with_offload(Offload::Neurons));
    assert!((1 << 20..=2 << 20).contains(&some.fast_bytes), "{some}");
    assert_eq!(some.cache_bytes_per_token, all.cache_bytes_per_token);
    assert!(some.to_string().contains("on the fast device 2.0 MiB"), "{some}");
    // the norms are copied
    let mapped = estimated(LoadOptions::default().with_holding(Holding::Mapped));
    assert_eq!(mapped.weight_bytes, 13 * 256 * 4);
    assert!(mapped.to_string().contains("in the file 13.2 MiB"), "{mapped}");
    // a layer without hot neurons is used where it lies, the others are taken apart
    let layers = drawn(5 << 20).with_offload(Offload::Layers).with_device_context(64);
    let split = estimated(layers.with_holding(Holding::Mapped));
    assert!(split.fast_bytes > 0 && split.mapped_bytes > 0 && split.weight_bytes < 4 << 20);
}

#[test]
fn a_note_says_why_there_is_nothing_on_the_device() {
    let nothing = |options: &LoadOptions| {
        let placed = find(options).unwrap();
        assert_eq!((n_hot(&placed), placed.has_dense_parts()), (0, false));
        placed.notes.join("; ")
    };
    let said = nothing(&drawn(100));
    assert!(said.contains("100 bytes") && said.contains("nothing fits"), "{said}");
    let none = Placement::new(vec![Default::default(); 6], 1024).unwrap();
    let said = nothing(&drawn(1 << 30).with_placement(none));
    assert!(said.contains("the placement puts nothing there"), "{said}");
    let said = nothing(&drawn(1 << 30).with_plan(planned(0, 0)).with_device_context(64));
    assert!(said.contains("the plan puts nothing there"), "{said}");
    assert!(said.contains("device_context changes nothing"), "{said}");
}

/// A plan of hot neurons of the demo model, with so much left for scratch memory.
fn planned(budget_bytes: u64, workspace_bytes: u64) -> Plan {
    let folder = Fixture::demo().model_dir;
    let sizes = crate::model_sizes(&folder, &LoadOptions::default()).unwrap();
    let profile = profile_beside(&folder).unwrap().unwrap();
    let hardware = Hardware::preset(Hardware::PRESETS[0]).unwrap();
    let request = PlanRequest::new(&sizes, &profile, &hardware, budget_bytes)
        .with_workspace_bytes(workspace_bytes)
        .with_sync_rule(false);
    plan(&request).unwrap()
}

#[test]
fn a_plan_that_leaves_no_scratch_memory_is_refused_before_anything_is_loaded() {
    let without = planned(2 << 20, 0);
    let budget = without.bytes_fast;
    let refused = find(&drawn(budget).with_plan(without.clone())).unwrap_err();
    assert!(
        matches!(refused, CoreError::PlanOverBudget { needed_bytes, budget_bytes, .. }
            if budget_bytes == budget && needed_bytes == without.bytes_fast + WORKSPACE),
        "{refused}"
    );
    assert!(find(&drawn(budget + WORKSPACE).with_plan(without)).is_ok());
    assert!(find(&drawn(budget).with_plan(planned(budget, WORKSPACE))).is_ok());
}
