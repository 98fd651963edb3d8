//! From activations to lists: `compact.cu`.

use hostsim::list_steps::{Entries, List, compact};
use hostsim::steps::{Parts, Rows};
use hostsim::{HostBuffer, HostQueue};
use testing::{Seeded, assert_same_bits};

use crate::device::{Ids, ORDERS};

/// A list on the device.
pub(crate) struct Listed {
    pub(crate) ids: HostBuffer,
    pub(crate) values: HostBuffer,
    tallies: HostBuffer,
    pub(crate) counts: HostBuffer,
    pub(crate) starts: HostBuffer,
}

impl Listed {
    pub(crate) fn list(&self) -> List {
        let [ids, values, tallies, counts, starts] = self.buffers().map(HostBuffer::address);
        List { ids, values, tallies, counts, starts }
    }

    fn buffers(&self) -> [&HostBuffer; 5] {
        [&self.ids, &self.values, &self.tallies, &self.counts, &self.starts]
    }

    fn is_overrun(&self) -> bool {
        self.buffers().into_iter().any(HostBuffer::is_overrun)
    }
}

/// The list that the kernel makes of `[n_tokens, n]` values, of all neurons or of those of a list.
pub(crate) fn compacted(
    queue: &HostQueue,
    (values, n_tokens, n_neurons): (&[f32], usize, usize),
    of: Option<&[u32]>,
) -> Result<Listed, String> {
    let stride = values.len() / n_tokens;
    let (buffer, device_ids) = (HostBuffer::of_f32(values), of.map(Ids::of));
    let rows = device_ids.as_ref().map_or(Rows::All, |list| {
        let (ids, count) = list.addresses();
        Rows::Listed { ids, count }
    });
    let listed = Listed {
        ids: HostBuffer::new(stride * 4),
        values: HostBuffer::new(values.len() * 4),
        tallies: HostBuffer::new(stride * 4),
        counts: HostBuffer::new(8),
        starts: HostBuffer::new((Parts::of(n_neurons).n + 1) * 4),
    };
    let (values, by_row) = (buffer.address(), false);
    let entries = Entries { values, stride, n_tokens, rows, by_row, n_neurons };
    compact(queue, &entries, &listed.list()).map_err(|error| error.to_string())?;
    if listed.is_overrun() {
        return Err("written beyond a buffer".to_owned());
    }
    Ok(listed)
}

/// Fails unless the kernel lists what the definition does.
pub(crate) fn check(
    queue: &HostQueue,
    (values, n_tokens, n_neurons): (&[f32], usize, usize),
    of: Option<&[u32]>,
) -> Result<(), String> {
    let listed = compacted(queue, (values, n_tokens, n_neurons), of)?;
    let stride = values.len() / n_tokens;
    let len = of.map_or(stride, <[u32]>::len);
    let fires = |t: usize, i: usize| values[t * stride + i] != 0.0;
    let kept: Vec<usize> = (0..len).filter(|&i| (0..n_tokens).any(|t| fires(t, i))).collect();
    let id_of = |i: usize| of.map_or(i, |of| of[i] as usize);
    let ids: Vec<usize> = kept.iter().map(|&i| id_of(i)).collect();
    let n_values = (0..n_tokens).map(|t| (0..len).filter(|&i| fires(t, i)).count()).sum::<usize>();
    let counts: Vec<usize> = listed.counts.to_u32().iter().map(|&n| n as usize).collect();
    if counts != [ids.len(), n_values] {
        return Err(format!("counts {counts:?}, expected {} and {n_values}", ids.len()));
    }
    let found: Vec<usize> =
        listed.ids.to_u32()[..ids.len()].iter().map(|&id| id as usize).collect();
    if found != ids {
        return Err(format!("ids {found:?}, expected {ids:?}"));
    }
    let parts = Parts::of(n_neurons);
    for (part, start) in listed.starts.to_u32().into_iter().enumerate() {
        let expected = ids.partition_point(|&id| id < part * parts.len);
        if start as usize != expected {
            return Err(format!("part {part} begins at {start}, expected {expected}"));
        }
    }
    let found = listed.values.to_f32();
    for (place, &i) in kept.iter().enumerate() {
        for t in 0..n_tokens {
            if found[t * stride + place].to_bits() != values[t * stride + i].to_bits() {
                return Err(format!("token {t}: the value of neuron {} is another's", id_of(i)));
            }
        }
    }
    Ok(())
}

/// `[n_tokens, n]` values of a density.
pub(crate) fn values(n_tokens: usize, n: usize, density: f32, seed: u64) -> Vec<f32> {
    let mut random = Seeded::new(seed);
    (0..n_tokens * n)
        .map(|_| if random.chance(density) { random.unit() + 0.5 } else { 0.0 })
        .collect()
}

#[test]
fn lists_are_the_neurons_with_a_value_in_ascending_order() {
    for n in [1, 31, 32, 33, 64, 257, 1000, 8192, 9001] {
        for (n_tokens, density) in [(1, 0.0), (1, 0.1), (1, 1.0), (3, 0.2)] {
            let values = values(n_tokens, n, density, n as u64);
            for order in ORDERS {
                check(&HostQueue::new(order), (&values, n_tokens, n), None).unwrap();
            }
        }
    }
}

#[test]
fn a_list_of_a_list_keeps_its_neurons_and_their_parts() {
    for (n, density) in [(1, 1.0), (300, 0.0), (300, 0.1), (5000, 0.5), (20_000, 0.01)] {
        let of = Seeded::new(n as u64).ids(n, density);
        let values = values(2, n, 0.4, 9);
        for order in ORDERS {
            check(&HostQueue::new(order), (&values, 2, n), Some(&of)).unwrap();
        }
    }
}

#[test]
fn what_is_not_a_number_is_listed_and_minus_zero_is_not() {
    let listed = compacted(&HostQueue::new(0), (&[0.0, f32::NAN, -0.0, 1.0], 1, 4), None).unwrap();
    assert_eq!(listed.counts.to_u32(), [2, 2]);
    assert_eq!(listed.ids.to_u32()[..2], [1, 3]);
    assert_same_bits(&listed.values.to_f32()[1..2], &[1.0], "the value");
}
