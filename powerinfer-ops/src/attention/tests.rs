use super::*;
use testing::{Seeded, assert_same_bits};

/// Keys and values in pages.
struct Pages(Vec<KvPage>);

impl KvPages for Pages {
    fn page(&self, index: usize) -> &KvPage {
        &self.0[index]
    }
}

impl Pages {
    fn new(layout: KvLayout, keys: &[f32], values: &[f32]) -> Self {
        let page_len = PAGE_LEN * layout.n_kv_heads * layout.d_head;
        let page = |(keys, values)| {
            let mut page = KvPage::zeroed(layout).unwrap();
            page.write(0, keys, values).unwrap();
            page
        };
        Self(keys.chunks(page_len).zip(values.chunks(page_len)).map(page).collect())
    }

    /// Keys of one value, all the same, and values that count up.
    fn counting(key: f32, n_positions: usize) -> Self {
        let layout = KvLayout { n_kv_heads: 1, d_head: 1, dtype: KvDtype::F32 };
        let values: Vec<f32> = (0..n_positions).map(|p| p as f32).collect();
        Self::new(layout, &vec![key; n_positions], &values)
    }
}

fn shape(first_position: usize) -> AttentionShape<'static> {
    AttentionShape {
        n_heads: 1,
        n_kv_heads: 1,
        d_head: 1,
        scale: 1.0,
        first_position,
        window: None,
        alibi_slopes: None,
    }
}

fn attended(key: f32, shape: AttentionShape<'_>) -> f32 {
    let query = Tensor::from_vec(vec![1.0f32], (1, 1), &Device::Cpu).unwrap();
    let pages = Pages::counting(key, shape.first_position + 1);
    let attended = causal_attention(&query, &pages, shape, &mut Workspace::default()).unwrap();
    attended.to_vec2::<f32>().unwrap()[0][0]
}

#[test]
fn a_window_sees_its_own_position_and_those_just_before_it() {
    for (position, window, mean) in [
        (0, 5, 0.0),
        (9, 1, 9.0),
        (9, 3, 8.0),
        (200, 4, 198.5),
        (129, 65, 97.0),
        (70, 500, 35.0),
        (1100, 3, 1099.0),
        (1024, 1024, 512.5),
    ] {
        let found = attended(0.0, AttentionShape { window: Some(window), ..shape(position) });
        assert!((found - mean).abs() < 1e-3, "{position} {window}: {found}");
    }
}

#[test]
fn a_query_that_sees_nothing_gets_zeros_and_a_nan_stays_one() {
    for position in [0, 100, 1000] {
        assert_eq!(attended(f32::NEG_INFINITY, shape(position)), 0.0);
        assert!(attended(f32::NAN, shape(position)).is_nan());
    }
}

#[test]
fn positions_without_weight_do_not_spoil_those_with_some() {
    let layout = KvLayout { n_kv_heads: 1, d_head: 1, dtype: KvDtype::F32 };
    let query = Tensor::from_vec(vec![1.0f32], (1, 1), &Device::Cpu).unwrap();
    for finite in [0, 70, 600, 1299] {
        let mut keys = vec![f32::NEG_INFINITY; 1300];
        keys[finite] = 3.0;
        let values: Vec<f32> = (0..1300).map(|p| p as f32).collect();
        let pages = Pages::new(layout, &keys, &values);
        let found = causal_attention(&query, &pages, shape(1299), &mut Workspace::default());
        assert_eq!(found.unwrap().to_vec2::<f32>().unwrap()[0][0], finite as f32);
    }
}

#[test]
fn alibi_favours_late_keys() {
    let slopes = alibi_slopes(1);
    let biased = AttentionShape { alibi_slopes: Some(&slopes), ..shape(300) };
    assert!(attended(0.0, biased) > attended(0.0, shape(300)));
}

#[test]
fn an_empty_window_and_missing_slopes_are_errors() {
    let query = Tensor::from_vec(vec![1.0f32], (1, 1), &Device::Cpu).unwrap();
    for shape in [
        AttentionShape { window: Some(0), ..shape(0) },
        AttentionShape { alibi_slopes: Some(&[]), ..shape(0) },
    ] {
        let pages = Pages::counting(0.0, 1);
        let error = causal_attention(&query, &pages, shape, &mut Workspace::default()).unwrap_err();
        assert!(matches!(error, OpError::Shape { .. }), "{error}");
    }
}

/// A pass that is cut in every way: short and long, whole blocks and chunks, one thread and several.
#[test]
fn every_table_gives_a_query_the_same_bits_in_any_cut() {
    for (n_heads, n_kv_heads, d_head, window, alibi) in [
        (8, 2, 64, None, false),
        (3, 3, 20, Some(300), true),
        (5, 1, 80, Some(700), false),
        (2, 2, 130, None, true),
    ] {
        let (n_before, n_tokens) = (1003, 90);
        let n = n_before + n_tokens;
        let width = n_kv_heads * d_head;
        let (keys, values) = (Seeded::new(1).normal(n * width), Seeded::new(2).normal(n * width));
        let queries = Seeded::new(3).normal(n_tokens * n_heads * d_head);
        let slopes = alibi.then(|| alibi_slopes(n_heads));
        for dtype in KvDtype::ALL {
            let pages = Pages::new(KvLayout { n_kv_heads, d_head, dtype }, &keys, &values);
            let run = |kernels: RowKernels, first: usize, queries: &[f32]| {
                let shape = AttentionShape {
                    n_heads,
                    n_kv_heads,
                    d_head,
                    scale: 1.0 / (d_head as f32).sqrt(),
                    first_position: n_before + first,
                    window,
                    alibi_slopes: slopes.as_deref(),
                };
                let row_ops = kernels.table().attention;
                let n_tokens = queries.len() / (n_heads * d_head);
                let pass = Pass { row_ops, shape, pages: &pages, queries, n_tokens };
                let mut out = vec![f32::NAN; queries.len()];
                pass.run(&mut AttentionScratch::default(), &mut out);
                out
            };
            let reference = run(RowKernels::available()[0], 0, &queries);
            for kernels in RowKernels::available() {
                let whole = run(kernels, 0, &queries);
                for (found, expected) in whole.iter().zip(&reference) {
                    assert!(
                        (found - expected).abs() < 1e-5,
                        "{} {found} {expected}",
                        kernels.name()
                    );
                }
                // the scalar table is slow, and its sums are cut by the same code
                let pieces: &[usize] = if kernels.name() == "scalar" { &[33] } else { &[1, 7, 33] };
                for &piece in pieces {
                    let mut pieces = Vec::new();
                    for (index, part) in queries.chunks(piece * n_heads * d_head).enumerate() {
                        pieces.extend(run(kernels, index * piece, part));
                    }
                    assert_same_bits(&pieces, &whole, kernels.name());
                }
                for n_threads in [1, 3] {
                    let pool =
                        crate::ThreadPool::new(std::num::NonZeroUsize::new(n_threads)).unwrap();
                    let found = pool.install(|| run(kernels, 0, &queries));
                    assert_same_bits(&found, &whole, kernels.name());
                }
            }
        }
    }
}
