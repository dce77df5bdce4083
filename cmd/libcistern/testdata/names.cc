// Functions of C++ on a stack have the names that people gave them.
#include "check.h"

#include <string>
#include <vector>

namespace models {
template <class T>
struct Loader {
  __attribute__((noinline)) void *load(const std::vector<T> &shape) {
    void *p = cistern_malloc(shape.size() * MIB, 0, nullptr);
    __asm__ volatile("" ::: "memory");
    return p;
  }
};
}  // namespace models

int main() {
  models::Loader<float> loader;
  CHECK(loader.load(std::vector<float>(3)) != nullptr);
  cistern_stack_use u;
  size_t n;
  OK(cistern_stack_usage(0, &u, 1, &n));
  CHECK(n == 1);
  std::string text(4096, 0);
  OK(cistern_stack_text(u.stack, &text[0], text.size()));
  CHECK(text.find("models::Loader<float>::load(std::vector<float, std::allocator<float> > const&) /") == 0);
  puts("ok");
  return 0;
}
