// stacks.cpp: where the library sees PyTorch's requests come from: the caller of PyTorch stands right behind the adapter.
#include "check.h"

#include <cistern.h>

#include <string>
#include <vector>

namespace {

void* library;

template <class F>
F* of_library(const char* name, F*) {
  void* f = dlsym(library, name);
  if (f == nullptr) {
    printf("the library has no %s\n", name);
    exit(1);
  }
  return reinterpret_cast<F*>(f);
}
#define LIB(name) of_library(#name, static_cast<decltype(::name)*>(nullptr))

std::vector<std::string> lines(const std::string& text) {
  std::vector<std::string> found;
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find('\n', at), text.size());
    found.push_back(text.substr(at, end - at));
    at = end + 1;
  }
  return found;
}

// The frames of the stack whose live requests come to so many bytes, innermost first.
std::vector<std::string> frames_of(uint64_t bytes) {
  cistern_stack_use use[64];
  size_t n = 0;
  CHECK(LIB(cistern_stack_usage)(0, use, 64, &n) == CISTERN_OK);
  for (size_t i = 0; i < std::min<size_t>(n, 64); i++) {
    static char text[1 << 16];
    if (use[i].requested == bytes && use[i].stack != 0 && LIB(cistern_stack_text)(use[i].stack, text, sizeof text) == CISTERN_OK)
      return lines(text);
  }
  printf("no stack has %zu bytes\n", static_cast<size_t>(bytes));
  failures++;
  return {};
}

int find(const std::vector<std::string>& frames, const char* part) {
  for (size_t i = 0; i < frames.size(); i++)
    if (frames[i].find(part) != std::string::npos)
      return static_cast<int>(i);
  return -1;
}

// Whether the function that asked is found, and before it only frames of the adapter's.
void sensible(uint64_t bytes, const char* who) {
  const auto frames = frames_of(bytes);
  const int at = find(frames, who);
  CHECK(at >= 0 && at < 6);
  for (int i = 0; i < at; i++)
    CHECK(frames[i].find("cistern_torch") != std::string::npos || frames[i].find("c10") != std::string::npos);
  CHECK(find(frames, "cistern_alloc") < 0 && find(frames, "cistern_malloc") < 0 && find(frames, "libcistern.so") < 0);
  CHECK(find(frames, "main") > at);
  if (failures)
    for (const auto& f : frames)
      printf("  %s\n", f.c_str());
}

} // namespace

extern "C" {
__attribute__((noinline, visibility("default"))) void* test_asks_raw(size_t n) {
  void* p = cca::raw_alloc(n);
  asm volatile("" : : "r"(p) : "memory");
  return p;
}
__attribute__((noinline, visibility("default"))) void test_asks_tensor(c10::DataPtr* to, size_t n) {
  *to = cca::get()->allocate(n);
  asm volatile("" : : "r"(to) : "memory");
}
__attribute__((noinline, visibility("default"))) void* test_asks_stream(size_t n) {
  void* p = cca::raw_alloc_with_stream(n, some_stream());
  asm volatile("" : : "r"(p) : "memory");
  return p;
}
}

int main(int, char** argv) {
  install(argv);
  cca::init(2);
  library = dlopen(argv[2], RTLD_NOW | RTLD_LOCAL);
  void* before = test_asks_raw(512); // which starts the library, without stacks
  CHECK(LIB(cistern_stacks)(CISTERN_STACKS_NATIVE, 0) == CISTERN_OK);
  void* p = test_asks_raw(3 * MiB + 1);
  c10::DataPtr d;
  test_asks_tensor(&d, 5 * MiB + 1);
  void* q = test_asks_stream(7 * MiB + 1);
  sensible(3 * MiB + 1, "test_asks_raw");
  sensible(5 * MiB + 1, "test_asks_tensor");
  sensible(7 * MiB + 1, "test_asks_stream");
  // PyTorch's own history and pools take other ways through the adapter.
  cca::recordHistory(true, [] { return std::make_shared<c10::GatheredContext>(); }, 100, cca::RecordContext::ALL, true, {});
  void* r = test_asks_raw(9 * MiB + 1);
  sensible(9 * MiB + 1, "test_asks_raw");
  const Pool pool{0, 9};
  cca::beginAllocateToPool(0, pool, this_thread());
  void* s = test_asks_raw(11 * MiB + 1);
  cca::endAllocateToPool(0, pool);
  sensible(11 * MiB + 1, "test_asks_raw");
  OUT_OF_MEMORY(test_asks_raw(100 * GiB));
  for (void* each : {before, p, q, r, s})
    cca::raw_delete(each);
  return done();
}
