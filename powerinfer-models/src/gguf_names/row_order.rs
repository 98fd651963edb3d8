//! In which order the rows of a tensor lie in a GGUF file.

use powerinfer_core::ModelConfig;

use super::family::Rows;

/// Which row of a GGUF file is which row of a Hugging Face file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RowOrder {
    /// The same.
    Same,
    /// Heads whose values `i` and `i + d_head / 2` turn together here, `2i` and `2i + 1` there.
    Pairs { d_head: usize },
    /// For each key-value head its `group` query heads, its key and its value here; all queries,
    /// all keys, all values there.
    Fused { n_kv_heads: usize, group: usize, d_head: usize },
}

impl RowOrder {
    pub(crate) fn new(rows: Rows, config: &ModelConfig) -> Self {
        let d_head = config.d_head;
        match rows {
            Rows::Same => Self::Same,
            Rows::Pairs => Self::Pairs { d_head },
            Rows::Fused => {
                let n_kv_heads = config.n_kv_heads;
                Self::Fused { n_kv_heads, group: config.n_heads / n_kv_heads, d_head }
            }
        }
    }

    /// The row of a GGUF file that holds a row of a Hugging Face file.
    pub(crate) fn stored(self, row: usize) -> usize {
        match self {
            Self::Same => row,
            Self::Pairs { d_head } => {
                let (head, at) = (row / d_head, row % d_head);
                let half = d_head / 2;
                head * d_head + at % half * 2 + at / half
            }
            Self::Fused { n_kv_heads, group, d_head } => {
                let width = (group + 2) * d_head;
                let (head, at) = (row / width, row % width);
                let (queries, keys) = (n_kv_heads * group * d_head, n_kv_heads * d_head);
                match at / d_head {
                    which if which < group => head * group * d_head + at,
                    which if which == group => queries + head * d_head + at % d_head,
                    _ => queries + keys + head * d_head + at % d_head,
                }
            }
        }
    }

    /// For each row of a GGUF file the row of a Hugging Face file; `None` if there cannot be so
    /// many.
    pub(crate) fn of_stored(self, n_rows: usize) -> Option<Vec<usize>> {
        let fits = match self {
            Self::Same => true,
            Self::Pairs { d_head } => n_rows.is_multiple_of(d_head),
            Self::Fused { n_kv_heads, group, d_head } => {
                n_rows == (group + 2) * n_kv_heads * d_head
            }
        };
        let mut rows = vec![0; if fits { n_rows } else { return None }];
        (0..n_rows).for_each(|row| rows[self.stored(row)] = row);
        Some(rows)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stored(order: RowOrder, n_rows: usize) -> Vec<usize> {
        (0..n_rows).map(|row| order.stored(row)).collect()
    }

    #[test]
    fn rows_of_queries_are_those_that_turn_together() {
        // two heads of four: values 0 and 2 turn together, then 1 and 3
        let order = RowOrder::Pairs { d_head: 4 };
        assert_eq!(stored(order, 8), [0, 2, 1, 3, 4, 6, 5, 7]);
    }

    #[test]
    fn fused_rows_come_apart() {
        // q0 q1 k v | q2 q3 k v with heads of one row
        let order = RowOrder::Fused { n_kv_heads: 2, group: 2, d_head: 1 };
        assert_eq!(stored(order, 8), [0, 1, 4, 6, 2, 3, 5, 7]);
    }

    #[test]
    fn every_order_is_a_permutation() {
        for order in [
            RowOrder::Pairs { d_head: 10 },
            RowOrder::Fused { n_kv_heads: 5, group: 2, d_head: 3 },
            RowOrder::Fused { n_kv_heads: 1, group: 18, d_head: 3 },
        ] {
            let mut rows = stored(order, 60);
            rows.sort_unstable();
            assert_eq!(rows, Vec::from_iter(0..60), "{order:?}");
        }
    }
}
