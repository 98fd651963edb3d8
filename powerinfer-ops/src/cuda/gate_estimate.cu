// picks[t, i] = 1 where a low-bit copy of the gate lets neuron i fire for token t, else 0.
//
// The product with the copy, plus a margin in standard deviations of its error, has to exceed what
// the neuron must exceed to fire. What is not a number is picked: its true gate will show it.
#include "format.cuh"

template <int BITS>
static __device__ __forceinline__ void gate_estimate(const uint8_t *w, size_t stride, int n_pieces,
                                                     int n_rows, const Inputs &x, const float *norms,
                                                     float margin, const float *cuts,
                                                     const float *deviations, float *picks) {
  const int lane = threadIdx.x % WARP, warps = blockDim.x / WARP, token = blockIdx.y;
  NumberInput tokens[1];
  of_token(x, token, tokens[0]);
  const float reach = margin * norms[token];
  for (int row = blockIdx.x * warps + threadIdx.x / WARP; row < n_rows; row += gridDim.x * warps) {
    float sums[1];
    row_products<LowBits<BITS>, 1>(w + row * stride, n_pieces, tokens, sums);
    if (lane == 0) {
      const bool stays = sums[0] + reach * deviations[row] <= cuts[row];
      picks[(size_t)token * n_rows + row] = stays ? 0.f : 1.f;
    }
  }
}

#define DEFINE(BITS)                                                                             \
  KERNEL(gate_estimate_##BITS, const uint8_t *w, size_t stride, int n_pieces, int n_rows,        \
         const int8_t *numbers, const float2 *scales, int n_blocks, const float *norms,          \
         float margin, const float *cuts, const float *deviations, float *picks) {               \
    gate_estimate<BITS>(w, stride, n_pieces, n_rows, Inputs{nullptr, numbers, scales, 0, n_blocks}, \
                        norms, margin, cuts, deviations, picks);                                 \
  }
DEFINE(2)
DEFINE(3)
DEFINE(4)
#undef DEFINE
