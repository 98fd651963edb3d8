//! What rows are multiplied with: the values of tokens in the form that a format's products take.

use bytemuck::Pod;
use rayon::prelude::*;

use super::int8::{self, InputGroup};
use super::panel::{PanelScratch, Unpacked};
use super::{Products, RowKernels};
use crate::bytes::{AlignedScratch, LINE_BYTES};
use crate::format::WeightFormat;

/// Tokens in other forms than they came in.
#[derive(Debug, Default)]
pub(crate) struct InputScratch {
    plain: AlignedScratch,
    int8: AlignedScratch,
}

impl InputScratch {
    /// Bytes for `n_tokens` tokens in every form.
    pub(crate) fn bytes_at_most(d_model: usize, n_tokens: usize) -> usize {
        let plain = (n_tokens * d_model * size_of::<f32>()).next_multiple_of(LINE_BYTES);
        plain + n_tokens * int8::n_groups(d_model) * size_of::<InputGroup>()
    }

    pub(crate) fn size_bytes(&self) -> usize {
        self.plain.size_bytes() + self.int8.size_bytes()
    }
}

/// Tokens in every form that is needed, `[n_tokens, d_model]`.
#[derive(Clone, Copy)]
pub(crate) struct Inputs<'a> {
    d_model: usize,
    plain: &'a [f32],
    /// Empty if no format multiplies whole numbers.
    int8: &'a [InputGroup],
}

impl<'a> Inputs<'a> {
    /// Prepares `x` for products with rows of all `formats`.
    pub(crate) fn new(
        kernels: RowKernels,
        formats: &[WeightFormat],
        d_model: usize,
        x: &'a [f32],
        scratch: &'a mut InputScratch,
    ) -> Self {
        let takes_int8 =
            |format: &&_| matches!(kernels.primitives(**format).products, Products::Int8(_));
        let n_int8 = formats.iter().filter(takes_int8).count();
        let n_tokens = x.len() / d_model.max(1);
        let n_groups = if n_int8 > 0 { int8::n_groups(d_model) } else { 0 };
        let int8 = scratch.int8.values(n_tokens * n_groups);
        let quantize = kernels.table().quantize;
        if n_tokens == 1 && n_groups > 0 {
            quantize(x, int8);
        } else if n_groups > 0 {
            let tokens = x.par_chunks_exact(d_model).zip(int8.par_chunks_exact_mut(n_groups));
            tokens.for_each(|(x, groups)| quantize(x, groups));
        }
        let mut plain = x;
        if n_tokens > 1 && n_int8 < formats.len() {
            let aligned = scratch.plain.values(x.len());
            aligned.copy_from_slice(x);
            plain = aligned;
        }
        Self { d_model, plain, int8 }
    }

    /// One of the tokens.
    pub(crate) fn token(self, t: usize) -> Self {
        let (d_model, n_groups) = (self.d_model, int8::n_groups(self.d_model));
        let int8 = if self.int8.is_empty() { &[] } else { &self.int8[t * n_groups..][..n_groups] };
        Self { d_model, plain: &self.plain[t * d_model..][..d_model], int8 }
    }

    pub(crate) fn n_tokens(self) -> usize {
        self.plain.len() / self.d_model.max(1)
    }

    /// Values of a token.
    pub(crate) fn d_model(self) -> usize {
        self.d_model
    }
}

/// A form of values that products take.
pub(crate) trait ProductInput: Pod + Send + Sync {
    /// A row unpacked for them.
    type Unpacked: Pod + Send + Sync;
    /// Elements of a token or unpacked row of `n_values` values.
    fn len(n_values: usize) -> usize;
    /// The tokens in this form.
    fn of<'a>(inputs: &Inputs<'a>) -> &'a [Self];
    /// The scratch for this form.
    fn scratch(scratch: &mut PanelScratch) -> &mut Unpacked<Self>;
}

impl ProductInput for f32 {
    type Unpacked = f32;

    fn len(n_values: usize) -> usize {
        n_values
    }

    fn of<'a>(inputs: &Inputs<'a>) -> &'a [f32] {
        inputs.plain
    }

    fn scratch(scratch: &mut PanelScratch) -> &mut Unpacked<Self> {
        &mut scratch.f32
    }
}

impl ProductInput for InputGroup {
    type Unpacked = int8::WeightGroup;

    fn len(n_values: usize) -> usize {
        int8::n_groups(n_values)
    }

    fn of<'a>(inputs: &Inputs<'a>) -> &'a [InputGroup] {
        inputs.int8
    }

    fn scratch(scratch: &mut PanelScratch) -> &mut Unpacked<Self> {
        &mut scratch.int8
    }
}

/// Runs an expression with `$bodies` bound to the products of a format, whichever form they take.
macro_rules! for_products {
    ($row_ops:expr, $bodies:ident => $body:expr) => {
        match &$row_ops.products {
            $crate::cpu::Products::F32($bodies) => $body,
            $crate::cpu::Products::Int8($bodies) => $body,
        }
    };
}
pub(crate) use for_products;
