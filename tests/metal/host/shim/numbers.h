// half and bfloat in software, and the short vectors: the arithmetic of Metal's types.
//
// A result is computed in float and rounded once to nearest, ties to even. float carries more than
// twice the digits of both types, so that + - * / and sqrt come out as if computed exactly. Only
// the conversions to a wider type are implicit: a kernel must say where it narrows.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

namespace metal {

template <typename To, typename From>
inline To as_type(From from) {
  static_assert(sizeof(To) == sizeof(From), "as_type needs two types of one size");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

inline uint16_t half_bits(float value) {
  const uint32_t bits = as_type<uint32_t>(value);
  const uint16_t sign = (bits >> 16) & 0x8000;
  const uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) {
    return sign | 0x7e00;
  }
  if (magnitude >= 0x477ff000) { // rounds to 65536 or more
    return sign | 0x7c00;
  }
  if (magnitude < 0x38800000) { // below 2^-14: a multiple of 2^-24
    // Adding 0.5 leaves the multiples of 2^-24 as the last bits of the sum, rounded as all sums are.
    const float sum = as_type<float>(magnitude) + 0.5f;
    return sign | static_cast<uint16_t>(as_type<uint32_t>(sum) - 0x3f000000);
  }
  const uint32_t odd = (magnitude >> 13) & 1;
  return sign | static_cast<uint16_t>((magnitude - 0x38000000 + 0x0fff + odd) >> 13);
}

inline float half_value(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16;
  const uint32_t exponent = (bits >> 10) & 0x1f;
  const uint32_t fraction = bits & 0x3ff;
  if (exponent == 31) {
    return as_type<float>(sign | 0x7f800000 | (fraction << 13));
  }
  if (exponent == 0) {
    const float magnitude = static_cast<float>(fraction) * 0x1p-24f;
    return as_type<float>(sign | as_type<uint32_t>(magnitude));
  }
  return as_type<float>(sign | ((exponent + 112) << 23) | (fraction << 13));
}

inline uint16_t bfloat_bits(float value) {
  const uint32_t bits = as_type<uint32_t>(value);
  if ((bits & 0x7fffffff) > 0x7f800000) {
    return 0x7fc0;
  }
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline float bfloat_value(uint16_t bits) {
  return as_type<float>(static_cast<uint32_t>(bits) << 16);
}

template <uint16_t (*Narrow)(float), float (*Widen)(uint16_t)>
struct Float16 {
  uint16_t bits;
  Float16() = default;
  template <typename N, typename = std::enable_if_t<std::is_arithmetic<N>::value>>
  explicit Float16(N value) : bits(Narrow(static_cast<float>(value))) {}
  template <uint16_t (*N)(float), float (*W)(uint16_t)>
  explicit Float16(Float16<N, W> other) : bits(Narrow(static_cast<float>(other))) {}
  operator float() const {
    return Widen(bits);
  }
};

using half = Float16<half_bits, half_value>;
using bfloat = Float16<bfloat_bits, bfloat_value>;
using float16_t = half;
using bfloat16_t = bfloat;

#define HOST_NARROW_OPERATOR(type, op)                                      \
  inline type operator op(type left, type right) {                          \
    return type(static_cast<float>(left) op static_cast<float>(right));     \
  }                                                                         \
  template <typename I, typename = std::enable_if_t<std::is_integral<I>::value>> \
  inline type operator op(type left, I right) {                             \
    return left op type(right);                                             \
  }                                                                         \
  template <typename I, typename = std::enable_if_t<std::is_integral<I>::value>> \
  inline type operator op(I left, type right) {                             \
    return type(left) op right;                                             \
  }                                                                         \
  inline type& operator op##=(type& left, type right) {                     \
    return left = left op right;                                            \
  }
#define HOST_NARROW_OPERATORS(type) \
  HOST_NARROW_OPERATOR(type, +)     \
  HOST_NARROW_OPERATOR(type, -)     \
  HOST_NARROW_OPERATOR(type, *)     \
  HOST_NARROW_OPERATOR(type, /)     \
  inline type operator-(type value) { \
    return type(-static_cast<float>(value)); \
  }
HOST_NARROW_OPERATORS(half)
HOST_NARROW_OPERATORS(bfloat)

// vec<T, N>: as aligned as Metal's (three lanes take the room of four).
template <typename T, int N>
struct alignas(sizeof(T) * (N == 3 ? 4 : N)) vec;

template <typename T>
struct alignas(2 * sizeof(T)) vec<T, 2> {
  T x, y;
  vec() = default;
  explicit vec(T all) : x(all), y(all) {}
  vec(T x_, T y_) : x(x_), y(y_) {}
  T& operator[](int lane) { return (&x)[lane]; }
  const T& operator[](int lane) const { return (&x)[lane]; }
};

template <typename T>
struct alignas(4 * sizeof(T)) vec<T, 3> {
  T x, y, z;
  vec() = default;
  explicit vec(T all) : x(all), y(all), z(all) {}
  vec(T x_, T y_, T z_) : x(x_), y(y_), z(z_) {}
  T& operator[](int lane) { return (&x)[lane]; }
  const T& operator[](int lane) const { return (&x)[lane]; }
};

template <typename T>
struct alignas(4 * sizeof(T)) vec<T, 4> {
  T x, y, z, w;
  vec() = default;
  explicit vec(T all) : x(all), y(all), z(all), w(all) {}
  vec(T x_, T y_, T z_, T w_) : x(x_), y(y_), z(z_), w(w_) {}
  T& operator[](int lane) { return (&x)[lane]; }
  const T& operator[](int lane) const { return (&x)[lane]; }
};

#define HOST_VECTOR_OPERATOR(op)                                   \
  template <typename T, int N>                                     \
  inline vec<T, N> operator op(vec<T, N> left, vec<T, N> right) {  \
    for (int i = 0; i < N; ++i) left[i] = left[i] op right[i];     \
    return left;                                                   \
  }                                                                \
  template <typename T, int N>                                     \
  inline vec<T, N> operator op(vec<T, N> left, std::common_type_t<T> right) { \
    for (int i = 0; i < N; ++i) left[i] = left[i] op right;        \
    return left;                                                   \
  }
HOST_VECTOR_OPERATOR(+)
HOST_VECTOR_OPERATOR(-)
HOST_VECTOR_OPERATOR(*)
HOST_VECTOR_OPERATOR(/)

using uint = unsigned int;
using ushort = unsigned short;
using uchar = unsigned char;
using ulong = unsigned long;
using uint2 = vec<uint, 2>;
using uint3 = vec<uint, 3>;
using uint4 = vec<uint, 4>;
using int2 = vec<int, 2>;
using int3 = vec<int, 3>;
using int4 = vec<int, 4>;
using float2 = vec<float, 2>;
using float3 = vec<float, 3>;
using float4 = vec<float, 4>;
using half2 = vec<half, 2>;
using half4 = vec<half, 4>;
using bfloat2 = vec<bfloat, 2>;
using bfloat4 = vec<bfloat, 4>;

template <typename T>
struct numeric_limits : std::numeric_limits<T> {};
template <>
struct numeric_limits<half> {
  static half from(uint16_t bits) { half value; value.bits = bits; return value; }
  static half max() { return from(0x7bff); }
  static half lowest() { return from(0xfbff); }
  static half infinity() { return from(0x7c00); }
  static half quiet_NaN() { return from(0x7e00); }
};
template <>
struct numeric_limits<bfloat> {
  static bfloat from(uint16_t bits) { bfloat value; value.bits = bits; return value; }
  static bfloat max() { return from(0x7f7f); }
  static bfloat lowest() { return from(0xff7f); }
  static bfloat infinity() { return from(0x7f80); }
  static bfloat quiet_NaN() { return from(0x7fc0); }
};

} // namespace metal
