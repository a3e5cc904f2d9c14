// The functions of Metal's standard library that kernels here may call.
#pragma once

#include <cstring>

#include "numbers.h"
#include "threads.h"

#ifndef INFINITY
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#endif

namespace metal {

// Overloads rather than templates, as in Metal: arguments convert to the function's type.
#define HOST_COMPARE(type)                                                          \
  inline type min(type a, type b) { return b < a ? b : a; }                         \
  inline type max(type a, type b) { return a < b ? b : a; }                         \
  inline type clamp(type value, type low, type high) { return min(max(value, low), high); }
HOST_COMPARE(int)
HOST_COMPARE(uint)
HOST_COMPARE(int64_t)
HOST_COMPARE(uint64_t)
HOST_COMPARE(short)
HOST_COMPARE(ushort)
HOST_COMPARE(half)
HOST_COMPARE(bfloat)
// Of two floats, one of which is no number, the other one.
inline float min(float a, float b) { return __builtin_fminf(a, b); }
inline float max(float a, float b) { return __builtin_fmaxf(a, b); }
inline float clamp(float value, float low, float high) { return min(max(value, low), high); }

inline int abs(int value) { return value < 0 ? -value : value; }
inline half abs(half value) { value.bits &= 0x7fff; return value; }
inline bfloat abs(bfloat value) { value.bits &= 0x7fff; return value; }
#define HOST_UNARY(name)                                       \
  inline float name(float value) { return __builtin_##name##f(value); }  \
  inline half name(half value) { return half(__builtin_##name##f(static_cast<float>(value))); } \
  inline bfloat name(bfloat value) { return bfloat(__builtin_##name##f(static_cast<float>(value))); }
inline float abs(float value) { return __builtin_fabsf(value); }
inline float fabs(float value) { return __builtin_fabsf(value); }
HOST_UNARY(round)
HOST_UNARY(rint)
HOST_UNARY(floor)
HOST_UNARY(ceil)
HOST_UNARY(trunc)
HOST_UNARY(exp)
HOST_UNARY(exp2)
HOST_UNARY(log)
HOST_UNARY(log2)
HOST_UNARY(sqrt)
HOST_UNARY(sin)
HOST_UNARY(cos)
HOST_UNARY(tanh)
inline float rsqrt(float value) { return 1.0f / __builtin_sqrtf(value); }
inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline float pow(float a, float b) { return __builtin_powf(a, b); }
inline bool isnan(float value) { return __builtin_isnan(value); }
inline bool isinf(float value) { return __builtin_isinf(value); }
inline bool isfinite(float value) { return __builtin_isfinite(value); }
template <typename T>
inline T select(T otherwise, T chosen, bool condition) { return condition ? chosen : otherwise; }
inline uint popcount(uint value) { return __builtin_popcount(value); }
inline uint clz(uint value) { return value == 0 ? 32 : __builtin_clz(value); }

namespace precise {
using metal::exp;
using metal::exp2;
using metal::log;
using metal::rsqrt;
using metal::sqrt;
} // namespace precise

enum class mem_flags : uint32_t { mem_none = 0, mem_device = 1, mem_threadgroup = 2 };
inline mem_flags operator|(mem_flags a, mem_flags b) {
  return static_cast<mem_flags>(static_cast<uint32_t>(a) | static_cast<uint32_t>(b));
}

inline void threadgroup_barrier(
    mem_flags flags, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  host::meet_threadgroup_barrier(static_cast<uint32_t>(flags), {file, line});
}

// A view of the values that the lanes of a simdgroup brought to one call.
template <typename T>
struct Lanes {
  host::Meeting meeting;
  uint32_t lane;
  host::Site site;

  bool active(uint32_t other) const {
    return other < host::simd_width && meeting.active[other];
  }
  T get(uint32_t other) const {
    T value;
    std::memcpy(static_cast<void*>(&value), meeting.values[other], sizeof value);
    return value;
  }
  // What a shuffle reads: from a lane that is not there, the result is undefined.
  T from(uint32_t other) const {
    if (!active(other)) {
      report("inactive-lane", site, "lane %u reads lane %u, which takes no part", lane, other);
      return get(lane);
    }
    return get(other);
  }
};

template <typename T>
inline Lanes<T> meet(T value, host::Site site) {
  static_assert(sizeof(T) <= host::exchange_bytes, "too wide for a simdgroup function");
  const host::Meeting meeting = host::meet_simdgroup(&value, sizeof value, site);
  return {meeting, meeting.lane, site};
}

inline void simdgroup_barrier(
    mem_flags flags, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  host::meet_simdgroup_barrier(static_cast<uint32_t>(flags), {file, line});
}

#define HOST_SITE const char *file = __builtin_FILE(), int line = __builtin_LINE()

template <typename V, typename T = host::plain_t<V>>
inline T simd_shuffle_xor(V value, ushort mask, HOST_SITE) {
  const Lanes<T> lanes = meet<T>(value, {file, line});
  return lanes.from(lanes.lane ^ mask);
}
template <typename V, typename T = host::plain_t<V>>
inline T simd_shuffle(V value, ushort source, HOST_SITE) {
  return meet<T>(value, {file, line}).from(source);
}
template <typename V, typename T = host::plain_t<V>>
inline T simd_broadcast(V value, ushort source, HOST_SITE) {
  return meet<T>(value, {file, line}).from(source);
}
// The lanes at the end keep their own value, as Metal says.
template <typename V, typename T = host::plain_t<V>>
inline T simd_shuffle_down(V value, ushort delta, HOST_SITE) {
  const Lanes<T> lanes = meet<T>(value, {file, line});
  const uint32_t source = lanes.lane + delta;
  return source < host::simd_width ? lanes.from(source) : lanes.get(lanes.lane);
}
template <typename V, typename T = host::plain_t<V>>
inline T simd_shuffle_up(V value, ushort delta, HOST_SITE) {
  const Lanes<T> lanes = meet<T>(value, {file, line});
  return lanes.lane >= delta ? lanes.from(lanes.lane - delta) : lanes.get(lanes.lane);
}

// The order of a floating-point reduction is not specified by Metal; here it is always this tree.
template <typename T, typename F>
inline T reduce_lanes(const Lanes<T>& lanes, F combine) {
  T values[host::simd_width];
  bool active[host::simd_width];
  for (uint32_t i = 0; i < host::simd_width; ++i) {
    active[i] = lanes.active(i);
    values[i] = lanes.get(active[i] ? i : lanes.lane);
  }
  for (uint32_t step = host::simd_width / 2; step > 0; step /= 2) {
    for (uint32_t i = 0; i < step; ++i) {
      if (active[i] && active[i + step]) {
        values[i] = combine(values[i], values[i + step]);
      } else if (active[i + step]) {
        values[i] = values[i + step];
        active[i] = true;
      }
    }
  }
  return values[0];
}

#define HOST_SIMD_REDUCTION(name, expression)                                            \
  template <typename V, typename T = host::plain_t<V>>                                   \
  inline T name(V value, HOST_SITE) {                                                    \
    const Lanes<T> lanes = meet<T>(value, {file, line});                                 \
    return reduce_lanes(lanes, [](T a, T b) { return static_cast<T>(expression); });     \
  }
HOST_SIMD_REDUCTION(simd_sum, a + b)
HOST_SIMD_REDUCTION(simd_product, a * b)
HOST_SIMD_REDUCTION(simd_min, min(a, b))
HOST_SIMD_REDUCTION(simd_max, max(a, b))
HOST_SIMD_REDUCTION(simd_and, a & b)
HOST_SIMD_REDUCTION(simd_or, a | b)
HOST_SIMD_REDUCTION(simd_xor, a ^ b)
HOST_SIMD_REDUCTION(simd_all_value, a && b)
HOST_SIMD_REDUCTION(simd_any_value, a || b)
inline bool simd_all(bool value, HOST_SITE) { return simd_all_value(value, file, line); }
inline bool simd_any(bool value, HOST_SITE) { return simd_any_value(value, file, line); }

template <typename T>
inline T prefix_sum(const Lanes<T>& lanes, uint32_t end) {
  T total = T(0);
  for (uint32_t i = 0; i < end; ++i) {
    if (lanes.active(i)) total = static_cast<T>(total + lanes.get(i));
  }
  return total;
}
template <typename V, typename T = host::plain_t<V>>
inline T simd_prefix_inclusive_sum(V value, HOST_SITE) {
  const Lanes<T> lanes = meet<T>(value, {file, line});
  return prefix_sum(lanes, lanes.lane + 1);
}
template <typename V, typename T = host::plain_t<V>>
inline T simd_prefix_exclusive_sum(V value, HOST_SITE) {
  const Lanes<T> lanes = meet<T>(value, {file, line});
  return prefix_sum(lanes, lanes.lane);
}

// Atomics are for 32-bit integers, relaxed, as in Metal. One fiber runs at a time.
enum memory_order { memory_order_relaxed };

template <typename T>
struct atomic {
  T value;
};
using atomic_int = atomic<int>;
using atomic_uint = atomic<uint>;

template <typename S, typename T>
inline T atomic_load_explicit(host::pointer<S, atomic<T>> at, memory_order, HOST_SITE) {
  return host::load<atomic<T>>(at.buffer(), at.offset(), {file, line}, true).value;
}
template <typename S, typename T>
inline void atomic_store_explicit(
    host::pointer<S, atomic<T>> at, host::plain_t<std::common_type_t<T>> value, memory_order, HOST_SITE) {
  host::store(at.buffer(), at.offset(), atomic<T>{value}, {file, line}, true);
}
#define HOST_ATOMIC(name, expression)                                                      \
  template <typename S, typename T>                                                        \
  inline T name(                                                                           \
      host::pointer<S, atomic<T>> at, std::common_type_t<T> operand, memory_order, HOST_SITE) { \
    const T before = host::load<atomic<T>>(at.buffer(), at.offset(), {file, line}, true).value; \
    host::store(at.buffer(), at.offset(), atomic<T>{expression}, {file, line}, true);      \
    return before;                                                                         \
  }
HOST_ATOMIC(atomic_fetch_add_explicit, before + operand)
HOST_ATOMIC(atomic_fetch_sub_explicit, before - operand)
HOST_ATOMIC(atomic_fetch_max_explicit, max(before, operand))
HOST_ATOMIC(atomic_fetch_min_explicit, min(before, operand))
HOST_ATOMIC(atomic_fetch_or_explicit, before | operand)
HOST_ATOMIC(atomic_fetch_and_explicit, before & operand)
HOST_ATOMIC(atomic_exchange_explicit, operand)

} // namespace metal
