// In each head the values i and i + half turn by the angle whose cosine and sine stand in the tables.
#include "rt.cuh"

// `x` is [n_tokens, n_heads * 2 * half]; the tables are [n_tokens, half].
KERNEL(rotary, float *x, int n_heads, int half, const float *cos, const float *sin) {
  const int pair = blockIdx.x * blockDim.x + threadIdx.x, token = blockIdx.y;
  if (!WITHIN(pair, n_heads * half)) return;
  const int head = pair / half, i = pair % half;
  float *first = x + ((size_t)token * n_heads + head) * 2 * half + i, *second = first + half;
  const float c = cos[(size_t)token * half + i], s = sin[(size_t)token * half + i];
  const float a = *first, b = *second;
  *first = a * c - b * s;
  *second = a * s + b * c;
}
