// cistern.h is good C++, and a C++ program links against the library.
#include "cistern.h"

#include <cstdio>
#include <cstring>

#if CISTERN_VERSION_NUMBER < 400 || CISTERN_VERSION_NUMBER >= 1000000
#error "the version of cistern.h is not a number for #if"
#endif

int main() {
  static_assert(sizeof(cistern_event) % 8 == 0, "an event has no padding at its end that differs between compilers");
  void *p = cistern_malloc(1 << 20, 0, nullptr);
  cistern_stats s{};
  s.size = sizeof s;
  if (p == nullptr || cistern_get_stats(0, &s) != CISTERN_OK || s.allocations.all.current != 1)
    return 1;
  cistern_free(p, 1 << 20, 0, nullptr);
  std::puts(std::strcmp(cistern_version(), CISTERN_VERSION) == 0 ? "ok" : "another version");
}
