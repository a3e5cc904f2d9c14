// Findings of one run.
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "state.h"

namespace host {

struct Finding {
  std::string kind;
  std::string file;
  int line;
  std::string message;
  int64_t count;
};

static std::vector<Finding>& findings() {
  static std::vector<Finding> list;
  return list;
}

void report(const char* kind, Site site, const char* format, ...) {
  for (Finding& known : findings()) {
    if (known.line == site.line && known.kind == kind && known.file == site.file) {
      ++known.count;
      return;
    }
  }
  char text[512];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  findings().push_back({kind, site.file, site.line, text, 1});
}

bool has_findings() {
  return !findings().empty();
}

// One finding a line, tab-separated, on standard output.
void print_findings() {
  for (const Finding& each : findings()) {
    std::printf(
        "finding\t%s\t%s\t%d\t%lld\t%s\n",
        each.kind.c_str(),
        each.file.c_str(),
        each.line,
        static_cast<long long>(each.count),
        each.message.c_str());
  }
  std::fflush(stdout);
}

[[noreturn]] void stop() {
  print_findings();
  std::printf("stopped\n");
  std::fflush(stdout);
  std::_Exit(0);
}

} // namespace host
