// What all kernels share: the compiler they are built with, loads, reductions within a warp.
//
// The same files are compiled by nvcc for a GPU and as C++ for tests on a CPU (testing/hostsim), so
// shared memory is declared with SHARED and kernels with KERNEL.
#pragma once
#ifdef __CUDACC__
#include <cuda_fp16.h>
#include <stdint.h>
#define SHARED(T, name, N) __shared__ T name[N]
#define KERNEL(name, ...) extern "C" __global__ void name(__VA_ARGS__)
// A kernel for blocks of so many threads, so many of which are to fit a multiprocessor at least: its
// registers are shared out among them.
#define KERNEL_OF(threads, blocks, name, ...) \
  extern "C" __global__ void __launch_bounds__(threads, blocks) name(__VA_ARGS__)
#define BARRIER() __syncthreads()
// Two f16 numbers, the lower half first.
static __device__ __forceinline__ float2 f16_pair(uint32_t bits) {
  return __half22float2(*reinterpret_cast<const __half2 *>(&bits));
}
static __device__ __forceinline__ float f16_value(uint16_t bits) {
  return __half2float(__ushort_as_half(bits));
}
static __device__ __forceinline__ uint16_t f16_bits(float value) {
  return __half_as_ushort(__float2half_rn(value));
}
#endif

#define WARP 32
#define ALL_LANES 0xffffffffu

// Faults planted by tests, to prove that they would be seen.
#ifdef MUTANT_MISSING_BARRIER
#undef BARRIER
#define BARRIER()
#endif
#ifdef MUTANT_MISSING_GUARD
#define WITHIN(index, end) ((index) >= 0)
#else
#define WITHIN(index, end) ((index) < (end))
#endif
#ifdef MUTANT_UNPICKED_NAN
#define PICKS_NAN(value) false
#else
#define PICKS_NAN(value) ((value) != (value))
#endif
#ifdef MUTANT_STRICT_THRESHOLD
#define REACHES(value, threshold) ((value) > (threshold))
#else
#define REACHES(value, threshold) ((value) >= (threshold))
#endif
#ifdef MUTANT_SHORT_REDUCTION
#define FIRST_STEP 8
#else
#define FIRST_STEP 16
#endif

// Weights are read once: past the first-level cache, which is left to the inputs.
static __device__ __forceinline__ uint4 load16(const void *p) {
  return __ldcg(reinterpret_cast<const uint4 *>(p));
}

static __device__ __forceinline__ float2 bf16_pair(uint32_t bits) {
  return make_float2(__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u));
}

// The sum over a warp, in every lane, in one fixed order.
template <class T> __device__ __forceinline__ T warp_sum(T value) {
#pragma unroll
  for (int step = FIRST_STEP; step > 0; step >>= 1) value += __shfl_xor_sync(ALL_LANES, value, step);
  return value;
}

// Lanes swap halves of `2 * HALF` values, each with that `STEP` away, and add what they keep.
template <int STEP, int HALF, int N>
static __device__ __forceinline__ void swap_sums(float (&values)[N]) {
  const bool upper = threadIdx.x & STEP;
#pragma unroll
  for (int i = 0; i < HALF; i++) {
    const float low = values[i], high = values[i + HALF];
    values[i] = (upper ? high : low) + __shfl_xor_sync(ALL_LANES, upper ? low : high, STEP);
  }
}

// The sums over a warp of `N` values of each lane, in the order of `warp_sum`: lane `l` is left with
// those of the values from `l * N / WARP` on. It takes as many exchanges as there are values, where
// `warp_sum` of each takes five times that.
template <int N> static __device__ __forceinline__ void warp_sums(float (&values)[N]) {
  swap_sums<16, N / 2>(values);
  swap_sums<8, N / 4>(values);
  swap_sums<4, N / 8>(values);
  swap_sums<2, N / 16>(values);
  swap_sums<1, N / 32>(values);
}

// The sum over a block of whole warps, in every thread. `scratch` has a place for each warp; the
// block has met since it was last read.
static __device__ __forceinline__ float block_sum(float value, float *scratch) {
  const int warp = threadIdx.x / WARP, n_warps = blockDim.x / WARP;
  value = warp_sum(value);
  if (threadIdx.x % WARP == 0) scratch[warp] = value;
  BARRIER();
  float sum = 0.f;
  for (int i = 0; i < n_warps; i++) sum += scratch[i];
  return sum;
}

// What is done to a product with its bias; the numbers are those of `steps.rs`. A NaN stays one.
#define ACT_NONE 0
#define ACT_ABOVE 1
#define ACT_SILU 2
#define ACT_GELU 3
#define ACT_REACHES 4
static __device__ __forceinline__ float activate(int act, float threshold, float value) {
  switch (act) {
    case ACT_ABOVE: return value <= threshold ? 0.f : value;
    case ACT_SILU: return value / (1.f + expf(-value));
    case ACT_GELU: return 0.5f * value * (1.f + erff(value * 0.70710678118654752f));
    // what is not a number is picked: its true gate will show it
    case ACT_REACHES: return REACHES(value, threshold) || PICKS_NAN(value) ? 1.f : 0.f;
    default: return value;
  }
}
