// Runs CUDA kernels on the host, one fibre per CUDA thread, blocks one after another.
// Covers: threadIdx/blockIdx/blockDim/gridDim, static + dynamic __shared__, __syncthreads,
// __syncwarp, shfl_{xor,down,up,}_sync, ballot/any/all_sync, atomicAdd/Max, __half/half2 basics,
// __ldg, dp4a. Detects: barrier divergence / deadlock, shuffles naming exited lanes, wide loads
// from addresses that are no multiple of their width.
// The order in which fibres run is a parameter, so a missing barrier shows up as a changed result.
#pragma once
#undef _FORTIFY_SOURCE  // its longjmp check refuses jumps between stacks
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>
#include <setjmp.h>
#include <ucontext.h>
#include <sys/mman.h>

#define __global__
#define __device__
#define __host__
#define __constant__
#define __forceinline__ inline
#define __restrict__ __restrict
#define __launch_bounds__(...)
// Shared memory goes through macros (a bare __shared__ would not be refilled between blocks).
#define SHARED(T, name, N)     \
  static char name##_tag_;     \
  T(&name)[N] = *reinterpret_cast<T(*)[N]>(cuh::shared_slot(&name##_tag_, sizeof(T) * (N)))
#define DYN_SHARED(T, name) T *name = reinterpret_cast<T *>(cuh::st().dyn)

struct uint3_ { unsigned x = 0, y = 0, z = 0; };
struct dim3 { unsigned x, y, z; dim3(unsigned a = 1, unsigned b = 1, unsigned c = 1) : x(a), y(b), z(c) {} };
struct alignas(8) float2 { float x, y; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
using std::max;
using std::min;

namespace cuh {
enum State : uint8_t { Ready, AtBlock, AtWarp, Done };
struct Fibre {
  uint3_ tid;
  unsigned lin = 0;
  State st = Ready;
  unsigned mask = 0, phase = 0, gen = 0;
  bool started = false;
  ucontext_t uc;
  jmp_buf jb;
};
struct Warp { uint64_t slot[2][32]; };
struct Sched {
  std::vector<Fibre> f;
  std::vector<Warp> w;
  dim3 grid, block;
  uint3_ bid;
  Fibre *cur = nullptr;
  void *body = nullptr;
  void (*call)(void *) = nullptr;
  alignas(64) char *dyn = nullptr;
  char *stacks = nullptr;
  size_t nstacks = 0;
  ucontext_t main_uc;
  jmp_buf main_jb;
  const char *err = nullptr;
  bool misaligned = false;
  std::vector<std::pair<const void *, char *>> slots;  // this block's SHARED arrays
  std::vector<std::unique_ptr<char[]>> slot_mem;
};
inline Sched &st() { static thread_local Sched s; return s; }
constexpr size_t STACK = 64 * 1024;
inline char *shared_slot(const void *tag, size_t bytes) {
  Sched &s = st();
  for (auto &p : s.slots) if (p.first == tag) return p.second;
  s.slot_mem.emplace_back(new char[bytes + 64]);
  char *m = (char *)(((uintptr_t)s.slot_mem.back().get() + 63) & ~(uintptr_t)63);
  memset(m, 0xFF, bytes);  // NaN: reading what nobody wrote shows
  s.slots.emplace_back(tag, m);
  return m;
}

inline void yield_() {  // fibre -> scheduler
  Sched &s = st();
  if (!_setjmp(s.cur->jb)) _longjmp(s.main_jb, 1);
}
inline void entry() {
  Sched &s = st();
  s.call(s.body);
  s.cur->st = Done;
  _longjmp(s.main_jb, 1);
}
inline void resume(Fibre &f) {
  Sched &s = st();
  s.cur = &f;
  if (_setjmp(s.main_jb)) return;
  if (f.started) _longjmp(f.jb, 1);
  f.started = true;
  getcontext(&f.uc);
  f.uc.uc_stack.ss_sp = s.stacks + f.lin * STACK;
  f.uc.uc_stack.ss_size = STACK;
  f.uc.uc_link = nullptr;
  makecontext(&f.uc, entry, 0);
  setcontext(&f.uc);
}
inline void warp_sync(unsigned mask) {
  Fibre *c = st().cur;
  c->mask = mask;
  c->st = AtWarp;
  yield_();
}
template <class T> uint64_t bits(T v) { uint64_t b = 0; static_assert(sizeof(T) <= 8, ""); memcpy(&b, &v, sizeof v); return b; }
template <class T> T unbits(uint64_t b) { T v; memcpy(&v, &b, sizeof v); return v; }
// Every lane in mask deposits a value, all wait, then `read` picks from the deposits.
template <class T, class R> auto exchange(unsigned mask, T v, R read) {
  Sched &s = st();
  Fibre *c = s.cur;
  const unsigned lane = c->lin & 31, p = c->phase++ & 1;
  Warp &w = s.w[c->lin >> 5];
  w.slot[p][lane] = bits(v);
  warp_sync(mask);
  return read(s.w[st().cur->lin >> 5].slot[p], lane);
}
struct Rng { uint64_t x; uint64_t next() { x ^= x << 13; x ^= x >> 7; x ^= x << 17; return x; } };

// order: 0 ascending, 1 descending, else a seed for a random order at every round.
inline bool run_block(uint64_t order) {
  Sched &s = st();
  const unsigned n = (unsigned)s.f.size();
  for (unsigned i = 0; i < n; i++) {
    Fibre &f = s.f[i];
    f.lin = i;
    f.tid.x = i % s.block.x; f.tid.y = i / s.block.x % s.block.y; f.tid.z = i / s.block.x / s.block.y;
    f.st = Ready; f.started = false; f.phase = 0;
  }
  std::vector<unsigned> o(n);
  for (unsigned i = 0; i < n; i++) o[i] = order == 1 ? n - 1 - i : i;
  s.slots.clear(); s.slot_mem.clear();
  Rng r{order * 0x9E3779B97F4A7C15ull + 88172645463325252ull};
  for (;;) {
    if (order > 1) for (unsigned i = n - 1; i > 0; i--) std::swap(o[i], o[r.next() % (i + 1)]);
    bool ran = false;
    for (unsigned i : o) if (s.f[i].st == Ready) { resume(s.f[i]); ran = true; }
    // release warps whose every named lane has arrived
    bool released = false;
    for (unsigned w0 = 0; w0 < n; w0 += 32) {
      const unsigned lanes = std::min(32u, n - w0);
      unsigned at = 0, done = 0;
      for (unsigned l = 0; l < lanes; l++) {
        at |= (unsigned)(s.f[w0 + l].st == AtWarp) << l;
        done |= (unsigned)(s.f[w0 + l].st == Done) << l;
      }
      const unsigned present = lanes == 32 ? ~0u : (1u << lanes) - 1;
      for (unsigned l = 0; l < lanes; l++) if (at >> l & 1) {
        const unsigned m = s.f[w0 + l].mask & present;
        if (!(m >> l & 1)) { s.err = "warp op: the calling lane is not in its own mask"; return false; }
        if (m & done) { s.err = "warp op names a lane that has exited"; return false; }
        if ((m & at) == m) {
          bool same = true;
          for (unsigned k = 0; k < lanes; k++) if (m >> k & 1) same &= (s.f[w0 + k].mask & present) == m;
          if (!same) { s.err = "warp op: lanes disagree on the mask"; return false; }
          for (unsigned k = 0; k < lanes; k++) if (m >> k & 1) { s.f[w0 + k].st = Ready; at &= ~(1u << k); }
          released = true;
        }
      }
    }
    if (released) continue;
    unsigned waiting = 0, done = 0;
    for (Fibre &f : s.f) { waiting += f.st == AtBlock; done += f.st == Done; }
    if (done == n) return true;
    if (waiting + done == n) {
      if (done) { s.err = "__syncthreads after some threads have exited"; return false; }
      for (Fibre &f : s.f) f.st = Ready;
      continue;
    }
    if (!ran) { s.err = "deadlock: divergent __syncthreads or warp op"; return false; }
  }
}
template <class... A> struct Body { void (*k)(A...); std::tuple<A...> a; };
template <class... A> void call_body(void *p) { auto *b = (Body<A...> *)p; std::apply(b->k, b->a); }
template <class... A, size_t... I>
Body<A...> unpack(void (*k)(A...), void **args, std::index_sequence<I...>) {
  return Body<A...>{k, std::tuple<A...>{*(std::remove_reference_t<A> *)args[I]...}};
}
// Same shape as cuLaunchKernel: args[i] points at the i-th parameter.
template <class... A>
const char *launch(void (*k)(A...), const unsigned *grid, const unsigned *block, size_t smem, void **args,
                   uint64_t order) {
  Sched &s = st();
  Body<A...> b = unpack(k, args, std::index_sequence_for<A...>{});
  s.grid = dim3(grid[0], grid[1], grid[2]); s.block = dim3(block[0], block[1], block[2]);
  const unsigned n = block[0] * block[1] * block[2];
  if (n == 0 || n > 1024) return "bad block size";
  s.body = &b; s.call = call_body<A...>; s.err = nullptr; s.misaligned = false;
  s.f.resize(n); s.w.resize((n + 31) / 32);
  if (s.nstacks < n) {
    if (s.stacks) munmap(s.stacks, s.nstacks * STACK);
    s.stacks = (char *)mmap(nullptr, n * STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    s.nstacks = n;
  }
  std::unique_ptr<char[]> dyn(new char[smem + 64]);
  s.dyn = (char *)(((uintptr_t)dyn.get() + 63) & ~(uintptr_t)63);
  for (unsigned z = 0; z < grid[2]; z++) for (unsigned y = 0; y < grid[1]; y++) for (unsigned x = 0; x < grid[0]; x++) {
    memset(s.dyn, 0xFF, smem);  // NaN: reading what nobody wrote shows
    s.bid.x = x; s.bid.y = y; s.bid.z = z;
    if (!run_block(order)) return s.err;
    if (s.misaligned) return "a load from an address that is no multiple of its width";
  }
  return nullptr;
}
}  // namespace cuh

#define threadIdx (cuh::st().cur->tid)
#define blockIdx (cuh::st().bid)
#define blockDim (cuh::st().block)
#define gridDim (cuh::st().grid)
#define warpSize 32
static inline void __syncthreads() { cuh::st().cur->st = cuh::AtBlock; cuh::yield_(); }
static inline void __syncwarp(unsigned m = ~0u) { cuh::warp_sync(m); }
template <class T> T __shfl_xor_sync(unsigned m, T v, int o, int w = 32) {
  return cuh::exchange(m, v, [=](uint64_t *s, unsigned l) { unsigned k = l ^ o; return cuh::unbits<T>(s[(k & ~(w - 1)) > (l & ~(w - 1)) ? l : k]); });
}
template <class T> T __shfl_down_sync(unsigned m, T v, unsigned o, int w = 32) {
  return cuh::exchange(m, v, [=](uint64_t *s, unsigned l) { unsigned k = l + o; return cuh::unbits<T>(s[(l & (w - 1)) + o < (unsigned)w ? k : l]); });
}
template <class T> T __shfl_sync(unsigned m, T v, int src, int w = 32) {
  return cuh::exchange(m, v, [=](uint64_t *s, unsigned l) { return cuh::unbits<T>(s[(l & ~(w - 1)) + (src & (w - 1))]); });
}
static inline unsigned __ballot_sync(unsigned m, int p) {
  return cuh::exchange(m, p, [=](uint64_t *s, unsigned) { unsigned r = 0; for (int i = 0; i < 32; i++) r |= (unsigned)((m >> i & 1) && (int)s[i] != 0) << i; return r; });
}
static inline int __any_sync(unsigned m, int p) { return __ballot_sync(m, p) != 0; }
static inline int __all_sync(unsigned m, int p) { return __ballot_sync(m, p) == m; }
template <class T> T atomicAdd(T *p, T v) { T o = *p; *p = o + v; return o; }
template <class T> T atomicMax(T *p, T v) { T o = *p; *p = max(o, v); return o; }
template <class T> T __ldg(const T *p) {
  if ((uintptr_t)p % alignof(T)) cuh::st().misaligned = true;
  T v;
  memcpy(&v, p, sizeof v);
  return v;
}
template <class T> T __ldcg(const T *p) { return __ldg(p); }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fsub_rn(float a, float b) { return a - b; }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline float __uint_as_float(uint32_t u) { return cuh::unbits<float>(u); }
static inline uint32_t __float_as_uint(float f) { return (uint32_t)cuh::bits(f); }
static inline int __popc(unsigned v) { return __builtin_popcount(v); }
#define __expf(v) expf(v)
static inline int __dp4a(int a, int b, int c) { for (int i = 0; i < 4; i++) c += (int)(int8_t)(a >> 8 * i) * (int8_t)(b >> 8 * i); return c; }

struct __half { uint16_t u; };
typedef __half half;
struct __half2 { __half x, y; };
static inline float __half2float(__half h) {
  const uint32_t s = (uint32_t)(h.u & 0x8000) << 16, e = h.u >> 10 & 31, m = h.u & 1023;
  if (e == 0) { float f = ldexpf((float)m, -24); return s ? -f : f; }
  return cuh::unbits<float>(s | (e == 31 ? 0x7F800000u : (e + 112) << 23) | m << 13);
}
static inline __half __float2half(float f) {  // round to nearest even
  uint32_t x = (uint32_t)cuh::bits(f), s = x >> 16 & 0x8000, a = x & 0x7FFFFFFF;
  if (a > 0x7F800000) return {(uint16_t)(s | 0x7E00)};
  if (a >= 0x47800000) return {(uint16_t)(s | 0x7C00)};
  if (a < 0x38800000) return {(uint16_t)(s | (uint16_t)lrintf(ldexpf(cuh::unbits<float>(a), 24)))};
  a += 0xFFF + (a >> 13 & 1);
  return {(uint16_t)(s | ((a >> 13) - (112 << 10)))};
}
static inline float __low2float(__half2 h) { return __half2float(h.x); }
static inline float __high2float(__half2 h) { return __half2float(h.y); }

static inline float2 f16_pair(uint32_t u) {
  return {__half2float({(uint16_t)u}), __half2float({(uint16_t)(u >> 16)})};
}
static inline float f16_value(uint16_t u) { return __half2float({u}); }
static inline uint16_t f16_bits(float f) { return __float2half(f).u; }

// The kernels of this translation unit, by name; of internal linkage, because a kernel and its mutants
// have the same names and types.
namespace {
#define BARRIER() __syncthreads()
typedef std::function<const char *(const unsigned *, const unsigned *, size_t, void **, uint64_t)> HostKernel;
static std::map<std::string, HostKernel> &host_kernels() {
  static std::map<std::string, HostKernel> kernels;
  return kernels;
}
struct HostKernelEntry {
  template <class... A> HostKernelEntry(const char *name, void (*k)(A...)) {
    host_kernels()[name] = [k](const unsigned *g, const unsigned *b, size_t smem, void **a, uint64_t order) {
      return cuh::launch(k, g, b, smem, a, order);
    };
  }
};
}  // namespace
#define KERNEL(name, ...)                              \
  static void name(__VA_ARGS__);                       \
  static const HostKernelEntry name##_entry(#name, name); \
  static void name(__VA_ARGS__)
#define KERNEL_OF(threads, blocks, name, ...) KERNEL(name, __VA_ARGS__)
