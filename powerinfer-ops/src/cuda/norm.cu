// sum[t] = x[t] + add[t]; out[t] = norm(sum[t]) * scale + shift
//
// A block of threads a token. The residual stream is read and written once: what a block of the
// model adds to it comes in here. `add`, `sum` and `shift` may be null.
#include "rt.cuh"

#define NORM_THREADS 256

static __device__ __forceinline__ float summand(const float *x, const float *add, size_t at) {
  return add ? x[at] + add[at] : x[at];
}

// `centred` takes the mean away first: a layer norm, else by the root of the mean square.
static __device__ __forceinline__ void norm(const float *x, const float *add, int d, float eps,
                                            bool centred, const float *scale, const float *shift,
                                            float *sum, float *out) {
  SHARED(float, scratch, NORM_THREADS / WARP);
  SHARED(float, more_scratch, NORM_THREADS / WARP);
  const size_t token = (size_t)blockIdx.x * d;
  float mean = 0.f;
  if (centred) {
    for (int i = threadIdx.x; i < d; i += blockDim.x) mean += summand(x, add, token + i);
    mean = block_sum(mean, more_scratch) / d;
  }
  float square = 0.f;
  for (int i = threadIdx.x; i < d; i += blockDim.x) {
    const float value = summand(x, add, token + i) - mean;
    square = fmaf(value, value, square);
  }
  const float root = sqrtf(block_sum(square, scratch) / d + eps);
  for (int i = threadIdx.x; i < d; i += blockDim.x) {
    const float value = summand(x, add, token + i);
    const float normed = (value - mean) / root * scale[i];
    if (sum) sum[token + i] = value;
    out[token + i] = shift ? normed + shift[i] : normed;
  }
}

KERNEL(rms_norm, const float *x, const float *add, int d, float eps, const float *scale,
       const float *shift, float *sum, float *out) {
  norm(x, add, d, eps, false, scale, shift, sum, out);
}
KERNEL(layer_norm, const float *x, const float *add, int d, float eps, const float *scale,
       const float *shift, float *sum, float *out) {
  norm(x, add, d, eps, true, scale, shift, sum, out);
}
