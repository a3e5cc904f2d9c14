// Pointers that check every access, with the address space in their type.
#pragma once

#include <cstdint>
#include <type_traits>

#include "report.h"

namespace host {

struct device_space {};
struct constant_space {};
struct threadgroup_space {};

// Memory that the runtime keeps: an input, an output or a threadgroup array.
struct Buffer;

// Offsets are bytes from element 0. A read that is not allowed gives garbage, a write nothing.
void read_memory(
    Buffer* buffer, int64_t offset, void* to, int64_t size, int64_t alignment, bool atomic, Site site);
void write_memory(
    Buffer* buffer, int64_t offset, const void* from, int64_t size, int64_t alignment, bool atomic, Site site);

template <typename T>
inline T load(Buffer* buffer, int64_t offset, Site site, bool atomic = false) {
  T value;
  read_memory(buffer, offset, &value, sizeof(T), alignof(T), atomic, site);
  return value;
}

template <typename T>
inline void store(Buffer* buffer, int64_t offset, const T& value, Site site, bool atomic = false) {
  write_memory(buffer, offset, &value, sizeof(T), alignof(T), atomic, site);
}

// An index that knows the line it was written on.
struct Index {
  int64_t value;
  Site site;
  template <typename I, typename = std::enable_if_t<std::is_integral<I>::value>>
  Index(I index, const char* file = __builtin_FILE(), int line = __builtin_LINE())
      : value(static_cast<int64_t>(index)), site{file, line} {}
};

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
class Element {
 public:
  Element(Buffer* buffer, int64_t offset, Site site)
      : buffer_(buffer), offset_(offset), site_(site) {}
  operator T() const { return load<T>(buffer_, offset_, site_); }
  // A cast in the kernel's text, such as float(tile[i]) of a half.
  template <
      typename U,
      typename = std::enable_if_t<std::is_same<U, float>::value && !std::is_arithmetic<T>::value>>
  explicit operator U() const { return static_cast<U>(static_cast<T>(*this)); }
  const Element& operator=(T value) const {
    store<T>(buffer_, offset_, value, site_);
    return *this;
  }
  const Element& operator=(const Element& other) const { return *this = static_cast<T>(other); }
  pointer<S, T> operator&() const { return pointer<S, T>(buffer_, offset_); }
#define HOST_COMPOUND(op)                                                                     \
  template <typename V>                                                                       \
  const Element& operator op##=(V value) const {                                       \
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

// What a template that takes a value by its type should make of an argument.
template <typename T>
struct plain {
  using type = T;
};
template <typename S, typename T>
struct plain<Element<S, T>> {
  using type = T;
};
template <typename T>
using plain_t = typename plain<T>::type;

} // namespace host
