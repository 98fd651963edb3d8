//! Weights and tokens in memory that kernels can read.

use hostsim::HostBuffer;
use hostsim::queue::Address;
use hostsim::row_layout::RowLayout;
use hostsim::steps::{DeviceInput, DeviceRows, Numbers, n_blocks};
use powerinfer_ops::{NeuronMatrix, WeightFormat};
use testing::Seeded;

/// Thread orders that every case runs in: ascending, descending, two at random.
pub(crate) const ORDERS: [u64; 4] = [0, 1, 2, 77];

/// Row lengths for a format: below, at and above a piece, a warp of pieces, several such.
pub(crate) fn widths(format: WeightFormat) -> Vec<usize> {
    let block = format.block_len();
    let lengths: &[usize] =
        if block == 1 { &[1, 3, 8, 31, 256, 259, 1100, 2600] } else { &[32, 96, 512, 544, 4256] };
    lengths.iter().map(|n| n.next_multiple_of(block)).collect()
}

/// A matrix on both devices.
pub(crate) struct Weights {
    pub(crate) host: NeuronMatrix,
    buffer: HostBuffer,
    layout: RowLayout,
}

impl Weights {
    pub(crate) fn random(format: WeightFormat, n: usize, d: usize, seed: u64) -> Self {
        Self::of(NeuronMatrix::from_f32(format, n, d, &Seeded::new(seed).normal(n * d)).unwrap())
    }

    pub(crate) fn of(host: NeuronMatrix) -> Self {
        let layout = RowLayout::new(host.format(), host.d_model()).unwrap();
        let mut bytes = vec![0; host.n_neurons() * layout.stride];
        for (row, bytes) in bytes.chunks_exact_mut(layout.stride.max(1)).enumerate() {
            layout.pack(host.row(row), bytes);
        }
        Self { buffer: HostBuffer::of_bytes(&bytes), layout, host }
    }

    pub(crate) fn rows(&self) -> DeviceRows {
        let n_rows = self.host.n_neurons();
        DeviceRows { address: self.buffer.address(), layout: self.layout, n_rows }
    }

    /// Row `row` as floats.
    pub(crate) fn row(&self, row: usize) -> Vec<f32> {
        let mut values = vec![0.0; self.host.d_model()];
        self.host.row_to_f32(row, &mut values);
        values
    }
}

/// Tokens on the device.
pub(crate) struct Tokens {
    pub(crate) values: Vec<f32>,
    pub(crate) buffers: [HostBuffer; 4],
    n_columns: usize,
    n_tokens: usize,
}

impl Tokens {
    pub(crate) fn random(n_tokens: usize, n_columns: usize, seed: u64) -> Self {
        Self::of(Seeded::new(seed).normal(n_tokens * n_columns), n_tokens, n_columns)
    }

    pub(crate) fn of(values: Vec<f32>, n_tokens: usize, n_columns: usize) -> Self {
        let blocks = n_tokens * n_blocks(n_columns);
        let [numbers, scales, norms] = [blocks * 32, blocks * 8, n_tokens * 4].map(HostBuffer::new);
        let buffers = [HostBuffer::of_f32(&values), numbers, scales, norms];
        Self { values, buffers, n_columns, n_tokens }
    }

    pub(crate) fn input(&self) -> DeviceInput {
        let [values, numbers, scales, norms] = self.buffers.each_ref().map(HostBuffer::address);
        let (n_columns, n_tokens) = (self.n_columns, self.n_tokens);
        DeviceInput { values, numbers: Numbers { numbers, scales, norms }, n_columns, n_tokens }
    }

    pub(crate) fn token(&self, token: usize) -> &[f32] {
        &self.values[token * self.n_columns..][..self.n_columns]
    }
}

/// A list of ids on the device.
pub(crate) struct Ids {
    pub(crate) ids: HostBuffer,
    pub(crate) count: HostBuffer,
}

impl Ids {
    pub(crate) fn of(ids: &[u32]) -> Self {
        let count = HostBuffer::of_u32(&[u32::try_from(ids.len()).unwrap()]);
        Self { ids: HostBuffer::of_u32(ids), count }
    }

    pub(crate) fn addresses(&self) -> (Address, Address) {
        (self.ids.address(), self.count.address())
    }
}

/// Lists that every operator runs over: none, one neuron, some, all.
pub(crate) fn lists(n: usize, seed: u64) -> Vec<Vec<u32>> {
    let mut random = Seeded::new(seed);
    let one = random.ids_exactly(n, 1.min(n));
    vec![Vec::new(), one, random.ids(n, 0.3), random.ids(n, 1.0)]
}

/// Fails if a kernel wrote beyond one of the buffers.
#[track_caller]
pub(crate) fn assert_within(buffers: &[&HostBuffer]) {
    assert!(buffers.iter().all(|buffer| !buffer.is_overrun()), "written beyond a buffer");
}
