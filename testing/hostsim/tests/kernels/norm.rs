//! Norms and the rotary embedding: `norm.cu` and `rotary.cu`.

use hostsim::dense_steps::{DeviceNorm, Stream, norm, rotary};
use hostsim::queue::Address;
use hostsim::{HostBuffer, HostQueue};
use testing::Seeded;

use crate::device::ORDERS;

/// Fails unless three tokens are normed, and added to, as the definition says.
pub(crate) fn check_norm(queue: &HostQueue, centred: bool, d: usize) -> Result<(), String> {
    let mut random = Seeded::new(d as u64);
    let [x, add] = [(); 2].map(|()| random.normal(3 * d));
    let [scale, shift] = [(); 2].map(|()| random.normal(d));
    let [x_there, add_there, scale_there, shift_there] =
        [&x, &add, &scale, &shift].map(|values| HostBuffer::of_f32(values));
    let [sum_there, out_there] = [(); 2].map(|()| HostBuffer::new(3 * d * 4));
    let eps = 1e-5;
    let weights = DeviceNorm {
        scale: scale_there.address(),
        shift: if centred { shift_there.address() } else { Address::NULL },
        eps,
        centred,
    };
    let (values, add_address) = (x_there.address(), add_there.address());
    let stream =
        Stream { values, add: add_address, sum: sum_there.address(), n_tokens: 3, d_model: d };
    norm(queue, &weights, &stream, out_there.address()).map_err(|error| error.to_string())?;
    if sum_there.is_overrun() || out_there.is_overrun() {
        return Err("written beyond a buffer".to_owned());
    }
    let (sums, out) = (sum_there.to_f32(), out_there.to_f32());
    for t in 0..3 {
        let sum: Vec<f64> =
            (t * d..(t + 1) * d).map(|i| f64::from(x[i]) + f64::from(add[i])).collect();
        let mean = if centred { sum.iter().sum::<f64>() / d as f64 } else { 0.0 };
        let square = sum.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / d as f64;
        for (i, value) in sum.iter().enumerate() {
            let normed = (value - mean) / (square + f64::from(eps)).sqrt() * f64::from(scale[i]);
            let expected = if centred { normed + f64::from(shift[i]) } else { normed };
            let found = [sums[t * d + i], out[t * d + i]].map(f64::from);
            let off = [(found[0] - value).abs(), (found[1] - expected).abs()];
            if !off.iter().all(|&off| off < 1e-5 * (1.0 + expected.abs())) {
                return Err(format!("value {i} of token {t}: {found:?}, {value} {expected}"));
            }
        }
    }
    Ok(())
}

/// Fails unless two tokens' heads are turned as the definition says.
pub(crate) fn check_rotary(queue: &HostQueue, n_heads: usize, d_head: usize) -> Result<(), String> {
    let (half, width) = (d_head / 2, n_heads * d_head);
    let x = Seeded::new(width as u64).normal(2 * width);
    let angles = Seeded::new(2).uniform(2 * half, -3.0, 3.0);
    let tables: Vec<Vec<f32>> =
        [f32::cos, f32::sin].map(|f| angles.iter().map(|&a| f(a)).collect()).into();
    let there = HostBuffer::of_f32(&x);
    let tables_there = [0, 1].map(|at: usize| HostBuffer::of_f32(&tables[at]));
    let addresses = tables_there.each_ref().map(HostBuffer::address);
    rotary(queue, there.address(), [2, n_heads, d_head], addresses)
        .map_err(|error| error.to_string())?;
    if there.is_overrun() {
        return Err("written beyond a buffer".to_owned());
    }
    let found = there.to_f32();
    for (at, &found) in found.iter().enumerate() {
        let (t, i) = (at / width, at % d_head);
        let (cos, sin) = (tables[0][t * half + i % half], tables[1][t * half + i % half]);
        let expected = if i < half {
            x[at] * cos - x[at + half] * sin
        } else {
            x[at - half] * sin + x[at] * cos
        };
        if (found - expected).abs() > 1e-5 {
            return Err(format!("value {at}: {found}, expected {expected}"));
        }
    }
    Ok(())
}

#[test]
fn norms_are_their_definitions() {
    for d in [1, 31, 256, 300, 4544] {
        for order in ORDERS {
            for centred in [false, true] {
                check_norm(&HostQueue::new(order), centred, d).unwrap();
            }
        }
    }
}

#[test]
fn heads_turn_by_their_angles() {
    for (n_heads, d_head) in [(1, 2), (3, 10), (32, 128), (71, 64)] {
        check_rotary(&HostQueue::new(1), n_heads, d_head).unwrap();
    }
}
