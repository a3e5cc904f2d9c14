// The short vectors: components, swizzles, conversions and arithmetic, and their packed forms.
#pragma once

#include "numbers.h"
#include "report.h"

namespace metal {

inline int64_t checked_lane(host::Index lane, int count) {
  if (lane.value < 0 || lane.value >= count) {
    report("out-of-range", lane.site, "component %lld of a vector of %d", static_cast<long long>(lane.value), count);
    return 0;
  }
  return lane.value;
}

template <typename T, int N>
struct vec;
template <typename T, int N>
struct packed_vec;

} // namespace metal

namespace host {

// The vector that a value is, or that it stands for.
template <typename T>
struct vector_of {
  static constexpr int count = 0;
};
template <typename T, int N>
struct vector_of<metal::vec<T, N>> {
  static constexpr int count = N;
  using scalar = T;
  using type = metal::vec<T, N>;
};
template <typename T, int N>
struct vector_of<metal::packed_vec<T, N>> : vector_of<metal::vec<T, N>> {};

template <typename V>
using as_vector = vector_of<plain_t<V>>;

template <typename V>
constexpr bool is_vector_v = as_vector<V>::count > 0;

// How many components an argument of a vector's constructor brings.
template <typename V>
constexpr int width_v = is_vector_v<V> ? as_vector<V>::count : 1;

} // namespace host

namespace metal {

// What `v.xz` names: read as a vector, written component by component.
template <typename T, int... Lanes>
struct Swizzled {
  T* lanes;
  using Whole = vec<T, sizeof...(Lanes)>;
  operator Whole() const { return Whole(lanes[Lanes]...); }
  const Swizzled& operator=(Whole value) const {
    const int to[] = {Lanes...};
    for (int i = 0; i < int(sizeof...(Lanes)); ++i) lanes[to[i]] = value[i];
    return *this;
  }
  template <typename V>
  const Swizzled& operator+=(V value) const { return *this = Whole(*this) + value; }
  template <typename V>
  const Swizzled& operator*=(V value) const { return *this = Whole(*this) * value; }
};

} // namespace metal

namespace host {

template <typename T, int... Lanes>
struct plain<metal::Swizzled<T, Lanes...>> {
  using type = metal::vec<T, sizeof...(Lanes)>;
};

} // namespace host

namespace metal {

#define HOST_VECTOR(N, ALIGNED, COMPONENTS)                                                    \
  template <typename T>                                                                        \
  struct alignas(ALIGNED * sizeof(T)) vec<T, N> {                                              \
    COMPONENTS                                                                                 \
    vec() = default;                                                                           \
    /* One number stands for all components. */                                                \
    template <                                                                                 \
        typename S,                                                                            \
        typename = std::enable_if_t<                                                           \
            host::is_scalar_v<host::plain_t<S>> &&                                             \
            (std::is_convertible<host::plain_t<S>, T>::value ||                                \
             std::is_integral<host::plain_t<S>>::value)>>                                      \
    vec(S all) {                                                                               \
      for (int i = 0; i < N; ++i) (*this)[i] = static_cast<T>(static_cast<host::plain_t<S>>(all)); \
    }                                                                                          \
    /* Of another type of component: said by the kernel. */                                    \
    template <typename U, typename = std::enable_if_t<!std::is_same<U, T>::value>>             \
    explicit vec(vec<U, N> other) {                                                            \
      for (int i = 0; i < N; ++i) (*this)[i] = static_cast<T>(other[i]);                       \
    }                                                                                          \
    vec(packed_vec<T, N> other) {                                                              \
      for (int i = 0; i < N; ++i) (*this)[i] = other[i];                                       \
    }                                                                                          \
    template <                                                                                 \
        typename A,                                                                            \
        typename B,                                                                            \
        typename... More,                                                                      \
        typename = std::enable_if_t<                                                           \
            host::width_v<A> + (host::width_v<B> + ... + host::width_v<More>) == N>>           \
    vec(A a, B b, More... more) {                                                              \
      int at = 0;                                                                              \
      put(at, a);                                                                              \
      put(at, b);                                                                              \
      (put(at, more), ...);                                                                    \
    }                                                                                          \
    T& operator[](host::Index lane) { return (&x)[checked_lane(lane, N)]; }                    \
    const T& operator[](host::Index lane) const { return (&x)[checked_lane(lane, N)]; }        \
    template <int... Lanes>                                                                    \
    Swizzled<T, Lanes...> swizzle() & { return {&x}; }                                         \
    template <int... Lanes>                                                                    \
    vec<T, sizeof...(Lanes)> swizzle() && { return picked<Lanes...>(); }                       \
    template <int... Lanes>                                                                    \
    vec<T, sizeof...(Lanes)> swizzle() const& { return picked<Lanes...>(); }                   \
    template <int... Lanes>                                                                    \
    vec<T, sizeof...(Lanes)> picked() const {                                                  \
      return vec<T, sizeof...(Lanes)>((*this)[Lanes]...);                                      \
    }                                                                                          \
                                                                                               \
   private:                                                                                    \
    template <typename V>                                                                      \
    void put(int& at, V value) {                                                               \
      if constexpr (host::is_vector_v<V>) {                                                    \
        const host::plain_t<V> part = value;                                                   \
        for (int i = 0; i < host::width_v<V>; ++i) (*this)[at++] = part[i];                    \
      } else {                                                                                 \
        (*this)[at++] = static_cast<T>(static_cast<host::plain_t<V>>(value));                  \
      }                                                                                        \
    }                                                                                          \
  };
#define HOST_COMPONENTS2 union { T x, r; }; union { T y, g; };
#define HOST_COMPONENTS3 HOST_COMPONENTS2 union { T z, b; };
#define HOST_COMPONENTS4 HOST_COMPONENTS3 union { T w, a; };
HOST_VECTOR(2, 2, HOST_COMPONENTS2)
HOST_VECTOR(3, 4, HOST_COMPONENTS3)
HOST_VECTOR(4, 4, HOST_COMPONENTS4)

// As many components without a gap, at any element.
template <typename T, int N>
struct packed_vec {
  T lanes[N];
  packed_vec() = default;
  packed_vec(vec<T, N> other) {
    for (int i = 0; i < N; ++i) lanes[i] = other[i];
  }
  template <typename... Lanes, typename = std::enable_if_t<sizeof...(Lanes) == N && (N > 1)>>
  packed_vec(Lanes... each) : lanes{static_cast<T>(each)...} {}
  T& operator[](host::Index lane) { return lanes[checked_lane(lane, N)]; }
  const T& operator[](host::Index lane) const { return lanes[checked_lane(lane, N)]; }
};

template <typename V>
inline auto vector_from(const V& value) {
  using Whole = typename host::as_vector<V>::type;
  return Whole(static_cast<host::plain_t<V>>(value));
}

// Both operands as vectors of one type: the type of the vector among them, or of both.
template <typename A, typename B, bool = host::is_vector_v<A>, bool = host::is_vector_v<B>>
struct Common {};
template <typename A, typename B>
struct Common<A, B, true, true>
    : std::enable_if<
          std::is_same<typename host::as_vector<A>::type, typename host::as_vector<B>::type>::value,
          typename host::as_vector<A>::type> {};
template <typename A, typename B>
struct Common<A, B, true, false>
    : std::enable_if<
          std::is_convertible<host::plain_t<B>, typename host::as_vector<A>::type>::value,
          typename host::as_vector<A>::type> {};
template <typename A, typename B>
struct Common<A, B, false, true> : Common<B, A, true, false> {};
template <typename A, typename B>
using common_t = typename Common<A, B>::type;

template <typename V, typename A>
inline V widened(const A& value) {
  if constexpr (host::is_vector_v<A>) {
    return vector_from(value);
  } else {
    return V(static_cast<host::plain_t<A>>(value));
  }
}

template <typename V, typename F, typename... Values>
inline auto each_lane(F function, const Values&... values) {
  using R = decltype(function(values[0]...));
  vec<R, host::vector_of<V>::count> result;
  for (int i = 0; i < host::vector_of<V>::count; ++i) result[i] = function(values[i]...);
  return result;
}

#define HOST_VECTOR_OPERATOR(op)                                                               \
  template <typename A, typename B, typename V = common_t<A, B>>                               \
  inline V operator op(const A& a, const B& b) {                                               \
    using T = typename host::vector_of<V>::scalar;                                             \
    return each_lane<V>(                                                                       \
        [](T left, T right) { return static_cast<T>(left op right); }, widened<V>(a), widened<V>(b)); \
  }                                                                                            \
  template <                                                                                   \
      typename T, int N, typename B, typename = std::enable_if_t<std::is_same<common_t<vec<T, N>, B>, vec<T, N>>::value>> \
  inline vec<T, N>& operator op##=(vec<T, N>& a, const B& b) {                                 \
    return a = a op b;                                                                         \
  }
HOST_VECTOR_OPERATOR(+)
HOST_VECTOR_OPERATOR(-)
HOST_VECTOR_OPERATOR(*)
HOST_VECTOR_OPERATOR(/)
HOST_VECTOR_OPERATOR(%)
HOST_VECTOR_OPERATOR(&)
HOST_VECTOR_OPERATOR(|)
HOST_VECTOR_OPERATOR(^)

#define HOST_VECTOR_COMPARISON(op)                                                             \
  template <typename A, typename B, typename V = common_t<A, B>>                               \
  inline vec<bool, host::vector_of<V>::count> operator op(const A& a, const B& b) {            \
    using T = typename host::vector_of<V>::scalar;                                             \
    return each_lane<V>(                                                                       \
        [](T left, T right) { return left op right; }, widened<V>(a), widened<V>(b));          \
  }
HOST_VECTOR_COMPARISON(==)
HOST_VECTOR_COMPARISON(!=)
HOST_VECTOR_COMPARISON(<)
HOST_VECTOR_COMPARISON(<=)
HOST_VECTOR_COMPARISON(>)
HOST_VECTOR_COMPARISON(>=)

template <typename T, int N>
inline vec<T, N> operator-(vec<T, N> value) {
  return each_lane<vec<T, N>>([](T lane) { return static_cast<T>(-lane); }, value);
}
template <int N>
inline vec<bool, N> operator!(vec<bool, N> value) {
  return each_lane<vec<bool, N>>([](bool lane) { return !lane; }, value);
}

#define HOST_VECTOR_NAMES(type)      \
  using type##2 = vec<type, 2>;      \
  using type##3 = vec<type, 3>;      \
  using type##4 = vec<type, 4>;      \
  using packed_##type##2 = packed_vec<type, 2>; \
  using packed_##type##3 = packed_vec<type, 3>; \
  using packed_##type##4 = packed_vec<type, 4>;
HOST_VECTOR_NAMES(bool)
HOST_VECTOR_NAMES(char)
HOST_VECTOR_NAMES(uchar)
HOST_VECTOR_NAMES(short)
HOST_VECTOR_NAMES(ushort)
HOST_VECTOR_NAMES(int)
HOST_VECTOR_NAMES(uint)
HOST_VECTOR_NAMES(long)
HOST_VECTOR_NAMES(ulong)
HOST_VECTOR_NAMES(half)
HOST_VECTOR_NAMES(bfloat)
HOST_VECTOR_NAMES(float)

} // namespace metal
