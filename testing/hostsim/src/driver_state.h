// What the driver of `driver.cpp` keeps: queues, memory, kernels.
#pragma once
#define HOST_SOURCE "all.cu"
#define HOST_ENTRY hostsim_kernels
#include "host.cpp"

#include <algorithm>
#include <deque>
#include <list>
#include <mutex>
#include <set>
#include <thread>

typedef int Answer;
enum : Answer {
  OK = 0,
  INVALID_VALUE = 1,
  OUT_OF_MEMORY = 2,
  INVALID_DEVICE = 101,
  INVALID_CONTEXT = 201,
  INVALID_PTX = 218,
  INVALID_HANDLE = 400,
  NOT_FOUND = 500,
  NOT_READY = 600,
  LAUNCH_FAILED = 719,
};

static const size_t GUARD = 512, MEMORY = size_t(6) << 30, KEPT = size_t(1) << 29;
static const size_t MOST_SHARED = 48 << 10;

[[noreturn]] static void broken(const std::string &what) {
  fprintf(stderr, "driver: %s\n", what.c_str());
  abort();
}

struct Stream;
struct Event {
  bool timed;
  Stream *stream = nullptr;
  uint64_t number = 0;
};
struct Work {
  std::function<Answer()> run;
  // pinned memory that it reads or writes
  const char *host = nullptr;
  size_t n = 0;
};
struct Stream {
  std::deque<Work> queue;
  uint64_t done = 0;
  uint64_t last() const { return done + queue.size(); }
};
struct Block {
  std::vector<char> bytes;
  char *begin;
  size_t n;
};
struct Kernel {
  std::string name;
  std::vector<size_t> params;
  unsigned most_threads;
};
struct Module {
  std::string ptx;
  std::map<std::string, Kernel> kernels;
};

static std::recursive_mutex mutex;
static std::map<uint64_t, Block> blocks;      // by address
static std::list<Block> freed;
static size_t used = 0, kept = 0;
static std::map<const char *, size_t> pinned;
static std::set<Stream *> streams;
static std::map<std::pair<uint64_t, std::thread::id>, Stream *> own_streams;
static Answer failure = OK;  // stays, as on a GPU
static std::map<std::string, uint64_t> launches;
static uint64_t copies = 0;
static char context_memory;
static thread_local void *current = nullptr;

static uint64_t setting(const char *name) {
  const char *value = getenv(name);
  return value ? strtoull(value, nullptr, 10) : 0;
}

struct Report {
  ~Report() {
    if (!getenv("DRIVER_REPORT") || launches.empty()) return;
    uint64_t n = 0;
    for (auto &[name, count] : launches) n += count;
    fprintf(stderr, "driver: %zu kernels, %llu launches, %llu copies\n", launches.size(),
            (unsigned long long)n, (unsigned long long)copies);
    if (used > 0) fprintf(stderr, "driver: %zu bytes left\n", used);
  }
};
static Report report;

#define ENTER()                                             \
  std::lock_guard<std::recursive_mutex> hold(mutex);        \
  if (failure != OK) return failure;                        \
  if (current != &context_memory) return INVALID_CONTEXT

// Streams 0 to 2 are the default ones, of which each thread has its own here.
static Stream *stream_of(void *handle) {
  if ((uint64_t)handle > 2) return streams.count((Stream *)handle) ? (Stream *)handle : nullptr;
  Stream *&own = own_streams[{(uint64_t)handle, std::this_thread::get_id()}];
  if (!own) streams.insert(own = new Stream);
  return own;
}

// Work may append to the queue of nobody, so a pointer to the stream stays good.
static Answer run_until(Stream *stream, uint64_t number) {
  while (failure == OK && stream->done < number && !stream->queue.empty()) {
    Work work = std::move(stream->queue.front());
    stream->queue.pop_front();
    stream->done++;
    const Answer answer = work.run();
    if (answer != OK) failure = answer;
  }
  return failure;
}

static Answer run_all() {
  for (Stream *stream : std::set<Stream *>(streams)) run_until(stream, stream->last());
  return failure;
}

static Answer append(void *handle, Work work) {
  Stream *stream = stream_of(handle);
  if (!stream) return INVALID_HANDLE;
  stream->queue.push_back(std::move(work));
  return getenv("DRIVER_EAGER") ? run_until(stream, stream->last()) : OK;
}

// Device memory of n bytes, or null.
static char *memory_at(uint64_t address, size_t n) {
  auto found = blocks.upper_bound(address);
  if (found == blocks.begin()) return nullptr;
  const Block &block = (--found)->second;
  const size_t at = address - found->first;
  return at <= block.n && n <= block.n - at ? block.begin + at : nullptr;
}

static bool is_whole(const Block &block) {
  const auto whole = [](const char *p, const char *end) {
    return std::all_of(p, end, [](char c) { return c == (char)0xA5; });
  };
  const char *end = block.begin + block.n;
  return whole(block.bytes.data(), block.begin) && whole(end, block.bytes.data() + block.bytes.size());
}

static void check_all() {
  for (auto &[address, block] : blocks)
    if (!is_whole(block)) broken("memory is written past its end");
  for (auto &block : freed)
    if (!is_whole(block) || !std::all_of(block.begin, block.begin + block.n, [](char c) { return c == (char)0xFF; }))
      broken("memory is written after it was freed");
}

static Answer allocate(uint64_t *address, size_t n) {
  if (n == 0) return INVALID_VALUE;
  if (n > MEMORY - used) return OUT_OF_MEMORY;
  Block block;
  block.bytes.assign(n + 3 * GUARD, (char)0xA5);
  block.begin = (char *)(((uintptr_t)block.bytes.data() + 2 * GUARD - 1) & ~(uintptr_t)(GUARD - 1));
  block.n = n;
  memset(block.begin, 0xFF, n);
  used += n;
  *address = (uint64_t)block.begin;
  blocks.emplace(*address, std::move(block));
  return OK;
}

static Answer release(uint64_t address) {
  auto found = blocks.find(address);
  if (found == blocks.end()) broken("memory is freed twice");
  Block block = std::move(found->second);
  blocks.erase(found);
  if (!is_whole(block)) broken("memory was written past its end");
  memset(block.begin, 0xFF, block.n);
  used -= block.n;
  kept += block.n;
  freed.push_back(std::move(block));
  while (kept > KEPT) {
    check_all();
    kept -= freed.front().n;
    freed.pop_front();
  }
  return OK;
}

static bool is_pinned(const void *p, size_t n) {
  auto found = pinned.upper_bound((const char *)p);
  return found != pinned.begin() && (--found, (const char *)p + n <= found->first + found->second);
}

// The value of a directive such as `.maxntid 1024`, or `otherwise`.
static unsigned directive(const std::string &text, const char *name, unsigned otherwise) {
  const size_t at = text.find(name);
  return at == std::string::npos ? otherwise : (unsigned)strtoul(text.c_str() + at + strlen(name), nullptr, 10);
}

// Entries of a module with the sizes of their parameters; false where the text is none that is understood.
static bool read_ptx(Module &module) {
  const std::string &ptx = module.ptx;
  if (ptx.find(".version") == std::string::npos || ptx.find(".address_size 64") == std::string::npos) return false;
  if (directive(ptx, ".target sm_", 1000) > 90) return false;
  // all types of ours end in their bits
  const auto size_of = [](const std::string &type) { return strtoul(type.c_str() + 1, nullptr, 10) / 8; };
  for (size_t at = 0; (at = ptx.find(".entry ", at)) != std::string::npos;) {
    Kernel kernel;
    at += 7;
    const size_t open = ptx.find('(', at), close = ptx.find(')', open), body = ptx.find('{', close);
    if (body == std::string::npos) return false;
    kernel.name = ptx.substr(at, open - at);
    const std::string params = ptx.substr(open, close - open), limits = ptx.substr(close, body - close);
    for (size_t p = 0; (p = params.find(".param .", p)) != std::string::npos;) {
      p += 8;
      std::string type = params.substr(p, params.find_first_of(" \t", p) - p);
      if (size_of(type) == 0 || size_of(type) > 8) return false;
      kernel.params.push_back(size_of(type));
    }
    kernel.most_threads = directive(limits, ".maxntid ", 1024);
    size_t end = ptx.find(".entry ", body), shared = 0;
    const std::string code = ptx.substr(body, end == std::string::npos ? end : end - body);
    for (size_t s = 0; (s = code.find(".shared .align", s)) != std::string::npos; s++)
      shared += strtoul(code.c_str() + code.find('[', s) + 1, nullptr, 10);
    if (shared > MOST_SHARED) return false;
    module.kernels[kernel.name] = kernel;
    at = body;
  }
  return true;
}
