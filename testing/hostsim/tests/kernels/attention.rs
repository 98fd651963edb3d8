//! Attention over a cache in place: `attention.cu` against the CPU's `causal_attention`.

use candle_core::{Device, Tensor};
use hostsim::dense_steps::{DeviceCache, Queries, attention};
use hostsim::queue::Address;
use hostsim::{HostBuffer, HostQueue};
use powerinfer_ops::Workspace;
use powerinfer_ops::attention::{
    AttentionShape, KvDtype, KvLayout, KvPage, KvPages, PAGE_LEN, alibi_slopes, causal_attention,
};
use testing::{Seeded, assert_same_bits};

use crate::device::ORDERS;

struct Pages(Vec<KvPage>);

impl KvPages for Pages {
    fn page(&self, index: usize) -> &KvPage {
        &self.0[index]
    }
}

/// A layer whose last `n_tokens` of `n_positions` ask.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Case {
    n_heads: usize,
    n_kv_heads: usize,
    d_head: usize,
    n_positions: usize,
    n_tokens: usize,
    window: Option<usize>,
    alibi: bool,
    half: bool,
}

impl Case {
    pub(crate) fn plain(n_positions: usize, n_tokens: usize) -> Self {
        let (window, alibi, half) = (None, false, false);
        Self { n_heads: 4, n_kv_heads: 2, d_head: 40, n_positions, n_tokens, window, alibi, half }
    }

    /// Every kind of layer.
    pub(crate) fn kinds(n_positions: usize, n_tokens: usize) -> [Self; 6] {
        let plain = Self::plain(n_positions, n_tokens);
        [
            plain,
            Self { half: true, d_head: 64, ..plain },
            Self { window: Some(3), alibi: true, ..plain },
            Self { window: Some(260), n_heads: 2, ..plain },
            Self { alibi: true, n_heads: 6, n_kv_heads: 1, d_head: 7, ..plain },
            Self { d_head: 160, n_heads: 2, n_kv_heads: 1, half: true, ..plain },
        ]
    }

    /// One of its tokens without the others.
    pub(crate) fn alone(&self, token: usize) -> Self {
        let n_positions = self.n_positions - self.n_tokens + token + 1;
        Self { n_positions, n_tokens: 1, ..*self }
    }

    fn queries(&self) -> Vec<f32> {
        let width = self.n_heads * self.d_head;
        let all = Seeded::new(1).normal(self.n_positions * width);
        all[(self.n_positions - self.n_tokens) * width..].to_vec()
    }

    /// Keys and values of all positions.
    fn cached(&self) -> [Vec<f32>; 2] {
        [2, 3]
            .map(|seed| Seeded::new(seed).normal(self.n_positions * self.n_kv_heads * self.d_head))
    }

    /// What the kernels give; keys and values are written in two pieces, as a prompt and what follows.
    pub(crate) fn run(&self, queue: &HostQueue) -> Result<Vec<f32>, String> {
        let error = |error: hostsim::LaunchError| error.to_string();
        let Case { n_heads, n_kv_heads, d_head, n_positions, n_tokens, .. } = *self;
        let capacity = n_positions + 5;
        let element = if self.half { 2 } else { 4 };
        let bytes = n_kv_heads * capacity * d_head * element;
        let [keys_there, values_there] = [(); 2].map(|()| HostBuffer::new(bytes));
        let (keys, values) = (keys_there.address(), values_there.address());
        let half = self.half;
        let cache = DeviceCache { keys, values, half, n_kv_heads, d_head, capacity };
        let [keys, values] = self.cached();
        let (width, first_position) = (n_kv_heads * d_head, n_positions - n_tokens);
        for (first, n) in [(0, first_position), (first_position, n_tokens)] {
            if n > 0 {
                let piece = |all: &[f32]| HostBuffer::of_f32(&all[first * width..][..n * width]);
                let pieces = [piece(&keys), piece(&values)];
                let addresses = pieces.each_ref().map(HostBuffer::address);
                cache.write(queue, addresses, first, n).map_err(error)?;
            }
        }
        let queries_there = HostBuffer::of_f32(&self.queries());
        let slopes = HostBuffer::of_f32(&alibi_slopes(n_heads));
        let queries = Queries {
            values: queries_there.address(),
            n_heads,
            n_tokens,
            first_position,
            window: self.window,
            scale: 1.0 / (d_head as f32).sqrt(),
            slopes: if self.alibi { slopes.address() } else { Address::NULL },
        };
        let parts = HostBuffer::new(
            queries.n_tokens * queries.n_heads * queries.n_chunks() * (d_head + 2) * 4,
        );
        let out = HostBuffer::new(n_tokens * n_heads * d_head * 4);
        attention(queue, &queries, &cache, parts.address(), out.address()).map_err(error)?;
        let buffers = [&keys_there, &values_there, &parts, &out];
        if buffers.iter().any(|buffer| buffer.is_overrun()) {
            return Err("written beyond a buffer".to_owned());
        }
        Ok(out.to_f32())
    }

    fn expected(&self) -> Vec<f32> {
        let Case { n_heads, n_kv_heads, d_head, n_positions, n_tokens, window, .. } = *self;
        let dtype = if self.half { KvDtype::F16 } else { KvDtype::F32 };
        let layout = KvLayout { n_kv_heads, d_head, dtype };
        let [keys, values] = self.cached();
        let page_len = PAGE_LEN * n_kv_heads * d_head;
        let pages = keys.chunks(page_len).zip(values.chunks(page_len)).map(|(keys, values)| {
            let mut page = KvPage::zeroed(layout).unwrap();
            page.write(0, keys, values).unwrap();
            page
        });
        let slopes = alibi_slopes(n_heads);
        let shape = AttentionShape {
            n_heads,
            n_kv_heads,
            d_head,
            scale: 1.0 / (d_head as f32).sqrt(),
            first_position: n_positions - n_tokens,
            window,
            alibi_slopes: self.alibi.then_some(&slopes[..]),
        };
        let dims = (n_tokens, n_heads * d_head);
        let queries = Tensor::from_vec(self.queries(), dims, &Device::Cpu).unwrap();
        let pages = Pages(pages.collect());
        let out = causal_attention(&queries, &pages, shape, &mut Workspace::default()).unwrap();
        out.flatten_all().unwrap().to_vec1().unwrap()
    }

    /// Fails unless the kernels give what the CPU does: means of values, whose shares round.
    pub(crate) fn check(&self, queue: &HostQueue) -> Result<(), String> {
        let (found, expected) = (self.run(queue)?, self.expected());
        for (i, (found, expected)) in found.iter().zip(&expected).enumerate() {
            let near = (found - expected).abs() <= 2e-5 * (1.0 + expected.abs());
            if !near {
                return Err(format!("value {i}: {found}, expected {expected}"));
            }
        }
        Ok(())
    }
}

#[test]
fn attention_is_the_cpu_s_over_lengths_heads_windows_and_slopes() {
    for (n_positions, n_tokens) in [(1, 1), (2, 2), (256, 1), (257, 1), (300, 5), (1030, 2)] {
        for case in Case::kinds(n_positions, n_tokens) {
            // long ones take long
            let orders = if n_positions > 300 { &ORDERS[2..3] } else { &ORDERS[..] };
            for &order in orders {
                let checked = case.check(&HostQueue::new(order));
                assert_eq!(checked, Ok(()), "{case:?}, order {order}");
            }
        }
    }
}

#[test]
fn a_token_attends_with_the_same_bits_alone_and_among_others() {
    for window in [None, Some(100)] {
        let together = Case { window, ..Case::plain(600, 4) };
        let alone = Case { n_tokens: 1, ..together };
        let width = together.n_heads * together.d_head;
        let all = together.run(&HostQueue::new(0)).unwrap();
        let last = alone.run(&HostQueue::new(0)).unwrap();
        assert_same_bits(&last, &all[3 * width..], format!("{window:?}"));
    }
}
