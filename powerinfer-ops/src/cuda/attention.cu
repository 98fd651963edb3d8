// Attention of new tokens over a key-value cache that stays where it is.
//
// The cache of a layer is [n_kv_heads, capacity, d_head] for keys and for values, in f32 or f16; new
// positions are written behind the old ones, and heads that share keys read the same ones. Positions
// are cut into chunks that begin at multiples of CHUNK. For few tokens a block of threads sums a chunk
// for one query head of one token, and merge_chunks adds the chunks in order. For many a block takes
// some tokens of a head, reads keys and values once for all of them, and goes through the chunks itself.
// It is the same code with the same order of sums, so that a token gets the same bits whatever other
// tokens run beside it.
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

// The cache of a layer and who asks.
template <class K> struct Asked {
  const float *queries;
  const typename K::Stored *keys, *values;
  int n_heads, n_kv_heads, d_head, capacity, first_position, window;
  float scale;
  const float *slopes;  // or null
  __device__ __forceinline__ size_t kv_head(int head) const {
    return (size_t)(head / (n_heads / n_kv_heads)) * capacity;
  }
};

// Some tokens' share in a chunk. What counts nothing for a token has the share 0.
template <int TOKENS> struct Shares {
  float *of;               // [CHUNK, TOKENS]
  float *largest, *total;  // [TOKENS]: the largest score, and the sum of shares
};

// The shares of the positions from `start` to `end` of a chunk, for a head of the tokens from `first`
// on, the last of them `last` for all that would follow. The block has met when this returns.
template <class K, int TOKENS>
static __device__ __forceinline__ void share_chunk(const Asked<K> &a, int head, int first, int last,
                                                   int chunk, int start, int end,
                                                   const Shares<TOKENS> &shares) {
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  // a warp takes as many positions and tokens as it has lanes, each of which is left with one product
  constexpr int POSITIONS = WARP / TOKENS;
  for (int p = start + warp * POSITIONS; p < end; p += ATTENTION_WARPS * POSITIONS) {
    const typename K::Stored *keys = a.keys + (a.kv_head(head) + p) * a.d_head;
    float products[WARP] = {};
    for (int i = lane; i < a.d_head; i += WARP) {
      float values[POSITIONS];
#pragma unroll
      for (int j = 0; j < POSITIONS; j++)
        values[j] = p + j < end ? K::value(keys[j * a.d_head + i]) : 0.f;
#pragma unroll
      for (int t = 0; t < TOKENS; t++) {
        const size_t query = (size_t)min(first + t, last) * a.n_heads + head;
        const float of_query = a.queries[query * a.d_head + i];
#pragma unroll
        for (int j = 0; j < POSITIONS; j++)
          products[j * TOKENS + t] = fmaf(of_query, values[j], products[j * TOKENS + t]);
      }
    }
    warp_sums(products);
    const int mine = p + lane / TOKENS, t = lane % TOKENS;
    float product = products[0];
    if (a.slopes) product += to_bf16(a.slopes[head] * to_bf16((float)mine));
    if (mine < end) shares.of[mine % CHUNK * TOKENS + t] = product * a.scale;
  }
  BARRIER();
  for (int t = warp; t < TOKENS; t += ATTENTION_WARPS) {
    const int position = a.first_position + min(first + t, last);
    const int seen = max(first_seen(position, a.window), start);
#ifdef MUTANT_FUTURE_SEEN
    const int after = end;
#else
    const int after = min(position + 1, end);
#endif
    float largest = MINUS_INFINITY, total = 0.f;
    for (int i = lane; i < CHUNK; i += WARP) {
      const int p = chunk * CHUNK + i;
      if (p >= seen && p < after) largest = fmaxf(largest, shares.of[i * TOKENS + t]);
    }
#pragma unroll
    for (int step = FIRST_STEP; step > 0; step >>= 1)
      largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, step));
    for (int i = lane; i < CHUNK; i += WARP) {
      const int p = chunk * CHUNK + i;
      float &of = shares.of[i * TOKENS + t];
      of = p >= seen && p < after ? share(of, largest) : 0.f;
      total += of;
    }
    total = warp_sum(total);
    if (lane == 0) {
      shares.largest[t] = largest;
      shares.total[t] = total;
    }
  }
  BARRIER();
}

// The weighted values of column `c` over the same positions. What counts nothing is not looked at: for
// some of the tokens it lies in the future.
template <class K, int TOKENS>
static __device__ __forceinline__ void weigh_chunk(const Asked<K> &a, int head, int start, int end,
                                                   const Shares<TOKENS> &shares, int c,
                                                   float (&sums)[TOKENS]) {
  const typename K::Stored *value = a.values + (a.kv_head(head) + start) * a.d_head + c;
#pragma unroll
  for (int t = 0; t < TOKENS; t++) sums[t] = 0.f;
#pragma unroll 8
  for (int p = start; p < end; p++) {
    const float v = K::value(value[(size_t)(p - start) * a.d_head]);
#pragma unroll
    for (int t = 0; t < TOKENS; t++) {
      const float of = shares.of[p % CHUNK * TOKENS + t];
      sums[t] = of == 0.f ? sums[t] : fmaf(of, v, sums[t]);
    }
  }
}

// For each token, head and chunk: the largest score, the sum of shares, and the weighted values,
// d_head + 2 floats.
template <class K>
static __device__ __forceinline__ void attention(const Asked<K> &a, float *parts) {
  SHARED(float, of, CHUNK);
  SHARED(float, largest, 1);
  SHARED(float, total, 1);
  const Shares<1> shares = {of, largest, total};
  const int head = blockIdx.x, token = blockIdx.z, position = a.first_position + token;
  // chunks are counted from the one that the first token's view begins in
  const int chunk = first_seen(a.first_position, a.window) / CHUNK + blockIdx.y;
  const int start = max(chunk * CHUNK, first_seen(position, a.window));
  const int end = min((chunk + 1) * CHUNK, position + 1);
  share_chunk<K, 1>(a, head, token, token, chunk, start, end, shares);
  const size_t query = (size_t)token * a.n_heads + head;
  float *part = parts + (query * gridDim.y + blockIdx.y) * (a.d_head + 2);
  for (int c = threadIdx.x; c < a.d_head; c += blockDim.x) {
    float sum[1];
    weigh_chunk<K, 1>(a, head, start, end, shares, c, sum);
    part[2 + c] = sum[0];
  }
  if (threadIdx.x == 0) {
    part[0] = largest[0];
    part[1] = total[0];
  }
}

// A sum over chunks whose shares are of different largest scores.
struct Merge {
  float largest, total, of_sum, of_part;
  // Takes the largest score and the sum of shares of another chunk, if it has any.
  __device__ __forceinline__ bool add(float part_largest, float part_total) {
    if (part_largest == MINUS_INFINITY && part_total == 0.f) return false;
    const float both = fmaxf(largest, part_largest);
    of_sum = share(largest, both);
    of_part = share(part_largest, both);
    total = sum(total, part_total);
    largest = both;
    return true;
  }
  // What becomes of a sum, given that of the chunk.
  __device__ __forceinline__ float sum(float so_far, float part) const {
    return fmaf(part, of_part, __fmul_rn(so_far, of_sum));
  }
  __device__ __forceinline__ bool nothing() const { return largest == MINUS_INFINITY && total == 0.f; }
  static __device__ __forceinline__ Merge begin() { return {MINUS_INFINITY, 0.f, 0.f, 0.f}; }
};

// Tokens that share what is read of the cache.
#define MANY_TOKENS 8

// A block a head and some tokens. `out` has the sums under way.
template <class K>
static __device__ __forceinline__ void attention_many(const Asked<K> &a, int n_tokens, float *out) {
  SHARED(float, of, CHUNK *MANY_TOKENS);
  SHARED(float, largest, MANY_TOKENS);
  SHARED(float, total, MANY_TOKENS);
  const Shares<MANY_TOKENS> shares = {of, largest, total};
  const int head = blockIdx.x, first = blockIdx.y * MANY_TOKENS;
  const int last = min(first + MANY_TOKENS, n_tokens) - 1;
  const int seen = first_seen(a.first_position + first, a.window);
  const int after = a.first_position + last + 1;
  float *to = out + ((size_t)first * a.n_heads + head) * a.d_head;
  const size_t next = (size_t)a.n_heads * a.d_head;
  Merge merges[MANY_TOKENS];
#pragma unroll
  for (int t = 0; t < MANY_TOKENS; t++) merges[t] = Merge::begin();
  for (int chunk = seen / CHUNK; chunk * CHUNK < after; chunk++) {
    const int start = max(chunk * CHUNK, seen), end = min((chunk + 1) * CHUNK, after);
    share_chunk<K, MANY_TOKENS>(a, head, first, last, chunk, start, end, shares);
    bool began[MANY_TOKENS], any[MANY_TOKENS];
#pragma unroll
    for (int t = 0; t < MANY_TOKENS; t++) {
      began[t] = !merges[t].nothing();
      any[t] = merges[t].add(largest[t], total[t]) && first + t <= last;
    }
    for (int c = threadIdx.x; c < a.d_head; c += blockDim.x) {
      float sums[MANY_TOKENS];
      weigh_chunk<K, MANY_TOKENS>(a, head, start, end, shares, c, sums);
#pragma unroll
      for (int t = 0; t < MANY_TOKENS; t++)
        if (any[t]) to[t * next + c] = merges[t].sum(began[t] ? to[t * next + c] : 0.f, sums[t]);
    }
    BARRIER();
  }
  for (int c = threadIdx.x; c < a.d_head; c += blockDim.x)
#pragma unroll
    for (int t = 0; t < MANY_TOKENS; t++)
      if (first + t <= last)
        to[t * next + c] = merges[t].nothing() ? 0.f : to[t * next + c] / merges[t].total;
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
    attention<K>({queries, keys, values, (int)gridDim.x, n_kv_heads, d_head, capacity,             \
                  first_position, window, scale, slopes},                                          \
                 parts);                                                                           \
  }                                                                                                \
  KERNEL_OF(ATTENTION_THREADS, 4, attention_many_##name, const float *queries,                     \
            const K::Stored *keys, const K::Stored *values, int n_kv_heads, int d_head,            \
            int capacity, int first_position, int window, float scale, const float *slopes,        \
            int n_tokens, float *out) {                                                            \
    attention_many<K>({queries, keys, values, (int)gridDim.x, n_kv_heads, d_head, capacity,        \
                       first_position, window, scale, slopes},                                     \
                      n_tokens, out);                                                              \
  }
DEFINE(f32, KvF32)
DEFINE(f16, KvF16)
#undef DEFINE

// The chunks of a token and head, added in order; zeros if no position counts.
KERNEL(merge_chunks, const float *parts, int n_chunks, int d_head, float *out) {
  const size_t query = (size_t)blockIdx.y * gridDim.x + blockIdx.x;
  const float *part = parts + query * n_chunks * (d_head + 2);
  for (int c = threadIdx.x; c < d_head; c += blockDim.x) {
    Merge merge = Merge::begin();
    float sum = 0.f;
    for (int chunk = 0; chunk < n_chunks; chunk++) {
      const float *p = part + (size_t)chunk * (d_head + 2);
      if (merge.add(p[0], p[1])) sum = merge.sum(sum, p[2 + c]);
    }
    out[query * d_head + c] = merge.nothing() ? 0.f : sum / merge.total;
  }
}
