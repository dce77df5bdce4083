// A C++ container whose memory is page-locked, so that copies to and from the GPU run at the speed of the link.
//
//     c++ -std=c++17 containers.cpp $(pkg-config --cflags --libs cistern) -o containers && ./containers
//
// Without a GPU: CISTERN_CONF=driver:sim:8GiB ./containers
#include <cistern.h>

#include <cstdio>
#include <memory_resource>
#include <new>
#include <numeric>
#include <vector>

// Any pool of host memory ("pinned", "managed") as a std::pmr::memory_resource. The host touches the memory as soon as it has
// it, so it asks for memory that the GPU is done with.
class pool_resource : public std::pmr::memory_resource {
  cistern_alloc_options with{};
  void *do_allocate(std::size_t bytes, std::size_t align) override {
    void *p = nullptr;
    if (align > 512 || cistern_alloc_with(&p, bytes ? bytes : 1, 0, nullptr, &with) != CISTERN_OK)
      throw std::bad_alloc();
    return p;
  }
  void do_deallocate(void *p, std::size_t, std::size_t) override { cistern_release(p); }
  bool do_is_equal(const memory_resource &other) const noexcept override { return this == &other; }

 public:
  explicit pool_resource(const uint64_t pool[2]) {
    with.size = sizeof with;
    with.flags = CISTERN_ALLOC_HOST_ORDER;
    with.pool[0] = pool[0], with.pool[1] = pool[1];
  }
};

int main() {
  const uint64_t pool[2] = {1, 0};
  cistern_pool_options options{};
  options.size = sizeof options;
  options.upstream = "pinned";
  if (cistern_pool_create(0, pool, &options) != CISTERN_OK) {
    char why[512];
    cistern_last_error(why, sizeof why);
    std::fprintf(stderr, "%s\n", why);
    return 1;
  }
  cistern_pool_stats s{};
  s.size = sizeof s;
  {
    pool_resource pinned(pool);
    std::pmr::vector<double> v(1 << 20, &pinned);
    std::iota(v.begin(), v.end(), 1.0);
    cistern_pool_get_stats(0, pool, &s);
    std::printf("sum %.0f of %zu numbers in %llu bytes of the pool\n", std::accumulate(v.begin(), v.end(), 0.0), v.size(),
                static_cast<unsigned long long>(s.allocated));
  }
  cistern_pool_get_stats(0, pool, &s);
  std::printf("then %llu bytes are handed out and %llu cached\n", static_cast<unsigned long long>(s.allocated),
              static_cast<unsigned long long>(s.cached));
  return cistern_pool_release(0, pool);
}
