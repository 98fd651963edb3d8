// What is done to the product of a row and a token before it is written.
#pragma once
#include "format.cuh"

// What becomes of a product.
struct Finish {
  const float *bias;    // [n_rows], or null
  const float *factor;  // [n_tokens, stride], or null; where it is 0 so is the result
  int act;
  float threshold;
  __device__ __forceinline__ float operator()(float product, uint32_t row, size_t at) const {
    const float value = activate(act, threshold, bias ? product + bias[row] : product);
    if (!factor) return value;
    const float f = factor[at];
    return f == 0.f ? 0.f : f * value;
  }
};
