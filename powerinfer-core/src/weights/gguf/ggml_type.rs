//! The types that tensors of a GGUF file are stored in.

use powerinfer_ops::WeightFormat;

use crate::weights::FileDtype;

/// How a type lies in bytes: its number in the file, its name, values and bytes of a block.
#[derive(Debug, Clone, Copy)]
pub(crate) struct GgmlType {
    pub(crate) id: u32,
    pub(crate) name: &'static str,
    pub(crate) block_len: u64,
    pub(crate) block_bytes: u64,
}

const fn ggml_type(id: u32, name: &'static str, block_len: u64, block_bytes: u64) -> GgmlType {
    GgmlType { id, name, block_len, block_bytes }
}

/// ggml's numbering; those left out were given up or never released.
const TYPES: &[GgmlType] = &[
    ggml_type(0, "F32", 1, 4),
    ggml_type(1, "F16", 1, 2),
    ggml_type(2, "Q4_0", 32, 18),
    ggml_type(3, "Q4_1", 32, 20),
    ggml_type(6, "Q5_0", 32, 22),
    ggml_type(7, "Q5_1", 32, 24),
    ggml_type(8, "Q8_0", 32, 34),
    ggml_type(9, "Q8_1", 32, 36),
    ggml_type(10, "Q2_K", 256, 84),
    ggml_type(11, "Q3_K", 256, 110),
    ggml_type(12, "Q4_K", 256, 144),
    ggml_type(13, "Q5_K", 256, 176),
    ggml_type(14, "Q6_K", 256, 210),
    ggml_type(15, "Q8_K", 256, 292),
    ggml_type(16, "IQ2_XXS", 256, 66),
    ggml_type(17, "IQ2_XS", 256, 74),
    ggml_type(18, "IQ3_XXS", 256, 98),
    ggml_type(19, "IQ1_S", 256, 50),
    ggml_type(20, "IQ4_NL", 32, 18),
    ggml_type(21, "IQ3_S", 256, 110),
    ggml_type(22, "IQ2_S", 256, 82),
    ggml_type(23, "IQ4_XS", 256, 136),
    ggml_type(24, "I8", 1, 1),
    ggml_type(25, "I16", 1, 2),
    ggml_type(26, "I32", 1, 4),
    ggml_type(27, "I64", 1, 8),
    ggml_type(28, "F64", 1, 8),
    ggml_type(29, "IQ1_M", 256, 56),
    ggml_type(30, "BF16", 1, 2),
    ggml_type(34, "TQ1_0", 256, 54),
    ggml_type(35, "TQ2_0", 256, 66),
    ggml_type(39, "MXFP4", 32, 17),
];

/// PowerInfer's engine left ggml in November 2023, when integers had these numbers and nothing
/// came after them.
const POWERINFER_INTEGERS: &[GgmlType] =
    &[ggml_type(16, "I8", 1, 1), ggml_type(17, "I16", 1, 2), ggml_type(18, "I32", 1, 4)];

impl GgmlType {
    /// The type of that number, in a PowerInfer file or in any other.
    pub(crate) fn find(id: u32, powerinfer: bool) -> Option<Self> {
        let types = TYPES.iter().filter(|known| !powerinfer || known.id < 16);
        let integers = POWERINFER_INTEGERS.iter().filter(|_| powerinfer);
        types.chain(integers).find(|known| known.id == id).copied()
    }

    /// The type that a weight format is written as.
    pub(crate) fn of(format: WeightFormat) -> Option<Self> {
        TYPES.iter().find(|known| known.name.eq_ignore_ascii_case(format.name())).copied()
    }

    pub(crate) fn dtype(self) -> FileDtype {
        match self.name.to_ascii_lowercase().parse() {
            Ok(format) => FileDtype::Weights(format),
            Err(_) => FileDtype::Other(self.name.to_owned()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_weight_format_is_a_type_with_the_same_blocks() {
        for format in WeightFormat::ALL {
            let found = GgmlType::of(format).unwrap();
            assert_eq!(found.dtype(), FileDtype::Weights(format));
            assert_eq!(found.block_len, format.block_len() as u64, "{format}");
            assert_eq!(found.block_bytes, format.block_bytes() as u64, "{format}");
        }
    }

    #[test]
    fn powerinfer_s_integers_have_their_old_numbers() {
        let name = |id, powerinfer| GgmlType::find(id, powerinfer).map(|found| found.name);
        assert_eq!((name(18, true), name(18, false)), (Some("I32"), Some("IQ3_XXS")));
        assert_eq!((name(26, true), name(26, false)), (None, Some("I32")));
        assert_eq!((name(2, true), name(2, false)), (Some("Q4_0"), Some("Q4_0")));
        for given_up in [4, 5, 31, 36, 40, u32::MAX] {
            assert_eq!(name(given_up, false), None);
        }
    }
}
