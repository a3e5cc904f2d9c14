// Every access to memory that threads share is checked here.
//
// A byte of an output or of threadgroup memory remembers who wrote and who read it last, and
// when: the count of barriers that the thread had passed. Two accesses of different threads are in
// order only if a barrier that both know lies between them. Atomic accesses need that order too,
// unless the outcome is the same in any order: a relaxed atomic orders nothing.
#include <cstring>

#include "state.h"

namespace host {

Actor* actor = nullptr;

constexpr uint64_t many_threads = UINT64_MAX;
constexpr uint16_t many_simdgroups = UINT16_MAX;

static Access current_access(Kind kind, Atomic atomic) {
  Access access;
  access.thread = actor->id;
  access.group = actor->group;
  access.simdgroup = actor->simdgroup;
  const bool shared = kind == Kind::threadgroup;
  access.barriers = shared ? actor->threadgroup_barriers : actor->device_barriers;
  access.simd_barriers =
      shared ? actor->simd_threadgroup_barriers : actor->simd_device_barriers;
  access.operation = atomic.operation;
  access.value = atomic.value;
  return access;
}

// Whether two atomic accesses leave and answer the same in both orders, ticket numbers aside.
static bool commute(const Access& before, const Access& now) {
  if (before.operation == AtomicOperation::none || before.operation != now.operation) {
    return false;
  }
  switch (now.operation) {
    case AtomicOperation::store: return before.value == now.value;
    case AtomicOperation::exchange: return false;
    default: return true;
  }
}

// Whether no barrier orders an access of another thread before this one.
static bool unordered(const Access& before, const Access& now) {
  if (before.thread == 0 || before.thread == now.thread) {
    return false;
  }
  if (before.group != now.group) {
    return true;
  }
  if (before.barriers < now.barriers) {
    return false;
  }
  return before.simdgroup != now.simdgroup || before.simd_barriers >= now.simd_barriers;
}

static bool conflicts(const Access& before, const Access& now) {
  return unordered(before, now) && !commute(before, now);
}

// Remembers an access beside those of other threads that nothing orders before it: then no single
// thread, or no single simdgroup, is the one whose access it was.
static void remember(Access& last, const Access& now) {
  const bool beside = unordered(last, now);
  const bool apart = beside && (last.simdgroup != now.simdgroup || last.group != now.group);
  last = now;
  if (beside) {
    last.thread = many_threads;
  }
  if (apart) {
    last.simdgroup = many_simdgroups;
  }
}

#define HOST_AT "thread (%u, %u, %u)"
#define HOST_POSITION actor->position.x, actor->position.y, actor->position.z

// Whether `size` bytes at `offset` may be touched at all.
static bool
in_range(const Buffer& buffer, int64_t offset, int64_t size, int64_t alignment, Site site, const char* verb) {
  const int64_t at = buffer.origin + offset;
  const long long element = static_cast<long long>(offset / buffer.element_bytes);
  const int64_t total = static_cast<int64_t>(buffer.bytes.size());
  bool inside = at >= 0 && size <= total && at <= total - size;
  if (inside && !buffer.present.empty()) {
    for (int64_t i = at; i < at + size; ++i) {
      inside = inside && buffer.present[i];
    }
  }
  if (!inside) {
    report(
        "out-of-range", site, "%s of %s[%lld] (%lld bytes) by " HOST_AT ": not an element of it",
        verb, buffer.name.c_str(), element, static_cast<long long>(size), HOST_POSITION);
    return false;
  }
  if ((buffer.misalignment + at) % alignment != 0) {
    report(
        "misaligned", site, "%s of %lld bytes at %s[%lld] by " HOST_AT " needs an alignment of %lld",
        verb, static_cast<long long>(size), buffer.name.c_str(), element, HOST_POSITION,
        static_cast<long long>(alignment));
  }
  return true;
}

static bool
check_read(Buffer& buffer, int64_t offset, int64_t size, int64_t alignment, Atomic atomic, Site site) {
  if (!in_range(buffer, offset, size, alignment, site, "read")) {
    return false;
  }
  if (buffer.kind == Kind::input) {
    return true;
  }
  const Access now = current_access(buffer.kind, atomic);
  const long long element = static_cast<long long>(offset / buffer.element_bytes);
  for (int64_t i = buffer.origin + offset; i < buffer.origin + offset + size; ++i) {
    const Access& write = buffer.writes[i];
    if (write.thread == 0 && !buffer.initialized) {
      report(
          "uninitialized-read", site, "%s[%lld] was read by " HOST_AT " before anything was written to it",
          buffer.name.c_str(), element, HOST_POSITION);
    } else if (conflicts(write, now)) {
      report(
          "race", site, "%s[%lld] was read by " HOST_AT " with no barrier after another thread's write",
          buffer.name.c_str(), element, HOST_POSITION);
    }
    remember(buffer.reads[i], now);
  }
  return true;
}

static bool
check_write(Buffer& buffer, int64_t offset, int64_t size, int64_t alignment, Atomic atomic, Site site) {
  if (!in_range(buffer, offset, size, alignment, site, "write")) {
    return false;
  }
  if (buffer.kind == Kind::input) {
    report("input-written", site, "%s is an input", buffer.name.c_str());
    return false;
  }
  const Access now = current_access(buffer.kind, atomic);
  const bool plain = atomic.operation == AtomicOperation::none;
  const long long element = static_cast<long long>(offset / buffer.element_bytes);
  for (int64_t i = buffer.origin + offset; i < buffer.origin + offset + size; ++i) {
    Access& write = buffer.writes[i];
    if (buffer.kind == Kind::output && write.thread != 0 && plain) {
      report(
          "written-twice", site, "%s[%lld] was written by " HOST_AT " after %s had written it",
          buffer.name.c_str(), element, HOST_POSITION,
          write.thread == now.thread ? "the same thread" : "another thread");
    } else if (conflicts(write, now)) {
      report(
          "race", site, "%s[%lld] was written by " HOST_AT " with no barrier after another thread's write",
          buffer.name.c_str(), element, HOST_POSITION);
    } else if (conflicts(buffer.reads[i], now)) {
      report(
          "race", site, "%s[%lld] was written by " HOST_AT " with no barrier after another thread's read",
          buffer.name.c_str(), element, HOST_POSITION);
    }
    remember(write, now);
  }
  return true;
}

// Bytes that were never written are those of the initial value, or garbage.
static uint8_t byte_at(const Buffer& buffer, int64_t at) {
  if (buffer.writes[at].thread != 0) {
    return buffer.bytes[at];
  }
  return buffer.initialized ? buffer.initial[at % buffer.element_bytes] : buffer.garbage;
}

static bool is_pointer_set(Buffer* buffer, Site site) {
  if (buffer == nullptr) {
    report("uninitialized-read", site, "a pointer that was never set is used by " HOST_AT, HOST_POSITION);
  }
  return buffer != nullptr;
}

void read_memory(
    Buffer* buffer, int64_t offset, void* to, int64_t size, int64_t alignment, Atomic atomic, Site site) {
  if (!is_pointer_set(buffer, site) || !check_read(*buffer, offset, size, alignment, atomic, site)) {
    std::memset(to, 0x5a, size);
    return;
  }
  if (buffer->kind == Kind::input) {
    std::memcpy(to, buffer->bytes.data() + buffer->origin + offset, size);
    return;
  }
  for (int64_t i = 0; i < size; ++i) {
    static_cast<uint8_t*>(to)[i] = byte_at(*buffer, buffer->origin + offset + i);
  }
}

void write_memory(
    Buffer* buffer, int64_t offset, const void* from, int64_t size, int64_t alignment, Atomic atomic, Site site) {
  if (is_pointer_set(buffer, site) && check_write(*buffer, offset, size, alignment, atomic, site)) {
    std::memcpy(buffer->bytes.data() + buffer->origin + offset, from, size);
  }
}

} // namespace host
