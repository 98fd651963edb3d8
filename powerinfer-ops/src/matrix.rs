//! Weight matrices whose rows are neurons.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use rayon::prelude::*;

use crate::bytes::{AlignedBytes, LINE_BYTES};
use crate::error::OpError;
use crate::format::{MAX_BLOCK_LEN, WeightFormat};
use crate::mask::NeuronIds;

/// Neurons that are transposed together: one cache line of f16 from each source row.
const TRANSPOSE_ROWS: usize = 32;

/// A weight matrix `[n_neurons, d_model]`, one row a neuron.
///
/// Gate and up matrices are stored this way in model files; a down matrix is stored transposed
/// there and comes in through [`from_transposed`](Self::from_transposed), so that a neuron is a
/// row of it, too. Rows start at multiples of 64 bytes, in huge pages where the system has them;
/// or they stay where they are, in a mapped file ([`from_shared`](Self::from_shared)). Cloning shares the bytes.
///
/// # Examples
/// ```
/// use powerinfer_ops::{NeuronMatrix, WeightFormat};
/// let w = NeuronMatrix::from_f32(WeightFormat::F16, 2, 3, &[1., 2., 3., 4., 5., 6.])?;
/// let mut row = [0.0; 3];
/// w.row_to_f32(1, &mut row);
/// assert_eq!(row, [4., 5., 6.]);
/// # Ok::<(), powerinfer_ops::OpError>(())
/// ```
#[derive(Clone)]
pub struct NeuronMatrix {
    bytes: RowBytes,
    /// Where row `i` lies, if not in place `i`.
    order: Option<Arc<[u32]>>,
    format: WeightFormat,
    n_neurons: usize,
    d_model: usize,
    row_bytes: usize,
    stride: usize,
    /// The copy on a GPU, where an operator met the matrix there.
    #[cfg(feature = "cuda")]
    pub(crate) device_copy: crate::cuda::DeviceCopy,
}

/// The bytes of a matrix.
#[derive(Clone)]
enum RowBytes {
    Owned(Arc<AlignedBytes>),
    Shared(SharedBytes),
}

/// A part of bytes that live somewhere else, such as a mapped file.
///
/// # Examples
/// ```
/// use std::sync::Arc;
/// use powerinfer_ops::SharedBytes;
/// let bytes = SharedBytes::new(Arc::new(vec![1u8, 2, 3, 4]), 1..3);
/// assert_eq!(bytes.as_slice(), [2, 3]);
/// ```
#[derive(Clone)]
pub struct SharedBytes {
    bytes: Arc<dyn AsRef<[u8]> + Send + Sync>,
    range: Range<usize>,
}

impl SharedBytes {
    /// The bytes of `range`; none if there are not so many.
    #[must_use]
    pub fn new(bytes: Arc<dyn AsRef<[u8]> + Send + Sync>, range: Range<usize>) -> Self {
        Self { bytes, range }
    }

    /// The bytes.
    #[must_use]
    pub fn as_slice(&self) -> &[u8] {
        (*self.bytes).as_ref().get(self.range.clone()).unwrap_or_default()
    }
}

impl fmt::Debug for SharedBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SharedBytes({:?})", self.range)
    }
}

impl NeuronMatrix {
    /// A matrix of packed rows that are not copied. They need no alignment. `order` says in which
    /// place row `i` lies, where that is not place `i`.
    ///
    /// # Errors
    /// [`OpError::ByteLength`] for another number of bytes, [`OpError::Shape`] for an order of
    /// another length, [`OpError::IdOutOfRange`] for a place beyond the rows, and as
    /// [`try_from_packed`](Self::try_from_packed).
    pub fn from_shared(
        format: WeightFormat,
        [n_neurons, d_model]: [usize; 2],
        bytes: SharedBytes,
        order: Option<Arc<[u32]>>,
    ) -> Result<Self, OpError> {
        let op = "NeuronMatrix::from_shared";
        let (row_bytes, _) = Self::layout(format, n_neurons, d_model)?;
        let (expected, found) = (n_neurons * row_bytes, bytes.as_slice().len());
        if expected != found {
            return Err(OpError::ByteLength { what: op, expected, found });
        }
        if let Some(order) = &order {
            if order.len() != n_neurons {
                let (expected, found) = (vec![n_neurons], vec![order.len()]);
                return Err(OpError::Shape { op, what: "order", expected, found });
            }
            if let Some(&id) = order.iter().find(|&&place| place as usize >= n_neurons) {
                return Err(OpError::IdOutOfRange { op, id, n_rows: n_neurons });
            }
        }
        let (bytes, stride) = (RowBytes::Shared(bytes), row_bytes);
        Ok(Self {
            bytes,
            order,
            format,
            n_neurons,
            d_model,
            row_bytes,
            stride,
            #[cfg(feature = "cuda")]
            device_copy: crate::cuda::DeviceCopy::default(),
        })
    }

    /// A matrix whose rows follow each other at `stride`.
    fn owned(
        bytes: AlignedBytes,
        format: WeightFormat,
        [n_neurons, d_model]: [usize; 2],
        [row_bytes, stride]: [usize; 2],
    ) -> Self {
        let bytes = RowBytes::Owned(Arc::new(bytes));
        Self {
            bytes,
            order: None,
            format,
            n_neurons,
            d_model,
            row_bytes,
            stride,
            #[cfg(feature = "cuda")]
            device_copy: crate::cuda::DeviceCopy::default(),
        }
    }

    /// Builds a matrix from packed rows: `fill(offset, bytes)` is asked for `bytes.len()` bytes
    /// at `offset` of the packed form, once for everything where rows need no padding and once a
    /// row otherwise.
    ///
    /// # Errors
    /// [`OpError::RowLength`], [`OpError::TooLarge`] or [`OpError::Allocation`] before `fill` is
    /// called, then whatever `fill` returns.
    pub fn try_from_packed<E: From<OpError>>(
        format: WeightFormat,
        n_neurons: usize,
        d_model: usize,
        mut fill: impl FnMut(u64, &mut [u8]) -> Result<(), E>,
    ) -> Result<Self, E> {
        let (row_bytes, stride) = Self::layout(format, n_neurons, d_model)?;
        let mut bytes = AlignedBytes::zeroed(n_neurons * stride)?;
        if stride == row_bytes && !bytes.as_slice().is_empty() {
            fill(0, bytes.as_mut_slice())?;
        } else if row_bytes > 0 {
            for (row, bytes) in bytes.as_mut_slice().chunks_exact_mut(stride).enumerate() {
                fill((row * row_bytes) as u64, &mut bytes[..row_bytes])?;
            }
        }
        Ok(Self::owned(bytes, format, [n_neurons, d_model], [row_bytes, stride]))
    }

    /// Builds a matrix row by row: `fill(row, bytes)` writes the bytes of one row.
    ///
    /// # Errors
    /// As [`try_from_packed`](Self::try_from_packed).
    pub fn try_from_rows<E: From<OpError>>(
        format: WeightFormat,
        n_neurons: usize,
        d_model: usize,
        mut fill: impl FnMut(usize, &mut [u8]) -> Result<(), E>,
    ) -> Result<Self, E> {
        let row_bytes = format.row_bytes(d_model)?.max(1);
        Self::try_from_packed(format, n_neurons, d_model, |offset, bytes| {
            let first = offset as usize / row_bytes;
            let mut rows = bytes.chunks_exact_mut(row_bytes).enumerate();
            rows.try_for_each(|(row, bytes)| fill(first + row, bytes))
        })
    }

    /// Encodes `values`, `[n_neurons, d_model]` in row order.
    ///
    /// # Errors
    /// [`OpError::Shape`] if `values` has another length, and as
    /// [`try_from_packed`](Self::try_from_packed).
    pub fn from_f32(
        format: WeightFormat,
        n_neurons: usize,
        d_model: usize,
        values: &[f32],
    ) -> Result<Self, OpError> {
        if n_neurons.checked_mul(d_model) != Some(values.len()) {
            return Err(OpError::Shape {
                op: "NeuronMatrix::from_f32",
                what: "values",
                expected: vec![n_neurons, d_model],
                found: vec![values.len()],
            });
        }
        Self::try_from_rows(format, n_neurons, d_model, |row, bytes| {
            format.encode(&values[row * d_model..][..d_model], bytes);
            Ok(())
        })
    }

    /// Turns packed `[d_model, n_neurons]` bytes, the way files hold a down projection, into
    /// `[n_neurons, d_model]`, converting the format on the way. Runs on the current pool.
    ///
    /// # Errors
    /// [`OpError::ByteLength`] if `source` has another length than its shape says, and as
    /// [`try_from_packed`](Self::try_from_packed).
    pub fn from_transposed(
        format: WeightFormat,
        n_neurons: usize,
        d_model: usize,
        source_format: WeightFormat,
        source: &[u8],
    ) -> Result<Self, OpError> {
        let (row_bytes, stride) = Self::layout(format, n_neurons, d_model)?;
        let source_row_bytes = source_format.row_bytes(n_neurons)?;
        let expected = source_row_bytes
            .checked_mul(d_model)
            .ok_or(OpError::TooLarge { n_rows: d_model, row_bytes: source_row_bytes })?;
        if source.len() != expected {
            let what = "the transposed source";
            return Err(OpError::ByteLength { what, expected, found: source.len() });
        }
        let mut bytes = AlignedBytes::zeroed(n_neurons * stride)?;
        if n_neurons > 0 && d_model > 0 {
            // whole blocks of the source
            let strip_rows = TRANSPOSE_ROWS.max(source_format.block_len());
            let strips = bytes.as_mut_slice().par_chunks_mut(stride * strip_rows).enumerate();
            strips.for_each_init(Vec::new, |values: &mut Vec<f32>, (strip, rows)| {
                let n_rows = rows.len() / stride;
                let first = strip * strip_rows / source_format.block_len();
                let offset = first * source_format.block_bytes();
                let mut column = [0.0; MAX_BLOCK_LEN];
                let segment = n_rows / source_format.block_len() * source_format.block_bytes();
                values.resize(n_rows * d_model, 0.0);
                for (d, source) in source.chunks_exact(source_row_bytes).enumerate() {
                    source_format.decode(&source[offset..][..segment], &mut column[..n_rows]);
                    for (row, &value) in column[..n_rows].iter().enumerate() {
                        values[row * d_model + d] = value;
                    }
                }
                let rows = rows.chunks_exact_mut(stride);
                for (row, values) in rows.zip(values.chunks_exact(d_model)) {
                    format.encode(values, &mut row[..row_bytes]);
                }
            });
        }
        Ok(Self::owned(bytes, format, [n_neurons, d_model], [row_bytes, stride]))
    }

    /// Copies some rows into a matrix of their own: the rows of one placement side. Shared rows are
    /// not copied but stay where they are.
    ///
    /// # Errors
    /// [`OpError::IdOutOfRange`] if an id is beyond the rows, [`OpError::Allocation`].
    pub fn pick_rows(&self, ids: &NeuronIds) -> Result<Self, OpError> {
        self.check_ids("NeuronMatrix::pick_rows", ids)?;
        if let RowBytes::Shared(_) = &self.bytes {
            let place = |&id: &u32| self.order.as_ref().map_or(id, |order| order[id as usize]);
            let order = ids.as_slice().iter().map(place).collect();
            return Ok(Self {
                order: Some(order),
                n_neurons: ids.len(),
                #[cfg(feature = "cuda")]
                device_copy: crate::cuda::DeviceCopy::default(),
                ..self.clone()
            });
        }
        self.copy_rows(ids)
    }

    /// Copies some rows into a matrix of their own, wherever they lie.
    pub(crate) fn copy_rows(&self, ids: &NeuronIds) -> Result<Self, OpError> {
        self.check_ids("NeuronMatrix::copy_rows", ids)?;
        Self::try_from_rows(self.format, ids.len(), self.d_model, |row, bytes| {
            bytes.copy_from_slice(self.row(ids.as_slice()[row] as usize));
            Ok(())
        })
    }

    /// Rows, that is neurons.
    #[must_use]
    pub fn n_neurons(&self) -> usize {
        self.n_neurons
    }

    /// Values in a row.
    #[must_use]
    pub fn d_model(&self) -> usize {
        self.d_model
    }

    /// How a row is stored.
    #[must_use]
    pub fn format(&self) -> WeightFormat {
        self.format
    }

    /// Bytes of a row, without padding.
    #[must_use]
    pub fn row_bytes(&self) -> usize {
        self.row_bytes
    }

    /// Bytes of all rows, without padding: what a pass over the matrix reads.
    #[must_use]
    pub fn size_bytes(&self) -> usize {
        self.n_neurons * self.row_bytes
    }

    /// Bytes that such a matrix takes in memory, padding of its rows included.
    ///
    /// # Errors
    /// [`OpError::RowLength`] or [`OpError::TooLarge`] where there can be no such matrix.
    pub fn resident_bytes(
        format: WeightFormat,
        n_neurons: usize,
        d_model: usize,
    ) -> Result<usize, OpError> {
        let (_, stride) = Self::layout(format, n_neurons, d_model)?;
        Ok(n_neurons * stride)
    }

    /// What kind of memory pages the system was asked for.
    #[must_use]
    pub fn page_kind(&self) -> &'static str {
        match &self.bytes {
            RowBytes::Owned(bytes) => bytes.page_kind(),
            RowBytes::Shared(_) => "pages of a file",
        }
    }

    /// The bytes of a row.
    ///
    /// # Panics
    /// If `index` is not below [`n_neurons`](Self::n_neurons).
    #[must_use]
    #[inline]
    pub fn row(&self, index: usize) -> &[u8] {
        assert!(index < self.n_neurons, "row {index} of {}", self.n_neurons);
        let place = self.order.as_ref().map_or(index, |order| order[index] as usize);
        let bytes = match &self.bytes {
            RowBytes::Owned(bytes) => bytes.as_slice(),
            RowBytes::Shared(bytes) => bytes.as_slice(),
        };
        &bytes[place * self.stride..][..self.row_bytes]
    }

    /// Decodes a row.
    ///
    /// # Panics
    /// If `index` is out of range or `values` does not hold `d_model` values.
    pub fn row_to_f32(&self, index: usize, values: &mut [f32]) {
        self.format.decode(self.row(index), values);
    }

    /// Fails if an id is beyond the rows.
    pub(crate) fn check_ids(&self, op: &'static str, ids: &NeuronIds) -> Result<(), OpError> {
        ids.check_below(op, self.n_neurons)
    }

    /// Bytes of a row without and with padding, checked for the whole matrix.
    fn layout(
        format: WeightFormat,
        n_neurons: usize,
        d_model: usize,
    ) -> Result<(usize, usize), OpError> {
        let row_bytes = format.row_bytes(d_model)?;
        let too_large = || OpError::TooLarge { n_rows: n_neurons, row_bytes };
        let stride = row_bytes.checked_next_multiple_of(LINE_BYTES).ok_or_else(too_large)?;
        let total = stride.checked_mul(n_neurons).filter(|&total| total <= isize::MAX as usize);
        // ids are u32
        if total.is_none() || u32::try_from(n_neurons).is_err() {
            return Err(too_large());
        }
        Ok((row_bytes, stride))
    }
}

impl fmt::Debug for NeuronMatrix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NeuronMatrix([{}, {}], {})", self.n_neurons, self.d_model, self.format)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn values(n: usize) -> Vec<f32> {
        (0..n).map(|i| (i as f32 * 0.37).sin()).collect()
    }

    proptest! {
        #[test]
        fn transposing_equals_picking_each_value(
            n_neurons in 0usize..100,
            d_model in 0usize..70,
            to in 0..WeightFormat::ALL.len(),
            from in 0..WeightFormat::ALL.len(),
        ) {
            let (to, from) = (WeightFormat::ALL[to], WeightFormat::ALL[from]);
            let (n_neurons, d_model) =
                (n_neurons.next_multiple_of(from.block_len()), d_model.next_multiple_of(to.block_len()));
            let source = values(n_neurons * d_model);
            let mut packed = vec![0; from.row_bytes(source.len()).unwrap()];
            from.encode(&source, &mut packed);
            let matrix = NeuronMatrix::from_transposed(to, n_neurons, d_model, from, &packed).unwrap();
            let mut seen = source.clone();
            from.decode(&packed, &mut seen);
            let straight: Vec<f32> =
                (0..n_neurons * d_model).map(|i| seen[i % d_model * n_neurons + i / d_model]).collect();
            let expected = NeuronMatrix::from_f32(to, n_neurons, d_model, &straight).unwrap();
            for row in 0..n_neurons {
                prop_assert_eq!(matrix.row(row), expected.row(row));
            }
        }
    }

    #[test]
    fn picked_rows_are_the_rows() {
        let matrix = NeuronMatrix::from_f32(WeightFormat::BF16, 9, 5, &values(45)).unwrap();
        let ids = NeuronIds::from_sorted(vec![0, 3, 8]).unwrap();
        let picked = matrix.pick_rows(&ids).unwrap();
        for (at, &id) in ids.as_slice().iter().enumerate() {
            assert_eq!(picked.row(at), matrix.row(id as usize));
        }
        let beyond = NeuronIds::from_sorted(vec![9]).unwrap();
        assert!(matches!(matrix.pick_rows(&beyond), Err(OpError::IdOutOfRange { id: 9, .. })));
    }

    #[test]
    fn sizes_that_cannot_be_are_refused_before_any_allocation() {
        let none =
            |_: u64, _: &mut [u8]| -> Result<(), OpError> { unreachable!("nothing to fill") };
        for (n, d) in [(usize::MAX, 2), (2, usize::MAX), (1 << 33, 1), (1 << 31, 1 << 34)] {
            assert!(matches!(
                NeuronMatrix::try_from_packed(WeightFormat::F32, n, d, none),
                Err(OpError::TooLarge { .. })
            ));
        }
        assert!(matches!(
            NeuronMatrix::from_f32(WeightFormat::F32, 2, 2, &[0.0; 3]),
            Err(OpError::Shape { .. })
        ));
        assert!(matches!(
            NeuronMatrix::from_transposed(WeightFormat::F32, 2, 2, WeightFormat::F16, &[0; 7]),
            Err(OpError::ByteLength { expected: 8, found: 7, .. })
        ));
    }

    #[test]
    fn shared_rows_are_read_where_they_lie_and_in_their_order() {
        let values = values(15);
        let owned = NeuronMatrix::from_f32(WeightFormat::F16, 3, 5, &values).unwrap();
        let mut packed = vec![0xFF];
        (0..3).for_each(|row| packed.extend(owned.row(row)));
        let bytes = |range| SharedBytes::new(Arc::new(packed.clone()), range);
        let shared = |range, order: Option<&[u32]>| {
            NeuronMatrix::from_shared(WeightFormat::F16, [3, 5], bytes(range), order.map(Arc::from))
        };
        let (same, turned) =
            (shared(1..31, None).unwrap(), shared(1..31, Some(&[2, 0, 1])).unwrap());
        for (row, other) in [2, 0, 1].into_iter().enumerate() {
            assert_eq!(same.row(row), owned.row(row));
            assert_eq!(turned.row(row), owned.row(other));
        }
        let ids = NeuronIds::from_sorted(vec![0, 2]).unwrap();
        let picked = turned.pick_rows(&ids).unwrap();
        assert_eq!(picked.n_neurons(), 2);
        assert_eq!((picked.row(0), picked.row(1)), (owned.row(2), owned.row(1)));
        for range in [1..30, 2..32] {
            assert!(matches!(shared(range, None), Err(OpError::ByteLength { expected: 30, .. })));
        }
        assert!(matches!(shared(1..31, Some(&[0, 1])), Err(OpError::Shape { .. })));
        assert!(matches!(
            shared(1..31, Some(&[0, 1, 3])),
            Err(OpError::IdOutOfRange { id: 3, n_rows: 3, .. })
        ));
    }

    #[test]
    fn rows_start_on_cache_lines() {
        let matrix = NeuronMatrix::from_f32(WeightFormat::F16, 5, 33, &values(165)).unwrap();
        for row in 0..5 {
            assert_eq!(matrix.row(row).as_ptr().addr() % LINE_BYTES, 0);
            assert_eq!(matrix.row(row).len(), 66);
        }
    }
}
