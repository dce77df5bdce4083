// plain.cpp: the plain shim, called as PyTorch's pluggable allocator calls it. It is started with the shim and libcistern.so.
#include <cistern.h>
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <utility>

namespace {

using PoolId = std::pair<unsigned long long, unsigned long long>;
using Filter = std::function<bool(void*)>;
constexpr size_t MiB = 1 << 20, GiB = 1 << 30;
int failures;

#define CHECK(x)                                                  \
  do {                                                            \
    if (!(x)) {                                                   \
      failures++;                                                 \
      printf("%s:%d: not so: %s\n", __FILE__, __LINE__, #x);      \
    }                                                             \
  } while (0)

template <class F>
std::function<F> function(void* library, const char* name) {
  void* f = dlsym(library, name);
  if (f == nullptr) {
    printf("no %s\n", name);
    exit(1);
  }
  return reinterpret_cast<F*>(f);
}

template <class F>
bool fails(F f, const char* part) {
  try {
    f();
  } catch (const std::runtime_error& e) {
    return strstr(e.what(), part) != nullptr;
  }
  return false;
}

template <class F>
bool runs_out(F f) {
  try {
    f();
  } catch (const std::runtime_error& e) {
    return strstr(e.what(), "CUDA out of memory.") != nullptr && strstr(e.what(), "tried to allocate") != nullptr;
  }
  return false;
}

} // namespace

int main(int, char** argv) {
  void* shim = dlopen(argv[1], RTLD_NOW);
  if (shim == nullptr) {
    puts(dlerror());
    return 1;
  }
  function<void(const char*, const char*)>(shim, "cistern_plain_configure")(argv[2], nullptr);
  const auto take = function<void*(size_t, int, void*)>(shim, "cistern_plain_malloc");
  const auto give = function<void(void*, size_t, int, void*)>(shim, "cistern_plain_free");
  const auto base = function<void*(void*, size_t*)>(shim, "cistern_plain_base");
  const auto record = function<void(void*, void*)>(shim, "cistern_plain_record_stream");
  const auto fraction = function<void(double, int)>(shim, "cistern_plain_memory_fraction");
  const auto reset = function<void()>(shim, "cistern_plain_reset");
  const auto begin = function<void(int, PoolId, Filter)>(shim, "cistern_plain_begin_pool");
  const auto end = function<void(int, PoolId)>(shim, "cistern_plain_end_pool");
  const auto release = function<void(int, PoolId)>(shim, "cistern_plain_release_pool");
  reset();
  give(reinterpret_cast<void*>(64), 1, 0, nullptr); // before the library is loaded there is nothing to free
  function<void(int)>(shim, "cistern_plain_init")(1);
  void* library = dlopen(argv[2], RTLD_NOW);
  void* driver = dlopen(argv[3], RTLD_NOW); // before the shim asks for it
  const auto find = function<int(void*, cistern_block*)>(library, "cistern_find");
  const auto stats = function<int(int, cistern_stats*)>(library, "cistern_get_stats");

  CHECK(take(0, 0, nullptr) == nullptr);
  void* p = take(1000, 0, nullptr);
  size_t n = 0;
  cistern_block b;
  CHECK(p != nullptr && find(p, &b) == CISTERN_OK && b.size == 1024);
  CHECK(fails([&] { base(p, &n); }, "lies in mapped chunks"));
  record(p, reinterpret_cast<void*>(0x5550));
  record(nullptr, nullptr);
  give(p, 1000, 0, nullptr);
  give(nullptr, 0, 0, nullptr);
  CHECK(runs_out([&] { take(100 * GiB, 0, nullptr); }));
  reset();
  cistern_stats s = {};
  s.size = sizeof s;
  CHECK(stats(0, &s) == CISTERN_OK && s.reserved.all.current == 0);
  fraction(0.25, 0);
  CHECK(runs_out([&] { take(3 * GiB, 0, nullptr); }));
  fraction(1, 0);
  give(take(3 * GiB, 0, nullptr), 3 * GiB, 0, nullptr);

  const PoolId id{3, 0};
  void* const stream = reinterpret_cast<void*>(0x7770);
  for (int round = 0; round < 2; round++) { // the name may come again
    begin(0, id, [=](void* s) { return s == stream; });
    void *in = take(MiB, 0, stream), *out = take(MiB, 0, nullptr);
    end(0, id);
    void* later = take(MiB, 0, stream);
    CHECK(find(in, &b) == CISTERN_OK && b.pool[0] == 3 && b.pool[1] == 0);
    CHECK(find(out, &b) == CISTERN_OK && b.pool[0] == 0);
    CHECK(find(later, &b) == CISTERN_OK && b.pool[0] == 0);
    give(in, MiB, 0, stream);
    give(out, MiB, 0, nullptr);
    release(0, id);
    give(later, MiB, 0, stream);
    CHECK(find(in, &b) == CISTERN_INVALID);
  }
  // Captures. The stand-in for the driver says which streams are captured.
  const auto capture = function<void(void*, int)>(driver, "test_capture");
  const auto to_be_captured = function<void(void*)>(shim, "cistern_plain_to_be_captured");
  const auto announce = function<int(int, const uint64_t*, void*)>(library, "cistern_capture_begin");
  const auto over = function<int(int, void*)>(library, "cistern_capture_end");
  const PoolId graphs{4, 0};
  const uint64_t name[2] = {4, 0};
  void* const other = reinterpret_cast<void*>(0x8880);
  bool under_way = false;
  const auto filter = [&](void* s) { return under_way && (s == stream || s == other); };
  const auto announced = [&](void* s) { // it is refused a second time
    if (announce(0, name, s) != CISTERN_OK)
      return true;
    CHECK(over(0, s) == CISTERN_OK);
    return false;
  };
  for (int how = 0; how < 3; how++) { // told before it begins; not told; a capture that never began
    to_be_captured(how != 1 ? stream : nullptr);
    begin(0, graphs, filter);
    to_be_captured(nullptr);
    CHECK(announced(stream) == (how != 1));
    give(take(MiB, 0, other), MiB, 0, other); // another thread goes on meanwhile
    CHECK(announced(stream) == (how != 1));
    if (how == 2) {
      void* p = take(MiB, 0, stream);
      CHECK(find(p, &b) == CISTERN_OK && b.pool[0] == 0 && !announced(stream));
      give(p, MiB, 0, stream);
      end(0, graphs);
      continue;
    }
    capture(stream, 1);
    under_way = true;
    void* in = take(MiB, 0, stream);
    CHECK(announced(stream) && !announced(other));
    capture(other, 1); // it joins
    void* joined = take(MiB, 0, other);
    CHECK(announced(other));
    CHECK(find(in, &b) == CISTERN_OK && b.pool[0] == 4);
    CHECK(find(joined, &b) == CISTERN_OK && b.pool[0] == 4);
    give(in, MiB, 0, stream);
    capture(stream, 0);
    capture(other, 0);
    end(0, graphs);
    under_way = false;
    CHECK(!announced(stream) && !announced(other));
    give(joined, MiB, 0, other);
  }
  release(0, graphs);
  printf("%d failures\n", failures);
  return failures != 0;
}
