// Atomics, relaxed, as in Metal: of 32-bit integers and, with fewer functions, of floats. One
// fiber runs at a time, so that they are whole by themselves.
#pragma once

#include <cstring>

#include "lanes.h"

namespace metal {

enum memory_order { memory_order_relaxed };

template <typename T>
struct atomic {
  static_assert(sizeof(T) == 4, "an atomic has 32 bits");
  T value;
};
using atomic_int = atomic<int>;
using atomic_uint = atomic<uint>;
using atomic_float = atomic<float>;

template <typename T>
inline T load_atomic(host::Buffer* buffer, int64_t offset, host::AtomicOperation operation, host::Site site) {
  return host::load<atomic<T>>(buffer, offset, site, {operation, 0}).value;
}
template <typename T>
inline void store_atomic(
    host::Buffer* buffer, int64_t offset, T value, host::AtomicOperation operation, host::Site site) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  host::store(buffer, offset, atomic<T>{value}, site, {operation, bits});
}

template <typename S, typename T>
inline T atomic_load_explicit(host::pointer<S, atomic<T>> at, memory_order, HOST_SITE) {
  return load_atomic<T>(at.buffer(), at.offset(), host::AtomicOperation::load, {file, line});
}
template <typename S, typename T>
inline void atomic_store_explicit(
    host::pointer<S, atomic<T>> at, std::common_type_t<T> value, memory_order, HOST_SITE) {
  store_atomic<T>(at.buffer(), at.offset(), value, host::AtomicOperation::store, {file, line});
}
#define HOST_ATOMIC(name, operation, expression)                                               \
  template <typename S, typename T>                                                            \
  inline T name(                                                                               \
      host::pointer<S, atomic<T>> at, std::common_type_t<T> operand, memory_order, HOST_SITE) { \
    const auto kind = host::AtomicOperation::operation;                                        \
    const T before = load_atomic<T>(at.buffer(), at.offset(), kind, {file, line});             \
    store_atomic<T>(at.buffer(), at.offset(), expression, kind, {file, line});                 \
    return before;                                                                             \
  }
HOST_ATOMIC(atomic_fetch_add_explicit, add, before + operand)
HOST_ATOMIC(atomic_fetch_sub_explicit, add, before - operand)
HOST_ATOMIC(atomic_fetch_max_explicit, max, max(before, operand))
HOST_ATOMIC(atomic_fetch_min_explicit, min, min(before, operand))
HOST_ATOMIC(atomic_fetch_or_explicit, bit_or, before | operand)
HOST_ATOMIC(atomic_fetch_and_explicit, bit_and, before & operand)
HOST_ATOMIC(atomic_fetch_xor_explicit, bit_xor, before ^ operand)
HOST_ATOMIC(atomic_exchange_explicit, exchange, operand)

} // namespace metal
