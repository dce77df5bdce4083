// threads.cpp: four threads allocate and free at random, in and out of pools and captures, while history is switched on and off and
// snapshots are taken: no two live blocks overlap, and nothing is left.
#include "check.h"

#include <chrono>
#include <map>
#include <random>

namespace {

struct Stack : c10::GatheredContext {};
std::shared_ptr<c10::GatheredContext> gather() { return std::make_shared<Stack>(); }

std::mutex mutex;
std::map<uintptr_t, size_t> live;
std::atomic<unsigned long long> next_pool{1};
std::atomic<long> operations{0}, ooms{0};

void add(void* p, size_t n) {
  const auto at = reinterpret_cast<uintptr_t>(p);
  std::lock_guard<std::mutex> lock(mutex);
  auto after = live.lower_bound(at);
  CHECK(after == live.end() || at + n <= after->first);
  CHECK(after == live.begin() || std::prev(after)->first + std::prev(after)->second <= at);
  live[at] = n;
}

void drop(void* p) {
  {
    std::lock_guard<std::mutex> lock(mutex);
    live.erase(reinterpret_cast<uintptr_t>(p));
  }
  cca::raw_delete(p);
}

struct Worker {
  std::mt19937 random;
  std::vector<void*> mine;
  std::vector<Pool> scopes;
  const bool first;

  explicit Worker(unsigned seed) : random(seed), first(seed == 0) {}

  void open() {
    const Pool id{0, next_pool++};
    cca::createOrIncrefPool(0, id);
    if (random() % 2)
      cca::setNoSplit(0, id);
    cca::setUseOnOOM(0, id, random() % 2);
    cca::beginAllocateToPool(0, id, this_thread());
    scopes.push_back(id);
  }
  void close() {
    const Pool id = scopes.back();
    scopes.pop_back();
    cca::endAllocateToPool(0, id);
    cca::releasePool(0, id);
    cca::setUseOnOOM(0, id, false);
    cca::releasePool(0, id);
    cca::emptyCache(id);
  }
  // A graph in a pool of its own or in that of an open scope. What its capture allocates dies with it.
  void capture() {
    const cudaStream_t stream = c10::cuda::getCurrentCUDAStream().stream();
    const Pool id = scopes.empty() || random() % 2 ? Pool{next_pool++, 0} : scopes[random() % scopes.size()];
    cca::beginAllocateToPool(0, id, [stream](cudaStream_t s) { return s == stream && captured(s); });
    test_capture(stream, 1);
    std::vector<void*> inside;
    try {
      for (unsigned n = random() % 4; n > 0; n--) {
        const size_t size = 1 + random() % (4 * MiB);
        inside.push_back(cca::raw_alloc(size));
        add(inside.back(), size);
      }
    } catch (const c10::OutOfMemoryError&) {
      ooms++;
    }
    for (void* p : inside)
      drop(p);
    test_capture(stream, 0);
    cca::endAllocateToPool(0, id);
    cca::releasePool(0, id);
  }
  void step() {
    const unsigned k = random() % 1000;
    operations++;
    if (k < 450) {
      const size_t n = 1 + (random() % 3 ? random() % 5000 : random() % (60 * MiB));
      mine.push_back(cca::raw_alloc(n));
      add(mine.back(), n);
    } else if (k < 930) {
      if (!mine.empty()) {
        std::swap(mine[random() % mine.size()], mine.back());
        drop(mine.back());
        mine.pop_back();
      }
    } else if (k < 950) {
      if (scopes.size() < 3)
        open();
    } else if (k < 970) {
      if (!scopes.empty())
        close();
    } else if (k < 972) {
      cca::emptyCache();
    } else if (k < 975) {
      for (const auto& s : cca::snapshot().segments) {
        size_t n = 0;
        for (const auto& b : s.blocks)
          n += b.size;
        CHECK(n == s.total_size);
      }
    } else if (k < 977) {
      if (first)
        cca::recordHistory(random() % 2, gather, 1000, cca::RecordContext::ALL, random() % 2, {});
    } else if (k < 980) {
      capture();
    } else {
      c10::DataPtr d = cca::get()->allocate(1 + random() % MiB);
      cca::recordStream(d, some_stream());
    }
  }
  void run(std::chrono::steady_clock::time_point end) {
    c10::cuda::CUDAStreamGuard guard(some_stream());
    while (std::chrono::steady_clock::now() < end || operations <= 1000) { // few things take a busy machine long
      try {
        step();
      } catch (const c10::OutOfMemoryError&) {
        ooms++;
        for (void* p : mine)
          drop(p);
        mine.clear();
      }
    }
    for (void* p : mine)
      drop(p);
    while (!scopes.empty())
      close();
  }
};

} // namespace

int main(int, char** argv) {
  install(argv);
  cca::init(2);
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(4);
  std::vector<std::thread> threads;
  for (unsigned i = 0; i < 4; i++)
    threads.emplace_back([=] { Worker(i).run(end); });
  for (std::thread& t : threads)
    t.join();
  const auto s = stats();
  CHECK(s.allocation[0].current == 0 && s.allocated_bytes[0].current == 0 && s.requested_bytes[0].current == 0);
  cca::recordHistory(false, nullptr, 1, cca::RecordContext::NEVER, true, {});
  cca::emptyCache();
  CHECK(reserved() == 0);
  CHECK(operations > 1000);
  printf("%ld operations, %ld out of memory\n", operations.load(), ooms.load());
  return done();
}
