//! What is added to the residual stream, tokens that are not finite, norms to the last bit, and caches of
//! another capacity: `residual.cu`, `token_norms.cu`, `kv_copy` of `attention.cu`.

use hostsim::dense_steps::{DeviceCache, broken_tokens, residual_add};
use hostsim::estimate_steps::token_norms;
use hostsim::picks::norm;
use hostsim::queue::Address;
use hostsim::{HostBuffer, HostQueue};
use testing::Seeded;

use crate::device::{ORDERS, assert_within};

/// Fails unless sums are those of their terms, whichever are left out.
pub(crate) fn check_sums(queue: &HostQueue, n_tokens: usize, d: usize) -> Result<(), String> {
    let terms = [1, 2, 3].map(|seed| Seeded::new(seed).normal(n_tokens * d));
    let bias = Seeded::new(4).normal(d);
    for left_out in 0..8 {
        let x = HostBuffer::of_f32(&terms[0]);
        let there = [&terms[1], &terms[2], &bias].map(|values| HostBuffer::of_f32(values));
        let has = |at: usize| left_out >> at & 1 == 0;
        let address = |at: usize| if has(at) { there[at].address() } else { Address::NULL };
        residual_add(queue, x.address(), [0, 1, 2].map(address), [n_tokens, d])
            .map_err(|error| error.to_string())?;
        if x.is_overrun() {
            return Err("written beyond a buffer".to_owned());
        }
        for (at, found) in x.to_f32().into_iter().enumerate() {
            let value = |term: usize, value: f32| if has(term) { value } else { 0.0 };
            let sum = value(0, terms[1][at]) + value(1, terms[2][at]) + value(2, bias[at % d]);
            if found.to_bits() != (terms[0][at] + sum).to_bits() {
                return Err(format!("value {at}: {found}, expected {}", terms[0][at] + sum));
            }
        }
    }
    Ok(())
}

/// Fails unless norms are the CPU's to the last bit.
pub(crate) fn check_norms(queue: &HostQueue, d: usize) -> Result<(), String> {
    let x = Seeded::new(d as u64).normal(3 * d);
    let (there, norms) = (HostBuffer::of_f32(&x), HostBuffer::new(12));
    token_norms(queue, there.address(), [3, d], norms.address()).map_err(|e| e.to_string())?;
    let expected: Vec<u32> = x.chunks(d).map(|x| norm(x).to_bits()).collect();
    let found = norms.to_u32();
    (found == expected).then_some(()).ok_or_else(|| format!("{found:?}, expected {expected:?}"))
}

#[test]
fn the_stream_takes_what_is_added_to_it() {
    for (n_tokens, d) in [(1, 1), (3, 255), (2, 700)] {
        for order in ORDERS {
            check_sums(&HostQueue::new(order), n_tokens, d).unwrap();
        }
    }
}

#[test]
fn norms_are_the_cpu_s_to_the_last_bit() {
    for d in [1, 31, 1024, 1025, 4544] {
        for order in ORDERS {
            check_norms(&HostQueue::new(order), d).unwrap();
        }
    }
}

#[test]
fn tokens_that_are_not_finite_are_marked() {
    let d = 300;
    let mut x = Seeded::new(1).normal(5 * d);
    (x[d + 299], x[3 * d], x[4 * d + 7]) = (f32::NAN, f32::INFINITY, f32::MAX);
    let (there, marks) = (HostBuffer::of_f32(&x), HostBuffer::new(20));
    for order in ORDERS {
        broken_tokens(&HostQueue::new(order), there.address(), [5, d], marks.address()).unwrap();
        assert_eq!(marks.to_u32(), [0, 1, 0, 1, 0]);
        assert_within(&[&marks]);
    }
}

#[test]
fn a_cache_of_another_capacity_holds_the_same_positions() {
    let (n_kv_heads, d_head, kept) = (3, 5, 7);
    for half in [false, true] {
        let bytes = if half { 2 } else { 4 };
        let cache = |capacity: usize| {
            let len = n_kv_heads * capacity * d_head;
            let values: Vec<u8> = (0..len * bytes).map(|i| (i % 251) as u8).collect();
            [HostBuffer::of_bytes(&values), HostBuffer::of_bytes(&values)]
        };
        let (from, to) = (cache(9), cache(12));
        let device = |[keys, values]: &[HostBuffer; 2], capacity| {
            let [keys, values] = [keys.address(), values.address()];
            DeviceCache { keys, values, half, n_kv_heads, d_head, capacity }
        };
        device(&from, 9).copy(&HostQueue::new(0), &device(&to, 12), kept).unwrap();
        assert_within(&[&to[0], &to[1]]);
        for (from, to) in from.iter().zip(&to) {
            let (from, to) = (from.bytes(), to.bytes());
            let (from, to) = (from.chunks(9 * d_head * bytes), to.chunks(12 * d_head * bytes));
            for (from, to) in from.zip(to) {
                assert_eq!(from[..kept * d_head * bytes], to[..kept * d_head * bytes]);
            }
        }
    }
}
