// What sparse_matvec.cu computes, for many tokens: a row is read once for TILE_TOKENS of them
//
// A block of threads takes a tile of rows and tokens. 32 pieces of each row and what belongs to them of
// each token are copied to shared memory, side by side for neighbouring lanes; a warp multiplies some of
// the rows with some of the tokens, a lane the piece of its place. So each value that is taken from
// shared memory is used eight times, and arithmetic is what bounds this.
//
// A lane has a sum of its own for each row and token, as where a warp takes one row: products are added
// in the same order there and here, and a token has the same bits alone and among many. A tile that
// shared its sums among the lanes would be larger with as many registers and take less from the
// second-level cache (32 bytes a cycle here at most, where arithmetic alone is the bound), but round
// differently.
#include "finish.cuh"

#define TILE_TOKENS 16
#define TILE_THREADS 256
#define TILE_WARPS (TILE_THREADS / WARP)
// What a warp takes of a tile, and `F::TILE_ROWS / 4` rows: four warps have the rows, and two the tokens.
#define WARP_TOKENS 8
#define STAGED_TOKENS (TILE_TOKENS / TILE_WARPS)

// A token's share in the product with a piece, in shared memory.
template <class F> struct Shared {
  const typename F::Word *words;  // [WORDS, TILE_TOKENS, WARP]
  const float2 *scales;           // [TILE_TOKENS, WARP]
  int at;
  __device__ __forceinline__ typename F::Word word(int i) const {
    return words[i * TILE_TOKENS * WARP + at];
  }
  __device__ __forceinline__ float2 scale() const { return scales[at]; }
};

template <class F>
static __device__ __forceinline__ void tiled_matvec(const uint8_t *w, size_t stride, int n_pieces,
                                                    const List &list, const Inputs &x, int n_tokens,
                                                    const Finish &finish, float *out, int out_stride,
                                                    bool by_row) {
  typedef typename F::Word Word;
  typedef typename F::Bits Bits;
  typedef typename F::Input Input;
  constexpr int TILE_ROWS = F::TILE_ROWS, WARP_ROWS = TILE_ROWS / 4;
  constexpr int STAGED_ROWS = TILE_ROWS / TILE_WARPS;
  SHARED(const uint8_t *, rows_at, TILE_ROWS);
  SHARED(Input, inputs, TILE_TOKENS);
  SHARED(Bits, rows, F::PARTS * TILE_ROWS * WARP);
  SHARED(float, row_scales, F::SCALED ? TILE_ROWS * WARP : 1);
  SHARED(Word, words, F::WORDS * TILE_TOKENS * WARP);
  SHARED(float2, scales, F::SCALED ? TILE_TOKENS * WARP : 1);
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  // neighbouring blocks take the same rows
  const int token_tiles = (n_tokens + TILE_TOKENS - 1) / TILE_TOKENS, n = list.length();
  const int first_token = blockIdx.x % token_tiles * TILE_TOKENS;
  const int tile = blockIdx.x / token_tiles * TILE_ROWS;
  const int my_row = warp / 2 * WARP_ROWS, my_token = warp % 2 * WARP_TOKENS;
  if (tile >= n) return;
  // in shared memory, because registers are what there is least of
  if (threadIdx.x < TILE_ROWS)
    rows_at[threadIdx.x] = w + list.row(min(tile + (int)threadIdx.x, n - 1)) * stride;
  if (threadIdx.x < TILE_TOKENS)
    of_token(x, min(first_token + (int)threadIdx.x, n_tokens - 1), inputs[threadIdx.x]);
  __syncthreads();  // never left out: addresses that are none would end a test before it says anything
  float sums[WARP_ROWS * WARP_TOKENS];
#pragma unroll
  for (int i = 0; i < WARP_ROWS * WARP_TOKENS; i++) sums[i] = 0.f;
  for (int first = 0; first < n_pieces; first += WARP) {
    const int piece = first + lane;
    if (WITHIN(piece, n_pieces)) {
      // loads of a kind are all under way before the first is stored
      typename F::Piece pieces[STAGED_ROWS];
#pragma unroll
      for (int i = 0; i < STAGED_ROWS; i++) {
        pieces[i] = F::load(rows_at[warp + i * TILE_WARPS], piece, n_pieces);
      }
#pragma unroll
      for (int i = 0; i < STAGED_ROWS; i++) {
        const int at = (warp + i * TILE_WARPS) * WARP + lane;
#pragma unroll
        for (int part = 0; part < F::PARTS; part++)
          rows[part * TILE_ROWS * WARP + at] = F::bits(pieces[i], part);
        if (F::SCALED) row_scales[at] = F::scale(pieces[i]);
      }
#pragma unroll
      for (int i = 0; i < STAGED_TOKENS; i++) {
        const int t = warp + i * TILE_WARPS, at = t * WARP + lane;
        const Input input = inputs[t];
#pragma unroll
        for (int j = 0; j < F::WORDS; j++)
          words[j * TILE_TOKENS * WARP + at] = F::word(input, piece, j);
        if (F::SCALED) scales[at] = F::input_scale(input, piece);
      }
    }
    BARRIER();
    if (piece < n_pieces && first_token + my_token < n_tokens) {
#pragma unroll
      for (int part = 0; part < F::PARTS; part++) {
        typename F::Weights weights[WARP_ROWS];
#pragma unroll
        for (int r = 0; r < WARP_ROWS; r++) {
          const int at = (my_row + r) * WARP + lane;
          const float scale = F::SCALED ? row_scales[at] : 1.f;
          weights[r] = F::weights(rows[part * TILE_ROWS * WARP + at], scale);
        }
#pragma unroll
        for (int t = 0; t < WARP_TOKENS; t++) {
          const Shared<F> from = {words, scales, (my_token + t) * WARP + lane};
          const typename F::Values values = F::values(from, part);
#pragma unroll
          for (int r = 0; r < WARP_ROWS; r++) {
            float &sum = sums[r * WARP_TOKENS + t];
#ifdef MUTANT_WRONG_ORDER
            sum += F::add(weights[r], values, 0.f);
#else
            sum = F::add(weights[r], values, sum);
#endif
          }
        }
      }
    }
    BARRIER();
  }
  warp_sums(sums);
#pragma unroll
  for (int i = 0; i < WARP_ROWS * WARP_TOKENS / WARP; i++) {
    const int which = lane * (WARP_ROWS * WARP_TOKENS / WARP) + i;
    const int k = tile + my_row + which / WARP_TOKENS;
    const int token = first_token + my_token + which % WARP_TOKENS;
    if (WITHIN(k, n) && token < n_tokens) {
      const uint32_t row = list.row(k);
      const size_t at = (size_t)token * out_stride + (by_row ? row : k);
      out[at] = finish(sums[i], row, at);
    }
  }
}

#define DEFINE(name, F)                                                                              \
  KERNEL_OF(TILE_THREADS, 2, tiled_matvec_##name, const uint8_t *w, size_t stride, int n_pieces,     \
            const uint32_t *ids, const uint32_t *count, int n, const float *values,                  \
            const int8_t *numbers, const float2 *scales, int d, int n_blocks, int n_tokens,          \
            const float *bias, const float *factor, int act, float threshold, float *out,            \
            int out_stride, int by_row) {                                                            \
    tiled_matvec<F>(w, stride, n_pieces, List{ids, count, n},                                        \
                    Inputs{values, numbers, scales, d, n_blocks}, n_tokens,                          \
                    Finish{bias, factor, act, threshold}, out, out_stride, by_row);                  \
  }
FOR_FORMATS(DEFINE)
#undef DEFINE
