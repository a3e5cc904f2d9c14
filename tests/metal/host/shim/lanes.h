// Barriers, and the functions in which the lanes of a simdgroup or of a quad read each other.
#pragma once

#include <cstring>

#include "arithmetic.h"
#include "threads.h"

namespace metal {

enum class mem_flags : uint32_t { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
inline mem_flags operator|(mem_flags a, mem_flags b) {
  return static_cast<mem_flags>(static_cast<uint32_t>(a) | static_cast<uint32_t>(b));
}

#define HOST_SITE const char *file = __builtin_FILE(), int line = __builtin_LINE()

inline void threadgroup_barrier(mem_flags flags, HOST_SITE) {
  host::meet_threadgroup_barrier(static_cast<uint32_t>(flags), {file, line});
}
inline void simdgroup_barrier(mem_flags flags, HOST_SITE) {
  host::meet_simdgroup_barrier(static_cast<uint32_t>(flags), {file, line});
}

// A view of the values that `width` lanes from `first` on brought to one call.
template <typename T>
struct Lanes {
  host::Meeting meeting;
  uint32_t lane;
  uint32_t first;
  uint32_t width;
  host::Site site;

  bool active(uint32_t other) const {
    return other < width && meeting.active[first + other];
  }
  T get(uint32_t other) const {
    T value;
    std::memcpy(static_cast<void*>(&value), meeting.values[first + other], sizeof value);
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
  uint32_t first_active() const {
    uint32_t found = 0;
    while (!active(found)) ++found;
    return found;
  }
};

constexpr uint32_t quad_width = 4;

template <typename T>
inline Lanes<T> meet(T value, host::Site site, uint32_t width = host::simd_width) {
  static_assert(sizeof(T) <= host::exchange_bytes, "too wide for a simdgroup function");
  const host::Meeting meeting = host::meet_simdgroup(&value, sizeof value, site);
  const uint32_t lane = meeting.lane % width;
  return {meeting, lane, meeting.lane - lane, width, site};
}

// The order of a floating-point reduction is not specified by Metal; here it is always this tree.
template <typename T, typename F>
inline T reduce_lanes(const Lanes<T>& lanes, F combine) {
  T values[host::simd_width];
  bool active[host::simd_width];
  for (uint32_t i = 0; i < lanes.width; ++i) {
    active[i] = lanes.active(i);
    values[i] = lanes.get(active[i] ? i : lanes.lane);
  }
  for (uint32_t step = lanes.width / 2; step > 0; step /= 2) {
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

template <typename T>
inline T prefix_sum(const Lanes<T>& lanes, uint32_t end) {
  T total = T(0);
  for (uint32_t i = 0; i < end; ++i) {
    if (lanes.active(i)) total = static_cast<T>(total + lanes.get(i));
  }
  return total;
}

#define HOST_LANE_FUNCTION(name, COUNT, arguments, body)                                      \
  template <typename V, typename T = host::value_t<V>>                                        \
  inline T name(V value, arguments HOST_SITE) {                                               \
    const Lanes<T> lanes = meet<T>(host::valued<T>(value), {file, line}, COUNT);              \
    body                                                                                      \
  }
#define HOST_NOTHING
#define HOST_WITH(type, name) type name,

// The same functions for the lanes of a simdgroup and for those of a quad. Lanes that would read
// beyond the end keep their own value, as Metal says.
#define HOST_LANE_FUNCTIONS(prefix, COUNT)                                                    \
  HOST_LANE_FUNCTION(prefix##_shuffle_xor, COUNT, HOST_WITH(ushort, mask),                    \
                     return lanes.from(lanes.lane ^ mask);)                                   \
  HOST_LANE_FUNCTION(prefix##_shuffle, COUNT, HOST_WITH(ushort, source),                      \
                     return lanes.from(source);)                                              \
  HOST_LANE_FUNCTION(prefix##_broadcast, COUNT, HOST_WITH(ushort, source),                    \
                     return lanes.from(source);)                                              \
  HOST_LANE_FUNCTION(prefix##_broadcast_first, COUNT, HOST_NOTHING,                           \
                     return lanes.get(lanes.first_active());)                                 \
  HOST_LANE_FUNCTION(prefix##_shuffle_down, COUNT, HOST_WITH(ushort, delta),                  \
                     const uint32_t source = lanes.lane + delta;                              \
                     return source < lanes.width ? lanes.from(source) : lanes.get(lanes.lane);) \
  HOST_LANE_FUNCTION(prefix##_shuffle_up, COUNT, HOST_WITH(ushort, delta),                    \
                     return lanes.lane >= delta ? lanes.from(lanes.lane - delta)              \
                                                : lanes.get(lanes.lane);)                     \
  HOST_LANE_FUNCTION(prefix##_shuffle_rotate_down, COUNT, HOST_WITH(ushort, delta),           \
                     return lanes.from((lanes.lane + delta) % lanes.width);)                  \
  HOST_LANE_FUNCTION(prefix##_shuffle_rotate_up, COUNT, HOST_WITH(ushort, delta),             \
                     return lanes.from((lanes.lane + lanes.width - delta % lanes.width) % lanes.width);) \
  HOST_LANE_FUNCTION(prefix##_prefix_inclusive_sum, COUNT, HOST_NOTHING,                      \
                     return prefix_sum(lanes, lanes.lane + 1);)                               \
  HOST_LANE_FUNCTION(prefix##_prefix_exclusive_sum, COUNT, HOST_NOTHING,                      \
                     return prefix_sum(lanes, lanes.lane);)                                   \
  HOST_REDUCTION(prefix##_sum, COUNT, a + b)                                                  \
  HOST_REDUCTION(prefix##_product, COUNT, a * b)                                              \
  HOST_REDUCTION(prefix##_min, COUNT, min(a, b))                                              \
  HOST_REDUCTION(prefix##_max, COUNT, max(a, b))                                              \
  HOST_REDUCTION(prefix##_and, COUNT, a & b)                                                  \
  HOST_REDUCTION(prefix##_or, COUNT, a | b)                                                   \
  HOST_REDUCTION(prefix##_xor, COUNT, a ^ b)                                                  \
  inline bool prefix##_all(bool value, HOST_SITE) {                                           \
    return reduce_lanes(meet<bool>(value, {file, line}, COUNT), [](bool a, bool b) { return a && b; }); \
  }                                                                                           \
  inline bool prefix##_any(bool value, HOST_SITE) {                                           \
    return reduce_lanes(meet<bool>(value, {file, line}, COUNT), [](bool a, bool b) { return a || b; }); \
  }                                                                                           \
  inline bool prefix##_is_first(HOST_SITE) {                                                  \
    const Lanes<bool> lanes = meet<bool>(true, {file, line}, COUNT);                          \
    return lanes.lane == lanes.first_active();                                                \
  }
#define HOST_REDUCTION(name, COUNT, expression)                                               \
  HOST_LANE_FUNCTION(name, COUNT, HOST_NOTHING,                                               \
                     return reduce_lanes(lanes, [](T a, T b) { return static_cast<T>(expression); });)
HOST_LANE_FUNCTIONS(simd, host::simd_width)
HOST_LANE_FUNCTIONS(quad, quad_width)

// One bit for each lane that takes part and votes for it.
class simd_vote {
 public:
  using vote_t = ulong;
  explicit simd_vote(vote_t votes = 0) : votes_(votes) {}
  explicit operator vote_t() const { return votes_; }
  bool all() const { return votes_ == 0xffffffffu; }
  bool any() const { return votes_ != 0; }

 private:
  vote_t votes_;
};
inline simd_vote simd_ballot(bool value, HOST_SITE) {
  const Lanes<bool> lanes = meet<bool>(value, {file, line});
  simd_vote::vote_t votes = 0;
  for (uint32_t i = 0; i < host::simd_width; ++i) {
    votes |= simd_vote::vote_t(lanes.active(i) && lanes.get(i)) << i;
  }
  return simd_vote(votes);
}
inline simd_vote simd_active_threads_mask(HOST_SITE) { return simd_ballot(true, file, line); }

} // namespace metal
