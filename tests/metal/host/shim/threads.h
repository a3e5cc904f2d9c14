// Where threads meet, and the memory that a threadgroup shares: what a kernel sees of the runtime.
#pragma once

#include <cstddef>

#include "memory.h"

namespace host {

constexpr uint32_t simd_width = 32;
constexpr size_t exchange_bytes = 16;

// What the lanes of one simdgroup brought to one call.
struct Meeting {
  const unsigned char (*values)[exchange_bytes];
  const bool* active;
  uint32_t lane;
};

// Returns when all threads that have not returned yet have come to the same place.
Meeting meet_simdgroup(const void* value, size_t size, Site site);
void meet_simdgroup_barrier(uint32_t flags, Site site);
void meet_threadgroup_barrier(uint32_t flags, Site site);

// Threadgroup memory that all threads of the group declare with one statement; `key` tells the
// statements of a kernel apart. It starts as garbage, as on a GPU.
Buffer* shared_buffer(const void* key, const char* name, size_t element, size_t count);

// A key that is the same for every thread and differs from statement to statement.
#define HOST_STATEMENT_KEY ([]() -> const void* { static const char key = 0; return &key; }())

template <typename T, size_t... Sizes>
struct Shared;
template <typename T>
struct Shared<T> : Element<threadgroup_space, T> {
  Shared(const void* key, const char* name, Site site = Site::here())
      : Element<threadgroup_space, T>(shared_buffer(key, name, sizeof(T), 1), 0, site) {}
  using Element<threadgroup_space, T>::operator=;
};
template <typename T, size_t N>
struct Shared<T, N> : pointer<threadgroup_space, T> {
  Shared(const void* key, const char* name)
      : pointer<threadgroup_space, T>(shared_buffer(key, name, sizeof(T), N), 0) {}
};
template <typename T, size_t Rows, size_t N>
struct Shared<T, Rows, N> : pointer<threadgroup_space, T> {
  Shared(const void* key, const char* name)
      : pointer<threadgroup_space, T>(shared_buffer(key, name, sizeof(T), Rows * N), 0) {}
  pointer<threadgroup_space, T> operator[](Index row) const {
    if (row.value < 0 || row.value >= int64_t(Rows)) {
      report("out-of-range", row.site, "row %lld of a threadgroup array of %zu rows",
             static_cast<long long>(row.value), Rows);
    }
    return *this + row.value * int64_t(N);
  }
};

} // namespace host
