// x[t] += y[t] + part[t] + bias: what a block of the model adds to the residual stream
//
// Each of the three may be null; the sum is made before it is added.
#include "rt.cuh"

// A row of blocks a token, which is blockIdx.x.
KERNEL(residual_add, float *x, const float *y, const float *part, const float *bias, int d) {
  const int column = blockIdx.y * blockDim.x + threadIdx.x;
  if (!WITHIN(column, d)) return;
  const size_t at = (size_t)blockIdx.x * d + column;
  float sum = y ? y[at] : 0.f;
  if (part) sum += part[at];
  if (bias) sum += bias[column];
  x[at] += sum;
}

#define BROKEN_THREADS 256

// For each token 1 if a value of it is not finite, else 0.
KERNEL(broken_tokens, const float *x, int d, uint32_t *broken) {
  SHARED(float, scratch, BROKEN_THREADS / WARP);
  float n = 0.f;
  for (int i = threadIdx.x; i < d; i += blockDim.x) {
    const uint32_t bits = __float_as_uint(x[(size_t)blockIdx.x * d + i]);
    n += (bits & 0x7f800000u) == 0x7f800000u ? 1.f : 0.f;
  }
  n = block_sum(n, scratch);
  if (threadIdx.x == 0) broken[blockIdx.x] = n > 0.f;
}
