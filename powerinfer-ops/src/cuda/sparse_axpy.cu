// y[t] = sum over k of h[t, k] * w[ids[k]], or of h[t, ids[k]] * w[ids[k]]
//
// A thread owns the columns of one piece of 16 bytes and walks rows, so that a warp reads 512
// neighbouring bytes of each. To have enough threads, neurons are cut into parts of a fixed number of
// neurons, each summed on its own in ascending order; sum_parts adds the parts in order, each group of
// them first, which is what a block of tiled_axpy.cu has added up already. The cut is by neuron and not
// by place in the list, so that a neuron that is left out changes no bit: running those that fire gives
// what running all gives.
#include "format.cuh"

template <class F, int TOKENS>
static __device__ __forceinline__ void sparse_axpy(const uint8_t *w, size_t stride, int n_pieces,
                                                   const List &list, const uint32_t *starts,
                                                   int part_len, const float *h, int h_stride,
                                                   bool by_row, int n_tokens, int d, float *parts) {
  const int piece = blockIdx.x * blockDim.x + threadIdx.x;
  const int part = blockIdx.y, first = blockIdx.z * TOKENS;
  if (!WITHIN(piece, n_pieces)) return;
#ifdef MUTANT_WRONG_PART
  int k = starts ? (int)starts[max(part - 1, 0)] :
#else
  int k = starts ? (int)starts[part] :
#endif
          part * part_len;
  const int end = starts ? (int)starts[part + 1] : min((part + 1) * part_len, list.n);
  float sums[TOKENS][F::VALUES];
#pragma unroll
  for (int t = 0; t < TOKENS; t++)
#pragma unroll
    for (int i = 0; i < F::VALUES; i++) sums[t][i] = 0.f;
  const auto add = [&](const typename F::Piece &row, int at) {
    const int place = by_row ? (int)list.row(at) : at;
    float values[F::VALUES];
    F::decode(row, values);
#pragma unroll
    for (int t = 0; t < TOKENS; t++) {
      const int token = min(first + t, n_tokens - 1);
      const float weight = rounded<F>(__ldg(h + (size_t)token * h_stride + place));
      const float factor = scaled<F>(weight, F::scale(row));
#pragma unroll
      for (int i = 0; i < F::VALUES; i++) sums[t][i] = fmaf(factor, values[i], sums[t][i]);
    }
  };
  for (; k + AHEAD <= end; k += AHEAD) {
    typename F::Piece rows[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; i++) rows[i] = F::load(w + list.row(k + i) * stride, piece, n_pieces);
#pragma unroll
    for (int i = 0; i < AHEAD; i++) add(rows[i], k + i);
  }
  for (; k < end; k++) add(F::load(w + list.row(k) * stride, piece, n_pieces), k);
#pragma unroll
  for (int t = 0; t < TOKENS; t++) {
    if (first + t >= n_tokens) break;
    float *to = parts + ((size_t)part * n_tokens + first + t) * d;
#pragma unroll
    for (int i = 0; i < F::VALUES; i++) {
      const int column = piece * F::VALUES + i;
      if (WITHIN(column, d)) to[column] = sums[t][i];
    }
  }
}

#define DEFINE_TOKENS(name, F, TOKENS)                                                             \
  KERNEL(sparse_axpy_##name##_##TOKENS, const uint8_t *w, size_t stride, int n_pieces,             \
         const uint32_t *ids, int n, const uint32_t *starts, int part_len, const float *h,         \
         int h_stride, int by_row, int n_tokens, int d, float *parts) {                            \
    sparse_axpy<F, TOKENS>(w, stride, n_pieces, List{ids, nullptr, n}, starts, part_len, h,        \
                           h_stride, by_row, n_tokens, d, parts);                                  \
  }
#define DEFINE(name, F) DEFINE_TOKENS(name, F, 1) DEFINE_TOKENS(name, F, 4)
FOR_FORMATS(DEFINE)
#undef DEFINE
#undef DEFINE_TOKENS

// out[i] = add[i] + the sum over parts of parts[part, i], each `group` of them added up on its own
KERNEL(sum_parts, const float *parts, int n_parts, int group, int n, const float *add, float *out) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (!WITHIN(i, n)) return;
  float sum = 0.f;
  for (int first = 0; first < n_parts; first += group) {
    float of_group = 0.f;
    const int end = min(first + group, n_parts);
#pragma unroll 8
    for (int part = first; part < end; part++) of_group += __ldg(parts + (size_t)part * n + i);
    sum += of_group;
  }
  out[i] = add ? sum + add[i] : sum;
}
