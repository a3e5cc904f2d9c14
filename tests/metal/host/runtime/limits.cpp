// What a C++ compiler lets pass and Metal does not: too many threads, too much memory, recursion;
// and what a local holds to which nothing was assigned.
#include <algorithm>

#include "state.h"

namespace host {

struct Declared {
  Site site;
  size_t bytes;
};

// Filled before main runs.
static std::vector<Declared>& declared() {
  static std::vector<Declared> list;
  return list;
}

bool declare_shared(size_t bytes, Site site) {
  declared().push_back({site, bytes});
  return true;
}

void check_limits() {
  if (request.threads_asked > most_threads) {
    report(
        "limit", request.kernel, "a threadgroup of %llu threads; %u are the most",
        static_cast<unsigned long long>(request.threads_asked), most_threads);
    stop();
  }
  size_t total = 0;
  Site last = request.kernel;
  for (const Declared& each : declared()) {
    total += each.bytes;
    last = each.site;
  }
  if (total > most_threadgroup_bytes) {
    report("limit", last, "%zu bytes of threadgroup memory; %zu are the most", total, most_threadgroup_bytes);
    stop();
  }
}

static uint8_t garbage_byte = 0;

void set_garbage(uint8_t byte) { garbage_byte = byte; }

void fill_with_garbage(void* local, size_t bytes) { std::memset(local, garbage_byte, bytes); }

static void enter(void* function) {
  if (self == nullptr) {
    return;
  }
  std::vector<void*>& calls = self->calls;
  if (std::find(calls.begin(), calls.end(), function) != calls.end()) {
    report("recursion", request.kernel, "a function calls itself, which Metal does not allow");
    stop();
  }
  calls.push_back(function);
}

static void leave() {
  if (self != nullptr && !self->calls.empty()) {
    self->calls.pop_back();
  }
}

} // namespace host

// The compiler puts calls of these around every function of the kernel's unit.
extern "C" void __cyg_profile_func_enter(void* function, void*) { host::enter(function); }
extern "C" void __cyg_profile_func_exit(void*, void*) { host::leave(); }
