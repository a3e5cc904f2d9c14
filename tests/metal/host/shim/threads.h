// Where threads meet, and the memory that a threadgroup shares: what a kernel sees of the runtime.
#pragma once

#include <cstddef>

#include "memory.h"

namespace host {

constexpr uint32_t simd_width = 32;
constexpr size_t exchange_bytes = 16;

// The kernel's file; the unit defines it.
const char* kernel_file();

// What the lanes of one simdgroup brought to one call; until this lane's next meeting.
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

// Told before the kernel runs, whatever statements it comes to.
bool declare_shared(size_t bytes, Site site);

template <typename T>
constexpr size_t product_of() { return 1; }
template <typename T, size_t First, size_t... Rest>
constexpr size_t product_of() { return First * product_of<T, Rest...>(); }

// One statement: `Line` and `Number` are its own. Its address is its key.
template <int Line, int Number, typename T, size_t... Sizes>
struct Statement {
  static const bool declared;
  static Buffer* buffer(const char* name) {
    return shared_buffer(&declared, name, sizeof(T), product_of<T, Sizes...>());
  }
};

template <typename Statement, typename T, size_t... Sizes>
struct SharedArray;
template <typename Statement, typename T>
struct SharedArray<Statement, T> : Element<threadgroup_space, T> {
  explicit SharedArray(const char* name, Site site = Site::here())
      : Element<threadgroup_space, T>(Statement::buffer(name), 0, site) {}
  using Element<threadgroup_space, T>::operator=;
};
template <typename Statement, typename T, size_t N>
struct SharedArray<Statement, T, N> : pointer<threadgroup_space, T> {
  explicit SharedArray(const char* name)
      : pointer<threadgroup_space, T>(Statement::buffer(name), 0) {}
};
template <typename Statement, typename T, size_t Rows, size_t N>
struct SharedArray<Statement, T, Rows, N> : pointer<threadgroup_space, T> {
  explicit SharedArray(const char* name)
      : pointer<threadgroup_space, T>(Statement::buffer(name), 0) {}
  pointer<threadgroup_space, T> operator[](Index row) const {
    if (row.value < 0 || row.value >= int64_t(Rows)) {
      report("out-of-range", row.site, "row %lld of a threadgroup array of %zu rows",
             static_cast<long long>(row.value), Rows);
    }
    return *this + row.value * int64_t(N);
  }
};

template <int Line, int Number, typename T, size_t... Sizes>
const bool Statement<Line, Number, T, Sizes...>::declared =
    declare_shared(sizeof(T) * product_of<T, Sizes...>(), {kernel_file(), Line});

template <int Line, int Number, typename T, size_t... Sizes>
using Shared = SharedArray<Statement<Line, Number, T, Sizes...>, T, Sizes...>;

// A local without a value holds other garbage in each run, so that whatever depends on it shows.
void fill_with_garbage(void* local, size_t bytes);
template <typename T>
inline void garble(T& local) {
  if constexpr (std::is_trivially_copyable<T>::value && std::is_trivially_default_constructible<T>::value) {
    fill_with_garbage(static_cast<void*>(&local), sizeof local);
  }
}

} // namespace host
