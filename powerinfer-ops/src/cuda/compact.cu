// From activations to a list: the neurons that any token has a value for, ascending.
//
// One block walks the neurons in tiles. Lanes vote, so that a lane's place is the number of votes
// before it: those of the tiles before, of the warps before in this tile, and of the lanes before.
// No atomics, and the same list every time. `starts` says where each part of `part_len` neurons
// begins in the list, which is how sparse_axpy cuts its work.
#include "rt.cuh"

#define TALLY_THREADS 256
#define TALLY_WARPS (TALLY_THREADS / WARP)
#define COMPACT_THREADS 1024
// Entries that a thread reads before it votes on the first.
#define COMPACT_ITEMS 8
#define COMPACT_WARPS (COMPACT_THREADS / WARP)

// For how many tokens entry `i` has a value; a NaN counts as one.
static __device__ __forceinline__ int n_values(const float *values, int stride, int n_tokens, int i) {
  int n = 0;
  for (int t = 0; t < n_tokens; t++) n += values[(size_t)t * stride + i] != 0.f;
  return n;
}

static __device__ __forceinline__ uint32_t id_of(const uint32_t *ids, int i) {
  return ids ? ids[i] : (uint32_t)i;
}

// For how many tokens each entry has a value, for so many tokens that one block would take long to look.
// A lane an entry, of which there are `n` at most; a warp takes every eighth token. `by_row` says that a
// value has the place of its neuron.
KERNEL(tally, const float *values, int stride, int n_tokens, const uint32_t *ids,
       const uint32_t *count, int n, int by_row, uint32_t *tallies) {
  SHARED(int, sums, TALLY_WARPS * WARP);
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  const int i = blockIdx.x * WARP + lane, end = count ? (int)*count : n;
  int tally = 0;
  if (WITHIN(i, end)) {
    const float *from = values + (by_row ? id_of(ids, i) : (uint32_t)i);
    for (int t = warp; t < n_tokens; t += TALLY_WARPS) tally += from[(size_t)t * stride] != 0.f;
  }
  sums[warp * WARP + lane] = tally;
  BARRIER();
  if (warp > 0 || !WITHIN(i, end)) return;
  tally = 0;
#ifdef MUTANT_WRONG_TALLY
  for (int w = 1; w < TALLY_WARPS; w++)
#else
  for (int w = 0; w < TALLY_WARPS; w++)
#endif
    tally += sums[w * WARP + lane];
  tallies[i] = tally;
}

// `ids` and `count` may be null: then the entries are the neurons 0 to n. `tallies` is null or says for
// how many tokens each entry has a value. `kept` and `kept_values` hold as many places as there are
// entries at most. `counts` receives the length of the list, and how
// many values its entries have, summed over tokens.
KERNEL_OF(COMPACT_THREADS, 1, compact, const float *values, int stride, int n_tokens,
          const uint32_t *ids, const uint32_t *count, int n, const uint32_t *tallies, uint32_t *kept,
          float *kept_values, uint32_t *counts, uint32_t *starts, int part_len, int n_parts) {
  SHARED(int, sums, COMPACT_WARPS);
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  const int n_warps = blockDim.x / WARP;
  const int end = count ? (int)*count : n;
  int before = 0, n_mine = 0;
  for (int tile = 0; tile < end; tile += blockDim.x * COMPACT_ITEMS) {
    // neighbouring lanes take neighbouring entries, and a warp a run of them
    const int first = tile + warp * WARP * COMPACT_ITEMS + lane;
    unsigned vote[COMPACT_ITEMS];
    int n_votes = 0;
#pragma unroll
    for (int j = 0; j < COMPACT_ITEMS; j++) {
      const int i = first + WARP * j;
      int n = 0;
      if (WITHIN(i, end)) n = tallies ? (int)tallies[i] : n_values(values, stride, n_tokens, i);
      vote[j] = n > 0;
      n_mine += n;
    }
#pragma unroll
    for (int j = 0; j < COMPACT_ITEMS; j++) {
      vote[j] = __ballot_sync(ALL_LANES, vote[j]);
      n_votes += __popc(vote[j]);
    }
    if (lane == 0) sums[warp] = n_votes;
    BARRIER();
    int place = before;
    for (int w = 0; w < n_warps; w++) {
      if (w < warp) place += sums[w];
      before += sums[w];
    }
#pragma unroll
    for (int j = 0; j < COMPACT_ITEMS; j++) {
      const int i = first + WARP * j, mine = place + __popc(vote[j] & ((1u << lane) - 1));
      place += __popc(vote[j]);
      if (i >= end) continue;
      const uint32_t id = id_of(ids, i);
      const int part = id / part_len;
      const int last = i == 0 ? -1 : (int)(id_of(ids, i - 1) / part_len);
      for (int p = last + 1; p <= part; p++) starts[p] = mine;
      if (vote[j] >> lane & 1) {
        kept[mine] = id;
        for (int t = 0; kept_values && t < n_tokens; t++)
          kept_values[(size_t)t * stride + mine] = values[(size_t)t * stride + i];
      }
    }
    BARRIER();
  }
  n_mine = warp_sum(n_mine);
  if (lane == 0) sums[warp] = n_mine;
  BARRIER();
  if (threadIdx.x == 0) {
    int total = 0;
    for (int w = 0; w < n_warps; w++) total += sums[w];
    counts[0] = before;
    counts[1] = (uint32_t)total;
    const int last = end == 0 ? -1 : (int)(id_of(ids, end - 1) / part_len);
    for (int p = last + 1; p <= n_parts; p++) starts[p] = before;
  }
}
