// How rows of weights lie on the device, and what a lane does with a piece of one.
//
// A row is read in pieces of 16 bytes, neighbouring lanes neighbouring pieces. Blocks of quantised
// formats are 18 or 34 bytes in files, which no such load fits; here a row holds the numbers of all
// its blocks first and their scales after them (`layout.rs` writes it). Rows begin at multiples of
// 16 bytes and are filled up with zeros.
//
// Formats of whole numbers are multiplied with inputs rounded to eight bits, as on the CPU: the sums
// of whole numbers are the same there.
#pragma once
#include "rt.cuh"

// A token, as each kind of format takes it.
struct FloatInput {
  const float *values;
  int n;
  bool aligned;  // to 16 bytes: tokens are where candle has them
};
struct NumberInput {
  const int8_t *numbers;  // filled up with zeros to whole blocks
  const float2 *scales;   // of each block of 32, and the sum of its numbers
};

template <int N>
static __device__ __forceinline__ void load_values(const FloatInput &x, int first, float (&out)[N]) {
  if (x.aligned && first + N <= x.n) {
    const float4 *from = reinterpret_cast<const float4 *>(x.values + first);
#pragma unroll
    for (int i = 0; i < N / 4; i++) {
      const float4 four = __ldg(from + i);
      out[4 * i] = four.x;
      out[4 * i + 1] = four.y;
      out[4 * i + 2] = four.z;
      out[4 * i + 3] = four.w;
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; i++) out[i] = WITHIN(first + i, x.n) ? __ldg(x.values + first + i) : 0.f;
  }
}

// The formats whose pieces are plain floats, `N` in 16 bytes, which `F::decode` takes apart.
template <class F, int N> struct Floats {
  typedef FloatInput Input;
  typedef uint4 Piece;
  static constexpr int VALUES = N;
  static __device__ __forceinline__ Piece load(const uint8_t *row, int piece, int) {
    return load16(row + 16 * (size_t)piece);
  }
  static __device__ __forceinline__ float product(const Piece &w, const FloatInput &x, int piece) {
    float values[N], weights[N];
    load_values(x, piece * N, values);
    F::decode(w, weights);
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < N; i++) sum = fmaf(weights[i], values[i], sum);
    return sum;
  }
  static __device__ __forceinline__ void axpy(const Piece &w, float h, float (&sums)[N]) {
    float weights[N];
    F::decode(w, weights);
#pragma unroll
    for (int i = 0; i < N; i++) sums[i] = fmaf(h, weights[i], sums[i]);
  }
};

struct F32 : Floats<F32, 4> {
  static __device__ __forceinline__ void decode(const uint4 &w, float (&out)[4]) {
    out[0] = __uint_as_float(w.x);
    out[1] = __uint_as_float(w.y);
    out[2] = __uint_as_float(w.z);
    out[3] = __uint_as_float(w.w);
  }
};
struct F16 : Floats<F16, 8> {
  static __device__ __forceinline__ void decode(const uint4 &w, float (&out)[8]) {
    const float2 a = f16_pair(w.x), b = f16_pair(w.y), c = f16_pair(w.z), d = f16_pair(w.w);
    out[0] = a.x, out[1] = a.y, out[2] = b.x, out[3] = b.y;
    out[4] = c.x, out[5] = c.y, out[6] = d.x, out[7] = d.y;
  }
};
struct BF16 : Floats<BF16, 8> {
  static __device__ __forceinline__ void decode(const uint4 &w, float (&out)[8]) {
    const float2 a = bf16_pair(w.x), b = bf16_pair(w.y), c = bf16_pair(w.z), d = bf16_pair(w.w);
    out[0] = a.x, out[1] = a.y, out[2] = b.x, out[3] = b.y;
    out[4] = c.x, out[5] = c.y, out[6] = d.x, out[7] = d.y;
  }
};

static __device__ __forceinline__ float scale_at(const uint8_t *scales, int block) {
  return f16_value(__ldg(reinterpret_cast<const uint16_t *>(scales) + block));
}
// `WeightFormat::round_scale`: 13 bits, by products and differences that no compiler fuses.
static __device__ __forceinline__ float round_scale(float scale) {
  const float upper = __fmul_rn(scale, 2049.f);
  return __fsub_rn(upper, __fsub_rn(upper, scale));
}
static __device__ __forceinline__ int dot4(uint32_t a, uint32_t b, int sum) {
  return __dp4a((int)a, (int)b, sum);
}
static __device__ __forceinline__ float signed_byte(uint32_t word, int i) {
  return (float)(int8_t)(word >> (8 * i));
}

// Sixteen signed bytes: half a block.
struct Q8_0 {
  typedef NumberInput Input;
  struct Piece { uint4 numbers; float scale; };
  static constexpr int VALUES = 16;
  static __device__ __forceinline__ Piece load(const uint8_t *row, int piece, int n_pieces) {
    return {load16(row + 16 * (size_t)piece), scale_at(row + 16 * (size_t)n_pieces, piece / 2)};
  }
  static __device__ __forceinline__ float product(const Piece &w, const NumberInput &x, int piece) {
    const uint4 numbers = __ldg(reinterpret_cast<const uint4 *>(x.numbers) + piece);
    int sum = dot4(w.numbers.x, numbers.x, 0);
    sum = dot4(w.numbers.y, numbers.y, sum);
    sum = dot4(w.numbers.z, numbers.z, sum);
    sum = dot4(w.numbers.w, numbers.w, sum);
    return w.scale * __ldg(x.scales + piece / 2).x * (float)sum;
  }
  static __device__ __forceinline__ void axpy(const Piece &w, float h, float (&sums)[VALUES]) {
    const uint32_t words[4] = {w.numbers.x, w.numbers.y, w.numbers.z, w.numbers.w};
    const float scale = round_scale(h) * w.scale;
#pragma unroll
    for (int i = 0; i < VALUES; i++) sums[i] = fmaf(scale, signed_byte(words[i / 4], i % 4), sums[i]);
  }
};

// Thirty-two numbers of four bits, a block: number `i` and `i + 16` share a byte.
struct Q4_0 {
  typedef NumberInput Input;
  struct Piece { uint4 numbers; float scale; };
  static constexpr int VALUES = 32;
  static __device__ __forceinline__ Piece load(const uint8_t *row, int piece, int n_pieces) {
    return {load16(row + 16 * (size_t)piece), scale_at(row + 16 * (size_t)n_pieces, piece)};
  }
  static __device__ __forceinline__ float product(const Piece &w, const NumberInput &x, int piece) {
    const uint4 *numbers = reinterpret_cast<const uint4 *>(x.numbers) + 2 * piece;
    const uint4 low = __ldg(numbers), high = __ldg(numbers + 1);
    const float2 scale = __ldg(x.scales + piece);
    const uint32_t mask = 0x0f0f0f0fu;
    int sum = dot4(w.numbers.x & mask, low.x, 0);
    sum = dot4(w.numbers.y & mask, low.y, sum);
    sum = dot4(w.numbers.z & mask, low.z, sum);
    sum = dot4(w.numbers.w & mask, low.w, sum);
    sum = dot4(w.numbers.x >> 4 & mask, high.x, sum);
    sum = dot4(w.numbers.y >> 4 & mask, high.y, sum);
    sum = dot4(w.numbers.z >> 4 & mask, high.z, sum);
    sum = dot4(w.numbers.w >> 4 & mask, high.w, sum);
    // numbers are stored with 8 added
    return w.scale * scale.x * ((float)sum - 8.f * scale.y);
  }
  static __device__ __forceinline__ void axpy(const Piece &w, float h, float (&sums)[VALUES]) {
    const uint32_t words[4] = {w.numbers.x, w.numbers.y, w.numbers.z, w.numbers.w};
    const float scale = round_scale(h) * w.scale;
#pragma unroll
    for (int i = 0; i < 16; i++) {
      const uint32_t byte = words[i / 4] >> (8 * (i % 4));
      sums[i] = fmaf(scale, (float)((int)(byte & 15) - 8), sums[i]);
      sums[i + 16] = fmaf(scale, (float)((int)(byte >> 4 & 15) - 8), sums[i + 16]);
    }
  }
};

// Copies of the gate in 4, 3 or 2 bits: two blocks of 32 numbers a piece, whose levels are
// `number - (2^BITS - 1) / 2`. A word of the numbers holds sixteen of two bits (number `i` in byte
// `i % 4`, bits `2 * (i / 4)`) or eight of four; the third bit of thirty-two is in a word of its own
// (number `i` in byte `i % 4`, bit `i / 4`).
template <int BITS> struct LowBits {
  typedef NumberInput Input;
  static constexpr int WORDS = BITS == 4 ? 4 : 2;  // a block
  struct Piece { uint32_t numbers[2 * WORDS], thirds[2]; float scales[2]; };
  static __device__ __forceinline__ Piece load(const uint8_t *row, int piece, int n_pieces) {
    Piece p;
    const uint8_t *from = row + 8 * WORDS * (size_t)piece;
    const uint8_t *rest = row + 8 * WORDS * (size_t)n_pieces;
#pragma unroll
    for (int i = 0; i < WORDS / 2; i++) {
      const uint4 four = load16(from + 16 * i);
      p.numbers[4 * i] = four.x;
      p.numbers[4 * i + 1] = four.y;
      p.numbers[4 * i + 2] = four.z;
      p.numbers[4 * i + 3] = four.w;
    }
    if (BITS == 3) {
      const uint2 two = __ldcg(reinterpret_cast<const uint2 *>(rest) + piece);
      p.thirds[0] = two.x;
      p.thirds[1] = two.y;
      rest += 8 * (size_t)n_pieces;
    }
    const float2 scales = f16_pair(__ldcg(reinterpret_cast<const uint32_t *>(rest) + piece));
    p.scales[0] = scales.x;
    p.scales[1] = scales.y;
    return p;
  }
  // What each block adds to a product: `values[b] * scales[b]`.
  static __device__ __forceinline__ void terms(const Piece &w, const NumberInput &x, int piece,
                                               float (&values)[2], float (&scales)[2]) {
    const float middle = ((1 << BITS) - 1) / 2.f;
#pragma unroll
    for (int b = 0; b < 2; b++) {
      const int block = 2 * piece + b;
      const uint4 *from = reinterpret_cast<const uint4 *>(x.numbers) + 2 * block;
      const uint4 low = __ldg(from), high = __ldg(from + 1);
      const uint32_t quads[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
      int sum = 0;
#pragma unroll
      for (int q = 0; q < 8; q++) {
        uint32_t numbers;
        if (BITS == 4) {
          numbers = w.numbers[WORDS * b + q / 2] >> (4 * (q % 2)) & 0x0f0f0f0fu;
        } else {
          numbers = w.numbers[WORDS * b + q / 4] >> (2 * (q % 4)) & 0x03030303u;
          if (BITS == 3) numbers |= (w.thirds[b] >> q & 0x01010101u) << 2;
        }
        sum = dot4(numbers, quads[q], sum);
      }
      const float2 scale = __ldg(x.scales + block);
      values[b] = (float)sum - middle * scale.y;  // both whole halves, and exact
      scales[b] = __fmul_rn(w.scales[b], scale.x);
    }
  }
};

// A token of each kind of input.
struct Inputs {
  const float *values;      // [n_tokens, d]
  const int8_t *numbers;    // [n_tokens, 32 * n_blocks]
  const float2 *scales;     // [n_tokens, n_blocks]
  int d, n_blocks;
};
static __device__ __forceinline__ void of_token(const Inputs &x, int token, FloatInput &out) {
  out.values = x.values + (size_t)token * x.d;
  out.n = x.d;
  out.aligned = ((size_t)out.values & 15) == 0;
}
static __device__ __forceinline__ void of_token(const Inputs &x, int token, NumberInput &out) {
  out.numbers = x.numbers + (size_t)token * x.n_blocks * 32;
  out.scales = x.scales + (size_t)token * x.n_blocks;
}

// Pieces whose loads are under way before the first is multiplied.
#define AHEAD 4

// The products of a row with some tokens, in every lane of a warp. Each is one sum in one order,
// whatever else is computed beside it.
template <class F, int TOKENS>
static __device__ __forceinline__ void row_products(const uint8_t *row, int n_pieces,
                                                    const typename F::Input (&x)[TOKENS],
                                                    float (&sums)[TOKENS]) {
#pragma unroll
  for (int t = 0; t < TOKENS; t++) sums[t] = 0.f;
  int piece = threadIdx.x % WARP;
  for (; WITHIN(piece + WARP * (AHEAD - 1), n_pieces) && piece < n_pieces; piece += WARP * AHEAD) {
    typename F::Piece w[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; i++) w[i] = F::load(row, piece + WARP * i, n_pieces);
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
#pragma unroll
      for (int t = 0; t < TOKENS; t++) sums[t] += F::product(w[i], x[t], piece + WARP * i);
    }
  }
  for (; piece < n_pieces; piece += WARP) {
    const typename F::Piece w = F::load(row, piece, n_pieces);
#pragma unroll
    for (int t = 0; t < TOKENS; t++) sums[t] += F::product(w, x[t], piece);
  }
#pragma unroll
  for (int t = 0; t < TOKENS; t++) sums[t] = warp_sum(sums[t]);
}

// Which rows: those of a list of ids, or all.
struct List {
  const uint32_t *ids;    // null: row k is k
  const uint32_t *count;  // null: `n` rows
  int n;
  __device__ __forceinline__ int length() const { return count ? (int)*count : n; }
  __device__ __forceinline__ uint32_t row(int k) const { return ids ? ids[k] : (uint32_t)k; }
};

#define FOR_FORMATS(DEFINE) \
  DEFINE(f32, F32)          \
  DEFINE(f16, F16)          \
  DEFINE(bf16, BF16)        \
  DEFINE(q8_0, Q8_0)        \
  DEFINE(q4_0, Q4_0)
