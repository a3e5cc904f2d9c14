// Pointers that check every access, with the address space in their type.
#pragma once

#include <cstdint>
#include <type_traits>

#include "report.h"
#include "vectors.h"

namespace host {

struct device_space {};
struct constant_space {};
struct threadgroup_space {};

// Memory that the runtime keeps: an input, an output or a threadgroup array.
struct Buffer;

enum class AtomicOperation : uint8_t {
  none, load, store, exchange, add, min, max, bit_or, bit_and, bit_xor
};

// How an access is atomic, if it is, and what it stores.
struct Atomic {
  AtomicOperation operation = AtomicOperation::none;
  uint32_t value = 0;
};

// Offsets are bytes from element 0. A read that is not allowed gives garbage, a write nothing.
void read_memory(
    Buffer* buffer, int64_t offset, void* to, int64_t size, int64_t alignment, Atomic atomic, Site site);
void write_memory(
    Buffer* buffer, int64_t offset, const void* from, int64_t size, int64_t alignment, Atomic atomic, Site site);

template <typename T>
inline T load(Buffer* buffer, int64_t offset, Site site, Atomic atomic = {}) {
  T value;
  read_memory(buffer, offset, &value, sizeof(T), alignof(T), atomic, site);
  return value;
}

template <typename T>
inline void store(Buffer* buffer, int64_t offset, const T& value, Site site, Atomic atomic = {}) {
  write_memory(buffer, offset, &value, sizeof(T), alignof(T), atomic, site);
}

template <typename P>
struct Sited {
  P pointer;
  Site site;
  Sited(P pointer_, const char* file = __builtin_FILE(), int line = __builtin_LINE())
      : pointer(pointer_), site{file, line} {}
};

template <typename S, typename T>
class pointer;

// An element that may be read or written: what indexing a pointer to non-const gives.
template <typename S, typename T>
class Cell {
 public:
  Cell(Buffer* buffer, int64_t offset, Site site)
      : buffer_(buffer), offset_(offset), site_(site) {}
  operator T() const { return load<T>(buffer_, offset_, site_); }
  // A cast in the kernel's text, such as float(tile[i]) of a half.
  template <
      typename U,
      typename = std::enable_if_t<std::is_same<U, float>::value && !std::is_arithmetic<T>::value>>
  explicit operator U() const { return static_cast<U>(static_cast<T>(*this)); }
  const Cell& operator=(T value) const {
    store<T>(buffer_, offset_, value, site_);
    return *this;
  }
  const Cell& operator=(const Cell& other) const { return *this = static_cast<T>(other); }
  pointer<S, T> operator&() const { return pointer<S, T>(buffer_, offset_); }
#define HOST_COMPOUND(op)                                                                     \
  template <typename V>                                                                       \
  const Cell& operator op##=(V value) const {                                                 \
    return *this = static_cast<T>(static_cast<T>(*this) op value);                            \
  }
  HOST_COMPOUND(+)
  HOST_COMPOUND(-)
  HOST_COMPOUND(*)
  HOST_COMPOUND(/)
  HOST_COMPOUND(|)
  HOST_COMPOUND(&)
  HOST_COMPOUND(^)
#undef HOST_COMPOUND

 private:
  Buffer* buffer_;
  int64_t offset_;
  Site site_;
};

template <typename S, typename T>
class Element : public Cell<S, T> {
 public:
  using Cell<S, T>::Cell;
  using Cell<S, T>::operator=;
  const Element& operator=(const Element& other) const {
    *this = static_cast<T>(other);
    return *this;
  }
};

// Of a vector in memory each component is an element of its own.
#define HOST_LANE(name, lane) name(buffer, offset + int64_t(lane * sizeof(T)), site)
#define HOST_VECTOR_ELEMENT(count, names, ...)                                                \
  template <typename S, typename T>                                                           \
  class Element<S, metal::vec<T, count>> : public Cell<S, metal::vec<T, count>> {             \
   public:                                                                                    \
    using Whole = metal::vec<T, count>;                                                       \
    Element(Buffer* buffer, int64_t offset, Site site)                                        \
        : Cell<S, Whole>(buffer, offset, site), __VA_ARGS__ {}                                \
    using Cell<S, Whole>::operator=;                                                          \
    const Element& operator=(const Element& other) const {                                    \
      *this = static_cast<Whole>(other);                                                      \
      return *this;                                                                           \
    }                                                                                         \
    template <int... Lanes>                                                                   \
    auto picked() const { return static_cast<Whole>(*this).template picked<Lanes...>(); }     \
    template <int... Lanes>                                                                   \
    auto swizzle() const { return static_cast<Whole>(*this).template picked<Lanes...>(); }    \
    Element<S, T> operator[](Index lane) const {                                              \
      return pointer<S, T>(&*this)[metal::checked_lane(lane, count)];                         \
    }                                                                                         \
    Element<S, T> names;                                                                      \
  };
#define HOST_NAMES2 x, y
#define HOST_NAMES3 x, y, z
#define HOST_NAMES4 x, y, z, w
HOST_VECTOR_ELEMENT(2, HOST_NAMES2, HOST_LANE(x, 0), HOST_LANE(y, 1))
HOST_VECTOR_ELEMENT(3, HOST_NAMES3, HOST_LANE(x, 0), HOST_LANE(y, 1), HOST_LANE(z, 2))
HOST_VECTOR_ELEMENT(
    4, HOST_NAMES4, HOST_LANE(x, 0), HOST_LANE(y, 1), HOST_LANE(z, 2), HOST_LANE(w, 3))

template <typename S, typename T>
class pointer {
 public:
  using value_type = std::remove_const_t<T>;
  using element = std::conditional_t<std::is_const<T>::value, value_type, Element<S, T>>;

  pointer() : buffer_(nullptr), offset_(0) {}
  pointer(Buffer* buffer, int64_t offset) : buffer_(buffer), offset_(offset) {}
  // Implicit only where const is added, as for a plain pointer.
  template <typename U, typename = std::enable_if_t<std::is_same<T, const U>::value>>
  pointer(pointer<S, U> other) : buffer_(other.buffer()), offset_(other.offset()) {}
  // A cast may change the element type; it never changes the address space.
  template <
      typename U,
      typename = std::enable_if_t<!std::is_same<T, const U>::value && !std::is_same<T, U>::value>,
      typename = void>
  explicit pointer(pointer<S, U> other) : buffer_(other.buffer()), offset_(other.offset()) {}

  Buffer* buffer() const { return buffer_; }
  int64_t offset() const { return offset_; }

  element operator[](Index index) const {
    return at(offset_ + index.value * int64_t(sizeof(T)), index.site);
  }
  friend element operator*(Sited<pointer> sited) {
    return sited.pointer.at(sited.pointer.offset_, sited.site);
  }
  template <typename I, typename = std::enable_if_t<std::is_integral<I>::value>>
  pointer operator+(I count) const { return pointer(buffer_, offset_ + int64_t(count) * int64_t(sizeof(T))); }
  template <typename I, typename = std::enable_if_t<std::is_integral<I>::value>>
  pointer operator-(I count) const { return pointer(buffer_, offset_ - int64_t(count) * int64_t(sizeof(T))); }
  template <typename I>
  pointer& operator+=(I count) { return *this = *this + count; }
  template <typename I>
  pointer& operator-=(I count) { return *this = *this - count; }
  pointer& operator++() { return *this += 1; }
  int64_t operator-(pointer other) const { return (offset_ - other.offset_) / int64_t(sizeof(T)); }
  bool operator<(pointer other) const { return offset_ < other.offset_; }
  bool operator==(pointer other) const { return offset_ == other.offset_ && buffer_ == other.buffer_; }
  bool operator!=(pointer other) const { return !(*this == other); }

 private:
  element at(int64_t offset, Site site) const {
    return at_(offset, site, std::is_const<T>());
  }
  element at_(int64_t offset, Site site, std::true_type) const {
    return load<value_type>(buffer_, offset, site);
  }
  element at_(int64_t offset, Site site, std::false_type) const {
    return element(buffer_, offset, site);
  }

  Buffer* buffer_;
  int64_t offset_;
};

template <typename S, typename T>
struct plain<Element<S, T>> {
  using type = std::remove_cv_t<T>;
};

} // namespace host
