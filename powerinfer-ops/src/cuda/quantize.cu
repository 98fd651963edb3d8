// Tokens rounded to eight bits in blocks of 32, as formats of whole numbers take them.
//
// A warp takes a block. The rounding is the CPU's, to the bit: the largest magnitude becomes 127, ties
// go to even, and a block with a value that is not finite has a scale that is no number.
#include "rt.cuh"

#define QUANTIZE_THREADS 256

// A block of threads a token. `n_blocks` blocks are written, zeros after the last value.
KERNEL(quantize, const float *x, int d, int n_blocks, int8_t *numbers, float2 *scales, float *norms) {
  SHARED(float, scratch, QUANTIZE_THREADS / WARP);
  const int token = blockIdx.x, lane = threadIdx.x % WARP, n_warps = blockDim.x / WARP;
  float square = 0.f;
  for (int block = threadIdx.x / WARP; block < n_blocks; block += n_warps) {
    const int column = block * 32 + lane;
    const float value = WITHIN(column, d) ? x[(size_t)token * d + column] : 0.f;
    square = fmaf(value, value, square);
    // magnitudes order as their bits do, infinity and NaN above all numbers
    unsigned bits = __float_as_uint(value) & 0x7fffffffu;
#pragma unroll
    for (int step = FIRST_STEP; step > 0; step >>= 1)
      bits = max(bits, __shfl_xor_sync(ALL_LANES, bits, step));
    const float largest = __uint_as_float(bits);
    const bool finite = bits < 0x7f800000u, any = finite && largest >= 1e-36f;
    const float scale = any ? largest / 127.f : 0.f, inverse = any ? 127.f / largest : 0.f;
    const int number = any ? (int)rintf(value * inverse) : 0;
    numbers[((size_t)token * n_blocks + block) * 32 + lane] = (int8_t)number;
    const int sum = warp_sum(number);
    if (lane == 0) {
      const float nan = __uint_as_float(0x7fc00000u);
      scales[(size_t)token * n_blocks + block] = make_float2(finite ? scale : nan, (float)sum);
    }
  }
  square = block_sum(square, scratch);
  if (threadIdx.x == 0 && norms) norms[token] = sqrtf(square);
}
