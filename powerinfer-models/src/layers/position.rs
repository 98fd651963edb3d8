//! How a model knows the order of its tokens.

use candle_core::Tensor;
use powerinfer_core::{PositionConfig, Result};
use powerinfer_ops::{NeuronMatrix, embed, residual_add};

use crate::layers::{Rotary, RotaryTable};

/// What a decoder does with positions outside of its attention layers.
#[derive(Debug, Clone)]
pub enum Position {
    /// Nothing: the attention layers know distances, as with ALiBi.
    None,
    /// Turns queries and keys.
    Rotary(Rotary),
    /// Adds a learned vector to each embedding.
    Learned(LearnedPositions),
}

impl Position {
    /// What a configuration asks for, given its table of positions where it has learned ones.
    #[must_use]
    pub fn new(config: &PositionConfig, d_head: usize, table: Option<NeuronMatrix>) -> Self {
        match (config, table) {
            (PositionConfig::Rotary(rotary), _) => Self::Rotary(Rotary::new(rotary, d_head)),
            (PositionConfig::Learned { offset }, Some(table)) => {
                Self::Learned(LearnedPositions::new(table, *offset))
            }
            _ => Self::None,
        }
    }

    /// The stream of embeddings `x` `[n_tokens, d_model]` with what the positions from `first` on
    /// add to it.
    ///
    /// # Errors
    /// [`OpError::IdOutOfRange`](powerinfer_ops::OpError::IdOutOfRange) for a position beyond the
    /// learned ones.
    pub fn add(&self, x: Tensor, first: usize) -> Result<Tensor> {
        match self {
            Self::Learned(positions) => positions.add(&x, first),
            _ => Ok(x),
        }
    }

    /// What turns the queries and keys of the positions `first .. first + n_tokens`, if anything.
    ///
    /// # Errors
    /// As [`Rotary::table`].
    pub fn rotary(&self, first: usize, n_tokens: usize) -> Result<Option<RotaryTable>> {
        match self {
            Self::Rotary(rotary) => rotary.table(first, n_tokens).map(Some),
            _ => Ok(None),
        }
    }

    /// Bytes that a token reads.
    #[must_use]
    pub fn token_bytes(&self) -> usize {
        match self {
            Self::Learned(positions) => positions.table.row_bytes(),
            _ => 0,
        }
    }
}

/// A learned vector for each position.
#[derive(Debug, Clone)]
pub struct LearnedPositions {
    table: NeuronMatrix,
    offset: usize,
}

impl LearnedPositions {
    /// Vectors from `table` `[offset + n_positions, d_model]`, whose first `offset` rows belong to
    /// no position.
    #[must_use]
    pub fn new(table: NeuronMatrix, offset: usize) -> Self {
        Self { table, offset }
    }

    fn add(&self, x: &Tensor, first: usize) -> Result<Tensor> {
        let first = first + self.offset;
        // a position that no u32 holds is beyond any table, whose rows are counted in u32
        let row = |row| u32::try_from(row).unwrap_or(u32::MAX);
        let rows: Vec<u32> = (first..first + x.dim(0)?).map(row).collect();
        Ok(residual_add(x, &embed(&self.table, &rows)?)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{DType, Device};
    use powerinfer_ops::WeightFormat;

    #[test]
    fn learned_positions_begin_after_the_offset_and_end_with_the_table() {
        let table = NeuronMatrix::from_f32(WeightFormat::F32, 5, 1, &[9., 9., 1., 2., 3.]).unwrap();
        let positions = Position::Learned(LearnedPositions::new(table, 2));
        let x = Tensor::zeros((2, 1), DType::F32, &Device::Cpu).unwrap();
        let at = |first| positions.add(x.clone(), first);
        assert_eq!(at(0).unwrap().to_vec2::<f32>().unwrap(), [[1.0], [2.0]]);
        assert_eq!(at(1).unwrap().to_vec2::<f32>().unwrap(), [[2.0], [3.0]]);
        assert!(at(2).is_err());
    }
}
