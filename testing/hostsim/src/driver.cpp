// A driver of a GPU that is not there: as much of CUDA's driver interface as candle and stream.rs call, over
// the kernels as C++. `testing/cuda/dry_run.sh` puts it in place of libcuda.so.1.
//
// Nothing happens before somebody waits for it: work stands in the queue of its stream, and one stream sees of
// another what it waits for by an event. Refused is what a driver refuses: calls without a current context,
// grids and blocks that are too large, kernels that the PTX does not have, memory that is not there, the time
// of events that keep none. What a driver cannot see ends the program: memory that is written past its end, or
// freed under a copy. Fresh and freed memory is no number. Parameters are taken by the sizes that the PTX has.
//
// DRIVER_ORDER is the order of threads (see host_shim.h); with DRIVER_EAGER work is done as soon as it may be.
// DRIVER_CAPABILITY is the major number of its compute capability.
#include "driver_state.h"

extern "C" {

Answer cuInit(unsigned) { return OK; }
Answer cuGetErrorString(Answer answer, const char **text) {
  static const std::map<Answer, const char *> TEXTS{
      {INVALID_VALUE, "invalid value"}, {OUT_OF_MEMORY, "out of memory"},    {INVALID_DEVICE, "invalid device"},
      {INVALID_CONTEXT, "no context"},  {INVALID_PTX, "PTX not understood"}, {INVALID_HANDLE, "invalid handle"},
      {NOT_FOUND, "not found"},         {NOT_READY, "not ready"},            {LAUNCH_FAILED, "a kernel failed"}};
  const auto found = TEXTS.find(answer);
  *text = found == TEXTS.end() ? "unknown" : found->second;
  return OK;
}
Answer cuDeviceGet(int *device, int ordinal) {
  *device = 0;
  return ordinal == 0 ? OK : INVALID_DEVICE;
}
Answer cuDeviceGetName(char *name, int n, int) {
  snprintf(name, n, "no GPU");
  return OK;
}
Answer cuDeviceGetAttribute(int *value, int attribute, int) {
  const int capability = getenv("DRIVER_CAPABILITY") ? (int)setting("DRIVER_CAPABILITY") : 9;
  *value = attribute == 115 /* memory pools */ ? 1 : attribute == 75 /* compute capability */ ? capability : 0;
  return OK;
}
Answer cuDevicePrimaryCtxRetain(void **context, int) {
  *context = &context_memory;
  return OK;
}
Answer cuDevicePrimaryCtxRelease_v2(int) {
  std::lock_guard<std::recursive_mutex> hold(mutex);
  check_all();
  return OK;
}
Answer cuCtxDestroy_v2(void *) { return OK; }
Answer cuCtxGetCurrent(void **context) {
  *context = current;
  return OK;
}
Answer cuCtxSetCurrent(void *context) {
  current = context;
  return OK;
}
Answer cuCtxSynchronize() {
  ENTER();
  return run_all();
}

Answer cuStreamCreate(void **stream, unsigned) {
  ENTER();
  Stream *made = new Stream;
  streams.insert(made);
  *stream = made;
  return OK;
}
Answer cuStreamDestroy_v2(void *handle) {
  ENTER();
  Stream *stream = stream_of(handle);
  if (!stream) return INVALID_HANDLE;
  // a stream goes when its work is done; events keep pointing at it
  run_until(stream, stream->last());
  streams.erase(stream);
  return OK;
}
Answer cuStreamSynchronize(void *handle) {
  ENTER();
  Stream *stream = stream_of(handle);
  return stream ? run_until(stream, stream->last()) : INVALID_HANDLE;
}
Answer cuStreamIsCapturing(void *, int *status) {
  *status = 0;
  return OK;
}
Answer cuStreamWaitEvent(void *handle, Event *event, unsigned) {
  ENTER();
  if (!event->stream) return OK;
  Stream *other = event->stream;
  const uint64_t number = event->number;
  return append(handle, Work{[=] { return run_until(other, number); }});
}
Answer cuEventCreate(Event **event, unsigned flags) {
  ENTER();
  *event = new Event{(flags & 2) == 0};
  return OK;
}
Answer cuEventDestroy_v2(Event *event) {
  ENTER();
  delete event;
  return OK;
}
Answer cuEventRecord(Event *event, void *handle) {
  ENTER();
  const Answer answer = append(handle, Work{[] { return OK; }});
  if (answer != OK) return answer;
  event->stream = stream_of(handle);
  event->number = event->stream->last();
  return OK;
}
Answer cuEventSynchronize(Event *event) {
  ENTER();
  return event->stream ? run_until(event->stream, event->number) : OK;
}
Answer cuEventElapsedTime_v2(float *ms, Event *from, Event *to) {
  ENTER();
  if (!from->timed || !to->timed || !from->stream || !to->stream) return INVALID_HANDLE;
  if (from->stream->done < from->number || to->stream->done < to->number) return NOT_READY;
  *ms = 1e-3f * (float)(to->number - from->number);
  return OK;
}

Answer cuMemGetInfo_v2(size_t *free_bytes, size_t *total) {
  ENTER();
  *free_bytes = MEMORY - used;
  *total = MEMORY;
  return OK;
}
Answer cuMemAlloc_v2(uint64_t *address, size_t n) {
  ENTER();
  return allocate(address, n);
}
Answer cuMemAllocAsync(uint64_t *address, size_t n, void *handle) {
  ENTER();
  if (!stream_of(handle)) return INVALID_HANDLE;
  return allocate(address, n);
}
Answer cuMemFree_v2(uint64_t address) {
  ENTER();
  run_all();
  return release(address);
}
Answer cuMemFreeAsync(uint64_t address, void *handle) {
  ENTER();
  return append(handle, Work{[=] { return release(address); }});
}
Answer cuMemHostAlloc(void **memory, size_t n, unsigned) {
  ENTER();
  if (n == 0) return INVALID_VALUE;
  *memory = malloc(n);
  memset(*memory, 0xFF, n);
  pinned[(char *)*memory] = n;
  return OK;
}
Answer cuMemFreeHost(void *memory) {
  ENTER();
  auto found = pinned.find((char *)memory);
  if (found == pinned.end()) return INVALID_VALUE;
  for (Stream *stream : streams)
    for (const Work &work : stream->queue)
      if (work.host && work.host < found->first + found->second && found->first < work.host + work.n)
        broken("pinned memory is freed under a copy");
  pinned.erase(found);
  free(memory);
  return OK;
}
Answer cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t n, void *handle) {
  ENTER();
  if (!memory_at(to, n)) return INVALID_VALUE;
  copies++;
  const auto copy = [=](const char *bytes) {
    char *there = memory_at(to, n);
    if (!there) return LAUNCH_FAILED;
    memcpy(there, bytes, n);
    return OK;
  };
  const char *host = (const char *)from;
  if (is_pinned(host, n)) return append(handle, Work{[=] { return copy(host); }, host, n});
  // other memory is read before the call returns
  auto staged = std::make_shared<std::vector<char>>(host, host + n);
  return append(handle, Work{[=] { return copy(staged->data()); }});
}
Answer cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t n, void *handle) {
  ENTER();
  if (!memory_at(from, n)) return INVALID_VALUE;
  copies++;
  const bool waits = !is_pinned(to, n);
  // until it has happened it is no number
  memset(to, 0xFF, n);
  const auto copy = [=] {
    const char *there = memory_at(from, n);
    if (!there) return LAUNCH_FAILED;
    memcpy(to, there, n);
    return OK;
  };
  const Answer answer = append(handle, Work{copy, (const char *)to, n});
  if (answer != OK || !waits) return answer;
  Stream *stream = stream_of(handle);
  return run_until(stream, stream->last());
}
Answer cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t n, void *handle) {
  ENTER();
  if (!memory_at(to, n) || !memory_at(from, n)) return INVALID_VALUE;
  copies++;
  return append(handle, Work{[=] {
                  char *there = memory_at(to, n), *here = memory_at(from, n);
                  if (!there || !here) return LAUNCH_FAILED;
                  memmove(there, here, n);
                  return OK;
                }});
}
Answer cuMemcpyPeerAsync(uint64_t to, void *, uint64_t from, void *, size_t n, void *handle) {
  return cuMemcpyDtoDAsync_v2(to, from, n, handle);
}
Answer cuMemsetD8Async(uint64_t to, unsigned char value, size_t n, void *handle) {
  ENTER();
  if (!memory_at(to, n)) return INVALID_VALUE;
  return append(handle, Work{[=] {
                  char *there = memory_at(to, n);
                  if (!there) return LAUNCH_FAILED;
                  memset(there, value, n);
                  return OK;
                }});
}

Answer cuModuleLoad(void **, const char *) { return NOT_FOUND; }
Answer cuModuleLoadData(Module **module, const char *image) {
  ENTER();
  Module read{image, {}};
  if (!read_ptx(read)) return INVALID_PTX;
  *module = new Module(std::move(read));
  return OK;
}
Answer cuModuleUnload(Module *module) {
  ENTER();
  run_all();
  delete module;
  return OK;
}
Answer cuModuleGetFunction(Kernel **kernel, Module *module, const char *name) {
  ENTER();
  auto found = module->kernels.find(name);
  if (found == module->kernels.end()) return NOT_FOUND;
  *kernel = &found->second;
  return OK;
}
Answer cuLaunchKernel(Kernel *kernel, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                      unsigned shared, void *handle, void **params, void **extra) {
  ENTER();
  const uint64_t threads = (uint64_t)bx * by * bz;
  if (gx == 0 || gy == 0 || gz == 0 || gx > 0x7fffffffu || gy > 65535 || gz > 65535) return INVALID_VALUE;
  if (threads == 0 || threads > kernel->most_threads || bz > 64) return INVALID_VALUE;
  if (extra || shared > MOST_SHARED) return INVALID_VALUE;
  launches[kernel->name]++;
  std::vector<uint64_t> values(kernel->params.size());
  for (size_t i = 0; i < values.size(); i++) memcpy(&values[i], params[i], kernel->params[i]);
  const std::string name = kernel->name;
  return append(handle, Work{[=]() mutable -> Answer {
                  const unsigned grid[3] = {gx, gy, gz}, block[3] = {bx, by, bz};
                  std::vector<void *> args;
                  for (uint64_t &value : values) args.push_back(&value);
                  const char *wrong =
                      hostsim_kernels(name.c_str(), grid, block, shared, args.data(), setting("DRIVER_ORDER"));
                  if (!wrong) return OK;
                  fprintf(stderr, "driver: %s: %s\n", name.c_str(), wrong);
                  return LAUNCH_FAILED;
                }});
}
}
