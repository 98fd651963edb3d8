//! Memory that shows writes beyond it.

use std::cell::UnsafeCell;

use crate::queue::Address;

/// What a kernel may assume of an address.
const ALIGNMENT: usize = 256;
/// Bytes of each guard: more than a block of threads writes or reads beyond an end by mistake.
const GUARD_BYTES: usize = 64 << 10;
/// Read as a float it is a NaN, and as an id it is beyond every matrix.
const GUARD: u8 = 0xFF;

/// Memory for kernels, with a guard on either side.
#[derive(Debug)]
pub struct HostBuffer {
    bytes: Vec<UnsafeCell<u8>>,
    start: usize,
    len: usize,
}

impl HostBuffer {
    /// Memory that nobody has written: every float in it is a NaN.
    #[must_use]
    pub fn new(len: usize) -> Self {
        let total = len + 2 * GUARD_BYTES + ALIGNMENT;
        let bytes: Vec<UnsafeCell<u8>> = (0..total).map(|_| UnsafeCell::new(GUARD)).collect();
        let first = bytes.as_ptr().addr() + GUARD_BYTES;
        let start = GUARD_BYTES + first.next_multiple_of(ALIGNMENT) - first;
        Self { bytes, start, len }
    }

    /// Memory that holds `bytes`.
    #[must_use]
    pub fn of_bytes(bytes: &[u8]) -> Self {
        let mut buffer = Self::new(bytes.len());
        for (cell, byte) in buffer.bytes[buffer.start..].iter_mut().zip(bytes) {
            *cell.get_mut() = *byte;
        }
        buffer
    }

    /// Memory that holds `values`.
    #[must_use]
    pub fn of_f32(values: &[f32]) -> Self {
        Self::of_bytes(&values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<_>>())
    }

    /// Memory that holds `values`.
    #[must_use]
    pub fn of_u32(values: &[u32]) -> Self {
        Self::of_bytes(&values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<_>>())
    }

    /// Its length.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Where it is.
    #[must_use]
    pub fn address(&self) -> Address {
        Address(self.bytes[self.start..].as_ptr().expose_provenance() as u64)
    }

    /// Writes `bytes` at a place within.
    ///
    /// # Panics
    /// If they do not lie within.
    pub fn write(&self, address: Address, bytes: &[u8]) {
        let start = self.place(address, bytes.len());
        for (cell, byte) in self.bytes[start..].iter().zip(bytes) {
            // SAFETY: the cell exists, and no kernel is running: a launch returns when it has ended.
            unsafe { *cell.get() = *byte };
        }
    }

    /// `len` bytes at a place within.
    ///
    /// # Panics
    /// If they do not lie within.
    #[must_use]
    pub fn read(&self, address: Address, len: usize) -> Vec<u8> {
        self.cells(self.place(address, len), len)
    }

    /// What it holds.
    #[must_use]
    pub fn bytes(&self) -> Vec<u8> {
        self.cells(self.start, self.len)
    }

    /// What it holds.
    #[must_use]
    pub fn to_f32(&self) -> Vec<f32> {
        self.bytes().as_chunks().0.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect()
    }

    /// What it holds.
    #[must_use]
    pub fn to_u32(&self) -> Vec<u32> {
        self.bytes().as_chunks().0.iter().map(|&bytes| u32::from_le_bytes(bytes)).collect()
    }

    /// Whether something was written beyond its ends.
    #[must_use]
    pub fn is_overrun(&self) -> bool {
        let end = self.start + self.len;
        let guards = [self.cells(0, self.start), self.cells(end, self.bytes.len() - end)];
        guards.iter().flatten().any(|&byte| byte != GUARD)
    }

    fn place(&self, address: Address, len: usize) -> usize {
        let at = usize::try_from(address.0 - self.address().0).unwrap_or(usize::MAX);
        assert!(at.checked_add(len).is_some_and(|end| end <= self.len), "within the buffer");
        self.start + at
    }

    fn cells(&self, start: usize, len: usize) -> Vec<u8> {
        // SAFETY: the cells exist, and no kernel is running: a launch returns when it has ended.
        self.bytes[start..start + len].iter().map(|cell| unsafe { *cell.get() }).collect()
    }
}
