// half and bfloat in software, and the limits of Metal's numbers.
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

using uint = unsigned int;
using ushort = unsigned short;
using uchar = unsigned char;
using ulong = unsigned long;

template <typename T>
struct numeric_limits : std::numeric_limits<T> {};

// The same of a 16-bit type, by its bits.
template <
    typename T,
    uint16_t Least,
    uint16_t Lowest,
    uint16_t Most,
    uint16_t Epsilon,
    uint16_t Infinite,
    uint16_t NotANumber,
    int Digits>
struct narrow_limits {
  static constexpr bool is_specialized = true;
  static constexpr bool is_signed = true;
  static constexpr bool is_integer = false;
  static constexpr bool has_infinity = true;
  static constexpr int digits = Digits;
  static T from(uint16_t bits) { return as_type<T>(bits); }
  static T min() { return from(Least); }
  static T lowest() { return from(Lowest); }
  static T max() { return from(Most); }
  static T epsilon() { return from(Epsilon); }
  static T infinity() { return from(Infinite); }
  static T quiet_NaN() { return from(NotANumber); }
};
template <>
struct numeric_limits<half>
    : narrow_limits<half, 0x0400, 0xfbff, 0x7bff, 0x1400, 0x7c00, 0x7e00, 11> {};
template <>
struct numeric_limits<bfloat>
    : narrow_limits<bfloat, 0x0080, 0xff7f, 0x7f7f, 0x3c00, 0x7f80, 0x7fc0, 8> {};

} // namespace metal

namespace host {

template <typename T>
constexpr bool is_floating_v = std::is_same<T, float>::value || std::is_same<T, metal::half>::value ||
    std::is_same<T, metal::bfloat>::value;
template <typename T>
constexpr bool is_integer_v = std::is_integral<T>::value && !std::is_same<T, bool>::value;
template <typename T>
constexpr bool is_scalar_v = std::is_integral<T>::value || is_floating_v<T>;

// What a template that takes a value by its type should make of an argument.
template <typename T>
struct plain {
  using type = std::remove_cv_t<T>;
};
template <typename T>
using plain_t = typename plain<T>::type;

} // namespace host
