//! Rows of a table by id.

use candle_core::{Device, Tensor};

use crate::error::OpError;
use crate::matrix::NeuronMatrix;

/// The rows of `table` that belong to `tokens`, as f32.
///
/// # Shapes
/// `table` `[vocab_size, d_model]` any format · result `[n_tokens, d_model]` f32.
/// # Errors
/// [`OpError::IdOutOfRange`] for a token beyond the table.
/// # Examples
/// ```
/// use powerinfer_ops::{NeuronMatrix, WeightFormat, embed};
/// let table = NeuronMatrix::from_f32(WeightFormat::F16, 2, 2, &[1., 2., 3., 4.])?;
/// assert_eq!(embed(&table, &[1, 0])?.to_vec2::<f32>()?, [[3., 4.], [1., 2.]]);
/// # Ok::<(), powerinfer_ops::OpError>(())
/// ```
pub fn embed(table: &NeuronMatrix, tokens: &[u32]) -> Result<Tensor, OpError> {
    let n_rows = table.n_neurons();
    if let Some(&id) = tokens.iter().find(|&&id| id as usize >= n_rows) {
        return Err(OpError::IdOutOfRange { op: "embed", id, n_rows });
    }
    let mut values = vec![0.0; tokens.len() * table.d_model()];
    for (&token, row) in tokens.iter().zip(values.chunks_exact_mut(table.d_model().max(1))) {
        table.row_to_f32(token as usize, row);
    }
    Ok(Tensor::from_vec(values, (tokens.len(), table.d_model()), &Device::Cpu)?)
}
