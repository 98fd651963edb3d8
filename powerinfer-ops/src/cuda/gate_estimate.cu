// picks[t, i] = 1 where a low-bit copy of the gate lets neuron i fire for token t, else 0.
//
// The product with the copy, plus a margin in standard deviations of its error, has to exceed what
// the neuron must exceed to fire. What is not a number is picked: its true gate will show it.
//
// A neuron is picked here exactly if the CPU picks it, so products are the CPU's to the bit: lanes
// compute the terms of their blocks, and each lane adds all of them, block by block, with one fused
// multiply-add each. `__fmul_rn` and `__fadd_rn` are products and sums that no compiler fuses.
#include "format.cuh"

template <int BITS>
static __device__ __forceinline__ float estimate(const uint8_t *row, int n_pieces,
                                                 const NumberInput &x) {
  typedef LowBits<BITS> F;
  const int lane = threadIdx.x % WARP;
  float total = 0.f;
  for (int first = 0; first < n_pieces; first += WARP * AHEAD) {
    typename F::Piece w[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
      const int piece = first + WARP * i + lane;
      if (piece < n_pieces) w[i] = F::load(row, piece, n_pieces);
    }
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
      const int piece = first + WARP * i + lane;
      float values[2] = {0.f, 0.f}, scales[2] = {0.f, 0.f};
      if (piece < n_pieces) F::terms(w[i], x, piece, values, scales);
#ifdef MUTANT_WRONG_ORDER
      for (int b = 0; b < 2; b++) total += warp_sum(values[b] * scales[b]);
#else
      const int n = min(WARP, n_pieces - first - WARP * i);
      for (int l = 0; l < n; l++) {
#pragma unroll
        for (int b = 0; b < 2; b++) {
          const float value = __shfl_sync(ALL_LANES, values[b], l);
          total = fmaf(value, __shfl_sync(ALL_LANES, scales[b], l), total);
        }
      }
#endif
    }
  }
  return total;
}

template <int BITS>
static __device__ __forceinline__ void gate_estimate(const uint8_t *w, size_t stride, int n_pieces,
                                                     int n_rows, const Inputs &x, const float *norms,
                                                     float margin, const float *cuts,
                                                     const float *deviations, float *picks) {
  const int lane = threadIdx.x % WARP, warps = blockDim.x / WARP, token = blockIdx.y;
  NumberInput input;
  of_token(x, token, input);
  const float reach = __fmul_rn(margin, norms[token]);
  for (int row = blockIdx.x * warps + threadIdx.x / WARP; row < n_rows; row += gridDim.x * warps) {
    const float product = estimate<BITS>(w + row * stride, n_pieces, input);
    if (lane == 0) {
      const bool stays = __fadd_rn(product, __fmul_rn(reach, deviations[row])) <= cuts[row];
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
