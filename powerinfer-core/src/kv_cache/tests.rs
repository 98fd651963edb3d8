//! Tests of the cache.

use super::*;
use proptest::prelude::*;

const SHAPE: KvShape =
    KvShape { n_layers: 2, n_kv_heads: 3, d_head: 2, max_context: 300, dtype: KvDtype::F32 };
const WIDTH: usize = 6;

/// A value that says where it belongs.
fn value(layer: usize, position: usize, at: usize) -> f32 {
    (layer * 10_000 + position * 10 + at) as f32
}

fn append(cache: &mut KvCache, n_tokens: usize) {
    cache.reserve(n_tokens).unwrap();
    for layer in 0..SHAPE.n_layers {
        let keys: Vec<f32> = (0..n_tokens * WIDTH)
            .map(|i| value(layer, cache.len() + i / WIDTH, i % WIDTH))
            .collect();
        let values: Vec<f32> = keys.iter().map(|key| -key).collect();
        cache.write(layer, &keys, &values).unwrap();
    }
    cache.commit();
}

fn assert_holds_its_tokens(cache: &KvCache) {
    for layer in 0..SHAPE.n_layers {
        let pages = cache.layer(layer);
        for position in 0..cache.len() {
            let page = pages.page(position / PAGE_LEN);
            for head in 0..SHAPE.n_kv_heads {
                let expected: Vec<f32> =
                    (0..2).map(|d| value(layer, position, head * 2 + d)).collect();
                let negated: Vec<f32> = expected.iter().map(|key| -key).collect();
                assert_eq!(page.key(head, position % PAGE_LEN), expected);
                assert_eq!(page.value(head, position % PAGE_LEN), negated);
            }
        }
    }
}

proptest! {
    #[test]
    fn what_was_written_is_there_however_it_grew_and_was_cut(
        steps in prop::collection::vec((1usize..100, 0usize..4, 0usize..300), 1..8)
    ) {
        let mut cache = KvCache::new(SHAPE);
        for (n_tokens, kind, len) in steps {
            match kind {
                0 => cache.truncate(len),
                // a forward pass that fails half way, having written nonsense
                1 if cache.reserve(n_tokens).is_ok() => {
                    let junk = vec![f32::NAN; n_tokens * WIDTH];
                    cache.write(0, &junk, &junk).unwrap();
                    let before = cache.len();
                    cache.truncate(before);
                }
                _ if cache.len() + n_tokens <= SHAPE.max_context => append(&mut cache, n_tokens),
                _ => {}
            }
            assert_holds_its_tokens(&cache);
            prop_assert_eq!(cache.size_bytes(), SHAPE.size_bytes(cache.len()));
        }
    }
}

#[test]
fn clones_share_what_is_full_and_go_their_own_ways() {
    let mut one = KvCache::new(SHAPE);
    append(&mut one, 100);
    let mut other = one.clone();
    let shared = |a: &KvCache, b: &KvCache| {
        let pairs = a.pages.iter().zip(&b.pages);
        pairs.map(|(a, b)| Arc::ptr_eq(a, b)).collect::<Vec<_>>()
    };
    assert_eq!(shared(&one, &other), [true; 4]);
    other.reserve(3).unwrap();
    let junk = [9.0; 3 * WIDTH];
    other.write(0, &junk, &junk).unwrap();
    other.commit();
    assert_eq!(shared(&one, &other), [true, true, false, false]);
    append(&mut one, 10);
    assert_holds_its_tokens(&one);
    other.truncate(100);
    assert_holds_its_tokens(&other);
    other.truncate(64);
    append(&mut other, 20);
    assert_holds_its_tokens(&other);
    assert_holds_its_tokens(&one);
}

#[test]
fn a_forward_that_was_not_committed_leaves_nothing() {
    let mut cache = KvCache::new(SHAPE);
    append(&mut cache, 60);
    cache.reserve(10).unwrap();
    cache.write(1, &[f32::NAN; 60], &[f32::NAN; 60]).unwrap();
    assert_eq!((cache.len(), cache.reserved()), (60, 10));
    append(&mut cache, 1);
    assert_holds_its_tokens(&cache);
}

#[test]
fn reserved_positions_can_be_read() {
    let mut cache = KvCache::new(SHAPE);
    cache.reserve(65).unwrap();
    cache.write(0, &[1.0; 65 * WIDTH], &[2.0; 65 * WIDTH]).unwrap();
    let pages = cache.layer(0);
    assert_eq!((pages.page(1).key(2, 0), pages.page(1).value(2, 0)), (vec![1.0; 2], vec![2.0; 2]));
}

#[test]
fn a_huge_context_reserves_nothing() {
    let shape = KvShape {
        n_layers: 4096,
        n_kv_heads: 64,
        d_head: 256,
        max_context: usize::MAX,
        dtype: KvDtype::F16,
    };
    let mut cache = KvCache::new(shape);
    assert_eq!(cache.size_bytes(), 0);
    assert!(matches!(
        KvCache::new(KvShape { n_kv_heads: usize::MAX, ..SHAPE }).reserve(1),
        Err(Error::Allocation { .. })
    ));
    assert!(matches!(
        KvCache::new(KvShape { n_layers: 0, max_context: 5, ..SHAPE }).reserve(usize::MAX),
        Err(Error::ContextExceeded { have: 0, requested: usize::MAX, max: 5 })
    ));
    cache.clear();
}

#[test]
fn the_context_is_filled_to_the_last_token_and_no_further() {
    let mut cache = KvCache::new(SHAPE);
    append(&mut cache, 299);
    assert!(matches!(
        cache.reserve(2),
        Err(Error::ContextExceeded { have: 299, requested: 2, max: 300 })
    ));
    append(&mut cache, 1);
    assert!(cache.reserve(1).is_err());
    assert_eq!(cache.len(), 300);
    assert_holds_its_tokens(&cache);
}

#[test]
fn a_model_without_attention_counts_tokens() {
    let mut cache = KvCache::new(KvShape { max_context: 100, ..KvShape::default() });
    cache.reserve(70).unwrap();
    cache.commit();
    cache.truncate(65);
    assert_eq!((cache.len(), cache.size_bytes()), (65, 0));
    assert!(cache.reserve(36).is_err());
}

#[test]
fn wrong_sizes_are_errors() {
    let mut cache = KvCache::new(SHAPE);
    cache.reserve(2).unwrap();
    let (right, wrong) = ([0.0; 12], [0.0; 11]);
    for (layer, keys, values, what) in [
        (2, &right[..], &right[..], "layer"),
        (0, &wrong[..], &right[..], "keys"),
        (0, &right[..], &wrong[..], "values"),
    ] {
        assert!(matches!(
            cache.write(layer, keys, values),
            Err(Error::CacheShape { what: named, .. }) if named == what
        ));
    }
}

/// A cache whose second layer lies on a device, and the device.
fn with_device(budget_bytes: u64) -> (KvCache, Arc<powerinfer_ops::StandIn>) {
    let options = powerinfer_ops::StandInOptions::new(budget_bytes);
    let device = Arc::new(powerinfer_ops::StandIn::new(options).unwrap());
    let cache = KvCache::with_device(SHAPE, 5, device.clone(), &[false, true]).unwrap();
    (cache, device)
}

/// A pass that fills the device's layer.
fn pass(cache: &mut KvCache, n_tokens: usize) -> Result<()> {
    cache.reserve(n_tokens)?;
    let first = cache.len();
    cache.sequence().unwrap().begin(first, n_tokens, None)?;
    cache.commit();
    Ok(())
}

#[test]
fn layers_of_a_device_have_no_pages_here_and_clones_part_when_they_go_on() {
    let (mut cache, device) = with_device(1 << 20);
    assert!(cache.sequence().is_none());
    pass(&mut cache, 70).unwrap();
    let page = SHAPE.layout().page_bytes();
    assert_eq!(cache.size_bytes(), 2 * page, "two pages of one layer");
    assert_eq!(cache.device_bytes(), 2 * page as u64 + 70 * 3 * 5 * 4);
    assert!(cache.sequence().is_none(), "no pass is under way");
    let zeros = [0.0; WIDTH];
    cache.reserve(1).unwrap();
    cache.write(0, &zeros, &zeros).unwrap();
    assert!(matches!(cache.write(1, &zeros, &zeros), Err(Error::CacheShape { what: "layer", .. })));

    let mut copy = cache.clone();
    let held = device.memory().held_bytes;
    copy.truncate(10);
    assert_eq!(device.memory().held_bytes, held, "shared: nothing is cut or copied yet");
    pass(&mut copy, 1).unwrap();
    assert!(device.memory().held_bytes > held);
    assert_eq!((cache.len(), copy.len()), (70, 11));
    pass(&mut cache, 5).unwrap();
    copy.clear();
    assert_eq!(copy.device_bytes(), 0);
    cache.truncate(20);
    assert!(cache.device_bytes() < held, "what lies behind is freed");
    drop((cache, copy));
    let left = device.memory().held_bytes;
    pass(&mut KvCache::with_device(SHAPE, 5, device.clone(), &[true; 2]).unwrap(), 70).unwrap();
    assert_eq!(device.memory().held_bytes, left, "all comes back");
    let wrong = KvCache::with_device(SHAPE, 5, device, &[true]);
    assert!(matches!(wrong, Err(Error::CacheShape { expected: 2, found: 1, .. })));
}

#[test]
fn a_device_without_room_leaves_the_cache() {
    let page = SHAPE.layout().page_bytes() as u64;
    let (mut cache, _device) = with_device(page + 64 * 3 * 5 * 4);
    pass(&mut cache, 40).unwrap();
    assert!(matches!(pass(&mut cache, 30), Err(Error::Op(OpError::DeviceBudget { .. }))));
    assert_eq!(cache.len(), 40);
    let mut copy = cache.clone();
    assert!(matches!(pass(&mut copy, 1), Err(Error::Op(OpError::DeviceBudget { .. }))));
    drop(copy);
    pass(&mut cache, 20).unwrap();
    assert_eq!(cache.len(), 60);
}
