//! The tensors of a file to be written, made out of those of a model as they are read.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use powerinfer_core::{Error, Result, TensorInfo, TensorSource};
use powerinfer_ops::WeightFormat;

use super::plan::{Origin, Planned};
use crate::gguf_names::RowOrder;

/// Bytes of rows that are read at once.
const BLOCK_BYTES: usize = 1 << 20;
/// Values of a matrix that are turned at once.
const TURNED_VALUES: usize = 1 << 20;

/// What is written: a source of tensors, each made when it is read.
#[derive(Debug)]
pub(super) struct Output<'a> {
    model: &'a dyn TensorSource,
    predictor: Option<&'a dyn TensorSource>,
    tensors: Vec<Planned>,
    /// Where in the list a name is.
    index: BTreeMap<String, usize>,
    /// The last tensor whose columns were read, which a whole pass over its output reads again
    /// and again.
    turned: Mutex<Turned>,
}

#[derive(Debug, Default)]
struct Turned {
    name: String,
    packed: Vec<u8>,
}

impl<'a> Output<'a> {
    pub(super) fn new(
        model: &'a dyn TensorSource,
        predictor: Option<&'a dyn TensorSource>,
        tensors: Vec<Planned>,
    ) -> Self {
        let names = tensors.iter().enumerate();
        let index = names.map(|(at, planned)| (planned.info.name.clone(), at)).collect();
        Self { model, predictor, tensors, index, turned: Mutex::default() }
    }

    /// Whole rows of a tensor, from row `first` on.
    fn rows(&self, planned: &Planned, first: usize, out: &mut [u8]) -> Result<()> {
        match &planned.from {
            Origin::Rows { name, format, order } => {
                let rows = RowSource { source: self.model, name, format: *format, order: *order };
                rows.read(planned, first, out)
            }
            Origin::Predictor { name, format } => {
                let source = self.predictor.unwrap_or(self.model);
                let (format, order) = (*format, RowOrder::Same);
                RowSource { source, name, format, order }.read(planned, first, out)
            }
            Origin::Columns { name, format } => self.columns(planned, (name, *format), first, out),
            Origin::Values(values) => {
                planned.format.encode(values, out);
                Ok(())
            }
        }
    }

    /// Rows out of the columns of a tensor.
    fn columns(
        &self,
        planned: &Planned,
        (name, format): (&str, WeightFormat),
        first: usize,
        out: &mut [u8],
    ) -> Result<()> {
        let [n_rows, row_len] = matrix(planned);
        let source_row_bytes = format.row_bytes(n_rows)?;
        let mut turned = self.turned.lock().unwrap_or_else(PoisonError::into_inner);
        if turned.name != name {
            // the one before is given back first
            *turned = Turned::default();
            let mut packed = zeroed(source_row_bytes * row_len)?;
            self.model.read(name, 0, &mut packed)?;
            *turned = Turned { name: name.to_owned(), packed };
        }
        let row_bytes = planned.format.row_bytes(row_len)?;
        let block_len = format.block_len();
        let rows_at_once = (TURNED_VALUES / row_len.max(1)).next_multiple_of(block_len);
        let (mut segment, mut values) = (Vec::new(), Vec::new());
        for (block, out) in out.chunks_mut(row_bytes * rows_at_once).enumerate() {
            let wanted = first + block * rows_at_once;
            let n = out.len() / row_bytes;
            // whole blocks of the source that hold the wanted rows
            let start = wanted / block_len * block_len;
            let n_decoded = (wanted + n - start).next_multiple_of(block_len);
            segment.resize(n_decoded, 0.0);
            values.resize(n * row_len, 0.0);
            let bytes = start / block_len * format.block_bytes()
                ..(start + n_decoded) / block_len * format.block_bytes();
            for (column, source) in turned.packed.chunks_exact(source_row_bytes).enumerate() {
                format.decode(&source[bytes.clone()], &mut segment);
                for (row, value) in segment[wanted - start..][..n].iter().enumerate() {
                    values[row * row_len + column] = *value;
                }
            }
            for (out, values) in out.chunks_exact_mut(row_bytes).zip(values.chunks_exact(row_len)) {
                planned.format.encode(values, out);
            }
        }
        Ok(())
    }

    fn planned(&self, name: &str) -> Option<&Planned> {
        self.index.get(name).map(|&at| &self.tensors[at])
    }
}

/// Rows of a tensor as the model has them.
struct RowSource<'a> {
    source: &'a dyn TensorSource,
    name: &'a str,
    format: WeightFormat,
    order: RowOrder,
}

impl RowSource<'_> {
    fn read(&self, planned: &Planned, first: usize, out: &mut [u8]) -> Result<()> {
        let [_, row_len] = matrix(planned);
        let (from, to) = (self.format.row_bytes(row_len)?, planned.format.row_bytes(row_len)?);
        let n_rows = out.len().checked_div(to).unwrap_or(0);
        if self.order == RowOrder::Same && self.format == planned.format {
            return self.source.read(self.name, first as u64 * from as u64, out);
        }
        let order = match self.order {
            RowOrder::Same => None,
            order => order.of_stored(matrix(planned)[0]),
        };
        let mut values = vec![0.0; row_len];
        let rows_at_once = if order.is_some() { 1 } else { (BLOCK_BYTES / from.max(1)).max(1) };
        let mut packed = zeroed(rows_at_once.min(n_rows) * from)?;
        for (block, out) in out.chunks_mut((rows_at_once * to).max(1)).enumerate() {
            let row = first + block * rows_at_once;
            let row = order.as_ref().map_or(row, |order| order[row]);
            let packed = &mut packed[..out.len() / to * from];
            self.source.read(self.name, row as u64 * from as u64, packed)?;
            for (packed, out) in packed.chunks_exact(from).zip(out.chunks_exact_mut(to)) {
                if self.format == planned.format {
                    out.copy_from_slice(packed);
                } else {
                    self.format.decode(packed, &mut values);
                    planned.format.encode(&values, out);
                }
            }
        }
        Ok(())
    }
}

/// Rows and their length; a vector is a column, whose rows can be put in order.
fn matrix(planned: &Planned) -> [usize; 2] {
    match planned.info.shape.as_slice() {
        [n] if matches!(planned.from, Origin::Values(_)) => [1, *n],
        [n] => [*n, 1],
        [n, rest @ ..] => [*n, rest.iter().product()],
        [] => [0, 0],
    }
}

fn zeroed(len: usize) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let what = "a tensor to convert";
    bytes.try_reserve_exact(len).map_err(|_| Error::Allocation { what, bytes: len })?;
    bytes.resize(len, 0);
    Ok(bytes)
}

impl TensorSource for Output<'_> {
    fn tensors(&self) -> Vec<TensorInfo> {
        self.tensors.iter().map(|planned| planned.info.clone()).collect()
    }

    fn read(&self, name: &str, offset_bytes: u64, out: &mut [u8]) -> Result<()> {
        let Some(planned) = self.planned(name) else {
            return Err(Error::MissingTensor { path: self.path(name), name: name.to_owned() });
        };
        let row_bytes = planned.format.row_bytes(matrix(planned)[1])?;
        let (mut row, at) = (
            (offset_bytes / row_bytes as u64) as usize,
            (offset_bytes % row_bytes as u64) as usize,
        );
        let mut rest = out;
        if at > 0 || rest.len() < row_bytes {
            // the end of a row
            let mut whole = zeroed(row_bytes)?;
            self.rows(planned, row, &mut whole)?;
            let n = (row_bytes - at).min(rest.len());
            let (piece, after) = rest.split_at_mut(n);
            piece.copy_from_slice(&whole[at..at + n]);
            (row, rest) = (row + 1, after);
        }
        let n_rows = rest.len() / row_bytes;
        let (rows, start) = rest.split_at_mut(n_rows * row_bytes);
        self.rows(planned, row, rows)?;
        if !start.is_empty() {
            let mut whole = zeroed(row_bytes)?;
            self.rows(planned, row + n_rows, &mut whole)?;
            start.copy_from_slice(&whole[..start.len()]);
        }
        Ok(())
    }

    fn path(&self, name: &str) -> PathBuf {
        match self.planned(name).map(|planned| &planned.from) {
            Some(Origin::Rows { name, .. } | Origin::Columns { name, .. }) => self.model.path(name),
            Some(Origin::Predictor { name, .. }) => self.predictor.unwrap_or(self.model).path(name),
            _ => self.model.path(""),
        }
    }
}
