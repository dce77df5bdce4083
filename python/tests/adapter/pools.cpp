// pools.cpp: memory pools, custom allocators, captures and checkpoints.
#include "check.h"

namespace {

size_t allocated_in(Pool id) {
  size_t n = 0;
  for (const auto& s : cca::snapshot(id).segments) {
    CHECK(s.owner_private_pool_id == id && cca::order(s) >= 0);
    n += s.allocated_size;
  }
  return n;
}

size_t held_by(Pool id) {
  size_t n = 0;
  for (const auto& s : cca::snapshot(id).segments)
    n += s.total_size;
  return n;
}

// As torch.cuda.use_mem_pool and the end of a torch.cuda.MemPool do it.
struct Scope {
  Pool id;
  explicit Scope(Pool id, std::function<bool(cudaStream_t)> filter = this_thread()) : id(id) {
    cca::beginAllocateToPool(0, id, std::move(filter));
  }
  ~Scope() {
    cca::endAllocateToPool(0, id);
    cca::releasePool(0, id);
  }
};
void destroy(Pool id) {
  cca::setUseOnOOM(0, id, false);
  cca::releasePool(0, id);
  cca::emptyCache(id);
}

void scopes() {
  const Pool a{0, 1}, b{0, 2};
  cca::createOrIncrefPool(0, a);
  cca::createOrIncrefPool(0, b);
  void *in_a, *in_b, *outside, *again;
  {
    Scope outer(a);
    CHECK(cca::getPoolUseCount(0, a) == 2);
    in_a = cca::raw_alloc(MiB);
    {
      Scope inner(b);
      in_b = cca::raw_alloc(2 * MiB);
      std::thread([&] { outside = cca::raw_alloc(3 * MiB); }).join(); // as a thread of autograd
    }
    again = cca::raw_alloc(4 * MiB);
  }
  CHECK(cca::getPoolUseCount(0, a) == 1);
  CHECK(allocated_in(a) == 5 * MiB && allocated_in(b) == 2 * MiB && stats().allocated_bytes[0].current == 10 * MiB);
  THROWS(c10::Error, "not currently recording", cca::endAllocateToPool(0, a));
  THROWS(c10::Error, "Could not find pool", cca::getPoolUseCount(0, {0, 99}));
  CHECK(cca::checkPoolLiveAllocations(0, a, {in_a, again}));
  CHECK(!cca::checkPoolLiveAllocations(0, a, {in_a}) && !cca::checkPoolLiveAllocations(0, a, {in_a, in_b}));
  for (void* p : {in_a, in_b, outside, again})
    cca::raw_delete(p);
  destroy(b);

  // What a pool caches goes back to the driver from inside of it, alone or with all else, and when it dies.
  {
    Scope scope(a);
    cca::raw_delete(cca::raw_alloc(100 * MiB));
    CHECK(held_by(a) >= 100 * MiB);
    cca::emptyCache();
    CHECK(held_by(a) == 0);
    cca::raw_delete(cca::raw_alloc(100 * MiB));
    cca::emptyCache(a);
    CHECK(held_by(a) == 0);
    cca::raw_delete(cca::raw_alloc(100 * MiB));
  }
  const int64_t before = reserved();
  destroy(a);
  CHECK(reserved() <= before - int64_t(100 * MiB));
}

void under_pressure() {
  const Pool a{0, 3};
  cca::createOrIncrefPool(0, a);
  cca::raw_delete(cca::raw_alloc(5 * GiB));
  {
    Scope scope(a);
    void* p = cca::raw_alloc(7 * GiB); // of what the default pool caches
    CHECK(allocated_in(a) == 7 * GiB);
    OUT_OF_MEMORY(cca::raw_alloc(7 * GiB));
    cca::raw_delete(p);
  }
  cca::raw_delete(cca::raw_alloc(7 * GiB)); // and the other way round
  destroy(a);
  cca::emptyCache();

  // use_on_oom: also what is between blocks of the pool, and no failure is counted where that helps.
  const Pool b{0, 4};
  cca::resetAccumulatedStats(0);
  cca::createOrIncrefPool(0, b);
  cca::setUseOnOOM(0, b, true);
  void *first, *second;
  {
    Scope scope(b);
    first = cca::raw_alloc(6 * GiB);
    second = cca::raw_alloc(1800 * MiB);
    cca::raw_delete(first);
    first = cca::raw_alloc(3 * GiB + MiB);
  }
  void* third = cca::raw_alloc(2 * GiB);
  CHECK(third != nullptr && stats().num_ooms == 0);
  OUT_OF_MEMORY(cca::raw_alloc(2 * GiB));
  CHECK(stats().num_ooms == 1);
  for (void* p : {first, second, third})
    cca::raw_delete(p);
  destroy(b);
  cca::emptyCache();
  CHECK(reserved() == 0);
}

void kinds() {
  const Pool a{0, 5};
  cca::createOrIncrefPool(0, a);
  cca::setNoSplit(0, a);
  {
    Scope scope(a);
    void *p = cca::raw_alloc(MiB), *q = cca::raw_alloc(MiB);
    const auto segments = cca::snapshot(a).segments;
    CHECK(!CISTERN_TORCH_NO_SPLIT || (segments.size() == 2 && segments[0].blocks.size() == 1));
    cca::raw_delete(p);
    cca::raw_delete(q);
  }
  destroy(a);
}

// Custom gives out made-up addresses and counts. Of the interface only what a pool calls does anything.
struct Custom final : cca::CUDAAllocator {
  Custom() = default;
  int allocs = 0, frees = 0;
  enum { works, empty, throws, repeats } mood = works;
  void* last = nullptr;
  bool* destroyed = nullptr;
  ~Custom() override { *destroyed = true; }
  void* raw_alloc_with_stream(size_t n, cudaStream_t stream) override {
    if (mood == throws)
      throw std::runtime_error("of its own");
    if (mood == empty)
      return nullptr;
    if (mood == repeats) // memory that it gave out already
      return last;
    CHECK(c10::cuda::getCurrentCUDAStream().stream() == stream);
    static uintptr_t next = 0x500000000000;
    allocs++;
    last = reinterpret_cast<void*>(next);
    next += (n + 2 * MiB) / (2 * MiB) * (2 * MiB);
    return last;
  }
  void raw_delete(void*) override { frees++; }
  void* raw_alloc(size_t) override { return nullptr; }
  c10::DataPtr allocate(size_t) override { return {}; }
  void copy_data(void*, const void*, size_t) const override {}
  bool initialized() override { return true; }
#if CISTERN_TORCH_EMPTY_POOL
  void emptyCache(Pool) override {}
#else
  void emptyCache() override {}
#endif
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override { return {}; }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override {}
  void init(int) override {}
  double getMemoryFraction(c10::DeviceIndex) override { return 1; }
  void setMemoryFraction(double, c10::DeviceIndex) override {}
#if CISTERN_TORCH_EXPANDABLE_SIZES
  std::vector<cca::StreamSegmentSize> getExpandableSegmentSizes(c10::DeviceIndex) override { return {}; }
#endif
  void enable(bool) override {}
  bool isEnabled() const override { return true; }
  void cacheInfo(c10::DeviceIndex, size_t*) override {}
  void* getBaseAllocation(void* p, size_t*) override { return p; }
  void recordStream(const c10::DataPtr&, c10::cuda::CUDAStream) override {}
#if CISTERN_TORCH_SNAPSHOT_TRACES
  cca::SnapshotInfo snapshot(Pool, bool) override { return {}; }
#elif CISTERN_TORCH_SNAPSHOT_POOL
  cca::SnapshotInfo snapshot(Pool) override { return {}; }
#else
  cca::SnapshotInfo snapshot() override { return {}; }
#endif
  void beginAllocateToPool(c10::DeviceIndex, Pool, std::function<bool(cudaStream_t)>) override {}
  void endAllocateToPool(c10::DeviceIndex, Pool) override {}
  void releasePool(c10::DeviceIndex, Pool) override {}
  cca::ShareableHandle shareIpcHandle(void*) override { return {}; }
  std::shared_ptr<void> getIpcDevPtr(std::string) override { return {}; }
#if CISTERN_TORCH_HISTORY_SKIP
  void recordHistory(bool, cca::CreateContextFn, size_t, cca::RecordContext, bool, const std::vector<std::string>&) override {}
#elif CISTERN_TORCH_HISTORY_CLEAR
  void recordHistory(bool, cca::CreateContextFn, size_t, cca::RecordContext, bool) override {}
#else
  void recordHistory(bool, cca::CreateContextFn, size_t, cca::RecordContext) override {}
#endif
#if CISTERN_TORCH_REJECTION_OBSERVER
  void attachOomRejectionObserver(cca::OomRejectionObserver) override {}
#endif
  void attachOutOfMemoryObserver(cca::OutOfMemoryObserver) override {}
  void attachAllocatorTraceTracker(cca::AllocatorTraceTracker) override {}
  void enablePeerAccess(c10::DeviceIndex, c10::DeviceIndex) override {}
  cudaError_t memcpyAsync(void*, int, const void*, int, size_t, cudaStream_t, bool) override { return cudaSuccess; }
  std::shared_ptr<cca::AllocatorState> getCheckpointState(c10::DeviceIndex, Pool) override { return {}; }
  cca::CheckpointDelta setCheckpointPoolState(c10::DeviceIndex, std::shared_ptr<cca::AllocatorState>) override { return {}; }
  std::string name() override { return "custom"; }
};

#if CISTERN_TORCH_ACTIVE_POOL
// Until PyTorch 2.7 the allocator is that of the pool whose scope is open, which PyTorch says with it.
void custom_allocators() {
  bool destroyed = false;
  {
    Custom custom;
    custom.destroyed = &destroyed;
    void* p;
    {
      c10::cuda::MemPool pool(&custom);
      c10::cuda::MemPoolContext context(&pool);
      Scope scope(pool.id());
      p = cca::raw_alloc(30 * MiB);
      CHECK(custom.allocs == 1);
    }
    cca::raw_delete(cca::raw_alloc(MiB));
    CHECK(custom.allocs == 1);
    cca::raw_delete(p);
    cca::emptyCache();
    CHECK(custom.frees == 1 && !destroyed);
  }
  CHECK(destroyed);
}

void last_resort() {} // no pool is
#else
void custom_allocators() {
  const Pool id{0, 7};
  bool destroyed = false;
  auto owned = std::make_shared<Custom>();
  Custom* custom = owned.get();
  custom->destroyed = &destroyed;
  cca::createOrIncrefPool(0, id, std::move(owned));
  void *first, *second;
  {
    Scope scope(id);
    first = cca::raw_alloc(30 * MiB);
    CHECK(custom->allocs == 1 && cca::snapshot(id).segments.size() == 1);
    {
      c10::cuda::CUDAStreamGuard guard(some_stream());
      second = cca::raw_alloc(30 * MiB);
    }
    CHECK(custom->allocs == 2);
    custom->mood = Custom::empty;
    OUT_OF_MEMORY(cca::raw_alloc(300 * MiB));
    custom->mood = Custom::throws;
    THROWS(std::runtime_error, "of its own", cca::raw_alloc(300 * MiB));
    custom->mood = Custom::works;
  }
  cca::raw_delete(cca::raw_alloc(MiB));
  CHECK(custom->allocs == 2); // of the default pool
  cca::raw_delete(second);
  cca::emptyCache(id);
  CHECK(custom->frees == 1);
  destroy(id);
  CHECK(!destroyed); // some of its memory lives
  cca::raw_delete(first);
  cca::emptyCache();
  CHECK(destroyed == CISTERN_TORCH_POOL_OWNS);

  // The adapter itself as a pool's allocator is no other memory.
  const Pool self{0, 8};
  cca::createOrIncrefPool(0, self, std::shared_ptr<cca::CUDAAllocator>(cca::get(), [](cca::CUDAAllocator*) {}));
  {
    Scope scope(self);
    cca::raw_delete(cca::raw_alloc(MiB));
  }
  destroy(self);
}

// A pool that may be used when everything else is exhausted, and whose own allocator fails then: the failure that counts is that
// of the request.
void last_resort() {
  const Pool id{0, 10};
  bool destroyed = false;
  auto owned = std::make_shared<Custom>();
  Custom* custom = owned.get();
  custom->destroyed = &destroyed;
  cca::createOrIncrefPool(0, id, std::move(owned));
  void* kept;
  {
    Scope scope(id);
    kept = cca::raw_alloc(30 * MiB);
  }
  cca::resetAccumulatedStats(0);
  cca::setUseOnOOM(0, id, true);
  int ooms = 0;
  for (const auto mood : {Custom::repeats, Custom::empty, Custom::throws}) {
    custom->mood = mood;
    std::string words;
    try {
      cca::raw_alloc(100 * GiB);
    } catch (const std::exception& e) {
      words = e.what();
    }
    CHECK(words.find("CUDA out of memory. Tried to allocate 100.00 GiB") == 0);
    CHECK(words.find("allocator's already") == std::string::npos);
    CHECK(stats().num_ooms == ++ooms);
  }
  // What the allocator threw is no failure of a later request that has nothing to do with the pool.
  custom->mood = Custom::throws;
  OUT_OF_MEMORY(cca::raw_alloc(100 * GiB));
  cca::setUseOnOOM(0, id, false);
  OUT_OF_MEMORY(cca::raw_alloc(100 * GiB));
  CHECK(stats().num_ooms == ooms + 2);
  custom->mood = Custom::works;
  cca::raw_delete(kept);
  destroy(id);
  cca::emptyCache();
  CHECK(destroyed == CISTERN_TORCH_POOL_OWNS);
}
#endif

void captures(bool warm) {
  const Pool graph{5, 0}, mempool{0, 9};
  const auto stream = some_stream(), side = some_stream();
  c10::cuda::CUDAStreamGuard guard(stream);
  if (warm) { // torch.compile runs a function in the pool before it captures it
    Scope scope(graph);
    cca::raw_delete(cca::raw_alloc(10 * MiB));
  }
  cca::createOrIncrefPool(0, mempool);
  cca::beginAllocateToPool(0, graph, captured); // PyTorch does that before the capture begins
  test_capture(stream.stream(), 1);
  void *p = cca::raw_alloc(20 * MiB), *q = cca::raw_alloc(MiB), *in_mempool;
  cca::raw_delete(p);
  test_capture(side.stream(), 1);
  {
    c10::cuda::CUDAStreamGuard joined(side);
    cca::raw_delete(cca::raw_alloc(5 * MiB));
  }
  std::thread([&] {
    c10::cuda::CUDAStreamGuard same(stream);
    cca::raw_delete(cca::raw_alloc(5 * MiB));
  }).join();
  {
    Scope inner(mempool);
    in_mempool = cca::raw_alloc(6 * MiB);
  }
  {
    c10::cuda::CUDAStreamGuard eager(c10::cuda::getDefaultCUDAStream(0));
    cca::raw_delete(cca::raw_alloc(64 * MiB));
  }
  test_capture(stream.stream(), 0);
  test_capture(side.stream(), 0);
  cca::endAllocateToPool(0, graph);
  CHECK(allocated_in(graph) == MiB && allocated_in(mempool) == 6 * MiB);
  // The graph uses it at each launch, free or not: also of the other pool.
  cca::raw_delete(in_mempool);
  const size_t held = held_by(graph), beside = held_by(mempool);
  CHECK(held >= 20 * MiB && beside >= 6 * MiB);
  cca::emptyCache();
  cca::emptyCache(mempool);
  CHECK(held_by(graph) == held && held_by(mempool) == beside);

  // A checkpoint: what is made after it is gone again, what died since is back.
  const auto state = cca::getCheckpointState(0, graph);
  cca::raw_delete(q);
  cca::beginAllocateToPool(0, graph, captured);
  test_capture(stream.stream(), 1);
  void* later = cca::raw_alloc(2 * MiB);
  test_capture(stream.stream(), 0);
  cca::endAllocateToPool(0, graph);
  cca::releasePool(0, graph);
  {
    cca::CheckpointDelta delta = cca::setCheckpointPoolState(0, state);
    CHECK(delta.ptrs_freed == std::vector<void*>{later} && delta.dataptrs_allocd.size() == 1);
    CHECK(delta.dataptrs_allocd[0].get() == q && delta.dataptrs_allocd[0].get_deleter() == cca::get()->raw_deleter());
    CHECK(cca::checkPoolLiveAllocations(0, graph, {q}));
  }
  CHECK(cca::checkPoolLiveAllocations(0, graph, {}));
  THROWS(c10::Error, "checkpoint", cca::setCheckpointPoolState(0, nullptr));
  destroy(mempool);
  cca::releasePool(0, graph);
}

void failed_captures() {
  const auto stream = some_stream();
  c10::cuda::CUDAStreamGuard guard(stream);
  // One that never begins: nothing of the stream goes to its pool.
  cca::beginAllocateToPool(0, {6, 0}, captured);
  cca::raw_delete(cca::raw_alloc(MiB));
  CHECK(held_by({6, 0}) == 0);
  // PyTorch leaves the scope of a capture that fails open; the next on the same stream works.
  cca::beginAllocateToPool(0, {7, 0}, captured);
  test_capture(stream.stream(), 1);
  void* p = cca::raw_alloc(MiB);
  CHECK(allocated_in({7, 0}) == MiB && allocated_in({6, 0}) == 0);
  test_capture(stream.stream(), 0);
  cca::raw_delete(p);
  for (unsigned long long id : {6, 7}) {
    cca::endAllocateToPool(0, {id, 0});
    cca::releasePool(0, {id, 0});
  }
  cca::emptyCache();
  CHECK(reserved() == 0);
}

} // namespace

int main(int, char** argv) {
  install(argv);
  cca::init(2);
  scopes();
  under_pressure();
  kinds();
  custom_allocators();
  last_resort();
  captures(false);
  captures(true);
  failed_captures();
  return done();
}
