//! The table of one instruction set, stamped out of the bodies in
//! [`simd_dots`](super::simd_dots) and [`simd_sums`](super::simd_sums): safe functions
//! that assert every length and enter one that has the instructions.

/// Stamps out the safe primitives of one instruction set: each asserts the lengths and enters a
/// function that has the instructions. Tiles of `$tile_rows` rows and `$tile_tokens` tokens, and
/// `$panel_registers` registers of a panel row for several tokens or `$picked_registers` for one,
/// are taken at once, as many as the register file holds.
macro_rules! simd_table {
    (
        $vector:ty,
        $features:literal,
        $tile_rows:literal,
        $tile_tokens:literal,
        $panel_registers:literal,
        $picked_registers:literal
    ) => {
        const fn table(name: &'static str, int8: Int8Table) -> Table {
            Table {
                name,
                f32: primitives::<simd::F32>(f32_products::<simd::F32>()),
                f16: primitives::<simd::F16>(f32_products::<simd::F16>()),
                bf16: primitives::<simd::Bf16>(f32_products::<simd::Bf16>()),
                q8_0: primitives::<simd::Q80>(Products::Int8(int8.q8_0)),
                q4_0: primitives::<simd::Q40>(Products::Int8(int8.q4_0)),
                q4_1: primitives::<simd_blocks::Q41>(Products::Int8(int8.q4_1)),
                q5_0: primitives::<simd_blocks::Q50>(Products::Int8(int8.q5_0)),
                q4_k: primitives::<simd_blocks::Q4K>(Products::Int8(int8.q4_k)),
                q6_k: primitives::<simd_blocks::Q6K>(f32_products::<simd_blocks::Q6K>()),
                quantize,
                axpy_tile,
                axpy_picked,
                prefetch,
                attention: &ATTENTION,
                fold,
            }
        }

        const fn primitives<F: Steps<$vector>>(products: Products) -> RowPrimitives {
            RowPrimitives {
                products,
                axpy: axpy::<F>,
                axpy_group: axpy_group::<F>,
                settle: settle::<F>,
                grouping: F::GROUPING,
                decode: decode::<F>,
            }
        }

        const fn f32_products<F: Steps<$vector>>() -> Products {
            Products::F32(F32Products {
                dot: dot::<F>,
                dot_group: dot_group::<F>,
                grouping: F::GROUPING,
                unpack: decode::<F>,
                block,
                gather,
            })
        }

        /// A tile of products of decoded rows.
        ///
        /// # Safety
        /// - the CPU has the instructions
        /// - all slices have one length
        #[inline(always)]
        unsafe fn tile<const R: usize, const T: usize>(
            rows: [&[f32]; R],
            xs: [&[f32]; T],
        ) -> [[f32; R]; T] {
            let rows = rows.map(bytemuck::cast_slice);
            // SAFETY: the caller has the instructions and the lengths.
            unsafe { simd_dots::dots::<$vector, simd::F32, R, T>(rows, xs) }
        }

        /// Products of decoded rows with `T` tokens.
        ///
        /// # Safety
        /// - the CPU has the instructions
        /// - `rows` is whole rows as long as each of `xs`
        #[inline(always)]
        unsafe fn row_tiles<const T: usize>(rows: &[f32], xs: [&[f32]; T], out: &mut [f32]) {
            // SAFETY: the caller has the instructions and the lengths.
            unsafe { simd_dots::row_tiles::<$vector, $tile_rows, T>(rows, xs, out) }
        }

        tiles!([], f32, f32, $features, $tile_tokens, row_tiles, tile);

        fn prefetch(bytes: &[u8]) {
            for line in bytes.chunks(simd::LINE) {
                // SAFETY: the table is handed out only where the instructions exist; a prefetch
                // accesses no memory.
                unsafe { <$vector as Vector>::prefetch(line.as_ptr()) };
            }
        }

        fn quantize(values: &[f32], groups: &mut [InputGroup]) {
            #[target_feature(enable = $features)]
            fn inner(values: &[f32], groups: &mut [InputGroup]) {
                int8::quantize(values, groups);
            }
            // SAFETY: the table is handed out only where the instructions exist.
            unsafe { inner(values, groups) }
        }

        fn check<F: Steps<$vector>>(rows: &[&[u8]], n: usize) {
            for row in rows {
                // formats of blocks have no other rows than whole steps
                let block_len = simd::STEP * F::STEPS;
                assert!(F::STEPS == 1 || n.is_multiple_of(block_len), "rows are whole blocks");
                let expected = n * F::BYTES / block_len;
                assert_eq!(row.len(), expected, "a row holds as many values as the vector");
            }
        }

        fn dot<F: Steps<$vector>>(row: &[u8], ahead: &[u8], x: &[f32]) -> f32 {
            #[target_feature(enable = $features)]
            fn inner<F: Steps<$vector>>(row: &[u8], ahead: &[u8], x: &[f32]) -> f32 {
                // SAFETY: this function has the instructions; its caller checked the lengths.
                let [sum] = unsafe { simd_dots::dots_ahead::<$vector, F, 1>([row], [ahead], x) };
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
                unsafe { simd_dots::dots_ahead::<$vector, F, GROUP>(rows, ahead, x) }
            }
            check::<F>(&rows, x.len());
            // SAFETY: the table is handed out only where the instructions exist; `check` bounds
            // the reads.
            unsafe { inner::<F>(rows, ahead, x) }
        }

        fn axpy<F: Steps<$vector>>(scale: f32, row: &[u8], ahead: &[u8], y: &mut [f32]) {
            #[target_feature(enable = $features)]
            fn inner<F: Steps<$vector>>(scale: f32, row: &[u8], ahead: &[u8], y: &mut [f32]) {
                // SAFETY: this function has the instructions; its caller checked the lengths.
                unsafe { simd_sums::axpys::<$vector, F, 1>([scale], [row], [ahead], y) }
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
                unsafe { simd_sums::axpys::<$vector, F, GROUP>(scales, rows, ahead, y) }
            }
            check::<F>(&rows, y.len());
            // SAFETY: the table is handed out only where the instructions exist; `check` bounds
            // the accesses.
            unsafe { inner::<F>(scales, rows, ahead, y) }
        }

        fn settle<F: Steps<$vector>>(sum: &[f32], y: &mut [f32]) {
            #[target_feature(enable = $features)]
            fn inner<F: Steps<$vector>>(sum: &[f32], y: &mut [f32]) {
                // SAFETY: this function has the instructions.
                unsafe { simd_sums::settle::<$vector, F>(sum, y) }
            }
            assert_eq!(sum.len(), y.len(), "as many values");
            // SAFETY: the table is handed out only where the instructions exist.
            unsafe { inner::<F>(sum, y) }
        }

        fn decode<F: Steps<$vector>>(row: &[u8], values: &mut [f32]) {
            #[target_feature(enable = $features)]
            fn inner<F: Steps<$vector>>(row: &[u8], values: &mut [f32]) {
                // SAFETY: this function has the instructions; its caller checked the lengths.
                unsafe { simd::decode::<$vector, F>(row, values) }
            }
            check::<F>(&[row], values.len());
            // SAFETY: the table is handed out only where the instructions exist; `check` bounds
            // the accesses.
            unsafe { inner::<F>(row, values) }
        }

        fn axpy_tile(scales: TokenScales<'_>, panel: &[f32], ys: &mut PanelTile) {
            #[target_feature(enable = $features)]
            fn inner(scales: TokenScales<'_>, panel: &[f32], ys: &mut PanelTile) {
                // SAFETY: this function has the instructions; its caller checked the lengths.
                unsafe { simd_sums::axpy_tile::<$vector, $panel_registers>(scales, panel, ys) }
            }
            assert_eq!(panel.len(), PANEL_ROWS * PANEL, "a whole panel");
            // SAFETY: the table is handed out only where the instructions exist; the assertion
            // bounds the accesses.
            unsafe { inner(scales, panel, ys) }
        }

        fn axpy_picked(
            scales: &[f32; PANEL_ROWS],
            picked: u64,
            panel: &[f32],
            y: &mut [f32; PANEL],
        ) {
            #[target_feature(enable = $features)]
            fn inner(scales: &[f32; PANEL_ROWS], picked: u64, panel: &[f32], y: &mut [f32; PANEL]) {
                // SAFETY: this function has the instructions; its caller checked the length.
                unsafe {
                    simd_sums::axpy_picked::<$vector, $picked_registers>(scales, picked, panel, y)
                }
            }
            assert_eq!(panel.len(), PANEL_ROWS * PANEL, "a whole panel");
            // SAFETY: the table is handed out only where the instructions exist; the assertion
            // bounds the accesses.
            unsafe { inner(scales, picked, panel, y) }
        }
    };
}
pub(super) use simd_table;
