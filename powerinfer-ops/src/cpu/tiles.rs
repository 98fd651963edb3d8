//! Products of several rows with several tokens, cut into tiles that fit the register file.

/// Stamps out `block` and `gather` of one instruction set, `$T` tokens at a time, at the end half as many and one,
/// over two unsafe functions, generic in `$param` first, that require the instructions and tokens
/// and rows of one length:
/// `$row_tiles<const T: usize>(rows: &[$W], xs: [&[$X]; T], out: &mut [f32])`, which is `block` for
/// `T` tokens, and `$tile<const R: usize, const T: usize>(rows: [&[$W]; R], xs: [&[$X]; T]) ->
/// [[f32; R]; T]`.
macro_rules! tiles {
    (
        [$($param:ident: $bound:ident)?],
        $W:ty,
        $X:ty,
        $features:literal,
        $T:literal,
        $row_tiles:ident,
        $tile:ident
    ) => {
        /// `out[t][r] = rows[r] · xs[t]`; rows and tokens have `len` elements each.
        fn block<$($param: $bound)?>(rows: &[$W], xs: &[$X], len: usize, out: &mut [f32]) {
            #[target_feature(enable = $features)]
            fn inner<$($param: $bound)?>(rows: &[$W], xs: &[$X], len: usize, out: &mut [f32]) {
                let n_rows = rows.len() / len;
                let mut xs = xs.chunks_exact($T * len);
                let mut outs = out.chunks_exact_mut($T * n_rows);
                for (xs, out) in xs.by_ref().zip(outs.by_ref()) {
                    let xs = std::array::from_fn(|t| &xs[t * len..][..len]);
                    // SAFETY: this function has the instructions.
                    unsafe { $row_tiles::<$($param,)? $T>(rows, xs, out) };
                }
                const HALF: usize = $T / 2;
                let mut xs = xs.remainder().chunks_exact(HALF * len);
                let mut outs = outs.into_remainder().chunks_exact_mut(HALF * n_rows);
                for (xs, out) in xs.by_ref().zip(outs.by_ref()) {
                    let xs = std::array::from_fn(|t| &xs[t * len..][..len]);
                    // SAFETY: this function has the instructions.
                    unsafe { $row_tiles::<$($param,)? HALF>(rows, xs, out) };
                }
                let rest = outs.into_remainder().chunks_exact_mut(n_rows);
                for (x, out) in xs.remainder().chunks_exact(len).zip(rest) {
                    // SAFETY: this function has the instructions.
                    unsafe { $row_tiles::<$($param,)? 1>(rows, [x], out) };
                }
            }
            let n_products = (rows.len() / len) * (xs.len() / len);
            assert_eq!(out.len(), n_products, "one product for each row and token");
            // SAFETY: the table is handed out only where the instructions exist.
            unsafe { inner::<$($param)?>(rows, xs, len, out) }
        }

        /// `out[k] = row · xs[tokens[k]]`; tokens have as many elements as the row.
        fn gather<$($param: $bound)?>(row: &[$W], xs: &[$X], tokens: &[u32], out: &mut [f32]) {
            #[target_feature(enable = $features)]
            fn inner<$($param: $bound)?>(row: &[$W], xs: &[$X], tokens: &[u32], out: &mut [f32]) {
                let len = row.len();
                let token = |t: u32| &xs[t as usize * len..][..len];
                let (tokens, rest) = tokens.as_chunks::<$T>();
                let (outs, rest_out) = out.as_chunks_mut::<$T>();
                for (tokens, out) in tokens.iter().zip(outs) {
                    let xs = std::array::from_fn(|t| token(tokens[t]));
                    // SAFETY: this function has the instructions; all slices have `len` elements.
                    let tile = unsafe { $tile::<$($param,)? 1, $T>([row], xs) };
                    for t in 0..$T {
                        out[t] = tile[t][0];
                    }
                }
                for (&t, out) in rest.iter().zip(rest_out) {
                    // SAFETY: this function has the instructions; both slices have `len` elements.
                    let [[product]] = unsafe { $tile::<$($param,)? 1, 1>([row], [token(t)]) };
                    *out = product;
                }
            }
            assert_eq!(tokens.len(), out.len(), "one product a token");
            // SAFETY: the table is handed out only where the instructions exist.
            unsafe { inner::<$($param)?>(row, xs, tokens, out) }
        }
    };
}
pub(super) use tiles;

/// Stamps out `dot`, `dot_group` and the block of products of one instruction set for rows of whole
/// numbers: safe functions over `dots` and `tile`, unsafe ones that require the instructions and
/// lengths that agree. `$bound` is how blocks become registers; tiles have `$rows` rows and
/// `$tokens` tokens.
macro_rules! int8_rows {
    ($bound:ident, $features:literal, $rows:literal, $tokens:literal) => {
        fn dot<F: $bound>(row: &[u8], ahead: &[u8], x: &[InputGroup]) -> f32 {
            #[target_feature(enable = $features)]
            fn inner<F: $bound>(row: &[u8], ahead: &[u8], x: &[InputGroup]) -> f32 {
                // SAFETY: this function has the instructions; its caller checked the lengths.
                let [sum] = unsafe { dots::<F, 1>([row], [ahead], x) };
                sum
            }
            super::check_blocks::<F>(&[row], x.len());
            // SAFETY: the table is handed out only where the instructions exist; the check bounds
            // the reads.
            unsafe { inner::<F>(row, ahead, x) }
        }

        fn dot_group<F: $bound>(rows: Rows<'_>, ahead: Rows<'_>, x: &[InputGroup]) -> RowValues {
            #[target_feature(enable = $features)]
            fn inner<F: $bound>(rows: Rows<'_>, ahead: Rows<'_>, x: &[InputGroup]) -> RowValues {
                // SAFETY: this function has the instructions; its caller checked the lengths.
                unsafe { dots::<F, GROUP>(rows, ahead, x) }
            }
            super::check_blocks::<F>(&rows, x.len());
            // SAFETY: the table is handed out only where the instructions exist; the check bounds
            // the reads.
            unsafe { inner::<F>(rows, ahead, x) }
        }

        tiles!([O: Offsets], WeightGroup, InputGroup, $features, $tokens, row_tiles, tile);

        /// All rows with `T` tokens.
        ///
        /// # Safety
        /// The CPU has the instructions.
        #[inline(always)]
        unsafe fn row_tiles<O: Offsets, const T: usize>(
            rows: &[WeightGroup],
            xs: [&[InputGroup]; T],
            out: &mut [f32],
        ) {
            let len = xs[0].len();
            let n_rows = rows.len() / len;
            let mut at = 0;
            while at + $rows <= n_rows {
                let rows = std::array::from_fn(|r| &rows[(at + r) * len..][..len]);
                // SAFETY: the caller has the instructions; all slices have `len` elements.
                let tile = unsafe { tile::<O, $rows, T>(rows, xs) };
                for t in 0..T {
                    out[t * n_rows + at..][..$rows].copy_from_slice(&tile[t]);
                }
                at += $rows;
            }
            while at < n_rows {
                // SAFETY: the caller has the instructions; all slices have `len` elements.
                let tile = unsafe { tile::<O, 1, T>([&rows[at * len..][..len]], xs) };
                for t in 0..T {
                    out[t * n_rows + at] = tile[t][0];
                }
                at += 1;
            }
        }
    };
}
pub(super) use int8_rows;
