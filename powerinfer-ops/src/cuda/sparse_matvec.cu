// out[t, k] = act(w[ids[k]] . x[t] + bias[ids[k]]) * factor[t, k], or in place ids[k] of a token
//
// A warp takes a row. Neighbouring lanes read neighbouring 16 bytes, and several such reads are
// under way before the first is used, because what bounds this is memory and not arithmetic. The list
// of rows and its length lie on the device: the grid is as large as keeps the device busy, and
// warps walk the list.
#include "finish.cuh"

template <class F, int TOKENS>
static __device__ __forceinline__ void sparse_matvec(const uint8_t *w, size_t stride, int n_pieces,
                                                     const List &list, const Inputs &x, int n_tokens,
                                                     const Finish &finish, float *out, int out_stride,
                                                     bool by_row) {
  const int lane = threadIdx.x % WARP;
  const int warps = blockDim.x / WARP, first = blockIdx.y * TOKENS;
  const int n = list.length();
  typename F::Input tokens[TOKENS];
#pragma unroll
  for (int t = 0; t < TOKENS; t++) of_token(x, min(first + t, n_tokens - 1), tokens[t]);
  for (int k = blockIdx.x * warps + threadIdx.x / WARP; k < n; k += gridDim.x * warps) {
    const uint32_t row = list.row(k);
    float sums[TOKENS];
    row_products<F, TOKENS>(w + row * stride, n_pieces, tokens, sums);
#pragma unroll
    for (int t = 0; t < TOKENS; t++) {
      if (lane == 0 && first + t < n_tokens) {
        const size_t at = (size_t)(first + t) * out_stride + (by_row ? row : k);
        out[at] = finish(sums[t], row, at);
      }
    }
  }
}

#define DEFINE_TOKENS(name, F, TOKENS)                                                             \
  KERNEL(sparse_matvec_##name##_##TOKENS, const uint8_t *w, size_t stride, int n_pieces,           \
         const uint32_t *ids, const uint32_t *count, int n, const float *values,                   \
         const int8_t *numbers, const float2 *scales, int d, int n_blocks, int n_tokens,           \
         const float *bias, const float *factor, int act, float threshold, float *out,             \
         int out_stride, int by_row) {                                                             \
    sparse_matvec<F, TOKENS>(w, stride, n_pieces, List{ids, count, n},                             \
                             Inputs{values, numbers, scales, d, n_blocks}, n_tokens,               \
                             Finish{bias, factor, act, threshold}, out, out_stride, by_row);       \
  }
#define DEFINE(name, F) DEFINE_TOKENS(name, F, 1) DEFINE_TOKENS(name, F, 4)
FOR_FORMATS(DEFINE)
#undef DEFINE
#undef DEFINE_TOKENS
