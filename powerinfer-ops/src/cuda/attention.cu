// Attention of new tokens over a key-value cache that stays where it is.
//
// The cache of a layer is [n_kv_heads, capacity, d_head] for keys and for values, in f32 or f16; new
// positions are written behind the old ones, and heads that share keys read the same ones. Positions
// are cut into chunks that begin at multiples of CHUNK; a block of threads sums a chunk for one query
// head of one token, and merge_chunks adds the chunks in order. So a token gets the same bits
// whatever other tokens run beside it.
#include "rt.cuh"

#define CHUNK 256
#define ATTENTION_THREADS 128
#define ATTENTION_WARPS (ATTENTION_THREADS / WARP)

struct KvF32 {
  typedef float Stored;
  static __device__ __forceinline__ float value(float v) { return v; }
  static __device__ __forceinline__ float stored(float v) { return v; }
};
struct KvF16 {
  typedef uint16_t Stored;
  static __device__ __forceinline__ float value(uint16_t v) { return f16_value(v); }
  static __device__ __forceinline__ uint16_t stored(float v) { return f16_bits(v); }
};

// Keys or values [n_tokens, n_kv_heads * d_head] to the places from `first_position` on.
template <class K>
static __device__ __forceinline__ void kv_write(const float *from, typename K::Stored *cache,
                                                int n_kv_heads, int d_head, int capacity,
                                                int first_position) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x, token = blockIdx.y;
  if (!WITHIN(i, n_kv_heads * d_head)) return;
  const size_t row = (size_t)(i / d_head) * capacity + first_position + token;
  cache[row * d_head + i % d_head] = K::stored(from[(size_t)token * n_kv_heads * d_head + i]);
}

// The first `n` values of each head, for a cache of another capacity.
template <class T>
static __device__ __forceinline__ void kv_copy(const T *from, size_t from_stride, T *to,
                                               size_t to_stride, size_t n) {
  const size_t step = (size_t)gridDim.x * blockDim.x;
  for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step)
    to[blockIdx.y * to_stride + i] = from[blockIdx.y * from_stride + i];
}

static __device__ __forceinline__ float to_bf16(float v) {
  const uint32_t bits = __float_as_uint(v);
  return __uint_as_float((bits + 0x7fffu + (bits >> 16 & 1)) & 0xffff0000u);
}

#define MINUS_INFINITY __uint_as_float(0xff800000u)

// What a score counts for beside the largest one; nothing where all are minus infinity.
static __device__ __forceinline__ float share(float score, float largest) {
  if (largest == MINUS_INFINITY) return score == score ? 0.f : score;
  return expf(score - largest);
}

// Positions that a token sees: its own and those before, or the last `window` of them.
static __device__ __forceinline__ int first_seen(int position, int window) {
  return window > 0 ? max(position + 1 - window, 0) : 0;
}

// For each token, head and chunk: the largest score, the sum of shares, and the weighted values,
// d_head + 2 floats. `slopes` may be null, `window` 0.
template <class K>
static __device__ __forceinline__ void attention(const float *queries, const typename K::Stored *keys,
                                                 const typename K::Stored *values, int n_kv_heads,
                                                 int d_head, int capacity, int first_position,
                                                 int window, float scale, const float *slopes,
                                                 float *parts) {
  SHARED(float, scores, CHUNK);
  SHARED(float, largest_of, ATTENTION_WARPS);
  SHARED(float, total_of, ATTENTION_WARPS);
  const int head = blockIdx.x, n_heads = gridDim.x, token = blockIdx.z;
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  const int position = first_position + token;
  const int seen = first_seen(position, window);
  // chunks are counted from the one that the first token's view begins in
  const int chunk = first_seen(first_position, window) / CHUNK + blockIdx.y;
  const int start = max(chunk * CHUNK, seen), end = min((chunk + 1) * CHUNK, position + 1);
  const size_t kv_head = (size_t)(head / (n_heads / n_kv_heads)) * capacity;
  const float *query = queries + ((size_t)token * n_heads + head) * d_head;
  for (int p = start + warp; p < end; p += ATTENTION_WARPS) {
    const typename K::Stored *key = keys + (kv_head + p) * d_head;
    float product = 0.f;
    for (int i = lane; i < d_head; i += WARP) product = fmaf(query[i], K::value(key[i]), product);
    product = warp_sum(product);
    if (slopes) product += to_bf16(slopes[head] * to_bf16((float)p));
    if (lane == 0) scores[p - start] = product * scale;
  }
  BARRIER();
  const int n = max(end - start, 0);
  float largest = MINUS_INFINITY;
  for (int i = threadIdx.x; i < n; i += blockDim.x) largest = fmaxf(largest, scores[i]);
#pragma unroll
  for (int step = FIRST_STEP; step > 0; step >>= 1)
    largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, step));
  if (lane == 0) largest_of[warp] = largest;
  BARRIER();
  for (int w = 0; w < ATTENTION_WARPS; w++) largest = fmaxf(largest, largest_of[w]);
  float total = 0.f;
  for (int i = threadIdx.x; i < n; i += blockDim.x) {
    scores[i] = share(scores[i], largest);
    total += scores[i];
  }
  total = block_sum(total, total_of);
  float *part = parts + (((size_t)token * n_heads + head) * gridDim.y + blockIdx.y) * (d_head + 2);
  for (int c = threadIdx.x; c < d_head; c += blockDim.x) {
    float sum = 0.f;
    const typename K::Stored *value = values + (kv_head + start) * d_head + c;
#pragma unroll 8
    for (int i = 0; i < n; i++) sum = fmaf(scores[i], K::value(value[(size_t)i * d_head]), sum);
    part[2 + c] = sum;
  }
  if (threadIdx.x == 0) {
    part[0] = largest;
    part[1] = total;
  }
}

#define DEFINE(name, K)                                                                            \
  KERNEL(kv_write_##name, const float *from, K::Stored *cache, int n_kv_heads, int d_head,         \
         int capacity, int first_position) {                                                       \
    kv_write<K>(from, cache, n_kv_heads, d_head, capacity, first_position);                        \
  }                                                                                                \
  KERNEL(kv_copy_##name, const K::Stored *from, size_t from_stride, K::Stored *to,                 \
         size_t to_stride, size_t n) {                                                             \
    kv_copy(from, from_stride, to, to_stride, n);                                                  \
  }                                                                                                \
  KERNEL(attention_##name, const float *queries, const K::Stored *keys, const K::Stored *values,   \
         int n_kv_heads, int d_head, int capacity, int first_position, int window, float scale,    \
         const float *slopes, float *parts) {                                                      \
    attention<K>(queries, keys, values, n_kv_heads, d_head, capacity, first_position, window,      \
                 scale, slopes, parts);                                                            \
  }
DEFINE(f32, KvF32)
DEFINE(f16, KvF16)
#undef DEFINE

// The chunks of a token and head, added in order; zeros if no position counts.
KERNEL(merge_chunks, const float *parts, int n_chunks, int d_head, float *out) {
  const size_t query = (size_t)blockIdx.y * gridDim.x + blockIdx.x;
  const float *part = parts + query * n_chunks * (d_head + 2);
  for (int c = threadIdx.x; c < d_head; c += blockDim.x) {
    float largest = MINUS_INFINITY, total = 0.f, sum = 0.f;
    for (int chunk = 0; chunk < n_chunks; chunk++) {
      const float *p = part + (size_t)chunk * (d_head + 2);
      if (p[0] == MINUS_INFINITY && p[1] == 0.f) continue;
      const float both = fmaxf(largest, p[0]);
      const float mine = share(largest, both), other = share(p[0], both);
      total = total * mine + p[1] * other;
      sum = sum * mine + p[2 + c] * other;
      largest = both;
    }
    out[query * d_head + c] = largest == MINUS_INFINITY && total == 0.f ? 0.f : sum / total;
  }
}
