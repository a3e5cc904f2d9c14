// The functions of Metal's standard library on numbers and vectors that kernels here may call.
//
// Metal has an overload for each type. A call whose arguments are not of one type fits several of
// them equally well there and is refused; here it fits none.
#pragma once

#include "memory.h"

#ifndef INFINITY
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#endif

namespace host {

template <typename V, bool = is_vector_v<V>>
struct lane_of {
  using type = plain_t<V>;
};
template <typename V>
struct lane_of<V, true> {
  using type = typename as_vector<V>::scalar;
};
template <typename V>
using lane_t = typename lane_of<V>::type;

template <typename V, bool = is_vector_v<V>>
struct value_of {
  using type = plain_t<V>;
};
template <typename V>
struct value_of<V, true> {
  using type = typename as_vector<V>::type;
};
// An argument as a value: what an element of memory holds, a packed vector as a vector.
template <typename V>
using value_t = typename value_of<V>::type;

// The type of all arguments, if they have one and its components are numbers of the right sort.
template <bool Fits, typename First, typename... Others>
using one_type = std::enable_if_t<
    Fits && (std::is_same<value_t<First>, value_t<Others>>::value && ...),
    value_t<First>>;
template <typename A, typename... More>
using floating = one_type<is_floating_v<lane_t<A>>, A, More...>;
template <typename A, typename... More>
using integer = one_type<is_integer_v<lane_t<A>>, A, More...>;
template <typename A, typename... More>
using number = one_type<is_floating_v<lane_t<A>> || is_integer_v<lane_t<A>>, A, More...>;

template <typename V, typename A>
inline V valued(const A& argument) {
  return V(static_cast<plain_t<A>>(argument));
}

// Applies a function of scalars to scalars, or to vectors component by component.
template <typename V, typename F, typename... A>
inline auto on_lanes(F function, const A&... values) {
  if constexpr (is_vector_v<V>) {
    return metal::each_lane<V>(function, values...);
  } else {
    return function(values...);
  }
}

} // namespace host

namespace metal {

#define HOST_FUNCTION1(name, sort, expression)                              \
  template <typename A, typename V = host::sort<A>>                         \
  inline auto name(const A& argument) {                                     \
    using T = host::lane_t<V>;                                              \
    return host::on_lanes<V>(                                               \
        [](T a) { return expression; }, host::valued<V>(argument));         \
  }
#define HOST_FUNCTION2(name, sort, expression)                              \
  template <typename A, typename B, typename V = host::sort<A, B>>          \
  inline auto name(const A& first, const B& second) {                       \
    using T = host::lane_t<V>;                                              \
    return host::on_lanes<V>(                                               \
        [](T a, T b) { return expression; }, host::valued<V>(first), host::valued<V>(second)); \
  }
#define HOST_FUNCTION3(name, sort, expression)                              \
  template <typename A, typename B, typename C, typename V = host::sort<A, B, C>> \
  inline auto name(const A& first, const B& second, const C& third) {       \
    using T = host::lane_t<V>;                                              \
    return host::on_lanes<V>(                                               \
        [](T a, T b, T c) { return expression; }, host::valued<V>(first),   \
        host::valued<V>(second), host::valued<V>(third));                   \
  }

// Of two numbers, one of which is no number, the other one.
template <typename T>
inline T lesser(T a, T b) {
  if constexpr (host::is_floating_v<T>) {
    return T(__builtin_fminf(a, b));
  } else {
    return b < a ? b : a;
  }
}
template <typename T>
inline T greater(T a, T b) {
  if constexpr (host::is_floating_v<T>) {
    return T(__builtin_fmaxf(a, b));
  } else {
    return a < b ? b : a;
  }
}
template <typename T>
inline T magnitude(T a) {
  if constexpr (std::is_same<T, float>::value) {
    return __builtin_fabsf(a);
  } else if constexpr (host::is_floating_v<T>) {
    a.bits &= 0x7fff;
    return a;
  } else {
    return a < T(0) ? T(-a) : a;
  }
}

HOST_FUNCTION1(abs, number, magnitude<T>(a))
HOST_FUNCTION2(min, number, lesser<T>(a, b))
HOST_FUNCTION2(max, number, greater<T>(a, b))
HOST_FUNCTION3(clamp, number, (lesser<T>(greater<T>(a, b), c)))

#define HOST_IN_FLOAT(name) HOST_FUNCTION1(name, floating, T(__builtin_##name##f(static_cast<float>(a))))
HOST_IN_FLOAT(round)
HOST_IN_FLOAT(rint)
HOST_IN_FLOAT(floor)
HOST_IN_FLOAT(ceil)
HOST_IN_FLOAT(trunc)
HOST_IN_FLOAT(exp)
HOST_IN_FLOAT(exp2)
HOST_IN_FLOAT(log)
HOST_IN_FLOAT(log2)
HOST_IN_FLOAT(log10)
HOST_IN_FLOAT(sqrt)
HOST_IN_FLOAT(sin)
HOST_IN_FLOAT(cos)
HOST_IN_FLOAT(tan)
HOST_IN_FLOAT(sinh)
HOST_IN_FLOAT(cosh)
HOST_IN_FLOAT(tanh)
HOST_IN_FLOAT(asin)
HOST_IN_FLOAT(acos)
HOST_IN_FLOAT(atan)
HOST_FUNCTION1(exp10, floating, T(__builtin_powf(10.0f, static_cast<float>(a))))
HOST_FUNCTION1(fabs, floating, magnitude<T>(a))
HOST_FUNCTION1(rsqrt, floating, T(1.0f / __builtin_sqrtf(static_cast<float>(a))))
HOST_FUNCTION1(fract, floating, T(static_cast<float>(a) - __builtin_floorf(static_cast<float>(a))))
HOST_FUNCTION1(saturate, floating, (lesser<T>(greater<T>(a, T(0.0f)), T(1.0f))))
HOST_FUNCTION1(sign, floating, T(float(static_cast<float>(a) > 0.0f) - float(static_cast<float>(a) < 0.0f)))
HOST_FUNCTION1(isnan, floating, bool(__builtin_isnan(static_cast<float>(a))))
HOST_FUNCTION1(isinf, floating, bool(__builtin_isinf(static_cast<float>(a))))
HOST_FUNCTION1(isfinite, floating, bool(__builtin_isfinite(static_cast<float>(a))))
HOST_FUNCTION2(fmin, floating, lesser<T>(a, b))
HOST_FUNCTION2(fmax, floating, greater<T>(a, b))
HOST_FUNCTION2(pow, floating, T(__builtin_powf(a, b)))
HOST_FUNCTION2(powr, floating, T(__builtin_powf(a, b)))
HOST_FUNCTION2(fmod, floating, T(__builtin_fmodf(a, b)))
HOST_FUNCTION2(atan2, floating, T(__builtin_atan2f(a, b)))
HOST_FUNCTION2(copysign, floating, T(__builtin_copysignf(a, b)))
HOST_FUNCTION2(step, floating, T(static_cast<float>(b) < static_cast<float>(a) ? 0.0f : 1.0f))
HOST_FUNCTION3(fma, floating, T(__builtin_fmaf(a, b, c)))
HOST_FUNCTION3(mix, floating, T(static_cast<float>(a) + (static_cast<float>(b) - static_cast<float>(a)) * static_cast<float>(c)))
HOST_FUNCTION1(popcount, integer, T(__builtin_popcountll(std::make_unsigned_t<T>(a))))
HOST_FUNCTION1(clz, integer, T(a == 0 ? 8 * sizeof(T) : __builtin_clzll(std::make_unsigned_t<T>(a)) - (64 - 8 * sizeof(T))))
HOST_FUNCTION1(ctz, integer, T(a == 0 ? 8 * sizeof(T) : __builtin_ctzll(std::make_unsigned_t<T>(a))))

// `chosen` where the condition holds.
template <typename A, typename B, typename V = host::one_type<true, A, B>>
inline V select(const A& otherwise, const B& chosen, bool condition) {
  return condition ? host::valued<V>(chosen) : host::valued<V>(otherwise);
}
template <
    typename A, typename B, typename V = host::one_type<true, A, B>, int N = host::as_vector<V>::count>
inline V select(const A& otherwise, const B& chosen, vec<bool, N> condition) {
  const V no = host::valued<V>(otherwise), yes = host::valued<V>(chosen);
  V result;
  for (int i = 0; i < N; ++i) result[i] = condition[i] ? yes[i] : no[i];
  return result;
}

template <int N>
inline bool all(vec<bool, N> lanes) {
  bool found = true;
  for (int i = 0; i < N; ++i) found = found && lanes[i];
  return found;
}
template <int N>
inline bool any(vec<bool, N> lanes) {
  bool found = false;
  for (int i = 0; i < N; ++i) found = found || lanes[i];
  return found;
}
template <
    typename A, typename B, typename V = host::floating<A, B>, typename = std::enable_if_t<host::is_vector_v<V>>>
inline host::lane_t<V> dot(const A& first, const B& second) {
  using T = host::lane_t<V>;
  const V product = host::valued<V>(first) * host::valued<V>(second);
  T sum = product[0];
  for (int i = 1; i < host::as_vector<V>::count; ++i) sum = T(sum + product[i]);
  return sum;
}
template <typename A>
inline auto length_squared(const A& value) -> decltype(dot(value, value)) { return dot(value, value); }
template <typename A>
inline auto length(const A& value) -> decltype(dot(value, value)) { return sqrt(dot(value, value)); }

// Metal's two accuracies. The host has one: that of its own library.
#define HOST_ACCURACY(name)                                                                    \
  namespace name {                                                                             \
  using metal::acos; using metal::asin; using metal::atan; using metal::atan2; using metal::ceil; \
  using metal::clamp; using metal::cos; using metal::cosh; using metal::exp; using metal::exp10; \
  using metal::exp2; using metal::fabs; using metal::floor; using metal::fma; using metal::fmax; \
  using metal::fmin; using metal::fmod; using metal::fract; using metal::isfinite;             \
  using metal::isinf; using metal::isnan; using metal::log; using metal::log10; using metal::log2; \
  using metal::max; using metal::min; using metal::mix; using metal::pow; using metal::powr;   \
  using metal::rint; using metal::round; using metal::rsqrt; using metal::sin; using metal::sinh; \
  using metal::sqrt; using metal::tan; using metal::tanh; using metal::trunc;                  \
  }
HOST_ACCURACY(fast)
HOST_ACCURACY(precise)

} // namespace metal
