// The Euclidean norms of tokens, to the bit those of the CPU: picks of a low-bit copy depend on them.
//
// The CPU adds squares in the order in which they stand, rounding each and each sum. So one thread adds
// what all of them squared.
#include "rt.cuh"

#define NORM_TILE 1024

// A block of threads a token.
KERNEL(token_norms, const float *x, int d, float *norms) {
  SHARED(float, squares, NORM_TILE);
  const float *values = x + (size_t)blockIdx.x * d;
  float sum = 0.f;
  for (int first = 0; first < d; first += NORM_TILE) {
    const int n = min(NORM_TILE, d - first);
    for (int i = threadIdx.x; i < n; i += blockDim.x)
      squares[i] = __fmul_rn(values[first + i], values[first + i]);
    BARRIER();
    if (threadIdx.x == 0)
      for (int i = 0; i < n; i++) sum = __fadd_rn(sum, squares[i]);
    BARRIER();
  }
  if (threadIdx.x == 0) norms[blockIdx.x] = sqrtf(sum);
}
