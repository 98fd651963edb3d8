// What sparse_axpy.cu computes, for many tokens: a row is read once for AXPY_TOKENS of them
//
// A block of threads takes a tile of tokens and columns, and one of the groups of parts that sum_parts
// adds up first. Some rows at a time are decoded into shared memory, with what they are multiplied by; a
// thread has eight tokens and four columns. It adds rows in their order and parts in theirs, as
// sparse_axpy.cu and sum_parts do, so that a token has the same bits alone and among many.
#include "format.cuh"

#define AXPY_TOKENS 32
#define AXPY_COLUMNS 128
#define AXPY_THREADS 128
// Rows that are in shared memory at a time.
#define AXPY_ROWS 16
#define THREAD_TOKENS 8
// Places of a row's scales: a multiple of four, and neighbouring rows in other banks.
#define SCALE_STRIDE (AXPY_TOKENS + 4)
#define BLOCKS_OF_32 (AXPY_COLUMNS / 32)

template <class F>
static __device__ __forceinline__ void tiled_axpy(const uint8_t *w, size_t stride, int n_pieces,
                                                  const List &list, const uint32_t *starts,
                                                  int part_len, int n_parts, int group,
                                                  const float *h, int h_stride, bool by_row,
                                                  int n_tokens, int d, float *sums) {
  SHARED(float4, rows, AXPY_ROWS * AXPY_COLUMNS / 4);
  SHARED(float, row_scales, F::SCALED ? AXPY_ROWS * BLOCKS_OF_32 : 1);
  SHARED(float4, scales, AXPY_ROWS * SCALE_STRIDE / 4);
  constexpr int PIECES = AXPY_COLUMNS / F::VALUES;
  const int lane = threadIdx.x % WARP, my_token = threadIdx.x / WARP * THREAD_TOKENS;
  const int first_token = blockIdx.x * AXPY_TOKENS, first_column = blockIdx.y * AXPY_COLUMNS;
  const bool busy = first_column + 4 * lane < d && first_token + my_token < n_tokens;
  float totals[THREAD_TOKENS][4] = {};
#ifdef MUTANT_WRONG_GROUP
  const int first_part = blockIdx.z * (group - 1);
#else
  const int first_part = blockIdx.z * group;
#endif
  const int end_part = min(first_part + group, n_parts);
  for (int part = first_part; part < end_part; part++) {
    float of_part[THREAD_TOKENS][4] = {};
    const int begin = starts ? (int)starts[part] : part * part_len;
    const int end = starts ? (int)starts[part + 1] : min((part + 1) * part_len, list.n);
    for (int first = begin; first < end; first += AXPY_ROWS) {
      const int n = min(AXPY_ROWS, end - first);
      for (int i = threadIdx.x; i < AXPY_ROWS * PIECES; i += AXPY_THREADS) {
        const int k = i / PIECES, column = i % PIECES * F::VALUES;
        const int piece = (first_column + column) / F::VALUES;
        if (k >= n || !WITHIN(piece, n_pieces)) continue;
        const typename F::Piece row = F::load(w + list.row(first + k) * stride, piece, n_pieces);
        float values[F::VALUES];
        F::decode(row, values);
#pragma unroll
        for (int v = 0; v < F::VALUES; v += 4)
          rows[(k * AXPY_COLUMNS + column + v) / 4] =
              float4{values[v], values[v + 1], values[v + 2], values[v + 3]};
        if (F::SCALED) row_scales[k * BLOCKS_OF_32 + column / 32] = F::scale(row);
      }
      for (int i = threadIdx.x; i < AXPY_ROWS * AXPY_TOKENS; i += AXPY_THREADS) {
        const int k = i % AXPY_ROWS, t = i / AXPY_ROWS;
        if (k >= n) continue;
        const int place = by_row ? (int)list.row(first + k) : first + k;
        const size_t token = min(first_token + t, n_tokens - 1);
        float &to = reinterpret_cast<float *>(scales)[k * SCALE_STRIDE + t];
        to = rounded<F>(__ldg(h + token * h_stride + place));
      }
      BARRIER();
      for (int k = 0; busy && k < n; k++) {
        const float4 row = rows[k * AXPY_COLUMNS / 4 + lane];
        const float scale = F::SCALED ? row_scales[k * BLOCKS_OF_32 + lane / 8] : 1.f;
        const float4 *from = scales + (k * SCALE_STRIDE + my_token) / 4;
        const float4 low = from[0], high = from[1];
        const float of_tokens[THREAD_TOKENS] = {low.x,  low.y,  low.z,  low.w,
                                                high.x, high.y, high.z, high.w};
#pragma unroll
        for (int t = 0; t < THREAD_TOKENS; t++) {
          const float factor = scaled<F>(of_tokens[t], scale);
          of_part[t][0] = fmaf(factor, row.x, of_part[t][0]);
          of_part[t][1] = fmaf(factor, row.y, of_part[t][1]);
          of_part[t][2] = fmaf(factor, row.z, of_part[t][2]);
          of_part[t][3] = fmaf(factor, row.w, of_part[t][3]);
        }
      }
      BARRIER();
    }
#pragma unroll
    for (int t = 0; t < THREAD_TOKENS; t++)
#pragma unroll
      for (int c = 0; c < 4; c++) totals[t][c] += of_part[t][c];
  }
#pragma unroll
  for (int t = 0; t < THREAD_TOKENS; t++) {
    const int token = first_token + my_token + t;
    if (token >= n_tokens) break;
    float *to = sums + ((size_t)blockIdx.z * n_tokens + token) * d;
#pragma unroll
    for (int c = 0; c < 4; c++) {
      const int column = first_column + 4 * lane + c;
      if (WITHIN(column, d)) to[column] = totals[t][c];
    }
  }
}

#define DEFINE(name, F)                                                                          \
  KERNEL_OF(AXPY_THREADS, 4, tiled_axpy_##name, const uint8_t *w, size_t stride, int n_pieces,   \
            const uint32_t *ids, int n, const uint32_t *starts, int part_len, int n_parts,       \
            int group, const float *h, int h_stride, int by_row, int n_tokens, int d,            \
            float *sums) {                                                                       \
    tiled_axpy<F>(w, stride, n_pieces, List{ids, nullptr, n}, starts, part_len, n_parts, group,  \
                  h, h_stride, by_row, n_tokens, d, sums);                                       \
  }
FOR_FORMATS(DEFINE)
#undef DEFINE
