// Where something was written in the kernel, and how a finding is told to the runtime.
#pragma once

#include <cstdint>
#include <type_traits>

namespace host {

// The default arguments take the caller's place, which the #line directives of the generated unit
// make a line of the kernel's own file.
struct Site {
  const char* file;
  int line;
  static Site here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    return {file, line};
  }
};

// An index that knows the line it was written on.
struct Index {
  int64_t value;
  Site site;
  template <typename I, typename = std::enable_if_t<std::is_integral<I>::value>>
  Index(I index, const char* file = __builtin_FILE(), int line = __builtin_LINE())
      : value(static_cast<int64_t>(index)), site{file, line} {}
  Index(int64_t index, Site at) : value(index), site(at) {}
};

// Each kind is kept once for each line, with the number of times it was seen.
__attribute__((format(printf, 3, 4))) void
report(const char* kind, Site site, const char* format, ...);

} // namespace host
