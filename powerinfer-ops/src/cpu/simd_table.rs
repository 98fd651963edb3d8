//! The table of one instruction set, stamped out of the bodies in [`simd`](super::simd): safe functions
//! that assert every length and enter one that has the instructions.

/// Stamps out the safe primitives of one instruction set: each asserts the lengths and enters a
/// function that has the instructions. `$tile_tokens` vectors of a tile and `$panel_registers`
/// registers of a panel row are taken at once, as many as the register file holds.
macro_rules! simd_table {
    ($name:literal, $vector:ty, $features:literal, $tile_tokens:literal, $panel_registers:literal) => {
        /// Handed out by `RowKernels::available` alone, after it saw the instructions.
        pub(super) static TABLE: Table = Table {
            name: $name,
            f32: primitives::<simd::F32>(),
            f16: primitives::<simd::F16>(),
            bf16: primitives::<simd::Bf16>(),
            q8_0: primitives::<simd::Q80>(),
            q4_0: primitives::<simd::Q40>(),
            q4_1: primitives::<simd_blocks::Q41>(),
            q5_0: primitives::<simd_blocks::Q50>(),
            q4_k: primitives::<simd_blocks::Q4K>(),
            q6_k: primitives::<simd_blocks::Q6K>(),
            axpy_tile,
            fold,
        };

        const fn primitives<F: Steps<$vector>>() -> RowPrimitives {
            RowPrimitives {
                dot: dot::<F>,
                dot_group: dot_group::<F>,
                dot_tile: dot_tile::<F>,
                axpy: axpy::<F>,
                axpy_group: axpy_group::<F>,
                grouped: F::GROUPED,
                decode: decode::<F>,
            }
        }

        fn check<F: Steps<$vector>>(rows: &[&[u8]], n: usize) {
            for row in rows {
                assert_eq!(
                    row.len(),
                    row_bytes::<F>(n),
                    "a row holds as many values as the vector"
                );
            }
        }

        /// Bytes of `n` values, which are whole blocks where these are longer than a step.
        fn row_bytes<F: Steps<$vector>>(n: usize) -> usize {
            let block_len = simd::STEP * F::STEPS;
            assert!(F::STEPS == 1 || n.is_multiple_of(block_len), "rows are whole blocks");
            n * F::BYTES / block_len
        }

        fn dot<F: Steps<$vector>>(row: &[u8], ahead: &[u8], x: &[f32]) -> f32 {
            #[target_feature(enable = $features)]
            fn inner<F: Steps<$vector>>(row: &[u8], ahead: &[u8], x: &[f32]) -> f32 {
                // SAFETY: this function has the instructions; its caller checked the lengths.
                let [[sum]] = unsafe { simd::dots::<$vector, F, 1, 1>([row], Some([ahead]), [x]) };
                sum
            }
            check::<F>(&[row], x.len());
            // SAFETY: the table is handed out only where the instructions exist; `check` bounds
            // the reads.
            unsafe { inner::<F>(row, ahead, x) }
        }

        fn dot_group<F: Steps<$vector>>(rows: Rows<'_>, ahead: Rows<'_>, x: &[f32]) -> RowValues {
            #[target_feature(enable = $features)]
            fn inner<F: Steps<$vector>>(rows: Rows<'_>, ahead: Rows<'_>, x: &[f32]) -> RowValues {
                // SAFETY: this function has the instructions; its caller checked the lengths.
                let [sums] = unsafe { simd::dots::<$vector, F, GROUP, 1>(rows, Some(ahead), [x]) };
                sums
            }
            check::<F>(&rows, x.len());
            // SAFETY: the table is handed out only where the instructions exist; `check` bounds
            // the reads.
            unsafe { inner::<F>(rows, ahead, x) }
        }

        fn dot_tile<F: Steps<$vector>>(rows: TileRows<'_>, xs: TokenValues<'_>) -> DotTile {
            #[target_feature(enable = $features)]
            fn inner<F: Steps<$vector>>(
                rows: TileRows<'_>,
                xs: [&[f32]; $tile_tokens],
            ) -> [[f32; TILE_ROWS]; $tile_tokens] {
                // SAFETY: this function has the instructions; its caller checked the lengths.
                unsafe { simd::dots::<$vector, F, TILE_ROWS, $tile_tokens>(rows, None, xs) }
            }
            for x in xs {
                assert_eq!(x.len(), xs[0].len(), "the vectors of a tile have one length");
            }
            check::<F>(&rows, xs[0].len());
            let mut tile = [[0.0; TILE_ROWS]; TILE_TOKENS];
            let (parts, _) = xs.as_chunks::<$tile_tokens>();
            let (tiles, _) = tile.as_chunks_mut::<$tile_tokens>();
            for (tile, xs) in tiles.iter_mut().zip(parts) {
                // SAFETY: the table is handed out only where the instructions exist; `check` and
                // the loop above bound the reads.
                *tile = unsafe { inner::<F>(rows, *xs) };
            }
            tile
        }

        fn axpy<F: Steps<$vector>>(scale: f32, row: &[u8], ahead: &[u8], y: &mut [f32]) {
            #[target_feature(enable = $features)]
            fn inner<F: Steps<$vector>>(scale: f32, row: &[u8], ahead: &[u8], y: &mut [f32]) {
                // SAFETY: this function has the instructions; its caller checked the lengths.
                unsafe { simd::axpys::<$vector, F, 1>([scale], [row], [ahead], y) }
            }
            check::<F>(&[row], y.len());
            // SAFETY: the table is handed out only where the instructions exist; `check` bounds
            // the accesses.
            unsafe { inner::<F>(scale, row, ahead, y) }
        }

        fn axpy_group<F: Steps<$vector>>(
            scales: RowValues,
            rows: Rows<'_>,
            ahead: Rows<'_>,
            y: &mut [f32],
        ) {
            #[target_feature(enable = $features)]
            fn inner<F: Steps<$vector>>(
                scales: RowValues,
                rows: Rows<'_>,
                ahead: Rows<'_>,
                y: &mut [f32],
            ) {
                // SAFETY: this function has the instructions; its caller checked the lengths.
                unsafe { simd::axpys::<$vector, F, GROUP>(scales, rows, ahead, y) }
            }
            check::<F>(&rows, y.len());
            // SAFETY: the table is handed out only where the instructions exist; `check` bounds
            // the accesses.
            unsafe { inner::<F>(scales, rows, ahead, y) }
        }

        fn decode<F: Steps<$vector>>(row: &[u8], first: usize, values: &mut [f32]) {
            #[target_feature(enable = $features)]
            fn inner<F: Steps<$vector>>(row: &[u8], first: usize, values: &mut [f32]) {
                // SAFETY: this function has the instructions; its caller checked the lengths.
                unsafe { simd::decode::<$vector, F>(row, first, values) }
            }
            assert!(first.is_multiple_of(simd::STEP), "a step begins there");
            let end = (first + values.len()).next_multiple_of(if F::STEPS == 1 {
                1
            } else {
                simd::STEP * F::STEPS
            });
            assert!(F::STEPS == 1 || values.len().is_multiple_of(simd::STEP), "whole steps");
            assert!(row.len() >= row_bytes::<F>(end), "the row holds the values");
            // SAFETY: the table is handed out only where the instructions exist; the assertions
            // bound the accesses.
            unsafe { inner::<F>(row, first, values) }
        }

        fn axpy_tile(scales: TokenValues<'_>, panel: &[f32], ys: &mut PanelTile) {
            #[target_feature(enable = $features)]
            fn inner(scales: TokenValues<'_>, panel: &[f32], ys: &mut PanelTile) {
                // SAFETY: this function has the instructions; its caller checked the lengths.
                unsafe { simd::axpy_tile::<$vector, $panel_registers>(scales, panel, ys) }
            }
            for scales in scales {
                assert_eq!(scales.len() * PANEL, panel.len(), "one scale a panel row");
            }
            // SAFETY: the table is handed out only where the instructions exist; the loop above
            // bounds the accesses.
            unsafe { inner(scales, panel, ys) }
        }
    };
}
pub(super) use simd_table;
