// Kernels as C++, with whatever mutant the build script asks for: HOST_SOURCE names the file, HOST_ENTRY
// the function that launches from it. Everything else has internal linkage, so that a kernel and
// its mutants can be linked into one program.
#include "host_shim.h"

namespace {
#include HOST_SOURCE
}

// The names lead to a null pointer where there is no such kernel. `args[i]` points at the i-th
// parameter, as for cuLaunchKernel; the answer is null or says what went wrong.
extern "C" const char *HOST_ENTRY(const char *name, const unsigned *grid, const unsigned *block,
                                  size_t shared_bytes, void **args, uint64_t order) {
  const auto found = host_kernels().find(name);
  if (found == host_kernels().end()) return "no kernel of that name";
  return found->second(grid, block, shared_bytes, args, order);
}
